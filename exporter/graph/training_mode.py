"""Detect that a graph computes as in training: batch statistics, dropout, other random numbers.

Only nodes that run during a request count, with the flags and rates that are constants there
(`called_bodies.py`). Dropout multiplies by a mask of random numbers that were compared with a rate, or
selects zeros in their place; noise adds normal numbers of a constant deviation, or multiplies by them. A rate
that is not known counts as one that is on, unless the request supplies it. Other random numbers belong to the
model, such as a sample from its result.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import TrainingModeServed
from exporter.graph.called_bodies import CalledBody, is_by_batch
from exporter.graph.constant_values import MISFITS, compute
from exporter.graph.inference_graph import InferenceGraph, TrainingMode
from exporter.graph.nodes import (
    SWITCHES,
    attr_dtype,
    const_value,
    input_names,
    node_of,
    readers_of,
    through_identities,
)
from exporter.graph.signatures import SignatureEnds
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, all_nodes

Array = np.ndarray[Any, Any]

_RANDOM = re.compile(
    r"(Stateless)?(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial"
    r"|Stateful(Uniform|StandardNormal|Random))\w*"
)
_NOT_DRAWN = frozenset({"RandomShuffleQueue", "RandomShuffleQueueV2", "RandomDataset"})
_UNIFORM = re.compile(r"(Stateless|Stateful)?(RandomUniform|Uniform)(V2)?")
_SEEDS = re.compile(r"StatelessRandomGet\w+")
_NORMAL = re.compile(r"(Stateless)?RandomNormal(V2)?|RandomStandardNormal|StatefulStandardNormal(V2)?")
_COMPARES = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})
_SAME = frozenset({"Identity", "Cast", "Reshape", "StopGradient"})
_ADDS = frozenset({"Add", "AddV2", "Sub"})
_MOVES = _ADDS | {"Mul", "RealDiv", "Div", "Neg"}
_SELECTS = frozenset({"Select", "SelectV2"})
_DECIDES = SWITCHES | {"If", "StatelessIf"}
_SAME_MASK = frozenset({"Identity", "LogicalNot", "Reshape", "ExpandDims", "BroadcastTo", "StopGradient"})
_FLOATS = (None, DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)  # None: the dtype is unknown
_MOST_PLACES = 64  # nodes to which each random operation is followed; masks need fewer
_MOST_FEEDS = 8  # placeholders that are tried, each by another walk through the graph
_MOST_BYTES = 1 << 10  # of a computed span: two numbers, but a damaged graph may claim more


def training_mode(meta_graph: Proto) -> TrainingMode:
    """Return the operations that compute as in training among the nodes that signatures run.

    These are batch statistics, dropout, noise and other random numbers. All fields are empty for a graph
    without such operations; in any other graph `idle` has the nodes of the variables that no signature uses.
    GraphError for an unknown type number.
    """
    nodes = all_nodes(meta_graph.graph_def)
    if not any(n.op == "SquaredDifference" or _is_random(n.op) or is_by_batch(n) for n in nodes):
        return TrainingMode()  # for most graphs: following constants takes time
    graphs = _graphs(meta_graph, {})
    bodies = [body for graph in graphs for body in graph.bodies()]
    drawn = [sign for body in bodies for sign in _drawn(body)]
    variables = {node.name for node in meta_graph.graph_def.node if node.op == "VarHandleOp"}
    return TrainingMode(
        batch_norms=tuple(dict.fromkeys(name for body in bodies for name in _batch_norms(body))),
        dropouts=tuple(dict.fromkeys((s.name, s.rate) for s in drawn if s.kind is _Kind.DROPOUT)),
        noises=tuple(dict.fromkeys(s.name for s in drawn if s.kind is _Kind.NOISE)),
        random=tuple(dict.fromkeys(s.name for s in drawn if s.kind is _Kind.OTHER)),
        idle=frozenset(variables.difference(*(graph.live for graph in graphs))),
    )


def _graphs(meta_graph: Proto, fixed: Mapping[str, Array]) -> list[CalledBody]:
    """Return a body of the graph for each signature, in any order, with the values `fixed` for some nodes."""
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    library = {function.signature.name: function for function in meta_graph.graph_def.library.function}
    return [
        CalledBody(
            nodes,
            [tensor.node for tensor in ends.outputs],
            library,
            fed={*fixed, *(tensor.node for tensor in ends.inputs)},
            arguments=fixed,
        )
        for ends in map(SignatureEnds.of, meta_graph.signature_def.values())
    ]


def check_dropout(graph: InferenceGraph, feeds: Mapping[str, Array]) -> None:
    """Raise TrainingModeServed for a graph with dropout or noise that is on.

    `feeds` are the placeholders that were fixed, with their values. The error names the first operation, and
    the placeholders that turn all of them off, if any do: to find these, the graph is searched again.
    """
    found = [*graph.training.dropping()]
    if not found:
        return
    more = f"; {len(found) - 1} more like it" if len(found) > 1 else ""
    off = " ".join(f"--feed {shlex.quote(f'{name}={value}')}" for name, value in _off(graph, feeds).items())
    raise TrainingModeServed(
        f"the graph computes as in training: {found[0]}{more}",
        cause="two requests with the same inputs would get two answers",
        hint=f"{off or 'build the graph with training=False, or fix the rate: --feed NAME=VALUE'}; "
        "if this is meant: --allow dropout",
    )


def _off(graph: InferenceGraph, feeds: Mapping[str, Array]) -> dict[str, str]:
    """Return {placeholder: value as JSON}, as few as turn dropout and noise off; empty if none do.

    `feeds` are the placeholders that were fixed. More than eight candidates are not tried.
    """
    values = _switchable(graph.meta_graph, feeds)

    def drops(fixed: Mapping[str, Array]) -> bool:
        bodies = (body for graph_ in _graphs(graph.meta_graph, fixed) for body in graph_.bodies())
        return any(sign.kind in _TRAINS for body in bodies for sign in _drawn(body))

    for number in (1, 0) if len(values) <= _MOST_FEEDS else ():  # a part to keep, or a rate to drop
        off = {name: np.full_like(value, value.dtype != bool and number) for name, value in values.items()}
        if off and not drops(off):
            for name in [*off]:
                fewer = {other: value for other, value in off.items() if other != name}
                off = off if drops(fewer) else fewer
            return {name: json.dumps(value.tolist()) for name, value in off.items()}
    return {}


def _switchable(meta_graph: Proto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return {placeholder: present value} of booleans and floats that `--feed` fixed or may fix.

    `feeds` are the fixed ones; others have a constant default. Inputs of signatures are left out.
    """
    nodes = {node.name: node for node in meta_graph.graph_def.node}
    values = dict(feeds)
    for node in nodes.values():
        has_default = node.op == "PlaceholderWithDefault" and len(node.input) > 0
        default = const_value(nodes.get(node_of(node.input[0]))) if has_default else None
        if default is not None:
            values[node.name] = default
    signatures = map(SignatureEnds.of, meta_graph.signature_def.values())
    given = {tensor.node for ends in signatures for tensor in ends.inputs}
    return {name: value for name, value in values.items() if name not in given and value.dtype.kind in "bf"}


