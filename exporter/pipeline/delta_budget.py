"""Compute the size limit of the next delta, by `--delta-budget` and by the sizes of recent deltas.

A rate holds within any ten seconds: a delta may be as large as the time since the previous publication
permits, and together with the deltas of the last ten seconds no larger than ten seconds permit. So a watch
that had nothing to send saves up at most ten seconds. Sizes are read from the log, so that a restart forgets
nothing. Merged deltas do not count: servers that follow the log do not read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from msgspec import Struct
from msgspec.structs import asdict

from exporter.delta.deviation import Budgeted, Used
from exporter.options import DeltaBudget
from exporter.publish.delta_log import DeltaLog
from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from exporter.storage.layout import MANIFEST_FILE

WINDOW_SECONDS = 10.0
"""The time over which a rate is kept: no such span gets more than its share."""
_WORTH_SECONDS = 1.0
"""A watch waits until a rate permits the bytes of this time, and those the previous delta had to send."""


class Allowance(Struct, frozen=True):
    """The most bytes of the delta planned at `now`, and the seconds since the previous one.

    `now` is in seconds since 1970. `is_worth` is False while a watch should wait.
    """

    room: int
    seconds: float
    now: float
    is_worth: bool = True

    @classmethod
    def of(cls, log: DeltaLog, text: str, now: float) -> Allowance:
        """Return the bytes that `--delta-budget` permits for the next delta of a log.

        `text` is the option's value, `now` the time of planning in seconds since 1970. Of a rate (bytes per
        second), unused seconds add up to at most ten seconds' bytes, less the deltas of the last ten seconds;
        a size per delta counts alone. Raises UsageError for a malformed text; ManifestError or OSError if a
        delta's manifest cannot be read.
        """
        budget = DeltaBudget.parse("--delta-budget", text)
        entry, before, due = log.newest.entry, log.newest.manifest.created, 0
        if isinstance(entry, DeltaEntry) and entry.budget is not None:
            before, due = (
                entry.budget.planned,
                entry.budget.due,
            )  # publishing takes time, which must not be lost
        passed = now - before.timestamp()
        seconds = passed if passed >= 0 else WINDOW_SECONDS  # a clock was set back
        if not budget.is_rate:
            return cls(budget.size, seconds, now)
        room = int(budget.size * min(seconds, WINDOW_SECONDS))
        room = max(0, min(room, int(budget.size * WINDOW_SECONDS) - sum(_sent_lately(log, now))))
        worth = max(budget.size * _WORTH_SECONDS, min(due, budget.size * WINDOW_SECONDS))
        return cls(room, seconds, now, room >= worth)

    def told(self, used: Used) -> Budgeted:
        """Return the budget's record for the delta's manifest: this allowance, and its use (`used`)."""
        planned = datetime.fromtimestamp(self.now, timezone.utc)
        return Budgeted(**asdict(used), allowed=self.room, planned=planned, seconds=self.seconds)


def _sent_lately(log: DeltaLog, now: float) -> Iterator[int]:
    """Yield the size in bytes of each delta of the ten seconds before `now`, newest first, without mergers.

    Raises ManifestError or OSError if a manifest cannot be read.
    """
    # Newest first: the first that is too old ends it, so that few manifests are read.
    for delta in sorted(log.deltas, key=lambda one: one.end, reverse=True):
        if delta.entry.made is DeltaOrigin.MERGE:
            continue
        age = now - delta.manifest.created.timestamp()
        if age > WINDOW_SECONDS:
            return
        if age >= 0:  # otherwise a clock was set back, and the age is unknown
            # a manifest does not list itself
            yield delta.manifest.bytes_ + (delta.path / MANIFEST_FILE).stat().st_size
