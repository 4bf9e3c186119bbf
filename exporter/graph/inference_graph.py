"""`InferenceGraph`: the pruned graph, with variables without values, that every kind of `--model` becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from exporter.catalog import SliceSpec, TensorRef
from exporter.newer_python import StrEnum
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType

if TYPE_CHECKING:
    import numpy as np

    from exporter.checkpoint.object_graph import ObjectGraph
    from exporter.wire.protos import Proto


class PartitionStrategy(Enum):
    """How `embedding_lookup` finds a row in a partitioned table of n parts.

    `MOD`: row i is row i // n of part i % n. `DIV`: parts are contiguous ranges of rows.
    `NONE`: the parts are never looked up by id (they are concatenated), so their order is the rows' order.
    """

    MOD = "mod"
    DIV = "div"
    NONE = "none"


class GraphVariable(Struct, frozen=True):
    """A variable of the inference graph.

    `node` is its VarHandleOp; `key` the name it is restored by (for a part: the whole variable's name);
    `shape` its own shape; `part` says which box of the whole variable it is, None for an ordinary one.
    """

    node: str
    key: str
    dtype: DType
    shape: tuple[int, ...]
    part: SliceSpec | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole variable that `key` names."""
        return self.part.full_shape if self.part else self.shape

    @property
    def box(self) -> SliceSpec:
        """Its box in the whole variable."""
        return self.part or SliceSpec.whole(self.shape)

    @property
    def served_name(self) -> str:
        """Its name in a delta: its key, followed by its slice if it is a part."""
        part = self.part
        return self.key if part is None or part.is_full else f"{self.key}[{part.restore_spec}]"


class GraphTable(Struct, frozen=True):
    """A table whose contents are restored: its node, the names of its keys and values, their dtypes.

    `value_shape` is the shape of one value, `key_shape` that of one key as it is stored; None if the graph
    does not say. With `has_all_buckets` the tensors have an entry for each bucket.
    """

    node: str
    keys: str
    values: str
    key_dtype: DType
    value_dtype: DType
    value_shape: tuple[int, ...] | None = ()
    has_all_buckets: bool = False
    key_shape: tuple[int, ...] | None = None


class GraphDynamicTable(Struct, frozen=True, eq=False):
    """A table whose rows have arbitrary integers as keys; it is served from four ordinary variables.

    `name` is its name in a checkpoint, without a part's number. `nodes` are the VarHandleOps of its variables
    in the order of `exporter.tables.geometry.PARTS`. A key that it does not hold reads row `key mod d` of
    `defaults`, an array [d, dim] of `value_dtype`.
    """

    name: str
    nodes: tuple[str, str, str, str]
    key_dtype: DType
    value_dtype: DType
    dim: int
    defaults: np.ndarray

    @property
    def variables(self) -> tuple[GraphVariable, ...]:
        """Its variables, with -1 for sizes that the checkpoint gives."""
        dtypes = (DType.INT64, DType.INT32, DType.INT64, self.value_dtype)
        shapes: tuple[tuple[int, ...], ...] = ((-1,), (-1,), (-1,), (-1, self.dim))
        return tuple(
            GraphVariable(node, f"{self.name}/{suffix}", dtype, shape)
            for node, suffix, dtype, shape in zip(self.nodes, PARTS, dtypes, shapes, strict=True)
        )


class Asset(Struct, frozen=True):
    """A file that the graph reads while its tables initialise: `node` is the constant that holds its path.

    `name` is given where two files of a graph have the same name.
    """

    node: str
    source: Path
    name: str = ""

    @property
    def file_name(self) -> str:
        """Its name under `assets/`."""
        return self.name or self.source.name


class Effect(StrEnum):
    """The effect of an operation outside of the model."""

    READS = "reads files"
    WRITES = "writes files"
    CALLS = "calls other processes or devices"
    RUNS = "runs code, or ends the process"
    UNKNOWN = "may do anything: nobody has judged what it does"


class Outside(Struct, frozen=True):
    """An operation that reaches out of the model, and the function that it is in, "" for the graph."""

    node: str
    op: str
    effect: Effect
    function: str = ""

    def __str__(self) -> str:
        where = f" in function {self.function!r}" if self.function else ""
        return f"{self.op} {self.node!r}{where} {self.effect.value}"


class TrainingMode(Struct, frozen=True):
    """The parts of a served graph that compute as in training.

    All fields hold names of nodes. `batch_norms` normalise by the request's own batch, `dropouts` drop a
    random part of their input (with that part, if it is a constant), `noises` add normal noise to it, or
    multiply it by such noise; `random` draw other random numbers. `idle` are nodes of variables that are read
    only in branches that never run.
    """

    batch_norms: tuple[str, ...] = ()
    dropouts: tuple[tuple[str, float | None], ...] = ()
    noises: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    idle: frozenset[str] = frozenset()

    def notes(self) -> Iterator[str]:
        """Notes for the user, a line each."""
        for name in self.batch_norms:
            yield f"{name} normalises by the request's own batch, as in training"
        for said in self.dropping():
            yield f"{said}: build the graph with training=False, or fix the rate with --feed"
        for name in self.random:
            yield f"{name} draws random numbers at each request: is it dropout?"

    def dropping(self) -> Iterator[str]:
        """Sentences on dropout and noise that are on, for the user."""
        for name, rate in self.dropouts:
            part = "a random part" if rate is None else f"a random {rate:.3g}"
            yield f"{name} drops {part} of its input at each request, as dropout does in training"
        for name in self.noises:
            yield f"{name} puts noise on its input at each request, as in training"


class KeptState(Struct, frozen=True):
    """State that is neither a variable nor a lookup table, and that operations of its own library restore.

    `importing` are the nodes that restore it, `prefix` is the placeholder that gets the bundle's prefix, and
    `tensors` are the names, in the checkpoint, of the tensors that they read.
    """

    importing: tuple[str, ...] = ()
    prefix: str = ""
    tensors: tuple[str, ...] = ()


NO_STATE = KeptState()


class InferenceGraph(Struct, frozen=True):
    """The graph to serve, cleaned, without values of variables.

    `meta_graph` is a `protos.MetaGraphDef` with a `graph_def` that holds exactly what the signatures need,
    plus table initialisers; its `signature_def` is complete; it has no saver, devices or collections.
    `init_op` names the node (NoOp) that initialises tables, None if there are none. `lookups` gives, for
    each variable by its key, how ids find its rows (a whole one that rows are gathered from is `DIV` over one
    part); a variable that is missing there is looked up in an unknown way. `objects` is the object graph of
    the model, whose variables name nodes of the graph (some of which are gone). `layers` has, for each
    variable of a Keras model by key (also for those that are not served), the places where Keras would look
    for it (the last one counts): path, dtype, shape, and the layer's name. `tables` are those that are
    restored; `dynamic_tables` are served from variables, which are among `variables` once their shapes are
    known. `training` are the parts of the graph that compute as in training. `notes` are for the user who
    exports. `traced_rows` is the number of rows that the source graph accepts, if it accepts only one
    number. `foreign` are the operations that stock TensorFlow lacks; `state` is restored by operations of
    their libraries; `outside` are the operations that reach out of the model.
    """

    source: str
    meta_graph: Proto
    variables: tuple[GraphVariable, ...]
    assets: tuple[Asset, ...] = ()
    init_op: str | None = None
    lookups: Mapping[str, PartitionStrategy] = field(default_factory=dict)
    tables: tuple[GraphTable, ...] = ()
    training: TrainingMode = field(default_factory=TrainingMode)
    notes: tuple[str, ...] = ()
    objects: ObjectGraph | None = None
    layers: Mapping[str, tuple[TensorRef, ...]] = field(default_factory=dict)
    traced_rows: int | None = None
    dynamic_tables: tuple[GraphDynamicTable, ...] = ()
    foreign: tuple[str, ...] = ()
    state: KeptState = NO_STATE
    outside: tuple[Outside, ...] = ()
