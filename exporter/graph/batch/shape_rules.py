"""Rows through what makes, reads and changes shapes; see `rules`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from exporter.graph.batch.call import (
    MAX_NUMBERS,
    Call,
    Outputs,
    Rule,
    as_number,
    axis_of,
    computed,
    equal_shapes,
    output,
    require_whole,
    rules,
    stop_if_traced,
)
from exporter.graph.batch.dims import Dim, Known, Number, Rows, Slot, Times, Unclear, reshape
from exporter.graph.nodes import attr, attr_shape, const_value, shape_of

_INTEGERS = (3, 9)  # DT_INT32, DT_INT64


def _const(call: Call) -> Outputs:
    value = attr(call.node, "value")
    shape = shape_of(value.tensor.tensor_shape) if value.HasField("tensor") else None
    if shape is None:
        raise Unclear
    dims = [
        call.meeting.dim(size, Slot(call.node.name, "value", at)) if size else 0
        for at, size in enumerate(shape)
    ]
    numbers: tuple[Number, ...] | None = None
    if value.tensor.dtype in _INTEGERS and math.prod(shape) <= MAX_NUMBERS:
        array = const_value(call.node)
        numbers = None if array is None else tuple(int(number) for number in array.ravel())
    return output(dims, numbers)


def _placeholder(call: Call) -> Outputs:
    shape = attr_shape(call.node)
    if shape is None:
        raise Unclear
    return output([None if size < 0 else size for size in shape])


def _handle(call: Call) -> Outputs:
    (known,) = _placeholder(call)
    return [None if known is None else Known(known.shape, handle=call.node.name)]


def _shape(call: Call) -> Outputs:
    return [
        Known((len(known.shape),), tuple(map(as_number, known.shape))) if known is not None else None
        for known in call.inputs
    ]


def _rank(call: Call) -> Outputs:
    return output((), (len(call.shape(0)),))


def _size(call: Call) -> Outputs:
    counts = [as_number(dim) for dim in call.shape(0)]
    total: Number = 1
    for count in counts:
        total = computed("Mul", total, count)
    return output((), (total,))


def _reshape(call: Call) -> Outputs:
    known = call.input(0)
    done = reshape(known.shape, call.numbers(1), call.meeting)
    if done.target is not None:
        call.found.targets[call.node.name] = done.target
    return output(done.shape, known.numbers)


def _expand_dims(call: Call) -> Outputs:
    known = call.input(0)
    at = call.axis(1, len(known.shape) + 1)
    return output((*known.shape[:at], 1, *known.shape[at:]), known.numbers)


def _squeeze(call: Call) -> Outputs:
    known = call.input(0)
    axes = {axis_of(axis, len(known.shape)) for axis in call.attr_ints("squeeze_dims")}
    if not axes:
        axes = {at for at, dim in enumerate(known.shape) if dim == 1}
        if None in known.shape or (known.rows_at is not None and call.meeting.batch == 1):
            raise Unclear
    for at in axes:
        stop_if_traced(call, known.shape[at], 1)
    return output([dim for at, dim in enumerate(known.shape) if at not in axes], known.numbers)


def _transpose(call: Call) -> Outputs:
    shape = call.shape(0)
    return output([shape[axis_of(axis, len(shape))] for axis in call.integers(1)])


def _concat(call: Call) -> Outputs:
    is_first = call.node.op == "Concat"
    places = [*range(1, len(call.inputs))] if is_first else [*range(len(call.inputs) - 1)]
    shapes = [call.shape(at) for at in places]
    axis = call.axis(0 if is_first else -1, len(shapes[0]))
    joined: list[Dim] = [*shapes[0]]
    for shape in shapes:
        if len(shape) != len(joined):
            raise Unclear
        require_whole(shape[axis])
        rest = equal_shapes(call, joined[:axis] + joined[axis + 1 :], shape[:axis] + shape[axis + 1 :])
        joined = [*rest[:axis], 0, *rest[axis:]]
    joined[axis] = sum(int(dim) for shape in shapes if not isinstance(dim := shape[axis], Rows) and dim)
    numbers: list[Number] = []
    if len(joined) == 1:
        for at in places:
            numbers += call.input(at).numbers or [None] * MAX_NUMBERS
    is_small = 0 < len(numbers) <= MAX_NUMBERS
    return output(joined, tuple(numbers) if is_small and len(numbers) == joined[axis] else None)


def _pack(call: Call) -> Outputs:
    shape = call.shape(0)
    for at in range(1, len(call.inputs)):
        shape = equal_shapes(call, shape, call.shape(at))
    at = axis_of(call.attr_int("axis"), len(shape) + 1)
    numbers = None
    if not shape:
        numbers = tuple((known.numbers or (None,))[0] for known in call.inputs if known is not None)
    return output((*shape[:at], len(call.inputs), *shape[at:]), numbers)


def _unpack(call: Call) -> Outputs:
    shape = call.shape(0)
    at, count = axis_of(call.attr_int("axis"), len(shape)), call.attr_int("num")
    stop_if_traced(call, shape[at], count)
    return output((*shape[:at], *shape[at + 1 :])) * count if 0 <= count <= MAX_NUMBERS else []


def _split(call: Call) -> Outputs:
    shape, count = call.shape(1), call.attr_int("num_split")
    at = call.axis(0, len(shape))
    size = shape[at]
    if isinstance(size, Rows) or size is None or not 0 < count <= MAX_NUMBERS or size % count:
        raise Unclear
    return output((*shape[:at], size // count, *shape[at + 1 :])) * count


def _split_sizes(call: Call) -> Outputs:
    shape, sizes = call.shape(0), [*call.integers(1)]
    at = call.axis(2, len(shape))
    whole = shape[at]
    if isinstance(whole, Rows) or whole is None:
        raise Unclear
    if -1 in sizes:
        sizes[sizes.index(-1)] = int(whole) - sum(size for size in sizes if size >= 0)
    return [Known((*shape[:at], size, *shape[at + 1 :])) for size in sizes]


def _slice(call: Call) -> Outputs:
    shape, begins, sizes = call.shape(0), call.integers(1), call.numbers(2)
    if not len(shape) == len(begins) == len(sizes):
        raise Unclear
    found: list[Dim] = []
    target: list[int] = []
    is_open = False
    for dim, begin, size in zip(shape, begins, sizes, strict=True):
        if isinstance(dim, Rows):
            traced = isinstance(size, int) and size >= 0 and call.meeting.is_all_rows(size, dim.each)
            if begin or not (size in (-1, Times(dim.each)) or traced):
                raise Unclear
            is_open |= traced
            found.append(dim)
            target.append(-1)
        elif dim is None or not isinstance(size, int):
            raise Unclear
        else:
            found.append(int(dim) - begin if size == -1 else size)
            target.append(size)
    if is_open:
        call.found.targets[call.node.name] = tuple(target)
    return output(found)


def _strided_slice(call: Call) -> Outputs:
    known = call.input(0)
    begins, ends, strides = call.numbers(1), call.numbers(2), call.integers(3)
    masks = {
        name: call.attr_int(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    found: list[Dim] = []
    at = 0
    slices: list[slice | int] = []
    for place, (begin, end, stride) in enumerate(zip(begins, ends, strides, strict=True)):
        bit = 1 << place
        if masks["ellipsis"] & bit:
            taken = sum(not masks["new_axis"] & (1 << later) for later in range(place + 1, len(strides)))
            upto = len(known.shape) - taken
            found += known.shape[at:upto]
            at = upto
            continue
        if masks["new_axis"] & bit:
            found.append(1)
            continue
        if at >= len(known.shape):
            raise Unclear
        dim = known.shape[at]
        at += 1
        from_start = bool(masks["begin"] & bit) or begin == 0
        if isinstance(dim, Rows):
            found.append(_sliced_rows(call, dim, end, bit, is_plain=from_start and stride == 1))
            continue
        if dim is None and masks["shrink_axis"] & bit:
            continue
        if dim is None or not isinstance(begin, int) or not isinstance(end, int):
            raise Unclear
        if masks["shrink_axis"] & bit:
            slices.append(begin)
            continue
        span = slice(None if masks["begin"] & bit else begin, None if masks["end"] & bit else end, stride)
        slices.append(span)
        found.append(len(range(*span.indices(int(dim)))))
    found += known.shape[at:]
    return output(found, _picked(known, slices))


def _sliced_rows(call: Call, rows: Rows, end: Number, bit: int, *, is_plain: bool) -> Rows:
    """All rows, whether or not their number is given as the end."""
    if not is_plain or call.attr_int("shrink_axis_mask") & bit:
        raise Unclear
    if call.attr_int("end_mask") & bit or end == Times(rows.each):
        return rows
    if isinstance(end, int) and call.meeting.is_all_rows(end, rows.each):
        before = call.found.targets.get(call.node.name, (0,))
        call.found.targets[call.node.name] = (before[0] | bit,)
        return rows
    raise Unclear


def _picked(known: Known, slices: list[slice | int]) -> tuple[Number, ...] | None:
    if known.numbers is None or len(known.shape) != 1 or len(slices) != 1:
        return None
    (span,) = slices
    if isinstance(span, slice):
        return known.numbers[span]
    return (known.numbers[span],) if -len(known.numbers) <= span < len(known.numbers) else None


def _tile(call: Call) -> Outputs:
    shape, times = call.shape(0), call.dims(1)
    if len(shape) != len(times):
        raise Unclear
    return output([_tiled(dim, multiple) for dim, multiple in zip(shape, times, strict=True)])


def _tiled(dim: Dim, multiple: Dim) -> Dim:
    if dim is None or multiple is None:
        raise Unclear
    if dim == 1:
        return multiple
    if isinstance(multiple, int):
        if isinstance(dim, Rows):
            return Rows(multiple * dim.outer, dim.inner)
        return dim if multiple == 1 else int(dim) * int(multiple)
    if isinstance(dim, Rows) or multiple.inner > 1:
        raise Unclear
    return Rows(multiple.outer, int(dim))


def _filled(call: Call) -> Outputs:
    """What a shape is given to: a fill, or random numbers."""
    return output(call.dims(0))


def _broadcast_to(call: Call) -> Outputs:
    return output(call.meeting.broadcast(call.dims(1), call.shape(0)))


def _range(call: Call) -> Outputs:
    start, limit, delta = (call.integers(at)[0] for at in range(3))
    if not delta:
        raise Unclear
    span = range(start, limit, delta)
    return output((len(span),), tuple(span) if len(span) <= MAX_NUMBERS else None)


SHAPE_RULES: Mapping[str, Rule] = {
    **rules(_const, "Const"),
    **rules(_placeholder, "Placeholder PlaceholderV2"),
    **rules(_handle, "VarHandleOp"),
    **rules(_shape, "Shape ShapeN"),
    **rules(_rank, "Rank"),
    **rules(_size, "Size"),
    **rules(_reshape, "Reshape"),
    **rules(_expand_dims, "ExpandDims"),
    **rules(_squeeze, "Squeeze"),
    **rules(_transpose, "Transpose"),
    **rules(_concat, "ConcatV2 Concat"),
    **rules(_pack, "Pack"),
    **rules(_unpack, "Unpack"),
    **rules(_split, "Split"),
    **rules(_split_sizes, "SplitV"),
    **rules(_slice, "Slice"),
    **rules(_strided_slice, "StridedSlice"),
    **rules(_tile, "Tile"),
    **rules(_filled, "Fill RandomUniform RandomStandardNormal TruncatedNormal"),
    **rules(_broadcast_to, "BroadcastTo"),
    **rules(_range, "Range"),
}
