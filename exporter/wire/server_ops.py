"""Which TensorFlow brought which operation, attribute and type, without TensorFlow.

`server_ops.txt` has what came after the oldest that servers may be, a line each: the first of the versions
that were looked at (`tools/server_ops.py`) which had it; then an operation, or its attribute with the default
(`OP.ATTR b=False`), or its attribute with further types that it may be (`OP.ATTR uint32 uint64`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import Struct

from exporter.wire.protos import Proto, message_class

_LIST = Path(__file__).with_name("server_ops.txt")

Version = tuple[int, int]

OLDEST: Version = (1, 15)
"""The oldest server that models are made for."""


class Growth(Struct, frozen=True):
    """An attribute that came late, with the text of its default; or types that came to it."""

    since: Version
    default: str
    types: frozenset[str]


class LateOps(Struct, frozen=True):
    """What came after `OLDEST`: operations, and what attributes grew by, by operation and attribute."""

    ops: dict[str, Version]
    attributes: dict[str, dict[str, list[Growth]]]


@cache
def late_ops() -> LateOps:
    """The list, read once."""
    found = LateOps({}, {})
    for line in _LIST.read_text().splitlines():
        version, name, *said = line.split(" ")
        op, _, attribute = name.partition(".")
        since = version_of(version)
        if not attribute:
            found.ops[op] = since
            continue
        default = said[0] if "=" in said[0] else ""
        types = frozenset() if default else frozenset(said)
        found.attributes.setdefault(op, {}).setdefault(attribute, []).append(Growth(since, default, types))
    return found


def version_of(text: str) -> Version:
    """Major and minor number of `2.8`."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def attribute_text(value: Proto) -> str:
    """The text of an AttrValue, equal for equal values; `=` if it is unset."""
    kind = value.WhichOneof("value") or ""
    held = getattr(value, kind) if kind else b""
    if hasattr(held, "SerializeToString"):
        held = held.SerializeToString(deterministic=True)
    return f"{kind}={held!r}" if kind else "="


@cache
def type_name(number: int) -> str:
    """What TensorFlow calls a DataType: `uint64`."""
    types = message_class("AttrValue").DESCRIPTOR.fields_by_name["type"].enum_type
    return str(types.values_by_number[number].name).removeprefix("DT_").lower()
