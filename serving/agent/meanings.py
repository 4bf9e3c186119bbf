"""The meaning of each finding, and the advice: for the agent's `/findings`, and for the reference.

A code of `exporter.publish.judge` without an entry here fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from exporter.publish.judge import Code


class Meaning(Struct, frozen=True):
    """The explanation of a finding, and the advice: Markdown, one or two sentences each."""

    says: str
    do: str


_NOTHING = "Nothing."
MEANINGS: Mapping[Code, Meaning] = {
    Code.DAMAGED: Meaning(
        "A file of a version or delta is missing, cut or changed; its manifest says otherwise.",
        "Run the command of the finding. It removes what no server needs, or publishes again what one does. "
        "Of a copy: what is damaged lies in the store, and the copy waits before it until a new base, or a "
        "merger, takes its place; where publications are signed, the command needs the publisher's key.",
    ),
    Code.DISK_FULL: Meaning(
        "What comes next in the store has no room on the disk of the copy. Replicas serve what was fetched.",
        "Run the command of the finding: where the copy has more than the two bases that it needs, it "
        "removes older ones in the store, and the agent then those here; else it shows what else is on the "
        "disk, for a person to remove. The agent goes on by itself.",
    ),
    Code.NO_WAY: Meaning(
        "No chain of deltas leads from a base to the newest position: servers that load the base stay "
        "behind.",
        "Publish a new base, as the command says. Servers load it and need no delta before it.",
    ),
    Code.NOT_FINITE: Meaning(
        "A delta holds NaN or infinity, and the base was exported to refuse that: servers stay before it.",
        "Merge past it if what follows is finite again, else roll back. The command is the right one of "
        "both.",
    ),
    Code.NOT_LOADABLE: Meaning(
        "A file, or a directory without a SavedModel, has the greatest number: servers take it for the "
        "newest "
        "version, and load no other.",
        "Move it away: the command puts a dot before its name.",
    ),
    Code.UNREADABLE: Meaning(
        "Fewer users may read a published file than may look into the model's directory: a server of another "
        "user sees the version and fails to load it.",
        "Give the right to read, as the command does, and look for what took it: a `umask`, or a copy.",
    ),
    Code.CHECKPOINT: Meaning(
        "The checkpoint that the next export would read is damaged, incomplete or not there.",
        "Follow the hint. If the trainer is writing it just now, look again later.",
    ),
    Code.UNEXAMINED: Meaning(
        "Something could not be looked at, so nothing is known of it. `check` says what.",
        "Give this user the right to read it, or run the doctor as one that has it.",
    ),
    Code.AGENT_DOWN: Meaning(
        "The agent that the doctor was told to ask (`--agent`) does not answer, or not as an agent does.",
        "Start it again: it keeps no state. Its servers answer meanwhile, and get no further deltas.",
    ),
    Code.SILENT: Meaning(
        "None of several replicas answers the agent.",
        "Look at the network between them, and whether the servers run. It is unlikely that all "
        "servers failed at once.",
    ),
    Code.GOLDEN: Meaning(
        "The answers at the position that the canary has approved fail golden requests. No delta is the "
        "cause.",
        "Compare the requests with the model: a new base may answer otherwise. Else export a base that "
        "passes.",
    ),
    Code.ROLLED_BACK: Meaning(
        "The log is held at a rollback, a person's or a canary's. What is published later waits.",
        "Train on and repair what was wrong; then `export-model resume`.",
    ),
    Code.DIFFERS: Meaning(
        "An audit found values on a replica that are not those that were published at its position.",
        "Restart the server, which loads the base again. With `--rebuild-config` the agent does that.",
    ),
    Code.HOLD_UNREADABLE: Meaning(
        "The hold is there and says no position: servers follow no delta at all. A rollback that was killed "
        "leaves a link that leads nowhere; anything else was written by hand.",
        "Run the rollback again, or lift the hold: `export-model resume`.",
    ),
    Code.PUBLICATIONS_HELD: Meaning(
        "A person's hold stands, and what is published beyond it waits.",
        "`export-model resume`, when it may be served.",
    ),
    Code.UNSEEN: Meaning(
        "The model's directory cannot be read, or what was there has vanished. Replicas answer as before.",
        "Look whether the volume is mounted, and whether the agent may read it.",
    ),
    Code.BASE_WANTED: Meaning(
        "Replicas refuse a delta, and no other leads past it.",
        "Publish a new base: the same export with `--new-base always --again`.",
    ),
    Code.QUARANTINED: Meaning(
        "Every replica that needs a delta refuses it: it is damaged, or does not fit.",
        "`export-model verify` says what is wrong with it. If another delta leads past it, nothing else "
        "is to do.",
    ),
    Code.NO_REPLICA: Meaning(
        "The agent knows no server: a name resolves to no address.",
        "Look at the name that `--target` gives, and whether servers have started.",
    ),
    Code.DOWN: Meaning(
        "A server does not answer.",
        "Look whether it runs and listens there. The agent finds it within seconds when it is back.",
    ),
    Code.ABSENT: Meaning(
        "A server answers, and serves no version of the model: it does not know the name, or could not "
        "load any.",
        "`serve-model status` prints why loading failed.",
    ),
    Code.NOT_UPDATABLE: Meaning(
        "A server serves a version that takes no delta of what is published: a plain version, or one of "
        "another "
        "log, as where a model was begun anew in the same place.",
        "Let the server load what is published: restart it, or `serve-model reload`.",
    ),
    Code.STUCK: Meaning(
        "No delta leads on from the position of a server: those in between are gone, or were never there.",
        "`export-model verify` finds out whether the log is whole. Restart the server: it loads the "
        "newest base.",
    ),
    Code.REFUSES: Meaning(
        "A replica refuses a delta that others may have taken. The agent tries it again, a minute later "
        "at most.",
        "Read the reason. A server that sees the directory late, or with other rights, gets over it by "
        "itself.",
    ),
    Code.LATE: Meaning(
        "A server lacks what is published for longer than it may (`--patience`, `--fresh-within`), or "
        "has not "
        "loaded the newest base.",
        "`serve-model update` brings it on. Where an agent runs, read its last events: they name the cause.",
    ),
    Code.PUBLISHER_SILENT: Meaning(
        "Nothing was published for three times the longest of the intervals that are usual for this model, "
        "or for longer than the agent's `--every publication` says.",
        "The export with `--dry-run`, as the command has it where this user has exported the model, says how "
        "far the trainer has written, and what it would publish. If the model is published more seldom from "
        "now on, give the agent `--every publication=TIME`.",
    ),
    Code.OVERLAY: Meaning(
        "The room for changed rows beside mapped tables is nearly used up. When it is, a server refuses "
        "deltas.",
        "Nothing where a watch runs: it publishes a new base. Else publish one; `--overlay-rows` gives "
        "more room.",
    ),
    Code.TWO_PUBLISHERS: Meaning(
        "Several machines publish what trainers make of this model in turn, as their manifests say.",
        "`export-model history` says who published what. Find out which one is meant, and end the other: two "
        "trainers overwrite each other's values, and two exporters of one trainer do the same work.",
    ),
    Code.RESTARTS: Meaning(
        "A server came back three times or more within ten minutes, after nothing had listened there, at an "
        "earlier position, or loading again. One that ends before it listens does not come back: it is down.",
        "Read its log, and the machine's: two bases are in memory when a version is exchanged. The finding "
        "goes by itself, within ten minutes, once the server stays up.",
    ),
    Code.CANARY_LATE: Meaning(
        "Publications wait for a canary, for longer than it should need.",
        "Look at the agent that has it: does it run, and can a replica go first? If it is given up: "
        "`export-model resume --lift-canary`.",
    ),
    Code.UNTRUSTED: Meaning(
        "Keys are trusted, and something lies beside what they have signed: unsigned, signed by another key, "
        "altered or copied. Or a hold would lead back. It is left; what was signed is served.",
        "Find out who wrote it: [signed publications](../signed-publications.md).",
    ),
    Code.STORE: Meaning(
        "The agent cannot read the store that it fetches from, or has had no answer for 15 seconds. Replicas "
        "serve what was fetched.",
        "Look at the reason, which has the call and its answer: credentials, the network, the name of the "
        "bucket. The command asks the store once more, and says what to correct: type it on the agent's "
        "machine, as its user, since elsewhere the store may well be seen.",
    ),
    Code.WITHHELD: Meaning(
        "Publications of the store do not fit after the rollback that this copy made by itself.",
        "The command, if there is one; else let the trainer publish further.",
    ),
    Code.HELD: Meaning(
        "A person's hold stands. Servers follow no delta beyond it, and new versions are refused.",
        "`export-model resume`, when it may go on.",
    ),
    Code.BEYOND_HOLD: Meaning(
        "A server stands beyond the hold: it took the deltas before that was set.",
        "Nothing, if its values are good; else a rollback leads it back.",
    ),
    Code.LOADING: Meaning(
        "A server serves nothing yet, and loads a version.",
        "Wait. If it takes long, `serve-model status` shows its state.",
    ),
    Code.UNKNOWN: Meaning(
        "Whether a replica is fresh cannot be said, because what is published cannot be read.",
        f"See [{Code.UNSEEN.value}](#{Code.UNSEEN.value}).",
    ),
    Code.FOREIGN: Meaning(
        "A version has no manifest: this program did not publish it, or its manifest is lost. Servers "
        "load it in "
        "the place of the newest one that has.",
        "Keep it if it is meant; else move it away, as the command does.",
    ),
    Code.ROOM: Meaning(
        "The next base, as large as the newest, does not fit on the model's disk; hard-linked data is "
        "not counted.",
        "Make room: fewer versions (`--keep`), or another disk. Deltas go on meanwhile.",
    ),
    Code.ORPHANS: Meaning(
        "Deltas are there whose bases are all gone: no server can take them.",
        "Nothing: the next increment that is exported removes them. The command does it now.",
    ),
    Code.LEFT_OVERS: Meaning(
        "Exporters that were killed left files behind, which cost space alone.",
        "Nothing: the next export removes what it may. The command does it now.",
    ),
    Code.CLOCK: Meaning(
        "Times differ: of a file system and this machine, or of a publication that lies in the future. "
        "Retention "
        "and ages go by them.",
        "Set the clock that is wrong.",
    ),
    Code.DURABILITY: Meaning(
        "The file system cannot say when names are on disk: a power cut may lose the last publication, "
        "never half "
        "of one.",
        "Keep the model on a local disk or NFS, and push it from there, if that is not enough.",
    ),
    Code.KEPT_OUT: Meaning(
        "A directory above keeps other users out: a server that runs as one of them reads nothing.",
        "Give the right, as the command does, unless the server runs as this user.",
    ),
    Code.NOT_WRITABLE: Meaning(
        "This user cannot publish here.",
        "Nothing, if another one publishes; else the command shows, or takes, who may.",
    ),
    Code.COPIES: Meaning(
        "A full export copies the checkpoint's values instead of linking them, which costs time and space.",
        "Put checkpoints and model on one file system, and let this user read the shards.",
    ),
    Code.FETCHED_WHOLE: Meaning(
        "This copy of a store fetched its newest base, though such a base can be merged here from the base "
        "and the deltas before it. The finding says why: these were not here, or not the same, or what was "
        "merged differed.",
        "Nothing, if it happened once: the next base is made here again. If parts are lacking each time, "
        "keep them longer where they are published (`--keep`, no `push --prune` right after a base), or let "
        "the copy look more often. If files differ, the command says whether those here are damaged.",
    ),
    Code.OVERWRITTEN: Meaning(
        "A version holds a hard link to a trainer's file, and the trainer has written into that file: it "
        "copied another checkpoint over it (`cp`, `shutil.copyfile`, `rsync` in place). Servers that load "
        "the version fail, or answer wrongly. The file's times say so; `verify` reads its bytes.",
        "Publish a new version with `--data compact`, which holds no file of the trainer.",
    ),
    Code.TABLE_FULL: Meaning(
        "A table by keys has little room for new keys left. When it is full, a delta is refused.",
        "Publish a new base, which has more room. A watch does so by itself.",
    ),
    Code.WILD: Meaning(
        "Rows of the newest delta have a Euclidean norm beyond `--max-norm`. With `--on-wild hold-row` "
        "servers keep the rows that they had.",
        "Look at the training: a learning rate that is too high, or slots that were lost. To take the values "
        "back, roll back.",
    ),
    Code.TAG_GONE: Meaning(
        "A tag names a position whose values cannot come back: somebody removed what led there.",
        "Delete the tag, as the command does, or name another position.",
    ),
    Code.BUDGET: Meaning(
        "The deltas of `--delta-budget` lately exceeded it, because more had to go, or sent less than a "
        "quarter of the change.",
        "Give a larger budget, or a longer `--delta-budget age`. What all changes would take: "
        "`history --json`.",
    ),
    Code.NOT_MAPPED: Meaning(
        "Servers here do not map the tables that were made for it, or map them where that is dangerous.",
        "Export again with the directory as servers see it (`--served-at`), as the command says.",
    ),
    Code.UNASKED: Meaning("The agent has not asked a replica yet.", _NOTHING),
    Code.CANARY: Meaning("The canary decides about what is published.", _NOTHING),
    Code.UPDATING: Meaning("A replica takes what was published a moment ago.", _NOTHING),
    Code.FRESH: Meaning("A replica answers from the newest publication.", _NOTHING),
}
