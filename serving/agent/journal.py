"""The agent's events, for its output, its metrics and the status page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone

from msgspec import Struct, field

from exporter.newer_python import StrEnum

_KEPT, _KEPT_APPLIED = 100, 2000
"""How many events of a kind are kept for the status page: each replica tells of each delta."""


class EventKind(StrEnum):
    """The kinds of events; the values stand in JSON and in metrics."""

    APPLIED = "applied"
    FAILED = "failed"
    REFUSED = "refused"
    RESTARTED = "restarted"
    VERSION = "version"
    QUARANTINED = "quarantined"
    BASE_WANTED = "base_wanted"
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
    ENDED = "ended"


TROUBLE = frozenset(
    {
        EventKind.FAILED,
        EventKind.REFUSED,
        EventKind.QUARANTINED,
        EventKind.BASE_WANTED,
        EventKind.UNSEEN,
        EventKind.ROLLED_BACK,
        EventKind.CANARY_STUCK,
        EventKind.GOLDEN,
        EventKind.DIFFERS,
    }
)
"""Kinds that `-q` prints, because an operator may have to act."""


class FleetEvent(Struct, frozen=True):
    """One event of the agent; fields that do not apply are None.

    `seconds` is the duration of a call, `behind_seconds` the time from a delta's publication until a replica
    served it, `event_age_seconds` the time from the newest event that it was trained on until then.
    """

    what: EventKind
    message: str
    model: str = ""
    replica: str | None = None
    version: int | None = None
    position: int | None = None
    step: int | None = None
    rows: int | None = None
    deltas: int | None = None
    seconds: float | None = None
    behind_seconds: float | None = None
    event_age_seconds: float | None = None
    at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def is_trouble(self) -> bool:
        """True if an operator may have to act."""
        return self.what in TROUBLE


class Journal:
    """Passes events to its readers, and keeps the last ones. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events = {
            kind: deque[FleetEvent](maxlen=_KEPT_APPLIED if kind is EventKind.APPLIED else _KEPT)
            for kind in EventKind
        }
        self._readers: list[Callable[[FleetEvent], None]] = []

    def read_by(self, reader: Callable[[FleetEvent], None]) -> None:
        """Call `reader` with each event from now on, one at a time."""
        self._readers.append(reader)

    def write(self, event: FleetEvent) -> None:
        """Add an event. A reader that fails (a full disk, for example) misses it; the other readers get
        it.
        """
        with self._lock:
            self._events[event.what].append(event)
            for reader in self._readers:
                with suppress(Exception):
                    reader(event)

    def last(self) -> list[FleetEvent]:
        """The last events of each kind, the newest first."""
        with self._lock:
            events = [event for kept in self._events.values() for event in kept]
        return sorted(events, key=lambda event: event.at, reverse=True)
