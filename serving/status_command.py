"""`serve-model status`: show a model's versions on a server, their positions, and how far behind they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import CallFailed, ManifestError, PositionError, ServerError
from exporter.publish.delta_log import DeltaLog
from exporter.publish.timeline import Event, Timeline, read_timeline
from exporter.terminal.output import Output
from exporter.transfer.opened import opened
from serving.client import ModelClient
from serving.documents import ModelStatus, Published, ServedVersion
from serving.status import VersionState, VersionStatus, error_text
from serving.updates import read_incremental_status


class VersionStanding(Struct, frozen=True):
    """One version on a server; a field is None if neither the server nor the model base path reports it.

    `behind_deltas` counts the deltas that an update would apply now, up to the hold; `behind_steps` counts
    training steps from here to the newest position. `since` is when the served values were published,
    `event_time` is the time of the newest event that they were trained on. `unsettled` counts the responses
    since loading that may mix positions. `problem` says why a field is unknown.
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
    return VersionStanding(status, found.position, found.step, found.lineage, unsettled=found.unsettled)


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


_EVENT = "event"
_UNSETTLED = "unsettled"
_COLUMNS = {
    "version": "right",
    "state": "left",
    "position": "right",
    "step": "right",
    "behind": "left",
    "age": "right",
    _EVENT: "right",
    _UNSETTLED: "right",
    "": "left",
}


def run(client: ModelClient, published: Path | None, sink: Output) -> None:
    """Ask the server, compare with what is published, and print.

    Raises:
        ServerError: the server does not respond, or no version is available.
        NotUpdatable, ManifestError, CheckpointError: the published versions cannot be read.
    """
    statuses = client.status()
    found, target = ask(client, statuses), None
    if published is not None:
        with opened(published, read_only=True) as model:
            target = read_timeline(model.path)
            found = compare(found, target)
    now = datetime.now(timezone.utc)
    document = ModelStatus(
        address=client.address,
        model=client.model,
        published=None if target is None else _published(target),
        versions=[_document(one, now) for one in found],
    )
    sink.result(document)
    columns, found_rows = _COLUMNS, _rows(found, now)
    seldom = {_EVENT: any(one.event_time for one in found), _UNSETTLED: any(one.unsettled for one in found)}
    shown = [name for name in columns if seldom.get(name, True)]  # a terminal is narrow
    rows = [tuple(row[name] for name in shown) for row in found_rows]
    columns = {name: columns[name] for name in shown}
    sink.table(f"{client.model} on {client.address}{_newest(target)}", columns, rows)
    if target is None and any(one.position is not None for one in found):
        sink.note("to see how far behind a version is: --published MODEL_BASE_PATH")
    _require_available(client, statuses)


def _published(history: Timeline) -> Published:
    at = history.at
    return Published(at.position if at else None, at.step if at else None, history.hold)


def _document(one: VersionStanding, now: datetime) -> ServedVersion:
    age, event_age = one.age_seconds(now), one.event_age_seconds(now)
    return ServedVersion(
        version=one.status.version,
        state=one.status.state.name,
        code=one.status.code.name,
        message=one.status.message,
        position=one.position,
        step=one.step,
        lineage=one.lineage,
        behind_deltas=one.behind_deltas,
        behind_steps=one.behind_steps,
        newer_version=one.newer_version,
        published=one.since,
        age_seconds=None if age is None else round(age, 3),
        event_time=one.event_time,
        event_age_seconds=None if event_age is None else round(event_age, 3),
        unsettled=one.unsettled,
        problem=one.problem or None,
    )


def _newest(target: Timeline | None) -> str:
    if target is None:
        return ""
    held = "" if target.hold is None else f", held at {target.hold}"
    return f"; published: position {target.at or 'unknown'}{held}"


def _rows(found: Sequence[VersionStanding], now: datetime) -> list[dict[str, Any]]:
    return [
        {
            "version": one.status.version,
            "state": one.status.state.name,
            "position": _or_blank(one.position),
            "step": _or_blank(one.step),
            "behind": _behind(one),
            "age": _age(one.age_seconds(now)),
            _EVENT: _age(one.event_age_seconds(now)),
            _UNSETTLED: _or_blank(one.unsettled),
            "": error_text(one.status) or one.problem,
        }
        for one in found
    ]


def _or_blank(value: int | None) -> str:
    return "" if value is None else str(value)


def _behind(one: VersionStanding) -> str:
    if one.newer_version is not None:
        return f"version {one.newer_version} is newer"
    if one.behind_deltas is None:
        return ""
    if one.behind_deltas == 0:
        return "no"
    ahead = one.behind_steps is not None and one.behind_steps < 0  # the log was rolled back behind it
    steps = f", {abs(one.behind_steps)} steps{' ahead' * ahead}" if one.behind_steps else ""
    return f"{one.behind_deltas} delta{'s' * (one.behind_deltas > 1)}{steps}"


def _age(seconds: float | None) -> str:
    """`42 s`, `5 min`, `3 h`, `2 d`."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _require_available(client: ModelClient, statuses: Sequence[VersionStatus]) -> None:
    if not any(status.state is VersionState.AVAILABLE for status in statuses):
        first = statuses[0]
        hint = "publish a version that loads, or wait for the version that is loading"
        if all(status.state is VersionState.END and not status.code for status in statuses):
            hint = f"let the server serve the model again: serve-model reload {client.address}"
        raise ServerError(
            f"no version of {client.model} is available on {client.address}",
            cause=error_text(first) or f"version {first.version} is in state {first.state.name}",
            hint=hint,
        )
