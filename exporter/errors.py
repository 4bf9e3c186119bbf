"""The error tree: every failure a user can meet, with its exit code and its next command.

    ExportError                      1   anything not listed below
    ├── UsageError                   2   the command line or the arguments are wrong
    │   └── RoleUnknown                  the environment does not name this node's role in a cluster
    ├── CheckpointError              3   the source cannot be read
    │   ├── CheckpointNotFound           no complete checkpoint where one was named
    │   ├── MissingShard                 the index names a shard that is not there
    │   ├── TruncatedFile                an index or shard is shorter than its own records say
    │   ├── CorruptFile                  a checksum or a structure is wrong
    │   ├── UnsupportedFormat            another version, byte order, compression or family
    │   ├── LfsPointer                   a pointer of Git LFS is in place of the file
    │   ├── UnsafeArchive                an archive has files outside itself, or takes far too much
    │   ├── CheckpointChanged            files changed or vanished while they were read
    │   └── StoreUnavailable             an object store does not answer, or refuses the request
    ├── GraphError                   1   the inference graph cannot be made
    │   ├── BuilderError                 the user's builder raised or returned something else
    │   ├── UnknownTensor            2   a signature names a tensor that the graph lacks
    │   ├── CodeRefused              2   a model's own archive asks for code that was not allowed
    │   ├── AccessRefused            2   a graph asks for files, or does what was not allowed
    │   ├── NotServable                  an output depends on something that cannot be served
    │   │   └── ForeignOperations            an output needs operations that stock TensorFlow does not have
    │   └── MissingAsset                 a file that the graph's tables are filled from is not there
    ├── MappingError                 4   graph and checkpoint do not fit
    │   ├── MissingTensors               variables without a tensor
    │   ├── ShapeMismatch                shapes or dtypes differ
    │   ├── ObjectMismatch               model and checkpoint have other objects, or other names for them
    │   ├── TrainingModeServed           dropout that is on, or batch normalisation without moving statistics
    │   ├── AmbiguousRename              two variables claim one tensor, or two rules disagree
    │   ├── NoCertainMatch               values without names fit the graph in no way, or in several
    │   └── PartitionStrategyUnknown     a table gets other partitions, and its row order is unknown
    ├── PositionError                5   a delta or base does not continue what is published
    │   ├── NotUpdatable                 nothing is published that takes deltas
    │   ├── DeltaGap                     no chain of deltas connects two positions
    │   ├── StaleDelta                   the reader is already at the delta's end, or beyond it
    │   ├── ForeignLineage               a delta belongs to another log
    │   ├── SchemaChanged                variables, dtypes, shapes or rules are not those of the log
    │   ├── TableFull                    a dynamic table has no room for its new keys
    │   ├── OverlayFull                  more rows of a mapped table changed than there is room for
    │   ├── PositionUnknown              nothing is published at the position that was named
    │   ├── ChainEnds                    a version that takes no deltas over one that does
    │   ├── ModelHeld                    the model is held, and the publication would pass the hold
    │   ├── NothingChanged               an increment is asked for, and the trainer has saved nothing new
    │   └── PositionMoved                another process published meanwhile
    ├── VerificationError            6   the staged result is not what it should be
    │   ├── ManifestError                a manifest.json is missing, damaged or of another format version
    │   │   └── NotTrusted                   no trusted key has signed it, for this place and this model
    │   ├── NotFinite                    NaN or infinity would be published, which the model refuses
    │   ├── WildValues                   rows are beyond --max-norm, and --on-wild refuse was given
    │   └── PublicationDamaged           a publication in a store is not what its manifest says
    ├── PublishError                 1   the target could not be written
    │   ├── TargetNotWritable            no permission, read-only file system, not a directory
    │   ├── DiskFull                     no space left, or a quota
    │   ├── TargetBusy                   another exporter holds the target's lock for too long
    │   ├── LinkRefused                  hard links asked for and impossible
    │   └── VersionExists            2   the version is taken or would go backwards
    ├── Unreachable                  1   the operating system refuses access to a file or directory
    ├── ExportFailed                 1   an export in a process of its own, beside a training, failed
    ├── NoNewBase                    1   a delta is published, but not the new base asked for with it
    ├── TensorFlowNeeded             1   the command needs TensorFlow, and no supported one is installed
    ├── EngineFailed                 1   the engine that should run a job cannot be reached, or failed
    └── ServerError                  7   a server refused, failed to load or was late
        ├── ModelPathNotFound            the model base path to serve is not there
        └── CallFailed                   a call to a model server failed, with this status code

`message` says what was found and what was expected, `cause` why, `hint` the next command.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


def to_install(extra: str) -> str:
    """Return a hint with the command that installs an extra of this package, in a clone.

    No package index has the package.
    """
    return f"in a clone of export-model: python3 -m pip install '.[{extra}]'"


def nearest(word: str, names: Iterable[str], alike: float = 0.6) -> str:
    """Return the name in `names` that is most similar to an unknown word; "" if none is similar.

    `alike` is the least similarity, from 0 to 1, as difflib measures it.
    """
    import difflib  # late: most commands need no suggestion

    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=alike)), "")


class Exit(IntEnum):
    """Exit codes of both commands; each has a `meaning` for help texts and tables."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Make a member with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done, or nothing to do"
    FAILURE = 1, "any other failure"
    USAGE = 2, "usage"
    CHECKPOINT = 3, "checkpoint missing or damaged"
    MAPPING = 4, "variables without a tensor"
    POSITION = 5, "position or lineage mismatch"
    VERIFICATION = 6, "verification failed; nothing was published"
    SERVER = 7, "a server refused, failed to load, or was late"
    DIFFERENT = 10, "differences found (diff --exit-code)"
    INTERRUPTED = 130, "interrupted"


