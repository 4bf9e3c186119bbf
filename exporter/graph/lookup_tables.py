"""Find what fills a graph's lookup tables, from which files, and which tables a checkpoint restores.

*Static tables* are filled by an initialiser when a model is loaded. The files that it reads become assets.

*Tables that training fills* have their contents in the checkpoint, and are restored like variables. A Saver
stores a `MutableHashTable` or `DenseHashTable` of the collection SAVEABLE_OBJECTS as two tensors,
`<name>-keys` and `<name>-values`; for a dense table these have all buckets, including empty ones. The program
chooses the name, which is not always the node's. Source: tensorflow/python/ops/lookup_ops.py.

`differing_lookups` names the lookups whose static tables two graphs fill differently.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from exporter.errors import GraphError, MissingAsset, NotServable, ShapeMismatch
from exporter.graph.functions import callers, reachable
from exporter.graph.inference_graph import Asset, GraphDynamicTable, GraphTable, GraphVariable, InferenceGraph
from exporter.graph.keys import TABLE_IMPORTS, restored_names
from exporter.graph.nodes import (
    GraphIndex,
    attr,
    attr_dtype,
    attr_text,
    closure,
    const_value,
    data_inputs,
    endpoint,
    free_name,
    new_node,
    shape_of,
    shape_proto,
    through_identities,
    waited_for,
)
from exporter.graph.servable import called_functions
from exporter.graph.source_graph import SourceGraph, TableKey
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import set_sizes
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_STATIC = frozenset({"HashTable", "HashTableV2"})
_MUTABLE = re.compile(r"(Anonymous)?Mutable(Dense)?HashTable\w*")
FROM_FILE = re.compile(r"InitializeTableFromTextFile(V2)?")
FINDS = frozenset({"LookupTableFind", "LookupTableFindV2"})
FILLS = re.compile(r"InitializeTable(FromTextFile|FromDataset)?(V2)?|LookupTableImport(V2)?")
_ASSET_COLLECTION = "asset_filepaths"
_INIT_COLLECTION = "table_initializer"
_RESTORABLE = re.compile(r"Mutable(Dense)?HashTable(OfTensors)?V2")
_OF_KERAS = re.compile(r"hash_table_[0-9a-f]{8}-[0-9a-f-]{27}$")
"""The random name of a Keras layer's table."""


def check_tables(nodes: Mapping[str, Proto], needed: Iterable[str]) -> None:
    """Raise NotServable if one of the nodes `needed` is a table whose contents no checkpoint restores.

    Such tables are mutable and made by an operation other than MutableHashTable(OfTensors)V2 and
    MutableDenseHashTableV2. `needed` are names in `nodes`.
    """
    for name in needed:
        if _MUTABLE.fullmatch(nodes[name].op) and not is_restorable(nodes[name].op):
            raise NotServable(
                f"table {name!r} is a {nodes[name].op}, which would be empty when served",
                cause="its contents change while training, and no checkpoint holds them",
                hint="fill a static table (tf.lookup.StaticHashTable) from the same keys for inference",
            )


def initialisers(index: GraphIndex, needed: Collection[str], init_op: str | None) -> list[str]:
    """Return the names of the nodes that fill the tables among `needed`, and of calls that may fill some.

    `needed` has names of nodes. Nodes that fill come first, in the graph's order; calls follow in any order.
    They are calls of functions under `init_op` (None: the graph has none) that take no resource, or use a
    needed table. GraphError if the graph lacks a function that is called.
    """
    tables = _Tables(index)
    wanted = tables.behind(needed)
    found = [
        node.name
        for node in index.nodes.values()
        if FILLS.fullmatch(node.op) and tables.behind(_table_of(node)) & wanted
    ]
    for name in waited_for(index.nodes, [init_op] if init_op else []):
        node = index.nodes[name]
        # Assignments under an init op are left out: variables get their values from a checkpoint.
        if node.op.endswith("PartitionedCall") or node.op in index.functions:
            resources = {source.node for source in data_inputs(node) if _is_resource(index, source.node)}
            if not resources or tables.behind([name, *resources]) & wanted:
                found.append(name)
    return found


