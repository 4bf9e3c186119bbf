"""Rows through what works element by element, sums, products and images; see `rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporter.graph.batch.call import (
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
from exporter.graph.batch.dims import Dim, Known, Number, Rows, Unclear
from exporter.graph.nodes import attr_text


def _same(call: Call) -> Outputs:
    known = call.input(0)
    return [Known(known.shape, known.numbers, known.handle)]


def _first_shape(call: Call) -> Outputs:
    return output(call.shape(0))


def _broadcast(call: Call) -> Outputs:
    shapes = [call.shape(at) for at in range(len(call.inputs))]
    return output(call.meeting.broadcast(*shapes))


def _all_equal(call: Call) -> Outputs:
    shape = call.shape(0)
    for at in range(1, len(call.inputs)):
        shape = equal_shapes(call, shape, call.shape(at))
    return output(shape)


def _arithmetic(call: Call) -> Outputs:
    (known,) = _broadcast(call)
    assert known is not None
    left, right = call.input(0).numbers, call.input(1).numbers
    if left is None or right is None or len(left) != len(right):
        return [known]
    numbers = tuple(computed(call.node.op, *pair) for pair in zip(left, right, strict=True))
    return [Known(known.shape, numbers)]


def _select(call: Call) -> Outputs:
    shape = equal_shapes(call, call.shape(1), call.shape(2))
    condition = call.shape(0)
    if len(condition) == 1 and len(shape) > 1:
        return output((call.meeting.equal(shape[0], condition[0]), *shape[1:]))
    return output(equal_shapes(call, shape, condition) if condition else shape)


def _along_last(call: Call) -> Outputs:
    shape = call.shape(0)
    require_whole(shape[-1] if shape else None)
    return output(shape)


def _along_axis(call: Call) -> Outputs:
    shape = call.shape(0)
    for axis in call.integers(1):
        require_whole(shape[axis_of(axis, len(shape))])
    return output(shape)


def _find(call: Call) -> Outputs:
    """A look-up in a table: keys, and a default value as long as a value."""
    return output((*call.shape(1), *call.shape(2)))


def _reduced(call: Call) -> Outputs:
    known = call.input(0)
    axes = {axis_of(axis, len(known.shape)) for axis in call.integers(1)}
    for at in axes:
        if isinstance(known.shape[at], Rows):
            raise Unclear
    if call.attr_bool("keep_dims"):
        return output([1 if at in axes else dim for at, dim in enumerate(known.shape)])
    numbers = None
    if call.node.op == "Prod" and known.numbers is not None and axes == {0} and len(known.shape) == 1:
        total: Number = 1
        for number in known.numbers:
            total = computed("Mul", total, number)
        numbers = (total,)
    return output([dim for at, dim in enumerate(known.shape) if at not in axes], numbers)


def _arg(call: Call) -> Outputs:
    shape = call.shape(0)
    at = call.axis(1, len(shape))
    require_whole(shape[at])
    return output((*shape[:at], *shape[at + 1 :]))


def _top(call: Call) -> Outputs:
    shape, (count,) = call.shape(0), call.integers(1)
    require_whole(shape[-1] if shape else None)
    return output((*shape[:-1], count)) * 2


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
        stop_if_traced(call, dim, other if isinstance(other, int) else 0)
    call.meeting.equal(left[-1], right[-2])
    return output((*call.meeting.broadcast(left[:-2], right[:-2]), left[-2], right[-1]))


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
    if any(isinstance(dim, Rows) and label not in made for label, dim in sizes.items()):
        raise Unclear
    return output([sizes[label] for label in made])


def _bias(call: Call) -> Outputs:
    shape, bias = [*call.shape(0)], call.shape(1)
    at = 1 if attr_text(call.node, "data_format") == "NCHW" else len(shape) - 1
    if len(bias) != 1 or not shape:
        raise Unclear
    shape[at] = call.meeting.equal(shape[at], bias[0])
    return output(shape)


def _gather(call: Call) -> Outputs:
    table, ids = call.shape(0), call.shape(1)
    at = call.axis(2, len(table)) if len(call.inputs) > 2 else 0
    if call.attr_int("batch_dims") or isinstance(table[at], Rows):
        raise Unclear
    known = call.input(0).numbers
    numbers = None
    if known is not None and len(table) == 1 and call.input(1).numbers is not None:
        numbers = tuple(known[axis_of(place, len(known))] for place in call.integers(1))
    return output((*table[:at], *ids, *table[at + 1 :]), numbers)


def _gather_nd(call: Call) -> Outputs:
    table, ids = call.shape(0), call.shape(1)
    depth = ids[-1] if ids else None
    if not isinstance(depth, int) or call.input(0).rows_at is not None:
        raise Unclear
    return output((*ids[:-1], *table[depth:]))


def _one_hot(call: Call) -> Outputs:
    ids, (depth,) = call.shape(0), call.integers(1)
    at = call.attr_int("axis", -1)
    at = len(ids) if at == -1 else axis_of(at, len(ids) + 1)
    return output((*ids[:at], depth, *ids[at:]))


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


def _convolved(call: Call) -> Outputs:
    shape, kernel = call.shape(0), call.shape(1)
    depth = kernel[3] if call.node.op == "Conv2D" else computed("Mul", *map(as_number, kernel[2:4]))
    if not isinstance(depth, int):
        raise Unclear
    return _windows(call, shape, kernel[:2], depth)


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


def _normalised(call: Call) -> Outputs:
    if call.attr_bool("is_training", default=True):
        raise Unclear  # by the request's own batch
    return [Known(call.shape(0))]


ELEMENT_RULES: Mapping[str, Rule] = {
    **rules(
        _same,
        "Identity StopGradient PreventGradient Snapshot Cast Enter RefEnter Exit RefExit NextIteration "
        "RefNextIteration LoopCond CheckNumerics",
    ),
    **rules(
        _first_shape,
        "Relu Relu6 Elu Selu LeakyRelu Sigmoid Tanh Exp Expm1 Log Log1p Neg Abs Sqrt Rsqrt Square Floor Ceil "
        "Round Rint Sign Softplus Softsign Erf Erfc Reciprocal Inv Sin Cos LogicalNot IsNan IsInf IsFinite "
        "ReadVariableOp ZerosLike OnesLike AsString StringToHashBucketFast StringToHashBucketStrong "
        "StringToHashBucket "
        "StringToNumber StringLower StringUpper StringStrip RegexReplace StaticRegexReplace "
        "Bucketize ClipByValue",
    ),
    **rules(
        _broadcast,
        "RealDiv Div DivNoNan TruncateDiv Minimum Pow SquaredDifference FloorMod TruncateMod Mod Greater "
        "GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr SelectV2 Atan2 Xlogy",
    ),
    **rules(_arithmetic, "Add AddV2 Sub Mul FloorDiv Maximum"),
    **rules(_all_equal, "AddN"),
    **rules(_select, "Select"),
    **rules(_along_last, "Softmax LogSoftmax LRN"),
    **rules(_along_axis, "Cumsum Cumprod ReverseV2"),
    **rules(_find, "LookupTableFind LookupTableFindV2"),
    **rules(_reduced, "Sum Mean Max Min Prod All Any"),
    **rules(_arg, "ArgMax ArgMin"),
    **rules(_top, "TopKV2"),
    **rules(_matmul, "MatMul BatchMatMul BatchMatMulV2"),
    **rules(_einsum, "Einsum"),
    **rules(_bias, "BiasAdd"),
    **rules(_gather, "Gather GatherV2 ResourceGather"),
    **rules(_gather_nd, "GatherNd ResourceGatherNd"),
    **rules(_one_hot, "OneHot"),
    **rules(_padded, "Pad PadV2 MirrorPad"),
    **rules(_convolved, "Conv2D DepthwiseConv2dNative"),
    **rules(_pooled, "MaxPool AvgPool"),
    **rules(_normalised, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"),
}
