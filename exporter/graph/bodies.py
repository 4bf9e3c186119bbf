"""The nodes of a graph or of a function, and where they call functions: one view of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exporter.graph.new_nodes import free_name, new_node
from exporter.wire.protos import Proto

LOOPS = {"While", "StatelessWhile"}
CALLS = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "While": 0,
    "StatelessWhile": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}
"""Ops that call functions, with the number of inputs before the functions' arguments."""


class Body:
    """The nodes of a graph or of a function, with the two ways in which they name tensors.

    A GraphDef says `node` or `node:1`; a FunctionDef `node:output argument:0`, and an argument's bare name.
    """

    def __init__(self, nodes: Proto, function: Proto | None = None) -> None:
        self.nodes = nodes
        self.function = function
        self.by_name: dict[str, Proto] = {node.name: node for node in nodes}

    @classmethod
    def of(cls, function: Proto) -> Body:
        """The body of a FunctionDef."""
        return cls(function.node_def, function)

    def producer(self, reference: str) -> Proto | None:
        """The node that makes a tensor; None for a function's argument."""
        if self.function is not None and ":" not in reference:
            return None
        return self.by_name.get(reference.partition(":")[0])

    def results(self) -> Iterator[str]:
        """Tensors that a function returns."""
        return iter(self.function.ret.values() if self.function is not None else ())

    def canonical(self, reference: str) -> str:
        """One name for a tensor that has two (`node` and `node:0` in a graph)."""
        return reference if self.function is not None or ":" in reference else f"{reference}:0"

    def output(self, node: Proto, index: int) -> str:
        """The name of output `index` of a node that forwards or loops."""
        if self.function is None:
            return f"{node.name}:{index}"
        if node.op == "Switch":
            return f"{node.name}:{('output_false', 'output_true')[index]}:0"
        return f"{node.name}:output:{index}"

    def single(self, node: Proto, argument: str) -> str:
        """The name of the only output of a node, called `argument` in its op's definition."""
        return str(node.name) if self.function is None else f"{node.name}:{argument}:0"

    def add(self, name: str, op: str, *inputs: str, device: str = "", **attrs: Any) -> Proto:
        """A new node, by this name or a like one; attributes as for `new_node`."""
        return self.put(new_node(free_name(self.by_name, name), op, inputs, device=device, **attrs))

    def put(self, node: Proto) -> Proto:
        """Add a node, whose name is free; the one that is in the body."""
        self.nodes.append(node)
        self.by_name[node.name] = self.nodes[-1]
        return self.nodes[-1]


def bodies(graph_def: Proto) -> Iterator[Body]:
    """The graph, then each of its functions."""
    yield Body(graph_def.node)
    yield from map(Body.of, graph_def.library.function)


def input_names(node: Proto) -> list[str]:
    """The tensors that a node takes, as it names them; control inputs come after them."""
    return [reference for reference in node.input if not reference.startswith("^")]


def called(node: Proto) -> Iterator[Proto]:
    """The functions that a node's attributes name, as messages whose `name` may be set."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        else:
            yield from value.list.func
