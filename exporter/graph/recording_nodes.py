"""The nodes that `IncrementHook` adds to a trainer's graph: found by their scopes, and left out.

The trainer's Saver writes them into the `.meta`, as it writes the whole graph. They read every variable and
take ids of their own, so that they look like lookups and inputs of the model, which they are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from exporter.wire.protos import Proto

SCOPE = "increments"
"""Prefix of the names of everything that is added to a graph."""

_ADDED = re.compile(
    rf"{SCOPE}/((access|collect|count|mark|table|touched|plan(_\d+)?|recorded_steps(_\d+)?|Read(_\d+)?)/.*"
    r"|(are_ready|plan|recorded_steps|Identity|VarIsInitializedOp)(_\d+)?)"
)


def without_recording(meta_graph: Proto) -> Proto:
    """Remove the nodes that record increments, in place, and every wait for them; returned for convenience.

    A node whose value the rest of the graph reads, or a signature names, is the program's own, whatever its
    name.
    """
    nodes = meta_graph.graph_def.node
    added = {node.name: node for node in nodes if _ADDED.fullmatch(node.name)}
    if not added:
        return meta_graph
    from exporter.graph.nodes import closure, control_inputs  # late: most graphs record nothing
    from exporter.graph.signatures import signature_tensors, tensor_names

    read = {source for node in nodes if node.name not in added for source in _sources(node)}
    read |= {
        text.partition(":")[0]
        for signature in meta_graph.signature_def.values()
        for _, _, info in signature_tensors(signature)
        for text in tensor_names(info)
    }

    def needed(name: str) -> Iterator[str]:
        return (
            source for source in (*_sources(added[name]), *control_inputs(added[name])) if source in added
        )

    gone = added.keys() - closure(read & added.keys(), needed).keys()
    for at in reversed(range(len(nodes))):  # they are the last ones: the end of the list is cut
        if nodes[at].name in gone:
            del nodes[at]
    for node in nodes:
        waits = [text for text in node.input if not (text.startswith("^") and text[1:] in gone)]
        if len(waits) < len(node.input):
            node.input[:] = waits
    return meta_graph


def _sources(node: Proto) -> Iterator[str]:
    from exporter.graph.nodes import data_inputs

    return (source.node for source in data_inputs(node))