def check_filled(meta_graph: Proto, filling: Collection[str]) -> None:
    """Raise NotServable for a static table of the graph that nothing fills.

    A table is filled by a node named in `filling`, an initialiser or a call of a function that fills it, or
    by the function that makes it. GraphError if two nodes have the same name, or one has none, or if the
    graph lacks a called function.
    """
    index = GraphIndex.of(meta_graph)
    tables = _Tables(index)
    wanted = tables.behind(index.nodes)
    if not wanted:
        return
    filled = tables.filled_where_made()
    for name in filling:
        node = index.nodes[name]
        if FILLS.fullmatch(node.op):
            filled |= tables.behind(_table_of(node))
        elif tables.fills(node):
            filled |= tables.behind([name, *(source.node for source in data_inputs(node))])
    empty = sorted(wanted - filled)
    if empty:
        finds = (node for node in index.nodes.values() if node.op in FINDS)
        reader = next((node.name for node in finds if empty[0] in tables.behind(_table_of(node))), "")
        where = f", which {reader!r} reads" if reader else ""
        given = ": StringLookup and IntegerLookup take vocabulary=[...]" if _OF_KERAS.match(empty[0]) else ""
        raise NotServable(
            f"nothing in the graph fills table {empty[0]!r}{where}",
            cause="it would be empty when served",
            hint=f"build the graph with the table's initializer{given}; or choose other outputs",
        )


class _Tables:
    """The static tables of a graph, each identified by its shared name, or else by the node that makes it."""

    # That node may be in a function: a SavedModel that was loaded and saved again makes tables in calls.

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._made = {
            name: {_identity(node, f"{name}/") for node in function.node_def if node.op in _STATIC}
            for name, function in index.functions.items()
        }
        self._makers = callers(index.functions, {name for name, made in self._made.items() if made})

    def behind(self, names: Iterable[str]) -> set[str]:
        """Return the names of the static tables that the nodes `names` make or forward.

        A call makes the tables that its function makes, directly or through others. GraphError if the graph
        lacks a called function.
        """
        found: set[str] = set()
        for name in names:
            node = self._index.nodes.get(through_identities(self._index.nodes, name))
            if node is None:
                continue
            if node.op in _STATIC:
                found.add(_identity(node))
            elif self._makers and called_functions(node) & self._makers:
                called = reachable([node], self._index.functions)
                found |= {table for function in called for table in self._made[function]}
        return found

    def fills(self, node: Proto) -> bool:
        """True if a function that the node calls, directly or through others, fills some table.

        GraphError if the graph lacks a called function.
        """
        functions = self._index.functions
        return any(_has_fill(functions[name]) for name in reachable([node], functions))

    def filled_where_made(self) -> set[str]:
        """Return the names of the static tables that are made in functions which also fill a table."""
        functions = self._index.functions.items()
        return {table for name, function in functions if _has_fill(function) for table in self._made[name]}


def _identity(node: Proto, scope: str = "") -> str:
    """Return the name of the table that a node makes: its shared name, else the node's, after `scope`.

    Nodes with equal names make the same table.
    """
    return attr_text(node, "shared_name") or f"{scope}{node.name}"


def _has_fill(function: Proto) -> bool:
    return any(FILLS.fullmatch(node.op) for node in function.node_def)


def add_init_op(meta_graph: Proto, index: GraphIndex) -> str | None:
    """Add a NoOp that waits for the table initialisers in the graph's collection, and return its name.

    None, and no new node, if the collection `table_initializer` names none. `index` is the graph's, and does
    not get the new node.
    """
    if _INIT_COLLECTION not in meta_graph.collection_def:
        return None
    listed = [endpoint(name).node for name in meta_graph.collection_def[_INIT_COLLECTION].node_list.value]
    # Some programs put iterators into that collection, too.
    filling = [name for name in listed if name in index.nodes and FILLS.fullmatch(index.nodes[name].op)]
    if not filling:
        return None
    name = free_name(index.nodes, "fill_tables")
    meta_graph.graph_def.node.append(new_node(name, "NoOp", after=filling))
    return name


def _table_of(node: Proto) -> list[str]:
    return [source.node for source in data_inputs(node)[:1]]


