"""The operations of stock TensorFlow and the versions that added them, without TensorFlow.

`stock_ops.txt` lists those of the newest supported TensorFlow, a line each: the name, then the names of its
attributes, or `?` if they are not known. `tools/stock_tensorflow.py` makes it.

`server_ops.txt` lists all that is newer than the oldest supported server, a line each: the first of the
versions examined (`tools/server_ops.py`) that has it; then an operation, or its attribute with the default
(`OP.ATTR b=False`), or its attribute with further types that it may be (`OP.ATTR uint32 uint64`).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from msgspec import Struct

from exporter.wire.protos import Proto, message_class

_LIST = Path(__file__).with_name("stock_ops.txt")
# Operations that TensorFlow makes for itself are not in the list.
_INTERNAL = re.compile(
    r"_\w+|Xla\w+|TPU\w+|Risc\w+|DTensor\w+|\w*TPUEmbedding\w*|TopK(WithUnique|Unique)|MakeUnique"
    r"|KthOrderStatistic|StochasticCastToInt|QuantizedConcatV2|NegTrain|Skipgram|HostConst|AudioMicrofrontend"
)


def is_stock(op: str) -> bool:
    """True for an operation (its name) of TensorFlow's own, listed or internal."""
    return op in _listed() or _INTERNAL.fullmatch(op) is not None


def stock_attributes(op: str) -> frozenset[str] | None:
    """Return the names of a stock operation's attributes; None if they, or the operation, are not known."""
    attributes = _listed().get(op, "?").split()
    return None if attributes == ["?"] else frozenset(attributes)


@cache
def _listed() -> dict[str, str]:
    """Return {operation: its attributes, separated by blanks}, "?" if unknown; memoised."""
    lines = _LIST.read_text().splitlines()
    return {op: attributes for op, _, attributes in (line.partition(" ") for line in lines)}


_NEWER = Path(__file__).with_name("server_ops.txt")

Version = tuple[int, int]

OLDEST: Version = (1, 15)
"""The oldest server for which models are made."""


class Growth(Struct, frozen=True):
    """An attribute that was added later, with the text of its default; or types that were added to it.

    `default` is as `attribute_text` gives it, "" if types were added; `types` are names as of `type_name`.
    """

    since: Version
    default: str
    types: frozenset[str]


class LateOps(Struct, frozen=True):
    """Additions after `OLDEST`: {operation: first version}, and {operation: {attribute: its growth}}."""

    ops: dict[str, Version]
    attributes: dict[str, dict[str, list[Growth]]]


@cache
def late_ops() -> LateOps:
    """Return all additions to TensorFlow after `OLDEST`, as `server_ops.txt` lists them; memoised."""
    found = LateOps({}, {})
    for line in _NEWER.read_text().splitlines():
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
    """Return (major, minor) of a version such as `2.8`; ValueError for other text, including `2.8.1`."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def attribute_text(value: Proto) -> str:
    """Return the text of an AttrValue, `kind=value`, equal for equal values; `=` if it is unset."""
    kind = value.WhichOneof("value") or ""
    held = getattr(value, kind) if kind else b""
    if hasattr(held, "SerializeToString"):
        # `func` has a map of attributes: without this its order, and so the text, differs from run to run
        held = held.SerializeToString(deterministic=True)
    return f"{kind}={held!r}" if kind else "="


@cache
def type_name(number: int) -> str:
    """Return TensorFlow's name of a DataType's number in lower case, such as `uint64`.

    KeyError for unknown numbers.
    """
    types = message_class("AttrValue").DESCRIPTOR.fields_by_name["type"].enum_type
    return str(types.values_by_number[number].name).removeprefix("DT_").lower()
