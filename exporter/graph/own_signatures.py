"""Decide which of a graph's own signatures can be served: leave out those that train, save or count.

An inference graph has no side effects. A signature whose purpose is a side effect would answer as if it had
trained or saved, and do nothing. If a signature computes an answer, and no answer depends on a change that it
also makes, such as a count of requests or a line in a log, the change is dropped. Effects are followed into
functions: a `train_step` may have its gradients and assignments three calls deep.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import GraphError, few
from exporter.graph.clean import clean
from exporter.graph.functions import callers, needed_by, reachable, terminating
from exporter.graph.inference_graph import Effect, Outside
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import (
    CALLS,
    GraphIndex,
    all_before,
    attr_dtype,
    has_control_flow,
    input_names,
    node_of,
    reach,
)
from exporter.graph.outside import effect_in, effect_of
from exporter.graph.servable import called_functions, changes_state, foreign_ops, is_refused
from exporter.graph.signatures import SignatureEnds, left_out, none_servable
from exporter.graph.source_graph import SourceGraph
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MAX_IDENTITIES = 32  # a damaged graph may have a cycle of them
_GIVEN = frozenset({"Identity", "IdentityN", "Const", "Placeholder", "PlaceholderWithDefault"})
_SAVES = frozenset({"Save", "SaveV2", "SaveSlices", "MergeV2Checkpoints"})


class Effects(Struct, frozen=True):
    """The effects of computing outputs, or a function's results; variables and tables by node or argument."""

    reads: frozenset[str] = frozenset()  # variables and tables that are read for outputs
    writes: frozenset[str] = frozenset()  # variables and tables that are changed
    outside: frozenset[Outside] = frozenset()  # operations that reach out of the model beyond reading
    dropped: frozenset[Outside] = frozenset()  # the part of `outside` that no output needs: not served
    computes: bool = False  # an output is more than an input or a constant

    @property
    def is_purpose(self) -> bool:
        """True if clients call the signature for its effects, and not for its answer.

        It saves, by an operation that no output needs, or it has an effect and computes nothing.
        """
        saves = any(each.op in _SAVES for each in self.dropped)
        return saves or (bool(self.writes or self.dropped) and not self.computes)


class _Body(Struct, frozen=True):
    """The nodes that run in a function, or in a graph (""); results need the nodes `computing`.

    `handles` are the nodes or arguments that are handles of variables and tables.
    """

    function: str
    nodes: Mapping[str, Proto]
    computing: Collection[str]
    handles: Collection[str]

    def handles_of(self, node: Proto) -> dict[int, str]:
        """Return {position among a node's data inputs: the handle, one of `handles`, that it takes there}.

        GraphError for an unknown type number.
        """
        taken = {at: self._origin(text) for at, text in enumerate(input_names(node))}
        return {at: handle for at, handle in taken.items() if handle in self.handles}

    def _origin(self, text: str) -> str:
        """Return the name of the node or argument that a tensor is from, behind Identity nodes on a handle.

        At most 32 of them are followed. GraphError for an unknown type number.
        """
        name = node_of(text)
        for _ in range(_MAX_IDENTITIES):
            node = self.nodes.get(name)
            if node is None or not _hands_on(node) or not node.input:
                break
            name = node_of(node.input[0])
        return name


