"""Adapt graphs to servers of older TensorFlows: leave out attributes without effect, refuse what they lack.

An attribute at its default has no effect: the operation does what it did before it had the attribute.
`exporter.wire.stock_ops` lists the version in which each part was added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from exporter.errors import NotServable
from exporter.wire.protos import Proto, all_nodes
from exporter.wire.stock_ops import OLDEST, Version, attribute_text, late_ops, type_name

_PASSES_OVER: Version = (2, 8)
"""A loader of this version, and from 2.6 on, ignores an attribute that it does not know."""
_ONLY_TALK = {("IgnoreErrorsDataset", "log_warning")}
"""Attributes that only change what a server logs."""
_SHOWN = 4


class LatePart(Struct, frozen=True):
    """A part of a node that the oldest servers lack: its operation, an attribute of it, or a type.

    `what` names it, and `since` is the TensorFlow that added it.
    """

    what: str
    since: Version
    node: Proto
    silent: str = ""
    """The attribute, if it may be left out."""


def make_for(graph_def: Proto, server: Version) -> None:
    """Remove attributes without effect that servers of a TensorFlow version lack, in place.

    Raises:
        NotServable: they lack something else that the graph needs; then nothing is removed.
    """
    require_had(graph_def, server)
    for part in _late_parts(all_nodes(graph_def)):
        if part.silent and part.since > server:
            del part.node.attr[part.silent]


def require_had(graph_def: Proto, server: Version) -> None:
    """Raise NotServable if a graph needs a part that servers of this TensorFlow version lack."""
    lacking = [each for each in _late_parts(all_nodes(graph_def)) if not each.silent and each.since > server]
    if not lacking:
        return
    since = {each.what: each.since for each in lacking}
    said = [
        f"{what} (from {text_of(since[what])} on)" for what in sorted(since, key=lambda each: since[each])
    ]
    more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    raise NotServable(
        f"servers of TensorFlow {text_of(server)} lack {', '.join(said[-_SHOWN:])}{more}",
        cause=f"node {lacking[0].node.name!r} needs {lacking[0].what}",
        hint=f"give --for-server {text_of(max(since.values()))}, or change the model",
    )


def oldest_server(graph_def: Proto) -> Version:
    """Return the oldest TensorFlow version whose servers load a graph unchanged; never before `OLDEST`."""
    parts = _late_parts(all_nodes(graph_def))
    return max(
        (min(each.since, _PASSES_OVER) if each.silent else each.since for each in parts), default=OLDEST
    )


def text_of(version: Version) -> str:
    """Return a version as text, such as `2.8` for (2, 8)."""
    return ".".join(map(str, version))


def _late_parts(nodes: Iterable[Proto]) -> Iterator[LatePart]:
    """Yield the parts of nodes that were added to TensorFlow after `OLDEST`, node by node.

    An attribute whose value is its default, or only changes what is logged, is `silent`.
    """
    late = late_ops()
    for node in nodes:
        if node.op in late.ops:
            yield LatePart(node.op, late.ops[node.op], node)
        for name, grown in late.attributes.get(node.op, {}).items():
            if name not in node.attr or node.attr[name].placeholder:
                continue
            value = node.attr[name]
            for each in grown:
                if each.default:
                    is_silent = attribute_text(value) == each.default or (node.op, name) in _ONLY_TALK
                    yield LatePart(f"{node.op}.{name}", each.since, node, name if is_silent else "")
                else:
                    found = map(type_name, [*value.list.type, *([value.type] if value.type else [])])
                    for of in sorted({*found} & each.types):
                        yield LatePart(f"{node.op} of {of}", each.since, node)
