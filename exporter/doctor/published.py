"""Check what is published: damage, gaps, holds, orphaned and foreign files, times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from exporter.doctor.finding import Check, Finding, Level, command
from exporter.errors import DeltaGap, ManifestError, PositionError
from exporter.layout import DELTAS_DIRECTORY, SAVED_MODEL_FILES
from exporter.pipeline.table_views import tables_of_log
from exporter.progress import count, human_bytes
from exporter.publish.delta_log import DeltaLog
from exporter.publish.hold import Hold
from exporter.publish.permission import binding
from exporter.publish.retention import logs_without_base
from exporter.publish.versions import VersionDir, newest_version, published_versions, read_head, version_dirs
from exporter.verify.log import Problem, VerifiedModel

CANARY_SECONDS = 600.0
"""A canary that takes longer to decide is not at work, or has nobody to go first."""

FUTURE_SECONDS = 60.0
"""Clocks of machines differ; by less than this it is no matter."""


SCARCE = 0.05
"""The part of a dynamic table's rows below which free ones are few."""


def damage(model: Path, found: VerifiedModel, ckpt_dir: Path | None) -> Iterator[Finding]:
    """What `verify` finds, each with the command that repairs it."""
    for problem in found.damage:
        if problem.path.name == Hold(model).path.name:
            yield _broken_hold(model, problem)
            continue
        check = Check.WAYS if isinstance(problem.error, DeltaGap) else Check.FILES
        remedy = _remedy(model, found.log, problem, ckpt_dir)
        message = problem.error.message
        if check is Check.WAYS:
            message = f"servers that load {problem.path} do not reach the newest position: {message}"
        yield Finding(check, Level.WRONG, message, remedy, problem.error.cause)


def held(model: Path, found: VerifiedModel, now: float) -> Iterator[Finding]:
    """Holds that are set and can be read."""
    log = None if found.log is None else found.log.base.entry.log
    for hold in binding(model, log):
        with suppress(ManifestError, OSError):
            since = _told(hold.path.lstat().st_mtime)
            yield Finding(
                Check.HOLD,
                Level.WARNING,
                f"held at {hold.read()} since {since}: servers follow no delta beyond it, and new versions "
                "are refused",
                command("export-model", "resume", model),
            )
    if found.log is not None and found.log.held.is_canary:
        yield from _unapproved(model, found.log, now)


def _unapproved(model: Path, log: DeltaLog, now: float) -> Iterator[Finding]:
    """Deltas that wait for a canary for so long that it cannot be at work."""
    with suppress(ManifestError, OSError):
        approved = log.approved
        waiting = [delta for delta in log.deltas if approved is not None and delta.end > approved]
        since = min((delta.manifest.created for delta in waiting), default=None)
        if since is not None and now - since.timestamp() > CANARY_SECONDS:
            yield Finding(
                Check.HOLD,
                Level.WARNING,
                f"the agent's canary approved position {approved}, and {count(len(waiting), 'delta')} wait "
                f"for it since {_told(since.timestamp())}: see the agent's status page",
                command("export-model", "resume", model),
            )


