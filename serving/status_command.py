"""`serve-model status`: show a model's versions on a server, their positions, and how far behind they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
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

_EVENT = "event"
_UNSETTLED = "unsettled"
_TABLES = "tables"
_COLUMNS = {
    "version": "right",
    "state": "left",
    "position": "right",
    "step": "right",
    "behind": "left",
    "age": "right",
    _EVENT: "right",
    _UNSETTLED: "right",
    _TABLES: "left",
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
    seldom = {
        _EVENT: any(one.event_time for one in found),
        _UNSETTLED: any(one.unsettled for one in found),
        _TABLES: any(one.tables for one in found),
    }
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
        tables=one.tables.text if one.tables else None,
        overlay_percent=one.tables.overlay_percent if one.tables else None,
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
            _TABLES: one.tables.text if one.tables else "",
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
