"""Detect that a graph computes as in training: batch statistics, dropout, other random numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from msgspec import Struct

from exporter.graph.bodies import input_names
from exporter.graph.inference_graph import TrainingMode
from exporter.graph.live import CalledBody, is_by_batch, node_of
from exporter.graph.nodes import attr_dtype, const_value
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, all_nodes

_RANDOM = re.compile(
    r"(Stateless)?(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial"
    r"|Stateful(Uniform|StandardNormal|Random))\w*"
)
_NOT_DRAWN = frozenset({"RandomShuffleQueue", "RandomShuffleQueueV2", "RandomDataset"})
_UNIFORM = re.compile(r"(Stateless|Stateful)?(RandomUniform|Uniform)(V2)?")
_SEEDS = re.compile(r"StatelessRandomGet\w+")
_COMPARES = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})
_SAME = frozenset({"Identity", "Cast", "Reshape", "StopGradient"})
_MAX_STEPS = 8


def training_mode(graph_def: Proto, roots: Collection[str], fed: Collection[str]) -> TrainingMode:
    """The signs in what runs for the nodes `roots`, given the nodes `fed` by requests."""
    library = {function.signature.name: function for function in graph_def.library.function}
    if not any(map(_is_suspicious, all_nodes(graph_def))):
        return TrainingMode()
    graph = CalledBody({node.name: node for node in graph_def.node}, roots, library, fed=fed)
    bodies = [*graph.bodies()]
    drops = {sign: None for body in bodies for sign in _drawn(body)}
    variables = {node.name for node in graph_def.node if node.op == "VarHandleOp"}
    return TrainingMode(
        batch_norms=tuple(dict.fromkeys(name for body in bodies for name in _batch_norms(body))),
        dropouts=tuple(dict.fromkeys((s.name, s.rate) for s in drops if s.drops)),
        random=tuple(dict.fromkeys(s.name for s in drops if not s.drops)),
        idle=frozenset(variables - graph.live),
    )


def _is_suspicious(node: Proto) -> bool:
    return node.op == "SquaredDifference" or _is_random(node.op) or is_by_batch(node)


@cache
def _is_random(op: str) -> bool:
    return _RANDOM.fullmatch(op) is not None and op not in _NOT_DRAWN and not _SEEDS.fullmatch(op)


def _batch_norms(body: CalledBody) -> Iterator[str]:
    for name in sorted(body.live & body.nodes.keys()):
        node = body.nodes[name]
        fused = is_by_batch(node) and not _is_one_example(body, node)
        if fused or (node.op == "SquaredDifference" and _is_batch_variance(body, node)):
            yield f"{node.op} {name!r}"


def _is_one_example(body: CalledBody, node: Proto) -> bool:
    """True if the batch was laid out as the channels of one example: normalised by layer, or by instance."""
    reshape = _node(body, input_names(node)[0])
    shape = _node(body, input_names(reshape)[1]) if reshape is not None and reshape.op == "Reshape" else None
    if shape is None or shape.op != "Pack":
        value = const_value(shape)
        return value is not None and value.size > 0 and value.ravel()[0] == 1
    return bool(body.value(input_names(shape)[0]) == 1)


def _is_batch_variance(body: CalledBody, node: Proto) -> bool:
    """True for the distance of a tensor from its own mean over the batch, as `tf.nn.moments` takes it."""
    inputs = input_names(node)
    mean = _origin(body, inputs[1]) if len(inputs) == 2 else None
    if mean is None or mean.op != "Mean" or len(input_names(mean)) != 2 or input_names(mean)[0] != inputs[0]:
        return False
    value = const_value(_node(body, input_names(mean)[1]))
    return value is not None and 0 in value.ravel().tolist()


def _node(body: CalledBody, tensor: str) -> Proto | None:
    return body.nodes.get(node_of(tensor))


def _origin(body: CalledBody, tensor: str) -> Proto | None:
    node = _node(body, tensor)
    for _ in range(_MAX_STEPS):
        if node is None or node.op not in _SAME:
            break
        node = _node(body, input_names(node)[0])
    return node


class _Drawn(Struct, frozen=True):
    name: str
    drops: bool = False
    rate: float | None = None


def _drawn(body: CalledBody) -> Iterator[_Drawn]:
    """What becomes of each random number that is drawn; nothing of one that can make no difference."""
    drawing = [name for name in sorted(body.live & body.nodes.keys()) if _is_random(body.nodes[name].op)]
    if not drawing:
        return
    readers: dict[str, list[Proto]] = {}
    for name in body.live & body.nodes.keys():
        for text in input_names(body.nodes[name]):
            readers.setdefault(node_of(text), []).append(body.nodes[name])
    for name in drawing:
        node = body.nodes[name]
        masks = [*_masks(body, readers, node)] if _UNIFORM.fullmatch(node.op) and _is_floating(node) else []
        if not masks:
            yield _Drawn(f"{node.op} {name!r}")
        for rate in masks:
            if rate is None or 0 < rate < 1:
                yield _Drawn(f"{node.op} {name!r}", True, rate)


def _is_floating(node: Proto) -> bool:
    return attr_dtype(node, "dtype") in (None, DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)


def _masks(body: CalledBody, readers: Mapping[str, list[Proto]], uniform: Proto) -> Iterator[float | None]:
    """For each mask that is made of uniform numbers the part that it drops, None if that is not known.

    The numbers lie in [low, high): scaled and moved by constants, then compared with a rate, or, as old
    TensorFlow did it, moved by the probability to keep and rounded down.
    """
    pending: list[tuple[Proto, float | None, float | None]] = [(uniform, 0.0, 1.0)]
    for _ in range(_MAX_STEPS * _MAX_STEPS):
        if not pending:
            return
        source, low, high = pending.pop()
        for node in readers.get(source.name, ()):
            others = [text for text in input_names(node) if node_of(text) != source.name]
            other = body.value(others[0]) if len(others) == 1 else None
            if node.op in _COMPARES:
                yield _part(node, source, low, high, other)
            elif node.op == "Floor":
                yield _dropped_by_floor(low, high)
            elif node.op in _SAME:
                pending.append((node, low, high))
            elif node.op in ("Mul", "Add", "AddV2") and len(others) == 1:
                pending.append((node, *_moved(node.op, low, high, other)))


def _moved(op: str, low: float | None, high: float | None, by: float | None) -> tuple[float | None, ...]:
    if low is None or high is None or by is None:
        return None, None
    return (low * by, high * by) if op == "Mul" else (low + by, high + by)


def _part(
    node: Proto, source: Proto, low: float | None, high: float | None, bound: float | None
) -> float | None:
    """How often a comparison of a number in [low, high) with `bound` is false."""
    if low is None or high is None or bound is None or high <= low:
        return None
    below = min(1.0, max(0.0, (bound - low) / (high - low)))
    is_left = node_of(input_names(node)[0]) == source.name
    return below if node.op.startswith("Greater") == is_left else 1 - below


def _dropped_by_floor(low: float | None, high: float | None) -> float | None:
    """How often a number in [low, high) rounded down is the smaller of the two that it can be."""
    if low is None or high is None or high <= low:
        return None
    return min(1.0, (math.floor(low) + 1 - low) / (high - low)) if high > math.floor(low) + 1 else 0.0
