"""Find the nodes that `IncrementHook` adds to a trainer's graph, by their scopes, and leave them out.

The trainer's Saver writes them into the `.meta`, with the whole graph. They read every variable and have
placeholders of their own, so that they look like lookups and inputs of the model, which they are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from exporter.wire.protos import Proto

SCOPE = "increments"
"""The prefix of the names of everything that is added to a graph."""

_ADDED = re.compile(
    rf"{SCOPE}/((access|collect|count|mark|table|touched|plan(_\d+)?|recorded_steps(_\d+)?|Read(_\d+)?)/.*"
    r"|(are_ready|plan|recorded_steps|Identity|VarIsInitializedOp)(_\d+)?)"
)


def without_recording(meta_graph: Proto) -> Proto:
    """Remove, in place, the nodes that record increments, and control edges from them.

    Nodes that the rest of the graph or a signature reads stay: they are the program's own. Returns the same
    graph.
    """
    # A node that the rest of the graph reads, or that a signature names, is the program's own.
    nodes = meta_graph.graph_def.node
    added = {node.name: node for node in nodes if _ADDED.fullmatch(node.name)}
    if not added:
        return meta_graph
    from exporter.graph.nodes import (  # late: most graphs record nothing
        closure,
        drop_nodes,
        input_names,
        node_of,
    )
    from exporter.graph.signatures import signature_tensors, tensor_names

    read = {node_of(text) for node in nodes if node.name not in added for text in input_names(node)}
    read |= {
        node_of(text)
        for signature in meta_graph.signature_def.values()
        for _, _, info in signature_tensors(signature)
        for text in tensor_names(info)
    }

    def needed(name: str) -> Iterator[str]:
        return (source for source in map(node_of, added[name].input) if source in added)

    drop_nodes(nodes, added.keys() - closure(read & added.keys(), needed).keys())
    return meta_graph
