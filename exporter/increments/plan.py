"""Decide how to get from the state that was published last to the trainer's: by increments or by comparison.

Changes between an increment and the next full checkpoint are only known from the following increment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from exporter.delta.format import Change
from exporter.delta.table_changes import KeyedChange
from exporter.increments.history import History, newest
from exporter.increments.increment import Changed, CheckpointId, StoredIncrement
from exporter.increments.trained import TrainerVersion

LEFT_OUT = "rows that moved little were left out of what was published last"
ROUNDED = "rows of what was published last were rounded in another way than is asked for"


class AnyIncrement(Protocol):
    """An increment of any family."""

    @property
    def path(self) -> Path:
        """The increment's path, for messages."""

    def changes(self) -> Iterator[tuple[Changed, Change]]:
        """Yield each changed variable of the trainer with its new value or rows, checksums verified.

        Row numbers are the trainer's. While iterating, raises CheckpointError and subclasses if the increment
        is damaged or gone.
        """

    def keyed_changes(self, names: Collection[str]) -> Iterator[KeyedChange]:
        """Yield the new rows and removed keys of the named tables by keys, every checksum verified.

        Unknown names are ignored. Raises, at the call or while iterating, CheckpointError and subclasses if
        the increment is damaged or gone.
        """

    def row_counts(self) -> Counter[str]:
        """Return the number of changed rows or keys of each table, by name, from manifest or index alone."""


class ChangePlan(Struct, frozen=True):
    """A plan to reach the trainer's state `target`, which is to be published next.

    `increments` hold all changes if `is_known`. Otherwise the target is the full checkpoint with `increments`
    applied on top, and it must be compared with the published state; `reason` says why.
    """

    target: TrainerVersion
    step: int
    increments: tuple[AnyIncrement, ...] = ()
    is_known: bool = True
    reason: str = ""

    @property
    def is_nothing(self) -> bool:
        """True if the state published last is the target."""
        return self.is_known and not self.increments


def plan_changes(
    published: TrainerVersion,
    full: CheckpointId,
    history: History,
    within: float = 0.0,
    *,
    awaits_increment: bool = False,
    is_alone: bool = False,
) -> ChangePlan:
    """Return the plan of the publication after `published`: of the full checkpoint `full` and its increments.

    - The target is the last increment after `full`, or the increment that `full` equals, or `full` itself.
    - If the target is published, and no published row is further than `within` (a Euclidean norm) from the
      trainer's, there is nothing to do.
    - If the published state is exact, and increments connect it to the target, they hold all changes.
    - Otherwise the target is compared with the published state, row by row; `reason` says why.
    - With `is_alone`, `full` is to be published alone: increments after `full` do not count.
    - With `awaits_increment` and no increment after `full` yet, the plan ends where the next increment will
      begin: that increment will hold the changes up to `full`, and nothing has to be compared.

    For example: increments A (steps 100 to 110) and B (110 to 120) follow checkpoint 100, and checkpoint 125
    follows B. If A is published and the next increment is awaited, B is sent now, and the changes between 120
    and 125 come with the next one. Without waiting, checkpoint 125 is compared.
    """
    after = () if is_alone else history.after(full)
    equal = next((name for name in history.same(full) if isinstance(name, str)), None)
    tip = after[-1].increment.id if after else equal
    if awaits_increment and tip is None and published.is_exact:
        plan = _plan_before(published, full, history)
        if plan is not None:
            return plan
    last_event = newest([history.newest_event(full), *[stored.increment.event_time for stored in after]])
    target = TrainerVersion.of(full, tip, last_event)
    step = after[-1].increment.to_step if after else full.step
    is_there = published.increment == tip and (tip is not None or published.checkpoint == full)
    if is_there and published.is_within(within):
        event_time = newest([last_event, published.newest_event])
        return ChangePlan(TrainerVersion.of(full, tip, event_time), step)
    chain = history.chain(published.state, tip) if tip is not None and published.is_exact else None
    if chain is not None:
        event_time = newest([last_event, _last_event(published, chain)])
        return ChangePlan(TrainerVersion.of(full, tip, event_time), step, chain)
    reason = _reason(published, full, history, is_alone=is_alone)
    return ChangePlan(target, step, after, is_known=False, reason=reason)


def _plan_before(published: TrainerVersion, full: CheckpointId, history: History) -> ChangePlan | None:
    """Plan the changes from `published` up to the state at which the next increment after `full` will begin.

    The plan is empty if that state is published. None if no marker of `full` names that state, or increments
    that lead to it are missing.
    """
    for marker in history.markers_of(full):
        others = () if published.increment is not None else history.markers_of(published.checkpoint)
        next_of = marker.session, marker.after  # equal for two checkpoints: the same increment comes next
        if marker.session is not None and any((each.session, each.after) == next_of for each in others):
            return ChangePlan(published, full.step)
        before = marker.after
        chain = None if before is None else history.chain(published.state, before)
        if before is not None and chain is not None:
            found = history.find(before)
            step = found.increment.to_step if found else full.step
            target = TrainerVersion.of(published.checkpoint, before, _last_event(published, chain))
            return ChangePlan(target, step, chain)
    return None


def _last_event(published: TrainerVersion, chain: Sequence[StoredIncrement]) -> datetime | None:
    """Return the time of the newest event that `published` or an increment of the chain was trained on.

    None if no time is known.
    """
    return newest([published.newest_event, *[stored.increment.event_time for stored in chain]])


def _reason(published: TrainerVersion, full: CheckpointId, history: History, *, is_alone: bool) -> str:
    """Return the first reason that applies why `published` and `full` must be compared, as a sentence."""
    if not published.is_exact:
        return LEFT_OUT if published.left_out is not None else ROUNDED
    if is_alone and history.after(full):
        return f"{full.name} is named, and not what came after it"
    if not history.increments:
        return "the trainer writes no increments"
    if not history.markers_of(full):
        return f"nothing says where {full.name} stands among the trainer's increments"
    if published.increment is None:
        return f"no increments lead on from {published.checkpoint.name}, which was published last"
    if history.find(published.increment) is None:
        return "the increment that was published last is gone"
    if any(found.after for found in history.markers_of(full)) and not history.after(full):
        return f"no increment tells yet what changed until {full.name}"
    return f"the trainer went back: {full.name} does not continue what was published last"
