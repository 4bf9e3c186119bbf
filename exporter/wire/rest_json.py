"""Convert requests in the JSON of TF Serving's REST interface to numpy arrays, by a signature's types.

Row format is `{"instances": [...]}`, columnar `{"inputs": ...}`; `{"b64": "..."}` is a binary string; and
classify and regress take `{"context": {...}, "examples": [{...}]}`.
Source: https://www.tensorflow.org/tfx/serving/api_rest and tensorflow_serving/util/json_tensor.cc.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

Json = Any  # a value of `json.loads`

_INT64_MIN, _UINT64_MAX = -(1 << 63), (1 << 64) - 1
_INTEGERS = {DType.of(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}

# Types that TensorFlow Serving reads from JSON (`AddValueToTensor` of json_tensor.cc) and writes as JSON
# (`AddSingleValueAndAdvance`). This module accepts more types: `serve-model predict` sends them by gRPC.
REST_TYPES = frozenset(
    {DType.FLOAT, DType.DOUBLE, DType.BOOL, DType.STRING, *_INTEGERS - {DType.UINT16}},
)

# Signs that a JSON text may have a number beyond float64. A hook for each number is slow, and so is one
# pattern for both.
_MAY_OVERFLOW = (re.compile(r"[eE]\+?[0-9]{3}"), re.compile(r"[0-9]{309}"))


_NO_SPACE = dict.fromkeys(map(ord, " \t\n\v\f\r"))  # the white space of C, as absl skips it: JSON has fewer
_BASE64 = re.compile(r"([A-Za-z0-9+/]*)([=.]*)")
# JSON's white space alone: `\s` would accept texts that the server refuses.
_SPACE = re.compile(r"[ \t\n\r]*")
_MOST_DIMENSIONS = 254  # of a tensor (TensorShape::MaxDimensions); numpy takes fewer, and says so
LONG_BYTES = 4 << 20  # as Python objects this may take 80 MB: longer bodies are read in blocks
_BLOCK_BYTES = 256 << 10
_LISTS = ("instances", "inputs", "examples")
# The limit of lists, objects and strings in one value longer than `LONG_BYTES`: as Python objects each takes
# some 60 bytes, or 20 times its text.
MOST_IN_ONE = 1 << 20


# A request is read block by block because numbers as Python objects take ten times the memory of their text.
class LongList(Struct, frozen=True):
    """A list in the text of a long request, which is read again, block by block, at each use.

    `begin` is the offset of its opening bracket.
    """

    text: str
    begin: int
    decoder: json.JSONDecoder

    def blocks(self) -> Generator[list[Json], None, int]:
        """Yield the list's items in blocks; for an empty list one empty block.

        The generator returns the offset after the list. While iterated it raises ValueError, or its subclass
        JSONDecodeError, if the list is nested too deeply, is not JSON, or has an item of too many parts or a
        number that is too large.
        """
        text, at = self.text, _space(self.text, self.begin + 1)
        if text.startswith("]", at):
            yield []
            return at + 1
        while True:
            try:
                found = self._until_a_comma(at)
                block, at = found or self._one_by_one(at)
            except RecursionError:
                raise ValueError("nested too deeply") from None
            yield block
            if not found:
                if text.startswith("]", at):
                    return at + 1
                at = _skip_comma(text, at)

    def _until_a_comma(self, at: int) -> tuple[list[Json], int] | None:
        """Return the items from offset `at` to some comma, and the offset after it.

        None without such a comma. ValueError if a number is too large, RecursionError if an item nests too
        deeply.
        """
        # The text before a comma parses as a list only if the comma separates two items: inside an item a
        # bracket or a quote is open, and after the list there are a key and a colon.
        for before in ("],", "},", ","):
            cut = self.text.rfind(before, at, at + _BLOCK_BYTES) + len(before)
            if cut > at:
                with suppress(json.JSONDecodeError):
                    return self.decoder.decode(f"[{self.text[at : cut - 1]}]"), cut
        return None

    def _one_by_one(self, at: int) -> tuple[list[Json], int]:
        """Return some items from offset `at`, at least one, and the offset of the comma or bracket after.

        ValueError, or its subclass JSONDecodeError, if an item has too many parts, a number is too large, or
        the text is not JSON; RecursionError if an item nests too deeply.
        """
        items, end = [], at + _BLOCK_BYTES
        while True:
            item, at = _value(self.text, _space(self.text, at), self.decoder)
            items.append(item)
            at = _space(self.text, at)
            if at > end or not self.text.startswith(",", at):
                return items, at
            at += 1


def parse_request(body: bytes | bytearray) -> dict[str, Json]:
    """Return the object in a request's JSON body; `NaN`, `Infinity` and `-Infinity` are numbers.

    In a body of more than `LONG_BYTES`, a single row or value may have at most `MOST_IN_ONE` parts, and the
    lists of rows, columns and examples are left in their text (`LongList`). The last value of a key that an
    object has twice counts.

    Raises:
        ValueError: it is not JSON, with the place, or not an object, or a value is too large.
    """
    if not body:
        raise ValueError("JSON Parse error: The document is empty")
    try:
        text = body.decode("utf-8-sig")
        document = _parse(text)
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


def _parse(text: str) -> Json:
    # Python reads 1e999 as infinity; the server refuses it
    may_overflow = any(pattern.search(text) for pattern in _MAY_OVERFLOW)
    decoder = json.JSONDecoder(parse_float=_finite if may_overflow else None)
    if len(text) > LONG_BYTES:
        return _long_document(text, decoder)
    try:
        return decoder.decode(text)
    except RecursionError:
        return _parse_deep(text, decoder)


def _parse_deep(text: str, decoder: json.JSONDecoder) -> Json:
    """Return the value that `decoder.decode` gives, without recursion.

    JSONDecodeError if the text is not JSON, ValueError if a number is too large.
    """
    root: list[Json] = []  # ten times slower than the decoder, and only for texts nested too deeply for it
    open_: list[list[Json] | dict[str, Json]] = [root]
    at, wants = _space(text, 0), "value"
    key = ""
    while True:
        inner, here = open_[-1], text[at : at + 1]
        if inner is root and root and wants != "value":
            if at < len(text):
                raise json.JSONDecodeError("Extra data", text, at)
            return root[0]
        closes = "}" if isinstance(inner, dict) else "]"
        if inner is not root and here == closes and wants in ("end", "first"):
            open_.pop()
            at, wants = _space(text, at + 1), "end"
            continue
        if wants == "end":
            if here != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at, wants = _space(text, at + 1), "value"
            here = text[at : at + 1]
        if isinstance(inner, dict):
            key, at = _key(text, at, decoder)
            here = text[at : at + 1]
        value: Json
        if here in ("[", "{"):
            value = [] if here == "[" else {}
            at, wants = _space(text, at + 1), "first"
        else:
            value, at = decoder.raw_decode(text, at)
            at, wants = _space(text, at), "end"
        if isinstance(inner, dict):
            inner[key] = value
        else:
            inner.append(value)
        if wants == "first":
            open_.append(value)


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _key(text: str, at: int, decoder: json.JSONDecoder) -> tuple[str, int]:
    """Return the key of an object at offset `at`, and the offset of its value.

    JSONDecodeError if none is there.
    """
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
    key, at = decoder.raw_decode(text, at)
    at = _space(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
    return key, _space(text, at + 1)


def _long_document(text: str, decoder: json.JSONDecoder) -> Json:
    at = _space(text, 0)
    if not text.startswith("{", at):
        return _value(text, at, decoder)[0]
    document, at = _long_object(text, at, decoder, _LISTS)
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return document


def _long_object(
    text: str, at: int, decoder: json.JSONDecoder, lists: Sequence[str]
) -> tuple[dict[str, Json], int]:
    """Return the object at offset `at`, and the offset after it, with some of its lists as `LongList`.

    These are the lists under the keys `lists`; an empty `lists` means all. If `lists` is not empty, all lists
    of an object under the key `inputs` are such, too. ValueError, or its subclass JSONDecodeError, if the
    text is not JSON, a list nests too deeply, a value has too many parts, or a number is too large;
    RecursionError if another value nests too deeply.
    """
    found: dict[str, Json] = {}
    at = _space(text, at + 1)
    while found or not text.startswith("}", at):
        key, at = _key(text, at, decoder)
        if text.startswith("[", at) and (key in lists or not lists):
            found[key] = LongList(text, at, decoder)
            at = _end(found[key].blocks())
        elif text.startswith("{", at) and lists and key == "inputs":
            found[key], at = _long_object(text, at, decoder, ())
        else:
            found[key], at = _value(text, at, decoder)
        at = _space(text, at)
        if text.startswith("}", at):
            break
        at = _skip_comma(text, at)
    return found, _space(text, at + 1)


def _value(text: str, at: int, decoder: json.JSONDecoder) -> tuple[Json, int]:
    """Return the value of a long document at offset `at`, and the offset after it.

    ValueError if the value is long and has more than `MOST_IN_ONE` lists, objects and strings, or a number is
    too large; JSONDecodeError if it is not JSON; RecursionError if it nests too deeply.
    """
    with suppress(json.JSONDecodeError):
        value, size = decoder.raw_decode(text[at : at + LONG_BYTES])
        if size < LONG_BYTES:  # else it may be a number that goes on
            return value, at + size
    cut, parts = at, 0
    while parts <= MOST_IN_ONE and cut < len(text):
        begin, cut = cut, cut + _BLOCK_BYTES
        parts += text.count("[", begin, cut) + text.count("{", begin, cut) + text.count('"', begin, cut) // 2
    try:
        value, size = decoder.raw_decode(text[at:cut])
    except json.JSONDecodeError as error:
        if cut < len(text):
            raise ValueError(f"a value of more than {MOST_IN_ONE} lists, objects and strings") from None
        raise json.JSONDecodeError(error.msg, text, at + error.pos) from None
    return value, at + size


def _end(blocks: Generator[list[Json], None, int]) -> int:
    while True:
        try:
            next(blocks)
        except StopIteration as over:
            return int(over.value)


def _skip_comma(text: str, at: int) -> int:
    if not text.startswith(",", at):
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return _space(text, at + 1)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:60]} is too big to be stored in double")
    return number


def signature_name(document: Mapping[str, Json]) -> str:
    """Return the name of the signature in a request; "" if it names none.

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
    """Return the inputs of a predict request as arrays by name, for its `SignatureDef`.

    Strings are `bytes` objects. Without `check_shapes` the arrays may have other shapes than the signature
    says. Columns that the signature lacks are ignored; in rows they are an error.

    Raises:
        ValueError: an input is wrong; the message names it and the expected form.
        NoJsonForm: a ValueError; JSON has no form for an input's type.
    """
    if ("instances" in document) == ("inputs" in document):
        raise ValueError("expected either the key 'instances' (rows) or the key 'inputs' (columns)")
    rows = document.get("instances")
    if isinstance(rows, LongList):
        return _long_rows(rows, signature, check_shapes)
    # TF Serving leaves shapes to the model's operations, some of which accept more than the signature says
    columns = _rows(rows, signature) if "instances" in document else _columns(document, signature)
    infos = signature.inputs
    return {name: to_array(value, name, infos[name], check_shapes) for name, value in columns.items()}


