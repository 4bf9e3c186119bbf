"""Find the row order of a partitioned table from how the graph looks it up.

`embedding_lookup` over n parts first assigns ids to parts, then sends them there by DynamicPartition and
gathers in each part. By `mod` the part is `id % n` (FloorMod); by `div` it is the larger of two divisions
(Maximum), see tensorflow/python/ops/embedding_ops.py. The file looks the same in both cases: only the graph
tells. A part that is read but never gathered from has been concatenated: its order is the rows' order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from exporter.graph.control_flow import ENTERS, SWITCHES
from exporter.graph.inference_graph import GraphVariable, PartitionStrategy
from exporter.graph.keys import variable_keys
from exporter.graph.nodes import Endpoint, GraphIndex, data_inputs
from exporter.graph.reach import closure
from exporter.graph.servable import called_functions
from exporter.wire.protos import Proto

_ASSIGNED_BY = {
    "FloorMod": PartitionStrategy.MOD,
    "Mod": PartitionStrategy.MOD,
    "TruncateMod": PartitionStrategy.MOD,
    "Maximum": PartitionStrategy.DIV,
}
_GATHERS = frozenset({"Gather", "GatherV2", "ResourceGather"})
_SAME_VALUE = frozenset({"Identity", "ReadVariableOp", "RefIdentity"}) | SWITCHES | ENTERS
_SAME_IDS = frozenset({"Identity", "Cast", "Reshape"}) | SWITCHES | ENTERS
_MAX_STEPS = 64


def lookup_strategies(graph_def: Proto, variables: Iterable[GraphVariable]) -> dict[str, PartitionStrategy]:
    """The strategy of each variable by its key; unknown ones are left out.

    A whole variable that rows are gathered from counts as `DIV` over one part. `graph_def` may be an
    inference graph or a whole training graph, with reference or resource variables.
    """
    parts: dict[str, list[str]] = {}
    whole: list[GraphVariable] = []
    for variable in variables:
        if variable.part is not None:
            parts.setdefault(variable.key, []).append(variable.node)
        else:
            whole.append(variable)
    index = GraphIndex(graph_def)
    found = _strategies(index, parts)
    for variable in whole:
        if not _is_passed_on(index, variable.node):
            gathered = _gathered_ids(index, variable.node)
            found[variable.key] = PartitionStrategy.DIV if gathered else PartitionStrategy.NONE
    return found


def trained_strategies(meta_graph: Proto) -> dict[str, PartitionStrategy]:
    """The same for every partitioned variable of a MetaGraphDef as the trainer's Saver wrote it."""
    index = GraphIndex.of(meta_graph)
    parts: dict[str, list[str]] = {}
    for node, key in variable_keys(meta_graph, index).items():
        if key.part is not None:
            parts.setdefault(key.key, []).append(node)
    return _strategies(index, parts)


def _strategies(index: GraphIndex, parts: dict[str, list[str]]) -> dict[str, PartitionStrategy]:
    found = {}
    for key, nodes in parts.items():
        seen = {_assignment(index, ids) for node in nodes for ids in _gathered_ids(index, node)}
        if not seen:
            found[key] = PartitionStrategy.NONE
        elif len(seen) == 1 and (strategy := seen.pop()) is not None:
            found[key] = strategy
    return found


def _gathered_ids(index: GraphIndex, variable: str) -> list[Endpoint]:
    """The ids by which rows of a part are gathered, one tensor for each gather."""

    def readers(name: str, ops: Collection[str]) -> Iterator[str]:
        consumers = index.consumers.get(name, ())
        return (reader for reader, at in consumers if at == 0 and index.nodes[reader].op in ops)

    same = closure([variable], lambda name: readers(name, _SAME_VALUE))
    gathers = (data_inputs(index.nodes[reader]) for name in same for reader in readers(name, _GATHERS))
    return [inputs[1] for inputs in gathers if len(inputs) > 1]


def _is_passed_on(index: GraphIndex, variable: str) -> bool:
    """True if the variable goes into a function, where nothing here sees what is done with it."""
    readers = {reader for reader, _ in index.consumers.get(variable, ())}
    return any(len(called_functions(index.nodes[reader])) > 1 for reader in readers)


def _assignment(index: GraphIndex, ids: Endpoint) -> PartitionStrategy | None:
    """How the ids were assigned to the part, None if not by one of the two known ways."""
    partition = _origin(index, ids)
    if partition is None or partition.op != "DynamicPartition" or len(data_inputs(partition)) < 2:
        return None
    assigned = _origin(index, data_inputs(partition)[1])
    return _ASSIGNED_BY.get(assigned.op) if assigned is not None else None


def _origin(index: GraphIndex, tensor: Endpoint) -> Proto | None:
    for _ in range(_MAX_STEPS):
        node = index.nodes.get(tensor.node)
        if node is None or node.op not in _SAME_IDS or not data_inputs(node):
            return node
        tensor = data_inputs(node)[0]
    return None
