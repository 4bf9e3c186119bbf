"""From what was published last to what the trainer has now: which increments lead there, or that none do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter.delta.entry import Trained
from exporter.delta.format import Change
from exporter.delta.history import History
from exporter.delta.increment import Changed, CheckpointId, StoredIncrement

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

    Of the state that was published last, rows may stay behind by less than `within`. What changed between an
    increment and the full checkpoint after it, only the next increment tells. If one is awaited, the way ends
    before the checkpoint: nothing has to be compared.
    """
    after = history.after(full)
    milestone = history.milestone(full)
    before = milestone.after if milestone else None
    if awaits_increment and before is not None and not after and published.is_exact:
        chain = _chain_to(before, published, history)
        if chain is not None:
            step = chain[-1].increment.to_step if chain else _step_of(before, history, full)
            return Way(Trained(published.checkpoint, before), step, chain)
    tip = after[-1].increment.id if after else before if milestone and milestone.is_equal else None
    target = Trained(full, tip)
    step = after[-1].increment.to_step if after else full.step
    is_there = published.increment == tip and (tip is not None or published.checkpoint == full)
    if is_there and published.is_within(within):
        return Way(target, step)
    chain = _chain_to(tip, published, history) if tip is not None and published.is_exact else None
    if chain is not None:
        return Way(target, step, chain)
    return Way(target, step, after, is_known=False, why=_why(published, full, history))


def _chain_to(tip: str, published: Trained, history: History) -> tuple[StoredIncrement, ...] | None:
    """The increments from the published state to `tip`, None if they do not hang together."""
    starts = _starts(published, history)
    chain: list[StoredIncrement] = []
    wanted: str | CheckpointId = tip
    while wanted not in starts:
        found = history.find(wanted) if isinstance(wanted, str) else None
        if found is None or found in chain:
            return None
        chain.append(found)
        wanted = found.increment.parent
    return tuple(reversed(chain))


def _starts(published: Trained, history: History) -> set[str | CheckpointId]:
    """What the parent of the first increment may be: the published state, by all its names."""
    if published.increment is not None:
        return {published.increment}
    return history.parents(published.checkpoint)


def _step_of(increment: str, history: History, full: CheckpointId) -> int:
    found = history.find(increment)
    return found.increment.to_step if found else full.step


def _why(published: Trained, full: CheckpointId, history: History) -> str:
    if not published.is_exact:
        return LEFT_OUT if published.left_out is not None else ROUNDED
    if not history.increments:
        return "the trainer writes no increments"
    if published.increment is None:
        return f"no increments lead on from {published.checkpoint.name}, which was published last"
    if history.find(published.increment) is None:
        return "the increment that was published last is gone"
    milestone = history.milestone(full)
    if milestone and milestone.after and not history.after(full):
        return f"no increment tells yet what changed until {full.name}"
    return f"the trainer went back: {full.name} does not continue what was published last"
