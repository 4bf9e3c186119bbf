"""Mark the dynamic tables of a graph by attributes of their variables' nodes, and find them by these.

`exporter.tables.DynamicTable` marks the nodes in a builder's graph, and an export those of a plain version.
So the graph of a version can be used for another checkpoint, in which a table has other sizes.
"""

from __future__ import annotations

from copy import deepcopy

from msgspec.structs import replace

from exporter.errors import GraphError
from exporter.graph.inference_graph import GraphDynamicTable, InferenceGraph
from exporter.tables.lookup import DEFAULTS, PART, TABLE
from exporter.tables.parts import PARTS, VALUES
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import SCALE_BYTES
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill, to_array

_MAX_BYTES = 1 << 28  # of default rows: a damaged graph may claim more
_MOST_MARKED_BYTES = 1 << 20
"""The most default rows that a version's graph may hold: a server that loads it copies it dozens of times."""


def marked_tables(graph_def: Proto) -> tuple[GraphDynamicTable, ...]:
    """Return the dynamic tables marked by attributes of their variables' nodes, in the graph's order.

    GraphError if the parts of a table are missing or damaged.
    """
    found: dict[str, dict[str, Proto]] = {}
    for node in graph_def.node:
        if PART in node.attr and node.op == "VarHandleOp":
            name, part = (node.attr[mark].s.decode(errors="replace") for mark in (TABLE, PART))
            found.setdefault(name, {})[part] = node
    return tuple(_table(name, nodes) for name, nodes in found.items())


def mark_tables(graph: InferenceGraph) -> InferenceGraph:
    """Return a copy of a graph with marked dynamic tables; the graph itself if it has none.

    The graph itself also if the default rows of all tables take more than 1 MiB: then it cannot be reused for
    other checkpoints. (DeepRec's tables have 4,096 default rows: more than 64 floats each are too many.)
    """
    total = sum(table.defaults.nbytes for table in graph.dynamic_tables)
    if not graph.dynamic_tables or total > _MOST_MARKED_BYTES:
        return graph
    meta_graph = deepcopy(graph.meta_graph)
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    for table in graph.dynamic_tables:
        for name, part in zip(table.nodes, PARTS, strict=True):
            mark(nodes[name], table.name, part)
        rows = nodes[table.nodes[-1]].attr[DEFAULTS].tensor
        rows.Clear()
        fill(rows, table.defaults)
    return replace(graph, meta_graph=meta_graph)


def mark(node: Proto, table: str, part: str) -> None:
    """Mark a variable's node, in place, as the part `part` (a member of `PARTS`) of the table `table`."""
    node.attr[TABLE].s, node.attr[PART].s = table.encode(), part.encode()


def _table(name: str, nodes: dict[str, Proto]) -> GraphDynamicTable:
    """Return the dynamic table `name` of these variables' nodes, by part.

    GraphError if parts or default rows are missing or damaged.
    """
    if set(nodes) != set(PARTS) or DEFAULTS not in nodes[VALUES].attr:
        raise GraphError(
            f"dynamic table {name!r} has the variables {', '.join(sorted(nodes))}",
            cause=f"expected {', '.join(PARTS)}",
        )
    values = nodes[VALUES]
    try:
        dtype = DType(values.attr["dtype"].type)
        defaults = to_array(values.attr[DEFAULTS].tensor, _MAX_BYTES)
        count, dim = defaults.shape
        stored = defaults if dtype is DType.INT8 else defaults.astype(dtype.numpy)
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(
            f"the default rows of dynamic table {name!r} are damaged", cause=str(error)
        ) from error
    if not count or not dim:
        raise GraphError(f"dynamic table {name!r} has default rows of shape [{count}, {dim}]")
    # In a row of a published table in 8 bits the codes are followed by scales.
    width = dim + SCALE_BYTES if dtype is DType.INT8 else dim
    seeds, rows, keys, _ = (nodes[part].name for part in PARTS)
    return GraphDynamicTable(name, (seeds, rows, keys, values.name), DType.INT64, dtype, width, stored)
