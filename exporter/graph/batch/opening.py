"""Requests of any size for a graph that was traced with one: its constants are opened, or signatures tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.batch.dims import Dim, Rows
from exporter.graph.batch.suspects import equal_row, suspects
from exporter.graph.batch.trace import Trace, trace
from exporter.graph.control_flow import ENTERS, EXITS
from exporter.graph.new_nodes import constant, free_name, new_node
from exporter.graph.nodes import Endpoint, attr_dtype, endpoint, shape_of
from exporter.graph.reach import all_before, closure
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_MOST_LISTED = 3
_INDEX_TYPES = {"Fill": "index_type", "BroadcastTo": "Tidx", "Tile": "Tmultiples"}
"""Where an operation says of which type the shape is that it is given; elsewhere it is `T`."""


class Ends(Struct, frozen=True):
    """The tensors of one signature; an input with its shape, -1 where any size is taken."""

    inputs: Mapping[Endpoint, tuple[int, ...] | None]
    outputs: Sequence[Endpoint]

    def batched(self) -> Iterator[Endpoint]:
        """The inputs that may have any number of rows."""
        yield from (tensor for tensor, shape in self.inputs.items() if shape and shape[0] < 0)


class BatchSize(Struct, frozen=True):
    """How many rows the signatures take: `only` so many, None for any; and what to tell of it.

    `traced` is the number that the source graph takes, if it takes no other.
    """

    only: int | None = None
    notes: tuple[str, ...] = ()
    traced: int | None = None


class _CannotOpen(Exception):
    """Raised with the reason if a constant cannot be made to follow the request."""


def settle_batch(
    nodes: dict[str, Proto], ends: Sequence[Ends], functions: Mapping[str, Proto], batch: int | None
) -> BatchSize:
    """Open what the batch is baked into, in place; if that cannot be proven right the graph stays as it is.

    `batch` is the size that the graph's input pipeline gave, None if it gave any (then one input that tells
    the number of rows is all that can be followed).
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
    changed = dict(nodes)
    try:
        opened = _Opening(changed, traced, ends).apply()
    except _CannotOpen as error:
        return _only(nodes, traced.batch, [str(error)], "is")
    if not opened:
        return BatchSize()
    nodes.clear()
    nodes.update(changed)
    return BatchSize(None, (_opened_note(traced.batch, opened),), traced.batch)


def _shapes(ends: Iterable[Ends]) -> dict[Endpoint, tuple[Dim, ...]]:
    found: dict[Endpoint, tuple[Dim, ...]] = {}
    for one in ends:
        for tensor, shape in one.inputs.items():
            if shape is not None:
                sizes: list[Dim] = [None if size < 0 else size for size in shape]
                if shape and shape[0] < 0:
                    sizes[0] = Rows()
                found[tensor] = tuple(sizes)
    return found


def _only(nodes: Mapping[str, Proto], batch: int, where: Sequence[str], verb: str) -> BatchSize:
    rows = "1 row" if batch == 1 else f"{batch} rows"
    listed = ", ".join(f"{nodes[name].op} {name!r}" for name in where[:_MOST_LISTED])
    more = f" and {len(where) - _MOST_LISTED} more" if len(where) > _MOST_LISTED else ""
    return BatchSize(
        batch,
        (
            f"only requests of {rows} are answered, and the signatures say so: the batch of training {verb} "
            f"baked into {listed}{more}; for any size, write the .meta of a graph without a fixed batch "
            "(no drop_remainder), or use a builder",
        ),
        batch,
    )


def _opened_note(batch: int, opened: Sequence[str]) -> str:
    listed = ", ".join(opened[:_MOST_LISTED])
    more = f" and {len(opened) - _MOST_LISTED} more" if len(opened) > _MOST_LISTED else ""
    return (
        f"requests may have any number of rows: training's batch of {batch} was taken out of {listed}{more}"
    )


