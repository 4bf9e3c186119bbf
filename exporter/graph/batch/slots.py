"""The numbers of a graph that may be its training's batch size, made to follow the size of each request.

A slot is an element of a constant of integers, the length of a constant of equal rows, or a length that an
attribute declares, where it is the batch size or a multiple of it. `opened` puts the rows of the request, as
often as the number had the batch in it, in place of each slot. Constants in TF1 loops get them by an Enter of
each loop around them; those in functions by an argument more of each function on the way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from exporter.graph.functions import callers
from exporter.graph.nodes import (
    CALLS,
    ENTERS,
    EXITS,
    LOOPS,
    Endpoint,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    base_dtype,
    called,
    const_value,
    constant,
    control_inputs,
    endpoint,
    free_name,
    new_node,
    put_nodes,
    readers_of,
    shape_of,
)
from exporter.graph.servable import called_functions
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MOST_NUMBERS = 64  # in a constant that is a shape, or lengths to split
_INTEGERS = (DType.INT32, DType.INT64)
DECLARED = ("element_shape", "element_shape_except0", "shape")
_KEEP_SHAPES = frozenset(
    {"VarHandleOp", "VariableV2", "Placeholder", "PlaceholderWithDefault", "PlaceholderV2"}
)
# The fields of a TensorProto that hold numbers.
_NUMBERS = (
    *("float_val", "double_val", "half_val", "float8_val", "scomplex_val", "dcomplex_val", "bool_val"),
    *("int_val", "int64_val", "uint32_val", "uint64_val"),
)


class Slot(NamedTuple):
    """A number in the graph: `each` times the batch size."""

    scope: str  # the function that the node is in, "" for the graph
    node: str
    what: str  # "value": an element of a constant; "length": one of its lengths; else an attribute
    at: int
    each: int


def slots_of(node: Proto, batch: int, scope: str = "") -> Iterator[Slot]:
    """Yield the slots of a node: its numbers that may be the batch size or a multiple of it.

    With a batch size of 1 only numbers equal to 1 are slots. `scope` is the function that the node is in, ""
    for the graph. GraphError, during the iteration, for an unknown type number.
    """
    if node.op == "Const":
        yield from _slots_of_constant(node, batch, scope)
        return
    for name in DECLARED if node.op not in _KEEP_SHAPES else ():
        for at, size in enumerate(attr_shape(node, name) or ()):
            if each := _multiple(size, batch):
                yield Slot(scope, node.name, name, at, each)


def _multiple(number: int, batch: int) -> int:
    """Return `number` divided by the batch size; 0 if the number cannot come from the batch size.

    It can if it is a positive multiple; with a batch size of 1 only if it is 1.
    """
    is_one = number == batch if batch == 1 else number > 0 and number % batch == 0
    return number // batch if is_one else 0


def _slots_of_constant(node: Proto, batch: int, scope: str) -> Iterator[Slot]:
    """Yield the slots of a Const: integers, then lengths of equal rows, that may come from the batch size.

    GraphError, during the iteration, for an unknown type number.
    """
    tensor = attr(node, "value").tensor
    shape = shape_of(tensor.tensor_shape) or ()
    if min(shape, default=0) < 0:
        return
    if base_dtype(tensor.dtype) in _INTEGERS and len(shape) < 2 and math.prod(shape) <= _MOST_NUMBERS:
        value = const_value(node)
        for at, number in enumerate([] if value is None else value.ravel().tolist()):
            if each := _multiple(number, batch):
                yield Slot(scope, node.name, "value", at, each)
    for at, size in enumerate(shape):
        if (each := _multiple(size, batch)) and rows_are_equal(node, at):
            yield Slot(scope, node.name, "length", at, each)


def rows_are_equal(node: Proto, axis: int) -> bool:
    """True if a constant's values are all equal along the dimension `axis`.

    True, too, for a constant that is stored as one value for all elements, of any size. False if any other
    constant has no values, damaged ones, or more than 8 MiB of them. GraphError for an unknown type number.
    """
    shape = shape_of(node.attr["value"].tensor.tensor_shape) or ()
    if _is_one_value(node):
        return True
    array = const_value(node)
    if array is None or array.shape != shape or not array.size:
        return False
    first = np.take(array, [0], axis)
    return bool((array == first).all())


def _equal_row(node: Proto, axes: Collection[int]) -> np.ndarray | None:
    """Return a constant's value with length 1 along `axes`; None if it differs along one, or is damaged.

    GraphError for an unknown type number.
    """
    if not all(rows_are_equal(node, axis) for axis in axes):
        return None
    if _is_one_value(node):  # it is not filled up to the length that it has, which may be huge
        node = deepcopy(node)
        for axis in axes:
            node.attr["value"].tensor.tensor_shape.dim[axis].size = 1
    row = const_value(node)
    if row is None:
        return None
    for axis in axes:
        row = np.take(row, [0], axis)
    return row


def _is_one_value(node: Proto) -> bool:
    """True if a constant is stored as one number that fills its shape, or as no number (zeros).

    GraphError for an unknown type number.
    """
    tensor = node.attr["value"].tensor
    if tensor.tensor_content or base_dtype(tensor.dtype).itemsize is None:
        return False
    return all(len(getattr(tensor, name)) <= 1 for name in _NUMBERS)


class CannotOpen(Exception):
    """Raised with a node's name if its number cannot be made to follow the request."""


