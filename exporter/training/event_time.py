"""When the newest event happened that a training was trained on: what freshness is measured from.

Without anything given it is the time at which the newest step was first seen, which is right for a training
that follows a live stream closely. One that lags, or reads old data, says what it knows:

    IncrementHook(ckpt_dir, save_increment_secs=1, event_time=lambda: reader.newest_timestamp)
    IncrementHook(ckpt_dir, save_increment_secs=1, event_time=newest_timestamp_variable)

The value is read before an increment's rows are collected, so that the increment is at least as new. It is
for people and alerts: whatever is wrong with it, increments are written without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import numpy as np

Session = Any
EventTime = Callable[[], Any] | Any
"""A function, or a variable or tensor that can be read at any time without side effects. Its value is a
`datetime` with a time zone, or seconds since 1970 (of an array the largest); 0 and None: not known yet."""

_MOST_AHEAD_S = 300.0
"""How far clocks may differ. What is newer would count as the newest event until then, and hide all lag."""

log = logging.getLogger(__name__)


class EventClock:
    """Tells the event time of what was trained so far. `now` gives seconds since 1970."""

    def __init__(self, source: EventTime | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._source = source
        self._now = now
        self._step: int | None = None
        self._stepped_at: float | None = None
        self._warned = ""

    def begin(self, step: int) -> None:
        """A session begins at a step that it did not train itself: nobody knows when that was."""
        self._step, self._stepped_at = step, None

    def notice(self, step: int) -> None:
        """The training is at a step now."""
        if step != self._step:
            self._step, self._stepped_at = step, self._now()

    def read(self, session: Session) -> datetime | None:
        """The event time of now; None if it is not known, or is no time."""
        try:
            if self._source is None:
                return _as_time(self._stepped_at)
            found = _as_time(_value(self._source, session))
            if found is not None and found.timestamp() > self._now() + _MOST_AHEAD_S:
                raise ValueError(f"it lies more than {_MOST_AHEAD_S:g} seconds ahead of this machine's clock")
            return found
        except Exception as error:  # noqa: BLE001 - the user's own code: a training does not end by it
            text = f"{type(error).__name__}: {error}"
            if text != self._warned:
                log.warning("increments: the event time is not known: %s", text)
                self._warned = text
            return None


def _value(source: EventTime, session: Session) -> Any:
    if hasattr(source, "graph"):  # what is eager has none
        return None if session is None else session.run(source)
    if hasattr(source, "numpy"):
        return source.numpy()
    return source() if callable(source) else source


def _as_time(value: Any) -> datetime | None:
    """The time that a value means.

    Raises:
        ValueError: a time without a zone, or a number that is no time in seconds.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(timezone.utc)
    seconds = float(np.max(value)) if np.size(value) else 0.0
    if seconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{seconds:g} is no time in seconds since 1970: {error}") from error
