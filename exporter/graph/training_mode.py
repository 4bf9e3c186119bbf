"""Detect that a graph computes as in training: batch statistics, dropout, other random numbers.

Only nodes that run during a request count. A graph for training and inference has both variants behind a
flag. `--feed` makes the flag a constant and leaves both branches in the served graph, so that its nodes alone
do not show which of them runs. Here the flag is followed, through the scalars that are computed from it, into
Switch and Merge and into the functions of an If.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.inference_graph import TrainingMode
from exporter.graph.nodes import MERGES, SWITCHES, attr, attr_dtype, const_value, input_names
from exporter.graph.servable import called_functions
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, all_nodes

Scalar = Any
"""A constant of one element as Python has it."""

_SAME_VALUE = SWITCHES | {
    "Identity",
    "StopGradient",
    "Snapshot",
    "EnsureShape",
    "Reshape",
    "Squeeze",
    "ExpandDims",
    "PlaceholderWithDefault",
}
_COMPUTED: dict[str, Callable[..., Scalar]] = {
    "LogicalNot": lambda a: not a,
    "LogicalAnd": lambda a, b: a and b,
    "LogicalOr": lambda a, b: a or b,
    "Add": lambda a, b: a + b,
    "AddV2": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "RealDiv": lambda a, b: a / b if b else None,
    "Maximum": max,
    "Minimum": min,
    "Equal": lambda a, b: a == b,
    "NotEqual": lambda a, b: a != b,
    "Less": lambda a, b: a < b,
    "LessEqual": lambda a, b: a <= b,
    "Greater": lambda a, b: a > b,
    "GreaterEqual": lambda a, b: a >= b,
    "Select": lambda c, a, b: a if c else b,
    "SelectV2": lambda c, a, b: a if c else b,
}
_FUSED = re.compile(r"_?FusedBatchNorm(Ex|V\d+)?")
_CONDITIONALS = frozenset({"If", "StatelessIf"})
_PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_MAX_DEPTH = 48
_MOST_STEPS = 64
_ROUNDS = 4
"""Nested conditionals whose inner flag is computed by the outer one."""


class CalledBody:
    """The graph, or a function as one call of it runs it.

    `fed` are nodes whose values come from the request, `arguments` the constants that a call passes, `roots`
    the wanted tensors. Inputs are written as in a GraphDef (`node:1`) or a FunctionDef (`node:output:0`).
    """

    def __init__(
        self,
        nodes: Mapping[str, Proto],
        roots: Iterable[str],
        library: Mapping[str, Proto],
        *,
        fed: Collection[str] = (),
        arguments: Mapping[str, Scalar] | None = None,
        depth: int = 0,
    ) -> None:
        self.nodes = nodes
        self._roots = [*roots]
        self._library = library
        self._fed = fed
        self._arguments = arguments or {}
        self._depth = depth
        self._values: dict[str, Scalar] = {}
        self._steps = 0
        self._called: dict[tuple[object, ...], CalledBody] = {}
        self._dead = self._find_dead()

    def value(self, tensor: str) -> Scalar:
        """The value of a tensor that is always the same scalar; None for any other tensor."""
        if tensor not in self._values:
            self._values[tensor] = None  # a value that a loop passes back to itself is not constant
            if self._steps < _MOST_STEPS:  # flags are computed in fewer steps
                self._steps += 1
                with suppress(TypeError, ValueError, ArithmeticError):
                    self._values[tensor] = self._evaluate(tensor)
                self._steps -= 1
        return self._values[tensor]

    @cached_property
    def live(self) -> frozenset[str]:
        """The nodes that run, and the arguments that are used, by name."""
        found, pending = set[str](), [*self._roots]
        while pending:
            name = node_of(pending.pop())
            if name in found:
                continue
            found.add(name)
            if name in self.nodes and name not in self._fed:
                pending += self._needed(self.nodes[name])
        return frozenset(found)

    def bodies(self) -> Iterator[CalledBody]:
        """The body itself, and those of all calls that run."""
        assert self.live  # calls are found on the way
        yield self
        for called in [*self._called.values()]:
            yield from called.bodies()

    def _evaluate(self, tensor: str) -> Scalar:
        name = node_of(tensor)
        node = self.nodes.get(name)
        if node is None or name in self._fed:
            return self._arguments.get(name)
        if node.op == "Const":
            return _scalar(node)
        inputs = input_names(node)
        if node.op in _SAME_VALUE:
            return self.value(inputs[0]) if inputs else None
        if node.op in MERGES:
            running = [text for text in inputs if not self._is_dead(text)]
            return self.value(running[0]) if len(running) == 1 else None
        if node.op == "Cast":
            value = self.value(inputs[0])
            return None if value is None else _cast(value, attr_dtype(node, "DstT"))
        if node.op in _COMPUTED:
            values = [self.value(text) for text in inputs]
            return None if any(value is None for value in values) else _COMPUTED[node.op](*values)
        return None

    def _find_dead(self) -> frozenset[str]:
        """Tensors that are never computed, by node, and by output for a Switch."""
        switches = [
            node for node in self.nodes.values() if node.op in SWITCHES and len(input_names(node)) == 2
        ]
        self._dead = frozenset[str]()
        for _ in range(_ROUNDS if switches else 0):
            self._values.clear()
            found = set[str]()
            for node in switches:
                taken = self.value(input_names(node)[1])
                if taken is not None:
                    found.add(f"{node.name}:{0 if taken else 1}")
            found = self._spread(found)
            if found == self._dead:
                break
            self._dead = frozenset(found)
        self._values.clear()
        return self._dead

    def _spread(self, dead: set[str]) -> set[str]:
        """Add the nodes that read a tensor that is never computed, except a Merge with a live input."""
        pending = [*dead]
        while pending:
            for reader in self._readers.get(node_of(pending.pop()), ()):
                node = self.nodes[reader]
                if reader in dead:
                    continue
                inputs = input_names(node) if node.op in MERGES else [*node.input]
                is_gone = [node_of(text) in dead or _output(self.nodes, text) in dead for text in inputs]
                if (all if node.op in MERGES else any)(is_gone):
                    dead.add(reader)
                    pending.append(reader)
        return dead

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        readers: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for text in node.input:
                readers.setdefault(node_of(text), []).append(node.name)
        return readers

    def _is_dead(self, tensor: str) -> bool:
        return bool(self._dead) and (
            node_of(tensor) in self._dead or _output(self.nodes, tensor) in self._dead
        )

    def _needed(self, node: Proto) -> list[str]:
        """The inputs that a running node waits for; for a call those that its function uses."""
        inputs = input_names(node)
        if node.op in MERGES:
            return [text for text in inputs if not self._is_dead(text)]
        if is_by_batch(node):  # moving statistics are its inputs to be moved, not to normalise by
            return inputs[:3]
        names = [name for name in called_functions(node) if name in self._library]
        if not names:
            return [text.removeprefix("^") for text in node.input]
        if node.op in _CONDITIONALS and len(names) == 2:
            taken = self.value(inputs[0])
            if taken is not None:
                chosen = node.attr["then_branch" if taken else "else_branch"].func.name
                return [inputs[0], *self._used(chosen, inputs[1:])]
        if node.op in _PLAIN_CALLS or node.op in self._library:
            return self._used(names[0], inputs)
        for name in names:
            self._call(name, {})
        return inputs

    def _used(self, name: str, inputs: list[str]) -> list[str]:
        parameters = [argument.name for argument in self._library[name].signature.input_arg]
        known = {
            parameter: value
            for parameter, text in zip(parameters, inputs, strict=False)
            if (value := self.value(text)) is not None
        }
        called = self._call(name, known)
        return [
            text
            for parameter, text in zip(parameters, inputs, strict=False)
            if called is None or parameter in called.live
        ]

    def _call(self, name: str, arguments: Mapping[str, Scalar]) -> CalledBody | None:
        if self._depth >= _MAX_DEPTH:
            return None
        key = (name, *sorted(arguments.items()))
        if key not in self._called:
            function = self._library[name]
            nodes = {node.name: node for node in function.node_def}
            self._called[key] = CalledBody(
                nodes, function.ret.values(), self._library, arguments=arguments, depth=self._depth + 1
            )
        return self._called[key]


def is_by_batch(node: Proto) -> bool:
    """True for a FusedBatchNorm that normalises by the batch, which is the default of `is_training`."""
    if _FUSED.fullmatch(node.op) is None:
        return False
    return "is_training" not in node.attr or bool(node.attr["is_training"].b)


def node_of(tensor: str) -> str:
    """The node (or argument) that an input names, in a graph or in a function."""
    return tensor.removeprefix("^").partition(":")[0]


def _output(nodes: Mapping[str, Proto], tensor: str) -> str:
    """`switch:0` or `switch:1` for an output of a Switch, "" for any other tensor."""
    name, _, output = tensor.partition(":")
    node = nodes.get(name)
    if node is None or node.op not in SWITCHES:
        return ""
    return f"{name}:{1 if output in ('1', 'output_true:0') else 0}"


def _scalar(node: Proto) -> Scalar:
    shape = attr(node, "value").tensor.tensor_shape
    found = const_value(node) if all(dim.size == 1 for dim in shape.dim) else None
    if found is None:
        return None
    element = found.ravel()[0]
    return element.item() if isinstance(element, np.generic) else element


def _cast(value: Scalar, dtype: DType | None) -> Scalar:
    if dtype is DType.BOOL:
        return bool(value)
    return int(value) if dtype is not None and dtype.is_integer else float(value)


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
    """The signs of training in the nodes that run for `roots`, if requests give the nodes `fed`."""
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
    """True if the batch is arranged as channels of one example, as layer and instance normalisation do."""
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
    """The use of each random number that is drawn; numbers that cannot affect an output are left out."""
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
    """For each mask that is made of uniform numbers the part that it drops, None if that is unknown.

    The numbers lie in [low, high), scaled and shifted by constants. They are compared with a rate, or, in old
    TensorFlow, shifted by the probability to keep and rounded down.
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
