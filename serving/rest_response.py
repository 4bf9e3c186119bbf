"""Convert a server's responses to the JSON of TF Serving's REST interface.

Source: https://www.tensorflow.org/tfx/serving/api_rest and tensorflow_serving/util/json_tensor.cc.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from exporter.wire.dtypes import DType
from exporter.wire.rest_json import REST_TYPES
from exporter.wire.tensor_proto import dtype_of

Json = Any
"""A value that `json.dumps` accepts."""

_SHORT_FLOATS = {DType.FLOAT, DType.HALF, DType.BFLOAT16}
_BLOCK = 1 << 16
"""The number of elements that are Python objects at a time."""


def texts(outputs: Mapping[str, NDArray[Any]], *, by_row: bool) -> Iterator[bytes]:
    """Yield the JSON of `rows` (with `by_row`) or `columns` in parts, as bytes, to save memory.

    Only a part of a long response is Python objects at a time. ValueError, while iterating, if REST or JSON
    has no form for a value; with `by_row` also if an output has no rows, or outputs have different numbers of
    rows.
    """
    _require_types(outputs)
    size = sum(map(_items, outputs.values()))
    if size <= _BLOCK:
        yield _text_of(rows(outputs) if by_row else columns(outputs))
    elif by_row:
        _require_rows(outputs)
        length = len(next(iter(outputs.values())))
        slices = ({name: array[part] for name, array in outputs.items()} for part in _parts(length, size))
        yield from _listed(b'{"predictions": ', (rows(each)["predictions"] for each in slices), b"}")
    else:
        yield b'{"outputs": ' if len(outputs) == 1 else b'{"outputs": {'
        for number, (name, array) in enumerate(outputs.items()):
            begin = b"" if len(outputs) == 1 else b", " * bool(number) + _text_of(name) + b": "
            if array.shape:
                parts = (to_json(array[part], name) for part in _parts(len(array), _items(array)))
                yield from _listed(begin, parts, b"")
            else:
                yield begin + _text_of(to_json(array, name))
        yield b"}" if len(outputs) == 1 else b"}}"


def _require_types(outputs: Mapping[str, NDArray[Any]]) -> None:
    for name, array in outputs.items():
        dtype = dtype_of(array)
        if array.size and dtype not in REST_TYPES:
            raise ValueError(
                f"Failed to write JSON value for tensor type: {dtype.label} (output {name!r}): use gRPC"
            )


def _items(array: NDArray[Any]) -> int:
    """Return the approximate number of Python objects that an array becomes; empty lists count, too."""
    return math.prod(max(size, 1) for size in array.shape)


def _parts(length: int, size: int) -> Iterator[slice]:
    step = max(1, length * _BLOCK // max(1, size))
    return (slice(start, start + step) for start in range(0, length, step))


def _listed(begin: bytes, lists: Iterator[Json], end: bytes) -> Iterator[bytes]:
    yield begin + b"["
    for number, items in enumerate(lists):
        yield b", " * bool(number) + _text_of(items)[1:-1]
    yield b"]" + end


def _text_of(document: Json) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def rows(outputs: Mapping[str, NDArray[Any]]) -> dict[str, Json]:
    """Return the row format: `predictions` has an item for each row; with several outputs, dicts by name.

    ValueError if an output has no rows, outputs have different numbers of rows, or JSON has no form for a
    value.
    """
    _require_rows(outputs)
    columns = {name: to_json(array, name) for name, array in outputs.items()}
    if len(columns) == 1:
        return {"predictions": next(iter(columns.values()))}
    values = zip(*columns.values(), strict=True)
    return {"predictions": [dict(zip(columns, row, strict=True)) for row in values]}


def _require_rows(outputs: Mapping[str, NDArray[Any]]) -> None:
    for name, array in outputs.items():
        if not array.shape:
            raise ValueError(f"output {name!r} is a scalar and has no rows: send 'inputs', not 'instances'")
    sizes = {name: len(array) for name, array in outputs.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the outputs have different numbers of rows: {sizes}")


def columns(outputs: Mapping[str, NDArray[Any]]) -> dict[str, Json]:
    """Return the columnar format: `outputs` has each output by name, or is the output if there is only one.

    ValueError if JSON has no form for a value.
    """
    values = {name: to_json(array, name) for name, array in outputs.items()}
    return {"outputs": next(iter(values.values())) if len(values) == 1 else values}


def classifications(examples: Sequence[Sequence[tuple[str, float]]]) -> dict[str, Json]:
    """Return the document whose `results` has a list of [label, score] pairs for each example."""
    return {"results": [[[label, shortest(score)] for label, score in row] for row in examples]}


def regressions(values: Sequence[float]) -> dict[str, Json]:
    """Return the document whose `results` has a number for each example."""
    return {"results": [shortest(value) for value in values]}


def to_json(array: NDArray[Any], name: str) -> Json:
    """Return a tensor as nested lists, or a scalar as its value.

    Strings become texts, or `{"b64": ...}` if the output's `name` ends in `_bytes`. Floats of at most 32 bits
    become the shortest decimals with the same value in their type. ValueError for complex numbers, for
    strings that are not UTF-8 under another name, and for a type that TensorFlow does not have.
    """
    dtype = dtype_of(array)
    if dtype is DType.STRING:
        binary = name.endswith("_bytes")
        return _map(array.tolist(), lambda item: _base64(item) if binary else _text(item, name))
    if dtype in {DType.COMPLEX64, DType.COMPLEX128}:
        raise ValueError(f"output {name!r}: JSON has no form for {dtype.label}")
    if dtype is DType.FLOAT:  # the same shortest decimals as below, 6 times as fast
        return array.astype("S32").astype("f8").tolist()
    if dtype in _SHORT_FLOATS:
        return _map(array.tolist(), lambda item: float(str(array.dtype.type(item))))
    return array.tolist()


def shortest(value: float) -> float:
    """Return the value of the shortest decimal with the same float32: 0.1, not 0.10000000149011612."""
    import numpy as np

    return float(str(np.float32(value)))


def _map(value: Json, convert: Any) -> Json:
    return [_map(item, convert) for item in value] if isinstance(value, list) else convert(value)


def _base64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"output {name!r} holds bytes that are not UTF-8: name it with the suffix _bytes when exporting"
        ) from None
