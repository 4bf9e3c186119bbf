"""Decide which of a graph's own signatures can be served: those that train or count are left out.

An inference graph has no side effects. A signature whose purpose is a side effect would answer as if it had
trained, and do nothing. If no answer depends on a change, such as a count of requests, the change is dropped.

So the variables and tables are found that a signature changes, and those that its outputs depend on, also in
the functions that it calls: a `train_step` may have its gradients and assignments three calls deep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import GraphError, NotServable
from exporter.graph.clean import clean
from exporter.graph.functions import callers, needed_by
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import CALLS, ENTERS, SWITCHES, GraphIndex, all_before, attr_dtype, endpoint, reach
from exporter.graph.outside import effect_of
from exporter.graph.servable import called_functions, changes_state, foreign_ops, is_refused
from exporter.graph.signatures import SignatureEnds
from exporter.graph.source_graph import SourceGraph
from exporter.wire import protos
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
        """The effects of the nodes that a session runs for it, including those that outputs only wait for."""
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


def keep_servable(source: SourceGraph) -> SourceGraph:
    """The source without the signatures that cannot be served, which its notes name.

    If none can be served, the graph stays as it is, and `clean` reports why.

    Raises:
        NotServable: every signature changes a variable or table that it, or another one, answers from.
    """
    index = GraphIndex.of(source.meta_graph)
    ends = {name: SignatureEnds.of(s) for name, s in sorted(source.meta_graph.signature_def.items())}
    reasons = _failing(source, index, ends)
    if len(reasons) == len(ends):
        return source
    find = EffectsOf(index)
    effects = {name: find.signature(one) for name, one in ends.items() if name not in reasons}
    reasons |= _training(source, effects)
    if len(reasons) == len(ends):
        raise NotServable(
            f"no signature of {source.label} can be served",
            cause="; ".join(f"{name!r}: {reason}" for name, reason in reasons.items()),
            hint="name tensors that need no change: --input NAME=TENSOR --output NAME=TENSOR",
        )
    notes = [f"signature {name!r} is left out: {reason}" for name, reason in sorted(reasons.items())]
    notes += [
        f"signature {name!r} no longer changes {_names(source, done.writes)}, on which no answer depends"
        for name, done in effects.items()
        if name not in reasons and done.writes
    ]
    if not notes:
        return source
    meta_graph = deepcopy(source.meta_graph)
    for name in reasons:
        del meta_graph.signature_def[name]
    return replace(source, meta_graph=meta_graph, notes=(*source.notes, *notes))


def _failing(source: SourceGraph, index: GraphIndex, ends: Mapping[str, SignatureEnds]) -> dict[str, str]:
    """The reasons why signatures cannot be cleaned, if at least one other signature can."""
    if len(ends) == 1:
        return {}
    foreign = frozenset[str]()
    if not source.trust.foreign_ops:
        foreign = foreign_ops(protos.all_nodes(source.meta_graph.graph_def), index.functions)

    def is_unfit(op: str) -> bool:
        return op not in index.functions and (is_refused(op) or op in foreign or effect_of(op) is not None)

    own = [name for name, body in index.functions.items() if any(is_unfit(n.op) for n in body.node_def)]
    unfit, reasons = callers(index.functions, own), {}
    for name, one in ends.items():
        before = [index.nodes[node] for node in all_before(index.nodes, one.outputs, one.inputs)]
        fed = {tensor.node for tensor in one.inputs} | source.feeds.keys()
        if any(is_unfit(n.op) or called_functions(n) & unfit or _is_unfed(n, fed) for n in before):
            alone = deepcopy(source.meta_graph)
            for other in ends.keys() - {name}:
                del alone.signature_def[other]
            try:
                clean(replace(source, meta_graph=alone))
            except GraphError as error:
                reasons[name] = error.message
    return reasons


def _is_unfed(node: Proto, fed: set[str]) -> bool:
    return node.op.startswith("Placeholder") and node.name not in fed


def _training(source: SourceGraph, effects: Mapping[str, Effects]) -> dict[str, str]:
    """The reasons why signatures that change variables or tables which answers depend on cannot be served."""
    readers = {handle: name for name, done in effects.items() for handle in done.reads}
    found = {}
    for name, done in effects.items():
        changed = done.writes & readers.keys()
        if changed:
            found[name] = f"it changes {_names(source, changed)}, which answers are computed from"
    return found


def _names(source: SourceGraph, handles: frozenset[str]) -> str:
    keys = sorted(source.keys[node].key if node in source.keys else node for node in handles)
    return ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
