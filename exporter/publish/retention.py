"""Remove old versions and deltas such that no reader sees half of one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timezone
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from exporter.delta.format import log_name
from exporter.delta.spans import expendable
from exporter.errors import CheckpointError, ManifestError, PositionMoved
from exporter.options import ExportRequest
from exporter.publish.delta_log import DeltaLog, LogDelta, list_deltas
from exporter.publish.manifest import BaseEntry
from exporter.publish.tags import read_tags, tagged_versions
from exporter.publish.versions import (
    VersionDir,
    log_directories,
    published_versions,
    read_head,
    read_manifest,
)
from exporter.storage.files import close_quietly, open_lock, try_lock
from exporter.storage.layout import MANIFEST_FILE, TRASH_PREFIX

GRACE_SECONDS = 300.0
"""The time that a superseded version stays: a server polls each second but loads for minutes, and must not
find its files gone meanwhile."""


class KeptVersion(Struct, frozen=True):
    """A version that retention wanted to remove but could not; the next publication tries again."""

    version: int
    """Its number."""
    reason: str
    """Why it was not removed."""


class Keep(Struct, frozen=True):
    """The versions to keep: the `newest` ones, and the newest of each recent hour and day.

    Of the hours in which a version was published, the last `hourly` count; of the days, the last `daily`.
    Both are in UTC; 0 keeps none.
    """

    newest: int
    hourly: int = 0
    daily: int = 0

    @classmethod
    def of(cls, request: ExportRequest) -> Keep | None:
        """The versions that an export request asks to keep; None if it keeps all."""
        return None if request.keep is None else cls(request.keep, request.keep_hourly, request.keep_daily)


class Retired(Struct, frozen=True):
    """The versions that retention removed and kept; `trash` are hidden directories, to be deleted."""

    removed: tuple[int, ...] = ()
    kept: tuple[KeptVersion, ...] = ()
    trash: tuple[Path, ...] = ()


def retire(versions: Iterable[VersionDir], *, keep: Keep, now: float, grace_seconds: float) -> Retired:
    """Rename all versions except those to keep to hidden directories, to be deleted by the caller (`trash`).

    The caller holds the model's lock. Only versions with a manifest count and go: others were not published
    by this program. A version stays if a process has a lease of it (`exporter.publish.versions.lease`), if
    less than `grace_seconds` have passed between the publication of its successor and `now` (seconds since
    1970), or if a tag needs it. One that cannot be moved stays, too: see `kept`.

    Raises:
        ManifestError: the tags cannot be read, so that nothing is removed.
        CheckpointError: the tags cannot be fetched, so that nothing is removed.
    """
    ours = sorted((child for child in versions if child.has_manifest), key=lambda child: child.version)
    removed, kept, trash = [], [], []
    periodic = _periodic(ours, keep)
    # tags are read only where something may go: damaged ones stop no publication
    tagged = tagged_versions(ours, read_tags(ours[0].path.parent)) if len(ours) > keep.newest else {}
    for child, successor in list(pairwise(ours))[: max(len(ours) - keep.newest, 0)]:
        if child.version in periodic:
            continue
        try:
            reason = _tagged(tagged.get(child.version)) or _in_grace(successor, now, grace_seconds)
            if not reason:
                trash.append(move_away(child.path, child.path.parent))
                removed.append(child.version)
                continue
        except BlockingIOError:
            reason = "a reader has it open"
        except OSError as exc:
            reason = f"it cannot be removed: {exc.strerror}"
        kept.append(KeptVersion(child.version, reason))
    return Retired(tuple(removed), tuple(kept), tuple(trash))


def _tagged(name: str | None) -> str:
    """The reason to keep a version that the tag `name` needs; empty if `name` is None."""
    return "" if name is None else f"the tag {name} needs it"


def _periodic(ours: Sequence[VersionDir], keep: Keep) -> set[int]:
    """The numbers of the newest version of each hour and day to keep, and of versions of unknown time.

    `ours` is sorted by number, the oldest first. Empty if neither hours nor days are kept.
    """
    if not (keep.hourly or keep.daily):
        return set()
    spared: set[int] = set()
    periods: dict[str, dict[str, int]] = {"%Y-%m-%dT%H": {}, "%Y-%m-%d": {}}
    for child in ours:
        try:
            created = read_head(child.path).created
        except (ManifestError, CheckpointError):
            # its time is unknown: it may be the one to keep
            spared.add(child.version)
            continue
        for form, newest in periods.items():
            # the newest comes last, and so stays
            newest[created.astimezone(timezone.utc).strftime(form)] = child.version
    for newest, many in zip(periods.values(), (keep.hourly, keep.daily), strict=True):
        spared.update(newest[period] for period in sorted(newest)[len(newest) - min(many, len(newest)) :])
    return spared


ROLLBACK_POSITIONS = 16
"""The number of newest positions to which a rollback is always possible."""


class RetiredDeltas(Struct, frozen=True):
    """Names of the deltas that retention removed, and the hidden directories to be deleted."""

    removed: tuple[str, ...] = ()
    trash: tuple[Path, ...] = ()

    def __add__(self, other: RetiredDeltas) -> RetiredDeltas:
        """Return the names and directories of both, beginning with `self`."""
        return RetiredDeltas(self.removed + other.removed, self.trash + other.trash)


def retire_deltas(
    log: DeltaLog, *, now: float, rollback_positions: int = ROLLBACK_POSITIONS
) -> RetiredDeltas:
    """Rename deltas that no base or rollback needs to hidden directories, for the caller to delete (`trash`).

    The caller holds the model's lock. `now` is in seconds since 1970. Needed is every delta on the way from
    an existing base to the newest position, to each of the newest `rollback_positions`, to the position that
    a canary has approved, and to tagged positions; and on the way to the newest position from each of these,
    and from each end of a delta beyond the oldest base. A delta younger than `GRACE_SECONDS` is not removed,
    and makes no other unneeded: a reader that listed the directory before must find what it listed. One that
    cannot be moved stays. Nothing is removed while the tags cannot be read.

    Raises:
        ManifestError: the manifest of a delta that decides this is damaged.
        CheckpointError: a manifest cannot be fetched from its store.
    """
    settled = [delta for delta in log.deltas if now - _written(delta) >= GRACE_SECONDS]
    bases = [*(base.at.position for base in log.bases), *_unreadable_bases(log)]
    try:
        needed = _needed(log, bases, rollback_positions)
    except ManifestError:
        return RetiredDeltas()
    while unneeded := expendable(settled, bases, needed=needed):
        removable = {delta.path for delta in unneeded}  # their manifests need not be read: they may be many
        new = {d.path for d in settled if d.path not in removable and now - _created(d) < GRACE_SECONDS}
        if not new:
            break
        settled = [delta for delta in settled if delta.path not in new]
    # of all deltas, too: a young one may end where one of these begins, which then leads on
    spare = {delta.path for delta in expendable(log.deltas, bases, needed=needed)} if unneeded else set()
    removed, trash = [], []
    for delta in unneeded:
        if delta.path not in spare:
            continue
        with suppress(OSError):  # a reader has it open, or it may not be moved: the next run tries again
            trash.append(move_away(delta.path, log.model))
            removed.append(delta.path.name)
    return RetiredDeltas(tuple(removed), tuple(trash))


def _needed(log: DeltaLog, bases: Sequence[int], rollback_positions: int) -> list[int]:
    """The positions that must stay within reach: the newest, then the tagged, then the approved one.

    The newest are the last `rollback_positions` of the ends and starts of the log's deltas and of `bases`,
    ascending. Tagged positions of other logs are left out. ManifestError if the tags cannot be read.
    """
    tagged = {tag.position for tag in read_tags(log.model).values()}
    known = {position for delta in log.deltas for position in (delta.start, delta.end)}
    approved = () if log.approved is None else (log.approved,)
    return [*sorted({*known, *bases})[-rollback_positions:], *tagged & known, *approved]


def _unreadable_bases(log: DeltaLog) -> list[int]:
    """The positions of versions that may be bases of the log, and whose manifests cannot be read.

    Servers ignore manifests, and may serve them. A version that takes deltas is named by its position, so
    that older versions than the log cannot be its bases.
    """
    found = []
    for child in log.versions:
        if child.has_manifest and child.version >= log.base.entry.log:
            try:
                read_head(child.path)
            except ManifestError:
                found.append(child.version)
    return found


def retire_logs(log: DeltaLog, *, now: float) -> RetiredDeltas:
    """Rename abandoned logs and their deltas to hidden directories, to be deleted by the caller (`trash`).

    The caller holds the model's lock. A log is abandoned if none of its bases exists, and nothing was
    published in it for `GRACE_SECONDS` before `now` (seconds since 1970). While a version's manifest cannot
    be read, any log may have a base, and none is removed. `removed` names the deltas as LOG/START-END. A log
    without deltas stays, as does one that cannot be moved.

    Raises:
        ManifestError: a directory cannot be listed.
        CheckpointError: a manifest cannot be fetched from its store.
    """
    removed: list[str] = []
    trash: list[Path] = []
    for abandoned in logs_without_base(log.model, log.path):
        deltas = list_deltas(abandoned)
        # without deltas it may be one that a rollback holds before its base appears
        if not deltas or any(now - _created(delta) < GRACE_SECONDS for delta in deltas):
            continue
        with suppress(OSError):  # as above
            # one by one, by its lease: a delta that a reader has keeps the log
            for delta in deltas:
                trash.append(move_away(delta.path, log.model))
                removed.append(f"{abandoned.name}/{delta.path.name}")
            left = log.model / f"{TRASH_PREFIX}{abandoned.name}-{os.urandom(4).hex()}"
            trash.append(abandoned.rename(left))
    return RetiredDeltas(tuple(removed), tuple(trash))


def logs_without_base(model: Path, current: Path | None) -> list[Path]:
    """The directories of logs without any existing version, sorted, except `current`.

    `current` is the directory of the newest version's own log; None: there is none. Empty while the manifest
    of a version is damaged or missing. ManifestError if a directory cannot be listed; CheckpointError if a
    manifest cannot be fetched from its store.
    """
    others = [
        path
        for path in log_directories(model)
        # neither a copy nor a link, which are somebody's own
        if _LOG.fullmatch(path.name) and path != current and not path.is_symlink()
    ]
    if not others:  # as a rule; then no version's manifest has to be read
        return []
    try:
        manifests = [read_manifest(child.path) for child in published_versions(model)]
    except ManifestError:
        return []
    entries = [manifest.incremental for manifest in manifests]
    alive = {log_name(entry.log) for entry in entries if isinstance(entry, BaseEntry)}
    return [path for path in others if path.name not in alive]


_LOG = re.compile(r"[0-9]{20}", re.ASCII)


def _written(delta: LogDelta) -> float:
    """The modification time of a delta's manifest, in seconds since 1970; infinity if it cannot be read.

    Never before `_created`, but cheaper: the manifest is not read.
    """
    try:
        return (delta.path / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return float("inf")


def _created(delta: LogDelta) -> float:
    """The publication time of a delta, in seconds since 1970; infinity (as if new) if it is unknown."""
    try:
        return delta.manifest.created.timestamp()
    except (ManifestError, PositionMoved, CheckpointError):
        return float("inf")


def _in_grace(successor: VersionDir, now: float, grace_seconds: float) -> str:
    """The reason to keep the version before `successor` for now; empty if it need not be kept.

    It is superseded by the publication of `successor`. `now` is in seconds since 1970.
    """
    if grace_seconds <= 0:
        return ""
    try:
        age = now - read_head(successor.path).created.timestamp()
    except (ManifestError, CheckpointError) as exc:
        return f"when it was superseded is unknown: {exc.message}"
    return "" if age >= grace_seconds else f"it was superseded less than {grace_seconds:g} s ago"


def move_away(published: Path, model: Path) -> Path:
    """Rename a version or delta to a hidden directory of the model, and return its path.

    No process may have a lease of it, and none can get one meanwhile.

    Raises:
        BlockingIOError: a process has one.
        OSError: it may not be locked or moved.
    """
    # a random end: another delta or version of this name may be there already
    trash = model / f"{TRASH_PREFIX}{published.name}-{os.urandom(4).hex()}"
    manifest = open_lock(published / MANIFEST_FILE, flags=0)
    try:
        # A reader, once it has the lease, checks that the manifest is still at its path: so a lease is before
        # the rename and prevents it, or after it and fails.
        if not try_lock(manifest):
            raise BlockingIOError
        os.rename(published, trash)  # noqa: PTH104  as in publish: the one call that matters, in plain sight
    finally:
        close_quietly(manifest)
    return trash
