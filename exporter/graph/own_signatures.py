"""Decide which of a graph's own signatures can be served: those that train or count are left out.

An inference graph has no side effects. A signature whose purpose is one would answer as if it had trained,
and do nothing. A change of what no answer depends on, such as a count of requests, is merely dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from msgspec.structs import replace

from exporter.errors import GraphError, NotServable
from exporter.graph.clean import clean
from exporter.graph.deeprec_ops import foreign_ops
from exporter.graph.effects import Effects, EffectsOf
from exporter.graph.functions import callers
from exporter.graph.nodes import GraphIndex
from exporter.graph.reach import all_before
from exporter.graph.servable import called_functions, is_refused
from exporter.graph.signature_tensors import SignatureEnds
from exporter.graph.source_graph import SourceGraph
from exporter.wire.protos import Proto


def keep_servable(source: SourceGraph) -> SourceGraph:
    """The source without signatures that cannot be served, which its notes name.

    A graph of which none can be served is left to `clean`, which says why.

    Raises:
        NotServable: every signature needs to change what it, or another one, answers from.
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
    """Why signatures that look as if they could not be cleaned cannot; only if there are others."""
    if len(ends) == 1:
        return {}
    unfit = callers(
        index.functions,
        [name for name, body in index.functions.items() if any(is_refused(n.op) for n in body.node_def)],
    )
    reasons, foreign = {}, foreign_ops(index.nodes.values(), index.functions)
    for name, one in ends.items():
        before = [index.nodes[node] for node in all_before(index.nodes, one.outputs, one.inputs)]
        fed = {tensor.node for tensor in one.inputs} | source.feeds.keys()
        if any(
            is_refused(n.op) or n.op in foreign or called_functions(n) & unfit or _is_unfed(n, fed)
            for n in before
        ):
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
    """Why signatures that change what answers depend on cannot be served."""
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