@cache
def _is_random(op: str) -> bool:
    return _RANDOM.fullmatch(op) is not None and op not in _NOT_DRAWN and not _SEEDS.fullmatch(op)


def _batch_norms(body: CalledBody) -> Iterator[str]:
    """Yield `operation 'node'` for each node that normalises by the request's own batch, sorted by node."""
    for name in sorted(body.live & body.nodes.keys()):
        node = body.nodes[name]
        fused = is_by_batch(node) and not _is_one_example(body, node)
        if fused or (node.op == "SquaredDifference" and _is_batch_variance(body, node)):
            yield f"{node.op} {name!r}"


def _is_one_example(body: CalledBody, node: Proto) -> bool:
    """True if the batch is arranged as channels of one example, as in layer and instance normalisation."""
    reshape = _node(body, input_names(node)[0])
    shape = _node(body, input_names(reshape)[1]) if reshape is not None and reshape.op == "Reshape" else None
    if shape is None or shape.op != "Pack":
        value = const_value(shape)
        return value is not None and value.size > 0 and value.ravel()[0] == 1
    return bool(body.number(input_names(shape)[0]) == 1)


def _is_batch_variance(body: CalledBody, node: Proto) -> bool:
    """True if a SquaredDifference is the distance of a tensor from its own mean over the batch.

    `tf.nn.moments` makes such nodes.
    """
    inputs = input_names(node)
    mean = _node(body, through_identities(body.nodes, inputs[1], _SAME)) if len(inputs) == 2 else None
    if mean is None or mean.op != "Mean" or len(input_names(mean)) != 2 or input_names(mean)[0] != inputs[0]:
        return False
    value = const_value(_node(body, input_names(mean)[1]))
    return value is not None and 0 in value.ravel().tolist()


