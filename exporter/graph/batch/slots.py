"""The numbers of a graph that may be its training's batch size, made to follow the size of each request.

A slot is an element of a constant of integers, the length of a constant of equal rows, or a length that an
attribute declares, where it is the batch size or a multiple of it. `Opening` puts the rows of the request, as
often as the number had the batch in it, in place of each slot. Constants in TF1 loops get them by an Enter of
each loop around them; those in functions by an argument more of each function on the way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from exporter.graph.nodes import (
    ENTERS,
    EXITS,
    Endpoint,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    base_dtype,
    const_value,
    constant,
    control_inputs,
    endpoint,
    free_name,
    new_node,
    readers_of,
    shape_of,
)
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

    node: str
    what: str  # "value": an element of a constant; "length": one of its lengths; else an attribute
    at: int
    each: int


def slots_of(node: Proto, batch: int) -> Iterator[Slot]:
    """Yield the numbers of a node that may stand for the batch; of a batch of 1, only ones."""

    def multiple(number: int) -> int:
        is_one = number == batch if batch == 1 else number > 0 and number % batch == 0
        return number // batch if is_one else 0

    if node.op != "Const":
        for name in DECLARED if node.op not in _KEEP_SHAPES else ():
            for at, size in enumerate(attr_shape(node, name) or ()):
                if each := multiple(size):
                    yield Slot(node.name, name, at, each)
        return
    tensor = attr(node, "value").tensor
    shape = shape_of(tensor.tensor_shape) or ()
    if min(shape, default=0) < 0:
        return
    if base_dtype(tensor.dtype) in _INTEGERS and len(shape) < 2 and math.prod(shape) <= _MOST_NUMBERS:
        value = const_value(node)
        for at, number in enumerate([] if value is None else value.ravel().tolist()):
            if each := multiple(number):
                yield Slot(node.name, "value", at, each)
    for at, size in enumerate(shape):
        if (each := multiple(size)) and rows_are_equal(node, at):
            yield Slot(node.name, "length", at, each)


def rows_are_equal(node: Proto, axis: int) -> bool:
    """True if a constant's values are all equal along the dimension `axis`."""
    shape = shape_of(node.attr["value"].tensor.tensor_shape) or ()
    if _is_one_value(node):
        return True
    array = const_value(node)
    if array is None or array.shape != shape or not array.size:
        return False
    first = np.take(array, [0], axis)
    return bool((array == first).all())


def _equal_row(node: Proto, axes: Collection[int]) -> np.ndarray | None:
    """A constant's value reduced to length 1 along these dimensions; None if it differs along one."""
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
    """True if a constant is stored as one number that fills its shape, or as no number (zeros)."""
    tensor = node.attr["value"].tensor
    if tensor.tensor_content or base_dtype(tensor.dtype).itemsize is None:
        return False
    return all(len(getattr(tensor, name)) <= 1 for name in _NUMBERS)


class CannotOpen(Exception):
    """Raised with a node's name if its number cannot be made to follow the request."""


class Counter(NamedTuple):
    """A tensor that tells the rows of a request: by its first dimension, or as its first element."""

    tensor: Endpoint
    is_shape: bool = False


