"""Convert requests in the JSON of TF Serving's REST interface to numpy arrays, by a signature's types.

Row format is `{"instances": [...]}`, columnar `{"inputs": ...}`; `{"b64": "..."}` is a binary string; and
classify and regress take `{"context": {...}, "examples": [{...}]}`.
Source: https://www.tensorflow.org/tfx/serving/api_rest and tensorflow_serving/util/json_tensor.cc.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

Json = Any
"""What `json.loads` gives."""

_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1
_FLOATS = {DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16}
_INTEGERS = {
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.UINT8,
    DType.UINT16,
    DType.UINT32,
    DType.UINT64,
}


_MAY_OVERFLOW = (re.compile(r"[eE]\+?[0-9]{3}"), re.compile(r"[0-9]{309}"))
"""Where a JSON text may have a number beyond float64: a hook for each number is slow, and one pattern for
both is, too.
"""


def parse_request(body: bytes) -> dict[str, Json]:
    """The object that a request's body holds; `NaN`, `Infinity` and `-Infinity` are numbers.

    Raises:
        ValueError: where it is no JSON, or that it is no object.
    """
    if not body:
        raise ValueError("JSON Parse error: The document is empty")
    try:
        text = body.decode("utf-8-sig")
        may_overflow = any(pattern.search(text) for pattern in _MAY_OVERFLOW)
        document = json.loads(text, parse_float=_finite if may_overflow else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON Parse error: {error.msg} at offset: {error.pos}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"JSON Parse error: not UTF-8 at offset: {error.start}") from None
    except RecursionError:
        raise ValueError("JSON Parse error: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"JSON Parse error: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"JSON Value: {_brief(document)} Is not object")
    return document


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:60]} is too big to be stored in double")
    return number


def signature_name(document: Mapping[str, Json]) -> str:
    """The signature that a request names; empty if it names none.

    Raises:
        ValueError: it is not a string.
    """
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise ValueError(f"expected a string as 'signature_name', found {_brief(name)}")
    return name


def predict_inputs(
    document: Mapping[str, Json], signature: Proto, *, check_shapes: bool = True
) -> dict[str, NDArray[Any]]:
    """The inputs of a predict request by name; strings are `bytes` in an object array.

    Args:
        document: the request.
        signature: its `SignatureDef`.
        check_shapes: compare shapes with the signature's. TF Serving leaves that to the model's operations,
            some of which take more than the signature says.

    Raises:
        ValueError: what is wrong, which input it is about and what was expected.
    """
    if ("instances" in document) == ("inputs" in document):
        raise ValueError("expected either the key 'instances' (rows) or the key 'inputs' (columns)")
    columns = _rows(document, signature) if "instances" in document else _columns(document, signature)
    infos = signature.inputs
    return {name: to_array(value, name, infos[name], check_shapes) for name, value in columns.items()}


def examples_input(document: Mapping[str, Json]) -> Proto:
    """The `serving.Input` of a classify or regress request.

    Raises:
        ValueError: what is wrong, and what was expected.
    """
    examples = document.get("examples")
    if not isinstance(examples, list) or not examples:
        raise ValueError("expected the key 'examples' with a list of objects")
    message = message_class("serving.Input")()
    if "context" in document:
        _fill_example(message.example_list_with_context.context, document["context"], "context")
        target = message.example_list_with_context.examples
    else:
        target = message.example_list.examples
    for number, example in enumerate(examples):
        _fill_example(target.add(), example, f"example {number}")
    return message


def serialized_examples(message: Proto) -> NDArray[Any]:
    """What a server feeds for a `serving.Input`: each example, with the context's features, serialised."""
    found = message.example_list.examples or message.example_list_with_context.examples
    merged = []
    for example in found:
        whole = message_class("Example")()
        whole.CopyFrom(message.example_list_with_context.context)
        for name, feature in example.features.feature.items():
            whole.features.feature[name].CopyFrom(feature)
        merged.append(whole.SerializeToString(deterministic=True))
    array = np.empty(len(merged), object)
    array[:] = merged
    return array


