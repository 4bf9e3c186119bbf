"""JSON documents on disk: each field declared once, as a `msgspec.Struct`, with its type, range and meaning.

A file's text is checked against the declaration as it is decoded, and an error names the path of the field;
unknown fields are ignored. Documents are written in ASCII. Nothing here does I/O.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from exporter.wire.dtypes import DType

# `(?!\n)`: to Python, `$` also stands before a line break that ends the text.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # graphs hold positions as int64
Measure = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=65_536)]
Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,64}$(?!\n)")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Crc = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}$(?!\n)")]
Release = Annotated[str, Meta(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$(?!\n)")]
Shape = tuple[Count, ...]
Moment = Annotated[datetime, Meta(tz=True)]
# mypy cannot read a `Literal` whose values are computed.
if TYPE_CHECKING:
    DtypeLabel = str
else:
    DtypeLabel = Literal[tuple(dtype.label for dtype in DType)]


class DocumentError(ValueError):
    """A document is not JSON, or a field is missing, malformed or out of range."""


class _Versioned(msgspec.Struct):
    format_version: Count


def doc(text: str) -> Meta:
    """Return the description of a field for its `Annotated` type; the reference of documents shows it."""
    return Meta(description=text)


def decode(text: str | bytes, type_: Any, where: str, *, written: Callable[[Any], bytes]) -> Any:
    """Return the one JSON object in `text` as a value of `type_`; errors call it `where`.

    `written` encodes a value as we write it: a text that differs from this encoding is searched for doubled
    keys.

    Raises:
        DocumentError: it is not strict JSON (RFC 8259, no NaN), nests too deep, names a key twice, or a field
            is missing, malformed or out of range.
    """
    found = _decoded(text, type_, where)  # a manifest of 10,000 tensors in 17 ms; checks in Python took 77
    text = text.encode() if isinstance(text, str) else text
    # a text equal to our own encoding names no key twice, and the comparison is much faster than a search
    if written(found) != text:
        refuse_doubled_keys(text, where)
    return found


def decode_head(text: str | bytes, type_: Any, where: str, *, end: str) -> Any:
    """Return the JSON object in `text` as a value of `type_`, which declares only some of its fields.

    `where` names the document in errors. `end` is a text in the document, such as a key. If all declared
    fields come before its first occurrence, doubled keys are searched only there.

    Raises:
        DocumentError: as `decode`.
    """
    text = text.encode() if isinstance(text, str) else text
    found = _decoded(text, type_, where)
    head, _, tail = text.partition(end.encode())
    head = head.rstrip(b", \n") + b"}"
    is_whole = False  # fields may follow that are not in the head
    with suppress(DocumentError):
        is_whole = bool(tail) and bool(_decoded(head, type_, where) == found)
    refuse_doubled_keys(head if is_whole else text, where)
    return found


def in_utc(moment: datetime) -> datetime:
    """Return a document's time in UTC; if Python has no such time, the first or last that it has."""
    try:
        return moment.astimezone(timezone.utc)
    except OverflowError:
        edge = datetime.min if moment.year == datetime.min.year else datetime.max
        return edge.replace(tzinfo=timezone.utc)


def format_version(text: str | bytes, where: str) -> int:
    """Return the number in the field `format_version` of a document; errors call it `where`.

    Raises:
        DocumentError: it has none, or is not a JSON object.
    """
    version: int = _decoded(text, _Versioned, where).format_version
    return version


def refuse_doubled_keys(text: str | bytes, where: str) -> None:
    """Raise DocumentError for a text in which an object names a key twice, or which is not JSON.

    The error calls it `where`.
    """
    try:
        json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as exc:
        raise DocumentError(f"{where} is not valid JSON: {exc}") from exc


def encode(value: Any) -> bytes:
    """Return a value as compact JSON in ASCII; NaN and infinities become null."""
    return _in_ascii(msgspec.json.encode(value))


def as_builtins(value: Any) -> Any:
    """Return a value as the dicts, lists, texts and numbers that are written for it."""
    return msgspec.to_builtins(value)


def encode_lines(values: list[Any] | tuple[Any, ...]) -> bytes:
    """Return a list as JSON in ASCII with a line for each item; NaN and infinities become null."""
    # JSON escapes line breaks within strings: each one here ends an item
    lines = msgspec.json.Encoder().encode_lines(values).removesuffix(b"\n")
    return b"[\n  " + _in_ascii(lines.replace(b"\n", b",\n  ")) + b"]"


def encode_indented(value: Any) -> bytes:
    """Return a value as JSON in ASCII with a line for each field, and a line break at the end.

    NaN and infinities become null.
    """
    return _in_ascii(msgspec.json.format(msgspec.json.encode(value), indent=1)) + b"\n"


def _decoded(text: str | bytes, type_: Any, where: str) -> Any:
    try:
        return decoder(type_).decode(text)
    except msgspec.ValidationError as exc:
        raise _named(exc, where) from exc
    except (ValueError, RecursionError) as exc:
        raise DocumentError(f"{where} is not valid JSON: {exc}") from exc


def _named(error: msgspec.ValidationError, where: str) -> DocumentError:
    """Return the DocumentError for an error of msgspec, with the path of the field in front."""
    # msgspec gives the path in its text alone: "... - at `$.b[1]`", of a key "... - at `key` in `$.a`"
    said, _, path = str(error).partition(" - at ")
    key, _, field = path.strip("`").rpartition("` in `")
    what = "a key: " if key else ""
    return DocumentError(f"{where}{field.removeprefix('$')}: {what}{said[:1].lower()}{said[1:]}")


def decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, memoised; any thread may use it."""
    with _MAKING:
        return _made(type_)


# msgspec inspects a type when it is first decoded; two threads that do so at once crash the process
_MAKING = threading.Lock()


@cache
def _made(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a dict: a hook for `json.loads`.

    Raises:
        ValueError: a key occurs twice.
    """
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _in_ascii(text: bytes) -> bytes:
    """Return JSON with all characters beyond ASCII, and DEL, escaped, as Python's encoder does it."""
    if text.isascii() and b"\x7f" not in text:
        return text
    return re.sub(r"[^\x00-\x7e]+", lambda each: json.dumps(each[0])[1:-1], text.decode()).encode("ascii")