_ERRNO = re.compile(r"\A\[Errno -?[0-9]+\] ")
"""The beginning of an OSError's `str`, which a user does not understand."""


_LONGEST = 4000
"""The most characters of a message, or of a cause: paths are shorter, but quoted texts may be endless."""


def bounded(text: str) -> str:
    """Return the text, shortened to 4,000 characters and followed by its length if it is longer.

    Errors quote files, servers and libraries.
    """
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


class ExportError(Exception):
    """Base of every error that this project raises on purpose.

    `may_pass` is true if a watch waits for it to pass: nothing is saved yet, or the trainer is writing or
    pruning.
    """

    exit_code = Exit.FAILURE
    may_pass = False
    default_hint = "run the command again with --debug and read the traceback"

    def __init__(self, message: str, *, cause: str = "", hint: str = "") -> None:
        self.message = bounded(message)
        super().__init__(self.message)
        self.cause = bounded(_ERRNO.sub("", cause))
        self.hint = hint or self.default_hint

    @property
    def __notes__(self) -> list[str]:
        """The lines that a traceback of Python 3.11, or a notebook, shows below the message."""
        cause = [f"cause: {self.cause}"] if self.cause else []
        return [*cause, f"hint:  {self.hint}"]

    def advise(self, hint: str) -> None:
        """Set the error's hint if it still is the default of its class; an empty hint changes nothing."""
        if hint and self.hint == self.default_hint:
            self.hint = hint


class ExportWarning(UserWarning):
    """A note of an export in a Python program, about something that may not be intended."""


class UsageError(ExportError):
    """The command line, or an argument of the Python API, is wrong."""

    exit_code = Exit.USAGE
    default_hint = "see --help"


class RoleUnknown(UsageError):
    """The environment describes a training cluster, but not which of its nodes this is."""

    default_hint = "correct the environment variable, or export on any node: --despite role"


class CheckpointError(ExportError):
    """The source checkpoint cannot be read."""

    exit_code = Exit.CHECKPOINT
    default_hint = "look at what is there: export-model inspect PATH"


class CheckpointNotFound(CheckpointError):
    """The given path has no complete checkpoint."""

    default_hint = "name a directory in which a trainer has saved; --watch waits for its first checkpoint"
    may_pass = True


class MissingShard(CheckpointError):
    """The index names a data shard that does not exist."""

    default_hint = (
        "copy every .data-* file beside the .index, or name an older checkpoint with --ckpt-dir PREFIX"
    )


class TruncatedFile(CheckpointError):
    """An index or a shard is shorter than its own records say."""

    default_hint = "copy the checkpoint again, or name an older one with --ckpt-dir"


class CorruptFile(CheckpointError):
    """A checksum or a structure is wrong."""

    default_hint = "copy the checkpoint again, or name an older one with --ckpt-dir"


class UnsupportedFormat(CheckpointError):
    """The file has a version, byte order, compression or family that this program does not read."""

    default_hint = "write the checkpoint again with a stock TensorFlow Saver in V2 format"


