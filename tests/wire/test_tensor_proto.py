"""TensorProto and numpy, against TensorFlow's own conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.tensor_proto import dtype_of, fill, to_array
from tests.support.budget import times

LABELS = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e5m2", "float8_e4m3fn", "int4", "uint4"),
]


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if draw(st.integers(0, 5)) == 0:
        strings = draw(
            st.lists(st.binary(max_size=5), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        )
        array = np.empty(len(strings), object)
        array[:] = strings
        return array.reshape(shape)
    dtype = DType.of(draw(st.sampled_from(LABELS))).numpy
    seed = draw(st.integers(0, 2**32 - 1))
    return (np.random.default_rng(seed).normal(size=shape) * 3).astype(dtype)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.shape != right.shape or dtype_of(left) != dtype_of(right):
        return False
    if left.dtype == object:
        return left.tolist() == right.tolist()
    if left.dtype.itemsize == 1:
        return left.tolist() == right.tolist()  # the unused bits of an int4 are anybody's
    return left.tobytes() == right.tobytes()


@given(arrays(), st.booleans())
@settings(max_examples=times(300), deadline=None)
def test_arrays_come_back(array: NDArray[Any], as_fields: bool) -> None:
    proto = protos.TensorProto()
    fill(proto, array, as_fields=as_fields)
    assert same(to_array(proto), array)


@given(arrays(), st.booleans())
@settings(max_examples=times(100), deadline=None)
def test_tensorflow_reads_what_is_written(array: NDArray[Any], as_fields: bool) -> None:
    import tensorflow as tf

    proto = protos.TensorProto()
    fill(proto, array, as_fields=as_fields)
    dtype = tf.as_dtype(int(dtype_of(array)))
    parsed = tf.io.parse_tensor(proto.SerializeToString(), dtype).numpy()
    assert same(np.asarray(parsed, object if dtype == tf.string else None), array)


@given(arrays())
@settings(max_examples=times(100), deadline=None)
def test_what_tensorflow_writes_is_read(array: NDArray[Any]) -> None:
    import tensorflow as tf

    written = tf.make_tensor_proto(array, shape=array.shape)
    assert same(to_array(protos.TensorProto.FromString(written.SerializeToString())), array)


@pytest.mark.parametrize("as_fields", [False, True])
@pytest.mark.parametrize("label", ["qint8", "quint8", "qint32", "qint16", "quint16"])
def test_arrays_of_quantised_types_hold_their_integers(label: str, as_fields: bool) -> None:
    import tensorflow as tf

    dtype = tf.as_dtype(label)
    array = np.array([[(1,), (100,)]], dtype.as_numpy_dtype)
    proto = protos.TensorProto()
    fill(proto, array, as_fields=as_fields)
    assert to_array(proto).tolist() == [[1, 100]]
    assert tf.io.parse_tensor(proto.SerializeToString(), dtype).numpy().tolist() == [[1, 100]]


@pytest.mark.parametrize("fields", [[("qint8", "i1"), ("other", "i1")], [("other", "i1")]])
def test_other_structures_have_no_type(fields: Any) -> None:
    with pytest.raises(ValueError, match="no TensorFlow type"):
        fill(protos.TensorProto(), np.zeros(1, fields))


def test_fields_are_those_of_a_stock_server() -> None:
    proto = protos.TensorProto()
    fill(proto, np.array([[1.5, 2.5]], np.float32), as_fields=True)
    assert list(proto.float_val) == [1.5, 2.5]
    assert not proto.tensor_content


def test_a_scalar_has_a_shape() -> None:
    proto = protos.TensorProto()
    fill(proto, np.array(3, np.int64))
    assert proto.HasField("tensor_shape")


def test_text_is_sent_as_utf8() -> None:
    proto = protos.TensorProto()
    fill(proto, np.array(["grün"]))
    assert list(proto.string_val) == ["grün".encode()]


@pytest.mark.parametrize("item", [3, np.int64(3), None, [1, 2], 1.5])
def test_what_is_no_string_is_refused(item: object) -> None:
    array = np.empty(1, object)
    array[0] = item
    with pytest.raises(TypeError, match="neither text nor bytes"):
        fill(protos.TensorProto(), array)


@pytest.mark.parametrize(("values", "expected"), [([], [0, 0, 0]), ([7], [7, 7, 7]), ([1, 2], [1, 2, 2])])
def test_a_missing_tail_repeats_the_last_value(values: list[int], expected: list[int]) -> None:
    proto = protos.TensorProto(dtype=DType.INT32, int_val=values)
    proto.tensor_shape.dim.add().size = 3
    assert to_array(proto).tolist() == expected


@pytest.mark.parametrize("dtype", [DType.INT32, DType.STRING, DType.DOUBLE])
def test_what_is_filled_in_may_have_a_limit(dtype: DType) -> None:
    proto = protos.TensorProto(dtype=dtype)
    proto.tensor_shape.dim.add().size = 1 << 50
    with pytest.raises(ValueError, match="would be filled in"):
        to_array(proto, 1 << 20)
    proto.tensor_shape.dim[0].size = 1000
    assert to_array(proto, 1 << 20).shape == (1000,)


def test_missing_strings_are_empty() -> None:
    proto = protos.TensorProto(dtype=DType.STRING)
    proto.tensor_shape.dim.add().size = 2
    assert to_array(proto).tolist() == [b"", b""]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": 99}, "unknown tensor type 99"),
        ({"dtype": DType.RESOURCE}, "cannot be sent by value"),
        ({"dtype": DType.FLOAT, "tensor_content": b"12345678"}, "2 float32 values do not fill the shape [3]"),
        ({"dtype": DType.FLOAT, "tensor_content": b"123"}, "not a whole number of float32"),
        ({"dtype": DType.FLOAT, "float_val": [1, 2, 3, 4]}, "4 values are too many"),
        ({"dtype": DType.STRING, "string_val": [b"a"] * 4}, "4 values are too many"),
    ],
)
def test_bad_tensors_are_refused(fields: dict[str, Any], text: str) -> None:
    proto = protos.TensorProto(**fields)
    proto.tensor_shape.dim.add().size = 3
    with pytest.raises(ValueError) as caught:
        to_array(proto)
    assert text in str(caught.value)


def test_an_unknown_shape_is_refused() -> None:
    proto = protos.TensorProto(dtype=DType.FLOAT)
    proto.tensor_shape.dim.add().size = -1
    with pytest.raises(ValueError, match="shape of a value must be known"):
        to_array(proto)


def test_types_unknown_to_tensorflow_are_refused() -> None:
    with pytest.raises(ValueError, match="datetime64"):
        fill(protos.TensorProto(), np.array(["2020-01-01"], "datetime64[s]"))
