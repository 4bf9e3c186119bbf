"""The options that say when a watch ends."""

from __future__ import annotations

import math

from exporter.pipeline.watch_loop import StopWhen, parse_duration


def stop_when(after: str | None, count: int | None, step: int | None, idle: str | None) -> StopWhen:
    """What `--stop-after`, `--stop-count`, `--stop-step` and `--stop-idle` say.

    Raises:
        UsageError: one is not a duration.
    """
    return StopWhen(
        math.inf if after is None else parse_duration("--stop-after", after),
        math.inf if count is None else count,
        math.inf if step is None else step,
        math.inf if idle is None else parse_duration("--stop-idle", idle),
    )