class LfsPointer(CheckpointError):
    """The file is only a pointer of Git LFS: the repository was cloned without its large files."""

    default_hint = "fetch the files in the clone: git lfs pull"


class UnsafeArchive(CheckpointError):
    """An archive has files outside itself, wants to run code, or takes time or memory without measure."""

    default_hint = "do not trust this file; save the weights again with the trainer"


class CheckpointChanged(CheckpointError):
    """Files changed or vanished while they were read (a trainer prunes or overwrites)."""

    may_pass = True
    default_hint = "run the command again: a newer checkpoint is probably complete by now"


class StoreUnavailable(CheckpointError):
    """An object store does not answer, or refuses the request: wrong key, region or network."""

    default_hint = "look at the variables that name the store and its credentials, then run the command again"


class GraphError(ExportError):
    """The inference graph cannot be made."""

    default_hint = "see the guide on --model: docs/export-once.md"


class BuilderError(GraphError):
    """The user's builder raised, or returned something that is not a signature."""

    default_hint = "run the builder alone in Python, or see its traceback with --debug"


class UnknownTensor(GraphError):
    """A signature names a tensor that the graph does not have."""

    exit_code = Exit.USAGE
    default_hint = "list the graph's tensors: export-model inspect GRAPH --tensors"


class CodeRefused(GraphError):
    """A model's archive asks for code that the user did not allow."""

    exit_code = Exit.USAGE
    default_hint = "if you trust it: --allow code; otherwise name a builder: --model pkg.mod:fn"


class AccessRefused(GraphError):
    """A graph asks for files, connections or code that the user did not allow."""

    exit_code = Exit.USAGE
    default_hint = "name the graph yourself if you trust it: --model"


class NotServable(GraphError):
    """An output depends on something that cannot be served."""

    default_hint = "choose other outputs, or feed the named tensor with --input"


class ForeignOperations(NotServable):
    """An output needs operations that stock TensorFlow does not have."""

    default_hint = "choose outputs that do not need them, or feed tensors behind them: --input NAME=TENSOR"


class MissingAsset(GraphError):
    """A file that fills the graph's tables does not exist."""

    default_hint = (
        "put the file back where the graph looks for it, or beside the .meta if its path is relative"
    )


class MappingError(ExportError):
    """The graph's variables and the checkpoint's tensors do not fit."""

    exit_code = Exit.MAPPING
    default_hint = "compare both sides: export-model inspect DIR --unmatched WHAT"


class MissingTensors(MappingError):
    """Some graph variables have no tensor in the checkpoint."""

    default_hint = "map names with --rename 'pattern=replacement', or name another checkpoint"


class ShapeMismatch(MappingError):
    """A variable and its tensor differ in shape or dtype."""


class ObjectMismatch(MappingError):
    """The objects of the model and of an object-based checkpoint do not correspond."""

    default_hint = "build the model as the trainer did, in the same order of layers"


class TrainingModeServed(MappingError):
    """The graph computes as in training: dropout is on, or it normalises by the batch although the checkpoint
    has moving statistics for inference.
    """

    default_hint = (
        "build the graph with training=False, or write its .meta from an inference graph; "
        "if you want these answers: --allow batch-statistics"
    )


class AmbiguousRename(MappingError):
    """Two variables claim one tensor, or rename rules disagree."""

    default_hint = "make the --rename rules more specific; --dry-run prints what they match"


class NoCertainMatch(MappingError):
    """The file's values have no names, and they fit the graph's variables in no way, or in several."""

    default_hint = "write a table of names: export-model inspect DIR --unmatched WHAT, then --rename FILE"


class PartitionStrategyUnknown(MappingError):
    """A lookup table gets other partitions, and neither the graph nor an option gives its row order."""

    default_hint = "put the trainer's .meta beside the checkpoint, or say --partition-strategy NAME=mod|div"


class PositionError(ExportError):
    """A delta or a base does not continue the published model."""

    exit_code = Exit.POSITION
    default_hint = "publish a new base that takes deltas: the same export with --new-base always"


class NotUpdatable(PositionError):
    """Nothing is published that takes deltas."""

    default_hint = "publish a base: export-model --ckpt-dir DIR --out MODEL --model WHAT --incr"


class DeltaGap(PositionError):
    """No chain of deltas connects two positions."""

    default_hint = "see what is published: export-model verify MODEL"


