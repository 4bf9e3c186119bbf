"""Read what lies at a path: a checkpoint, a graph, a published version, or a model with its versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.embedding_variables import bucket_sizes, embedding_variables
from exporter.checkpoint.tensor_bundle import index_path, memory_map, read_catalog
from exporter.delta.spans import Position
from exporter.delta.table_changes import ServedTable
from exporter.errors import CheckpointError, CorruptFile, ExportError, ManifestError, NotUpdatable
from exporter.graph.deeprec_conversion import looked_up
from exporter.graph.feeds import hands_over_batches
from exporter.graph.metagraph import input_placeholders, likely_outputs, read_metagraph
from exporter.graph.nodes import Endpoint, GraphIndex
from exporter.graph.saved_model import SERVE_TAG, read_saved_model
from exporter.mapping.build import Extra, classify_extras
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.manifest import Manifest
from exporter.publish.mapped_state import tables_state
from exporter.publish.permission import held_at
from exporter.publish.versions import read_manifest, version_dirs
from exporter.storage import mirror
from exporter.storage.files import is_gone
from exporter.storage.layout import (
    MANIFEST_FILE,
    SAVED_MODEL_FILES,
    VARIABLES_DIRECTORY,
    VARIABLES_NAME,
    is_saved_model,
)
from exporter.tables.change_index import ArrayState, TableState, live_rows
from exporter.tables.geometry import PARTS, TableGeometry
from exporter.tables.lookup import first_defaults
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import SCALE_BYTES
from exporter.wire.protos import Proto

Array = np.ndarray[Any, Any]


class EmbeddingTable(Struct, frozen=True):
    """An embedding variable: a table whose rows have arbitrary integers as keys."""

    name: str
    """The variable's name, without its part."""
    key_dtype: str
    """The type of its keys."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """How many numbers a row has."""
    keys: int
    """How many keys have a row."""
    bytes: int
    """Bytes of the rows."""
    filtered_keys: int
    """How many more keys were seen, but too seldom to get a row."""
    parts: int
    """In how many parts it is stored."""
    slots: tuple[str, ...]
    """The optimizer's slots beside it."""
    keys_by_remainder: tuple[int, ...]
    """For 0 to 999: how many keys have this remainder of a division by 1000."""


def embedding_tables(catalog: Catalog) -> Iterator[EmbeddingTable]:
    """Yield the embedding variables of a checkpoint, each with its slots."""
    variables = embedding_variables(catalog)
    for variable in variables.values():
        if variable.slot_of is None:
            below = f"{variable.name}/"
            slots = (name for name, other in variables.items() if other.slot_of == variable.name)
            yield EmbeddingTable(
                name=variable.name,
                key_dtype=variable.key_dtype.label,
                dtype=variable.value_dtype.label,
                dimension=variable.dim,
                keys=variable.rows,
                bytes=variable.bytes_,
                filtered_keys=variable.filtered_keys,
                parts=len(variable.parts),
                slots=tuple(name.removeprefix(below) for name in slots),
                keys_by_remainder=tuple(bucket_sizes(catalog, variable).tolist()),
            )


class ServedTableView(Struct, frozen=True):
    """A dynamic table as it is served: rows have arbitrary integers as keys."""

    name: str
    """Its name."""
    dtype: str
    """The type of its rows."""
    dimension: int
    """How many numbers a row has."""
    keys: int
    """How many keys it holds."""
    free_rows: int
    """How many new keys there is room for."""
    load_factor: float
    """Which part of its index's places is taken."""
    bytes: int
    """Bytes of its rows, free ones among them."""
    index_bytes: int
    """Bytes of what leads from keys to rows."""


def tables_of_bundle(catalog: Catalog, graphs: Iterable[Proto]) -> Iterator[ServedTableView]:
    """Yield the dynamic tables of a SavedModel's graphs, as its variables hold them."""
    firsts = {name: first for graph in graphs for name, first in first_defaults(graph.graph_def).items()}
    for name, first in sorted(firsts.items()):
        found = [catalog.tensors.get(f"{name}/{part}") for part in PARTS]
        seeds, rows, keys, values = found
        if seeds is None or rows is None or keys is None or values is None:
            continue
        geometry = _geometry(name, seeds.shape, rows.shape, keys.shape, first)
        empty = np.empty(0, np.int64)
        state = ArrayState(empty, memory_map(catalog, rows), empty)
        yield _view(name, values.dtype, values.shape[1], geometry, state)


def tables_of_log(log: DeltaLog) -> Iterator[ServedTableView]:
    """Yield the dynamic tables of a log at its newest position.

    Raises:
        CheckpointError: they cannot be read.
    """
    tables = log.base.entry.mapping_spec.dynamic
    if tables:
        state = log.state(only={key for table in tables for key in table.keys})
        for table in tables:
            served = ServedTable.of(table, log.schema, state)
            values = served.row_values
            yield _view(table.name, values.dtype, values.shape[1], served.geometry, served)