class Counter(NamedTuple):
    """A tensor with the number of a request's rows: its first dimension or, if `is_shape`, first element."""

    tensor: Endpoint
    is_shape: bool = False


class Opened(Struct, frozen=True):
    """The nodes of a graph and its functions, in which slots follow the request."""

    nodes: dict[str, Proto]
    library: dict[str, Proto]


def opened(
    nodes: Mapping[str, Proto],
    library: Mapping[str, Proto],
    slots: Iterable[Slot],
    counters: Sequence[tuple[Collection[str], Sequence[Counter]]],
) -> Opened:
    """Return the nodes and functions of a graph, changed so that `slots` follow the rows of a request.

    Changed nodes are copies. `counters` has, for each signature, the nodes that it reaches and the tensors
    that count its requests' rows. Functions with slots, and functions that call them, are added under new
    names, with the number of rows as their last argument; the bodies of loops return this number, too.
    CannotOpen for a slot that cannot follow the rows.
    """
    by_scope: dict[str, list[Slot]] = {}
    for slot in sorted(slots):
        by_scope.setdefault(slot.scope, []).append(slot)
    made, names = dict(library), dict[str, str]()
    for name in sorted(_needing(nodes, library, by_scope.keys() - {""})):
        names[name] = free_name({*made, *names.values()}, f"{name}_any_rows")
    loops = {attr(node, "body").func.name for node in _all_nodes(nodes, library) if node.op in LOOPS}
    for name, new in names.items():
        function = made[new] = deepcopy(library[name])
        function.signature.name = new
        function.signature.input_arg.add(name=_ROWS, type=int(DType.INT32))
        scope = _FunctionScope({node.name: node for node in function.node_def})
        scope.follow(by_scope.get(name, ()))
        _pass_rows(scope, names)
        put_nodes(function.node_def, scope.nodes.values())
        if name in loops:  # its next turn needs them, too
            function.signature.output_arg.add(name=f"{_ROWS}_again", type=int(DType.INT32))
            function.ret[f"{_ROWS}_again"] = _ROWS
    graph = _GraphScope(dict(nodes), counters)
    graph.follow(by_scope.get("", ()))
    _pass_rows(graph, names)
    return Opened(graph.nodes, made)


_ROWS = "rows_of_the_request"


def _all_nodes(nodes: Mapping[str, Proto], library: Mapping[str, Proto]) -> Iterator[Proto]:
    yield from nodes.values()
    for function in library.values():
        yield from function.node_def


def _needing(nodes: Mapping[str, Proto], library: Mapping[str, Proto], found: Iterable[str]) -> set[str]:
    """Return the functions `found`, their callers, and all functions that one call names beside one of these.

    Callers count directly and through others. A loop, for instance, names a condition beside its body.
    """
    together = [called_functions(node) & library.keys() for node in _all_nodes(nodes, library)]
    needing, before = callers(library, found), set[str]()
    while needing != before:
        before = needing
        beside = {name for names in together if names & needing for name in names}
        needing = callers(library, needing | beside)
    return needing


def _pass_rows(scope: _Scope, names: Mapping[str, str]) -> None:
    """Let calls in a scope, in place, call the new forms of functions, and pass them the number of rows.

    `names` is {function: its new form}; other calls stay. CannotOpen for a call that cannot pass the number.
    """
    for name, old in [*scope.nodes.items()]:
        if not names.keys() & called_functions(old):
            continue
        node = scope.nodes[name] = deepcopy(old)
        if node.op in names:
            node.op = names[node.op]
        elif node.op not in CALLS:
            raise CannotOpen(name)
        else:
            for function in called(node):
                function.name = names[function.name]
            node.attr["T" if node.op in LOOPS else "Tin"].list.type.append(int(DType.INT32))
            for key in ("output_shapes", "_output_shapes"):
                node.attr.pop(key, None)
        data = [text for text in node.input if not text.startswith("^")]
        after = [text for text in node.input if text.startswith("^")]
        node.input[:] = [*data, scope.count(name, 1, DType.INT32), *after]