def _is_resource(index: GraphIndex, name: str) -> bool:
    node = index.nodes.get(name)
    dtypes = index.output_dtypes(node) if node is not None else None
    return bool(dtypes) and dtypes is not None and dtypes[0] is DType.RESOURCE


def read_assets_directly(nodes: dict[str, Proto], assets: Mapping[str, Path]) -> None:
    """Let initialisers read the paths of assets directly instead of through variables, in place.

    `nodes` are a graph's, by name; `assets` are files by the name of the node that holds their path. Such a
    node becomes a Const, if it is another operation.
    """
    # In an object-based SavedModel a placeholder for the path is assigned to a variable, which initialisers
    # read: the placeholder becomes a constant, and the read an Identity on it.
    if not assets:  # a large graph takes time to walk
        return
    for name in assets:
        if name in nodes and nodes[name].op != "Const":
            nodes[name] = path_constant(name, assets[name].name)
    sources = {}
    for node in nodes.values():
        inputs = data_inputs(node)
        if node.op == "AssignVariableOp" and len(inputs) > 1 and inputs[1].node in assets:
            sources[inputs[0].node] = inputs[1].node
    for name, node in [*nodes.items()]:
        inputs = data_inputs(node)
        if node.op == "ReadVariableOp" and inputs and inputs[0].node in sources:
            nodes[name] = new_node(name, "Identity", [sources[inputs[0].node]], T=DType.STRING)


def path_constant(name: str, file_name: str) -> Proto:
    """Return a new Const with an asset's file name.

    A loader feeds it the path in the version that it loads.
    """
    value = protos.TensorProto(dtype=int(DType.STRING), string_val=[file_name.encode()])
    return new_node(name, "Const", dtype=DType.STRING, value=value)


def find_assets(source: SourceGraph, nodes: Mapping[str, Proto], filling: Iterable[str]) -> tuple[Asset, ...]:
    """Return the existing files that nodes of a cleaned graph read, each with the Const that has its path.

    First come a SavedModel's own assets, then files of the text initialisers among the nodes named in
    `filling`, then the asset collection's. Two files of one name get different names in the version. A node
    that `nodes` lacks, or that is not a Const, is skipped unless an initialiser reads its path.

    Raises:
        MissingAsset: a file does not exist, or cannot be looked up.
        AccessRefused: the graph may not read it.
        NotServable: the path of an initialiser's file is computed.
        GraphError: an initialiser names no file.
    """
    candidates = [name for name in source.assets if name in nodes]
    candidates += [
        _file_name_node(nodes, nodes[name]) for name in filling if FROM_FILE.fullmatch(nodes[name].op)
    ]
    if _ASSET_COLLECTION in source.meta_graph.collection_def:
        listed = source.meta_graph.collection_def[_ASSET_COLLECTION].node_list.value
        candidates += [endpoint(text).node for text in listed]
    found: dict[str, Asset] = {}
    taken: dict[str, Path] = {}
    for name in dict.fromkeys(candidates):
        if name in nodes and nodes[name].op == "Const":
            path = _existing(source, name, nodes[name])
            found[name] = Asset(name, path, _free_file_name(path, taken))
    return tuple(found.values())


def _file_name_node(nodes: Mapping[str, Proto], node: Proto) -> str:
    """Return the name of the Const with the path of a table initialiser's file.

    NotServable if the path is computed, GraphError if the initialiser names no file.
    """
    inputs = data_inputs(node)
    if len(inputs) < 2:
        raise GraphError(f"table initialiser {node.name!r} names no file")
    name = through_identities(nodes, inputs[1].node)
    if nodes[name].op != "Const":
        raise NotServable(
            f"the file of table initialiser {node.name!r} is computed by {nodes[name].op} {name!r}",
            cause="only a file that is named in the graph can be exported with it",
            hint="give the initializer a constant path",
        )
    return name


def _existing(source: SourceGraph, name: str, node: Proto) -> Path:
    """Return the existing file that the Const `name` (`node`) names; MissingAsset if there is none.

    MissingAsset also if it cannot be looked up, AccessRefused if the graph may not read it.
    """
    path = _named_file(source, name, node)
    # A SavedModel's own asset is a complete path; a path in a constant may be relative to the graph.
    for candidate in (path,) if name in source.assets else _places(source, path):
        if _is_there(source, name, candidate):
            return candidate
    raise MissingAsset(f"the graph reads the file {str(path)!r} (in {name!r}), which is not there")


