"""The document that `export-model` prints: a plan, a publication, or that nothing is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from exporter.bundle.variables import Rounding
from exporter.cli.documents import Checkpoint, Status, TensorGroup
from exporter.pipeline.inspected import Signature
from exporter.publish.retention import KeptVersion
from exporter.terminal.parameters import Taken


class Variable(Struct, frozen=True):
    """A served variable, and where its value comes from."""

    name: str
    """Its name in the published version."""
    tensor: str
    """The checkpoint's tensor that it takes."""
    via: str
    """Which rule found the tensor: `name`, `rename`, `average`, ..."""
    dtype: str
    """Its type as served."""
    shape: Sequence[int]
    """Its shape, of all parts together."""
    bytes: int
    """Its size as served."""
    rewritten: str | None
    """Why its bytes are rewritten; null if they are taken as they are."""
    mapped: bool = False
    """True if servers map it instead of reading it (`--map-tables`)."""
    not_mapped: str | None = None
    """Why servers read it, although it is large and tables were to be mapped; null otherwise."""


class Shard(Struct, frozen=True):
    """A shard of the version that contains bytes of a checkpoint's shard unchanged."""

    source: str
    """The checkpoint's file."""
    how: Literal["cloned", "linked", "copied", "compacted"]
    """`cloned` (its blocks are shared until either side writes), `linked`, `copied` as a whole, or
    `compacted`: of its bytes those that are served were copied."""
    why: str | None
    """Why it is copied; null if it is not."""
    bytes: int
    """Bytes that it takes in the version; a link takes all of the file."""
    source_bytes: int
    """The size of the checkpoint's file."""


class TrainingGraph(Struct, frozen=True):
    """A training graph that is kept beside the serving graph (`--train-tag`)."""

    graph: str
    """Where it comes from."""
    tag: str
    """Its tag in the SavedModel."""
    tensors: int
    """How many tensors it needs beyond the served ones."""


class ExportPlan(Struct, frozen=True, kw_only=True):
    """The document that `export-model --dry-run` prints: the version that would be published."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`planned`, or `published`."""
    checkpoint: Checkpoint
    """What is exported."""
    graph: str
    """Where the serving graph comes from."""
    signatures: Mapping[str, Signature]
    """The signatures, by name."""
    takes_deltas: bool
    """True if the version is a base that takes deltas (`--incr`, `--new-base always`)."""
    variables: Sequence[Variable]
    """The served variables."""
    bytes: int
    """Their size."""
    tasks: int
    """Tasks that copy, cast or move values; what is linked needs none."""
    task_bytes: int
    """Bytes that they read."""
    shards: Sequence[Shard]
    """Shards that are linked or copied. A plan tries no link: where one is refused, kept bytes are copied."""
    ignored: Mapping[str, TensorGroup]
    """Tensors that are not served, by kind: optimizer slots, averages, the global step, other."""
    training: TrainingGraph | None
    """The training graph that is kept, too."""
    bytes_mapped: int
    """Bytes that servers map (`--map-tables`)."""
    served_at: str | None
    """The model as servers see it: they map tables there, and read them elsewhere; null: none are mapped."""
    notes: Sequence[str]
    """What a person should know of it."""
    taken: Sequence[Taken]
    """Options that were not typed, and where they come from."""


class Export(ExportPlan, frozen=True, kw_only=True):
    """The document that an export prints: the version that it published."""

    path: str
    """The version's directory."""
    version: int
    """Its number, which servers go by."""
    position: int
    """Its position in the order of everything published for the model."""
    bytes_linked: int
    """Bytes of data that are hard links to the trainer's files."""
    bytes_cloned: int
    """Bytes of data that share their blocks with the trainer's files, and do not change when those do."""
    bytes_copied: int
    """Bytes that were copied as they are."""
    bytes_rewritten: int
    """Bytes that were rewritten: casts, merged partitions, compacted data."""
    rounded: Mapping[str, Rounding]
    """Tables that were stored in 8 bits (`--cast int8`), by name: how much their values differ."""
    verified: str
    """What was checked before publishing, as `--verify` names it."""
    max_errors: Mapping[str, float]
    """With `--verify outputs`: the largest difference of each output, by `signature/output`."""
    versions_removed: Sequence[int]
    """Versions that `--keep` removed."""
    versions_kept: Sequence[KeptVersion]
    """Versions beyond `--keep` that had to stay."""
    seconds: float
    """How long it took, without the start of the program."""
    warnings: Sequence[str]
    """What went wrong after it was published."""


class PublishedAlready(Struct, frozen=True, kw_only=True):
    """The document of an export whose checkpoint was already published, by the same graph and options."""

    dry_run: bool
    """True if it was only a question."""
    status: Literal["nothing_to_do"]
    """Nothing was published."""
    path: str
    """The version that holds it."""
    version: int
    """That version's number."""
    position: int
    """Its position."""
    newest_version: int
    """The newest version, which may be another one."""
    hold: int | None
    """The position at which the model is held."""
    message: str
    """The same for people."""


class StandBy(Struct, frozen=True):
    """The document that a node of a training cluster prints if it leaves the export to its chief."""

    status: Literal["nothing_to_do"]
    """Nothing was published."""
    path: None
    """Nothing was published."""
    role: str
    """What the node is: `worker`, `ps`, `evaluator`, ..."""
    index: int | None
    """Its number among those, where the environment says so."""
    role_source: str
    """The environment variable that says so."""


class ModelRun(Struct, frozen=True):
    """The export of one model of a file of models."""

    model: str
    """Its name in the file."""
    exit_code: int
    """How its export ended."""
    document: Any = None
    """What the export printed; null if it failed."""


class SeveralRuns(Struct, frozen=True):
    """The document that `export-model --config` prints."""

    models: Sequence[ModelRun]
    """The models of the file, in its order."""
