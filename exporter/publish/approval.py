"""How far a canary has approved a log: its hold, moved on by compare-and-set under the model's lock.

The agent's canary lets one server pass the hold, and moves it on when that server answers as it should. What
it expects to find tells it whether others decided meanwhile: a person, a rollback, or another agent.
"""

from __future__ import annotations

from pathlib import Path

from exporter.publish.commit import model_lock
from exporter.publish.hold import Hold
from exporter.publish.staging import Staging


def approve(log: Path, model: Path, *, expected: int | None, position: int) -> bool:
    """Move the canary's hold of a log from `expected` (None: there is no hold) to a position.

    False if something else is there: nothing is changed then.

    Raises:
        TargetBusy, TargetNotWritable, DiskFull, PublishError: the hold is as it was.
    """
    hold = Hold(log)
    with Staging(model) as staging, model_lock(model):
        if hold.approved() != expected or hold.binds:
            return False
        hold.put(position, staging, canary=True)
    return True