def _is_there(source: SourceGraph, name: str, path: Path) -> bool:
    """True if the file that the node `name` reads is at this path.

    Raises:
        AccessRefused: the graph may not read it.
        MissingAsset: the system cannot look it up, for instance because its name is too long.
    """
    try:
        source.trust.require_file(path, source.directory)
        return path.is_file()
    except (OSError, ValueError) as error:  # longer than paths can be, or with a zero byte
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise MissingAsset(f"the graph reads the file {str(path)!r} (in {name!r})", cause=cause) from error


def _places(source: SourceGraph, path: Path) -> tuple[Path, ...]:
    """Return the paths at which to look, in order, for a file that the graph names.

    These are the path itself, and the path below the graph's directory; of a graph that was found beside a
    checkpoint only the second.
    """
    return (source.directory / path,) if source.trust.is_found else (path, source.directory / path)


def _named_file(source: SourceGraph, name: str, node: Proto) -> Path:
    """Return the path of the SavedModel's asset with the node `name`, else the path in that Const (`node`).

    `Path("")` if the Const does not hold a single string.
    """
    if name in source.assets:
        return source.assets[name]
    value = const_value(node)
    text = value.ravel()[0] if value is not None and value.size == 1 else b""
    return Path(bytes(text).decode("utf-8", "surrogateescape") if isinstance(text, bytes) else "")


def files_to_feed(source: SourceGraph) -> dict[str, Path]:
    """Return {node: path} to feed when the init op of a source graph runs here: all assets, and moved files.

    A moved file is one that an initialiser reads, and that exists only below the graph's directory. Files
    that do not exist are left out. AccessRefused if the graph may not read a file, MissingAsset if it cannot
    be looked up, GraphError if two nodes have the same name, or one has none.
    """
    nodes = GraphIndex.of(source.meta_graph).nodes
    found = dict(source.assets)
    for node in nodes.values():
        inputs = data_inputs(node)
        if not FROM_FILE.fullmatch(node.op) or len(inputs) < 2:
            continue
        name = through_identities(nodes, inputs[1].node)
        path = _named_file(source, name, nodes[name])
        if name in found:
            continue
        for place in _places(source, path):
            if _is_there(source, name, place):
                if place != path:
                    found[name] = place
                break
    return found


def _free_file_name(path: Path, taken: dict[str, Path]) -> str:
    """Return the name of `path` in `assets/`: its own, with a number if another path in `taken` has it.

    The name is added to `taken`; the same path always gets the same name.
    """
    name, number = path.name, 0
    while taken.setdefault(name, path) != path:
        number += 1
        name = f"{path.stem}_{number}{path.suffix}"
    return name


def use_file_names(nodes: Mapping[str, Proto], assets: Iterable[Asset]) -> None:
    """Replace the paths in assets' Consts by the assets' bare file names, in place.

    A Const of another dtype than string is not changed. KeyError if `nodes` lacks an asset's node, GraphError
    if its type number is unknown.
    """
    for asset in assets:
        if attr_dtype(nodes[asset.node], "dtype") is DType.STRING:
            nodes[asset.node].CopyFrom(path_constant(asset.node, asset.file_name))


@cache
def is_restorable(op: str) -> bool:
    """True for an operation (its name) that makes a table which training fills and a checkpoint restores."""
    return _RESTORABLE.fullmatch(op) is not None


def table_keys(
    meta_graph: Proto, index: GraphIndex, given: Mapping[str, TableKey] | None = None
) -> dict[str, TableKey]:
    """Return {table's node: the names of its keys and values in checkpoints}, for tables that training fills.

    They come from the program (`given`, by node), else from the graph's own Saver, else from the node's name.
    """
    nodes = _restorable(index.nodes.values())
    if not nodes:
        return {}
    known = {
        through_identities(index.nodes, table): TableKey(keys, values)
        for table, (keys, values) in restored_names(meta_graph, index, TABLE_IMPORTS, count=2)
    }
    known |= given or {}
    by_identity = {_identity(node): known[node.name] for node in nodes if node.name in known}
    return {node.name: by_identity.get(_identity(node), TableKey.of(node.name)) for node in nodes}


