"""Decide what a rollback or a resumption would publish; nothing is written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.delta.format import span_name
from exporter.delta.spans import Position, Span
from exporter.errors import ManifestError, PositionUnknown, UsageError
from exporter.pipeline.republish import RollbackPlan, rollback_accepted
from exporter.publish.commit import next_delta_position
from exporter.publish.delta_log import DeltaLog, LogBase, LogDelta
from exporter.publish.log_entries import DeltaOrigin
from exporter.publish.permission import binding


class Restoration(Struct, frozen=True):
    """Values of an earlier position to be published as the next one, by a delta that fits from `start` on.

    `before` is where resuming is to lead; by default where the log stands.
    """

    of: int
    made: DeltaOrigin
    start: int
    before: int | None = None
    holds: bool = False
    reason: str | None = None
    follows_canary: bool = False
    canary: bool = False


def rollback_of(log: DeltaLog, to: int) -> Restoration:
    """What leads to the values of `to` again.

    Raises:
        PositionUnknown: nothing published stands there.
        UsageError: it is the newest position.
    """
    log.trained_at(to)
    if to == log.at.position:
        raise UsageError(f"position {to} is the newest: there is nothing to roll back")
    before = _before_rollbacks(log) if log.held.binds else None  # those that were lifted are accepted
    start = _jumps_from(log, to)
    return Restoration(to, DeltaOrigin.ROLLBACK, start, before, holds=True, canary=is_canaried(log))


def is_canaried(log: DeltaLog) -> bool:
    """True if a canary's hold stands, or stood when the log was rolled back to where it is held."""
    if log.held.is_canary or not log.held.binds:
        return log.held.is_canary
    with suppress(ManifestError, PositionUnknown):
        held = log.standing(log.hold() or 0)
        return isinstance(held, LogDelta) and held.entry.canary
    return False


def hold_after_resuming(log: DeltaLog) -> int | None:
    """Where a canary's hold takes the place of the one that is lifted; None if there is no canary."""
    return log.hold() if log.held.binds and is_canaried(log) else None


def is_held(log: DeltaLog) -> bool:
    """True if there is a hold to lift, be it a canary's."""
    return log.held.is_canary or bool(binding(log.model, log.base.entry.log))


def resumption_of(log: DeltaLog, lift_only: bool) -> Restoration | None:
    """What publishes the values of before a rollback again; None if the values stay.

    They stay where nothing is held: whoever lifted the hold published them first, or accepted the rollback.

    Raises:
        UsageError: the rollback was accepted, and the values of before are asked for.
    """
    before = None if lift_only else _before_rollbacks(log)
    if before is None or _leads_back_to(log, before):
        return None
    if binding(log.model, log.base.entry.log):
        return Restoration(before, DeltaOrigin.RESUME, log.at.position)
    if log.held.is_canary:
        return None
    raise rollback_accepted(log.model, log.at.position, before)


def rollback_plan(log: DeltaLog, restoration: Restoration | None) -> RollbackPlan:
    """What `_restore` would publish; what it would read of deltas is read and checked.

    Raises:
        PositionUnknown, CheckpointError: as `_restore`.
    """
    if restoration is None:
        hold = hold_after_resuming(log)
        return RollbackPlan(log.at, log.at, None, log.at.position, hold, was_held=is_held(log))
    _, step = log.trained_at(restoration.of)
    for delta in since(log, restoration):
        log.open(delta)
    log.state(restoration.of)
    span = Span(restoration.start, next_delta_position(log.model, None, log.at.position))
    hold = span.end if restoration.holds else hold_after_resuming(log)
    return RollbackPlan(log.at, Position(restoration.of, step), delta_path(log, span), span.end, hold)


def since(log: DeltaLog, restoration: Restoration) -> tuple[LogDelta, ...]:
    """The deltas whose rows a restoration takes back."""
    chain = log.chain(min(restoration.of, restoration.start))
    if not chain:
        raise PositionUnknown(f"no delta leads on from position {restoration.of}")
    return chain


def _jumps_from(log: DeltaLog, to: int) -> int:
    """The earliest position from which a merged delta leads past `to`: from there on all must jump."""
    return min([to, *(delta.start for delta in log.deltas if delta.start < to < delta.end)])


def _before_rollbacks(log: DeltaLog) -> int | None:
    """The position before the first of the rollbacks that nothing was published on; None if there are none.

    A rollback says it, or, of an earlier release, begins where the log stood before.
    """
    at: LogBase | LogDelta = log.newest
    before = None
    while isinstance(at, LogDelta) and at.entry.made is DeltaOrigin.ROLLBACK:
        if at.entry.before is not None:
            return at.entry.before
        before = at.start
        ending = [delta for delta in log.deltas if delta.end == before]
        at = max(ending, key=lambda delta: delta.start, default=log.base)
    return before


def _leads_back_to(log: DeltaLog, position: int) -> bool:
    """True if the newest delta has restored the values of this position."""
    return isinstance(log.newest, LogDelta) and log.newest.entry.back_to == position


def delta_path(log: DeltaLog, span: Span) -> Path:
    """Where a delta of this span is published."""
    return log.path / span_name(span.start, span.end)