def _geometry(
    name: str, seeds: Sequence[int], rows: Sequence[int], keys: Sequence[int], first_default: int
) -> TableGeometry:
    """Return a table's geometry by the shapes of its variables; CorruptFile if they contradict each other."""
    try:
        return TableGeometry.of_shapes(seeds[0], rows[0], keys[0], keys[0] - first_default)
    except (ValueError, IndexError) as error:
        raise CorruptFile(f"the variables of table {name!r} are inconsistent: {error}") from None


def _view(name: str, dtype: DType, width: int, geometry: TableGeometry, state: TableState) -> ServedTableView:
    """Return what `inspect` shows of a table whose rows are stored as `width` numbers of `dtype`.

    Rows of int8 are codes with a scale behind them: trainers' tables of integers are not served by keys.
    """
    try:
        keys = int(np.count_nonzero(live_rows(geometry, state)))
    except IndexError:
        raise CorruptFile(f"the index of table {name!r} leads to rows that it does not have") from None
    return ServedTableView(
        name=name,
        dtype=dtype.label,
        dimension=width - SCALE_BYTES if dtype is DType.INT8 else width,
        keys=keys,
        free_rows=geometry.usable_rows - keys,
        load_factor=round(keys / geometry.slots, 3),
        bytes=geometry.capacity * width * (dtype.itemsize or 0),
        index_bytes=geometry.index_bytes,
    )


class TensorSpec(Struct, frozen=True):
    """An input or output of a signature, or a tensor of a graph."""

    name: str
    """What requests call it."""
    tensor: str
    """The tensor in the graph."""
    dtype: str
    """Its type."""
    shape: tuple[int, ...] | None
    """Its shape, -1 for any size; null if not even the number of dimensions is known."""

    @property
    def shape_text(self) -> str:
        """`[?,3]`; `[...]` if not even the number of dimensions is known."""
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
    """What a request holds."""
    outputs: tuple[TensorSpec, ...]
    """What an answer holds."""

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"({inputs}) -> {outputs}"


class CheckpointView(Struct, frozen=True):
    """A checkpoint: all its tensors, with what each is probably for, and its tables by keys.

    `problem` says why they cannot be read.
    """

    catalog: Catalog
    kinds: tuple[Extra, ...]
    tables: tuple[EmbeddingTable, ...] = ()
    problem: CheckpointError | None = None

    def __repr__(self) -> str:
        return f"CheckpointView({self.catalog!r})"


class GraphView(Struct, frozen=True):
    """A `.meta` file: what could be asked of it with `--input` and `--output`.

    `batches` are the tensors that queues and iterators give in training, `likely_outputs` what looks like
    answers, the likeliest first. `embedding_variables` are the tables by keys that it looks up.
    """

    path: Path
    nodes: int
    variables: int
    embedding_variables: tuple[str, ...]
    placeholders: tuple[TensorSpec, ...]
    batches: tuple[TensorSpec, ...]
    likely_outputs: tuple[TensorSpec, ...]
    signatures: Mapping[str, Signature]
    index: GraphIndex

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Every output of every node, by name."""
        for name in sorted(self.index.nodes):
            yield from _outputs(self.index, name)


class BundleView(Struct, frozen=True):
    """A SavedModel with the signatures of its graphs for serving, or of all if it has none.

    `manifest` is None if another program wrote it, `catalog` if it has no variables. `tables` are its dynamic
    tables. `mapped` says what servers here do with tables that were made to be mapped; None if none were.
    """

    path: Path
    signatures: Mapping[str, Signature]
    catalog: Catalog | None
    manifest: Manifest | None
    tables: tuple[ServedTableView, ...] = ()
    mapped: str | None = None


class ModelView(Struct, frozen=True):
    """A model base path with its versions, newest first.

    `at` is the newest position, which deltas lead to; None if it is not known. `tables` are the dynamic
    tables of its log, as they are then.
    """

    path: Path
    versions: tuple[BundleView, ...]
    at: Position | None = None
    hold: int | None = None
    tables: tuple[ServedTableView, ...] = ()


Inspection: TypeAlias = CheckpointView | GraphView | BundleView | ModelView


def inspect(path: Path) -> Inspection:
    """Read whatever `path` is, without importing TensorFlow.

    Raises:
        CheckpointError: nothing is there, or it is damaged.
        GraphError: a graph file is damaged.
    """
    path = mirror.local(path)
    if path.name in SAVED_MODEL_FILES:
        path = path.parent
    if is_saved_model(path):
        return _bundle(path)
    if path.is_file() and path.suffix == ".meta":
        return _graph(path)
    if bundles := _bundles(path):
        return ModelView(path, bundles, _newest_position(path, bundles[0]), held_at(path), _tables(path))
    return _checkpoint(open_checkpoint(path))


def _bundles(model: Path) -> tuple[BundleView, ...]:
    """Read the versions of a model, newest first; those that retention removes meanwhile are left out."""
    versions = [child.path for child in version_dirs(model)] if model.is_dir() else []
    found = []
    for version in versions:
        try:
            found += [_bundle(version)] if is_saved_model(version) else []
        except (ExportError, OSError):
            if not is_gone(version):
                raise
    return tuple(found)


def _checkpoint(catalog: Catalog) -> CheckpointView:
    kinds = tuple(classify_extras(catalog))
    try:
        return CheckpointView(catalog, kinds, tuple(embedding_tables(catalog)))
    except CheckpointError as error:
        return CheckpointView(catalog, kinds, problem=error)


def _newest_position(model: Path, newest: BundleView) -> Position | None:
    """Return the newest position of a log, or of plain versions; None if it cannot be read."""
    try:
        return read_log(model).at
    except ManifestError:
        return None
    except NotUpdatable:
        return None if newest.manifest is None else Position(newest.manifest.position, newest.manifest.step)


def _tables(model: Path) -> tuple[ServedTableView, ...]:
    try:
        return tuple(tables_of_log(read_log(model)))
    except (ManifestError, NotUpdatable):
        return ()


def signatures_of(meta_graph: Proto) -> dict[str, Signature]:
    """Return the signatures of a MetaGraphDef by name, without a SavedModel's pseudo-signatures."""
    return {
        name: Signature(
            signature.method_name.rpartition("/")[2],
            tuple(_spec(alias, info) for alias, info in sorted(signature.inputs.items())),
            tuple(_spec(alias, info) for alias, info in sorted(signature.outputs.items())),
        )
        for name, signature in sorted(meta_graph.signature_def.items())
        if not name.startswith("__")
    }