class _Scope:
    """The nodes of a graph or of a function's body, in which constants are replaced."""

    def __init__(self, nodes: dict[str, Proto]) -> None:
        self.nodes = nodes

    def count(self, name: str, each: int, dtype: DType) -> str:
        """Return the name of a scalar of `dtype`: `each` times the number of the request's rows.

        The node `name` will read the scalar. The nodes that compute it are added. CannotOpen if no tensor
        counts the rows for the node `name`.
        """
        raise NotImplementedError

    def add(self, node: Proto, output: str = "output", after: Sequence[str] = ()) -> str:
        """Add a node under a free name, waiting for the nodes `after`; return the name of its output.

        `node` is renamed in place. `output` is the output's name in the OpDef.
        """
        raise NotImplementedError

    def follow(self, slots: Iterable[Slot]) -> None:
        """Replace, in place, the numbers in these slots by counts of the request's rows.

        CannotOpen for a slot that cannot follow.
        """
        grouped: dict[str, list[Slot]] = {}
        for slot in slots:
            grouped.setdefault(slot.node, []).append(slot)
        for name, found in grouped.items():
            if self.nodes[name].op != "Const":
                self.nodes[name] = deepcopy(self.nodes[name])
                for slot in found:
                    self.nodes[name].attr[slot.what].shape.dim[slot.at].size = -1
            elif values := {slot.at: slot.each for slot in found if slot.what == "value"}:
                self._follow(name, values)
            else:
                self._widen(name, {slot.at: slot.each for slot in found})

    def _follow(self, name: str, opened: Mapping[int, int]) -> None:
        """Replace elements of the constant `name` by counts of the request's rows.

        `opened` is {position of an element: its factor, by which the rows are multiplied}. CannotOpen if the
        constant's value is unknown.
        """
        old = self.nodes[name]
        value, dtype = const_value(old), attr_dtype(old, "dtype")
        if value is None or dtype is None:
            raise CannotOpen(name)
        numbers = [(number, opened.get(at, 0)) for at, number in enumerate(value.ravel().tolist())]
        after = control_inputs(old)
        if value.ndim:
            self.nodes[name] = self._packed(name, numbers, dtype, after, name)
        else:
            count = self.count(name, numbers[0][1], dtype)
            self.nodes[name] = new_node(name, "Identity", [count], after=after, T=dtype)

    def _widen(self, name: str, opened: Mapping[int, int]) -> None:
        """Replace a constant of equal rows by one row, broadcast to the rows of the request.

        `opened` is {dimension: its factor, by which the rows are multiplied}. CannotOpen if the constant's
        value is unknown.
        """
        old = self.nodes[name]
        dtype, row = attr_dtype(old, "dtype"), _equal_row(old, opened)
        if dtype is None or row is None:
            raise CannotOpen(name)
        shape, after = shape_of(old.attr["value"].tensor.tensor_shape) or (), control_inputs(old)
        numbers = [(size, opened.get(at, 0)) for at, size in enumerate(shape)]
        inputs = [
            self.add(constant(f"{name}/row", row, dtype), after=after),
            self.add(self._packed(f"{name}/any_rows", numbers, DType.INT32, after, name)),
        ]
        self.nodes[name] = new_node(name, "BroadcastTo", inputs, after=after, T=dtype, Tidx=DType.INT32)

    def _packed(
        self, wish: str, numbers: Sequence[tuple[int, int]], dtype: DType, after: Sequence[str], name: str
    ) -> Proto:
        parts = [
            self.count(name, each, dtype)
            if each
            else self.add(constant(f"{wish}/size", np.array(number, dtype.numpy), dtype), after=after)
            for number, each in numbers
        ]
        return new_node(wish, "Pack", parts, after=after, T=dtype, N=len(parts))

    def _times(self, rows: str, each: int, dtype: DType) -> str:
        if each == 1:
            return rows
        factor = self.add(constant(f"{_ROWS}/factor", np.array(each, dtype.numpy), dtype))
        return self.add(new_node(f"{_ROWS}/times", "Mul", [rows, factor], T=dtype), "z")


