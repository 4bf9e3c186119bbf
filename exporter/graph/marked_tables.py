"""Dynamic tables that a graph's own nodes tell of: those that authors made with `exporter.tables`."""

from __future__ import annotations

from exporter.errors import GraphError
from exporter.graph.inference_graph import GraphDynamicTable
from exporter.tables.geometry import PARTS
from exporter.tables.lookup import DEFAULTS, PART, TABLE
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import to_array


def marked_tables(graph_def: Proto) -> tuple[GraphDynamicTable, ...]:
    """The tables by the attributes of their variables' nodes.

    Raises:
        GraphError: a variable of one is missing.
    """
    found: dict[str, dict[str, Proto]] = {}
    for node in graph_def.node:
        if PART in node.attr and node.op == "VarHandleOp":
            found.setdefault(node.attr[TABLE].s.decode(), {})[node.attr[PART].s.decode()] = node
    return tuple(_table(name, nodes) for name, nodes in found.items())


def _table(name: str, nodes: dict[str, Proto]) -> GraphDynamicTable:
    if set(nodes) != set(PARTS) or DEFAULTS not in nodes[PARTS[-1]].attr:
        raise GraphError(
            f"dynamic table {name!r} has the variables {', '.join(sorted(nodes))}",
            cause=f"expected {', '.join(PARTS)}",
        )
    values = nodes[PARTS[-1]]
    defaults = to_array(values.attr[DEFAULTS].tensor)
    index_seeds, index_rows, keys, _ = (nodes[part].name for part in PARTS)
    return GraphDynamicTable(
        name,
        (index_seeds, index_rows, keys, values.name),
        DType.INT64,
        DType(values.attr["dtype"].type),
        int(defaults.shape[1]),
        defaults,
    )