def _bundle(path: Path) -> BundleView:
    prefix = path / VARIABLES_DIRECTORY / VARIABLES_NAME
    graphs = [*read_saved_model(path).meta_graphs]
    graphs = [graph for graph in graphs if SERVE_TAG in graph.meta_info_def.tags] or graphs
    catalog = read_catalog(prefix) if index_path(prefix).exists() else None
    manifest = read_manifest(path) if (path / MANIFEST_FILE).exists() else None
    record = None if manifest is None or mirror.is_remote(path) else manifest.mapped
    return BundleView(
        path,
        dict(sorted({name: one for graph in graphs for name, one in signatures_of(graph).items()}.items())),
        catalog,
        manifest,
        () if catalog is None else tuple(tables_of_bundle(catalog, graphs)),
        None if record is None else tables_state(record, path),
    )


def _graph(path: Path) -> GraphView:
    meta_graph = read_metagraph(path)
    index = GraphIndex.of(meta_graph)
    nodes = meta_graph.graph_def.node
    variables = [node for node in nodes if node.op in ("Variable", "VariableV2", "VarHandleOp")]
    return GraphView(
        path,
        len(nodes),
        len(variables),
        looked_up(meta_graph, index),
        tuple(map(_placeholder, input_placeholders(index))),
        tuple(spec for node in nodes if hands_over_batches(node.op) for spec in _outputs(index, node.name)),
        tuple(_tensor(index, tensor) for tensor in likely_outputs(index)),
        signatures_of(meta_graph),
        index,
    )


def _outputs(index: GraphIndex, name: str) -> Iterator[TensorSpec]:
    """Yield the outputs of a node."""
    for output, dtype in enumerate(index.output_dtypes(index.nodes[name]) or ()):
        tensor = Endpoint(name, output)
        yield TensorSpec(str(tensor), str(tensor), dtype.label, index.shape(tensor))


def _tensor(index: GraphIndex, tensor: Endpoint) -> TensorSpec:
    dtypes = index.output_dtypes(index.nodes[tensor.node])
    label = dtypes[tensor.output].label if dtypes and tensor.output < len(dtypes) else "unknown type"
    return TensorSpec(str(tensor), str(tensor), label, index.shape(tensor))


def _spec(alias: str, info: Proto) -> TensorSpec:
    kind = info.WhichOneof("encoding")
    name = info.name if kind == "name" else str(kind)
    return TensorSpec(alias, name, _label(info.dtype), _shape(info.tensor_shape))


def _placeholder(node: Proto) -> TensorSpec:
    return TensorSpec(
        node.name, f"{node.name}:0", _label(node.attr["dtype"].type), _shape(node.attr["shape"].shape)
    )


def _shape(shape: Proto) -> tuple[int, ...] | None:
    return None if shape.unknown_rank else tuple(int(dim.size) for dim in shape.dim)


def _label(number: int) -> str:
    """Return a dtype's label by its number; `type 99` if it has none."""
    try:
        return DType(number).label
    except ValueError:
        return f"type {number}"
