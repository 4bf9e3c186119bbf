"""Events for changes of a model's state: it is held, a base is wanted, its publisher is silent, ...

Findings describe the present state; an event reports once that it began. A finding counts when two looks in a
row have it, so that a passing state does not wake anybody. An agent that starts reports existing findings,
too: their first events may have been missed.
"""

from __future__ import annotations

import math
import time

from msgspec import Struct

from exporter.publish.judge import Code, Finding
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.standing import assess
from serving.agent.view import FleetView, ModelView

_KINDS = {
    Code.ROLLED_BACK: EventKind.ROLLED_BACK,
    Code.PUBLICATIONS_HELD: EventKind.HELD,
    Code.HELD: EventKind.HELD,
    Code.HOLD_UNREADABLE: EventKind.HELD,
    Code.PUBLISHER_SILENT: EventKind.SILENT,
    Code.DAMAGED: EventKind.DAMAGED,
    Code.BASE_WANTED: EventKind.BASE_WANTED,
}


_HEARD_S = 60.0
"""Seconds for which another thread's event counts as the report of a finding that appears a moment later."""


class _Key(Struct, frozen=True):
    """The identity of a finding: two with equal keys are the same."""

    model: str
    what: EventKind
    about: int | str | None


class Changes:
    """A comparison of each look's findings with the previous look's, which writes events of new ones."""

    def __init__(self, journal: Journal, fresh_within_s: float) -> None:
        self._journal = journal
        self._fresh_within_s = fresh_within_s
        self._before: frozenset[_Key] = frozenset()
        self._reported: frozenset[_Key] = frozenset()
        self._heard: dict[_Key, float] = {}
        journal.read_by(self._hear)

    def look(self, view: FleetView) -> None:
        """Write an event for each finding of `view` that the last look had, too, if it is not yet reported.

        Only findings with a kind of event count. A finding that has disappeared is reported again when it
        returns. No event is written of a rollback that another thread has reported within the last 60 s.
        UsageError if trusted keys cannot be read.
        """
        models = {model.name: model for model in view.models}
        found = {
            _Key(each.model, kind, _about(kind, models[each.model], each)): each
            for each in assess(view, self._fresh_within_s).findings
            if (kind := _KINDS.get(each.code)) is not None
        }
        self._reported &= found.keys()
        for key, finding in found.items():
            if key in self._before and key not in self._reported:
                self._reported |= {key}
                if time.monotonic() - self._heard.get(key, -math.inf) < _HEARD_S:
                    continue
                position = key.about if isinstance(key.about, int) else None
                self._journal.write(
                    AgentEvent(
                        key.what,
                        finding.text,
                        key.model,
                        position=position,
                        why=finding.why,
                        command=finding.command,
                    )
                )
        self._before = frozenset(found)

    def _hear(self, event: AgentEvent) -> None:
        """Record the time of a rollback's event, so that `look` does not report the same rollback again."""
        if event.what is EventKind.ROLLED_BACK:
            self._heard[_Key(event.model, event.what, event.position)] = time.monotonic()


def _about(kind: EventKind, model: ModelView, finding: Finding) -> int | str | None:
    match kind:
        case EventKind.ROLLED_BACK:
            return None if model.rollback is None else model.rollback.back_to
        case EventKind.HELD:
            return model.hold
        case EventKind.DAMAGED:
            return finding.text
        case _:
            return None
