"""Tables that training fills: the checkpoint holds their contents, and they are restored like variables.

A Saver stores a `MutableHashTable` or `DenseHashTable` of the collection SAVEABLE_OBJECTS as two tensors,
`<name>-keys` and `<name>-values`, of as many entries as the table has then; a dense table as all its buckets,
also the empty ones. It restores them by LookupTableImportV2. The name is what the program gave, which is not
always the node's. Source: tensorflow/python/ops/lookup_ops.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from exporter.graph.inference_graph import GraphTable
from exporter.graph.keys import restored_names
from exporter.graph.nodes import GraphIndex, attr, attr_dtype, attr_text, shape_of, through_identities
from exporter.graph.source_graph import TableKey
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_RESTORABLE = re.compile(r"Mutable(Dense)?HashTable(OfTensors)?V2")
_IMPORTS = frozenset({"LookupTableImport", "LookupTableImportV2"})


@cache
def is_restorable(op: str) -> bool:
    """True for tables that are filled from a checkpoint."""
    return _RESTORABLE.fullmatch(op) is not None


def table_keys(
    meta_graph: Proto, index: GraphIndex, told: Mapping[str, TableKey] | None = None
) -> dict[str, TableKey]:
    """What each table's contents are stored under, by its node's name.

    `told` is what the program itself says. Otherwise the graph's own Saver tells, or the node's name. Nodes
    of one shared name are one table.
    """
    nodes = _restorable(index.nodes.values())
    if not nodes:
        return {}
    known = {
        through_identities(index.nodes, table): TableKey(keys, values)
        for table, (keys, values) in restored_names(meta_graph, index, _IMPORTS, count=2)
    }
    known |= told or {}
    by_identity = {_identity(node): known[node.name] for node in nodes if node.name in known}
    return {node.name: by_identity.get(_identity(node), TableKey.of(node.name)) for node in nodes}


def graph_tables(nodes: Mapping[str, Proto], keys: Mapping[str, TableKey]) -> tuple[GraphTable, ...]:
    """The tables of a cleaned graph, one for each that differs."""
    found: dict[str, GraphTable] = {}
    for node in _restorable(nodes.values()):
        stored = keys.get(node.name) or TableKey.of(node.name)
        found.setdefault(
            _identity(node),
            GraphTable(
                node.name,
                stored.keys,
                stored.values,
                attr_dtype(node, "key_dtype") or DType.INT64,
                attr_dtype(node, "value_dtype") or DType.FLOAT,
                shape_of(attr(node, "value_shape").shape),
                has_all_buckets="Dense" in node.op,
            ),
        )
    return tuple(found.values())


def makers(graph_def: Proto, name: str) -> tuple[str, ...]:
    """The nodes that make the table which the node `name` makes, itself among them."""
    nodes = _restorable(graph_def.node)
    wanted = next(_identity(node) for node in nodes if node.name == name)
    return tuple(str(node.name) for node in nodes if _identity(node) == wanted)


def _restorable(nodes: Iterable[Proto]) -> list[Proto]:
    return [node for node in nodes if is_restorable(node.op)]


def _identity(node: Proto) -> str:
    """Nodes that agree on this are one table."""
    return attr_text(node, "shared_name") or str(node.name)
