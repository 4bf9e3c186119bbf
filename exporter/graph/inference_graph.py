"""`InferenceGraph`: the pruned graph, without variables' values, made from every kind of `--model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct, field

from exporter.catalog import SliceSpec, TensorRef
from exporter.newer_python import StrEnum
from exporter.tables.parts import PARTS
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import DtypeLabel, Shape, Text, doc

if TYPE_CHECKING:
    import numpy as np

    from exporter.checkpoint.object_graph import ObjectGraph
    from exporter.wire.protos import Proto


class PartitionStrategy(Enum):
    """The way in which `embedding_lookup` finds a row in a partitioned table of n parts.

    `MOD`: row i is row i // n of part i % n. `DIV`: parts are contiguous ranges of rows. `NONE`: the parts
    are never looked up by id (they are concatenated), so their order is the rows' order.
    """

    MOD = "mod"
    DIV = "div"
    NONE = "none"


class GraphVariable(Struct, frozen=True):
    """A variable of the inference graph."""

    node: str  # its VarHandleOp
    key: str  # the name it is restored by; for a part, the whole variable's
    dtype: DType
    shape: tuple[int, ...]
    part: SliceSpec | None = None  # a part's box in the whole variable

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole variable named `key`."""
        return self.part.full_shape if self.part else self.shape

    @property
    def box(self) -> SliceSpec:
        """Return the variable's box in the whole variable `key`; an ordinary variable is the whole itself."""
        return self.part or SliceSpec.whole(self.shape)

    @property
    def served_name(self) -> str:
        """Return the variable's name in a delta: its key, for a part followed by the slice in brackets."""
        part = self.part
        return self.key if part is None or part.is_full else f"{self.key}[{part.restore_spec}]"


class GraphTable(Struct, frozen=True, rename={"key_label": "key_dtype", "value_label": "value_dtype"}):
    """A lookup table whose contents are served."""

    node: Annotated[Text, doc("the name of the table's node")]
    keys: Annotated[Text, doc("the name of the tensor with its keys")]
    values: Annotated[Text, doc("the name of the tensor with its values")]
    key_label: Annotated[DtypeLabel, doc("the type of its keys")]
    value_label: Annotated[DtypeLabel, doc("the type of its values")]
    # None if only the checkpoint has it: a manifest always has both shapes.
    key_shape: Annotated[Shape | None, doc("the stored shape of one key")]
    value_shape: Annotated[Shape | None, doc("the stored shape of one value")]
    has_all_buckets: Annotated[bool, doc("true if there is an entry for each bucket")] = False

    @property
    def key_dtype(self) -> DType:
        """The dtype of the table's keys."""
        return DType.of(self.key_label)

    @property
    def value_dtype(self) -> DType:
        """The dtype of the table's values."""
        return DType.of(self.value_label)


class GraphDynamicTable(Struct, frozen=True, eq=False):
    """A table with arbitrary integers as keys of its rows; it is served from four ordinary variables."""

    name: str  # in a checkpoint, without a part's number
    nodes: tuple[str, str, str, str]  # its VarHandleOps, in the order of `exporter.tables.parts.PARTS`
    key_dtype: DType
    value_dtype: DType
    dim: int
    defaults: np.ndarray  # [d, dim], of `value_dtype`: an absent key reads row `key mod d`
    is_laid_out: bool = False  # True: the checkpoint is a published version, and has these four variables

    @property
    def variables(self) -> tuple[GraphVariable, ...]:
        """Return the table's four variables, in the order of `nodes`.

        In their shapes -1 is a size that only a checkpoint gives.
        """
        dtypes = (DType.INT64, DType.INT32, DType.INT64, self.value_dtype)
        shapes: tuple[tuple[int, ...], ...] = ((-1,), (-1,), (-1,), (-1, self.dim))
        return tuple(
            GraphVariable(node, f"{self.name}/{suffix}", dtype, shape)
            for node, suffix, dtype, shape in zip(self.nodes, PARTS, dtypes, shapes, strict=True)
        )


class JoinedPart(Struct, frozen=True):
    """The place of a variable's rows in a joined variable: that variable's VarHandleOp, and the first row."""

    node: str
    first: int


