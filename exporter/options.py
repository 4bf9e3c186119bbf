"""The options of an export as values, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import force_setattr

from exporter.errors import UsageError
from exporter.local_paths import checkpoint_path, local_name, local_path


class DataMode(StrEnum):
    """How the bytes of variables reach the bundle.

    `AUTO` links shards and, where links are impossible or the server could not read them, compacts. `LINK`
    links or fails. `COPY` copies whole shards. `COMPACT` copies the kept byte ranges alone.
    """

    AUTO = "auto"
    LINK = "link"
    COPY = "copy"
    COMPACT = "compact"


class Verify(StrEnum):
    """How much is checked before anything is published; each level includes the ones before."""

    NONE = "none"
    FILES = "files"
    BYTES = "bytes"
    OUTPUTS = "outputs"

    def includes(self, level: Verify) -> bool:
        """True if this level does all that `level` does."""
        order = list(Verify)
        return order.index(self) >= order.index(level)


class ExportFormat(StrEnum):
    """What a version holds: a SavedModel, Cloud ML's pair (`export.meta`, a bundle `export.*`), or both."""

    SAVED_MODEL = "saved_model"
    METAGRAPH = "metagraph"
    BOTH = "both"


class Isolation(StrEnum):
    """What a response may mix while a delta is applied: nothing, or whole rows of two positions."""

    SNAPSHOT = "snapshot"
    ROW = "row"


class DeltaDtype(StrEnum):
    """What rows of floating-point tables are rounded to in deltas; see `exporter.delta.packing`."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class EngineName(StrEnum):
    """What runs the tasks of a job: threads here, or an engine of the user's; see `exporter.jobs`."""

    LOCAL = "local"
    RAY = "ray"
    BEAM = "beam"
    DASK = "dask"


DEFAULT_TASK_BYTES = 64 << 20
"""What a task reads: a second's work for a slow disk, and a million of them for 64 TB."""


class Jobs(Struct, frozen=True):
    """How work on many bytes is run.

    With an `engine` jobs are kept beside what they make, or in `directory` (a path that all workers see, or a
    URL): the same command, on whatever engine, goes on with one that ended half-way. `address` and `settings`
    are the engine's; `task_bytes` is what one task reads.
    """

    engine: EngineName | None = None
    workers: int = 0
    address: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    task_bytes: int = DEFAULT_TASK_BYTES
    directory: str = ""


class Updates(Struct, frozen=True):
    """How a base takes deltas; see `exporter.subgraph.make_updatable`."""

    isolation: Isolation = Isolation.SNAPSHOT
    """What a response may mix while a delta is applied."""
    snapshot_max_rows: int = 4_000_000
    """Deltas of more rows are written in pieces that responses may see."""
    stamp: bool = False
    """Whether predict responses have `model_position` and `model_step`."""
    digest: bool = False
    """Whether there is the signature `incremental_digest`."""
    finite: bool = False
    """Whether deltas with NaN or infinity are refused."""


_OTHERWISE = {
    "digest": "--with-digest",
    "finite": "--require-finite",
    "renames": "--rename",
    "casts": "--cast",
    "strategies": "--partition-strategy",
}


def option_of(name: str) -> str:
    """The option of the command line that sets a rule, or a way to take deltas, of this name."""
    return _OTHERWISE.get(name) or f"--{name.replace('_', '-')}"


