"""Events as lines to read: one for a delta, however many replicas take it, and the canary's part in it.

Each replica has an event of its own for each delta, and with a canary there are two more. Other events that
are alike on several replicas within a minute are one line, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from exporter.terminal.progress import count
from serving.agent.journal import EventKind, FleetEvent

_TOGETHER = timedelta(minutes=1)
_STAYS = frozenset({EventKind.ROLLED_BACK, EventKind.GOLDEN, EventKind.DIFFERS})
"""Kinds of which the newest line stays, however many lines are newer."""


class Line(Struct, frozen=True):
    """One line. `where` is the replica, or how many there are; `aside` may be empty."""

    at: datetime
    model: str
    where: str
    what: EventKind
    text: str
    aside: str = ""
    is_trouble: bool = False


def lines(events: Iterable[FleetEvent], most: int, seconds: Callable[[float], str]) -> tuple[Line, ...]:
    """The newest lines, at most so many, and older ones of a kind that stays; `events` begin with the newest.

    `seconds` writes a duration.
    """
    groups: dict[tuple[object, ...], list[FleetEvent]] = {}
    found: list[list[FleetEvent]] = []
    for event in events:
        key = _key(event)
        group = groups.get(key)
        is_of_delta = _is_of_delta(event)
        if group is None or not (is_of_delta or group[0].at - event.at < _TOGETHER):
            group = groups[key] = []
            found.append(group)
        group.append(event)
    older = {group[0].what: group for group in reversed(found[most:]) if group[0].what in _STAYS}
    newer = {group[0].what for group in found[:most]}
    kept = [*found[:most], *(group for kind, group in older.items() if kind not in newer)]
    return tuple(_line(group, seconds) for group in sorted(kept, key=lambda group: group[0].at, reverse=True))


def _is_of_delta(event: FleetEvent) -> bool:
    """True for what is said of one delta: it goes first somewhere, it is approved, it is applied."""
    kinds = (EventKind.APPLIED, EventKind.APPROVED, EventKind.CANARY)
    return event.what in kinds and event.position is not None


def _key(event: FleetEvent) -> tuple[object, ...]:
    if _is_of_delta(event):
        return event.model, event.position
    return event.model, event.what, event.message


def _line(group: Sequence[FleetEvent], seconds: Callable[[float], str]) -> Line:
    newest = group[0]
    replicas = list(dict.fromkeys(event.replica for event in group if event.replica))
    where = replicas[0] if len(replicas) == 1 else count(len(replicas), "replica") if replicas else ""
    if not _is_of_delta(newest):
        return Line(newest.at, newest.model, where, newest.what, newest.message, "", newest.is_trouble)
    applied = [event for event in group if event.what is EventKind.APPLIED]
    approved = [event.message for event in group if event.what is EventKind.APPROVED]
    first = [event.replica for event in group if event.what is EventKind.CANARY and event.replica]
    what = EventKind.APPLIED if applied else newest.what
    if len(group) == 1 or not applied:
        text = newest.message
    else:
        text = f"position {newest.position}: {_amount(applied)}"
    if applied and approved:
        text += f"; {approved[-1].partition(': ')[2]}"  # which says who went first
    elif applied and first:
        text += f"; {first[-1]} went first"
    waits = [event.behind_seconds for event in applied if event.behind_seconds is not None]
    aside = ""
    if waits:
        best, worst = seconds(min(waits)), seconds(max(waits))
        span = best if best == worst else f"{best} to {worst}"
        aside = f"served after {span}"
    return Line(newest.at, newest.model, where, what, text, aside)


def _amount(applied: Sequence[FleetEvent]) -> str:
    """What was applied, by the replica that had least to catch up."""
    least = min(applied, key=lambda event: (event.deltas or 0, event.rows or 0))
    return f"{count(least.deltas or 0, 'delta')}, {count(least.rows or 0, 'row')}"