class Asset(Struct, frozen=True):
    """A file that the graph reads; `node` is the constant with its path."""

    node: str
    source: Path
    name: str = ""  # set if two files of a graph have the same name

    @property
    def file_name(self) -> str:
        """The file's name under `assets/`."""
        return self.name or self.source.name


class Effect(StrEnum):
    """The effect of an operation outside of the model."""

    READS = "reads files"
    WRITES = "writes files"
    CALLS = "calls other processes or devices"
    RUNS = "runs code, or ends the process"
    UNKNOWN = "may do anything: nobody has judged what it does"


class Outside(Struct, frozen=True):
    """An operation with an effect outside the model, and the function that it is in ("": the graph)."""

    node: str
    op: str
    effect: Effect
    function: str = ""

    def __str__(self) -> str:
        where = f" in function {self.function!r}" if self.function else ""
        return f"{self.op} {self.node!r}{where} {self.effect.value}"


class TrainingMode(Struct, frozen=True):
    """The operations of a served graph, in words, that compute as in training."""

    batch_norms: tuple[str, ...] = ()  # they normalise by the request's own batch
    dropouts: tuple[tuple[str, float | None], ...] = ()  # they drop a random part, this one if it is constant
    noises: tuple[str, ...] = ()  # they add normal noise to their input, or multiply it by such noise
    random: tuple[str, ...] = ()  # they draw other random numbers
    idle: frozenset[str] = frozenset()  # the nodes of variables that are read only in branches that never run

    def notes(self) -> Iterator[str]:
        """Yield notes for the user, one line each: batch statistics, dropout and noise, random numbers."""
        for name in self.batch_norms:
            yield f"{name} normalises by the request's own batch, as in training"
        for said in self.dropping():
            yield f"{said}: build the graph with training=False, or fix the rate with --feed"
        for name in self.random:
            yield f"{name} draws random numbers at each request: is it dropout?"

    def dropping(self) -> Iterator[str]:
        """Yield a sentence for the user for each dropout that is on, then for each noise."""
        for name, rate in self.dropouts:
            part = "a random part" if rate is None else f"a random {rate:.3g}"
            yield f"{name} drops {part} of its input at each request, as dropout does in training"
        for name in self.noises:
            yield f"{name} puts noise on its input at each request, as in training"


class KeptState(Struct, frozen=True):
    """State outside of variables and lookup tables, which operations of its own library restore."""

    importing: tuple[str, ...] = ()  # the nodes that restore it
    prefix: str = ""  # the placeholder that gets the bundle's prefix
    tensors: tuple[str, ...] = ()  # the names, in the checkpoint, of the tensors that these nodes read


NO_STATE = KeptState()


class InferenceGraph(Struct, frozen=True):
    """The graph to serve, cleaned, without values of variables."""

    source: str
    meta_graph: Proto  # only the nodes that signatures need, initialisers, and complete signatures
    variables: tuple[GraphVariable, ...]
    assets: tuple[Asset, ...] = ()
    init_op: str | None = None  # the NoOp that waits for all initialisers
    # {variable's key: how ids find its rows}, without variables for which it is unknown.
    lookups: Mapping[str, PartitionStrategy] = field(default_factory=dict)
    tables: tuple[GraphTable, ...] = ()
    training: TrainingMode = field(default_factory=TrainingMode)
    notes: tuple[str, ...] = ()  # for the user who exports
    objects: ObjectGraph | None = None  # their variables name nodes, some of which are gone
    # {variable's key: where Keras looks for it in a weights file}; the last place counts.
    layers: Mapping[str, tuple[TensorRef, ...]] = field(default_factory=dict)
    traced_rows: int | None = None  # the only number of rows that the source accepts; None if it takes any
    opened_batch: int | None = None  # training's batch size, if its numbers were made to follow requests
    dynamic_tables: tuple[GraphDynamicTable, ...] = ()  # `variables` has theirs once shapes are known
    joined: Mapping[str, JoinedPart] = field(default_factory=dict)  # {variable's node: its place now}
    foreign: tuple[str, ...] = ()  # operations that stock TensorFlow lacks
    state: KeptState = NO_STATE
    outside: tuple[Outside, ...] = ()
