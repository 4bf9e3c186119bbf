"""Rules for common operations: from the inputs' shapes, in which rows are counted, to the outputs' shapes.

A rule answers only if row i of its outputs depends on nothing but row i of its inputs (and on variables), for
any number of rows. An operation that mixes rows (a mean over the batch, batch normalisation in training)
raises `Unclear`, and so does a case that the rule does not know. Sources: the shape functions of TensorFlow's
REGISTER_OPs in tensorflow/core/ops/{array,math,nn,random,parsing,lookup}_ops.cc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from exporter.graph.batch.dims import (
    MAX_NUMBERS,
    Call,
    Dim,
    Known,
    Number,
    Outputs,
    RowCount,
    Rule,
    Slot,
    Times,
    Unclear,
    as_number,
    axis_of,
    computed,
    equal_shapes,
    output,
    product,
    refuse_taken_rows,
    require_whole,
    reshape,
)
from exporter.graph.nodes import attr, attr_shape, attr_text, const_value, shape_of
from exporter.wire.protos import Proto

RULES: dict[str, Rule] = {}
"""The rules by operation, as `_rule` registers them."""


def _rule(ops: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the operations in a text."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops.split(), rule))
        return rule

    return register


@_rule(
    "Identity StopGradient PreventGradient Snapshot Cast Enter RefEnter Exit RefExit NextIteration "
    "RefNextIteration LoopCond CheckNumerics"
)
def _same(call: Call) -> Outputs:
    known = call.input(0)
    return [Known(known.shape, known.numbers, known.handle)]


@_rule(
    "Relu Relu6 Elu Selu LeakyRelu Sigmoid Tanh Exp Expm1 Log Log1p Neg Abs Sqrt Rsqrt Square Floor Ceil "
    "Round Rint Sign Softplus Softsign Erf Erfc Reciprocal Inv Sin Cos LogicalNot IsNan IsInf IsFinite "
    "ReadVariableOp ZerosLike OnesLike AsString StringToHashBucketFast StringToHashBucketStrong "
    "StringToHashBucket StringToNumber StringLower StringUpper StringStrip RegexReplace "
    "StaticRegexReplace Bucketize ClipByValue"
)
def _first_shape(call: Call) -> Outputs:
    return output(call.shape(0))


@_rule(
    "RealDiv Div DivNoNan TruncateDiv Minimum Pow SquaredDifference FloorMod TruncateMod Mod Greater "
    "GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr SelectV2 Atan2 Xlogy"
)
def _broadcast(call: Call) -> Outputs:
    shapes = [call.shape(at) for at in range(len(call.inputs))]
    return output(call.meeting.broadcast(*shapes))


@_rule("AddN")
def _all_equal(call: Call) -> Outputs:
    return output(_equal_inputs(call))


def _equal_inputs(call: Call) -> tuple[Dim, ...]:
    """The shape that all inputs must have for the graph to run; Unclear if they differ."""
    shape = call.shape(0)
    for at in range(1, len(call.inputs)):
        shape = equal_shapes(call, shape, call.shape(at))
    return shape


@_rule("Add AddV2 Sub Mul FloorDiv Maximum")
def _arithmetic(call: Call) -> Outputs:
    (known,) = _broadcast(call)
    assert known is not None
    left, right = call.input(0).numbers, call.input(1).numbers
    if left is None or right is None or len(left) != len(right):
        return [known]
    numbers = tuple(computed(call.node.op, *pair) for pair in zip(left, right, strict=True))
    return [Known(known.shape, numbers)]


@_rule("Select")
def _select(call: Call) -> Outputs:
    shape = equal_shapes(call, call.shape(1), call.shape(2))
    condition = call.shape(0)
    if len(condition) == 1 and len(shape) > 1:
        return output((call.meeting.equal(shape[0], condition[0]), *shape[1:]))
    return output(equal_shapes(call, shape, condition) if condition else shape)


@_rule("Softmax LogSoftmax LRN")
def _along_last(call: Call) -> Outputs:
    shape = call.shape(0)
    require_whole(shape[-1] if shape else None)
    return output(shape)


@_rule("Cumsum Cumprod ReverseV2")
def _along_axis(call: Call) -> Outputs:
    shape = call.shape(0)
    for axis in call.integers(1):
        require_whole(shape[axis_of(axis, len(shape))])
    return output(shape)


@_rule("LookupTableFind LookupTableFindV2")
def _find(call: Call) -> Outputs:
    # The inputs are the table, keys, and a default value, which has the shape of a value.
    return output((*call.shape(1), *call.shape(2)))


@_rule("Sum Mean Max Min Prod All Any")
def _reduced(call: Call) -> Outputs:
    known = call.input(0)
    axes = {axis_of(axis, len(known.shape)) for axis in call.integers(1)}
    for at in axes:
        if isinstance(known.shape[at], RowCount):
            raise Unclear
    if call.attr_bool("keep_dims"):
        return output([1 if at in axes else dim for at, dim in enumerate(known.shape)])
    numbers = None
    if call.node.op == "Prod" and known.numbers is not None and axes == {0} and len(known.shape) == 1:
        numbers = (product(known.numbers),)
    return output([dim for at, dim in enumerate(known.shape) if at not in axes], numbers)


@_rule("ArgMax ArgMin")
def _arg(call: Call) -> Outputs:
    shape = call.shape(0)
    at = call.axis(1, len(shape))
    require_whole(shape[at])
    return output((*shape[:at], *shape[at + 1 :]))


@_rule("TopKV2")
def _top(call: Call) -> Outputs:
    shape, (count,) = call.shape(0), call.integers(1)
    require_whole(shape[-1] if shape else None)
    return output((*shape[:-1], count)) * 2


@_rule("MatMul BatchMatMul BatchMatMulV2")
def _matmul(call: Call) -> Outputs:
    left, right = [*call.shape(0)], [*call.shape(1)]
    is_batched = call.node.op != "MatMul"
    names = ("adj_x", "adj_y") if is_batched else ("transpose_a", "transpose_b")
    for shape, name in zip((left, right), names, strict=True):
        if len(shape) < 2:
            raise Unclear
        if call.attr_bool(name):
            shape[-2:] = [shape[-1], shape[-2]]
    for dim, other in ((left[-1], right[-2]), (right[-2], left[-1])):
        refuse_taken_rows(call, dim, other if isinstance(other, int) else 0)
    call.meeting.equal(left[-1], right[-2])
    return output((*call.meeting.broadcast(left[:-2], right[:-2]), left[-2], right[-1]))


@_rule("Einsum")
def _einsum(call: Call) -> Outputs:
    given, arrow, made = attr_text(call.node, "equation").replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in given + made or len(terms) != len(call.inputs):
        raise Unclear
    sizes: dict[str, Dim] = {}
    for at, term in enumerate(terms):
        shape = call.shape(at)
        if len(shape) != len(term):
            raise Unclear
        for label, dim in zip(term, shape, strict=True):
            sizes[label] = call.meeting.equal(sizes[label], dim) if label in sizes else dim
    if any(isinstance(dim, RowCount) and label not in made for label, dim in sizes.items()):
        raise Unclear
    return output([sizes[label] for label in made])


@_rule("BiasAdd")
def _bias(call: Call) -> Outputs:
    shape, bias = [*call.shape(0)], call.shape(1)
    at = 1 if attr_text(call.node, "data_format") == "NCHW" else len(shape) - 1
    if len(bias) != 1 or not shape:
        raise Unclear
    shape[at] = call.meeting.equal(shape[at], bias[0])
    return output(shape)


@_rule("Gather GatherV2 ResourceGather")
def _gather(call: Call) -> Outputs:
    table, ids = call.shape(0), call.shape(1)
    at = call.axis(2, len(table)) if len(call.inputs) > 2 else 0
    if call.attr_int("batch_dims") or isinstance(table[at], RowCount):
        raise Unclear
    known = call.input(0).numbers
    numbers = None
    if known is not None and len(table) == 1 and call.input(1).numbers is not None:
        numbers = tuple(known[axis_of(place, len(known))] for place in call.integers(1))
    return output((*table[:at], *ids, *table[at + 1 :]), numbers)


@_rule("GatherNd ResourceGatherNd")
def _gather_nd(call: Call) -> Outputs:
    table, ids = call.shape(0), call.shape(1)
    depth = ids[-1] if ids else None
    if not isinstance(depth, int) or call.input(0).rows_at is not None:
        raise Unclear
    return output((*ids[:-1], *table[depth:]))


@_rule("OneHot")
def _one_hot(call: Call) -> Outputs:
    ids, (depth,) = call.shape(0), call.integers(1)
    at = call.attr_int("axis", -1)
    at = len(ids) if at == -1 else axis_of(at, len(ids) + 1)
    return output((*ids[:at], depth, *ids[at:]))


@_rule("Pad PadV2 MirrorPad")
def _padded(call: Call) -> Outputs:
    shape, pads = call.shape(0), call.integers(1)
    if len(pads) != 2 * len(shape):
        raise Unclear
    found: list[Dim] = []
    for at, dim in enumerate(shape):
        more = pads[2 * at] + pads[2 * at + 1]
        if more and not isinstance(dim, int):
            raise Unclear
        found.append(dim + more if isinstance(dim, int) and more else dim)
    return output(found)


@_rule("Conv2D DepthwiseConv2dNative")
def _convolved(call: Call) -> Outputs:
    shape, kernel = call.shape(0), call.shape(1)  # the kernel: height, width, channels in, channels out
    depth = kernel[3] if call.node.op == "Conv2D" else computed("Mul", *map(as_number, kernel[2:4]))
    if not isinstance(depth, int):
        raise Unclear
    return _windows(call, shape, kernel[:2], depth)


@_rule("MaxPool AvgPool")
def _pooled(call: Call) -> Outputs:
    shape, size = call.shape(0), call.attr_ints("ksize")
    _require_images(call, shape)
    return _windows(call, shape, size[1:3], shape[3])


def _windows(call: Call, shape: Sequence[Dim], kernel: Sequence[Dim], depth: Dim) -> Outputs:
    _require_images(call, shape)
    strides = call.attr_ints("strides")
    dilations = call.attr_ints("dilations") or [1, 1, 1, 1]
    is_same = attr_text(call.node, "padding") == "SAME"
    if len(strides) != 4 or (not is_same and attr_text(call.node, "padding") != "VALID"):
        raise Unclear
    sides: list[Dim] = []
    for at in (1, 2):
        dim, window = shape[at], kernel[at - 1]
        if not isinstance(dim, int) or not isinstance(window, int) or not strides[at]:
            raise Unclear
        reach = (window - 1) * dilations[at] + 1
        sides.append(-(-dim // strides[at]) if is_same else -(-(dim - reach + 1) // strides[at]))
    return output((shape[0], *sides, depth))


def _require_images(call: Call, shape: Sequence[Dim]) -> None:
    if len(shape) != 4 or attr_text(call.node, "data_format") not in ("", "NHWC"):
        raise Unclear


@_rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
def _normalised(call: Call) -> Outputs:
    if call.attr_bool("is_training", default=True):
        raise Unclear  # by the statistics of the request's own batch
    return [Known(call.shape(0))]


_INTEGERS = (3, 9)  # DT_INT32, DT_INT64


@_rule("Const")
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


@_rule("Placeholder PlaceholderV2")
def _placeholder(call: Call) -> Outputs:
    shape = attr_shape(call.node)
    if shape is None:
        raise Unclear
    return output([None if size < 0 else size for size in shape])


@_rule("VarHandleOp")
def _handle(call: Call) -> Outputs:
    (known,) = _placeholder(call)
    return [None if known is None else Known(known.shape, handle=call.node.name)]


@_rule("Shape ShapeN")
def _shape(call: Call) -> Outputs:
    return [
        Known((len(known.shape),), tuple(map(as_number, known.shape))) if known is not None else None
        for known in call.inputs
    ]


@_rule("Rank")
def _rank(call: Call) -> Outputs:
    return output((), (len(call.shape(0)),))


@_rule("Size")
def _size(call: Call) -> Outputs:
    return output((), (product(map(as_number, call.shape(0))),))


@_rule("Reshape")
def _reshape(call: Call) -> Outputs:
    known = call.input(0)
    done = reshape(known.shape, call.numbers(1), call.meeting)
    if done.target is not None:
        call.found.targets[call.node.name] = done.target
    return output(done.shape, known.numbers)


@_rule("ExpandDims")
def _expand_dims(call: Call) -> Outputs:
    known = call.input(0)
    at = call.axis(1, len(known.shape) + 1)
    return output((*known.shape[:at], 1, *known.shape[at:]), known.numbers)


@_rule("Squeeze")
def _squeeze(call: Call) -> Outputs:
    known = call.input(0)
    axes = {axis_of(axis, len(known.shape)) for axis in call.attr_ints("squeeze_dims")}
    if not axes:
        axes = {at for at, dim in enumerate(known.shape) if dim == 1}
        if None in known.shape or (known.rows_at is not None and call.meeting.batch == 1):
            raise Unclear
    for at in axes:
        refuse_taken_rows(call, known.shape[at], 1)
    return output([dim for at, dim in enumerate(known.shape) if at not in axes], known.numbers)


@_rule("Transpose")
def _transpose(call: Call) -> Outputs:
    shape = call.shape(0)
    return output([shape[axis_of(axis, len(shape))] for axis in call.integers(1)])


@_rule("ConcatV2 Concat")
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
    joined[axis] = sum(int(dim) for shape in shapes if not isinstance(dim := shape[axis], RowCount) and dim)
    numbers: list[Number] = []
    if len(joined) == 1:
        for at in places:
            numbers += call.input(at).numbers or [None] * MAX_NUMBERS
    is_small = 0 < len(numbers) <= MAX_NUMBERS
    return output(joined, tuple(numbers) if is_small and len(numbers) == joined[axis] else None)


@_rule("Pack")
def _pack(call: Call) -> Outputs:
    shape = _equal_inputs(call)
    at = axis_of(call.attr_int("axis"), len(shape) + 1)
    numbers = None
    if not shape:
        numbers = tuple((known.numbers or (None,))[0] for known in call.inputs if known is not None)
    return output((*shape[:at], len(call.inputs), *shape[at:]), numbers)


@_rule("Unpack")
def _unpack(call: Call) -> Outputs:
    shape = call.shape(0)
    at, count = axis_of(call.attr_int("axis"), len(shape)), call.attr_int("num")
    refuse_taken_rows(call, shape[at], count)
    return output((*shape[:at], *shape[at + 1 :])) * count if 0 <= count <= MAX_NUMBERS else []


@_rule("Split")
def _split(call: Call) -> Outputs:
    shape, count = call.shape(1), call.attr_int("num_split")
    at = call.axis(0, len(shape))
    size = shape[at]
    if isinstance(size, RowCount) or size is None or not 0 < count <= MAX_NUMBERS or size % count:
        raise Unclear
    return output((*shape[:at], size // count, *shape[at + 1 :])) * count


@_rule("SplitV")
def _split_sizes(call: Call) -> Outputs:
    shape, sizes = call.shape(0), [*call.integers(1)]
    at = call.axis(2, len(shape))
    whole = shape[at]
    if isinstance(whole, RowCount) or whole is None:
        raise Unclear
    if -1 in sizes:
        sizes[sizes.index(-1)] = int(whole) - sum(size for size in sizes if size >= 0)
    return [Known((*shape[:at], size, *shape[at + 1 :])) for size in sizes]


@_rule("Slice")
def _slice(call: Call) -> Outputs:
    shape, begins, sizes = call.shape(0), call.integers(1), call.numbers(2)
    if not len(shape) == len(begins) == len(sizes):
        raise Unclear
    found: list[Dim] = []
    target: list[int] = []
    is_open = False
    for dim, begin, size in zip(shape, begins, sizes, strict=True):
        if isinstance(dim, RowCount):
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


@_rule("StridedSlice")
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
        if isinstance(dim, RowCount):
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


def _sliced_rows(call: Call, rows: RowCount, end: Number, bit: int, *, is_plain: bool) -> RowCount:
    """All rows, or Unclear if the slice may leave some out; an end that is the traced batch is opened."""
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


@_rule("Tile")
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
        if isinstance(dim, RowCount):
            return RowCount(multiple * dim.outer, dim.inner)
        return dim if multiple == 1 else int(dim) * int(multiple)
    if isinstance(dim, RowCount) or multiple.inner > 1:
        raise Unclear
    return RowCount(multiple.outer, int(dim))


@_rule("Fill RandomUniform RandomStandardNormal TruncatedNormal")
def _filled(call: Call) -> Outputs:
    return output(call.dims(0))


@_rule("BroadcastTo")
def _broadcast_to(call: Call) -> Outputs:
    return output(call.meeting.broadcast(call.dims(1), call.shape(0)))


@_rule("Range")
def _range(call: Call) -> Outputs:
    start, limit, delta = (call.integers(at)[0] for at in range(3))
    if not delta:
        raise Unclear
    span = range(start, limit, delta)
    return output((len(span),), tuple(span) if len(span) <= MAX_NUMBERS else None)


@_rule("ParseExample ParseExampleV2")
def _parsed(call: Call) -> Outputs:
    # A serialized Example is a row; what sparse features have of it is not followed.
    (rows,) = call.shape(0)
    is_first = call.node.op == "ParseExample"
    sparse = call.attr_int("Nsparse" if is_first else "num_sparse")
    dense: list[Known | None] = []
    for proto in attr(call.node, "dense_shapes").list.shape:
        shape = shape_of(proto)
        is_fixed = shape is not None and min(shape, default=0) >= 0
        dense.append(Known((rows, *shape)) if shape is not None and is_fixed else None)
    return [*[None] * (3 * sparse), *dense]


@_rule("Switch RefSwitch")
def _switch(call: Call) -> Outputs:
    return [Known(call.shape(0), None, call.input(0).handle)] * 2


@_rule("TensorArrayV3")
def _array(call: Call) -> Outputs:
    return [Known((2,), handle=call.node.name), Known(())]  # the handle, and the flow that orders writes


@_rule("TensorArraySizeV3")
def _array_size(call: Call) -> Outputs:
    return [Known(())]


@_rule("TensorArrayWriteV3 TensorArrayScatterV3")
def _array_written(call: Call) -> Outputs:
    shape = call.shape(2)
    if call.node.op == "TensorArrayScatterV3":
        require_whole(shape[0] if shape else None)
        shape = shape[1:]
    name = _array_name(call)
    if name in call.found.arrays:
        shape = equal_shapes(call, call.found.arrays[name], shape)
    call.found.arrays[name] = _as_declared(call, call.nodes[name], "element_shape", shape)
    return [Known(())]


@_rule("TensorArrayReadV3 TensorArrayGatherV3")
def _array_read(call: Call) -> Outputs:
    known = call.found.arrays.get(_array_name(call))
    if known is None:
        raise Unclear
    shape = _as_declared(call, call.node, "element_shape", known)
    if call.node.op == "TensorArrayGatherV3":
        (steps,) = call.shape(1)
        return output((steps, *shape))
    return output(shape)


def _array_name(call: Call) -> str:
    name = call.input(0).handle
    if name not in call.nodes:
        raise Unclear
    return name


@_rule("EnsureShape")
def _ensured(call: Call) -> Outputs:
    return output(_as_declared(call, call.node, "shape", call.shape(0)))


def _as_declared(call: Call, node: Proto, what: str, shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """A shape that the attribute `what` of a node declares, too; a declared batch size is opened.

    `shape` itself if nothing is declared; Unclear if both differ.
    """
    declared = attr_shape(node, what)
    if declared is None:
        return tuple(shape)
    if len(declared) != len(shape):
        raise Unclear
    slots = (Slot(node.name, what, at) for at in range(len(shape)))
    return tuple(
        call.meeting.equal(dim, None if size < 0 else call.meeting.dim(size, slot))
        for dim, size, slot in zip(shape, declared, slots, strict=True)
    )
