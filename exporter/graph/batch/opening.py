"""Make a graph that was traced with one batch size answer requests of any size, or declare that size.

Constants that fix the size are rewritten so that they follow the request (`settle_batch`). Where no rule
knows an operation, requests may still have any size if no number near it can be the batch size (`suspects`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.batch.dims import Dim, RowCount
from exporter.graph.batch.trace import Trace, trace
from exporter.graph.functions import reachable
from exporter.graph.nodes import (
    ENTERS,
    EXITS,
    Endpoint,
    all_before,
    attr,
    attr_dtype,
    base_dtype,
    closure,
    const_value,
    constant,
    data_inputs,
    endpoint,
    free_name,
    new_node,
    readers_of,
    shape_of,
)
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MAX_SUSPECT_ELEMENTS = 64
# The fields of a TensorProto that hold numbers.
_NUMBERS = (
    *("float_val", "double_val", "half_val", "float8_val", "scomplex_val", "dcomplex_val", "bool_val"),
    *("int_val", "int64_val", "uint32_val", "uint64_val"),
)


def suspects(
    nodes: Mapping[str, Proto], traced: Trace, functions: Mapping[str, Proto], batch: int
) -> Iterator[str]:
    """Yield the nodes with a number that may be the batch size, at or before a node that no rule knows."""
    for name in traced.unclear:
        node = nodes[name]
        counts = [attr(node, "num").i, attr(node, "num_split").i]
        counts += [dim.size for key in ("shape", "element_shape") for dim in attr(node, key).shape.dim[:1]]
        if any(_may_be(number, batch) for number in counts):
            yield name
        for called in reachable([node], functions):
            if any(_is_suspect(inner, batch) for inner in functions[called].node_def):
                yield name
        yield from (
            source for source in _constants_before(nodes, node, traced) if _is_suspect(nodes[source], batch)
        )


def _may_be(number: float, batch: int) -> bool:
    """True if a number may be the batch size, or rows times steps; of a batch of 1, only if it is 1."""
    return number == batch if batch == 1 else number > 0 and number % batch == 0


def _constants_before(nodes: Mapping[str, Proto], node: Proto, traced: Trace) -> Iterator[str]:
    """Yield the names of the constants before a node, as far as tensors do not count rows."""
    pending, seen = [tensor.node for tensor in data_inputs(node)], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        known = traced.values.get(Endpoint(name, 0))
        if nodes[name].op == "Const":
            yield name
        elif known is None or known.rows_at is None:
            pending += [tensor.node for tensor in data_inputs(nodes[name])]


def _is_suspect(node: Proto, batch: int) -> bool:
    """True for a constant that holds a number like the batch size, or has that length, of equal rows."""
    value = attr(node, "value")
    if node.op != "Const" or not value.HasField("tensor"):
        return False
    shape = shape_of(value.tensor.tensor_shape) or ()
    if min(shape, default=0) < 0:
        return False
    if len(shape) > 1 and _may_be(shape[0], batch) and rows_are_equal(node, 0):
        return True
    if len(shape) > 1 or math.prod(shape) > _MAX_SUSPECT_ELEMENTS:
        return False
    if base_dtype(value.tensor.dtype).itemsize is None:
        return False
    array = const_value(node)
    return array is not None and array.dtype.kind in "iuf" and any(_may_be(n, batch) for n in array.ravel())


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


def equal_row(node: Proto, axes: Collection[int]) -> np.ndarray | None:
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


_MOST_LISTED = 3  # nodes in a note
# The attribute with the dtype of an operation's shape input; other operations have it in `T`.
_INDEX_TYPES = {"Fill": "index_type", "BroadcastTo": "Tidx", "Tile": "Tmultiples"}


class Ends(Struct, frozen=True):
    """The tensors of one signature: inputs with their shapes (-1: any size), and outputs."""

    inputs: Mapping[Endpoint, tuple[int, ...] | None]
    outputs: Sequence[Endpoint]

    def batched(self) -> Iterator[Endpoint]:
        """Yield the inputs that may have any number of rows."""
        return (tensor for tensor, shape in self.inputs.items() if shape and shape[0] < 0)


class BatchSize(Struct, frozen=True):
    """The numbers of rows that the signatures accept, and notes for the user."""

    only: int | None = None  # the one number that the served graph accepts, None for any
    notes: tuple[str, ...] = ()
    traced: int | None = None  # the one number that the source graph accepts, None if it accepts others


class _CannotOpen(Exception):
    """Raised with a node's name if its constant cannot be made to follow the request."""


