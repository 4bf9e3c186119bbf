"""Find which variables and tables a signature changes, and which its outputs depend on.

The functions that it calls are looked into, so that a `train_step` whose gradients and assignments lie three
calls deep is told from a model that only reads what it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from exporter.graph.bodies import CALLS
from exporter.graph.control_flow import ENTERS, SWITCHES
from exporter.graph.functions import needed_by
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import GraphIndex, attr_dtype, endpoint
from exporter.graph.reach import all_before, reach
from exporter.graph.servable import called_functions, changes_state
from exporter.graph.signature_tensors import SignatureEnds
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MAX_IDENTITIES = 32


class Effects(Struct, frozen=True):
    """The variables and tables that are read and changed: names of nodes, or of a function's inputs."""

    reads: frozenset[str]
    writes: frozenset[str]


_NONE = Effects(frozenset(), frozenset())


class EffectsOf:
    """Computes the effects of signatures; each function is analysed once."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._known: dict[str, Effects] = {}

    def signature(self, ends: SignatureEnds) -> Effects:
        """What a session runs for it: everything before its outputs, also what they only wait for."""
        nodes = self._index.nodes
        runs = all_before(nodes, ends.outputs, ends.inputs)
        computing = reach(nodes, ends.computed, given=ends.inputs).inputs
        handles = {name for name in runs if nodes[name].op in VARIABLE_OPS or "HashTable" in nodes[name].op}
        return self._effects(
            {name: nodes[name] for name in runs}, computing, handles, lambda t: endpoint(t).node
        )

    def _function(self, name: str) -> Effects:
        if name not in self._known:
            self._known[name] = _NONE  # of a function that calls itself
            function = self._index.functions[name]
            nodes = {node.name: node for node in function.node_def}
            has_switches = any(node.op in SWITCHES or node.op in ENTERS for node in nodes.values())
            computing = set(nodes) if has_switches else needed_by(nodes, function.ret.values())
            handles = {a.name for a in function.signature.input_arg if a.type == int(DType.RESOURCE)}
            self._known[name] = self._effects(nodes, computing, handles, lambda text: text.partition(":")[0])
        return self._known[name]

    def _effects(
        self,
        nodes: Mapping[str, Proto],
        computing: Collection[str],
        handles: Collection[str],
        producer: Callable[[str], str],
    ) -> Effects:
        reads, writes = set[str](), set[str]()
        for node in nodes.values():
            inputs = [text for text in node.input if not text.startswith("^")]
            taken = {at: _origin(nodes, producer, text) for at, text in enumerate(inputs)}
            taken = {at: handle for at, handle in taken.items() if handle in handles}
            if not taken or _hands_on(node):
                continue
            if changes_state(node.op):
                writes |= {*taken.values()}
            elif callees := sorted(called_functions(node) & self._index.functions.keys()):
                for callee in callees:
                    inner, given = self._function(callee), self._arguments(node, callee, taken)
                    writes |= {handle for argument, handle in given.items() if argument in inner.writes}
                    if node.name in computing:
                        reads |= {handle for argument, handle in given.items() if argument in inner.reads}
            elif node.name in computing:
                reads |= {*taken.values()}
        return Effects(frozenset(reads), frozenset(writes))

    def _arguments(self, node: Proto, callee: str, taken: Mapping[int, str]) -> dict[str, str]:
        """Which handle each argument of a called function gets."""
        arguments = [argument.name for argument in self._index.functions[callee].signature.input_arg]
        shift = CALLS.get(node.op, 0)
        return {arguments[at - shift]: h for at, h in taken.items() if 0 <= at - shift < len(arguments)}


def _origin(nodes: Mapping[str, Proto], producer: Callable[[str], str], text: str) -> str:
    """The node or argument that a handle comes from."""
    name = producer(text)
    for _ in range(_MAX_IDENTITIES):
        node = nodes.get(name)
        if node is None or not _hands_on(node) or not node.input:
            break
        name = producer(node.input[0])
    return name


def _hands_on(node: Proto) -> bool:
    """True for an Identity on a handle; one on a reference variable reads its value."""
    return node.op == "Identity" and attr_dtype(node, "T") is DType.RESOURCE