def _node(body: CalledBody, tensor: str) -> Proto | None:
    return body.nodes.get(node_of(tensor))


class _Kind(Enum):
    OFF = "it has no effect"
    ALL = "all of something is dropped"
    DROPOUT = "a part of something is dropped"
    NOISE = "noise is added, or multiplied by"
    OTHER = "something else, or what the request asks for"


_TRAINS = (_Kind.ALL, _Kind.DROPOUT, _Kind.NOISE)


class _Drawn(Struct, frozen=True):
    """One use of random numbers: the operation that draws them, in words, its kind, and the rate of dropout.

    `rate` is the fraction that is dropped, 0 to 1; None if it is unknown, not one number, or not dropout.
    """

    name: str
    kind: _Kind
    rate: float | None = None


def _drawn(body: CalledBody) -> Iterator[_Drawn]:
    """Yield the uses of each random operation that runs, at least one for each, sorted by node.

    A use that the request itself chooses counts as OTHER. GraphError for an unknown type number.
    """
    drawing = [name for name in sorted(body.live & body.nodes.keys()) if _is_random(body.nodes[name].op)]
    uses = _Uses(body, drawing) if drawing else None
    for node in (body.nodes[name] for name in drawing):
        found: list[tuple[_Kind, float | None]] = []
        if uses is not None and attr_dtype(node, "dtype") in _FLOATS:
            found += uses.masks(node) if _UNIFORM.fullmatch(node.op) else []
            found += uses.noises(node) if _NORMAL.fullmatch(node.op) else []
        for kind, rate in found or [(_Kind.OTHER, None)]:
            is_chosen = kind is not _Kind.OFF and body.chosen(node.name)  # the request asks for training
            yield _Drawn(f"{node.op} {node.name!r}", _Kind.OTHER if is_chosen else kind, rate)


class _Uses:
    """Follows random numbers to the masks and noise made of them; the nodes `drawing` of a body draw them."""

    def __init__(self, body: CalledBody, drawing: Collection[str]) -> None:
        self._body = body
        self._random = body.computed_from(drawing)
        self._readers = readers_of(body.nodes[name] for name in body.live & body.nodes.keys())

    def masks(self, uniform: Proto) -> Iterator[tuple[_Kind, float | None]]:
        """Yield (kind, the fraction that it drops, 0 to 1) for each mask made of a node's uniform numbers.

        The fraction is None if it is unknown, or not one number. At most 64 nodes are followed.
        """
        # The numbers are in a span from 0 to 1, which constants scale and shift. They are compared with a
        # rate or, in old TensorFlow, shifted by the probability to keep and rounded down.
        pending: list[tuple[Proto, Array | None]] = [(uniform, np.array([0.0, 1.0]))]
        for _ in range(_MOST_PLACES):
            if not pending:
                return
            source, span = pending.pop()
            for node in self._readers.get(source.name, ()):
                if node.op in _COMPARES:
                    yield self._compared(node, source, span)
                elif node.op == "Floor" or (node.op == "Cast" and _is_integer(node)):
                    yield _verdict(_dropped_by_floor(span))
                elif node.op in _SAME:
                    pending.append((node, span))
                elif node.op in _MOVES and not self._varies(node, source):
                    pending.append((node, self._moved(node, source, span)))

    def noises(self, normal: Proto) -> Iterator[tuple[_Kind, float | None]]:
        """Yield (NOISE or OFF, None) for each use of a node's normal numbers with data.

        Their mean and deviation must be constant. At most 64 nodes are followed.
        """
        pending: list[tuple[Proto, Array | None]] = [(normal, np.array([0.0, 1.0]))]  # mean, one deviation up
        for _ in range(_MOST_PLACES):
            if not pending:
                return
            source, span = pending.pop()
            for node in self._readers.get(source.name, ()):
                if node.op in _SAME:
                    pending.append((node, span))
                elif node.op in _MOVES and self._varies(node, source):
                    if span is not None and span[0] == span[1]:  # a deviation of 0
                        yield _Kind.OFF, None
                    elif span is not None and (node.op in _ADDS or span[0] != 0):
                        yield _Kind.NOISE, None
                elif node.op in _MOVES and (moved := self._moved(node, source, span)) is not None:
                    pending.append((node, moved))

    def _others(self, node: Proto, source: Proto) -> list[str]:
        return [text for text in input_names(node) if node_of(text) != source.name]

    def _varies(self, node: Proto, source: Proto) -> bool:
        """True if a node's inputs besides `source` may depend on the request, or are random themselves."""
        others = self._others(node, source)
        is_alone = node.op != "Neg" and not others
        varying = (text for text in others if self._body.repeated_value(text) is None)
        return is_alone or any(self._body.is_of_request(t) or node_of(t) in self._random for t in varying)

    def _moved(self, node: Proto, source: Proto, span: Array | None) -> Array | None:
        """Return the span of numbers from `source` after `node` adds a constant to them or multiplies by it.

        A span is two numbers, here the limits, or the mean and one deviation above it; None, in and out, if
        unknown.
        """
        numbers = {text: _only(self._body.repeated_value(text)) for text in self._others(node, source)}
        if span is None or None in numbers.values():
            return None
        values = [np.asarray(numbers.get(text, span)) for text in input_names(node)]
        try:
            moved = compute(node, values, 0, _MOST_BYTES)
        except MISFITS:  # TensorFlow would refuse such a graph
            return None
        return moved if np.isfinite(moved).all() else None

    def _compared(self, node: Proto, source: Proto, span: Array | None) -> tuple[_Kind, float | None]:
        kept = None if self._varies(node, source) else self._kept_where(node)
        if kept is None:
            return _Kind.OTHER, None
        bound = self._body.repeated_value(self._others(node, source)[0])
        parts = _parts(node, source, span, bound)
        return _verdict(parts if kept or parts is None else 1 - parts)

    def _kept_where(self, comparison: Proto) -> bool | None:
        """Return the outcome of a comparison, True or False, for which its mask keeps an input.

        None without a mask. True also if the mask's use is not found within 64 nodes.
        """
        pending = [(comparison, True)]
        for _ in range(_MOST_PLACES):
            if not pending:
                return None
            source, is_same = pending.pop()
            for node in self._readers.get(source.name, ()):
                if node.op in _SAME_MASK:
                    pending.append((node, is_same != (node.op == "LogicalNot")))
                elif node.op in _SELECTS:
                    sides = map(self._body.repeated_value, input_names(node)[1:])
                    is_constant = [side is not None for side in sides]
                    if any(is_constant):  # else it chooses between two tensors, as a branch would
                        return is_same != is_constant[0]
                elif node.op not in _DECIDES and not (node.op == "Cast" and _is_integer(node)):
                    return is_same
        return True


