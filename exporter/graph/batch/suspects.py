"""Numbers that may be the batch's, read where no rule tells how the rows of a request go on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy

import numpy as np

from exporter.graph.batch.trace import Trace
from exporter.graph.functions import reachable
from exporter.graph.nodes import Endpoint, attr, base_dtype, const_value, data_inputs, shape_of
from exporter.wire.protos import Proto

_MAX_SUSPECT_ELEMENTS = 64
_NUMBERS = (
    *("float_val", "double_val", "half_val", "float8_val", "scomplex_val", "dcomplex_val", "bool_val"),
    *("int_val", "int64_val", "uint32_val", "uint64_val"),
)
"""The fields of a TensorProto that hold numbers."""


def suspects(
    nodes: Mapping[str, Proto], traced: Trace, functions: Mapping[str, Proto], batch: int
) -> Iterator[str]:
    """Nodes with a number that may be the batch's, read where no rule tells how rows go on."""
    for name in traced.unclear:
        node = nodes[name]
        if any(_may_be(number, batch) for number in _own_numbers(node)):
            yield name
        for called in reachable([node], functions):
            if any(_is_suspect(inner, batch) for inner in functions[called].node_def):
                yield name
        yield from (
            source for source in _constants_before(nodes, node, traced) if _is_suspect(nodes[source], batch)
        )


def _may_be(number: float, batch: int) -> bool:
    return number == batch if batch == 1 else number > 0 and number % batch == 0


def _own_numbers(node: Proto) -> Iterator[int]:
    """Numbers in attributes: how many there are of something, and the first dimension of a shape."""
    for name in ("num", "num_split"):
        yield attr(node, name).i
    for name in ("shape", "element_shape"):
        yield from (dim.size for dim in attr(node, name).shape.dim[:1])


def _constants_before(nodes: Mapping[str, Proto], node: Proto, traced: Trace) -> Iterator[str]:
    """The constants that a node computes with beside what requests bring."""
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
    """True for a constant that holds, or is as long as, a number of rows."""
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
    """True if a constant is one value all along a dimension."""
    shape = shape_of(node.attr["value"].tensor.tensor_shape) or ()
    if _is_one_value(node):
        return True
    array = const_value(node)
    if array is None or array.shape != shape or not array.size:
        return False
    first = np.take(array, [0], axis)
    return bool((array == first).all())


def equal_row(node: Proto, axes: Collection[int]) -> np.ndarray | None:
    """A constant with a length of 1 along dimensions all along which it is one value; None if it is not."""
    if not all(rows_are_equal(node, axis) for axis in axes):
        return None
    if _is_one_value(node):  # which is not filled up to the length that it has
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
    """True if a constant is written as a number that fills its shape, or as none: zeros."""
    tensor = node.attr["value"].tensor
    if tensor.tensor_content or base_dtype(tensor.dtype).itemsize is None:
        return False
    return all(len(getattr(tensor, name)) <= 1 for name in _NUMBERS)