def _long_rows(rows: LongList, signature: Proto, check_shapes: bool) -> dict[str, NDArray[Any]]:
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in sorted(signature.inputs)}
    first, is_named = 0, None
    for block in rows.blocks():
        for name, values in _rows(block, signature, first, is_named).items():
            parts[name].append(to_array(values, name, signature.inputs[name], False))
        first, is_named = first + len(block), _is_named(block[0])
    infos = signature.inputs
    return {name: _joined(arrays, name, infos[name], check_shapes) for name, arrays in parts.items()}


def _joined(arrays: Sequence[NDArray[Any]], name: str, info: Proto, check_shape: bool) -> NDArray[Any]:
    for array in arrays:
        if array.shape[1:] != arrays[0].shape[1:]:
            raise ValueError(
                f"input {name!r}: expected items of the shape {[*arrays[0].shape[1:]]}, found one of "
                f"{[*array.shape[1:]]}"
            )
    whole = np.concatenate(arrays)
    if check_shape:
        _check_shape(whole.shape, name, DType(info.dtype), info.tensor_shape)
    return whole


def examples_input(document: Mapping[str, Json]) -> Proto:
    """Return the `serving.Input` of a classify or regress request, with its examples and any context.

    Raises:
        ValueError: an example or the context is wrong, or there is no example; the message says what was
            expected.
    """
    examples = document.get("examples")
    if isinstance(examples, LongList):
        examples = chain.from_iterable(examples.blocks())
    elif not isinstance(examples, list):
        examples = ()
    message = message_class("serving.Input")()
    if "context" in document:
        _fill_example(message.example_list_with_context.context, document["context"], "context")
        target = message.example_list_with_context.examples
    else:
        target = message.example_list.examples
    for number, example in enumerate(examples):
        _fill_example(target.add(), example, f"example {number}")
    if not target:
        raise ValueError("expected the key 'examples' with a list of objects")
    return message