class _FunctionScope(_Scope):
    def count(self, name: str, each: int, dtype: DType) -> str:
        rows = _ROWS
        if dtype is not DType.INT32:
            cast = new_node(f"{_ROWS}/cast", "Cast", [rows], SrcT=DType.INT32, DstT=dtype)
            rows = self.add(cast, "y")
        return self._times(rows, each, dtype)

    def add(self, node: Proto, output: str = "output", after: Sequence[str] = ()) -> str:
        node.name = free_name(self.nodes, node.name)
        node.input.extend(f"^{other}" for other in after)
        self.nodes[node.name] = node
        return f"{node.name}:{output}:0"


class _GraphScope(_Scope):
    def __init__(
        self, nodes: dict[str, Proto], counters: Sequence[tuple[Collection[str], Sequence[Counter]]]
    ) -> None:
        super().__init__(nodes)
        self._counters = counters
        self._counts: dict[tuple[Counter, int, DType, tuple[str, ...]], str] = {}
        self._frames = frames_of(nodes)

    def add(self, node: Proto, output: str = "output", after: Sequence[str] = ()) -> str:
        node.name = free_name(self.nodes, node.name)
        node.input.extend(f"^{other}" for other in after)
        self.nodes[node.name] = node
        return str(node.name)

    def count(self, name: str, each: int, dtype: DType) -> str:
        counter, frames = self._counter_for(name), self._frames.get(name, ())
        for depth in range(len(frames) + 1):
            key = counter, each, dtype, frames[:depth]
            if key in self._counts:
                continue
            if depth:
                attrs: dict[str, Any] = {"frame_name": frames[depth - 1].encode(), "is_constant": True}
                outer = self._counts[counter, each, dtype, frames[: depth - 1]]
                self._counts[key] = self.add(new_node(f"{outer}/in_loop", "Enter", [outer], T=dtype, **attrs))
            else:
                self._counts[key] = self._times(self._counted(counter, dtype), each, dtype)
        return self._counts[counter, each, dtype, frames]

    def _counted(self, counter: Counter, dtype: DType) -> str:
        tensor, base = counter.tensor, f"{counter.tensor.node}/rows"
        node = self.nodes[tensor.node]
        given = attr_dtype(node, "dtype") or attr_dtype(node, "T")
        if tensor.output or given is None:
            raise CannotOpen(tensor.node)
        shape = tensor.as_input
        if not counter.is_shape:
            shape = self.add(new_node(f"{base}/shape", "Shape", [shape], out_type=dtype, T=given))
        elif given != dtype:
            shape = self.add(new_node(f"{base}/shape", "Cast", [shape], SrcT=given, DstT=dtype))
        zero, one = (self.add(constant(f"{base}/at", np.array([at], np.int32), DType.INT32)) for at in (0, 1))
        attrs: dict[str, Any] = {"T": dtype, "Index": DType.INT32, "shrink_axis_mask": 1}
        return self.add(new_node(base, "StridedSlice", [shape, zero, one, one], **attrs))

    def _counter_for(self, name: str) -> Counter:
        """Return the first counter of rows that all signatures that run the node `name` have in common.

        CannotOpen if they have none in common, or no signature runs the node.
        """
        wanted = [counters for reached, counters in self._counters if name in reached]
        shared = [one for one in (wanted or [[]])[0] if all(one in others for others in wanted)]
        if not shared:
            raise CannotOpen(name)
        return shared[0]


_MOST_LOOPS = 16  # that lie in each other; a damaged graph may enter one without end


def frames_of(nodes: Mapping[str, Proto]) -> dict[str, tuple[str, ...]]:
    """Return {node in a TF1 loop: the names of the frames around it, outermost first}.

    Frames more than 16 deep are not followed.
    """
    readers = readers_of(nodes.values(), waiting=True)
    frames: dict[str, tuple[str, ...]] = {}

    def behind(text: str) -> tuple[str, ...]:
        source = endpoint(text).node
        found = frames.get(source, ())
        return found[:-1] if source in nodes and nodes[source].op in EXITS else found

    pending = [node for node in nodes.values() if node.op in ENTERS]
    while pending:
        node = pending.pop()
        found = max(map(behind, node.input), key=len, default=())
        if node.op in ENTERS:
            found = (*found, attr_text(node, "frame_name"))
        if len(frames.get(node.name, ())) < len(found) <= _MOST_LOOPS:
            frames[node.name] = found
            pending += readers.get(node.name, ())
    return frames
