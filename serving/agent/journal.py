"""The agent's events, for its output, its metrics and the status page.

The page shows them as lines: one line per delta, for all replicas that apply it and for the canary's part.
Other events that are alike on several replicas within a minute are one line, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from msgspec import Struct, field

from exporter.newer_python import StrEnum
from exporter.terminal.progress import count

_KEPT, _KEPT_APPLIED = 100, 2000
"""The events of a kind kept for the status page; more of `applied`, with one per replica and delta."""


class EventKind(StrEnum):
    """The kinds of events; the values appear in JSON and in metrics."""

    APPLIED = "applied"
    FAILED = "failed"
    REFUSED = "refused"
    RESTARTED = "restarted"
    VERSION = "version"
    QUARANTINED = "quarantined"
    BASE_WANTED = "base_wanted"
    HELD = "held"
    SILENT = "silent"
    DAMAGED = "damaged"
    UNSEEN = "unseen"
    SEEN = "seen"
    TARGETS = "targets"
    CANARY = "canary"
    APPROVED = "approved"
    ROLLED_BACK = "rolled_back"
    CANARY_STUCK = "canary_stuck"
    GOLDEN = "golden"
    AUDIT = "audit"
    DIFFERS = "differs"
    REBUILT = "rebuilt"
    PACED = "paced"
    LABELLED = "labelled"


TROUBLE = frozenset(
    {
        EventKind.FAILED,
        EventKind.REFUSED,
        EventKind.QUARANTINED,
        EventKind.BASE_WANTED,
        EventKind.HELD,
        EventKind.SILENT,
        EventKind.DAMAGED,
        EventKind.UNSEEN,
        EventKind.ROLLED_BACK,
        EventKind.CANARY_STUCK,
        EventKind.GOLDEN,
        EventKind.DIFFERS,
    }
)
"""Kinds that `-q` prints, because an operator may have to act."""


class AgentEvent(Struct, frozen=True):
    """An event, as `agent` prints it."""

    what: EventKind
    """The kind: `applied`, `failed`, `refused`, `canary`, `approved`, `golden`, `rolled_back`, ..."""
    message: str
    """The event as a sentence."""
    model: str = ""
    """The model's name; empty if the event concerns no model."""
    replica: str | None = None
    """The model server's address."""
    version: int | None = None
    """The version on that server."""
    position: int | None = None
    """The position that it serves now."""
    step: int | None = None
    """The training step of its values."""
    rows: int | None = None
    """Rows that were written."""
    deltas: int | None = None
    """Deltas that were applied."""
    seconds: float | None = None
    """Seconds that the call took."""
    behind_seconds: float | None = None
    """Seconds from the publication of the delta until the replica served it."""
    event_age_seconds: float | None = None
    """Seconds from the newest event in the delta's training data until the replica served it."""
    why: str = ""
    """The reason, or who did it, if that is known; otherwise empty."""
    command: str = ""
    """The command to type next; empty if there is none."""
    at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    """When it happened."""

    @property
    def is_trouble(self) -> bool:
        """Return True if an operator may have to act."""
        return self.what in TROUBLE


