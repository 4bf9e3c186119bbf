"""Prepare a source graph so that its answers can be computed without training's side effects.

Control edges may lead from an output to what only training can do: check a label that nobody feeds, take from
a queue that nobody fills, move an average. To run those would fail, block for ever or change the answers.
Nothing else is changed, so that a comparison still finds what cleaning did wrong; but operations that stock
TensorFlow does not have, and what reads from them, could not be imported and are left out.
"""

from __future__ import annotations

from copy import deepcopy

from exporter.graph.deeprec_ops import foreign_attributes, is_deeprecs
from exporter.graph.nodes import GraphIndex, Pivots, all_before, closure, data_inputs, endpoint, put_nodes
from exporter.graph.servable import foreign_ops, is_refused
from exporter.graph.source_graph import SourceGraph
from exporter.wire.protos import Proto


def runnable_graph(source: SourceGraph) -> Proto:
    """A copy of the source's GraphDef without control edges from what a server could not run.

    A node that such an edge bound to its branch or iteration gets another edge from there.
    """
    index = GraphIndex.of(source.meta_graph)
    unfit, pivots = _unfit(index), Pivots(index.nodes)
    initialising = all_before(index.nodes, [endpoint(source.init_op)] if source.init_op else [])
    graph_def = deepcopy(source.meta_graph.graph_def)
    _drop_foreign(graph_def, index)
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
    return _behind(
        index, [name for name, node in index.nodes.items() if is_refused(node.op) or node.op == "Placeholder"]
    )


def _drop_foreign(graph_def: Proto, index: GraphIndex) -> None:
    """Remove what stock TensorFlow cannot import, and what reads from that."""
    foreign = foreign_ops(index.nodes.values(), index.functions)
    has_attributes = is_deeprecs(index.nodes.values())
    found = [
        name
        for name, node in index.nodes.items()
        if node.op in foreign or (has_attributes and foreign_attributes(node))
    ]
    if found:
        _drop(graph_def, _behind(index, found))


def _drop(graph_def: Proto, names: set[str]) -> None:
    kept = []
    for node in graph_def.node:
        if node.name not in names:
            node.input[:] = [text for text in node.input if endpoint(text).node not in names]
            kept.append(node)
    put_nodes(graph_def.node, kept)


def _behind(index: GraphIndex, start: list[str]) -> set[str]:
    """These nodes, and those that read from them, directly or not."""
    return {*closure(start, lambda name: (reader for reader, _ in index.consumers[name]))}
