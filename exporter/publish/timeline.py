"""List what was published for a model, in order: versions and deltas of every log that is still there.

Everything is read from manifests. Retention may have removed some of it; a merged delta tells how many
publications it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.spans import Position
from exporter.errors import ManifestError, NotUpdatable
from exporter.newer_python import StrEnum
from exporter.publish.delta_log import DeltaLog, LogDelta, list_deltas, log_of
from exporter.publish.manifest import BaseEntry, DeltaEntry, DeltaOrigin, Manifest
from exporter.publish.permission import held_at
from exporter.publish.versions import VersionDir, nothing_published, read_manifest, version_dirs
from exporter.storage.files import is_gone
from exporter.storage.layout import DELTAS_DIRECTORY


class PublicationKind(StrEnum):
    """What an event is; a `version` takes no deltas, a `rebase` is a base in the middle of its log."""

    VERSION = "version"
    BASE = "base"
    REBASE = "rebase"
    DELTA = "delta"
    MERGE = "merge"
    ROLLBACK = "rollback"
    RESUME = "resume"
    DAMAGED = "damaged"


class Event(Struct, frozen=True):
    """Something that was published; what is damaged has only a name."""

    what: PublicationKind
    """`version` (takes no deltas), `base`, `rebase`, `delta`, `merge`, `rollback`, `resume` or `damaged`."""
    path: Path
    """Its directory."""
    position: int
    """Where it leads."""
    from_position: int | None = None
    """Where a delta begins."""
    created: datetime | None = None
    """When it was published."""
    step: int | None = None
    """The training step of its values."""
    log: int | None = None
    """The log that it belongs to."""
    checkpoint: str = ""
    """The checkpoint that it was made from."""
    rows: int | None = None
    """Rows in a delta."""
    compared: bool = False
    """True if a delta's rows were found by comparing checkpoints."""
    parts: int = 1
    """How many publications a merger holds."""
    merged_away: int = 0
    """How many of those are not there any more by themselves."""
    merged_into: str | None = None
    """A merger that leads past this delta."""
    back_to: int | None = None
    """The position or version whose values a rollback or resumption brought back."""
    reason: str = ""
    """Why, as it was said then; empty if nothing was."""
    is_past_hold: bool = False
    """True if servers do not go there by themselves."""
    is_current: bool = True
    """False if it belongs to a log that has ended."""
    problem: str = ""
    """What is wrong with it; empty if nothing is."""
    event_time: datetime | None = None
    """When the newest event happened that its values were trained on."""


class Timeline(Struct, frozen=True):
    """Every event in the order of positions, and where the model stands; None for what is not known.

    `log` is the newest version's, None where versions take no deltas.
    """

    model: Path
    events: tuple[Event, ...]
    at: Position | None
    log: DeltaLog | None
    hold: int | None


def read_timeline(model: Path) -> Timeline:
    """Read the history of a model.

    Raises:
        NotUpdatable: nothing is published.
        ManifestError: the model cannot be looked at.
    """
    versions = version_dirs(model)
    events = [_version(child) for child in versions if child.has_manifest]
    if not events:
        raise nothing_published(model)
    # Before the deltas are listed, as servers do: then the delta of a rollback is there if its hold is.
    hold = held_at(model, versions)
    log, at = None, None
    try:
        log = log_of(model, versions)
        at = log.at
    except NotUpdatable:
        at = Position(events[0].position, events[0].step)
    except ManifestError:  # it is among the events, with what is wrong
        pass
    known = {} if log is None else {log.path: log.deltas}
    for directory in _logs(model):
        events += _deltas(known[directory] if directory in known else list_deltas(directory))
    # What is damaged and gone, retention has removed meanwhile.
    there = (
        event for event in events if event.what is not PublicationKind.DAMAGED or not is_gone(event.path)
    )
    number = None if log is None else log.number
    events = [_placed(event, number, hold) for event in there]
    return Timeline(model, tuple(sorted(events, key=_order)), at, log, hold)


def _logs(model: Path) -> list[Path]:
    directory = model / DELTAS_DIRECTORY
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _order(event: Event) -> tuple[int, float, int]:
    """By position; of what leads to one position, as it was published."""
    return event.position, event.created.timestamp() if event.created else 0.0, event.from_position or 0


def _placed(event: Event, log: int | None, hold: int | None) -> Event:
    is_current = event.log == log
    past = hold is not None and is_current and event.position > hold
    return replace(event, is_current=is_current, is_past_hold=past)


def _version(child: VersionDir) -> Event:
    try:
        manifest = read_manifest(child.path)
    except ManifestError as error:
        return Event(PublicationKind.DAMAGED, child.path, child.version, problem=error.message)
    what, back_to, log, reason = PublicationKind.VERSION, None, None, ""
    if isinstance(manifest.incremental, BaseEntry):
        log = manifest.incremental.log
        what = PublicationKind.BASE if log == manifest.position else PublicationKind.REBASE
    if manifest.taken_back is not None:
        what, back_to = PublicationKind(manifest.taken_back.made), manifest.taken_back.back_to
        reason = manifest.taken_back.reason or ""
    return replace(_event(what, child.path, manifest), log=log, back_to=back_to, reason=reason)


def _event(what: PublicationKind, path: Path, manifest: Manifest) -> Event:
    return Event(
        what,
        path,
        manifest.position,
        created=manifest.created,
        step=manifest.step,
        from_position=manifest.from_position,
        checkpoint=manifest.source.checkpoint,
        event_time=None if manifest.incremental is None else manifest.incremental.trained.newest_event,
    )


def _deltas(deltas: Sequence[LogDelta]) -> Iterator[Event]:
    events = [_delta(delta) for delta in deltas]
    for event in events:
        if event.what is PublicationKind.MERGE:
            inside = [
                other
                for other in events
                if other.what is not PublicationKind.MERGE and _leads_past(event, other)
            ]
            away = max(0, event.parts - sum(other.parts for other in inside))
            yield replace(event, merged_away=away, merged_into=_merger(events, event))
        else:
            yield replace(event, merged_into=_merger(events, event))


def _leads_past(merger: Event, other: Event) -> bool:
    if merger.from_position is None or other.from_position is None or other.path == merger.path:
        return False
    return merger.from_position <= other.from_position and other.position <= merger.position


def _merger(events: Iterable[Event], part: Event) -> str | None:
    """The name of the longest merger that holds a delta."""
    found = [event for event in events if event.what is PublicationKind.MERGE and _leads_past(event, part)]
    longest = max(found, key=lambda event: event.position - (event.from_position or 0), default=None)
    return None if longest is None else f"{longest.from_position}-{longest.position}"


def _delta(delta: LogDelta) -> Event:
    try:
        manifest, entry = delta.manifest, delta.entry
    except ManifestError as error:
        log = int(delta.path.parent.name) if delta.path.parent.name.isdecimal() else None
        return Event(
            PublicationKind.DAMAGED, delta.path, delta.end, delta.start, log=log, problem=error.message
        )
    return replace(
        _event(_kind(entry), delta.path, manifest),
        log=entry.log,
        rows=entry.rows,
        compared=entry.made is DeltaOrigin.COMPARISON,
        parts=entry.parts,
        back_to=entry.back_to,
        reason=entry.reason or "",
    )


def _kind(entry: DeltaEntry) -> PublicationKind:
    return {
        DeltaOrigin.MERGE: PublicationKind.MERGE,
        DeltaOrigin.ROLLBACK: PublicationKind.ROLLBACK,
        DeltaOrigin.RESUME: PublicationKind.RESUME,
    }.get(entry.made, PublicationKind.DELTA)
