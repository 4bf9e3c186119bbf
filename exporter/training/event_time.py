"""The event time of a training: when the newest event happened that it was trained on.

Freshness is measured from it. By default it is the time at which the newest step was first seen, which is
right for a training that follows a live stream closely. A training that lags, or reads old data, passes its
own:

    IncrementHook(ckpt_dir, save_increment_secs=1, event_time=lambda: reader.newest_timestamp)
    IncrementHook(ckpt_dir, save_increment_secs=1, event_time=newest_timestamp_variable)

The value is read before an increment's rows are collected, so that the increment is at least as new. It
serves people and alerts: if it cannot be read, increments are written without it.
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
"""How far clocks may differ. A later time is refused: it would stay the newest event until then, and hide
every lag."""

log = logging.getLogger(__name__)


class EventClock:
    """Gives the event time of the training so far. `now` returns seconds since 1970."""

    def __init__(self, source: EventTime | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._source = source
        self._now = now
        self._step: int | None = None
        self._stepped_at: float | None = None
        self._warned = ""

    def begin(self, step: int) -> None:
        """Begin a session at a step that it did not train itself, whose time is therefore unknown."""
        self._step, self._stepped_at = step, None

    def notice(self, step: int) -> None:
        """Note that the training is at a step now."""
        if step != self._step:
            self._step, self._stepped_at = step, self._now()

    def read(self, session: Session) -> datetime | None:
        """The present event time; None if it is unknown or invalid, which the log warns of once."""
        try:
            if self._source is None:
                return _as_time(self._stepped_at)
            found = _as_time(_value(self._source, session))
            if found is not None and found.timestamp() > self._now() + _MOST_AHEAD_S:
                raise ValueError(f"it lies more than {_MOST_AHEAD_S:g} seconds ahead of this machine's clock")
            return found
        except Exception as error:  # noqa: BLE001 - the user's own code must not end a training
            text = f"{type(error).__name__}: {error}"
            if text != self._warned:
                log.warning("increments: the event time is unknown: %s", text)
                self._warned = text
            return None


def _value(source: EventTime, session: Session) -> Any:
    if hasattr(source, "graph"):  # a tensor or variable of a graph; eager ones have none
        return None if session is None else session.run(source)
    if hasattr(source, "numpy"):
        return source.numpy()
    return source() if callable(source) else source


def _as_time(value: Any) -> datetime | None:
    """The time that a value stands for; None if it is none, empty, or not above 0.

    Raises:
        ValueError: a time without a zone, or a number that is not a time in seconds since 1970.
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
        raise ValueError(f"{seconds:g} is not a time in seconds since 1970: {error}") from error
