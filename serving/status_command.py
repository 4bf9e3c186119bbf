"""`serve-model status`: show a model's versions on a server, their positions, and how far behind they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exporter.errors import ServerError
from exporter.publish.timeline import Timeline, read_timeline
from exporter.terminal.output import Output
from exporter.transfer.opened import opened
from serving.behind import VersionStanding, ask, compare
from serving.client import ModelClient
from serving.documents import ModelStatus, Published, ServedVersion
from serving.status import VersionState, VersionStatus, error_text


def run(client: ModelClient, published: Path | None, sink: Output) -> None:
    """Ask the server, compare with what is published, and print.

    Raises:
        ServerError: the server does not answer, or no version is available.
        NotUpdatable, ManifestError, CheckpointError: what is published cannot be read.
    """
    statuses = client.status()
    found, target = ask(client, statuses), None
    if published is not None:
        with opened(published, read_only=True) as model:
            target = read_timeline(model.path)
            found = compare(found, target)
    now = datetime.now(UTC)
    document = ModelStatus(
        address=client.address,
        model=client.model,
        published=None if target is None else _published(target),
        versions=[_document(one, now) for one in found],
    )
    sink.result(document)
    columns, rows = _COLUMNS, _rows(found, now)
    if not any(one.event_time for one in found):  # few trainers tell, and a terminal is narrow
        columns = {name: columns[name] for name in columns if name != _EVENT}
        rows = [(*row[:_EVENT_AT], *row[_EVENT_AT + 1 :]) for row in rows]
    sink.table(f"{client.model} on {client.address}{_newest(target)}", columns, rows)
    if target is None and any(one.position is not None for one in found):
        sink.note("to see how far behind a version is: --published MODEL_BASE_PATH")
    _require_available(client, statuses)


_EVENT = "event"
_COLUMNS = {
    "version": "right",
    "state": "left",
    "position": "right",
    "step": "right",
    "behind": "left",
    "age": "right",
    _EVENT: "right",
    "": "left",
}
_EVENT_AT = list(_COLUMNS).index(_EVENT)


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
        problem=one.problem or None,
    )


def _newest(target: Timeline | None) -> str:
    if target is None:
        return ""
    held = "" if target.hold is None else f", held at {target.hold}"
    return f"; published: position {target.at or 'unknown'}{held}"


def _rows(found: Sequence[VersionStanding], now: datetime) -> list[tuple[Any, ...]]:
    return [
        (
            one.status.version,
            one.status.state.name,
            _or_blank(one.position),
            _or_blank(one.step),
            _behind(one),
            _age(one.age_seconds(now)),
            _age(one.event_age_seconds(now)),
            error_text(one.status) or one.problem,
        )
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
    ahead = one.behind_steps is not None and one.behind_steps < 0  # of what was rolled back
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
        hint = "publish a version that loads, or wait for the one that is loading"
        if all(status.state is VersionState.END and not status.code for status in statuses):
            hint = f"let the server serve the model again: serve-model reload {client.address}"
        raise ServerError(
            f"no version of {client.model} is available on {client.address}",
            cause=error_text(first) or f"version {first.version} is in state {first.state.name}",
            hint=hint,
        )
