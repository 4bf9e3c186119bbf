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
    """How what is O(bytes) is run.

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
    """Everything a full export is told; the fields are the options of `export-model`.

    `model` is a name as `--model` takes it, or a builder itself; without it what lies beside the checkpoint
    is used. `absent_keys` says by names of dynamic tables (regular expressions) what keys read there that are
    absent. Of a SavedModel's graphs `tag` names the one to serve, `train_tag` one to keep for training.
    `renames` and `casts` are rules in the command line's form; `partition_strategies` says `mod` or
    `div` for tables; `object_path` leads to the served model among the objects of an object-based checkpoint;
    `version` is None (the position), a number, or `"time"`. `tolerance` is the largest
    absolute difference that `Verify.OUTPUTS` accepts; a version is not published that does not pass the
    requests in `golden`. With `updates` the version takes deltas.
    `rename_file` is a table of names (`exporter.mapping.rename_file`); `by_order` takes a list of values
    without names to be in the order of the graph's variables. `allow_code` and `custom_objects` (modules) say
    which code a model's own archive may ask for. A base that takes deltas brings made-up warm-up requests
    unless `warmup` names others or `no_warmup` is set. With `min_change` a delta leaves out rows of
    floating-point tables that are less than this (a Euclidean norm) from what is published; with
    `delta_dtype` it holds them rounded. `allow_batch_statistics` serves a graph that normalises
    by the request's own batch although the checkpoint has moving statistics. `plain` publishes a version that
    takes no deltas over one that does; `despite_hold` publishes a version although the model is held.
    Of dynamic tables, keys are served that were seen `min_freq` times and updated within `max_age_steps`.
    A dynamic table gets room for `table_head_room` times as many keys as it has, beside those; a quarter by
    default. `jobs` says where casts, moved rows and checksums are worked on.
    `check_graph` builds the graph again before a delta and compares it with its base's. Without `again` a
    checkpoint that is published already, by the same plan, is an error (`PublishedAlready`).
    """

    ckpt_dir: Path
    out: Path
    model: str | Callable[..., Any] | None = None
    model_args: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    signatures: Path | None = None
    feeds: Mapping[str, str] = field(default_factory=dict)
    absent_keys: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[str, ...] = ()
    rename_file: Path | None = None
    by_order: bool = False
    average: str | None = None
    casts: tuple[str, ...] = ()
    partition_strategies: Mapping[str, str] = field(default_factory=dict)
    object_path: str | None = None
    data: DataMode = DataMode.AUTO
    warmup: Path | None = None
    no_warmup: bool = False
    version: str | None = None
    keep: int | None = None
    verify: Verify = Verify.FILES
    verify_inputs: Path | None = None
    tolerance: float = 1e-6
    golden: Path | None = None
    updates: Updates | None = None
    format: ExportFormat = ExportFormat.SAVED_MODEL
    allow_code: bool = False
    custom_objects: tuple[str, ...] = ()
    tag: str | None = None
    train_tag: str | None = None
    min_change: float = 0.0
    delta_dtype: DeltaDtype | None = None
    allow_batch_statistics: bool = False
    plain: bool = False
    despite_hold: bool = False
    check_graph: bool = False
    again: bool = True
    min_freq: int = 0
    max_age_steps: int | None = None
    table_head_room: float | None = None
    jobs: Jobs = Jobs()

    def __post_init__(self) -> None:
        """Take `file://` as a path, and refuse other URLs where a path is expected."""
        for name in _PATHS:
            if (place := getattr(self, name)) is not None:
                parse = checkpoint_path if name == "ckpt_dir" else local_path
                force_setattr(self, name, parse(f"--{name.replace('_', '-')}", place))
        if isinstance(self.model, str):
            force_setattr(self, "model", local_name("--model", self.model))
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
