"""Read JSON that is not trusted: every field is checked by type and range, each failure is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MAX_TEXT = 65_536
"""Characters of the longest string that is taken."""


class FieldError(ValueError):
    """A document is not JSON, or a field is missing, malformed or out of range."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object whose fields are taken by type; `where` is what an error calls it."""

    document: dict[str, Any]
    where: str

    def integer(self, key: str) -> int:
        """An integer in [0, 2**63)."""
        return self._integer(key, self._value(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers in [0, 2**63)."""
        return tuple(self._integer(key, item) for item in self._list(key))

    def number(self, key: str) -> float:
        """A finite number that is not negative."""
        value = self._value(key)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.fail(key, "a finite number, 0 or more")
        return float(value)

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        """A string, all of which matches `pattern`."""
        return self._text(key, self._value(key), pattern)

    def texts(self, key: str, pattern: re.Pattern[str]) -> tuple[str, ...]:
        """A list of strings that match `pattern`."""
        return tuple(self._text(key, item, pattern) for item in self._list(key))

    def object(self, key: str) -> Fields:
        """An object."""
        return _fields(self._value(key), f"{self.where}.{key}")

    def objects(self, key: str) -> Iterator[Fields]:
        """A list of objects."""
        return (_fields(item, f"{self.where}.{key}[{i}]") for i, item in enumerate(self._list(key)))

    def or_null(self, take: Callable[[str], T], key: str) -> T | None:
        """What `take` takes, or None where the field is null."""
        return None if self._value(key) is None else take(key)

    def fail(self, key: str, expected: str) -> FieldError:
        """The error that says what a field should have been."""
        return FieldError(f"{self.where}.{key} is {_shown(self.document.get(key))}, expected {expected}")

    def _value(self, key: str) -> Any:
        try:
            return self.document[key]
        except KeyError:
            raise FieldError(f"{self.where}.{key} is missing") from None

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if type(value) is not list:
            raise self.fail(key, "a list")
        return value

    def _integer(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << 63:  # bool is an int to isinstance
            raise self.fail(key, "an integer in [0, 2**63)")
        return value

    def _text(self, key: str, value: Any, pattern: re.Pattern[str] | None) -> str:
        if type(value) is not str or len(value) > MAX_TEXT:
            raise self.fail(key, f"a string of at most {MAX_TEXT} characters")
        if pattern and not pattern.fullmatch(value):
            raise self.fail(key, f"a match of {pattern.pattern}")
        return value


def parse_object(text: str | bytes, where: str) -> Fields:
    """The one JSON object in `text`.

    Raises:
        FieldError: it is not strict JSON (RFC 8259, no NaN), nests too deep, names a key twice, or is
            not an object.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise FieldError(f"{where} is not valid JSON: {exc}") from exc
    return _fields(document, where)


def _fields(value: Any, where: str) -> Fields:
    if type(value) is not dict:
        raise FieldError(f"{where} is {_shown(value)}, expected an object")
    return Fields(value, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("an object names a key twice")
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    text = (
        repr(value) if isinstance(value, str | int | float) or value is None else f"a {type(value).__name__}"
    )
    return text if len(text) <= 60 else text[:57] + "..."
