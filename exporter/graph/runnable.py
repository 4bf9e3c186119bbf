"""A source graph in the form in which its answers can be computed again: training's side effects do not run.

Control edges may lead from an output to what only training can do: check a label that nobody feeds, take from
a queue that nobody fills, move an average. To run those would fail, block for ever or change the answers.
Nothing else is changed, so that a comparison still finds what cleaning did wrong.
"""

from __future__ import annotations

from exporter import protos
from exporter.graph.nodes import Endpoint, GraphIndex, data_inputs, endpoint
from exporter.graph.servable import is_refused
from exporter.graph.signatures import signature_tensors, tensor_names
from exporter.graph.source_graph import SourceGraph
from exporter.protos import Proto


def runnable_graph(source: SourceGraph) -> Proto:
    """A copy of the source's GraphDef without control edges from what a server could not run."""
    index = GraphIndex.of(source.meta_graph)
    unfit = _unfit(index, _given(source))
    graph_def = protos.GraphDef()
    graph_def.CopyFrom(source.meta_graph.graph_def)
    initialising = _ancestors(index, source.init_op)
    for node in graph_def.node:
        if node.name in initialising:
            continue
        kept = [text for text in node.input if not (text.startswith("^") and text[1:] in unfit)]
        if len(kept) < len(node.input):
            node.input[:] = kept
    return graph_def


def _ancestors(index: GraphIndex, name: str | None) -> set[str]:
    """A node and everything that runs before it."""
    pending = [name] if name in index.nodes else []
    found = {*pending}
    while pending:
        for text in index.nodes[pending.pop()].input:
            source = endpoint(text.removeprefix("^")).node
            if source in index.nodes and source not in found:
                found.add(source)
                pending.append(source)
    return found


def _given(source: SourceGraph) -> set[Endpoint]:
    given = {Endpoint(name, 0) for name in source.feeds}
    for signature in source.meta_graph.signature_def.values():
        for role, _, info in signature_tensors(signature):
            if role == "input":
                given |= {endpoint(text) for text in tensor_names(info)}
    return given


def _unfit(index: GraphIndex, given: set[Endpoint]) -> set[str]:
    """The nodes that need an unfed placeholder, a queue, a change of state or Python, by what they read."""
    pending = [
        name
        for name, node in index.nodes.items()
        if is_refused(node.op) or (node.op == "Placeholder" and Endpoint(name, 0) not in given)
    ]
    unfit = {*pending}
    while pending:
        name = pending.pop()
        for reader, position in index.consumers[name]:
            if reader not in unfit and data_inputs(index.nodes[reader])[position] not in given:
                unfit.add(reader)
                pending.append(reader)
    return unfit
