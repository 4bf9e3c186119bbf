"""Keep what fills state that is neither a variable nor a lookup table of TensorFlow's.

A library's own table or model is a resource that a node without inputs makes. Two things fill it, and both go
along with whatever they need: operations under the graph's init op (TF-DF reads trees from files of assets/),
and operations under its restore op, which import tensors of the checkpoint (TFRA's tables):

    prefix -> RestoreV2 (names) -> Import (handle)         in the graph, or in the function that restores

A restore that lies in a function is written out into the graph, and reads nothing but what is imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy

import numpy as np
from msgspec import Struct

from exporter.errors import NotServable
from exporter.graph.functions import callers, needed_by
from exporter.graph.inference_graph import KeptState
from exporter.graph.nodes import (
    Endpoint,
    GraphIndex,
    attr_text,
    closure,
    const_texts,
    constant,
    data_inputs,
    endpoint,
    free_name,
    new_node,
    through_identities,
    waited_for,
)
from exporter.graph.servable import called_functions, foreign_ops
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_STOCK_MAKERS = re.compile(r"BoostedTrees\w*(HandleOp|Resource)")
"""Makers of state in stock TensorFlow that only a restore of their own fills."""

_READS = "RestoreV2"
_PREFIX = "kept_state/prefix"


class StateMakers(Struct, frozen=True):
    """The nodes of a graph that make state of these kinds, by what makes two of them one: a shared name."""

    index: GraphIndex
    identities: Mapping[str, str]
    foreign: frozenset[str]
    """Operations, and functions that have such, or call one that has."""
    is_foreign_used: bool

    @classmethod
    def among(cls, index: GraphIndex, needed: Iterable[str]) -> StateMakers:
        """Those that outputs need."""
        ops = foreign_ops(protos.all_nodes(index.graph_def), index.functions)
        own = [name for name, f in index.functions.items() if any(node.op in ops for node in f.node_def)]
        foreign = ops | callers(index.functions, own)
        wanted = [index.nodes[name] for name in needed if name in index.nodes]
        identities = {node.name: _identity(node) for node in wanted if _makes_state(index, node, ops)}
        return cls(index, identities, foreign, any(called_functions(node) & foreign for node in wanted))

    def are_taken_by(self, node: Proto) -> set[str]:
        """The identities of those whose handles a node takes."""
        taken = (
            self.index.nodes.get(through_identities(self.index.nodes, s.node)) for s in data_inputs(node)
        )
        return {_identity(source) for source in taken if source is not None} & {*self.identities.values()}

    def is_foreign(self, node: Proto) -> bool:
        """True for a foreign operation, and for a call of a function with one."""
        return not called_functions(node).isdisjoint(self.foreign)

    def initialisers(self, init_op: str | None) -> list[str]:
        """What the init op runs that fills such state, or is foreign as outputs are, in the graph's order."""
        under = {*waited_for(self.index.nodes, [init_op] if init_op else [])}
        return [
            name
            for name, node in self.index.nodes.items()
            if name in under and (self.are_taken_by(node) or (self.is_foreign_used and self.is_foreign(node)))
        ]

    def require_filled(self, nodes: Mapping[str, Proto], filling: Iterable[str]) -> None:
        """Refuse state that nothing fills.

        Raises:
            NotServable: a server would answer from it while it is empty.
        """
        filled = {identity for name in filling for identity in self.are_taken_by(nodes[name])}
        for name, identity in self.identities.items():
            if identity not in filled:
                raise NotServable(
                    f"nothing in the graph fills {self.index.nodes[name].op} {name!r}",
                    cause="it would be empty when served: neither the init op nor the restore op writes it",
                    hint="save the model with its library's own saver, as a SavedModel or with its Saver",
                )


def keep_restores(
    index: GraphIndex, nodes: dict[str, Proto], makers: StateMakers, saver_def: Proto
) -> KeptState:
    """Put what restores such state into `nodes`, in place: reads of the tensors alone that it imports.

    Raises:
        NotServable: it reads the checkpoint in a way that does not tell which tensors it needs.
    """
    importing: list[str] = []
    restore = endpoint(saver_def.restore_op_name).node
    for name in waited_for(nodes, [restore]) if makers.identities else []:
        node = nodes[name]
        if not makers.are_taken_by(node):
            continue
        called = sorted(called_functions(node) & index.functions.keys())
        importing += _written_out(index, nodes, node, called[0], makers) if called else [name]
    if not importing:
        return KeptState()
    nodes[_PREFIX] = new_node(_PREFIX, "Placeholder", dtype=DType.STRING, shape=())
    tensors = _Reads(nodes, importing, endpoint(saver_def.filename_tensor_name).node).narrow()
    return KeptState(tuple(importing), _PREFIX, tensors)


def _makes_state(index: GraphIndex, node: Proto, foreign: Collection[str]) -> bool:
    if _STOCK_MAKERS.fullmatch(node.op):
        return not data_inputs(node)
    if node.op not in foreign or data_inputs(node):
        return False
    op_def = index.op_def(node.op)
    return op_def is None or op_def.is_stateful


