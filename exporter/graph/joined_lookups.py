"""Join lookups in tables by keys: one search finds the rows of all tables that a request reads.

A lookup is a dozen operations and three gathers of its table's index. For a hundred tables these cost more
than the memory that they read. So their indexes are kept in three variables, one table's after another's, and
the lookups that a request makes anyway become one, which gets the sizes of its table with each id:

    ids of each table -> one vector -> one lookup in the joined index -> rows, split -> gathers of each table

The published variables do not change: a bundle, a delta and a manifest know each table's own. Only their
place in a server's memory differs (`InferenceGraph.joined`): a loader puts them together, and an update adds
a table's first row to the numbers of the rows that it writes.

Lookups are joined only if the graph proves that they always run together: their ids need no table's rows, and
the same signatures need them. So no signature looks up, or waits for, more than before. A table stays
separate if another table's rows lead to its ids, or if another node uses its index: a function, or a branch.

A published version lends its graph to other checkpoints: `separate_lookups` restores the graph from before
its lookups were joined, so that tables can get other sizes, and others may be joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate, chain
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import GraphError
from exporter.graph.inference_graph import GraphDynamicTable, InferenceGraph, JoinedPart
from exporter.graph.nodes import (
    CONTROL_FLOW,
    VECTORS,
    Body,
    Endpoint,
    GraphIndex,
    all_before,
    attr_dtype,
    attr_text,
    closure,
    data_inputs,
    drop_nodes,
    endpoint,
    free_name,
    makes_vector,
    new_node,
    node_of,
    put_nodes,
)
from exporter.graph.signatures import SignatureEnds
from exporter.graph.table_marks import mark, marked_tables
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import (
    JOINED,
    PART,
    SIZE,
    TABLE,
    JoinedLookup,
    RowNodes,
    add_joined_rows,
    add_rows,
)
from exporter.tables.parts import PARTS
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

INDEX = PARTS[:-1]
LEAST = 8  # lookups: to join fewer costs more operations than it saves
_NAME_SOURCE = "name what it was made from by --model: a builder, a .meta file or the trainer's SavedModel"


class _Lookup(Struct, frozen=True, eq=False):
    """A lookup that may be joined: its table, the tensor of its ids, and its nodes.

    `scope` is the prefix of its nodes' names, `row` its gather of row numbers, `nodes` its results, and `own`
    its other nodes, which no other lookup uses.
    """

    table: GraphDynamicTable
    ids: Endpoint
    scope: str
    row: str
    nodes: RowNodes
    own: frozenset[str]


def join_lookups(graph: InferenceGraph, apart: Collection[str] = ()) -> InferenceGraph:
    """Return a copy of a graph in which lookups that always run together are joined.

    The graph itself if none are. Each joined lookup replaces at least eight. The dynamic tables of the graph
    must have sizes, as `with_table_shapes` sets them. A table with an index variable whose node is in `apart`
    keeps its own lookups. `joined` of the copy has the place of each index variable in a joined variable.
    GraphError if two nodes have the same name, or one has none.
    """
    free = [table for table in graph.dynamic_tables if not {*table.nodes[: len(INDEX)]} & {*apart}]
    index = GraphIndex.of(graph.meta_graph)
    ends = {name: SignatureEnds.of(each) for name, each in graph.meta_graph.signature_def.items()}
    groups = _asked_together(index, ends, _lookups(index, free, graph.dynamic_tables))
    if not free or not groups:
        return graph
    meta_graph = deepcopy(graph.meta_graph)
    names = {lookup.table.name for lookup in chain.from_iterable(groups)}
    tables = [table for table in graph.dynamic_tables if table.name in names]
    scope = free_name({name.partition("/")[0] for name in index.nodes}, "joined_tables")
    joined, handles = _join_variables(meta_graph.graph_def, graph, tables, scope)
    shapes = {variable.node: variable.shape for variable in graph.variables}
    named = set[str]().union(*(each.nodes for each in ends.values()))
    moved: dict[str, str] = {}
    for number, group in enumerate(groups):
        find = f"{scope}/find_{number}"
        moved |= _join(meta_graph.graph_def, index, find, handles, joined, shapes, group, named)
    for node in meta_graph.graph_def.node:
        if node.name in moved and node.name in named:
            node.CopyFrom(new_node(node.name, "Identity", [moved[node.name]], T=DType.INT32))
        for position, text in enumerate(node.input):
            node.input[position] = moved.get(text.removesuffix(":0"), text)
    gone = {name for table in tables for name in table.nodes[: len(INDEX)]}
    for lookup in chain.from_iterable(groups):
        gone |= lookup.own | ({lookup.nodes.rows, lookup.nodes.found} - named)
    drop_nodes(meta_graph.graph_def.node, gone)
    return replace(graph, meta_graph=meta_graph, joined=joined)


def _lookups(
    index: GraphIndex, tables: Iterable[GraphDynamicTable], everything: Iterable[GraphDynamicTable]
) -> Iterator[_Lookup]:
    """Yield the lookups that may be joined, table by table: all lookups of a table, or none.

    A table of `tables` counts if nothing but its lookups uses its index, and if their ids need neither a row
    of a table in `everything`, nor a branch or a loop.
    """
    readers = index.consumers
    rows_read = {name for table in everything for name, _ in readers.get(table.nodes[1], ())}
    for table in tables:
        found = [_lookup(index, table, name) for name, _ in readers.get(table.nodes[1], ())]
        lookups = [lookup for lookup in found if lookup is not None]
        own = {name for lookup in lookups for name in lookup.own}
        used = {name for handle in table.nodes[: len(INDEX)] for name, _ in readers.get(handle, ())}
        if not used or len(lookups) < len(found) or not used <= own:
            continue
        before = all_before(index.nodes, [lookup.ids for lookup in lookups])
        if rows_read.isdisjoint(before) and CONTROL_FLOW.isdisjoint(index.nodes[name].op for name in before):
            yield from lookups


def _lookup(index: GraphIndex, table: GraphDynamicTable, row: str) -> _Lookup | None:
    """Return the lookup in `table` whose gather of row numbers is the node `row`.

    None if `add_rows` did not add the node, or if a node outside of the lookup reads one of its nodes other
    than its results.
    """
    nodes, readers = index.nodes, index.consumers
    scope, slash, _ = row.rpartition("/")
    key, held, found, rows = (f"{scope}{slash}{part}" for part in ("key", "held", "found", "rows"))
    if not {key, held, found, rows} <= nodes.keys() or nodes[rows].op != "SelectV2":
        return None
    ids = next(iter(data_inputs(nodes[key])), Endpoint("", 0))
    ends = {ids.node, *table.nodes}
    sources = closure(
        [rows], lambda name: (each.node for each in data_inputs(nodes[name]) if each.node not in ends)
    )
    # An attribute of the constants, which only we set, shows that these nodes are ours. One constant stays:
    # it says which rows of a served version absent keys read.
    sized = {name: attr_text(nodes[name], SIZE) for name in sources if SIZE in nodes[name].attr}
    own = {name for name in sources if sized.get(name) != "first_default"}
    shared = (name for name in own - {rows, found} for reader, _ in readers[name] if reader not in own)
    if row not in own or key not in own or "stride" not in sized.values() or any(shared):
        return None
    return _Lookup(table, ids, scope, row, RowNodes(rows, found), frozenset(own - {rows, found}))


def _asked_together(
    index: GraphIndex, ends: Mapping[str, SignatureEnds], lookups: Iterable[_Lookup]
) -> list[list[_Lookup]]:
    """Return the lookups in groups of at least eight that exactly the same signatures need.

    `ends` are the signatures by name. A table is left out with all of its lookups if one of them is in a
    smaller group, is needed by no signature, or has a node, besides its row numbers, that a signature names.
    """
    needed = {name: all_before(index.nodes, each.outputs, each.inputs) for name, each in ends.items()}
    given = set[str]().union(*(each.nodes for each in ends.values()))
    asking: dict[frozenset[str], list[_Lookup]] = defaultdict(list)
    left = set[str]()
    for lookup in lookups:
        names = frozenset(
            name for name, found in needed.items() if found.keys() & {lookup.nodes.rows, lookup.nodes.found}
        )
        asking[names].append(lookup)
        if not names or given & {*lookup.own, lookup.nodes.found}:
            left.add(lookup.table.name)
    while True:  # a table is joined with all of its lookups, or not
        groups = [[each for each in group if each.table.name not in left] for group in asking.values()]
        few = {each.table.name for group in groups if len(group) < LEAST for each in group}
        if not few:
            return [group for group in groups if group]
        left |= few


def _join_variables(
    graph_def: Proto, graph: InferenceGraph, tables: Sequence[GraphDynamicTable], scope: str
) -> tuple[dict[str, JoinedPart], list[str]]:
    """Add a joined variable to `graph_def` for each part of the tables' indexes.

    It has this part of all `tables`, one after another. Returns {node of a table's own variable: its joined
    variable and first element there}, and the nodes of the new variables in the order of `INDEX`. `scope` is
    the prefix of their names.
    """
    known = {variable.node: variable for variable in graph.variables}
    joined, handles = dict[str, JoinedPart](), []
    for number, part in enumerate(INDEX):
        node = f"{scope}/{part}"
        parts = [known[table.nodes[number]] for table in tables]
        *firsts, total = accumulate((variable.shape[0] for variable in parts), initial=0)
        joined |= {v.node: JoinedPart(node, first) for v, first in zip(parts, firsts, strict=True)}
        attrs: dict[str, Any] = {"dtype": parts[0].dtype, "shape": (total,)}
        graph_def.node.append(new_node(node, "VarHandleOp", shared_name=node.encode(), **attrs))
        handles.append(node)
    return joined, handles


def _join(
    graph_def: Proto,
    index: GraphIndex,
    scope: str,
    handles: list[str],
    joined: Mapping[str, JoinedPart],
    shapes: Mapping[str, tuple[int, ...]],
    group: list[_Lookup],
    named: Collection[str],
) -> dict[str, str]:
    """Add one lookup for a group of lookups, and return {node of a result: the tensor that replaces it}.

    The results are each lookup's row numbers and, if the flags of found ids of any lookup of the group are
    read, the flags of all. New nodes are appended to `graph_def`. `scope` is the prefix of the new nodes'
    names, `handles` and `joined` are as `_join_variables` returns them, `shapes` has each variable's shape by
    node, and `named` the nodes that signatures name.
    """
    body = Body(graph_def.node)
    vectors = [makes_vector(body, lookup.ids.as_input, named) for lookup in group]
    wanted = [
        _placed(lookup, is_vector, joined, shapes) for lookup, is_vector in zip(group, vectors, strict=True)
    ]
    is_read = any(_is_found_read(index, lookup, named) for lookup in group)
    results = add_joined_rows(graph_def, scope, handles, wanted, found=is_read)
    divided = {node_of(result.rows) for result in results}
    for node in graph_def.node:
        if node.name in divided:
            node.attr[VECTORS].b = True
    moved: dict[str, str] = {}
    for number, (lookup, is_vector, result) in enumerate(zip(group, vectors, results, strict=True)):
        own, shape = lookup.nodes, f"{scope}/shape_{number}"
        pairs = [(own.rows, result.rows, DType.INT32), (own.found, result.found, DType.BOOL)]
        pairs = pairs if is_read else pairs[:1]
        if not is_vector:
            ids = [lookup.ids.as_input]
            graph_def.node.append(new_node(shape, "Shape", ids, T=DType.INT64, out_type=DType.INT32))
        for name, tensor, dtype in pairs:
            if is_vector:
                moved[name] = tensor
            else:
                reshaped = f"{tensor.replace(':', '_')}/reshaped"
                inputs = [tensor, shape]
                graph_def.node.append(new_node(reshaped, "Reshape", inputs, T=dtype, Tshape=DType.INT32))
                moved[name] = reshaped
    return moved


def _placed(
    lookup: _Lookup,
    is_vector: bool,
    joined: Mapping[str, JoinedPart],
    shapes: Mapping[str, tuple[int, ...]],
) -> JoinedLookup:
    """Return a lookup with the sizes of its table, and the table's first elements in the joined variables.

    `is_vector` says that its ids are always a vector; `shapes` has each variable's shape by node. ValueError
    if the shapes of the table's variables contradict each other.
    """
    seeds, rows, keys, _ = lookup.table.nodes
    (groups,), (slots,), (capacity,) = shapes[seeds], shapes[rows], shapes[keys]
    geometry = TableGeometry.of_shapes(groups, slots, capacity, len(lookup.table.defaults))
    firsts = joined[seeds].first, joined[rows].first, joined[keys].first
    ids = lookup.ids.as_input
    return JoinedLookup(lookup.table.name, lookup.scope, ids, is_vector, geometry, *firsts)


def _is_found_read(index: GraphIndex, lookup: _Lookup, named: Collection[str]) -> bool:
    """True if a signature names a lookup's flags of found ids, or a node outside of the lookup reads them.

    `named` are the nodes that signatures name.
    """
    found = lookup.nodes.found
    return found in named or any(name != lookup.nodes.rows for name, _ in index.consumers[found])


def separate_lookups(meta_graph: Proto) -> None:
    """Give each lookup that `join_lookups` joined its own nodes and index variables again, in place.

    The joined nodes stay, but nothing reads them; the index variables have no sizes. A graph without joined
    lookups stays unchanged. GraphError if two nodes have the same name, or one has none, if the joined nodes
    or the marks of tables have been changed, if the default rows of a table are not in the graph, or if other
    nodes have the names of the new ones.
    """
    graph_def = meta_graph.graph_def
    if not any(JOINED in node.attr for node in graph_def.node):
        return
    index = GraphIndex.of(meta_graph)
    lookups = [_joined(index, node) for node in index.nodes.values() if JOINED in node.attr]
    marked = {attr_text(node, TABLE) for node in index.nodes.values() if PART in node.attr}
    if lost := next((each.table for each in lookups if each.table not in marked), None):
        raise GraphError(
            f"the graph cannot be exported again: it has no default rows for absent keys of table {lost!r}",
            cause="the default rows of all tables would take more than 1 MiB in it",
            hint=_NAME_SOURCE,
        )
    _add_indexes(graph_def, {lookup.table for lookup in lookups})
    tables = {table.name: table for table in marked_tables(graph_def)}
    made, moved = protos.GraphDef(), dict[Endpoint, str]()
    for lookup in lookups:
        table = tables[lookup.table]
        ids, defaults = lookup.ids.as_input, len(table.defaults)
        nodes = add_rows(made, lookup.scope, table.name, table.nodes, ids, defaults=defaults)
        moved |= dict.fromkeys(lookup.rows, nodes.rows) | dict.fromkeys(lookup.found, nodes.found)
    names = {node.name for node in made.node}
    _require_free(index, names, len(made.node))
    put_nodes(graph_def.node, [node for node in graph_def.node if node.name not in names])
    for node in graph_def.node:
        node.attr.pop(JOINED, None)
        for position, text in enumerate(node.input):
            node.input[position] = moved.get(endpoint(text), text)
    graph_def.node.extend(made.node)


def _require_free(index: GraphIndex, names: set[str], count: int) -> None:
    """Raise GraphError if new nodes share a name, or have the name of a node that joining did not add.

    There are `count` of them, with these `names`. Joining leaves only a Const or an Identity under such a
    name.
    """
    taken = [index.nodes[name] for name in names & index.nodes.keys()]
    if len(names) < count or any(node.op not in ("Const", "Identity") for node in taken):
        raise GraphError(
            "the graph has other nodes under the names of lookups that are joined", hint=_NAME_SOURCE
        )


class _Joined(Struct, frozen=True):
    """A joined lookup: its table's name, the prefix of its own nodes, its ids, and the tensors of its
    results.

    `rows` has the tensors of its row numbers, `found` those of its flags of found ids, which may be empty.
    """

    table: str
    scope: str
    ids: Endpoint
    rows: list[Endpoint]
    found: list[Endpoint]


def _joined(index: GraphIndex, count: Proto) -> _Joined:
    """Return the joined lookup whose ids the node `count` counts.

    GraphError if the nodes after it are not as `join_lookups` added them.
    """
    table, scope = attr_text(count, TABLE), attr_text(count, JOINED)
    inputs, packs = data_inputs(count), index.consumers[count.name]
    if len(inputs) != 1 or len(packs) != 1 or not table or not scope:
        raise _damaged(table, scope)
    (ids,), ((pack, number),) = inputs, packs
    splits = [name for name, at in index.consumers[pack] if index.nodes[name].op == "SplitV" and at == 1]
    results = {attr_dtype(index.nodes[split], "T"): [Endpoint(split, number)] for split in splits}
    # Ids of another shape were made a vector, and the results reshaped.
    flat = index.nodes.get(ids.node) if ids.node == f"{count.name.rpartition('/')[0]}/ids_{number}" else None
    if flat is not None:
        ids = next(iter(data_inputs(flat)), ids)
        results = {
            dtype: [Endpoint(name, 0) for tensor in found for name in _readers(index, tensor)]
            for dtype, found in results.items()
        }
    rows, found = results.get(DType.INT32, []), results.get(DType.BOOL, [])
    reshapes = {index.nodes[each.node].op for each in (*rows, *found)} if flat is not None else {"Reshape"}
    if index.nodes[pack].op != "Pack" or not rows or reshapes != {"Reshape"}:
        raise _damaged(table, scope)
    return _Joined(table, scope, ids, rows, found)


def _readers(index: GraphIndex, tensor: Endpoint) -> list[str]:
    """Return the names of the nodes that read a tensor, each once, in the graph's order."""
    readers = dict.fromkeys(name for name, _ in index.consumers[tensor.node])
    return [name for name in readers if tensor in data_inputs(index.nodes[name])]


def _damaged(table: str, scope: str) -> GraphError:
    """Return the error for the joined lookup `scope` in `table`, whose nodes were changed."""
    return GraphError(f"the joined lookup {scope!r} in table {table!r} is damaged", hint=_NAME_SOURCE)


def _add_indexes(graph_def: Proto, tables: Collection[str]) -> None:
    """Append to a graph the missing nodes of the index variables of tables, given by name.

    Each is a VarHandleOp of unknown size, marked with its table and part, in the order of the tables' names.
    """
    marked = {(attr_text(node, TABLE), attr_text(node, PART)) for node in graph_def.node if PART in node.attr}
    names = {node.name for node in graph_def.node}
    for table in sorted(tables):
        for part, dtype in zip(INDEX, (DType.INT64, DType.INT32, DType.INT64), strict=True):
            if (table, part) not in marked:
                name = free_name(names, f"{table}/{part}")
                node = new_node(name, "VarHandleOp", shared_name=name.encode(), dtype=dtype, shape=(-1,))
                mark(node, table, part)
                graph_def.node.append(node)
