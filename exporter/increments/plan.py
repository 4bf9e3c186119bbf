"""From what was published last to what the trainer has now: which increments lead there, or that none do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter.delta.format import Change
from exporter.increments.history import History, Milestone, State
from exporter.increments.increment import Changed, CheckpointId
from exporter.increments.trained import Trained

LEFT_OUT = "rows that moved little were left out of what was published last"
ROUNDED = "rows of what was published last were rounded in another way than is asked for"


class AnyIncrement(Protocol):
    """What a trainer, of whatever family, left between full checkpoints."""

    @property
    def path(self) -> Path:
        """What it is called by."""

    def changes(self) -> Iterator[tuple[Changed, Change]]:
        """The trainer's variables with their new values; rows are numbered as the trainer stores them."""


@dataclass(frozen=True, slots=True)
class Way:
    """What to publish next. `target` is the trainer's state that is reached.

    `increments` hold everything that changed if `is_known`. Otherwise the target is the full checkpoint with
    `increments` laid over it, and it is to be compared with what is published; `why` says for what reason.
    """

    target: Trained
    step: int
    increments: tuple[AnyIncrement, ...] = ()
    is_known: bool = True
    why: str = ""

    @property
    def is_nothing(self) -> bool:
        """True if what was published last is the target."""
        return self.is_known and not self.increments


def find_way(
    published: Trained,
    full: CheckpointId,
    history: History,
    within: float = 0.0,
    *,
    awaits_increment: bool = False,
) -> Way:
    """The way from the state that was published last to the newest full checkpoint and its increments.

    Of the state that was published last, rows may stay behind by less than `within`. Changes between an
    increment and the full checkpoint after it are only known from the next increment. If that is awaited, the
    way ends before the checkpoint: nothing has to be compared.
    """
    after = history.after(full)
    equal = next((name for name in history.same(full) if isinstance(name, str)), None)
    tip = after[-1].increment.id if after else equal
    if awaits_increment and tip is None and published.is_exact:
        way = _way_before(published, full, history)
        if way is not None:
            return way
    target = Trained(full, tip)
    step = after[-1].increment.to_step if after else full.step
    is_there = published.increment == tip and (tip is not None or published.checkpoint == full)
    if is_there and published.is_within(within):
        return Way(target, step)
    chain = history.chain(_state(published), tip) if tip is not None and published.is_exact else None
    if chain is not None:
        return Way(target, step, chain)
    return Way(target, step, after, is_known=False, why=_why(published, full, history))


def _way_before(published: Trained, full: CheckpointId, history: History) -> Way | None:
    """The way to where a full checkpoint's next increment begins, None if that is not known."""
    for milestone in history.milestones_of(full):
        if any(_is_next_the_same(milestone, other) for other in _milestones(published, history)):
            return Way(published, full.step)
        before = milestone.after
        chain = None if before is None else history.chain(_state(published), before)
        if before is not None and chain is not None:
            found = history.find(before)
            step = found.increment.to_step if found else full.step
            return Way(Trained(published.checkpoint, before), step, chain)
    return None


def _milestones(published: Trained, history: History) -> tuple[Milestone, ...]:
    return () if published.increment is not None else history.milestones_of(published.checkpoint)


def _is_next_the_same(milestone: Milestone, other: Milestone) -> bool:
    """True if one increment leads on from both of two full checkpoints."""
    is_one_session = milestone.session is not None and milestone.session == other.session
    return is_one_session and milestone.after == other.after


def _state(published: Trained) -> State:
    """The increment or, without one, the full checkpoint that was published."""
    return published.checkpoint if published.increment is None else published.increment


def _why(published: Trained, full: CheckpointId, history: History) -> str:
    if not published.is_exact:
        return LEFT_OUT if published.left_out is not None else ROUNDED
    if not history.increments:
        return "the trainer writes no increments"
    if published.increment is None:
        return f"no increments lead on from {published.checkpoint.name}, which was published last"
    if history.find(published.increment) is None:
        return "the increment that was published last is gone"
    if any(found.after for found in history.milestones_of(full)) and not history.after(full):
        return f"no increment tells yet what changed until {full.name}"
    return f"the trainer went back: {full.name} does not continue what was published last"