class StaleDelta(PositionError):
    """The model that reads a delta is already at the delta's end, or beyond it."""

    default_hint = "take a newer delta; see what is published: export-model verify MODEL"


class ForeignLineage(PositionError):
    """A delta belongs to another log than its directory, or than the model that reads it."""

    default_hint = "remove that directory: it was published for another base"


class SchemaChanged(PositionError):
    """The variables, their dtypes, shapes or rules differ from the log's first base."""

    default_hint = "begin a new log with a base of the new schema: --new-base if-needed"


class TableFull(PositionError):
    """A dynamic table has no free row, or no place in its index, for a new key."""

    default_hint = (
        "publish a new base, which gets more room: --new-base always, or --incr --new-base if-needed"
    )


class OverlayFull(PositionError):
    """More rows of a mapped table have changed than its overlay in servers has room for."""

    default_hint = (
        "publish a new base, whose overlay is empty: --new-base always, or --incr --new-base if-needed; "
        "--overlay-rows N makes it larger"
    )


class PositionUnknown(PositionError):
    """Nothing is published at the position that was named, or its values were removed."""

    default_hint = "list the positions: export-model history MODEL"


class ChainEnds(PositionError):
    """A version that takes no deltas would follow one that does: servers that load it stop updating."""


class ModelHeld(PositionError):
    """The model is held, for example after a rollback, and the new publication would pass the hold."""

    default_hint = "lift the hold first: export-model resume MODEL"


class NothingChanged(PositionError):
    """A delta is asked for, and the trainer has written no increment and no checkpoint since the last one."""

    default_hint = (
        "save an increment or a checkpoint first, or call export_incremental(), which then publishes nothing"
    )


class PositionMoved(PositionError):
    """Another process published between planning and publishing."""

    default_hint = "run the command again"


class VerificationError(ExportError):
    """The staged result fails a check; nothing was published."""

    exit_code = Exit.VERIFICATION


class ManifestError(VerificationError):
    """A manifest.json is missing, damaged or of another format version."""

    default_hint = "remove that directory, then publish again; with --new-base always, if deltas are to go on"


class NotTrusted(ManifestError):
    """No trusted key has signed a publication for its path and this model."""

    default_hint = (
        "publish with a key that is trusted (--sign-key); if another key is to be trusted, too: --trust FILE"
    )


class NotFinite(VerificationError):
    """NaN or infinity would be published, and the model refuses them; nothing was published."""

    default_hint = (
        "correct the training, or restart it from a checkpoint without such values: the next --incr "
        "continues from what is published; to serve such values: publish a base without --add nan-check "
        "(--new-base always)"
    )


class WildValues(VerificationError):
    """Rows are beyond `--max-norm`, and `--on-wild refuse` was given; nothing was published."""

    default_hint = (
        "correct the training, or restart it from a checkpoint without such rows; to serve all other rows: "
        "--on-wild hold-row; to serve them: --on-wild warn"
    )


class PublicationDamaged(VerificationError):
    """A publication in a store differs from its manifest: an object is truncated, changed or exchanged."""

    default_hint = "publish a new base: the same export with --new-base always --again"


class PublishError(ExportError):
    """The target could not be written; nothing was published."""


class TargetNotWritable(PublishError):
    """No permission, a read-only file system, or not a directory."""

    default_hint = "choose a directory that you may write, or make this one writable"


class DiskFull(PublishError):
    """No space left on the target, or its quota is used up."""

    default_hint = (
        "free space there: --keep N removes older versions; if checkpoint and model are on one file system, "
        "a version consists of hard links and takes little space"
    )


class TargetBusy(PublishError):
    """Another exporter holds the target's lock for longer than this one waits."""

    default_hint = "run the command again when the other exporter is done, or stop it"


class LinkRefused(PublishError):
    """--data link was asked for and the file systems or permissions do not allow hard links."""

    default_hint = "use --data auto: it links where it can and copies where it must"


class VersionExists(PublishError):
    """The version is taken already, or would go backwards."""

    exit_code = Exit.USAGE
    default_hint = "leave --version out: the exporter takes the next free number"


class Unreachable(ExportError):
    """The operating system refuses access to a file or a directory."""

    default_hint = "make it readable for this user, with every directory above it, or name another place"


class TensorFlowNeeded(ExportError):
    """The command needs TensorFlow, and none is installed, or an unsupported one."""

    default_hint = "install a supported one: python3 -m pip install 'tensorflow>=2.15,<2.23'"