def graph_tables(nodes: Mapping[str, Proto], keys: Mapping[str, TableKey]) -> tuple[GraphTable, ...]:
    """Return the tables of a cleaned graph that a checkpoint restores, each once, in the graph's order.

    `keys` has their names in checkpoints by node; a table that it lacks, or whose name another table has, is
    stored under its node's name. GraphError for an unknown data type number.
    """
    found: dict[str, GraphTable] = {}
    for node in _restorable(nodes.values()):
        stored = keys.get(node.name) or TableKey.of(node.name)
        if any(table.keys == stored.keys for table in found.values()):  # two objects may have the same name
            stored = TableKey.of(node.name)
        found.setdefault(
            _identity(node),
            GraphTable(
                node.name,
                stored.keys,
                stored.values,
                (attr_dtype(node, "key_dtype") or DType.INT64).label,
                (attr_dtype(node, "value_dtype") or DType.FLOAT).label,
                key_shape=None,
                value_shape=shape_of(attr(node, "value_shape").shape),
                has_all_buckets="Dense" in node.op,
            ),
        )
    return tuple(found.values())


def makers(graph_def: Proto, name: str) -> tuple[str, ...]:
    """Return the names of all nodes that make the same table as the node `name`, in the graph's order.

    The node `name` is one of them; StopIteration if it does not make a table that a checkpoint restores.
    """
    nodes = _restorable(graph_def.node)
    wanted = next(_identity(node) for node in nodes if node.name == name)
    return tuple(str(node.name) for node in nodes if _identity(node) == wanted)


def _restorable(nodes: Iterable[Proto]) -> list[Proto]:
    return [node for node in nodes if is_restorable(node.op)]