class _Opening:
    """Rewrites nodes so that what stood for training's batch follows the request."""

    def __init__(self, nodes: dict[str, Proto], traced: Trace, ends: Sequence[Ends]) -> None:
        self._nodes = nodes
        self._traced = traced
        self._reached = [(all_before(nodes, one.outputs, given=one.inputs), [*one.batched()]) for one in ends]
        self._loops = _in_loops(nodes)
        self._counts: dict[tuple[Endpoint, int, DType], str] = {}

    def apply(self) -> list[str]:
        """Rewrite; the names of the nodes that were opened.

        Raises:
            _CannotOpen: with the name of a node that cannot be.
        """
        slots: dict[tuple[str, str], dict[int, Rows]] = {}
        for slot, rows in self._traced.opened.items():
            slots.setdefault((slot.node, slot.what), {})[slot.at] = rows
        for (name, what), opened in slots.items():
            if what == "value":
                self._widen_constant(name, opened)
            elif what.isdecimal():
                self._follow_request(name, int(what), opened)
            else:
                self._forget_declared(name, what, opened)
        for name, numbers in self._traced.targets.items():
            self._retarget(name, numbers)
        return [*dict.fromkeys([*(name for name, _ in slots), *self._traced.targets])]

    def _change(self, name: str) -> Proto:
        """A copy of a node, in its place."""
        self._nodes[name] = deepcopy(self._nodes[name])
        return self._nodes[name]

    def _retarget(self, name: str, numbers: tuple[int, ...]) -> None:
        """Another constant for the target of a Reshape, the size of a Slice; no end for a StridedSlice."""
        node = self._change(name)
        if node.op == "StridedSlice":
            node.attr["end_mask"].i |= numbers[0]
            return
        at, index = (1, "Tshape") if node.op == "Reshape" else (2, "Index")
        dtype = attr_dtype(node, index) or DType.INT32
        target = self._constant(f"{name}/any_rows", np.array(numbers, dtype.numpy), dtype)
        target.input.append(f"^{endpoint(node.input[0]).node}")  # the same branch, and the same iteration
        node.input[at] = target.name

    def _forget_declared(self, name: str, what: str, opened: Mapping[int, Rows]) -> None:
        node = self._change(name)
        for at in opened:
            node.attr[what].shape.dim[at].size = -1

    def _follow_request(self, name: str, at: int, opened: Mapping[int, Rows]) -> None:
        """An input with a shape whose opened numbers are counted when a request is there."""
        node = self._change(name)
        source = endpoint(node.input[at])
        known = self._traced.values.get(source)
        if known is None or known.numbers is None:
            raise _CannotOpen(name)
        dtype = attr_dtype(node, _INDEX_TYPES.get(node.op, "T")) or DType.INT32
        numbers = [opened.get(place, number) for place, number in enumerate(known.numbers)]
        node.input[at] = self._packed(name, numbers, dtype)
        node.input.append(f"^{source.node}")

    def _widen_constant(self, name: str, opened: Mapping[int, Rows]) -> None:
        """A constant whose rows are equal becomes one of them, repeated for each row of the request."""
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
        """A node with a shape: numbers, and rows of the request."""
        parts = []
        for number in numbers:
            if isinstance(number, Rows):
                parts.append(self._count(name, number.each, dtype))
            elif isinstance(number, int):
                parts.append(self._constant(f"{name}/size", np.array(number, dtype.numpy), dtype).name)
            else:
                raise _CannotOpen(name)
        return self._add("Pack", f"{name}/any_rows", parts, T=dtype, N=len(parts))

    def _count(self, name: str, count: int, dtype: DType) -> str:
        """How many elements `count` for each row of the request are."""
        if name in self._loops:
            raise _CannotOpen(name)
        tensor = self._input_for(name)
        key = tensor, count, dtype
        if key not in self._counts:
            self._counts[key] = self._counted(tensor, count, dtype)
        return self._counts[key]

    def _counted(self, tensor: Endpoint, count: int, dtype: DType) -> str:
        base = f"{tensor.node}/rows"
        given = self._dtype_of(tensor)
        shape = self._add("Shape", f"{base}/shape", [tensor.as_input], out_type=dtype, T=given)
        first, second = (self._constant(f"{base}/at", np.array([at], np.int32), DType.INT32) for at in (0, 1))
        ends = [first.name, second.name, second.name]
        rows = self._add("StridedSlice", base, [shape, *ends], T=dtype, Index=DType.INT32, shrink_axis_mask=1)
        if count == 1:
            return rows
        factor = self._constant(f"{base}/factor", np.array(count, dtype.numpy), dtype)
        return self._add("Mul", f"{base}/times", [rows, factor.name], T=dtype)

    def _dtype_of(self, tensor: Endpoint) -> DType:
        dtype = attr_dtype(self._nodes[tensor.node], "dtype") if tensor.output == 0 else None
        if dtype is None:
            raise _CannotOpen(tensor.node)
        return dtype

    def _input_for(self, name: str) -> Endpoint:
        """An input that every signature has which needs a node."""
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
    readers: dict[str, list[str]] = {}
    for node in nodes.values():
        for text in node.input:
            readers.setdefault(endpoint(text).node, []).append(node.name)
    entering = [name for name, node in nodes.items() if node.op in ENTERS]
    inside = closure(entering, lambda name: () if nodes[name].op in EXITS else readers.get(name, ()))
    return {name for name in inside if nodes[name].op not in EXITS}