def _identity(node: Proto) -> str:
    return f"{node.op} {attr_text(node, 'shared_name') or node.name}"


def _written_out(
    index: GraphIndex, nodes: dict[str, Proto], call: Proto, function: str, makers: StateMakers
) -> list[str]:
    """Copy what takes makers' handles in a called function into the graph; the nodes that take them."""
    body = {node.name: node for node in index.functions[function].node_def}
    arguments = [argument.name for argument in index.functions[function].signature.input_arg]
    given = dict(zip(arguments, (source.as_input for source in data_inputs(call)), strict=False))
    handles = {name for name, text in given.items() if makers.are_taken_by(new_node("", "", [text]))}
    taking = [name for name, node in body.items() if {*_sources(node)} & handles]
    kept = {*taking, *needed_by(body, (source for name in taking for source in _sources(body[name])))}
    scope = free_name(nodes, f"kept_state/{call.name}")
    for name in body:
        if name not in kept:
            continue
        node = deepcopy(body[name])
        node.name = f"{scope}/{name}"
        node.device = ""
        node.input[:] = [
            moved
            for text in body[name].input
            if (moved := _moved(index, body, kept, given, scope, text)) is not None
        ]
        nodes[node.name] = node
    return [f"{scope}/{name}" for name in taking]


def _sources(node: Proto) -> Iterator[str]:
    return (text.partition(":")[0] for text in node.input if not text.startswith("^"))


def _moved(
    index: GraphIndex,
    body: Mapping[str, Proto],
    kept: Collection[str],
    given: Mapping[str, str],
    scope: str,
    text: str,
) -> str | None:
    """How the graph writes an input of a body; None for an edge from a node that is not kept."""
    name, *output = text.removeprefix("^").split(":")
    if text.startswith("^"):
        return f"^{scope}/{name}" if name in kept else None
    if not output:
        return given[name]
    op_def = index.op_def(body[name].op)
    if op_def is not None and len(op_def.output_arg) > 1:
        raise _unclear(body[name])
    return Endpoint(f"{scope}/{name}", int(output[-1])).as_input


class _Reads:
    """The RestoreV2 nodes before some nodes, to be replaced by ones that read only what these take."""

    def __init__(self, nodes: dict[str, Proto], importing: Iterable[str], prefix: str) -> None:
        self._nodes = nodes
        self._prefix = prefix
        self._before = closure(importing, self._sources)

    def _sources(self, name: str) -> list[str]:
        if self._nodes[name].op == _READS:
            return []
        return [source.node for source in data_inputs(self._nodes[name]) if source.node in self._nodes]

    def narrow(self) -> tuple[str, ...]:
        """Replace them; the names of the tensors that they read now.

        Raises:
            NotServable: something else reads the checkpoint, or the names are not constants.
        """
        if self._prefix in self._before:
            readers = (name for name in self._before if self._prefix in self._sources(name))
            raise _unclear(self._nodes[next(readers)])
        reads = [name for name in self._before if self._nodes[name].op == _READS]
        return tuple(dict.fromkeys(tensor for name in reads for tensor in self._narrow(name)))

    def _narrow(self, name: str) -> list[str]:
        node = self._nodes[name]
        names, slices = (
            const_texts(self._nodes.get(through_identities(self._nodes, source.node)))
            for source in data_inputs(node)[1:3]
        )
        if names is None or slices is None or len(names) != len(slices):
            raise _unclear(node)
        users = [user for user in self._before if name in {s.node for s in data_inputs(self._nodes[user])}]
        used = sorted({s.output for u in users for s in data_inputs(self._nodes[u]) if s.node == name})
        for user in users:
            copy = deepcopy(self._nodes[user])
            copy.input[:] = [_renumbered(text, name, used) for text in copy.input]
            self._nodes[user] = copy
        types = node.attr["dtypes"].list.type
        texts = {f"{name}/tensor_names": names, f"{name}/shape_and_slices": slices}
        dtypes = tuple(DType(types[output]) for output in used)
        self._nodes[name] = new_node(name, _READS, [_PREFIX, *texts], dtypes=dtypes)
        for key, values in texts.items():
            chosen = np.array([values[output].encode() for output in used], object)
            self._nodes[key] = constant(key, chosen, DType.STRING)
        return [names[output] for output in used]


def _renumbered(text: str, read: str, used: list[int]) -> str:
    tensor = endpoint(text)
    if text.startswith("^") or tensor.node != read:
        return text
    return tensor._replace(output=used.index(tensor.output)).as_input


def _unclear(node: Proto) -> NotServable:
    return NotServable(
        f"which tensors {node.op} {node.name!r} restores is not known",
        cause="it reads the checkpoint by itself, and fills what outputs are computed from",
        hint="serve the model as its library saves it",
    )
