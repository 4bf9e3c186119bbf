"""How many bytes the next delta may hold, by `--delta-budget` and by what was published lately.

A rate is kept in any ten seconds: a delta may hold what the time since the publication before it allows, and
together with the deltas of the last ten seconds no more than these allow. So a watch that had nothing to send
saves up ten seconds at most. What was sent is read from the log, so that a restart forgets nothing of it.
Merged deltas do not count: no server that follows takes one.
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
"""No span of this length gets more than it allows."""
_WORTH_SECONDS = 1.0
"""A watch waits until a rate allows what this time allows, and what had to go with the delta before."""


class Allowance(Struct, frozen=True):
    """The bytes that the delta may hold that is planned `now`, and the seconds since the one before it.

    `now` is in seconds since 1970. `is_worth` is False while a watch is to wait.
    """

    room: int
    seconds: float
    now: float
    is_worth: bool = True

    @classmethod
    def of(cls, log: DeltaLog, text: str, now: float) -> Allowance:
        """The allowance by the text of `--delta-budget`."""
        budget = DeltaBudget.parse("--delta-budget", text)
        entry, before, due = log.newest.entry, log.newest.manifest.created, 0
        if isinstance(entry, DeltaEntry) and entry.budget is not None:
            before, due = entry.budget.planned, entry.budget.due  # what it took to publish it is not lost
        passed = now - before.timestamp()
        seconds = passed if passed >= 0 else WINDOW_SECONDS  # a clock was set back
        if not budget.is_rate:
            return cls(budget.size, seconds, now)
        room = int(budget.size * min(seconds, WINDOW_SECONDS))
        room = max(0, min(room, int(budget.size * WINDOW_SECONDS) - sum(_sent_lately(log, now))))
        worth = max(budget.size * _WORTH_SECONDS, min(due, budget.size * WINDOW_SECONDS))
        return cls(room, seconds, now, room >= worth)

    def told(self, used: Used) -> Budgeted:
        """What the delta's manifest says of its budget."""
        planned = datetime.fromtimestamp(self.now, timezone.utc)
        return Budgeted(**asdict(used), allowed=self.room, planned=planned, seconds=self.seconds)


def _sent_lately(log: DeltaLog, now: float) -> Iterator[int]:
    """Yield the sizes of the deltas of the last ten seconds."""
    for delta in sorted(log.deltas, key=lambda one: one.end, reverse=True):
        if delta.entry.made is DeltaOrigin.MERGE:
            continue
        age = now - delta.manifest.created.timestamp()
        if age > WINDOW_SECONDS:
            return
        if age >= 0:  # else a clock was set back: when it was published is not known
            yield delta.manifest.bytes_ + (delta.path / MANIFEST_FILE).stat().st_size
