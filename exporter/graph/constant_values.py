"""Compute stock operations on constants, in numpy: a rate, a flag, an initial value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from exporter.graph.nodes import attr, attr_dtype
from exporter.wire.protos import Proto

Array = np.ndarray[Any, Any]
_Computed = Callable[[Proto, list[Array]], Array]

MISFITS = (ValueError, TypeError, IndexError, ArithmeticError)
"""What `compute` raises if inputs do not fit an operation."""


def is_computed(op: str) -> bool:
    """True for an operation that `compute` supports."""
    return op in _COMPUTED or op in _OUTPUTS


def compute(node: Proto, values: list[Array], output: int, most_bytes: int) -> Array:
    """Compute one output of a node from the values of its inputs, in order; it may be a view of one of them.

    `output` is the number of the output.

    Raises:
        KeyError: `is_computed` is False for the operation.
        ValueError: the value has more than `most_bytes`, which is not checked for operations with several
            outputs.
        One of `MISFITS`: the inputs do not fit the operation.
        GraphError: the node has an unknown type number.
    """
    with np.errstate(all="ignore"):  # kernels divide by 0 without a warning
        if node.op in _OUTPUTS:
            return np.asarray(_OUTPUTS[node.op](node, values)[output])
        if node.op in _GROWS:  # before numpy takes the memory
            _require_size(_GROWS[node.op](values), most_bytes)
        found = np.asarray(_COMPUTED[node.op](node, values))
    _require_size(extent(found.shape) * found.itemsize, most_bytes)
    return found


def extent(sizes: Iterable[float]) -> float:
    """Return the number of elements of a shape, as a float; each size below 1 counts as 1.

    Infinite beyond the range of floats.
    """
    # An empty tensor may have other, unbounded sizes, which a later operation may use.
    return math.prod(max(float(size), 1.0) for size in sizes)


def _require_size(size: float, most_bytes: int) -> None:
    if not size <= most_bytes:
        raise ValueError("it has too many values")


def _numbers(value: Array) -> list[int]:
    return [int(number) for number in value.ravel()]


def _axis(value: Array) -> int:
    return int(value.ravel()[0])


def _cast(node: Proto, values: list[Array]) -> Array:
    wanted = attr_dtype(node, "DstT")
    return values[0].astype(wanted.numpy) if wanted is not None else values[0]


def _divide(_: Proto, values: list[Array]) -> Array:
    left, right = values
    if left.dtype.kind in "iu":  # Div rounds toward zero, unlike numpy
        return np.trunc(np.true_divide(left, right)).astype(left.dtype)
    return left / right


def _select(_: Proto, values: list[Array]) -> Array:
    chosen, first, second = values
    if first.shape != second.shape or chosen.shape not in ((), first.shape[:1], first.shape):
        raise ValueError("Select takes values of one shape")
    if chosen.ndim == 1 and first.ndim > 1:  # Select chooses whole rows
        chosen = chosen.reshape(-1, *[1] * (first.ndim - 1))
    return np.where(chosen, first, second)


def _strided_slice(node: Proto, values: list[Array]) -> Array:
    source, *bounds = values
    masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    open_begin, open_end, ellipsis, new_axis, shrink = (attr(node, f"{name}_mask").i for name in masks)
    items: list[Any] = []
    for at, (begin, end, stride) in enumerate(zip(*map(_numbers, bounds), strict=True)):
        bit = 1 << at
        if ellipsis & bit:
            items.append(Ellipsis)
        elif new_axis & bit:
            items.append(None)
        elif shrink & bit:
            items.append(begin)
        else:
            items.append(slice(None if open_begin & bit else begin, None if open_end & bit else end, stride))
    return np.asarray(source[tuple(items)])


def _slice(_: Proto, values: list[Array]) -> Array:
    source, begins, sizes = values
    spans = zip(_numbers(begins), _numbers(sizes), strict=True)
    return np.asarray(source[tuple(slice(at, None if size < 0 else at + size) for at, size in spans)])


def _gather(node: Proto, values: list[Array]) -> Array:
    if attr(node, "batch_dims").i:
        raise ValueError("batches of indices are not followed")
    return np.asarray(np.take(values[0], values[1], _axis(values[2]) if len(values) > 2 else 0))


def _gather_nd(_: Proto, values: list[Array]) -> Array:
    return np.asarray(values[0][tuple(np.moveaxis(values[1], -1, 0))])


def _squeeze(node: Proto, values: list[Array]) -> Array:
    axes = tuple(attr(node, "squeeze_dims").list.i) or tuple(attr(node, "axis").list.i)
    return np.squeeze(values[0], axes or None)


def _reduced(reduce: Callable[..., Any]) -> _Computed:
    def compute(node: Proto, values: list[Array]) -> Array:
        axes = tuple(_numbers(values[1])) if len(values) > 1 else None
        return np.asarray(reduce(values[0], axis=axes, keepdims=attr(node, "keep_dims").b))

    return compute


def _unary(function: Callable[..., Any]) -> _Computed:
    return lambda _, values: function(values[0])


def _of(inputs: int, function: Callable[..., Any]) -> _Computed:
    def compute(_: Proto, values: list[Array]) -> Array:
        if len(values) != inputs:  # numpy would write into one more
            raise ValueError(f"it has {len(values)} inputs, expected {inputs}")
        return np.asarray(function(*values))

    return compute


_binary = partial(_of, 2)


def _broadcast_bytes(values: list[Array]) -> float:
    shape = np.broadcast_shapes(*(value.shape for value in values))
    return extent(shape) * max(value.itemsize for value in values)


_SAME = ["EnsureShape", "Enter", "Identity", "PlaceholderWithDefault", "RefEnter", "Snapshot", "StopGradient"]

# Operations whose inputs are broadcast.
_BINARY: Mapping[str, _Computed] = {
    "Add": _binary(np.add),
    "AddV2": _binary(np.add),
    "Equal": _binary(np.equal),
    "FloorDiv": _binary(np.floor_divide),
    "FloorMod": _binary(np.mod),
    "Greater": _binary(np.greater),
    "GreaterEqual": _binary(np.greater_equal),
    "Less": _binary(np.less),
    "LessEqual": _binary(np.less_equal),
    "LogicalAnd": _binary(np.logical_and),
    "LogicalOr": _binary(np.logical_or),
    "Maximum": _binary(np.maximum),
    "Minimum": _binary(np.minimum),
    "Mul": _binary(np.multiply),
    "NotEqual": _binary(np.not_equal),
    "Pow": _binary(np.power),
    "Sub": _binary(np.subtract),
    "ClipByValue": _of(3, np.clip),
    "Div": _divide,
    "DivNoNan": lambda _, values: np.where(values[1] == 0, 0, values[0] / values[1]).astype(values[0].dtype),
    "RealDiv": _divide,
    "SelectV2": _of(3, np.where),
    "SquaredDifference": lambda _, values: np.square(values[0] - values[1]),
}

_COMPUTED: Mapping[str, _Computed] = {
    **_BINARY,
    **dict.fromkeys(_SAME, lambda _, values: values[0]),
    "Abs": _unary(np.abs),
    "AddN": lambda _, values: np.sum(values, axis=0, dtype=values[0].dtype),
    "All": _reduced(np.all),
    "Any": _reduced(np.any),
    "BroadcastTo": lambda _, values: np.broadcast_to(values[0], _numbers(values[1])),
    "Cast": _cast,
    "Ceil": _unary(np.ceil),
    "ConcatV2": lambda _, values: np.concatenate(values[:-1], _axis(values[-1])),
    "Exp": _unary(np.exp),
    "ExpandDims": lambda _, values: np.expand_dims(values[0], _axis(values[1])),
    "Fill": lambda _, values: np.broadcast_to(values[1], _numbers(values[0])),
    "Floor": _unary(np.floor),
    "Gather": _gather,
    "GatherNd": _gather_nd,
    "GatherV2": _gather,
    "Inv": lambda _, values: 1 / values[0],
    "Log": _unary(np.log),
    "LogicalNot": _unary(np.logical_not),
    "Max": _reduced(np.max),
    "Mean": _reduced(np.mean),
    "Min": _reduced(np.min),
    "Neg": _unary(np.negative),
    "OnesLike": _unary(np.ones_like),
    "Pack": lambda node, values: np.stack(values, attr(node, "axis").i),
    "Prod": _reduced(np.prod),
    "Rank": lambda _, values: np.array(values[0].ndim, np.int32),
    "Reciprocal": lambda _, values: 1 / values[0],
    "Reshape": lambda _, values: values[0].reshape(_numbers(values[1])),
    "Rint": _unary(np.rint),
    "Round": _unary(np.rint),
    "Rsqrt": lambda _, values: 1 / np.sqrt(values[0]),
    "Select": _select,
    "Shape": lambda _, values: np.array(values[0].shape, np.int32),
    "Sigmoid": lambda _, values: 1 / (1 + np.exp(-values[0])),
    "Sign": _unary(np.sign),
    "Size": lambda _, values: np.array(values[0].size, np.int32),
    "Slice": _slice,
    "Sqrt": _unary(np.sqrt),
    "Square": _unary(np.square),
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Sum": _reduced(np.sum),
    "Tile": lambda _, values: np.tile(values[0], _numbers(values[1])),
    "Transpose": lambda _, values: np.transpose(values[0], _numbers(values[1])),
    "ZerosLike": _unary(np.zeros_like),
}


def _split(node: Proto, values: list[Array]) -> list[Array]:
    axis, source = _axis(values[0]), values[1]
    if (count := attr(node, "num_split").i) > source.shape[axis]:
        raise ValueError("numpy makes a list of as many parts as are asked for")
    return np.split(source, count, axis)


def _split_sizes(_: Proto, values: list[Array]) -> list[Array]:
    axis, sizes = _axis(values[2]), values[1]
    rest = values[0].shape[axis] - sizes[sizes >= 0].sum()  # -1, at most once, means the rest
    return np.split(values[0], np.cumsum(np.where(sizes < 0, rest, sizes))[:-1], axis)


_OUTPUTS: Mapping[str, Callable[[Proto, list[Array]], list[Array]]] = {
    "IdentityN": lambda _, values: values,
    "Split": _split,
    "SplitV": _split_sizes,
    "Unpack": lambda node, values: [*np.moveaxis(values[0], attr(node, "axis").i, 0)],
}

# Operations whose results may be much larger than their inputs, with a bound of the bytes.
_GROWS: Mapping[str, Callable[[list[Array]], float]] = {
    **dict.fromkeys(_BINARY, _broadcast_bytes),
    **dict.fromkeys(("AddN", "ConcatV2", "Pack"), lambda values: sum(float(v.nbytes) for v in values)),
    "BroadcastTo": lambda values: extent(values[1].ravel()) * values[0].itemsize,
    "Fill": lambda values: extent(values[0].ravel()) * values[1].itemsize,
    **dict.fromkeys(
        ("Gather", "GatherNd", "GatherV2"), lambda values: float(values[0].nbytes) * values[1].size
    ),
    "Tile": lambda values: extent(values[1].ravel()) * values[0].nbytes,
}
