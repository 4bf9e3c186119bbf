"""Handle tables that a function makes and fills with constants on each call, as old feature columns do.

    HashTableV2 -> LookupTableImportV2(table, Const, Const)      the control edge from here
                -> LookupTableFindV2(table, ids)                 to here gives the order

Every call fills in the same, which TensorFlow takes for no change. So the fills are kept, though they return
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from exporter.wire.protos import Proto

_FILLS = frozenset({"InitializeTable", "InitializeTableV2", "LookupTableImport", "LookupTableImportV2"})
_CONST = re.compile("Const")
_MAX_IDENTITIES = 32
_TABLES = re.compile(r"(Anonymous|Mutable)*(Dense)?HashTable(OfTensors)?(V2)?")


def constant_fills(nodes: Mapping[str, Proto]) -> dict[str, str]:
    """The nodes of a function's body that fill a table of that body with constants, each with the table."""
    found = {}
    for node in nodes.values():
        if node.op not in _FILLS:
            continue
        table, *contents = (_producer(nodes, text) for text in node.input if not text.startswith("^"))
        if _is_op(nodes, table, _TABLES) and all(_is_op(nodes, name, _CONST) for name in contents):
            found[node.name] = table
    return found


def fill_before_use(nodes: Mapping[str, Proto], fills: Mapping[str, str]) -> None:
    """Make every user of a table wait for the node that fills it, in place.

    The edge may have led over nodes that are not kept.
    """
    if not fills:
        return
    for node in nodes.values():
        if node.name in fills:
            continue
        taken = {_producer(nodes, text) for text in node.input if not text.startswith("^")}
        waits = [f"^{fill}" for fill, table in fills.items() if table in taken]
        if node.op != "Identity":
            node.input.extend(text for text in waits if text not in node.input)


def _producer(nodes: Mapping[str, Proto], text: str) -> str:
    """The node of the body that makes a value, which Identity nodes may hand on."""
    name = text.partition(":")[0]
    for _ in range(_MAX_IDENTITIES):
        node = nodes.get(name)
        if node is None or node.op != "Identity" or not node.input:
            break
        name = node.input[0].partition(":")[0]
    return name


def _is_op(nodes: Mapping[str, Proto], name: str, ops: re.Pattern[str]) -> bool:
    return name in nodes and ops.fullmatch(nodes[name].op) is not None