def to_array(value: Json, name: str, info: Proto, check_shape: bool = True) -> NDArray[Any]:
    """A JSON value as the tensor that `info`, a TensorInfo, describes; its shape is compared if asked.

    Raises:
        ValueError: another type or shape, numbers out of range, lists of unequal length.
    """
    dtype = DType(info.dtype)
    if info.WhichOneof("encoding") != "name":
        raise ValueError(f"input {name!r} is not a dense tensor, and JSON has no form for it")
    shape = _shape_of(value)
    array = _plain_array(value, shape, dtype)
    if array is None:
        array = _checked_array(value, shape, dtype, name)
    if check_shape:
        _check_shape(shape, name, dtype, info.tensor_shape)
    return array


def _checked_array(value: Json, shape: tuple[int, ...], dtype: DType, name: str) -> NDArray[Any]:
    """Convert one item after another, and say which one does not fit."""
    leaves = list(_leaves(value, shape, name, 0))
    convert = _converter(dtype)
    try:
        items = [convert(leaf) for leaf in leaves]
    except ValueError as exc:
        raise ValueError(f"input {name!r}: expected {dtype.label}, found {exc}") from None
    array = np.empty(shape, object if dtype is DType.STRING else dtype.numpy)
    array.reshape(-1)[:] = items
    return array


def _plain_array(value: Json, shape: tuple[int, ...], dtype: DType) -> NDArray[Any] | None:
    """What `_checked_array` gives, eight times as fast, for numbers of which none needs a second look."""
    items: Sequence[Json] = [value]
    for size in shape:
        if set(map(type, items)) != {list} or set(map(len, items)) != {size}:
            return None
        items = list(chain.from_iterable(items))
    kinds = set(map(type, items))
    if dtype in _FLOATS and kinds and kinds <= {int, float}:
        return _plain_floats(items, shape, dtype, has_integers=int in kinds)
    if dtype in _INTEGERS and kinds == {int}:
        bounds = np.iinfo(dtype.numpy)
        if bounds.min <= min(items) and max(items) <= bounds.max:
            return np.array(items, dtype.numpy).reshape(shape)
    return None


def _plain_floats(
    items: Sequence[Json], shape: tuple[int, ...], dtype: DType, *, has_integers: bool
) -> NDArray[Any] | None:
    limits = _limits(dtype)
    try:
        doubles = np.array(items, np.float64)
    except OverflowError:
        return None
    largest = np.max(np.abs(doubles), initial=0, where=np.isfinite(doubles))
    if largest > float(limits.max) or (has_integers and largest >= 1 << (limits.nmant + 1)):
        return None
    return doubles.astype(dtype.numpy).reshape(shape)


def _limits(dtype: DType) -> Any:
    return np.finfo(dtype.numpy) if dtype is not DType.BFLOAT16 else np.finfo(np.float32)


def _rows(document: Mapping[str, Json], signature: Proto) -> dict[str, list[Json]]:
    rows = document["instances"]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"expected a list with at least one row in 'instances', found {_brief(rows)}")
    names = sorted(signature.inputs)
    named = [isinstance(row, dict) and _binary(row) is None for row in rows]
    if not any(named):
        if len(names) != 1:
            raise ValueError(f"expected each row to be an object with the inputs {', '.join(names)}")
        return {names[0]: rows}
    for number, row in enumerate(rows):
        if not named[number] or sorted(row) != names:
            found = ", ".join(sorted(row)) if named[number] else _brief(row)
            raise ValueError(f"row {number}: expected the inputs {', '.join(names)}, found {found}")
    return {name: [row[name] for row in rows] for name in names}


def _columns(document: Mapping[str, Json], signature: Proto) -> dict[str, Json]:
    columns, names = document["inputs"], sorted(signature.inputs)
    if not isinstance(columns, dict) or _binary(columns) is not None:
        if len(names) != 1:
            raise ValueError(f"expected 'inputs' to be an object with the inputs {', '.join(names)}")
        return {names[0]: columns}
    if not columns.keys() >= set(names):
        found = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"expected the inputs {', '.join(names)} in 'inputs', found {found}")
    return {name: columns[name] for name in names}  # the server ignores what else there is