class EngineFailed(ExportError):
    """The engine that should run a job cannot be reached, or it failed."""

    default_hint = "run the same command again: it skips what is done"


class ExportFailed(ExportError):
    """An export in a process of its own, beside a training, failed or did not end in time."""

    default_hint = "the checkpoint is there: run the same export with export-model"


class NoNewBase(ExportError):
    """The delta is published, but not the new base that was asked for with it; its `__cause__` says why."""

    default_hint = "for the base alone: export-model merge MODEL --rebase"


class ServerError(ExportError):
    """A model server refused, failed to load, or was not available in time."""

    exit_code = Exit.SERVER
    default_hint = "look at the server: serve-model status"


class ModelPathNotFound(ServerError):
    """The model base path to serve is not a directory."""

    default_hint = "name the directory that holds the versions, or publish one: export-model --out PATH"


class CallFailed(ServerError):
    """A call to a model server ended in a status other than OK."""

    def __init__(self, code: str, message: str, *, cause: str = "", hint: str = "") -> None:
        """Keep the canonical status beside the message.

        Args:
            code: its name, such as `NOT_FOUND` or `DEADLINE_EXCEEDED`.
            message: the call, and the server.
            cause: the server's own text.
            hint: the next command.
        """
        super().__init__(message, cause=cause, hint=hint)
        self.code = code
        self.served: tuple[str, ...] = ()
        """The models that the server has instead of the requested one; empty if it does not list them."""


def os_error(exc: OSError, path: Path) -> ExportError:
    """Return the error for a failed write to `path`: DiskFull, TargetNotWritable, or else PublishError."""
    cause = f"{exc.strerror or exc} ({errno.errorcode.get(exc.errno or 0, 'unknown')})"
    if exc.errno in _FULL:
        return DiskFull(f"no space left to write {os.fspath(path)}", cause=cause)
    if exc.errno in _NOT_WRITABLE:
        return TargetNotWritable(f"cannot write {os.fspath(path)}", cause=cause)
    where = shlex.quote(os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120  of bytes, too
    hint = f"look at where that is, and whether it can be written: df {where}"
    return PublishError(f"writing {os.fspath(path)} failed", cause=cause, hint=hint)


def unreachable(exc: OSError) -> ExportError:
    """Return the error for any other failure of the operating system.

    DiskFull if there is no space, ExportError if no path is known, else Unreachable.
    """
    path, cause = exc.filename2 or exc.filename, exc.strerror or str(exc)
    if path is None:
        return ExportError(f"the operating system refused: {cause}")
    if exc.errno in _FULL:
        return os_error(exc, Path(os.fsdecode(path)))
    return Unreachable(f"cannot reach {os.fsdecode(path)}", cause=cause)


def as_export_error(error: ExportError | OSError) -> ExportError:
    """Return an ExportError as it is, and for an OSError the error that `unreachable` describes."""
    return unreachable(error) if isinstance(error, OSError) else error


def is_unread(error: BaseException | None) -> bool:
    """True if an error, or its cause, leaves a file's content unknown: the file may be undamaged.

    The system refused to read something that is there (no permission, EIO), or an object store did not
    answer. False for a file that is missing, or that is not a regular file: that is damage. False for None.
    """
    while error is not None and not isinstance(error, OSError | StoreUnavailable | Unreachable):
        error = error.__cause__
    return error is not None and getattr(error, "errno", None) not in _NO_SUCH_FILE


_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_NOT_WRITABLE |= {errno.ENOLCK, errno.EOPNOTSUPP}  # without file locks two exporters could collide


def printable(text: str) -> str:
    r"""Return the text in one line, with invisible characters written as in Python: `\x1b`, `\n`, `\u202e`.

    Invisible are controls (C0, C1), marks of direction and of no width, separators except the space, and
    surrogates, which stand for a path's bytes that are not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` texts, joined by `separator`, and the others' number: `a, b and 3 more`."""
    more = f"{separator.rstrip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def lines_of(parts: Iterable[str]) -> str:
    """Return a `cause` of several lines, with each part on an indented line, printable, below the label."""
    return "\n  ".join(["", *map(printable, parts)])


def in_lines(text: str) -> str:
    """Return a text of several lines with each line made printable, and all but the first indented."""
    first, *others = text.split("\n")
    indented = (line if line.startswith(" ") else f"  {line}" for line in map(printable, others))
    return "\n".join([printable(first), *indented])


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
