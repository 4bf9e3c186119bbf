"""Prepare a source graph so that its answers can be computed without training's side effects.

Control edges may lead from an output to what only training can do: check a label that nobody feeds, take from
a queue that nobody fills, move an average. To run those would fail, block for ever or change the answers.
Nothing else is changed, so that a comparison still finds what cleaning did wrong.
"""

from __future__ import annotations

from exporter.graph.control_flow import Pivots
from exporter.graph.nodes import GraphIndex, data_inputs
from exporter.graph.reach import all_before
from exporter.graph.servable import is_refused
from exporter.graph.source_graph import SourceGraph
from exporter.wire import protos
from exporter.wire.protos import Proto


def runnable_graph(source: SourceGraph) -> Proto:
    """A copy of the source's GraphDef without control edges from what a server could not run.

    A node that such an edge bound to its branch or iteration gets another edge from there.
    """
    index = GraphIndex.of(source.meta_graph)
    unfit, pivots = _unfit(index), Pivots(index.nodes)
    initialising = all_before(index.nodes, [source.init_op] if source.init_op else [])
    graph_def = protos.GraphDef()
    graph_def.CopyFrom(source.meta_graph.graph_def)
    for node in graph_def.node:
        kept = [text for text in node.input if not (text.startswith("^") and text[1:] in unfit)]
        if len(kept) < len(node.input) and node.name not in initialising:
            node.input[:] = (
                dict.fromkeys([*kept, *pivots.needed_inputs(node)]) if not data_inputs(node) else kept
            )
    return graph_def


def _unfit(index: GraphIndex) -> set[str]:
    """The nodes that need an unfed placeholder, a queue, a change of state or Python, by what they read.

    Tensors that are fed do not count as given here: TensorFlow's optimiser turns a control edge from
    `Identity(fed)` into one from what makes `fed`, which then runs all the same.
    """
    pending = [name for name, node in index.nodes.items() if is_refused(node.op) or node.op == "Placeholder"]
    unfit = {*pending}
    while pending:
        for reader, _ in index.consumers[pending.pop()]:
            if reader not in unfit:
                unfit.add(reader)
                pending.append(reader)
    return unfit
