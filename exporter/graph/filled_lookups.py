"""Find the lookup tables that two graphs fill with different vocabularies."""

from __future__ import annotations

import hashlib

from exporter.graph.lookup_tables import FILLS, FINDS, FROM_FILE
from exporter.graph.nodes import closure, data_inputs
from exporter.wire.protos import Proto


def differing_lookups(was: Proto, now: Proto) -> list[str]:
    """Return the scopes of lookups in both graphs whose tables have different constants, sorted.

    `was` and `now` are GraphDefs. In Keras a scope is a layer's. Tables that are filled from files, or looked
    up in functions, do not count.
    """
    before, after = _filled(was), _filled(now)
    return sorted({_scope(name) for name in before.keys() & after.keys() if before[name] != after[name]})


def _filled(graph_def: Proto) -> dict[str, bytes]:
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


def _scope(lookup: str) -> str:
    """Return the scope of a node `<scope>/<table>_Lookup/LookupTableFindV2`; of another its whole name."""
    scope, _, rest = lookup.rpartition("/")[0].rpartition("/")
    return scope if scope and rest.endswith("_Lookup") else lookup