class EffectsOf:
    """Computes the effects of signatures; each function is analysed only once."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._known: dict[str, Effects] = {}
        self._order = terminating(index.functions)  # callees first: deep calls without deep recursion

    def signature(self, ends: SignatureEnds) -> Effects:
        """Return the effects of all nodes that a session runs for a signature, also by control edges.

        GraphError if the graph lacks a node or a function that the outputs need, or for an unknown type
        number.
        """
        nodes = self._index.nodes
        runs = all_before(nodes, ends.outputs, ends.inputs)
        called = reachable((nodes[name] for name in runs), self._index.functions)
        for name in filter(called.__contains__, self._order):
            self._function(name)
        computing = reach(nodes, ends.computed, given=ends.inputs).inputs
        handles = {name for name in runs if nodes[name].op in VARIABLE_OPS or "HashTable" in nodes[name].op}
        return self._effects(_Body("", {name: nodes[name] for name in runs}, computing, handles))

    def _function(self, name: str) -> Effects:
        if name not in self._known:
            self._known[name] = Effects()  # until it is analysed: it may call itself
            function = self._index.functions[name]
            nodes = {node.name: node for node in function.node_def}
            # With control flow a body is served whole: see `functions.pruned_body`.
            computing = set(nodes) if has_control_flow(nodes) else needed_by(nodes, function.ret.values())
            handles = {a.name for a in function.signature.input_arg if a.type == int(DType.RESOURCE)}
            self._known[name] = self._effects(_Body(name, nodes, computing, handles))
        return self._known[name]

    def _called(self, node: Proto) -> dict[str, Effects]:
        """Return {function: its effects} for the graph's functions that a node calls; memoised.

        GraphError for an unknown type number.
        """
        callees = sorted(called_functions(node) & self._index.functions.keys())
        return {callee: self._function(callee) for callee in callees}

    def _effects(self, body: _Body) -> Effects:
        reads, writes = self._touched(body)
        outside, dropped = self._reaching_out(body)
        return Effects(reads, writes, outside, dropped, bool(reads) or self._computes(body))

    def _touched(self, body: _Body) -> tuple[frozenset[str], frozenset[str]]:
        """Return the handles of the variables and tables that results read, and of the changed ones.

        GraphError for an unknown type number.
        """
        reads, writes = set[str](), set[str]()
        for node in body.nodes.values():
            taken = body.handles_of(node)
            if not taken or _hands_on(node):
                continue
            is_computing = node.name in body.computing
            if changes_state(node.op):
                writes |= {*taken.values()}
            elif called := self._called(node):
                for callee, inner in called.items():
                    given = self._arguments(node, callee, taken)
                    writes |= {handle for argument, handle in given.items() if argument in inner.writes}
                    if is_computing:
                        reads |= {handle for argument, handle in given.items() if argument in inner.reads}
            elif is_computing:
                reads |= {*taken.values()}
        return frozenset(reads), frozenset(writes)

    def _reaching_out(self, body: _Body) -> tuple[frozenset[Outside], frozenset[Outside]]:
        """Return the operations with effects outside the model beyond reading, and a subset of them.

        The second set has the operations that no result needs. GraphError for an unknown type number.
        """
        outside, dropped = set[Outside](), set[Outside]()
        for node in body.nodes.values():
            called, effect = self._called(node).values(), effect_of(node.op)
            runs = {each for inner in called for each in inner.outside}
            if effect not in (None, Effect.READS, Effect.UNKNOWN):  # an unknown effect may be harmless
                runs.add(Outside(node.name, node.op, effect, body.function))
            outside |= runs
            needed = node.name in body.computing
            dropped |= {each for inner in called for each in inner.dropped} if needed else runs
        return frozenset(outside), frozenset(dropped)

    def _computes(self, body: _Body) -> bool:
        """True if a result is more than an input, a constant or a handle.

        GraphError for an unknown type number.
        """
        return any(
            any(inner.computes for inner in called)
            if (called := self._called(node).values())
            # a handle is read, not computed
            else node.op not in _GIVEN and name not in body.handles
            for name, node in body.nodes.items()
            if name in body.computing
        )

    def _arguments(self, node: Proto, callee: str, taken: Mapping[int, str]) -> dict[str, str]:
        """Return {argument of the called function `callee`: the handle that it gets}.

        `taken` has the handles by their positions among the node's inputs.
        """
        arguments = [argument.name for argument in self._index.functions[callee].signature.input_arg]
        shift = CALLS.get(node.op, 0)
        return {arguments[at - shift]: h for at, h in taken.items() if 0 <= at - shift < len(arguments)}


def _hands_on(node: Proto) -> bool:
    """True for an Identity that forwards a handle; on a reference variable an Identity reads the value.

    GraphError for an unknown type number.
    """
    return node.op == "Identity" and attr_dtype(node, "T") is DType.RESOURCE


def keep_servable(source: SourceGraph) -> SourceGraph:
    """Return a copy of the source without the signatures that cannot be served, with notes on the changes.

    The source itself if nothing is to be changed, or if every signature fails to be cleaned: `clean` then
    reports why. Cleaning a doubtful signature may run the graph in another process, for up to minutes.
    NotServable if none is left for other reasons; GraphError if two nodes have the same name, or one has
    none, or if the graph lacks a function that is called, or a node that an output needs, or for an unknown
    type number; UsageError if `--feed` fixes an input of a signature.
    """
    index = GraphIndex.of(source.meta_graph)
    ends = {name: SignatureEnds.of(s) for name, s in sorted(source.meta_graph.signature_def.items())}
    reasons = _failing(source, index, ends)
    if len(reasons) == len(ends):
        return source  # `clean` reports why
    find = EffectsOf(index)
    effects = {name: find.signature(one) for name, one in ends.items() if name not in reasons}
    reasons |= _training(source, effects)
    reasons |= {
        name: "its purpose is an effect, which an inference graph lacks: "
        + (few(sorted(map(str, done.dropped)), 3, "; ") or f"it changes {_names(source, done.writes)}")
        for name, done in effects.items()
        if name not in reasons and done.is_purpose
    }
    if len(reasons) == len(ends):
        way_out = "name tensors that need no change: --input NAME=TENSOR --output NAME=TENSOR"
        raise none_servable(source.label, reasons, way_out)
    notes = left_out(reasons)
    for name, done in effects.items():
        if name not in reasons and done.writes:
            changed = _names(source, done.writes)
            notes.append(f"signature {name!r} no longer changes {changed}, on which no answer depends")
        if name not in reasons and done.dropped:
            dropped = few(sorted(map(str, done.dropped)), 3, "; ")
            notes.append(f"signature {name!r} no longer does what no answer needs: {dropped}")
    if not notes:
        return source
    meta_graph = deepcopy(source.meta_graph)
    for name in reasons:
        del meta_graph.signature_def[name]
    return replace(source, meta_graph=meta_graph, notes=(*source.notes, *notes))


def _failing(source: SourceGraph, index: GraphIndex, ends: Mapping[str, SignatureEnds]) -> dict[str, str]:
    """Return {signature: the reason why it cannot be cleaned alone}; empty if there is only one signature.

    `ends` are all signatures by name. Only those with a suspicious operation or a placeholder without a value
    are cleaned, each in a copy of the graph, which may take minutes. GraphError if the graph lacks a function
    that is called; UsageError if `--feed` fixes an input of a signature.
    """
    if len(ends) == 1:
        return {}
    foreign = frozenset[str]()
    if not source.trust.foreign_ops:
        foreign = foreign_ops(protos.all_nodes(source.meta_graph.graph_def), index.functions)

    def is_unfit(node: Proto) -> bool:
        is_known = node.op in index.functions or not (is_refused(node.op) or node.op in foreign)
        return not is_known or effect_in(node, index.functions) is not None

    own = [name for name, body in index.functions.items() if any(map(is_unfit, body.node_def))]
    endless = index.functions.keys() - terminating(index.functions)
    unfit, reasons = {*callers(index.functions, own), *endless}, {}
    for name, one in ends.items():
        before = [index.nodes[node] for node in all_before(index.nodes, one.outputs, one.inputs)]
        fed = {tensor.node for tensor in one.inputs} | source.feeds.keys()
        unfed = any(node.op.startswith("Placeholder") and node.name not in fed for node in before)
        if unfed or any(is_unfit(node) or called_functions(node) & unfit for node in before):
            alone = deepcopy(source.meta_graph)  # cleaning decides, but is slow: only suspects are cleaned
            for other in ends.keys() - {name}:
                del alone.signature_def[other]
            try:
                clean(replace(source, meta_graph=alone))
            except GraphError as error:
                reasons[name] = error.message
    return reasons


def _training(source: SourceGraph, effects: Mapping[str, Effects]) -> dict[str, str]:
    """Return {signature: reason} for signatures that change state from which an answer is computed."""
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
