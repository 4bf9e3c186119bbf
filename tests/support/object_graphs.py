"""Graphs of objects written down as nested dicts, for tests without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.catalog import TensorRef
from exporter.checkpoint.object_graph import SUFFIX, ObjectGraph, TrackedObject, TrackedVariable
from exporter.graph.inference_graph import GraphVariable
from exporter.wire import protos
from exporter.wire.dtypes import DType

SHAPE = (4, 4)


class Var:
    """A variable by its name; the same instance in two places is one variable."""

    def __init__(self, name: str, shape: tuple[int, ...] = SHAPE, dtype: DType = DType.FLOAT) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.tensor = ""


class Slotted(dict[str, Any]):
    """An object that is an optimizer."""


Tree = Mapping[str, Any]


def graph_of(tree: Tree, *, is_trained: bool) -> tuple[ObjectGraph, list[Var]]:
    """The graph and its variables; their tensors are keys for the trainer's side, else nodes by name."""
    objects: list[TrackedObject | None] = []
    numbers: dict[int, int] = {}
    variables: list[Var] = []

    def add(item: Any, path: str) -> int:
        if id(item) in numbers:
            return numbers[id(item)]
        number = numbers[id(item)] = len(objects)
        objects.append(None)
        if isinstance(item, Var):
            variables.append(item)
            item.tensor = f"{path}{SUFFIX}" if is_trained else _free(item.name, variables[:-1])
            objects[number] = TrackedObject({}, TrackedVariable(item.name, item.tensor))
        else:
            edges = {name: add(child, f"{path}/{name}".lstrip("/")) for name, child in _edges(item).items()}
            if isinstance(item, Slotted):
                edges["_index_dict"] = add({}, f"{path}/_index_dict")
            objects[number] = TrackedObject(edges)
        return number

    add(tree, "")
    return ObjectGraph(tuple(item for item in objects if item is not None)), variables


def _free(name: str, others: list[Var]) -> str:
    """As a TensorFlow graph names nodes: a number behind a name in use."""
    taken = {other.tensor for other in others}
    return next(n for n in (name, *(f"{name}_{k}" for k in range(1, 99))) if n not in taken)


def _edges(item: Any) -> Mapping[str, Any]:
    return item if isinstance(item, Mapping) else {str(number): child for number, child in enumerate(item)}


def tensors_of(variables: list[Var]) -> dict[str, TensorRef]:
    return {v.tensor: TensorRef(v.tensor, v.dtype, v.shape) for v in variables}


def wanted_of(variables: list[Var]) -> dict[str, GraphVariable]:
    return {v.tensor: GraphVariable(v.tensor, v.tensor, v.dtype, v.shape) for v in variables}


def message_of(graph: ObjectGraph) -> Any:
    """The graph as the protocol buffer in a checkpoint."""
    message = protos.TrackableObjectGraph()
    for item in graph.objects:
        node = message.nodes.add()
        for name, child in item.children.items():
            node.children.add(local_name=name, node_id=child)
        if item.variable:
            node.attributes.add(
                name="VARIABLE_VALUE", full_name=item.variable.name, checkpoint_key=item.variable.tensor
            )
    return message
