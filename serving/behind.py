"""Compare the versions on a server with what is published.

The server reports versions and positions. What is published is read from the model base path, so the caller
needs access to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CallFailed, ManifestError, PositionError
from exporter.publish.delta_log import DeltaLog
from exporter.publish.timeline import Event, Timeline
from serving.client import ModelClient
from serving.status import VersionState, VersionStatus
from serving.updates import ServedTables, read_incremental_status


class VersionStanding(Struct, frozen=True):
    """One version on a server; a field is None if neither the server nor the model base path reports it.

    `behind_deltas` counts the deltas that an update would apply now, up to the hold; `behind_steps` counts
    training steps from here to the newest position. `since` is when the served values were published,
    `event_time` is the time of the newest event that they were trained on. `unsettled` counts the responses
    since loading that may mix positions. `tables` are those that were to be mapped. `problem` says why a
    field is unknown.
    """

    status: VersionStatus
    position: int | None = None
    step: int | None = None
    lineage: str | None = None
    behind_deltas: int | None = None
    behind_steps: int | None = None
    newer_version: int | None = None
    since: datetime | None = None
    event_time: datetime | None = None
    unsettled: int | None = None
    tables: ServedTables | None = None
    problem: str = ""

    def age_seconds(self, now: datetime) -> float | None:
        """Seconds since the served values were published."""
        return None if self.since is None else max(0.0, (now - self.since).total_seconds())

    def event_age_seconds(self, now: datetime) -> float | None:
        """Seconds since the newest event that the served values were trained on."""
        return None if self.event_time is None else max(0.0, (now - self.event_time).total_seconds())


def ask(client: ModelClient, statuses: Sequence[VersionStatus]) -> list[VersionStanding]:
    """Ask each available version for its position; versions without deltas have none."""
    return [_ask(client, status) for status in statuses]


def _ask(client: ModelClient, status: VersionStatus) -> VersionStanding:
    if status.state is not VersionState.AVAILABLE:
        return VersionStanding(status)
    try:
        found = read_incremental_status(client, status.version)
    except CallFailed as error:  # it may be unloaded by now
        return VersionStanding(status, problem=error.cause or error.message)
    if found is None:
        return VersionStanding(status)
    return VersionStanding(
        status, found.position, found.step, found.lineage, unsettled=found.unsettled, tables=found.tables
    )


def compare(standings: Sequence[VersionStanding], target: Timeline) -> list[VersionStanding]:
    """Add to each available version how far it is behind what is published."""
    return [
        _compare(found, target) if found.status.state is VersionState.AVAILABLE else found
        for found in standings
    ]


def _compare(found: VersionStanding, target: Timeline) -> VersionStanding:
    events = target.events
    own = next((event for event in events if event.path.name == str(found.status.version)), None)
    if own is None:
        return replace(found, problem=f"version {found.status.version} is not published there")
    newest = max(int(event.path.name) for event in events if event.from_position is None)
    newer = newest if newest > found.status.version else None
    if found.position is None:
        return replace(found, position=own.position, step=own.step, since=own.created, newer_version=newer)
    since = _published_at(events, own.log, found.position)
    event_time = _event_time(events, own.log, found.position)
    log = target.log
    if log is None or log.number != own.log:
        problem = "" if newer is None else "its log has ended"
        return replace(found, since=since, event_time=event_time, newer_version=newer, problem=problem)
    if log.lineage != found.lineage:
        return replace(found, problem="it belongs to another log than the published one")
    steps = None
    if found.step is not None and log.at.step is not None:
        steps = log.at.step - found.step
    deltas, problem = _deltas_left(log, found.position, target.hold)
    return replace(
        found,
        behind_deltas=deltas,
        behind_steps=steps,
        since=since,
        event_time=event_time,
        problem=problem,
    )


def _published_at(events: Sequence[Event], log: int | None, position: int) -> datetime | None:
    """When a position was first published. A merged delta or a base may lead there again later."""
    times = [event.created for event in events if (event.log, event.position) == (log, position)]
    return min((time for time in times if time is not None), default=None)


def _event_time(events: Sequence[Event], log: int | None, position: int) -> datetime | None:
    """The newest event that a position was trained on, from the first publication that records one."""
    there = (event.event_time for event in events if (event.log, event.position) == (log, position))
    return next((time for time in there if time is not None), None)


def _deltas_left(log: DeltaLog, position: int, hold: int | None) -> tuple[int | None, str]:
    try:
        return len(log.ahead_of(position, hold)), ""
    except (PositionError, ManifestError) as error:
        return None, error.message
