"""Decide where a training stands among its increments: runs, sessions and parents.

Whatever a session continues, it has an id and a generation of its own: what another session wrote after the
state that it restored is not in its variables, and not in its increments.
"""

from __future__ import annotations

import secrets

from msgspec import Struct
from msgspec.structs import replace

from exporter.increments.history import History
from exporter.increments.increment import CheckpointId, Increment, StoredIncrement


class RunTip(Struct, frozen=True):
    """The run and session, and what the next increment continues: `parent`, at `step`."""

    run: str
    session: str
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
            session=self.session,
            generation=self.generation,
            parent=self.parent,
            from_step=self.step,
            to_step=max(to_step, self.step + 1),
            variables=(),
        )

    def after(self, increment: Increment) -> RunTip:
        """The tip once `increment` is durable."""
        return replace(self, parent=increment.id, step=increment.to_step)


def continued(history: History, last: StoredIncrement) -> RunTip:
    """The tip of a new session whose state is exactly that of the chain's last increment."""
    increment = last.increment
    return RunTip(increment.run, _new_id(), history.generation + 1, increment.id, increment.to_step)


def started(history: History, checkpoint: CheckpointId) -> RunTip:
    """The tip of a new session whose state is that of a full checkpoint, plus rows that it knows of.

    The run goes on if the checkpoint equals the end of its chain; otherwise another one begins.
    """
    if not history.after(checkpoint):
        equal = (history.find(name) for name in history.same(checkpoint) if isinstance(name, str))
        if last := next(filter(None, equal), None):
            return continued(history, last)
    return RunTip(_new_id(), _new_id(), history.generation + 1, checkpoint, checkpoint.step)


def _new_id() -> str:
    return secrets.token_hex(16)