def _shape_of(value: Json) -> tuple[int, ...]:
    """The shape that the first items of nested lists tell."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _leaves(value: Json, shape: Sequence[int], name: str, level: int) -> Iterator[Json]:
    if level == len(shape):
        if isinstance(value, list):
            raise ValueError(f"input {name!r}: lists are nested deeper in some places than in others")
        yield value
        return
    if not isinstance(value, list) or len(value) != shape[level]:
        found = f"one of {len(value)}" if isinstance(value, list) else _brief(value)
        raise ValueError(
            f"input {name!r}: expected a list of {shape[level]} at dimension {level}, found {found}"
        )
    for item in value:
        yield from _leaves(item, shape, name, level + 1)


def _check_shape(shape: tuple[int, ...], name: str, dtype: DType, expected: Proto) -> None:
    if expected.unknown_rank:
        return
    sizes = [dim.size for dim in expected.dim]
    if len(sizes) != len(shape) or any(
        want not in (-1, size) for want, size in zip(sizes, shape, strict=True)
    ):
        wanted = ", ".join("?" if size < 0 else str(size) for size in sizes)
        raise ValueError(f"input {name!r}: expected {dtype.label}[{wanted}], found the shape {list(shape)}")


def _converter(dtype: DType) -> Callable[[Json], Any]:
    if dtype in _FLOATS:
        return lambda leaf: _float(leaf, dtype)
    if dtype in _INTEGERS:
        return lambda leaf: _integer(leaf, dtype)
    if dtype is DType.BOOL:
        return _bool
    if dtype is DType.STRING:
        return _string
    raise ValueError(f"JSON has no form for {dtype.label} tensors")


def _float(leaf: Json, dtype: DType) -> float:
    if isinstance(leaf, bool) or not isinstance(leaf, int | float):
        raise ValueError(_brief(leaf))
    # As the server does it: a number that this dtype cannot hold is refused, not rounded to infinity.
    limits = _limits(dtype)
    if isinstance(leaf, int) and not _INT64_MIN <= leaf <= _UINT64_MAX:
        leaf = _as_float(leaf)  # to the server, what no 64 bits hold is a decimal number
    if isinstance(leaf, int) and abs(leaf) >> (limits.nmant + 1):
        raise ValueError(f"{_brief(leaf)}, which would be rounded")
    if math.isfinite(leaf) and abs(leaf) > float(limits.max):
        raise ValueError(f"{_brief(leaf)}, which is too large")
    return float(leaf)


def _as_float(leaf: int) -> float:
    try:
        return float(leaf)
    except OverflowError:
        raise ValueError(f"{_brief(leaf)}, which is too large") from None


def _integer(leaf: Json, dtype: DType) -> int:
    if isinstance(leaf, bool) or not isinstance(leaf, int):
        raise ValueError(_brief(leaf))
    limits = np.iinfo(dtype.numpy)
    if not limits.min <= leaf <= limits.max:
        raise ValueError(f"{_brief(leaf)}, which is out of range")
    return leaf


def _bool(leaf: Json) -> bool:
    if not isinstance(leaf, bool):
        raise ValueError(_brief(leaf))
    return leaf


def _string(leaf: Json) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode()
    data = _binary(leaf)
    if data is None:
        raise ValueError(_brief(leaf))
    return data


def _binary(value: Json) -> bytes | None:
    """The bytes of `{"b64": "..."}`; None if the value is something else."""
    if not isinstance(value, dict) or value.keys() != {"b64"} or not isinstance(value["b64"], str):
        return None
    text = value["b64"].replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{_brief(value)}, which is not base64") from None


def _fill_example(example: Proto, features: Json, where: str) -> None:
    if not isinstance(features, dict):
        raise ValueError(f"{where}: expected an object of features, found {_brief(features)}")
    for name, content in features.items():
        values = content if isinstance(content, list) else [content]
        feature = example.features.feature[name]
        try:
            for value in values:
                _add_to_feature(feature, value)
        except ValueError as exc:
            raise ValueError(f"{where}, feature {name!r}: {exc}") from None


def _add_to_feature(feature: Proto, value: Json) -> None:
    kind, item = _feature_item(value)
    if feature.WhichOneof("kind") not in (None, kind):
        raise ValueError(f"expected one type of values, found {feature.WhichOneof('kind')} and {kind}")
    getattr(feature, kind).value.append(item)


def _feature_item(value: Json) -> tuple[str, int | float | bytes]:
    """The field of `Feature` for a JSON value, and the item: `1` and `true` are integers, `1.0` is not."""
    if isinstance(value, bool | int):
        return "int64_list", _integer(int(value), DType.INT64)
    if isinstance(value, float):
        return "float_list", _float(value, DType.FLOAT)
    return "bytes_list", _string(value)


def _brief(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
