"""Convert `TensorProto` to numpy and back, without TensorFlow.

A tensor is sent as `tensor_content` (the elements' bytes, little endian, row-major) or as a repeated field of
its type, of which a missing tail repeats the last value and no value at all means zeros (source:
tensorflow/core/framework/tensor.proto).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, varint

# The repeated field of each type, and the type of a field's items if it differs from the tensor's.
_FIELDS = {
    DType.FLOAT: "float_val",
    DType.DOUBLE: "double_val",
    DType.INT64: "int64_val",
    DType.UINT32: "uint32_val",
    DType.UINT64: "uint64_val",
    DType.BOOL: "bool_val",
    DType.COMPLEX64: "scomplex_val",
    DType.COMPLEX128: "dcomplex_val",
    DType.HALF: "half_val",
    DType.BFLOAT16: "half_val",
}
_FIELD_ITEMS: dict[DType, np.dtype[Any]] = {
    DType.COMPLEX64: np.dtype("<f4"),
    DType.COMPLEX128: np.dtype("<f8"),
    DType.HALF: np.dtype("<u2"),
    DType.BFLOAT16: np.dtype("<u2"),
}
# Protobuf encodes a packed field of these types exactly as numpy stores the array.
_WIRE_IS_MEMORY = {DType.FLOAT, DType.DOUBLE, DType.COMPLEX64, DType.COMPLEX128}
_LENGTH_DELIMITED = 2  # protocol buffers' wire type of packed fields
_STRING_BYTES = 24  # TensorFlow's memory for a string besides its bytes
# A message of 60 bytes could fill any shape. Callers that expect more give their own limit.
MOST_FILLED_BYTES = 1 << 20
# Types whose `tensor_content` depends on the implementation: they are sent only as fields.
_UNPACKED_CONTENT = {DType.INT4, DType.UINT4, DType.INT2, DType.UINT2}


def dtype_of(array: NDArray[Any]) -> DType:
    """Return TensorFlow's type of a numpy array; arrays of `object`, `bytes` and `str` hold strings.

    Arrays of a quantised type are TensorFlow's: structures with one field, which has the type's name.

    Raises:
        ValueError: TensorFlow has no such type.
    """
    if array.dtype.kind in "OSU":
        return DType.STRING
    names = array.dtype.names or (array.dtype.name,)
    try:
        return DType.of("+".join(names))
    except KeyError:
        raise ValueError(f"a numpy array of {array.dtype.name} has no TensorFlow type") from None


def to_arrays(
    protos: Mapping[str, Proto], most_filled_bytes: int = MOST_FILLED_BYTES
) -> dict[str, NDArray[Any]]:
    """Return the tensors of a message as arrays, by name, converted as by `to_array`.

    `most_filled_bytes` limits the bytes that are filled in for all tensors together, counted in the order of
    their names. ValueError and TypeError as `to_array`.
    """
    found = {}
    for name, proto in sorted(protos.items()):
        # in the order of names: a map has none, and the limit must strike the same tensor each time
        found[name] = to_array(proto, most_filled_bytes)
        most_filled_bytes -= max(0, found[name].nbytes - proto.ByteSize())
    return found


def to_array(proto: Proto, most_filled_bytes: int = MOST_FILLED_BYTES) -> NDArray[Any]:
    """Convert a tensor, of any pool, to a numpy array, perhaps read-only.

    Strings become `bytes` in an object array.

    Raises:
        ValueError: its type cannot be sent by value, its values do not fill its shape, or more than
            `most_filled_bytes` of its shape would have to be filled in.
        TypeError: the installed ml-dtypes lacks its type.
    """
    try:
        dtype = DType(proto.dtype)
    except ValueError:
        raise ValueError(f"unknown tensor type {proto.dtype}") from None
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise ValueError(f"the shape of a value must be known, found {list(shape)}")
    if dtype in {DType.RESOURCE, DType.VARIANT}:
        raise ValueError(f"a tensor of type {dtype.label} cannot be sent by value")
    if dtype is DType.STRING:
        return _strings(list(proto.string_val), shape, most_filled_bytes)
    if proto.tensor_content:
        values = _content(proto.tensor_content, dtype)
        if values.size != prod(shape):
            raise ValueError(f"{values.size} {dtype.label} values do not fill the shape {list(shape)}")
        return values.reshape(shape)
    return _padded(_field_values(proto, dtype), shape, most_filled_bytes)


def fill(proto: Proto, array: NDArray[Any], *, as_fields: bool = False) -> None:
    """Write an array into an empty `TensorProto`, in place.

    `as_fields` writes values in the repeated field of their type, as TF Serving's responses do, else as
    bytes. Strings, and integers of less than 8 bits, always go into the field. The items of an array of
    objects must be `str`, written as UTF-8, or `bytes`.

    Raises:
        ValueError: TensorFlow has no such type.
        TypeError: an item of an array of objects is neither `str` nor `bytes`.
    """
    dtype = dtype_of(array)
    proto.dtype = dtype
    for size in array.shape:
        proto.tensor_shape.dim.add().size = size
    if not array.shape:
        proto.tensor_shape.SetInParent()
    if dtype is DType.STRING:
        proto.string_val.extend(map(_string, array.ravel().tolist()))
    elif as_fields or dtype in _UNPACKED_CONTENT:
        _fill_field(proto, dtype, array)
    else:
        proto.tensor_content = array.astype(dtype.numpy, copy=False).tobytes()


def _string(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if not isinstance(item, bytes):  # bytes(3) would be three zeros
        raise TypeError(f"{item!r:.99} is neither text nor bytes")
    return item


def _field(dtype: DType) -> str:
    return _FIELDS.get(dtype, "float8_val" if dtype.name.startswith("FLOAT8") else "int_val")


def _fill_field(proto: Proto, dtype: DType, array: NDArray[Any]) -> None:
    name = _field(dtype)
    if dtype in _WIRE_IS_MEMORY:  # item by item a float costs 0.15 us: a wide output, milliseconds
        number = proto.DESCRIPTOR.fields_by_name[name].number
        data = array.astype(dtype.numpy, copy=False).tobytes()
        proto.MergeFromString(varint(number << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data)
    elif name == "float8_val":
        proto.float8_val = array.tobytes()
    elif name == "half_val":
        proto.half_val.extend(np.ascontiguousarray(array).view("<u2").ravel().tolist())
    else:
        getattr(proto, name).extend(array.astype(_number(dtype), copy=False).ravel().tolist())


def _field_values(proto: Proto, dtype: DType) -> NDArray[Any]:
    name = _field(dtype)
    if name == "float8_val":
        return _content(proto.float8_val, dtype)
    item: np.dtype[Any] = _FIELD_ITEMS.get(dtype, _number(dtype))
    # half_val has the bits of each value as an int32, and a complex value is two floats: hence the view below
    values: NDArray[Any] = np.array(getattr(proto, name), item)
    return values.view(dtype.numpy) if dtype in _FIELD_ITEMS else values.astype(dtype.numpy, copy=False)


def _number(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.int8) if dtype in _UNPACKED_CONTENT else dtype.numpy


def _content(data: bytes, dtype: DType) -> NDArray[Any]:
    if len(data) % dtype.numpy.itemsize:
        raise ValueError(f"{len(data)} bytes are not a whole number of {dtype.label} values")
    return np.frombuffer(data, dtype.numpy)


def _padded(values: NDArray[Any], shape: tuple[int, ...], most_filled_bytes: int) -> NDArray[Any]:
    size = _filled_size(values.size, values.itemsize, shape, most_filled_bytes)
    if values.size < size:
        filled = np.full(size, values[-1] if values.size else 0, values.dtype)
        filled[: values.size] = values
        values = filled
    return values.reshape(shape)


def _strings(values: list[bytes], shape: tuple[int, ...], most_filled_bytes: int) -> NDArray[Any]:
    last = values[-1] if values else b""
    size = _filled_size(len(values), _STRING_BYTES + len(last), shape, most_filled_bytes)
    array = np.empty(size, object)
    array[:] = values + [last] * (size - len(values))
    return array.reshape(shape)


def _filled_size(sent: int, itemsize: int, shape: tuple[int, ...], most_filled_bytes: int) -> int:
    """Return the number of elements of `shape`, of which `sent` came with `itemsize` bytes each.

    ValueError if more were sent, or too much would be filled in.
    """
    size = prod(shape)
    if sent > size:
        raise ValueError(f"{sent} values are too many for the shape {list(shape)}")
    if (size - sent) * itemsize > most_filled_bytes:
        raise ValueError(
            f"the shape {list(shape)} asks for {size} values and {sent} came: "
            f"more than {most_filled_bytes} bytes would be filled in"
        )
    return size