class Journal:
    """The last events, which are also passed to readers. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events = {
            kind: deque[AgentEvent](maxlen=_KEPT_APPLIED if kind is EventKind.APPLIED else _KEPT)
            for kind in EventKind
        }
        self._readers: list[Callable[[AgentEvent], None]] = []

    def read_by(self, reader: Callable[[AgentEvent], None]) -> None:
        """Call `reader` with each later event, one at a time, in the thread that writes it.

        It must not write events itself: the journal is locked meanwhile. Its exceptions are ignored.
        """
        self._readers.append(reader)

    def write(self, event: AgentEvent) -> None:
        """Add an event and pass it to all readers; a reader that fails (on a full disk, say) misses it."""
        with self._lock:
            self._events[event.what].append(event)
            # Inside the lock: readers get events one at a time, in the order in which they are kept.
            for reader in self._readers:
                with suppress(Exception):
                    reader(event)

    def last(self) -> list[AgentEvent]:
        """Return the last events, the newest first: at most 2000 of `applied`, and 100 of each other kind."""
        with self._lock:
            events = [event for kept in self._events.values() for event in kept]
        return sorted(events, key=lambda event: event.at, reverse=True)


_TOGETHER = timedelta(minutes=1)
_STAYS = frozenset({EventKind.ROLLED_BACK, EventKind.GOLDEN, EventKind.DIFFERS})
"""Kinds whose newest line stays, however many lines are newer."""


class Line(Struct, frozen=True):
    """One line. `where` is the replica, or the number of replicas, empty if it concerns none.

    `aside` is the time until a delta was served, as a phrase; empty if unknown, or for other events.
    """

    at: datetime
    model: str
    where: str
    what: EventKind
    text: str
    aside: str = ""
    is_trouble: bool = False


def lines(events: Iterable[AgentEvent], most: int, seconds: Callable[[float], str]) -> tuple[Line, ...]:
    """Return the newest `most` lines, plus older ones of kinds that stay, the newest first.

    `events` begin with the newest; events of one delta, or alike within a minute, make one line. Of each kind
    in `_STAYS` that these lines lack, the newest line is added. `seconds` formats a duration.
    """
    groups: dict[tuple[object, ...], list[AgentEvent]] = {}
    found: list[list[AgentEvent]] = []
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


def _is_of_delta(event: AgentEvent) -> bool:
    """Return True for an event about one delta: it goes first somewhere, is approved, or is applied."""
    kinds = (EventKind.APPLIED, EventKind.APPROVED, EventKind.CANARY)
    return event.what in kinds and event.position is not None


def _key(event: AgentEvent) -> tuple[object, ...]:
    if _is_of_delta(event):
        return event.model, event.position
    return event.model, event.what, event.message


def _line(group: Sequence[AgentEvent], seconds: Callable[[float], str]) -> Line:
    newest = group[0]
    replicas = list(dict.fromkeys(event.replica for event in group if event.replica))
    where = replicas[0] if len(replicas) == 1 else count(len(replicas), "replica") if replicas else ""
    if not _is_of_delta(newest):
        return Line(newest.at, newest.model, where, newest.what, newest.message, "", newest.is_trouble)
    applied = [event for event in group if event.what is EventKind.APPLIED]
    if not applied:
        return Line(newest.at, newest.model, where, newest.what, newest.message)
    text = newest.message if len(group) == 1 else f"position {newest.position}: {_amount(applied)}"
    text += _went_first(group)
    return Line(newest.at, newest.model, where, EventKind.APPLIED, text, _waited(applied, seconds))


def _went_first(group: Sequence[AgentEvent]) -> str:
    """Return which replica went first, as the end of a line; "" if none did.

    `group` has the events of one delta, the newest first.
    """
    approved = [event.message for event in group if event.what is EventKind.APPROVED]
    if approved:
        return f"; {approved[-1].partition(': ')[2]}"  # names the replica that went first
    first = [event.replica for event in group if event.what is EventKind.CANARY and event.replica]
    return f"; {first[-1]} went first" if first else ""


def _waited(applied: Iterable[AgentEvent], seconds: Callable[[float], str]) -> str:
    """Return the time until a delta was served, the shortest and the longest, as a phrase; "" if unknown.

    `applied` are the events of the replicas that applied it; `seconds` formats a duration.
    """
    waits = [event.behind_seconds for event in applied if event.behind_seconds is not None]
    if not waits:
        return ""
    best, worst = seconds(min(waits)), seconds(max(waits))
    return f"served after {best if best == worst else f'{best} to {worst}'}"


def _amount(applied: Sequence[AgentEvent]) -> str:
    """Return the deltas and rows applied by the replica that had the least to catch up, as a phrase."""
    least = min(applied, key=lambda event: (event.deltas or 0, event.rows or 0))
    return f"{count(least.deltas or 0, 'delta')}, {count(least.rows or 0, 'row')}"
