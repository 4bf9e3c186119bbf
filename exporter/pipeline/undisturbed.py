"""Work with a log while other processes publish to it and tidy it.

`undisturbed` does a command's work again if other processes removed what it was reading. `past_given_up`
leads past an abandoned upload to a store: nothing else may ever be published at its path, because its process
may only be slow, and still write there (see `exporter.transfer.head`). Exports take another number. A merged
delta has its place: so the log goes on by a delta without changes, and the merged delta ends behind that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from exporter.delta.spans import Span
from exporter.errors import CheckpointError, PositionMoved, VerificationError
from exporter.jobs.runner import Runner
from exporter.options import Jobs
from exporter.publish.commit import Staging, next_delta_position
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.delta_publication import Publication, publish_changes
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.versions import is_taken
from exporter.storage import mirror


def position_of_merger(log: DeltaLog, path: Path) -> int:
    """Where a merger of the whole log stands that would lie at a path."""
    last = log.at.position
    return next_delta_position(log.model, None, last) if is_taken(log.model, path) else last


def past_given_up(log: DeltaLog, path: Path) -> DeltaLog:
    """The log, with a delta of no changes behind it if nothing may be published at a path.

    Raises:
        PositionMoved: another delta was published meanwhile.
        PublishError: see errors.py.
    """
    last = log.at
    end = position_of_merger(log, path)
    if end == last.position:
        return log
    what = Publication(
        Span(last.position, end),
        last.step,
        DeltaOrigin.COMPARISON,
        log.trained,
        state=log.newest.manifest.state_id,
    )
    with Staging(log.model) as staging:
        return publish_changes(log, staging, {}, what, last=last.position).log


def runner_for(jobs: Jobs, model: Path, tasks: int) -> Runner:
    """How a merger is run: what a single task does is not worth keeping, unless it is asked for."""
    return Runner.of(jobs, model if jobs.engine is not None or tasks > 1 else None)


T = TypeVar("T")

RACE_SECONDS = 60.0
"""How long an operator's command tries again while others remove what it reads."""


def undisturbed(model: Path, action: Callable[[DeltaLog], T], log: DeltaLog | None = None) -> T:
    """What an operator's command does with a log, again if others removed what it was reading.

    The log is read at first, too, unless it is given.

    Raises:
        PositionMoved: they did so again and again, for `RACE_SECONDS`.
        ExportError: as `action`.
    """
    deadline = time.monotonic() + RACE_SECONDS
    while True:
        log = read_log(model) if log is None else log
        try:
            return action(log)
        except (CheckpointError, PositionMoved, VerificationError) as error:
            if mirror.is_remote(model):  # `carry` refreshes the copy and tries again; here nothing changes
                raise
            if not isinstance(error, PositionMoved) and all(delta.path.exists() for delta in log.deltas):
                raise
            if time.monotonic() >= deadline:
                what = f"others published and tidied under {model} for {RACE_SECONDS:g} s"
                raise PositionMoved(
                    f"{what}: it could not be read in between", cause=error.message
                ) from error
        log = None