class Opening:
    """A copy of nodes in which slots follow the rows that `counters` tell.

    `counters` has, for each signature, the nodes that it reaches and what counts its requests' rows.
    """

    def __init__(
        self, nodes: Mapping[str, Proto], counters: Sequence[tuple[Collection[str], Sequence[Counter]]]
    ) -> None:
        self._old = nodes
        self._counters = counters
        self._counts: dict[tuple[Counter, int, DType, tuple[str, ...]], str] = {}
        self._frames = frames_of(nodes)
        self.nodes: dict[str, Proto] = {}

    def open(self, slots: Iterable[Slot]) -> dict[str, Proto]:
        """The nodes with these slots opened; CannotOpen if one cannot be."""
        self.nodes = dict(self._old)
        self._counts.clear()
        grouped: dict[str, list[Slot]] = {}
        for slot in slots:
            grouped.setdefault(slot.node, []).append(slot)
        for name, found in grouped.items():
            if self._old[name].op != "Const":
                self.nodes[name] = deepcopy(self._old[name])
                for slot in found:
                    self.nodes[name].attr[slot.what].shape.dim[slot.at].size = -1
            elif values := {slot.at: slot.each for slot in found if slot.what == "value"}:
                self._follow(name, values)
            else:
                self._widen(name, {slot.at: slot.each for slot in found})
        return self.nodes

    def _follow(self, name: str, opened: Mapping[int, int]) -> None:
        """Replace elements of a constant by counts of the request's rows."""
        old = self._old[name]
        value, dtype = const_value(old), attr_dtype(old, "dtype")
        if value is None or dtype is None:
            raise CannotOpen(name)
        numbers = [(number, opened.get(at, 0)) for at, number in enumerate(value.ravel().tolist())]
        after = control_inputs(old)
        if value.ndim:
            self.nodes[name] = self._packed(name, numbers, dtype, after)
        else:
            count = self._count(name, numbers[0][1], dtype)
            self.nodes[name] = new_node(name, "Identity", [count], after=after, T=dtype)

    def _widen(self, name: str, opened: Mapping[int, int]) -> None:
        """Replace a constant of equal rows by one row, broadcast to the rows of the request."""
        old = self._old[name]
        dtype, row = attr_dtype(old, "dtype"), _equal_row(old, opened)
        if dtype is None or row is None:
            raise CannotOpen(name)
        shape, after = shape_of(old.attr["value"].tensor.tensor_shape) or (), control_inputs(old)
        one = self._add(constant(f"{name}/row", row, dtype), after)
        numbers = [(size, opened.get(at, 0)) for at, size in enumerate(shape)]
        whole = self._packed(f"{name}/any_rows", numbers, DType.INT32, after, at=name)
        inputs = [one, self._add(whole, ())]
        self.nodes[name] = new_node(name, "BroadcastTo", inputs, after=after, T=dtype, Tidx=DType.INT32)

    def _packed(
        self, name: str, numbers: Sequence[tuple[int, int]], dtype: DType, after: Sequence[str], at: str = ""
    ) -> Proto:
        parts = [
            self._count(at or name, each, dtype)
            if each
            else self._add(constant(f"{name}/size", np.array(number, dtype.numpy), dtype), after)
            for number, each in numbers
        ]
        return new_node(name, "Pack", parts, after=after, T=dtype, N=len(parts))

    def _count(self, name: str, each: int, dtype: DType) -> str:
        """The name of a node, where `name` runs, with `each` times the number of rows of the request."""
        counter = self._counter_for(name)
        key = counter, each, dtype, self._frames.get(name, ())
        if key not in self._counts:
            self._counts[key] = self._entered(self._counted(counter, each, dtype), dtype, key[-1])
        return self._counts[key]

    def _counted(self, counter: Counter, each: int, dtype: DType) -> str:
        outside = counter, each, dtype, ()
        if outside in self._counts:
            return self._counts[outside]
        tensor, base = counter.tensor, f"{counter.tensor.node}/rows"
        node = self._old[tensor.node]
        given = attr_dtype(node, "dtype") or attr_dtype(node, "T")
        if tensor.output or given is None:
            raise CannotOpen(tensor.node)
        shape = tensor.as_input
        if not counter.is_shape:
            shape = self._add(new_node(f"{base}/shape", "Shape", [shape], out_type=dtype, T=given), ())
        elif given != dtype:
            shape = self._add(new_node(f"{base}/shape", "Cast", [shape], SrcT=given, DstT=dtype), ())
        zero, one = (
            self._add(constant(f"{base}/at", np.array([at], np.int32), DType.INT32), ()) for at in (0, 1)
        )
        attrs: dict[str, Any] = {"T": dtype, "Index": DType.INT32, "shrink_axis_mask": 1}
        rows = self._add(new_node(base, "StridedSlice", [shape, zero, one, one], **attrs), ())
        if each > 1:
            factor = self._add(constant(f"{base}/factor", np.array(each, dtype.numpy), dtype), ())
            rows = self._add(new_node(f"{base}/times", "Mul", [rows, factor], T=dtype), ())
        self._counts[outside] = rows
        return rows

    def _entered(self, name: str, dtype: DType, frames: tuple[str, ...]) -> str:
        for frame in frames:
            attrs: dict[str, Any] = {"T": dtype, "frame_name": frame.encode(), "is_constant": True}
            name = self._add(new_node(f"{name}/in_loop", "Enter", [name], **attrs), ())
        return name

    def _counter_for(self, name: str) -> Counter:
        """What counts rows in all signatures that need the node `name`, or CannotOpen."""
        wanted = [counters for reached, counters in self._counters if name in reached]
        shared = [one for one in (wanted or [[]])[0] if all(one in others for others in wanted)]
        if not shared:
            raise CannotOpen(name)
        return shared[0]

    def _add(self, node: Proto, after: Sequence[str]) -> str:
        node.name = free_name(self.nodes, node.name)
        node.input.extend(f"^{other}" for other in after)
        self.nodes[node.name] = node
        return str(node.name)


_MOST_LOOPS = 16  # that lie in each other; a damaged graph may enter one without end


def frames_of(nodes: Mapping[str, Proto]) -> dict[str, tuple[str, ...]]:
    """{node in a TF1 loop: the names of the frames around it, outermost first}."""
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
