"""What the code cannot tell of its errors: why each happens to people, and what they do about it.

A class of errors.py without an entry here fails the making of the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter import errors
from exporter.errors import ExportError


@dataclass(frozen=True, slots=True)
class Advice:
    """Why an error happens, and what to do: Markdown, one or two sentences each."""

    why: str
    do: str


@dataclass(frozen=True, slots=True)
class Group:
    """Errors that one meets in the same situation: the roots, and the classes below them."""

    title: str
    sees: str
    roots: tuple[type[ExportError], ...]


GROUPS = (
    Group(
        "A command or an argument is refused",
        "The command ended at once, before it read a checkpoint or a model.",
        (errors.UsageError,),
    ),
    Group(
        "A checkpoint or a file is not read",
        "Files of a trainer, a published model or a store are missing, damaged, or of another kind.",
        (errors.CheckpointError, errors.Unreachable),
    ),
    Group(
        "The graph is refused",
        "The checkpoint was read; what `--model` names, or the graph beside it, cannot be served.",
        (errors.GraphError,),
    ),
    Group(
        "Variables and tensors do not fit",
        "Graph and checkpoint were read, and do not belong together as they are.",
        (errors.MappingError,),
    ),
    Group(
        "A delta, a position or a hold stops you",
        "A delta cannot be made or applied, or the model is held.",
        (errors.PositionError, errors.NoNewBase),
    ),
    Group(
        "A check failed",
        "Files, values, answers or signatures are not what they should be. Nothing was published.",
        (errors.VerificationError,),
    ),
    Group(
        "The output cannot be written",
        "The disk, its rights, or another exporter stands in the way.",
        (errors.PublishError,),
    ),
    Group(
        "A model server is not reached, or refuses",
        "The command called a server, or looked for what a server is to serve.",
        (errors.ServerError,),
    ),
    Group(
        "A library, a worker or the program fails",
        "Something that the command needs is not installed, or ended with an error of its own.",
        (errors.ExportError,),
    ),
)
"""A class belongs to the first group that has a root of it; the last group takes what is left."""

ADVICE: dict[type[ExportError], Advice] = {
    errors.ExportError: Advice(
        "None of the other classes describes the failure: standard output cannot be written, or the program "
        "itself has a fault.",
        "If the text begins with `unexpected`, it is a bug: run again with `--debug` and report the "
        "traceback.",
    ),
    errors.UsageError: Advice(
        "An option is malformed, or two options contradict each other, or a file that an option names "
        "cannot be read. The command stopped before it read anything else.",
        "Change the command line; every option is in the [reference](export-model.md).",
    ),
    errors.RoleUnknown: Advice(
        "`TF_CONFIG` or another variable that launchers set describes a cluster, and does not say clearly "
        "which of its nodes this is. Exporting on every node would publish the same thing several times.",
        "Correct the variable, or say `--despite role` where a single node is meant to export.",
    ),
    errors.CheckpointError: Advice(
        "The operating system refuses to read or list the file.",
        "Look at the `cause:` line: permissions, a network file system that is gone, a path that is no "
        "directory.",
    ),
    errors.CheckpointNotFound: Advice(
        "The directory is empty or wrong, training has not saved yet, or the only checkpoint there is "
        "still being written (an index without all its shards is not complete).",
        "List what is there with `export-model inspect DIR`. With `--watch` the command waits for the "
        "first checkpoint.",
    ),
    errors.MissingShard: Advice(
        "The checkpoint was copied without all its `.data-*` files, or a copy is still running.",
        "Copy the missing files beside the index, or name an older complete checkpoint by its prefix.",
    ),
    errors.TruncatedFile: Advice(
        "A copy ended early, or the disk of the trainer was full while it saved.",
        "Copy the checkpoint again; if the original is short as well, take an older one.",
    ),
    errors.CorruptFile: Advice(
        "A checksum does not match, or the structure of the file contradicts itself. Bytes were changed "
        "after they were written: a bad disk, a broken copy, a tool that edited the file, or a file that "
        "is something else than its name says.",
        "Copy it again and compare. A damaged delta or version is found and named by `export-model doctor "
        "MODEL`.",
    ),
    errors.UnsupportedFormat: Advice(
        "The file is sound, and of a kind that is not read: another version, big-endian, compressed in "
        "another way, an encrypted archive, a SavedModel in chunks.",
        "Save it again as the text says. A newer format version needs the `export-model` that wrote it, "
        "or a newer one.",
    ),
    errors.LfsPointer: Advice(
        "The repository keeps large files in Git LFS, and was cloned without them: in their places are small "
        "text files, which say what to fetch.",
        "`git lfs install`, then `git lfs pull` in the clone.",
    ),
    errors.UnsafeArchive: Advice(
        "An archive has pickled objects, links or paths that lead out of it, or it unpacks to far more than "
        "it holds, or Keras takes time or memory without measure to make its model. The exporter ran no code "
        "from it.",
        "Save the weights again with the trainer. A model that is large, and yours, is read with "
        "`--allow code`; nothing else makes the exporter read such a file.",
    ),
    errors.CheckpointChanged: Advice(
        "The trainer pruned or replaced the checkpoint while it was read. Nothing was published.",
        "Run the command again; `--watch` does that by itself. If it happens often, let the trainer keep "
        "more checkpoints.",
    ),
    errors.StoreUnavailable: Advice(
        "An object store did not answer, or refused what it was asked: a wrong key, a wrong region, a name "
        "that does not resolve, a network that swallows packets. The message has the object that was asked "
        "for, the `cause:` line the answer.",
        "Follow the hint: it names the variable to look at, of those that are set. An agent asks again by "
        "itself.",
    ),
    errors.GraphError: Advice(
        "The graph in the `.meta` or SavedModel contradicts itself (edges to nodes that are not there, "
        "doubled names, collections that are no JSON).",
        "Check that the file was written by TensorFlow and not edited; a builder (`--model file.py:fn`) "
        "needs no such file.",
    ),
    errors.BuilderError: Advice(
        "The Python function that `--model` names raised, could not be imported, or returned something "
        "that is not inputs and outputs.",
        "Run it alone in Python. `--debug` shows its traceback; what it may return is in the guide on "
        "builders.",
    ),
    errors.UnknownTensor: Advice(
        "`--input`, `--output`, `--feed` or `--signatures` names a tensor that the graph does not have, "
        "often for want of a scope or of `:0`.",
        "List the tensors: `export-model inspect GRAPH --tensors`. The text names the nearest ones.",
    ),
    errors.CodeRefused: Advice(
        "A Keras archive holds a `Lambda` or a class that is not Keras' own. Loading it would run code "
        "from the archive.",
        "Name the module that defines the class with `--custom-objects`, or trust the archive with "
        "`--allow code`.",
    ),
    errors.AccessRefused: Advice(
        "A graph asks for something outside of the model: a file of another directory, which nobody named "
        "for it (a vocabulary of the `.meta` beside a checkpoint), or an operation that reads or writes "
        "files, calls other processes or runs code, on the server or where outputs are compared here. An "
        "operation of TensorFlow that nobody has judged yet counts as one that may do anything.",
        "If the graph is yours, name it with `--model`, or allow what it asks for: `--allow files=DIR` for "
        "files, `--allow file-ops` for operations that are served, `--allow code` for what runs here.",
    ),
    errors.NotServable: Advice(
        "What the output depends on does not exist while serving: an input pipeline, a queue, a "
        "`py_function`, a file reader, or an operation that cannot be updated in place.",
        "Choose outputs behind it, make it an input with `--input`, or freeze it with `--feed`.",
    ),
    errors.ForeignOperations: Advice(
        "The graph was written for another TensorFlow, such as DeepRec, and an output needs operations that "
        "only that one has. Lookups of embedding variables are converted, also those of groups of tables "
        "that neither clip rows nor make sequences; fused lookups, and reads of sizes, frequencies and "
        "versions are not. All that is left is named, with its node.",
        "Write the graph with `tf.nn.embedding_lookup` and `tf.nn.embedding_lookup_sparse`, choose outputs "
        "that need none of it, or feed a tensor behind it with `--input`.",
    ),
    errors.MissingAsset: Advice(
        "A lookup table of the graph is filled from a vocabulary file that is not where the graph looks "
        "for it.",
        "Put the file there, or beside the `.meta` if its path is relative.",
    ),
    errors.MappingError: Advice(
        "Graph and checkpoint fit by name, and a value cannot become what is served: too large for the "
        "type of `--cast`, or rows that cannot be laid out anew.",
        "Leave the variable out of `--cast`, or serve the partitions that the trainer has.",
    ),
    errors.MissingTensors: Advice(
        "The graph has variables that the checkpoint does not: names were changed by a scope, the "
        "checkpoint is of another model, or averages are asked for that were not saved.",
        "`export-model inspect CHECKPOINT --unmatched MODEL` prints both left-over lists side by side; "
        "`--rename PATTERN=NAME`, or a `FILE` of names, joins them.",
    ),
    errors.ShapeMismatch: Advice(
        "A variable and its tensor have different shapes or types: other hyper-parameters "
        "(`--model-arg`), another vocabulary, or a rename that joins the wrong pair.",
        "Build the graph with the values that training used.",
    ),
    errors.ObjectMismatch: Advice(
        "An object-based checkpoint (TensorFlow 2, Keras) is matched by walking both graphs of objects, "
        "and they differ: layers in another order, one more or one less, other attribute names.",
        "Build the model as the trainer did; if only names changed, say so with `--rename`.",
    ),
    errors.TrainingModeServed: Advice(
        "The graph computes as in training. Either batch normalisation uses the statistics of each request's "
        "own batch, although the checkpoint holds moving averages for inference: answers would depend on "
        "what else is in the batch. Or dropout or noise is on, or may be: answers would be random.",
        "Build the graph with `training=False`, freeze the placeholder with `--feed is_training=false` or "
        "`--feed keep_prob=1.0`, or say `--allow batch-statistics` or `--allow dropout` if it is meant.",
    ),
    errors.AmbiguousRename: Advice(
        "Two `--rename` rules give one variable different names, or two variables claim one tensor.",
        "Make the patterns more specific; they match whole names. `--dry-run` prints what matches.",
    ),
    errors.NoCertainMatch: Advice(
        "The file stores values without the graph's names (`.npz` lists, weights files by layer number), "
        "and shapes and layer names do not decide which value is whose. Guessing would publish a wrong "
        "model.",
        "Write the pairs into a file: `inspect --unmatched` begins the table for `--rename`. "
        "`--by-order` trusts a list's order.",
    ),
    errors.PartitionStrategyUnknown: Advice(
        "An embedding table has other partitions in the graph than in the checkpoint, and the order of "
        "its rows depends on whether training looked it up by `mod` or by `div`.",
        "Put the trainer's `.meta` beside the checkpoint, which tells it, or say `--partition-strategy "
        "NAME=mod`.",
    ),
    errors.PositionError: Advice(
        "What is to be published does not continue the log of deltas: another graph, vocabulary or option "
        "than the base was made with.",
        "Publish a new base (`--new-base always`, or `--new-base if-needed` with `--incr`).",
    ),
    errors.NotUpdatable: Advice(
        "Nothing is published under the model base path, or its newest version takes no deltas.",
        "Publish a base with `--incr` or `--new-base`.",
    ),
    errors.DeltaGap: Advice(
        "Between two positions a delta is missing: it was removed by hand, is damaged, or was merged away "
        "under a replica that is far behind.",
        "`export-model doctor MODEL` says which; a replica that is behind the gap has to load the newest "
        "version.",
    ),
    errors.StaleDelta: Advice(
        "The state is at the delta's end, or beyond it. Applying it would go back.",
        "Nothing has to be done: take the next delta.",
    ),
    errors.ForeignLineage: Advice(
        "The delta was published for another base: a directory was copied between models, or restored "
        "from a backup.",
        "Remove the directory that the text names.",
    ),
    errors.SchemaChanged: Advice(
        "The served variables, their types, shapes or export options are not those that the log began "
        "with, so no delta can express the change.",
        "Begin a new log: `--new-base if-needed` with `--incr`, or `--new-base always`.",
    ),
    errors.TableFull: Advice(
        "More keys came into a dynamic table than its base left room for, or many keys fall in one place of "
        "its index.",
        "Publish a new base, with more room if the table grows fast: `--table-head-room`. With `--watch` "
        "that happens by itself, and the new base holds the increments so far.",
    ),
    errors.OverlayFull: Advice(
        "The base maps its tables, and keeps the rows that deltas change in an overlay of bounded size; more "
        "rows have changed since the base was published.",
        "Publish a new base, whose overlay is empty: the same export with `--new-base always --again`, or "
        "with a larger `--overlay-rows`. With `--watch` or `--new-base if-needed` that happens by itself.",
    ),
    errors.PositionUnknown: Advice(
        "The position that was named is between two deltas, before the first base, or its deltas were "
        "merged or removed.",
        "`export-model history MODEL` and `export-model verify MODEL` list positions that can be named.",
    ),
    errors.ChainEnds: Advice(
        "The newest version takes deltas, and the new one would not. Servers would load it and get no more "
        "deltas.",
        "Export with `--incr` or `--new-base`; say `--despite deltas` if deltas are to end.",
    ),
    errors.ModelHeld: Advice(
        "The model was rolled back, by a person or by the agent's canary, or somebody set a hold; what is to "
        "be published would pass it.",
        "Lift the hold with `export-model resume MODEL` when it is safe; `--despite hold` publishes a "
        "version all the same.",
    ),
    errors.NothingChanged: Advice(
        "`save_incr_model=True` asks for a delta, and the trainer has saved nothing since the last one.",
        "Save first. `export_incremental()` does nothing in this case instead.",
    ),
    errors.PositionMoved: Advice(
        "Another process published to the same model between planning and publishing. Nothing of this "
        "command was published.",
        "Run it again. Two exporters of one model are safe and waste work.",
    ),
    errors.VerificationError: Advice(
        "What was staged, or what is published, is not what its manifest says; or `--verify outputs` "
        "found other answers than the source graph's.",
        "Before publishing: nothing was published, run again. In a published directory: `export-model "
        "doctor MODEL`.",
    ),
    errors.ManifestError: Advice(
        "A `manifest.json` (or the hold) is missing, damaged, or of a format that this release does not "
        "know.",
        "Remove the directory that the text names and publish again; of a newer format, use the newer "
        "`export-model`.",
    ),
    errors.NotTrusted: Advice(
        "Keys are trusted (`--trust`), and none of them has signed a publication for the place where it lies "
        "and for this model: it is not signed, another key signed it, it was altered, or it was copied from "
        "elsewhere. Or a hold would lead servers back, and holds are not signed.",
        "Find out who published it: `export-model history`, and the store's own log of who wrote. If it is "
        "yours, publish with `--sign-key`, or trust its key, too. If it is not, remove it, and keep out "
        "whoever put it there. What a trusted key signed is taken as before: "
        "[signed publications](../signed-publications.md).",
    ),
    errors.NotFinite: Advice(
        "A base that was exported with `--add nan-check` refuses deltas with NaN or infinity, and rows in 8 "
        "bits have no codes for them. So none is published: the trainer's newest state holds some, or the "
        "values that a merged delta, a rollback or a resumption would bring.",
        "Servers stay where they are, and nothing is lost: the next `--incr` holds everything since. Look at "
        "the row that the `cause:` line names, and correct the training or restart it from an older "
        "checkpoint. If servers are to get such values after all, publish a base without `--add nan-check` "
        "and `--cast int8`.",
    ),
    errors.WildValues: Advice(
        "Rows of the trainer's newest state have a Euclidean norm beyond the bound of `--max-norm`, and "
        "`--on-wild refuse` was given.",
        "Servers stay where they are, and nothing is lost: the next `--incr` holds everything since. Correct "
        "the training or restart it from an older checkpoint; with `--on-wild hold-row` servers keep the "
        "rows that they have and get all others.",
    ),
    errors.PublicationDamaged: Advice(
        "An object of a publication in a store is cut, changed or exchanged. Nothing of it was fetched, and "
        "the copy stays at the publication before.",
        "`export-model doctor URL` has the command that publishes a new base in its place. Copies then pass "
        "the damaged publication by.",
    ),
    errors.PublishError: Advice(
        "Writing failed for a reason other than space and permission; the `cause:` line is the operating "
        "system's.",
        "Look at the file system; nothing was published, and the command can be run again.",
    ),
    errors.TargetNotWritable: Advice(
        "The model base path is read-only, belongs to somebody else, or is not a directory; or the file "
        "system has no locks.",
        "Choose another `--out`, or change its permissions.",
    ),
    errors.DiskFull: Advice(
        "The disk or a quota is full. The staging directory has been removed.",
        "Free space; `--keep N` removes old versions, `--data link` copies nothing.",
    ),
    errors.TargetBusy: Advice(
        "Another command holds the model's lock, for longer than this one waits.",
        "Wait for it. The lock is the kernel's: a process that died holds none.",
    ),
    errors.LinkRefused: Advice(
        "`--data link` allows no copies, and the checkpoint lies on another file system, or belongs to "
        "another user (`fs.protected_hardlinks`).",
        "`--data auto` links where it can and copies where it must.",
    ),
    errors.VersionExists: Advice(
        "`--version` names a number that is taken, or that is below the newest: servers would not load it.",
        "Leave `--version` out.",
    ),
    errors.Unreachable: Advice(
        "A path cannot even be looked at: permissions of a directory above it, a dead mount, a loop of "
        "links.",
        "Make it reachable for this user.",
    ),
    errors.ExportFailed: Advice(
        "A training hook runs exports in a process of its own, and one of them failed or was not done in "
        "time.",
        "The training's log has the export's own error. The checkpoint is there: run the same export by "
        "hand.",
    ),
    errors.TensorFlowNeeded: Advice(
        "Builders, bases that take deltas, `--verify outputs` and `serve-model run` run in TensorFlow. It is "
        "not installed in this environment, or older or newer than what this program is tested with.",
        "Install a TensorFlow that fits, or run the command where there is one: see "
        "[Which TensorFlow](../which-tensorflow.md).",
    ),
    errors.EngineFailed: Advice(
        "The engine that `--engine` names cannot be reached, lost its workers too often, or is silent.",
        "What was done has its receipts: run the same command again, on this engine or another one "
        "(`--engine local`).",
    ),
    errors.NoNewBase: Advice(
        "`--incr --new-base merged` published the delta, and could not make a base of it: the old base or a "
        "delta is damaged, the disk is full, or the model was held meanwhile.",
        "Servers take the delta. What stood in the way of the base is in the message, after `no new base`: "
        "mend that, then `export-model merge MODEL --rebase`.",
    ),
    errors.ServerError: Advice(
        "A model server has no version that can be served, or did not take an update.",
        "`serve-model status HOST` shows the state of each version; `export-model verify MODEL` checks "
        "the files.",
    ),
    errors.ModelPathNotFound: Advice(
        "The directory to serve does not exist, or is one version instead of the directory above it.",
        "Name the model base path, which holds the version directories.",
    ),
    errors.CallFailed: Advice(
        "A call to a model server ended in another status than OK: nobody listens there, the model has "
        "another name, the request does not fit, or the deadline passed.",
        "The text names the server's status. After DEADLINE_EXCEEDED of an update, call again: updates "
        "are idempotent.",
    ),
}
