"""Find the control edges that a node needs to run in the right branch and iteration of TF1 control flow.

In a graph of Switch, Merge, Enter and Exit a node without data inputs (a constant, a random number) is bound
to its branch or loop by a control edge alone. Every other node is bound by what it reads. So of all control
edges just one for each node without data inputs matters, and it may come from any node of the same branch or
iteration: its *pivot*. All others only order side effects, which an inference graph does not have. (Source:
tensorflow/python/ops/control_flow_ops.py, `_AddOpInternal` of `CondContext` and of `WhileContext`.)
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.errors import GraphError
from exporter.graph.nodes import Endpoint, control_inputs, data_inputs
from exporter.wire.protos import Proto

SWITCHES = frozenset({"Switch", "RefSwitch", "_SwitchN"})
MERGES = frozenset({"Merge", "RefMerge"})
ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
NEXT_ITERATIONS = frozenset({"NextIteration", "RefNextIteration"})
_MAX_NESTED = 64
_FRAME_BOUND = ENTERS | NEXT_ITERATIONS | {"LoopCond"}


class Pivots:
    """Finds pivots in one graph; what is known to lie outside all control flow is remembered."""

    def __init__(self, nodes: Mapping[str, Proto]) -> None:
        self._nodes = nodes
        self._outside: set[str] = set()
        self._is_plain = not any(node.op in SWITCHES or node.op in ENTERS for node in nodes.values())

    def needed_inputs(self, node: Proto) -> list[str]:
        """A node's inputs without the control edges that do not matter to what it computes."""
        data = [text for text in node.input if not text.startswith("^")]
        if data or self._is_plain:
            return data
        pivot = self._first_pivot(control_inputs(node))
        return [f"^{pivot}"] if pivot else []

    def _first_pivot(self, names: list[str], depth: int = 0) -> str | None:
        if depth > _MAX_NESTED:
            raise GraphError(f"the graph nests conditionals more than {_MAX_NESTED} deep, near {names[0]!r}")
        pending, seen = [*reversed(names)], set[str]()
        while pending:
            name = pending.pop()
            if name in seen or name in self._outside or name not in self._nodes:
                continue
            seen.add(name)
            node = self._nodes[name]
            if self._is_pivot(node):
                return name
            pending += reversed(self._same_context(node, depth))
        self._outside |= seen
        return None

    def _is_pivot(self, node: Proto) -> bool:
        if node.op in _FRAME_BOUND:
            return True
        ops = {self._op(source) for source in data_inputs(node)}
        if node.op in MERGES:
            return bool(ops & (ENTERS | NEXT_ITERATIONS))
        return node.op not in SWITCHES and node.op not in EXITS and bool(ops & SWITCHES)

    def _same_context(self, node: Proto, depth: int) -> list[str]:
        """Nodes that run exactly when and where `node` does."""
        if node.op in EXITS:
            return self._before_loop(node)
        if node.op in MERGES:
            return self._before_branch(node, depth)
        return [source.node for source in data_inputs(node)] or control_inputs(node)

    def _before_loop(self, node: Proto) -> list[str]:
        """From an Exit through Switch and Merge to what the loop's Enter reads."""
        for _ in range(4):
            sources = data_inputs(node)
            if not sources or sources[0].node not in self._nodes:
                return []
            if node.op in ENTERS:
                return [sources[0].node]
            node = self._nodes[sources[0].node]
        return []

    def _before_branch(self, merge: Proto, depth: int) -> list[str]:
        """From the Merge that ends a conditional to what its Switch reads."""
        switch = next((s for s in data_inputs(merge) if self._op(s) in SWITCHES), None)
        if switch is None:
            branch_pivot = self._first_pivot([source.node for source in data_inputs(merge)], depth + 1)
            if branch_pivot is None:
                return []
            sources = data_inputs(self._nodes[branch_pivot])
            switch = next((s for s in sources if self._op(s) in SWITCHES), None)
        return [source.node for source in data_inputs(self._nodes[switch.node])] if switch else []

    def _op(self, source: Endpoint) -> str:
        node = self._nodes.get(source.node)
        return "" if node is None else str(node.op)