def with_table_shapes(graph: InferenceGraph, shapes: Mapping[str, tuple[int, ...]]) -> InferenceGraph:
    """Return a copy of the graph in which the variables of its dynamic tables have these shapes.

    They are added to `variables`, and the sizes in the nodes of lookups are set. The graph itself is returned
    if it has no dynamic tables. `shapes` is {served name of a table's variable: its shape}; KeyError if one
    is missing. ShapeMismatch if the shapes of a table's variables contradict each other, GraphError if a
    lookup's constant is damaged.
    """
    if not graph.dynamic_tables:
        return graph
    meta_graph = deepcopy(graph.meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    variables = list[GraphVariable]()
    for table in graph.dynamic_tables:
        sized = [replace(variable, shape=shapes[variable.key]) for variable in table.variables]
        for variable in sized:
            nodes[variable.node].attr["shape"].shape.CopyFrom(shape_proto(variable.shape))
            nodes[variable.node].attr.pop("_output_shapes", None)
        variables += sized
    sized_graph = replace(graph, meta_graph=meta_graph, variables=(*graph.variables, *variables))
    set_sizes(meta_graph.graph_def, table_geometries(sized_graph))
    return sized_graph


def table_geometries(graph: InferenceGraph) -> dict[str, TableGeometry]:
    """Return {dynamic table's name: its sizes}; KeyError if `variables` lacks a table's variable.

    ShapeMismatch if a table's shapes contradict each other.
    """
    shapes = {variable.key: variable.shape for variable in graph.variables}
    return {
        table.name: _geometry(table, [shapes[variable.key] for variable in table.variables])
        for table in graph.dynamic_tables
    }


def _geometry(table: GraphDynamicTable, shapes: list[tuple[int, ...]]) -> TableGeometry:
    try:
        (groups,), (slots,), (capacity,), _ = shapes
        return TableGeometry.of_shapes(groups, slots, capacity, len(table.defaults))
    except ValueError as error:
        raise ShapeMismatch(
            f"the variables of table {table.name!r} do not fit each other", cause=str(error)
        ) from error


def tables_among(
    tables: tuple[GraphDynamicTable, ...], nodes: Mapping[str, object]
) -> tuple[GraphDynamicTable, ...]:
    """Return the dynamic tables with at least one variable among these nodes, in the given order."""
    return tuple(table for table in tables if any(node in nodes for node in table.nodes))


_OLD_MAKERS = frozenset({"HashTable", "MutableHashTable", "MutableHashTableOfTensors"})
_OLD_USERS = frozenset(
    {
        *("InitializeTable", "InitializeTableFromTextFile", "LookupTableExport", "LookupTableFind"),
        *("LookupTableImport", "LookupTableInsert", "LookupTableSize"),
    }
)
_OLD_HANDING_ON = {
    f"Ref{name}": name for name in ("Enter", "Exit", "Identity", "Merge", "NextIteration", "Switch")
}


def use_resource_tables(meta_graph: Proto, index: GraphIndex) -> bool:
    """Give tables of TensorFlow 1.0 to 1.2 resource handles, in place; return True if the graph was changed.

    An operation such as HashTable returns its table as a reference, which no function takes, so that a
    signature could not be computed again after an update. HashTableV2 makes the same table, in the same
    kernel with the same attributes, and returns it as a resource (tensorflow/core/ops/lookup_ops.cc and
    core/kernels/lookup_table_op.cc). A graph in which any other operation takes such a handle is not changed.
    `index` is the graph's.
    """

    def takers(name: str) -> Iterator[str]:
        consumers = () if index.nodes[name].op in _OLD_USERS else index.consumers[name]
        return (reader for reader, _ in consumers)

    tables = [name for name, node in index.nodes.items() if node.op in _OLD_MAKERS]
    found = [index.nodes[name] for name in closure(tables, takers)]
    if any(node.op not in _OLD_MAKERS | _OLD_USERS | _OLD_HANDING_ON.keys() for node in found):
        return False
    for node in found:
        if node.op not in _OLD_USERS:  # a reference is a vector of two strings, a resource a scalar
            node.attr.pop("_output_shapes", None)
        if node.op in _OLD_HANDING_ON:
            node.op = _OLD_HANDING_ON[node.op]
            node.attr["T"].type = int(DType.RESOURCE)
        else:
            node.op = f"{node.op}V2"
    ops = meta_graph.meta_info_def.stripped_op_list.op
    ops.extend([_second_form(op) for op in ops if op.name in _OLD_MAKERS | _OLD_USERS])
    return bool(found)


def _second_form(op: Proto) -> Proto:
    """Return a copy of an OpDef with resources instead of references, and with `V2` after its name."""
    second = type(op)()
    second.CopyFrom(op)
    second.name = f"{op.name}V2"
    for argument in (*second.input_arg, *second.output_arg):
        if argument.is_ref:
            argument.is_ref = False
            argument.type = int(DType.RESOURCE)
    return second


def differing_lookups(was: Proto, now: Proto) -> list[str]:
    """Return the scopes of lookups in both graphs whose tables have different constants, sorted.

    `was` and `now` are GraphDefs. In Keras a scope is a layer's. Tables that are filled from files, or looked
    up in functions, do not count.
    """
    before, after = _contents(was), _contents(now)
    return sorted({_scope_of(name) for name in before.keys() & after.keys() if before[name] != after[name]})


def _contents(graph_def: Proto) -> dict[str, bytes]:
    """Return {node that looks keys up: SHA-256 of the constants in its table}, without tables from files."""
    nodes = {node.name: node for node in graph_def.node}

    def sources(name: str) -> list[str]:
        return [each.node for each in data_inputs(nodes[name]) if each.node in nodes]

    contents = {}
    for node in graph_def.node:
        inputs = data_inputs(node)
        if inputs and FILLS.fullmatch(node.op) and not FROM_FILE.fullmatch(node.op):
            table, *parts = (each.node for each in inputs)
            total = hashlib.sha256()
            for name in sorted(closure(filter(nodes.__contains__, parts), sources)):
                total.update(nodes[name].SerializeToString(deterministic=True))
            contents[table] = total.digest()
    looked_up = (
        (node.name, each.node)
        for node in graph_def.node
        if node.op in FINDS
        for each in data_inputs(node)[:1]
    )
    return {name: contents[table] for name, table in looked_up if table in contents}


def _scope_of(lookup: str) -> str:
    """Return the scope of a node `<scope>/<table>_Lookup/LookupTableFindV2`; of another its whole name."""
    scope, _, rest = lookup.rpartition("/")[0].rpartition("/")
    return scope if scope and rest.endswith("_Lookup") else lookup
