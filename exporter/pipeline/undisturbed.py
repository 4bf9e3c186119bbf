"""Work with a log while others publish to it and tidy it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from exporter.errors import CheckpointError, PositionMoved, VerificationError
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage import mirror

T = TypeVar("T")

RACE_SECONDS = 60.0
"""How long an operator's command tries again while others remove what it reads."""


def undisturbed(model: Path, action: Callable[[DeltaLog], T]) -> T:
    """What an operator's command does with a log, again if others removed what it was reading.

    Raises:
        PositionMoved: they did so again and again, for `RACE_SECONDS`.
        ExportError: as `action`.
    """
    deadline = time.monotonic() + RACE_SECONDS
    while True:
        log = read_log(model)
        try:
            return action(log)
        except (CheckpointError, PositionMoved, VerificationError) as error:
            if mirror.find(model) is not None:  # whoever opened it looks again: here nothing changes
                raise
            if not isinstance(error, PositionMoved) and all(delta.path.exists() for delta in log.deltas):
                raise
            if time.monotonic() >= deadline:
                what = f"others published and tidied under {model} for {RACE_SECONDS:g} s"
                raise PositionMoved(
                    f"{what}: it could not be read in between", cause=error.message
                ) from error