def settle_batch(
    nodes: dict[str, Proto], ends: Sequence[Ends], functions: Mapping[str, Proto], batch: int | None
) -> BatchSize:
    """Make the constants that fix the batch size dynamic, in place, if that is proven right; else none.

    `batch` is the batch size of the graph's input pipeline, None if it has no fixed one: then the number of
    rows is taken from one input.
    """
    if batch is None and any(sum(1 for _ in one.batched()) != 1 for one in ends):
        return BatchSize()
    traced = trace(nodes, _shapes(ends), batch)
    if traced.batch is None:
        return BatchSize()
    if traced.stuck:
        return _only(nodes, traced.batch, traced.stuck, "is")
    suspicious = [*dict.fromkeys(suspects(nodes, traced, functions, traced.batch))]
    if suspicious and (batch is not None or traced.opened or traced.targets):
        return _only(nodes, traced.batch, suspicious, "may be")
    changed = dict(nodes)  # `_Opening` copies the nodes that it changes: on failure `nodes` are as they were
    try:
        opened = _Opening(changed, traced, ends).apply()
    except _CannotOpen as error:
        return _only(nodes, traced.batch, [str(error)], "is")
    if not opened:
        return BatchSize()
    nodes.clear()
    nodes.update(changed)
    note = (
        "requests may have any number of rows: "
        f"training's batch of {traced.batch} was made dynamic in {_listed(opened)}"
    )
    return BatchSize(None, (note,), traced.batch)


def _shapes(ends: Iterable[Ends]) -> dict[Endpoint, tuple[Dim, ...]]:
    """The shape of each input, whose first dimension counts rows if it may be of any size."""
    found: dict[Endpoint, tuple[Dim, ...]] = {}
    for one in ends:
        for tensor, shape in one.inputs.items():
            if shape is not None:
                sizes: list[Dim] = [None if size < 0 else size for size in shape]
                if shape and shape[0] < 0:
                    sizes[0] = RowCount()
                found[tensor] = tuple(sizes)
    return found


def _only(nodes: Mapping[str, Proto], batch: int, where: Sequence[str], verb: str) -> BatchSize:
    """The batch size that the nodes `where` fix, with a note that says so."""
    rows = "1 row" if batch == 1 else f"{batch} rows"
    fixing = _listed([f"{nodes[name].op} {name!r}" for name in where])
    note = (
        f"only requests of {rows} are answered, and the signatures say so: training's batch size {verb} "
        f"fixed in {fixing}; for any size, write the .meta of a graph without a fixed batch "
        "(no drop_remainder), or use a builder"
    )
    return BatchSize(batch, (note,), batch)


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(texts[:_MOST_LISTED]) + more