def serialized_examples(message: Proto) -> NDArray[Any]:
    """Return the array that a server feeds for a `serving.Input`: serialised examples, `bytes` objects [n].

    An example has the features of the context, too, except those that it has itself.
    """
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
    """Return a JSON value as the tensor that `info`, a TensorInfo, describes.

    `name` is the input's, for errors. With `check_shape` its shape must be the one in `info`. ValueError if
    the value does not fit; NoJsonForm, a ValueError, if JSON has no form for its type.
    """
    if isinstance(value, LongList):
        parts = [to_array(block, name, info, False) for block in value.blocks()]
        return _joined(parts, name, info, check_shape)
    dtype = DType(info.dtype)
    if info.WhichOneof("encoding") != "name":
        raise ValueError(f"input {name!r} is not a dense tensor, and JSON has no form for it")
    shape = _shape_of(value)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(
            f"input {name!r} has {len(shape)} dimensions, and a tensor {_MOST_DIMENSIONS} at most"
        )
    array = _plain_array(value, shape, dtype)
    if array is None:
        array = _checked_array(value, shape, dtype, name)
    if check_shape:
        _check_shape(shape, name, dtype, info.tensor_shape)
    return array


def _checked_array(value: Json, shape: tuple[int, ...], dtype: DType, name: str) -> NDArray[Any]:
    """Return a JSON value as an array, converted item by item; ValueError names one that does not fit.

    `shape` is that of its nested lists, `name` the input's. NoJsonForm, a ValueError, if JSON has no form for
    `dtype`.
    """
    leaves = list(_leaves(value, shape, name, 0))
    convert = _converter(dtype)
    try:
        items = [convert(leaf) for leaf in leaves]
    except ValueError as exc:
        raise ValueError(f"input {name!r}: expected {dtype.label}, found {exc}") from None
    if dtype.is_floating:
        return _rounded(np.array(items, np.float64), dtype).reshape(shape)
    array = np.empty(shape, object if dtype is DType.STRING else dtype.numpy)
    array.reshape(-1)[:] = items
    return array


