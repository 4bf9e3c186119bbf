"""JSON values to arrays: the fast way gives what the careful one gives, or leaves it to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.wire import rest_json
from exporter.wire.dtypes import DType
from exporter.wire.protos import message_class

DTYPES = [DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16, DType.INT8, DType.INT64, DType.UINT64]
NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.integers(-300, 300),
    st.sampled_from([2**24, 2**24 - 1, 2**53, 2**63, 2**64, 65504, 65505, 3.4e38, 3.5e38, 10**400, -0.0]),
)
LEAVES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=2), st.none())
VALUES = st.one_of(
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    st.lists(NUMBERS, max_size=5),
    st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), max_size=4)),
)


def outcome(make: Any) -> tuple[str, Any]:
    try:
        array = make()
    except ValueError as error:
        return "refused", str(error)
    return str(array.dtype), (array.shape, array.tobytes())


@given(VALUES, st.sampled_from(DTYPES))
@example([[1.5, 2], [3, math.nan]], DType.FLOAT)
@example([True, 1.0], DType.FLOAT)
@example([1, 2.0], DType.INT64)
@example([], DType.FLOAT)
@example([[], []], DType.INT8)
@example([128], DType.INT8)
@example([-1], DType.UINT64)
def test_both_ways_agree(value: Any, dtype: DType) -> None:
    shape = rest_json._shape_of(value)
    fast = rest_json._plain_array(value, shape, dtype)
    if fast is not None:
        careful = outcome(lambda: rest_json._checked_array(value, shape, dtype, "x"))
        assert outcome(lambda: fast) == careful


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.INT64])
def test_plain_numbers_take_the_fast_way(dtype: DType) -> None:
    array = rest_json._plain_array([[1, 2], [3, 4]], (2, 2), dtype)
    assert array is not None
    assert (array.dtype, array.tolist()) == (dtype.numpy, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        ([300], DType.INT8, "out of range"),
        ([-1], DType.UINT8, "out of range"),
        ([70000], DType.UINT16, "out of range"),
        ([1.0], DType.INT32, "found 1.0"),
    ],
)
def test_numbers_that_would_become_others_are_refused(value: Any, dtype: DType, text: str) -> None:
    info = message_class("TensorInfo")(name="x:0", dtype=int(dtype))
    info.tensor_shape.unknown_rank = True
    with pytest.raises(ValueError, match=text):
        rest_json.to_array(value, "x", info)


@pytest.mark.parametrize(
    ("body", "document"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": [NaN, Infinity, -Infinity]}', {"a": [math.nan, math.inf, -math.inf]}),
        (b'{"a": 1e300, "b": 1E+3}', {"a": 1e300, "b": 1000.0}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
    ],
)
def test_documents(body: bytes, document: Any) -> None:
    assert np.array_equal(repr(rest_json.parse_request(body)), repr(document))


@pytest.mark.parametrize("text", [b'{"a": 1e309}', b'{"a": -1E+400}', b'{"a": 1' + b"0" * 400 + b".0}"])
def test_numbers_that_no_double_holds(text: bytes) -> None:
    with pytest.raises(ValueError, match="too big"):
        rest_json.parse_request(text)