def _is_integer(node: Proto) -> bool:
    dtype = attr_dtype(node, "DstT")
    return dtype is not None and dtype.is_integer


def _only(value: Array | None) -> float | None:
    """Return the number that all elements of `value` equal; None if they differ, or there are none."""
    if value is None or not value.size or (value != value.ravel()[0]).any():
        return None
    return float(value.ravel()[0])


def _verdict(parts: Array | None) -> tuple[_Kind, float | None]:
    """Return (kind of a mask that drops these `parts`, the dropped fraction if it is one number, else None).

    `parts` has the dropped fraction, 0 to 1, for each element; None if it is unknown, which counts as
    DROPOUT. For the kinds ALL and OFF the second item is None.
    """
    if parts is None or ((parts > 0) & (parts < 1)).any():
        return _Kind.DROPOUT, _only(parts)
    return _Kind.ALL if parts.all() else _Kind.OFF, None


def _parts(node: Proto, source: Proto, span: Array | None, bound: Array | None) -> Array | None:
    """Return the probability, per element of `bound`, that comparing a number of the span with it is False.

    `node` compares; the number is its input from `source`. None if the span or the bound is unknown, or the
    span is one number.
    """
    if span is None or bound is None or span[0] == span[1]:
        return None
    low, high = span.min(), span.max()
    below = np.clip((bound.astype(np.float64) - low) / (high - low), 0, 1)
    is_left = node_of(input_names(node)[0]) == source.name
    return np.asarray(below if node.op.startswith("Greater") == is_left else 1 - below)


def _dropped_by_floor(span: Array | None) -> Array | None:
    """Return the probability, a scalar array, that a number in the span is rounded down to the least integer.

    A span is the limits of uniform numbers. None if it is unknown, or one number.
    """
    if span is None or span[0] == span[1]:
        return None
    low, high = span.min(), span.max()
    step = math.floor(low) + 1
    return np.array(min(1.0, (step - low) / (high - low)) if high > step else 0.0)
