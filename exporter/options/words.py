"""Options with several words, of which each sets a field: `--keep 5 --keep daily=7`, `--with stamp`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from exporter.errors import UsageError
from exporter.options import given

_LONGEST_COUNT = len(str(1 << 63))


class Fields(dict[str, Any]):
    """The values of several fields of a struct, by name, that one option sets."""


class Part(Struct, frozen=True):
    """A word of an option, and the field that it sets: `stamp`, or `daily=N`.

    A word in capitals, such as `N` or `FILE`, stands for any text that is none of the other words.
    """

    field: str
    meaning: str
    """It follows the word in `--help`, and is a sentence of its own in Python's."""
    take: Callable[[str, str], Any] | None = None
    """Makes the field's value of the option's name and the text; None for a word without one."""
    value: Any = True
    """The field's value for a word without a text."""
    text: Callable[[Any], Any] = str
    """The text for a value: the other way round."""
    least: float | None = None
    """The smallest number that is accepted."""
    needs: tuple[str, ...] = ()
    """Fields of the same option, without one of which this one has no effect, and is refused."""
    digest: Literal["", "always", "if given"] = ""
    """Whether it is part of a plan's digest, as of `Option`."""


def wrong_word(words: Collection[str], name: str, text: str) -> UsageError:
    """Return the error for a text that is not one of an option's words, with the nearest word as its hint.

    The hint has all words if none is near. `name` is the option's, for the message.
    """
    heads = {_head(word): word for word in words}
    close = heads.get(given.nearest_name(_head(text), heads))
    hint = f"{name} {close}" if close else f"one of {', '.join(words)}"
    return UsageError(f"{name} {text!r} is not one of its words", hint=hint)


def fields_of(parts: Mapping[str, Part], option: str, texts: Sequence[str]) -> Fields:
    """Return the fields that an option's values set; `parts` has the field of each word.

    Raises:
        UsageError: a text is none of the words, its value is wrong or too small, two set one field to
            different values, or a field needs another one.
    """
    found = Fields()
    for text in texts:
        head, _, value = text.partition("=")
        is_begun = (each for each, part in parts.items() if part.take and each.startswith(f"{head}="))
        word = text if text in parts else next(is_begun, None) if value else None
        if word is None and head not in map(_head, parts):
            word = next((each for each in parts if each.isupper()), None)
        if word is None:
            raise wrong_word(parts, option, text)
        part, name = parts[word], name_of(option, word)
        told = part.value if part.take is None else part.take(name, text if word.isupper() else value)
        if part.least is not None and told < part.least:
            least = f"{part.least:g}" if word.isupper() else f"{head}={part.least:g}"
            raise UsageError(f"{name} {told} is too small", hint=f"as in {option} {least}")
        if found.setdefault(part.field, told) != told:
            raise UsageError(
                f"{option} names two of {part.field}: {found[part.field]} and {told}", hint="name one"
            )
    require_needed(parts, option, found)
    return found


def require_needed(parts: Mapping[str, Part], option: str, there: Collection[str]) -> None:
    """Refuse fields that have no effect without others of the same option.

    `there` are the names of the fields that are set; `parts` has the field of each word of `option`.

    Raises:
        UsageError: a field is set, and none of the fields that it needs.
    """
    for word, part in parts.items():
        if part.needs and part.field in there and not {*part.needs} & {*there}:
            those = (f"{option} {each}" for each, other in parts.items() if other.field in part.needs)
            needed, name = " or ".join(those), name_of(option, word)
            raise UsageError(f"{name} goes with {needed}", hint=f"add {needed}, or leave out {name}")


def texts_of(parts: Mapping[str, Part], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of an option that set the fields in `found`; `parts` has the field of each word."""
    for word, part in parts.items():
        value = found.get(part.field)
        if part.field not in found or (part.take is None and value != part.value):
            continue
        text = "" if part.take is None else part.text(value)
        yield text if word.isupper() else f"{_head(word)}={text}" if part.take else word


def name_of(option: str, word: str) -> str:
    """Return the name, in messages, of an option with one of its words: `--keys min-freq` for `min-freq=N`.

    The option's name alone for a word in capitals, which stands for any text.
    """
    return option if word.isupper() else f"{option} {_head(word)}"


def _head(word: str) -> str:
    return word.partition("=")[0]


def text_of(option: str, text: str) -> str:
    """Return `text` unchanged, as the `take` of a part whose value is any text."""
    del option
    return text


def count(option: str, text: str) -> int:
    """Return a text of decimal digits as an int; UsageError, which names `option`, for another text.

    The number is below 2**63: manifests and TensorFlow's messages hold no greater ones.
    """
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{option} {text!r} is not a whole number", hint="as in 3")
    # The length first: beyond 4300 digits `int` raises ValueError.
    if len(text) > _LONGEST_COUNT or int(text) >= 1 << 63:
        raise UsageError(f"{option} {text[:80]!r} is not a whole number below 2**63", hint="as in 3")
    return int(text)


def seconds(option: str, text: str) -> float:
    """Return a text as seconds; UsageError, which names `option`, if it is not a number, or too great."""
    return given.require_seconds(option, number(option, text))


def number(option: str, text: str) -> float:
    """Return a text as a float; UsageError, which names `option`, if it is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{option} {text!r} is not a number", hint="as in 0.5")
    return value
