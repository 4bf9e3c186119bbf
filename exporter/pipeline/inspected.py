"""The results of `inspect` as values: a checkpoint, a graph, a version, a model with its versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from exporter.catalog import Catalog, Extra
from exporter.delta.spans import Position
from exporter.errors import CheckpointError
from exporter.publish.manifest import Manifest
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


class EmbeddingTable(Struct, frozen=True):
    """An embedding variable: a table whose rows have arbitrary integers as keys."""

    name: str
    """The variable's name, without its part."""
    key_dtype: str
    """The type of its keys."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """The number of values in a row."""
    keys: int
    """The number of keys with a row."""
    bytes: int
    """Bytes of the rows."""
    filtered_keys: int
    """The number of further keys, which were seen too seldom to get a row."""
    parts: int
    """The number of parts in which it is stored."""
    slots: tuple[str, ...]
    """The optimizer's slots beside it."""
    keys_by_remainder: tuple[int, ...]
    """The number of keys for each remainder, 0 to 999, of a division by 1000."""


class ServedTableView(Struct, frozen=True):
    """A dynamic table as served: its rows have arbitrary integers as keys."""

    name: str
    """Its name."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """The number of values in a row."""
    keys: int
    """The number of keys in it."""
    free_rows: int
    """The number of new keys for which there is room."""
    load_factor: float
    """The share of its index's places in use."""
    bytes: int
    """The bytes of its rows, including free ones."""
    index_bytes: int
    """The bytes of its index from keys to rows."""


class TensorSpec(Struct, frozen=True):
    """An input or output of a signature, or a tensor of a graph."""

    name: str
    """Its name in requests."""
    tensor: str
    """The tensor in the graph."""
    dtype: str
    """Its type."""
    shape: tuple[int, ...] | None
    """Its shape, -1 for any size; null if not even the number of dimensions is known."""

    @property
    def shape_text(self) -> str:
        """The shape as text, such as `[?,3]`; `[...]` if not even the number of dimensions is known."""
        sizes = (
            "..." if self.shape is None else ",".join("?" if size < 0 else str(size) for size in self.shape)
        )
        return f"[{sizes}]"

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{self.shape_text}"


class Signature(Struct, frozen=True):
    """A signature of a graph."""

    method: str
    """`predict`, `classify` or `regress`, or another method's name."""
    inputs: tuple[TensorSpec, ...]
    """The inputs of a request."""
    outputs: tuple[TensorSpec, ...]
    """The outputs of an answer."""

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"({inputs}) -> {outputs}"


class ProposedInput(Struct, frozen=True):
    """A tensor that an answer needs, and the name that requests could have for it."""

    name: str
    """The name that requests could use."""
    tensor: str
    """The tensor in the graph."""
    feeds: tuple[str, ...]
    """The variables with which it is first used."""


class CheckpointView(Struct, frozen=True):
    """A checkpoint: all its tensors with their probable purpose, and its tables by keys.

    `problem` says why the tables cannot be read; None if they can.
    """

    catalog: Catalog
    kinds: tuple[Extra, ...]
    tables: tuple[EmbeddingTable, ...] = ()
    problem: CheckpointError | None = None

    def __repr__(self) -> str:
        return f"CheckpointView({self.catalog!r})"


class GraphView(Struct, frozen=True):
    """A `.meta` file: the tensors that could be named with `--input` and `--output`.

    `batches` are the tensors that queues and iterators give in training, `likely_outputs` the probable
    answers, the likeliest first. `embedding_variables` are the tables by keys that it looks up. `feeds` has
    the variables with which each placeholder or batch is used. `read_tensors` yields every output of every
    node, by name.
    """

    path: Path
    nodes: int
    variables: int
    embedding_variables: tuple[str, ...]
    placeholders: tuple[TensorSpec, ...]
    batches: tuple[TensorSpec, ...]
    likely_outputs: tuple[TensorSpec, ...]
    signatures: Mapping[str, Signature]
    feeds: Mapping[str, tuple[str, ...]]
    read_tensors: Callable[[], Iterator[TensorSpec]]


class BundleView(Struct, frozen=True):
    """A SavedModel with the signatures of its graphs for serving, or of all if it has none.

    `manifest` is None if another program wrote it, `catalog` if it has no variables. `tables` are its dynamic
    tables. `mapped` is the state, on servers here, of tables made for mapping; None if there are none.
    `oldest_server` is the oldest TensorFlow whose servers load it.
    """

    path: Path
    signatures: Mapping[str, Signature]
    catalog: Catalog | None
    manifest: Manifest | None
    tables: tuple[ServedTableView, ...] = ()
    mapped: str | None = None
    oldest_server: str | None = None


class ModelView(Struct, frozen=True):
    """A model base path with its versions, newest first.

    `at` is the newest position, deltas included; None if it is not known. `tables` are the dynamic tables of
    its log at that position. `hold` is None without a hold, or if it cannot be read: `is_hold_unread` then.
    """

    path: Path
    versions: tuple[BundleView, ...]
    at: Position | None = None
    hold: int | None = None
    tables: tuple[ServedTableView, ...] = ()
    is_hold_unread: bool = False


Inspection: TypeAlias = CheckpointView | GraphView | BundleView | ModelView


def signatures_of(meta_graph: Proto) -> dict[str, Signature]:
    """Return the signatures of a MetaGraphDef, sorted by name, without names that begin with `__`.

    A SavedModel records its initialisation under such names.
    """
    return {
        name: Signature(
            signature.method_name.rpartition("/")[2],
            tuple(_spec(alias, info) for alias, info in sorted(signature.inputs.items())),
            tuple(_spec(alias, info) for alias, info in sorted(signature.outputs.items())),
        )
        for name, signature in sorted(meta_graph.signature_def.items())
        if not name.startswith("__")
    }


def _spec(alias: str, info: Proto) -> TensorSpec:
    kind = info.WhichOneof("encoding")
    name = info.name if kind == "name" else str(kind)
    return TensorSpec(alias, name, label_of(info.dtype), shape_of(info.tensor_shape))


def shape_of(shape: Proto) -> tuple[int, ...] | None:
    """Return the sizes in a TensorShapeProto, -1 for any size; None if the rank is unknown."""
    return None if shape.unknown_rank else tuple(int(dim.size) for dim in shape.dim)


def label_of(number: int) -> str:
    """Return TensorFlow's name of a DataType's number; `type N` for an unknown number."""
    try:
        return DType(number).label
    except ValueError:
        return f"type {number}"
