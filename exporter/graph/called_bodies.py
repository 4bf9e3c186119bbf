"""Follow constants through a graph and the functions that it calls: which nodes run, and with which values.

`--feed` makes a flag or a rate a constant and leaves both branches, and everything that is computed from it,
in the served graph. Here such values are followed into Switch and Merge, into functions and their results,
and into loops that pass them on unchanged. Also computed is which tensors depend on the request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct, field

from exporter.graph.constant_values import MISFITS, compute, is_computed
from exporter.graph.nodes import (
    LOOPS,
    MERGES,
    NEXT_ITERATIONS,
    SWITCHES,
    attr,
    closure,
    const_value,
    input_names,
    node_of,
    readers_of,
    through_identities,
)
from exporter.graph.servable import called_functions
from exporter.wire.protos import Proto

Array = np.ndarray[Any, Any]
_FUSED = re.compile(r"_?FusedBatchNorm(Ex|V\d+)?")
_CONDITIONALS = frozenset({"If", "StatelessIf"})
PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_PASSED_ON = SWITCHES | NEXT_ITERATIONS | {"Identity"}
# Operations that repeat or arrange the values of one of their inputs, and which one that is.
_REPEATED = {"Fill": 1} | dict.fromkeys(
    ["BroadcastTo", "Tile", "Reshape", "ExpandDims", "Squeeze", "Identity"], 0
)
_OF_SHAPE = {"ZerosLike": 0, "OnesLike": 1}
_MOST_BYTES = 1 << 15  # of a value that is followed: rates and flags are small, weights are not
_MAX_DEPTH = 48  # of calls: each takes several frames of Python's stack
_MOST_CALLS = 256  # different calls of one function; arguments of further ones are not followed
_MAX_STEPS = 8  # from the end of a loop's turn back to its Merge
_MOST_STEPS = 64  # nested computations of values, each in frames of Python's stack
_ROUNDS = 4  # of nested conditionals whose inner flag the outer one computes


class _Shared(Struct):
    """State that all bodies of one graph share: the bodies by function and call, and the depth of `value`."""

    # Shared by all callers: with two different constants at each of n calls, 2**n bodies would be made.
    made: dict[str, dict[tuple[object, ...], CalledBody]] = field(default_factory=dict)
    steps: int = 0


class CalledBody:
    """The graph, or a function as run by one call of it in the body `caller`.

    `fed` are nodes whose values come from the request, `asked` the arguments of a call that depend on those;
    `arguments` are the constants that it passes, `roots` the wanted tensors. With `is_chosen`, the request
    decides whether it runs. Inputs are written as in a GraphDef (`node:1`) or a FunctionDef
    (`node:output:0`).
    """

    def __init__(
        self,
        nodes: Mapping[str, Proto],
        roots: Iterable[str],
        library: Mapping[str, Proto],
        *,
        fed: Collection[str] = (),
        arguments: Mapping[str, Array] | None = None,
        asked: Collection[str] = (),
        is_chosen: bool = False,
        caller: CalledBody | None = None,
    ) -> None:
        self.nodes = nodes
        self._roots = [*roots]
        self._library = library
        self._fed = fed
        self._arguments = arguments or {}
        self._asked = asked
        self._is_chosen = is_chosen
        self._depth: int = 0 if caller is None else caller._depth + 1
        self._shared: _Shared = _Shared() if caller is None else caller._shared
        self._values: dict[str, Array | None] = {}
        self._called: dict[CalledBody, None] = {}
        self._dead = self._find_dead()

    def value(self, tensor: str) -> Array | None:
        """Return the value of a tensor if it is the same for every request and has at most 32 KiB; else None.

        None also for values that take operations which are not computed here, or too many of them (64
        nested). The answer is memoised. GraphError for an unknown type number.
        """
        if tensor not in self._values:
            self._values[tensor] = None  # a value that a loop passes back to itself is not constant
            if self._shared.steps < _MOST_STEPS:  # flags are computed in fewer steps, through all calls
                self._shared.steps += 1
                with suppress(KeyError, *MISFITS):
                    self._values[tensor] = self._evaluate(tensor)
                self._shared.steps -= 1
        return self._values[tensor]

    def number(self, tensor: str) -> Any:
        """Return a tensor's constant value as a Python scalar, if the value has one element; else None.

        If the tensor's own value is not known but the tensor repeats a constant of one element
        (`repeated_value`), that element is returned. None for a known value of several elements, even if they
        are equal. GraphError for an unknown type number.
        """
        value = self.repeated_value(tensor)
        return None if value is None or value.size != 1 else value.item()

    def repeated_value(self, tensor: str) -> Array | None:
        """Return the constant value of a tensor, or else of the constant that it repeats or rearranges.

        The value has the shape of that constant. For zeros or ones in the shape of another tensor this is an
        array of 0 or 1 without a dimension. None if the value may vary, is above 32 KiB, or is more than 64
        operations away. GraphError for an unknown type number.
        """
        for _ in range(_MOST_STEPS):
            if (value := self.value(tensor)) is not None:
                return value
            node = self.nodes.get(node_of(tensor))
            if node is None or node.name in self._fed:
                break
            if node.op in _OF_SHAPE:
                return np.array(_OF_SHAPE[node.op])
            source = input_names(node)[_REPEATED.get(node.op, 0) :]
            if node.op not in _REPEATED or not source:
                break
            tensor = source[0]
        return None

    def is_of_request(self, tensor: str) -> bool:
        """True if the values of a tensor's node, not only their shapes, may depend on the request."""
        return node_of(tensor) in self._of_request

    def chosen(self, name: str) -> bool:
        """True if the request decides whether the node `name` runs.

        That is if the node, or the whole body, is in a branch that the request chooses.
        """
        return self._is_chosen or name in self._chosen

    @cached_property
    def live(self) -> frozenset[str]:
        """Return the names of the nodes that run for the roots, and of the arguments that they use; memoised.

        Computing it records the calls that run, which `bodies` returns. GraphError for an unknown type
        number.
        """
        found, pending = set[str](), [*self._roots]
        while pending:
            name = node_of(pending.pop())
            if name in found:
                continue
            found.add(name)
            if name in self.nodes and name not in self._fed:
                pending += self._needed(self.nodes[name])
        return frozenset(found)

    def bodies(self) -> Iterable[CalledBody]:
        """Return this body, then the bodies of all calls that run, directly or through others, each once."""
        return closure([self], lambda body: body._called if body.live else ())

    def computed_from(self, names: Iterable[str]) -> Collection[str]:
        """Return the nodes `names` and all nodes that read or wait for them, directly or through others.

        The nearest come first. Operations that read only a tensor's shape do not count.
        """
        return closure(names, lambda n: (r.name for r in self._readers.get(n, ()) if r.op not in SHAPES))

    @cached_property
    def _of_request(self) -> Collection[str]:
        return self.computed_from([*self._fed, *self._asked])

    @cached_property
    def _chosen(self) -> Collection[str]:
        """The nodes in branches that the request chooses, and the outputs of the Switch nodes before them.

        An output is written `switch:1`. A loop's condition is not such a choice. Memoised.
        """
        found = set[str]()
        for predicate, switches in self._switches.items():
            node = self.nodes.get(node_of(predicate))
            if node is None or node.op == "LoopCond":
                continue
            if self.number(predicate) is None and self.is_of_request(predicate):
                for side in (0, 1):
                    found |= self._spread({f"{switch}:{side}" for switch in switches})
        return found

    def _evaluate(self, tensor: str) -> Array | None:
        name = node_of(tensor)
        node = self.nodes.get(name)
        if node is None or name in self._fed:
            return self._arguments.get(name)
        if node.op == "Const":
            return _small_constant(node)
        inputs = input_names(node)
        if node.op in SWITCHES:
            return self.value(inputs[0])
        if node.op in MERGES:
            alive = [text for text in inputs if not self._is_among(text, self._dead)]
            running = [text for text in alive if not self._returns(text, name)]
            return self.value(running[0]) if len(running) == 1 else None
        if is_computed(node.op):
            values = [self.value(text) for text in inputs]
            known = [value for value in values if value is not None]
            return compute(node, known, _position(tensor), _MOST_BYTES) if len(known) == len(values) else None
        return self._result(node, tensor)

    def _result(self, node: Proto, tensor: str) -> Array | None:
        """Return the value of a tensor that a call of a function gives; None if it may vary or is not known.

        None also if `node` is not such a call, or the request decides which function it runs. IndexError if
        the function has no such result.
        """
        called = self._one_function(node)
        if called is None:
            return None
        name, inputs = called
        function, body = self._library[name], self._body(name, self._passed(name, inputs))
        results = [result.name for result in function.signature.output_arg]
        return None if body is None else body.value(function.ret.get(results[_position(tensor)], ""))

    def _returns(self, tensor: str, merge: str) -> bool:
        """True if `tensor` is the output of the Merge node `merge`, passed on unchanged by at most 7 nodes.

        These are Switch, NextIteration and Identity nodes.
        """
        for _ in range(_MAX_STEPS):
            node = self.nodes.get(node_of(tensor))
            if node is None or node.op not in _PASSED_ON:
                return node is not None and node.name == merge
            tensor = input_names(node)[0]
        return False

    @cached_property
    def _switches(self) -> dict[str, list[str]]:
        """Return {predicate's tensor: the names of the Switch nodes that it decides}; memoised."""
        found: dict[str, list[str]] = {}
        for node in self.nodes.values():
            if node.op in SWITCHES and len(inputs := input_names(node)) == 2:
                found.setdefault(inputs[1], []).append(node.name)
        return found

    def _find_dead(self) -> frozenset[str]:
        """Set and return the names of the nodes, and the outputs of Switch nodes, that are never computed.

        An output is written `switch:1`. Memoised values are cleared.
        """
        self._dead = frozenset[str]()
        for _ in range(_ROUNDS if self._switches else 0):  # a branch that is off may settle another flag
            self._values.clear()
            found = set[str]()
            for predicate, switches in self._switches.items():
                if (taken := self.number(predicate)) is not None:
                    found |= {f"{name}:{0 if taken else 1}" for name in switches}
            found = self._spread(found)
            if found == self._dead:
                break
            self._dead = frozenset(found)
        self._values.clear()
        return self._dead

    def _spread(self, dead: set[str]) -> set[str]:
        """Add to `dead`, in place, all nodes that read or wait for one of its nodes, and return `dead`.

        A node may read or wait for it through others. A Merge is added only if all its inputs are dead.
        """
        pending = [*dead]
        while pending:
            for node in self._readers.get(node_of(pending.pop()), ()):
                if node.name in dead:
                    continue
                inputs = input_names(node) if node.op in MERGES else [*node.input]
                if (all if node.op in MERGES else any)(self._is_among(text, dead) for text in inputs):
                    dead.add(node.name)
                    pending.append(node.name)
        return dead

    @cached_property
    def _readers(self) -> dict[str, list[Proto]]:
        return readers_of(self.nodes.values(), waiting=True)

    def _is_among(self, tensor: str, dead: Collection[str]) -> bool:
        """True if `dead` has a tensor's node or, of a Switch, the output (`switch:0` or `switch:1`)."""
        return bool(dead) and (node_of(tensor) in dead or _output(self.nodes, tensor) in dead)

    def _needed(self, node: Proto) -> list[str]:
        """Return the inputs that a running node needs; of a call, the inputs that its function uses.

        Control inputs, without `^`, are among them unless the node is a call, a Merge or a batch
        normalisation. Of a call that may run one of several functions all inputs count. Calls are recorded,
        for `bodies`.
        """
        inputs = input_names(node)
        if node.op in MERGES:
            return [text for text in inputs if not self._is_among(text, self._dead)]
        if is_by_batch(node):  # moving statistics are its inputs to be moved, not to normalise by
            return inputs[:3]
        names = [name for name in called_functions(node) if name in self._library]
        if not names:
            return [text.removeprefix("^") for text in node.input]
        if (called := self._one_function(node)) is not None:
            name, arguments = called
            body, parameters = self._run(name, arguments), self._library[name].signature.input_arg
            given = zip(parameters, arguments, strict=False)
            used = [text for parameter, text in given if body is None or parameter.name in body.live]
            return [*inputs[: len(inputs) - len(arguments)], *used]
        is_chosen = node.op in _CONDITIONALS and any(map(self.is_of_request, inputs[:1]))
        is_asked = any(map(self.is_of_request, inputs))
        for name in names:
            self._run(name, self._constant_inputs(node, inputs), is_asked=is_asked, is_chosen=is_chosen)
        return inputs

    def _one_function(self, node: Proto) -> tuple[str, list[str]] | None:
        """Return (name, argument tensors) of the function that a call certainly runs, exactly once.

        None for any other node: no call, a loop, or a conditional whose branch the request chooses.
        """
        inputs = input_names(node)
        if node.op in _CONDITIONALS and inputs and (taken := self.number(inputs[0])) is not None:
            name, inputs = attr(node, "then_branch" if taken else "else_branch").func.name, inputs[1:]
        elif node.op in PLAIN_CALLS:
            name = attr(node, "f").func.name
        else:
            name = node.op
        return (name, inputs) if name in self._library else None

    def _constant_inputs(self, node: Proto, inputs: list[str]) -> list[str]:
        """Return the tensor that each argument of a node's functions gets in every call, in order.

        It is "" for an argument that may differ between calls, as most arguments of a loop do.
        """
        if node.op in _CONDITIONALS:
            return inputs[1:]
        body = self._library.get(attr(node, "body").func.name) if node.op in LOOPS else None
        if body is None:
            return [""] * len(inputs)
        nodes = {each.name: each for each in body.node_def}
        names = zip(body.signature.input_arg, body.signature.output_arg, strict=False)
        same = [through_identities(nodes, body.ret.get(r.name, "")) == argument.name for argument, r in names]
        return [text if is_same else "" for text, is_same in zip(inputs, same, strict=False)]

    def _run(
        self, name: str, inputs: list[str], *, is_asked: bool = False, is_chosen: bool = False
    ) -> CalledBody | None:
        """Return the body of the function `name` as called with `inputs`, and record the call.

        `inputs` has the tensor of each argument, "" if it may differ between calls; `is_asked` says whether
        arguments that may differ depend on the request, `is_chosen` whether the request decides that the call
        runs. None if calls are nested more than 48 deep.
        """
        body = self._body(name, self._passed(name, inputs, is_asked=is_asked), is_chosen=is_chosen)
        if body is not None:
            self._called[body] = None
        return body

    def _passed(self, name: str, inputs: list[str], *, is_asked: bool = False) -> dict[str, Array | bool]:
        """Return {argument: its constant value, or else whether it depends on the request} of a call.

        `inputs` has the tensor of each argument, "" if it may differ between calls; for these the answer is
        `is_asked`.
        """
        parameters = (argument.name for argument in self._library[name].signature.input_arg)
        passed: dict[str, Array | bool] = {}
        for parameter, text in zip(parameters, inputs, strict=False):
            value = self.value(text) if text else None
            passed[parameter] = value if value is not None else self.is_of_request(text) if text else is_asked
        return passed

    def _body(
        self, name: str, passed: Mapping[str, Array | bool], *, is_chosen: bool = False
    ) -> CalledBody | None:
        if self._depth >= _MAX_DEPTH:
            return None
        # Equal calls share a body. The depth is part of the key, so that a recursion ends at `_MAX_DEPTH`.
        made = self._shared.made.setdefault(name, {})
        if len(made) >= _MOST_CALLS:
            passed = dict.fromkeys(passed, True)
        is_chosen = is_chosen or self._is_chosen
        known = {parameter: value for parameter, value in passed.items() if isinstance(value, np.ndarray)}
        asked = [parameter for parameter, value in passed.items() if value is True]
        told = ((key, str(value.dtype), value.shape, value.tobytes()) for key, value in known.items())
        key = (self._depth, is_chosen, *told, *asked)
        if key not in made:
            function = self._library[name]
            made[key] = CalledBody(
                {node.name: node for node in function.node_def},
                function.ret.values(),
                self._library,
                arguments=known,
                asked=asked,
                is_chosen=is_chosen,
                caller=self,
            )
        return made[key]


def is_by_batch(node: Proto) -> bool:
    """True for a FusedBatchNorm that normalises by the batch: its `is_training` is true or absent."""
    if _FUSED.fullmatch(node.op) is None:
        return False
    return "is_training" not in node.attr or bool(node.attr["is_training"].b)


def _position(tensor: str) -> int:
    """Return the number at the end of a tensor's name: of its output or, in a function, in a named output.

    0 if there is none.
    """
    last = tensor.rpartition(":")[2]
    return int(last) if ":" in tensor and last.isdecimal() else 0


def _output(nodes: Mapping[str, Proto], tensor: str) -> str:
    """Return `switch:0` or `switch:1` for a tensor that is an output of a Switch, "" for any other tensor."""
    name, _, output = tensor.partition(":")
    node = nodes.get(name)
    if node is None or node.op not in SWITCHES:
        return ""
    return f"{name}:{1 if output in ('1', 'output_true:0') else 0}"


def _small_constant(node: Proto) -> Array | None:
    shape = attr(node, "value").tensor.tensor_shape
    if math.prod(dim.size for dim in shape.dim) > _MOST_BYTES:  # before it is filled
        return None
    value = const_value(node)
    return None if value is None or value.dtype == object or value.nbytes > _MOST_BYTES else value