class _Opening:
    """Rewrites nodes so that constants for training's batch size follow the request."""

    def __init__(self, nodes: dict[str, Proto], traced: Trace, ends: Sequence[Ends]) -> None:
        self._nodes = nodes
        self._traced = traced
        self._reached = [(all_before(nodes, one.outputs, given=one.inputs), [*one.batched()]) for one in ends]
        self._loops = _in_loops(nodes)
        self._counts: dict[tuple[Endpoint, int, DType], str] = {}

    def apply(self) -> list[str]:
        """Rewrite the nodes; returns the names of those that were opened."""
        slots: dict[tuple[str, str], dict[int, RowCount]] = {}
        for slot, rows in self._traced.opened.items():
            slots.setdefault((slot.node, slot.what), {})[slot.at] = rows
        for (name, what), opened in slots.items():
            if what == "value":
                self._widen_constant(name, opened)
            elif what.isdecimal():
                self._follow_request(name, int(what), opened)
            else:  # the shape that an attribute declares
                node = self._change(name)
                for at in opened:
                    node.attr[what].shape.dim[at].size = -1
        for name, numbers in self._traced.targets.items():
            self._retarget(name, numbers)
        return [*dict.fromkeys([*(name for name, _ in slots), *self._traced.targets])]

    def _change(self, name: str) -> Proto:
        """Put a copy of a node in its place, and return it."""
        self._nodes[name] = deepcopy(self._nodes[name])
        return self._nodes[name]

    def _retarget(self, name: str, numbers: tuple[int, ...]) -> None:
        """Give a Reshape another target, a Slice another size, a StridedSlice an open end."""
        node = self._change(name)
        if node.op == "StridedSlice":
            node.attr["end_mask"].i |= numbers[0]
            return
        at, index = (1, "Tshape") if node.op == "Reshape" else (2, "Index")
        dtype = attr_dtype(node, index) or DType.INT32
        target = self._constant(f"{name}/any_rows", np.array(numbers, dtype.numpy), dtype)
        target.input.append(f"^{endpoint(node.input[0]).node}")  # the same branch, and the same iteration
        node.input[at] = target.name

    def _follow_request(self, name: str, at: int, opened: Mapping[int, RowCount]) -> None:
        """Replace a node's shape input `at` by one whose opened numbers are computed at each request.

        _CannotOpen if the numbers of that input are not known.
        """
        node = self._change(name)
        source = endpoint(node.input[at])
        known = self._traced.values.get(source)
        if known is None or known.numbers is None:
            raise _CannotOpen(name)
        dtype = attr_dtype(node, _INDEX_TYPES.get(node.op, "T")) or DType.INT32
        numbers = [opened.get(place, number) for place, number in enumerate(known.numbers)]
        node.input[at] = self._packed(name, numbers, dtype)
        node.input.append(f"^{source.node}")

    def _widen_constant(self, name: str, opened: Mapping[int, RowCount]) -> None:
        """Replace a constant of equal rows by one row, broadcast to the rows of the request.

        _CannotOpen if its rows differ.
        """
        old = self._nodes[name]
        dtype, value = attr_dtype(old, "dtype"), equal_row(old, opened)
        if dtype is None or value is None:
            raise _CannotOpen(name)
        shape = shape_of(old.attr["value"].tensor.tensor_shape) or ()
        row = self._constant(f"{name}/row", value, dtype)
        row.input.extend(old.input)
        numbers = [opened.get(at, size) for at, size in enumerate(shape)]
        shape_of_all = self._packed(name, numbers, DType.INT32)
        self._nodes[name] = new_node(name, "BroadcastTo", [row.name, shape_of_all], T=dtype, Tidx=DType.INT32)

    def _packed(self, name: str, numbers: Sequence[object], dtype: DType) -> str:
        """Add a node with a shape of numbers and counts of the request's rows; returns its name.

        _CannotOpen if a number is unknown.
        """
        parts = []
        for number in numbers:
            if isinstance(number, RowCount):
                parts.append(self._count(name, number.each, dtype))
            elif isinstance(number, int):
                parts.append(self._constant(f"{name}/size", np.array(number, dtype.numpy), dtype).name)
            else:
                raise _CannotOpen(name)
        return self._add("Pack", f"{name}/any_rows", parts, T=dtype, N=len(parts))

    def _count(self, name: str, count: int, dtype: DType) -> str:
        """The name of a node, added once, with `count` times the number of rows of the request.

        _CannotOpen if `name` is in a loop, or no batched input is for it.
        """
        if name in self._loops:  # the count is made outside, and would have to be carried in
            raise _CannotOpen(name)
        tensor = self._input_for(name)
        key = tensor, count, dtype
        if key not in self._counts:
            self._counts[key] = self._counted(tensor, count, dtype)
        return self._counts[key]

    def _counted(self, tensor: Endpoint, count: int, dtype: DType) -> str:
        base = f"{tensor.node}/rows"
        given = attr_dtype(self._nodes[tensor.node], "dtype") if tensor.output == 0 else None
        if given is None:
            raise _CannotOpen(tensor.node)
        shape = self._add("Shape", f"{base}/shape", [tensor.as_input], out_type=dtype, T=given)
        first, second = (self._constant(f"{base}/at", np.array([at], np.int32), DType.INT32) for at in (0, 1))
        ends = [first.name, second.name, second.name]
        rows = self._add("StridedSlice", base, [shape, *ends], T=dtype, Index=DType.INT32, shrink_axis_mask=1)
        if count == 1:
            return rows
        factor = self._constant(f"{base}/factor", np.array(count, dtype.numpy), dtype)
        return self._add("Mul", f"{base}/times", [rows, factor.name], T=dtype)

    def _input_for(self, name: str) -> Endpoint:
        """A batched input that all signatures which need the node `name` have, or _CannotOpen."""
        wanted = [batched for reached, batched in self._reached if name in reached]
        shared = [tensor for tensor in (wanted or [[]])[0] if all(tensor in others for others in wanted)]
        if not shared:
            raise _CannotOpen(name)
        return shared[0]

    def _constant(self, wish: str, value: np.ndarray, dtype: DType) -> Proto:
        node = constant(free_name(self._nodes, wish), value, dtype)
        self._nodes[node.name] = node
        return node

    def _add(self, op: str, wish: str, inputs: Sequence[str], **attrs: Any) -> str:
        name = free_name(self._nodes, wish)
        self._nodes[name] = new_node(name, op, inputs, **attrs)
        return name


def _in_loops(nodes: Mapping[str, Proto]) -> set[str]:
    """The nodes that run in an iteration of a TF1 loop."""
    readers = readers_of(nodes.values(), waiting=True)

    def after(name: str) -> Iterator[str]:
        return (reader.name for reader in readers.get(name, ()) if reader.op not in EXITS)

    return {*closure((name for name, node in nodes.items() if node.op in ENTERS), after)}
