"""Verify everything published for a model: it is whole, and each base reaches the newest position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.spans import Position
from exporter.errors import (
    CheckpointChanged,
    CorruptFile,
    DeltaGap,
    DiskFull,
    ExportError,
    ManifestError,
    MissingShard,
    NotUpdatable,
    PositionMoved,
    TruncatedFile,
    UnsupportedFormat,
    VerificationError,
)
from exporter.jobs.runner import LOCAL, Runner
from exporter.layout import VARIABLES_PREFIX
from exporter.publish.absent import nothing_published
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogDelta, read_log
from exporter.publish.hold import Hold
from exporter.publish.versions import published_versions
from exporter.storage import mirror
from exporter.verify.version_files import verify_bytes, verify_published


class Problem(Struct, frozen=True):
    """What is wrong with a version, a delta or a hold."""

    path: Path
    error: ExportError


def _problem(path: Path, error: ExportError) -> Problem:
    """What is published is read as checkpoints are; its damage is no damage of a checkpoint.

    Raises:
        CheckpointChanged, PositionMoved: `error` is one: another machine removed what was listed.
        DiskFull: it is one: there is no room here to fetch what is checked.
    """
    if isinstance(error, CheckpointChanged | PositionMoved | DiskFull):
        raise error
    if isinstance(error, CorruptFile | TruncatedFile | MissingShard | UnsupportedFormat):
        error = VerificationError(error.message, cause=error.cause, hint=error.hint)
    return Problem(path, error)


class VerifiedModel(Struct, frozen=True):
    """What was looked at. `log` is None if the newest version takes no deltas."""

    versions: int
    log: DeltaLog | None
    hold: int | None
    damage: tuple[Problem, ...]

    @property
    def problems(self) -> tuple[ExportError, ...]:
        """The errors alone."""
        return tuple(problem.error for problem in self.damage)

    @property
    def positions(self) -> tuple[int, ...]:
        """Every position of the log at which something stands, by names alone."""
        if self.log is None:
            return ()
        bases = {base.at.position for base in self.log.bases}
        return tuple(sorted(bases | {delta.end for delta in self.log.deltas}))

    @property
    def at(self) -> Position | None:
        """The newest position of the log; None if it cannot be told."""
        try:
            return self.log.at if self.log else None
        except ManifestError:
            return None


def verify_model(model: Path, *, bytes_: bool = False, runner: Runner = LOCAL) -> VerifiedModel:
    """Compare versions with their manifests, and every delta of the newest log with manifest, name and
    checksums.

    `bytes_` reads all values of the versions, too, by tasks of `runner`; those of deltas are always read.

    Raises:
        NotUpdatable: nothing is published.
    """
    damage: list[Problem] = []
    versions = published_versions(model)
    if not versions:
        raise nothing_published(model)
    for child in versions:
        try:
            verify_published(child.path)
            if bytes_:
                verify_bytes(read_catalog(child.path / VARIABLES_PREFIX), runner=runner)
        except ExportError as error:
            damage.append(_problem(child.path, error))
    try:
        log = read_log(model)
    except NotUpdatable:
        hold = _read_hold(Hold(model), damage)
        return VerifiedModel(len(versions), None, hold, tuple(damage))
    except ExportError as error:
        return VerifiedModel(len(versions), None, None, (*damage, _problem(versions[0].path, error)))
    damage += _problems_of(log)
    hold = _read_hold(log.held, damage)
    return VerifiedModel(len(versions), log, hold, tuple(damage))


def _read_hold(hold: Hold, damage: list[Problem]) -> int | None:
    try:
        return hold.read()
    except ManifestError as error:
        damage.append(Problem(hold.path, error))
        return None


def _problems_of(log: DeltaLog) -> Iterator[Problem]:
    for delta in log.deltas:
        try:
            _verify_delta(log, delta)
        except ExportError as error:
            yield _problem(delta.path, error)
        for path in delta.path.glob("*"):  # of a model in a store: all deltas may be larger than the disk
            mirror.forget(path)
    for base in log.bases:
        try:
            log.chain(base.at.position)
        except DeltaGap as error:
            yield Problem(base.path, DeltaGap(error.message, cause=error.cause, hint=BROKEN_LOG_HINT))
        except ExportError as error:
            yield _problem(base.path, error)


def _verify_delta(log: DeltaLog, delta: LogDelta) -> None:
    """One delta against its manifest, its name and its log.

    Raises:
        VerificationError, CheckpointError, PositionError: see errors.py.
    """
    for entry in delta.manifest.files:
        path = delta.path / entry.path
        if not path.is_file():
            raise VerificationError(f"{path} is in the manifest and not there", hint=BROKEN_LOG_HINT)
        if (size := path.stat().st_size) != entry.bytes_:
            raise VerificationError(f"{path} has {size} bytes, expected {entry.bytes_}", hint=BROKEN_LOG_HINT)
    found = log.open(delta)
    said, holds = delta.entry, found.header
    if (said.rows, said.exact_base) != (found.rows, holds.exact_base):
        raise VerificationError(
            f"{delta.path}: its manifest and its header describe different deltas", hint=BROKEN_LOG_HINT
        )