def _plain_array(value: Json, shape: tuple[int, ...], dtype: DType) -> NDArray[Any] | None:
    """Return nested lists of numbers as an array, eight times as fast as `_checked_array`.

    None for a value that must be converted item by item, or does not fit.
    """
    items: Sequence[Json] = [value]
    for size in shape:
        # exact types here and below: True is an instance of int, and no number to the server
        if set(map(type, items)) != {list} or set(map(len, items)) != {size}:
            return None
        items = list(chain.from_iterable(items))
    kinds = set(map(type, items))
    if dtype.is_floating and kinds and kinds <= {int, float}:
        with suppress(OverflowError):
            # integers go through float64, too, as in the server: rounded once, some would differ
            return _rounded(np.array(items, np.float64), dtype).reshape(shape)
    if dtype in _INTEGERS and kinds == {int}:
        least, greatest = dtype.limits
        if least <= min(items) and max(items) <= greatest:
            return np.array(items, dtype.numpy).reshape(shape)
    return None


def _rounded(doubles: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return numbers rounded to the float type `dtype`, as the server does; too large ones are infinite."""
    with np.errstate(over="ignore"):
        return doubles.astype(dtype.numpy)


def _rows(
    rows: Json, signature: Proto, first: int = 0, is_named: bool | None = None
) -> dict[str, list[Json]]:
    """Return rows as {input: its value in each row}.

    `first` is the number of the first row, for errors. `is_named` says if earlier rows were objects of
    inputs, None if there are none. ValueError, which names the row, if a row has another form than the
    others, or not exactly the signature's inputs; also if there is no row.
    """
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"expected a list with at least one row in 'instances', found {_brief(rows)}")
    names = sorted(signature.inputs)
    named = list(map(_is_named, rows))
    if is_named is False and any(named):
        raise ValueError(
            f"row {first + named.index(True)}: expected a value, as before, found an object of inputs"
        )
    if not any(named) and not is_named:
        if len(names) != 1:
            raise ValueError(f"expected each row to be an object with the inputs {', '.join(names)}")
        return {names[0]: rows}
    for number, row in enumerate(rows):
        if not named[number] or sorted(row) != names:
            found = ", ".join(sorted(row)) if named[number] else _brief(row)
            raise ValueError(f"row {first + number}: expected the inputs {', '.join(names)}, found {found}")
    return {name: [row[name] for row in rows] for name in names}


def _is_named(row: Json) -> bool:
    return isinstance(row, dict) and not _is_binary(row)


def _columns(document: Mapping[str, Json], signature: Proto) -> dict[str, Json]:
    columns, names = document["inputs"], sorted(signature.inputs)
    if not _is_named(columns):
        if len(names) != 1:
            raise ValueError(f"expected 'inputs' to be an object with the inputs {', '.join(names)}")
        return {names[0]: columns}
    if not columns.keys() >= set(names):
        found = ", ".join(sorted(columns)) or "none"
        raise ValueError(f"expected the inputs {', '.join(names)} in 'inputs', found {found}")
    return {name: columns[name] for name in names}  # the server ignores what else there is


def _shape_of(value: Json) -> tuple[int, ...]:
    """Return the shape of nested lists, by their first items; () for any other value."""
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


class NoJsonForm(ValueError):
    """TensorFlow Serving's JSON has no form for values of this type."""


def _converter(dtype: DType) -> Callable[[Json], Any]:
    if dtype.is_floating:
        return _float
    if dtype in _INTEGERS:
        return lambda leaf: _integer(leaf, dtype)
    if dtype is DType.BOOL:
        return _bool
    if dtype is DType.STRING:
        return _string
    raise NoJsonForm(f"JSON has no form for {dtype.label} tensors")


def _float(leaf: Json) -> float:
    """Return a JSON number as a float, infinity and NaN included; ValueError for any other value.

    ValueError also for an integer beyond float64. The server's `GetFloat` accepts the same numbers.
    """
    if isinstance(leaf, bool) or not isinstance(leaf, int | float):
        raise ValueError(_brief(leaf))
    try:
        return float(leaf)
    except OverflowError:
        raise ValueError(f"{_brief(leaf)}, which is too large") from None


def _integer(leaf: Json, dtype: DType) -> int:
    if isinstance(leaf, bool) or not isinstance(leaf, int):
        raise ValueError(_brief(leaf))
    least, greatest = dtype.limits
    if not least <= leaf <= greatest:
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


def _is_binary(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def _binary(value: Json) -> bytes | None:
    """Return the bytes of `{"b64": "..."}`; None for any other value, ValueError if it is not base64."""
    if not _is_binary(value):
        return None
    data = _unescaped(value["b64"])
    if data is None:
        raise ValueError(f"{_brief(value)}, which is not base64")
    return data


def _unescaped(text: str) -> bytes | None:
    """Return the bytes that absl::Base64Unescape reads from a text; None for a text that it refuses."""
    # the standard alphabet, white space anywhere, and at the end all of the padding, of `=` or `.`, or none
    # of it (absl/strings/escaping.cc)
    found = _BASE64.fullmatch(text) or _BASE64.fullmatch(text.translate(_NO_SPACE))
    if found is None:
        return None
    digits, lack = found[1], -len(found[1]) % 4
    if lack == 3 or len(found[2]) not in (0, lack):
        return None
    return base64.b64decode(digits + "=" * lack)


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
    """Return the field of `Feature` for a JSON value, and the item to append to it.

    The field is `int64_list` (also for true and false), `float_list` (also for integers beyond 64 bits) or
    `bytes_list`. ValueError for another value, and for an integer that fits into uint64 but not into int64.
    """
    if isinstance(value, int) and _INT64_MIN <= value <= _UINT64_MAX:
        return "int64_list", _integer(int(value), DType.INT64)  # `1` and `true` are integers, `1.0` is not
    if isinstance(value, int | float):  # to the server, an integer beyond 64 bits is a decimal number
        return "float_list", float(_rounded(np.array(_float(value)), DType.FLOAT))
    return "bytes_list", _string(value)


def _brief(value: Json) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