def orphans(model: Path, found: VerifiedModel) -> Iterator[Finding]:
    """Logs whose bases are all gone: nobody can apply their deltas."""
    for log in logs_without_base(model, None if found.log is None else found.log.path):
        deltas = [entry for entry in log.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        yield Finding(
            Check.ORPHANS,
            Level.WARNING,
            f"{log} holds {count(len(deltas), 'delta')} ({human_bytes(size_of(log))}), and no base is left",
            command("rm", "-r", log),
            cause="export-model --incr removes them five minutes after the last one was published",
        )


def strangers(model: Path) -> Iterator[Finding]:
    """Names that servers take for versions, and that this program did not publish."""
    found = version_dirs(model)
    newest = next((child.version for child in found if child.has_manifest), -1)
    for child in found:
        if child.has_manifest or child.version < newest:
            continue
        remedy = command("mv", child.path, child.path.with_name(f".{child.path.name.strip()}"))
        if _loads(child):
            what = "was not published by export-model: servers load it in the place of"
            yield Finding(
                Check.STRANGERS, Level.WARNING, f"version {child.path} {what} {newest}", remedy, "no manifest"
            )
        else:
            what = "is not a SavedModel, but servers take it for the newest version and load no other"
            yield Finding(Check.STRANGERS, Level.WRONG, f"{child.path} {what}", remedy)


def times(model: Path, found: VerifiedModel, now: float) -> Iterator[Finding]:
    """Find versions with a time in the future: what they replaced stays until then."""
    paths = [child.path for child in published_versions(model)]
    paths += [delta.path for delta in found.log.deltas] if found.log else []
    later: list[tuple[float, Path]] = []
    for path in paths:
        with suppress(ManifestError):  # which `damage` has told
            created = read_head(path).created.timestamp()
            if created > now + FUTURE_SECONDS:
                later.append((created, path))
    if later:
        created, path = max(later)
        several = f", as {len(later) - 1} more" if len(later) > 1 else ""
        yield Finding(
            Check.CLOCK,
            Level.WARNING,
            f"{path} was published at {_told(created)}{several}; now it is {_told(now)}",
            "timedatectl status",
            cause="a clock is wrong, here or where it was published; nothing it superseded is removed until "
            "that time",
        )


def tables(model: Path, found: VerifiedModel, ckpt_dir: Path | None) -> Iterator[Finding]:
    """Find dynamic tables that will soon have no room for new keys: then a delta is refused."""
    if found.log is None or found.damage:  # which `damage` has told: a table cannot be read past it
        return
    for table in tables_of_log(found.log):
        if table.free_rows < table.room * SCARCE:
            yield Finding(
                Check.TABLES,
                Level.WARNING,
                f"table {table.name!r} holds {table.keys} keys and has room for {table.free_rows} more",
                _new_base(model, ckpt_dir, ["--updatable"]),
                cause="when it is full, --incr fails and --watch publishes a new base by itself",
            )


def size_of(directory: Path) -> int:
    """Bytes of the files in a directory, as far as they can be looked at."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _broken_hold(model: Path, problem: Problem) -> Finding:
    killed = "a rollback was killed before its delta was there" if problem.path.is_symlink() else ""
    return Finding(
        Check.HOLD,
        Level.WRONG,
        f"{problem.path} holds the model and says no position: servers follow no delta at all",
        command("export-model", "resume", model),
        killed or problem.error.message,
    )


def _remedy(model: Path, log: DeltaLog | None, problem: Problem, ckpt_dir: Path | None) -> str:
    """Remove what nobody needs; publish anew what somebody does."""
    path = problem.path
    if not isinstance(problem.error, DeltaGap):
        if log is not None and path.parent == log.path and _is_spare(log, path):
            return command("rm", "-r", path)
        newest = newest_version(model)
        if path.parent == model and (newest is None or path != newest.path):
            return command("rm", "-r", path)
    options = ["--updatable"] if log is not None or (model / DELTAS_DIRECTORY).is_dir() else []
    return _new_base(model, ckpt_dir, options)


def _new_base(model: Path, ckpt_dir: Path | None, options: list[str]) -> str:
    return command(
        "export-model", "--ckpt-dir", ckpt_dir or "DIR", "--model", "WHAT", "--out", model, *options
    )


def _is_spare(log: DeltaLog, delta: Path) -> bool:
    """True if every base reaches the newest position without this delta."""
    left = tuple(other for other in log.deltas if other.path != delta)
    newest = max([log.base.at.position, *(other.end for other in log.deltas)])
    without = DeltaLog(log.model, log.base, left)
    try:
        return all(
            without.chain(base.at.position, newest) or base.at.position == newest for base in log.bases
        )
    except PositionError:
        return False


def _loads(child: VersionDir) -> bool:
    return any((child.path / name).is_file() for name in SAVED_MODEL_FILES)


def _told(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