class ExportRequest(Struct, frozen=True):
    """Everything an export is told; the fields are the options of `export-model`."""

    ckpt_dir: Path
    """A checkpoint, or a directory of which the newest one is exported."""
    out: Path
    """The model base path."""
    model: str | Callable[..., Any] | None = None
    """A name as `--model` takes it, or a builder itself; None: what lies beside the checkpoint."""
    model_args: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the builder."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the graph that are inputs of the signature, by their name there."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the graph that are outputs of the signature, by their name there."""
    signatures: Path | None = None
    """A JSON file that defines several signatures."""
    feeds: Mapping[str, str] = field(default_factory=dict)
    """Constants for placeholders, by name."""
    absent_keys: Mapping[str, str] = field(default_factory=dict)
    """What absent keys read in dynamic tables, by regular expressions of their names."""
    renames: tuple[str, ...] = ()
    """Rules that name a variable's tensor, as `--rename` takes them."""
    rename_file: Path | None = None
    """A table of names: see `exporter.mapping.mapping_rules`."""
    by_order: bool = False
    """Whether values without names are in the order of the graph's variables."""
    average: str | None = None
    """The moving averages to serve, as `--average` names them."""
    casts: tuple[str, ...] = ()
    """Rules that store variables smaller, as `--cast` takes them."""
    partition_strategies: Mapping[str, str] = field(default_factory=dict)
    """`mod` or `div` for partitioned tables, by name."""
    object_path: str | None = None
    """Where the served model is among the objects of an object-based checkpoint."""
    data: DataMode = DataMode.AUTO
    warmup: Path | None = None
    """Warm-up requests; without them a base that takes deltas brings made-up ones."""
    no_warmup: bool = False
    """Whether a base that takes deltas brings no made-up warm-up requests."""
    version: str | None = None
    """The version's number, or `time`; None: its position."""
    keep: int | None = None
    """How many versions stay; None: all."""
    verify: Verify = Verify.FILES
    verify_inputs: Path | None = None
    """Requests for `Verify.OUTPUTS`."""
    tolerance: float = 1e-6
    """The largest absolute difference that `Verify.OUTPUTS` accepts."""
    golden: Path | None = None
    """Requests that a version has to pass before it is published."""
    updates: Updates | None = None
    """How the version takes deltas; None: it takes none."""
    format: ExportFormat = ExportFormat.SAVED_MODEL
    allow_code: bool = False
    """Whether code that a Keras archive carries or names may run, and here whatever a graph does."""
    allow_foreign_ops: bool = False
    """Whether operations that stock TensorFlow does not have are served, with what they need."""
    allow_files: tuple[Path, ...] = ()
    """Directories that a graph which nobody named may take files from, beside its own."""
    allow_file_ops: bool = False
    """Whether operations that read or write files, or call out, are served."""
    custom_objects: tuple[str, ...] = ()
    """Modules with classes that a Keras archive may use."""
    tag: str | None = None
    """The graph of a SavedModel that is served."""
    train_tag: str | None = None
    """The graph of a SavedModel that is kept for training."""
    min_change: float = 0.0
    """A delta leaves out rows that are less than this (a Euclidean norm) from what is published."""
    delta_dtype: DeltaDtype | None = None
    """What a delta rounds rows of floating-point tables to."""
    allow_batch_statistics: bool = False
    """Whether a graph may normalise by the request's own batch although moving statistics are there."""
    plain: bool = False
    """Whether a version that takes no deltas may be published over one that does."""
    despite_hold: bool = False
    """Whether a version may be published although the model is held."""
    check_graph: bool = False
    """Whether the graph is built again before a delta, and compared with its base's."""
    again: bool = True
    """Whether to publish what is published already by the same plan; else that is `PublishedAlready`."""
    min_freq: int = 0
    """Keys of dynamic tables are served if they were seen this often."""
    max_age_steps: int | None = None
    """Keys of dynamic tables are served if they were updated within so many steps."""
    table_head_room: float | None = None
    """Room for this times more keys in dynamic tables; None: a quarter."""
    jobs: Jobs = Jobs()
    """Where values are cast, moved and compared."""

    def __post_init__(self) -> None:
        """Take `file://` as a path, and refuse other URLs where a path is expected."""
        for name in _PATHS:
            if (place := getattr(self, name)) is not None:
                parse = checkpoint_path if name == "ckpt_dir" else local_path
                force_setattr(self, name, parse(f"--{name.replace('_', '-')}", place))
        if isinstance(self.model, str):
            force_setattr(self, "model", local_name("--model", self.model))
        directories = tuple(local_path("--allow-files", place) for place in self.allow_files)
        force_setattr(self, "allow_files", directories)
        modules = tuple(local_name("--custom-objects", name) for name in self.custom_objects)
        force_setattr(self, "custom_objects", modules)


_PATHS = ("ckpt_dir", "out", "signatures", "rename_file", "warmup", "verify_inputs", "golden")

_FOR_DELTAS = "export(request, save_incr_model=True), or export_incremental(request)"


def require_exact(request: ExportRequest, hint: str = _FOR_DELTAS) -> None:
    """Refuse what only deltas can be told, where a version is asked for.

    Raises:
        UsageError: `min_change`, `delta_dtype` or `check_graph` is set: a version is exact, and its own.
    """
    if request.min_change or request.delta_dtype or request.check_graph:
        raise UsageError(
            "min_change, delta_dtype and check_graph are for deltas, a version is exact",
            hint=hint,
        )
