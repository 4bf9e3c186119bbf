"""Where a training stands in the history of its increments: pure decisions about runs and parents."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from exporter.delta.history import History
from exporter.delta.increment import CheckpointId, Increment, StoredIncrement


@dataclass(frozen=True, slots=True)
class Standing:
    """The run, and what the next increment continues: `parent`, at `step`."""

    run: str
    generation: int
    parent: str | CheckpointId
    step: int

    @property
    def last_increment(self) -> str | None:
        """The increment that was written or restored last, if the run has one."""
        return self.parent if isinstance(self.parent, str) else None

    def draft(self, to_step: int) -> Increment:
        """The next increment, which does not know its variables yet."""
        return Increment(
            id=secrets.token_hex(16),
            run=self.run,
            generation=self.generation,
            parent=self.parent,
            from_step=self.step,
            to_step=max(to_step, self.step + 1),
            variables=(),
        )

    def after(self, increment: Increment) -> Standing:
        """The standing once `increment` is durable."""
        return replace(self, parent=increment.id, step=increment.to_step)


def continued(last: StoredIncrement) -> Standing:
    """The standing of a trainer whose state is exactly that of the chain's last increment."""
    increment = last.increment
    return Standing(increment.run, increment.generation, increment.id, increment.to_step)


def started(history: History, checkpoint: CheckpointId) -> Standing:
    """The standing of a trainer whose state is that of a full checkpoint, plus rows that it knows of.

    The chain goes on if the checkpoint equals its end; otherwise a run of its own begins.
    """
    milestone = history.milestone(checkpoint)
    if milestone is not None and milestone.is_equal and milestone.after is not None:
        last = history.find(milestone.after)
        if last is not None and not history.after(checkpoint):
            return continued(last)
    return Standing(secrets.token_hex(16), history.generation + 1, checkpoint, checkpoint.step)
