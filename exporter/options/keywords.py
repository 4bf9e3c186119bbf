"""The options of `exporter.options` as keyword arguments, with the values that each takes.

Made from the code by `python -m tools.reference`; edit `exporter/options/__init__.py` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from exporter.options import (
    DataMode,
    DeltaDtype,
    EngineName,
    ExportFormat,
    Isolation,
    Jobs,
    OnWild,
    Signing,
    Updates,
    Verify,
)
from exporter.options.given import StrPath


class UpdatesKeywords(TypedDict, total=False):
    """Keyword arguments of `Updates`."""

    isolation: Isolation | Literal["snapshot", "row"]
    """Consistency during an update: snapshot (no response mixes two positions); row (responses may mix
    positions)."""
    snapshot_max_rows: int
    """Consistency during an update: deltas of more than N rows, by default 4000000, are applied in visible
    pieces."""
    stamp: bool
    """Give a base this, too: model_position and model_step in predict responses."""
    digest: bool
    """Give a base this, too: a signature that returns checksums of the served values."""
    finite: bool
    """Give a base this, too: refuse deltas with NaN or infinity; with verify='bytes' new bases, too."""


class JobsKeywords(TypedDict, total=False):
    """Keyword arguments of `Jobs`."""

    engine: EngineName | Literal["local", "ray", "beam", "dask"] | None
    """Move, cast, compare and check as tasks of this engine; resumes a job that ended half-way."""
    workers: int
    """Tasks that run at once; 0: as many as there are processors."""
    address: str
    """The cluster of the engine: ray://HOST:10001, tcp://HOST:8786."""
    settings: Mapping[str, str | float]
    """The engine's own options."""
    task_bytes: int
    """How many bytes one task reads."""
    directory: str
    """Keep results of tasks here, where all workers see them; those of an export are below the model."""


class ExportKeywords(TypedDict, total=False):
    """Keyword arguments of `ExportRequest`."""

    model_args: Mapping[str, str | float]
    """Builder's argument."""
    inputs: Mapping[str, str | float]
    """Input, by tensor name."""
    outputs: Mapping[str, str | float]
    """Output, by tensor name."""
    signatures: StrPath | None
    """JSON file that defines several signatures."""
    tag: str | None
    """Serve a SavedModel's graph with these tags."""
    feeds: Mapping[str, str | float]
    """Give a placeholder a constant value: keep_prob=1.0."""
    absent_keys: Mapping[str, str | float]
    """What a table by keys gives for a key that it lacks."""
    allow: Sequence[str]
    """Serve what is refused otherwise: code (trust the model: run its archive's code, and any operation of
    its graph on this machine); files=DIR (a graph found beside the checkpoint may read this directory,
    too); file-ops (operations that use files, call other processes, or are unknown); foreign-ops
    (operations that stock TensorFlow lacks, with all that they need); dropout (dropout and noise that are
    on, so that equal requests get different answers); batch-statistics (normalise each request by its own
    batch, although moving statistics exist)."""
    custom_objects: Sequence[str]
    """Module with classes that a Keras archive may use."""
    train_tag: str | None
    """Also keep the SavedModel's training graph of this tag."""
    format: ExportFormat | Literal["saved_model", "metagraph", "both"]
    """Write a SavedModel, Cloud ML's pair, or both."""
    version: str | int | None
    """The version's number, or time: seconds since 1970."""
    for_server: str | None
    """Publish what servers of this TensorFlow load: 1.15 or newer."""
    plain: bool
    """Publish a version that takes no deltas, although the newest one does."""
    despite_hold: bool
    """Publish a version although the model is held."""
    again: bool
    """Publish the checkpoint even if it is published already."""
    renames: Sequence[str]
    """Map variables (regular expression) to tensor names."""
    rename_file: StrPath | None
    """File with lines 'variable tensor'; # begins a comment."""
    by_order: bool
    """Match arrays without names to variables by the graph's order."""
    average: str | None
    """Serve moving averages instead of raw weights."""
    partition_strategies: Mapping[str, str | float]
    """How training spread a table's rows over its parts."""
    ignored: Sequence[str]
    """Serve layers without these variables (regular expression), which the checkpoint has and the graph has
    not."""
    object_path: str | None
    """Path to the served model in a TF2 checkpoint: net/tower."""
    casts: Sequence[str]
    """Store matching variables in 16 bits, or tables in 8 (by keys: TABLE/values)."""
    data: DataMode | Literal["auto", "link", "copy", "compact"]
    """How values reach the version; compact copies only the needed bytes."""
    map_tables: bool
    """Let servers map large tables instead of reading them when they load."""
    served_at: str | None
    """The model's directory as servers see it, for mapped tables."""
    overlay_rows: int | None
    """Room for N changed rows beside each mapped table of a base that takes deltas."""
    hot_rows: Mapping[str, str | float]
    """Lay the most read rows of a mapped table side by side: those in a .npy file, or by the checkpoint's
    counts."""
    warmup: StrPath | None
    """Requests of the model, one in REST's JSON on each line: warm-up requests of the version;
    verify='outputs' tries them, too."""
    no_warmup: bool
    """Requests of the model, one in REST's JSON on each line: no warm-up requests, nor generated ones."""
    keep: int | None
    """Keep these versions, and remove others: the newest N."""
    keep_hourly: int
    """Keep these versions, and remove others: also the newest of each of the last N hours that have one."""
    keep_daily: int
    """Keep these versions, and remove others: also the newest of each of the last N days that have one."""
    table_head_room: float | None
    """Room for X times more keys in tables."""
    min_freq: int
    """Serve only these keys of tables: seen N times or more."""
    max_age_steps: int | None
    """Serve only these keys of tables: updated in the last N steps."""
    verify: Verify | Literal["none", "files", "bytes", "outputs"]
    """What to check before publishing: none (nothing); files (index, sizes, small files; the default);
    bytes (every value, too); outputs (responses, too)."""
    verify_inputs: StrPath | None
    """Requests of the model, one in REST's JSON on each line: requests for verify='outputs' alone."""
    tolerance: float
    """Largest absolute difference that verify='outputs' accepts."""
    golden: StrPath | None
    """Golden requests that a version or base must pass."""
    updates: Updates | None
    """How the version takes deltas; None: it takes none."""
    delta_dtype: DeltaDtype | Literal["bfloat16", "int8"] | None
    """For deltas: send table rows as bfloat16 or int8; reports the largest error."""
    delta_budget: str | None
    """For deltas: send these rows, hold others back: the rows that changed most, up to 64MiB a delta, or
    1MB/s."""
    min_change: float
    """For deltas: send these rows, hold others back: rows that moved X or more (Euclidean norm) since they
    were sent."""
    max_row_age: float | None
    """For deltas: send these rows, hold others back: each row after this time (90, 10m, 2h), whatever the
    budget."""
    max_norm: Sequence[str]
    """For deltas: look for table rows whose Euclidean norm is larger."""
    on_wild: OnWild | Literal["refuse", "hold-row", "warn"]
    """What to do with rows beyond max_norm."""
    check_graph: bool
    """What to check before publishing: with incr: the graph, built again, is the base's."""
    jobs: Jobs
    """Where values are cast, moved and compared."""
    signing: Signing
    """Who signs what is published."""
