"""Verify all that is published for a model: files are complete, and each base reaches the newest position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.spans import Position, reached
from exporter.errors import (
    CheckpointChanged,
    CorruptFile,
    DeltaGap,
    DiskFull,
    EngineFailed,
    ExportError,
    ManifestError,
    MissingShard,
    NotTrusted,
    NotUpdatable,
    PositionMoved,
    TruncatedFile,
    UnsupportedFormat,
    VerificationError,
    as_export_error,
    is_unread,
)
from exporter.jobs.runner import LOCAL, Runner
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogDelta, read_log
from exporter.publish.hold import Hold
from exporter.publish.manifest import Manifest
from exporter.publish.versions import (
    VersionDir,
    a_copy,
    check_place,
    nothing_published,
    originals,
    published_versions,
    read_manifest,
    trust_of,
)
from exporter.storage import mirror
from exporter.storage.files import is_gone
from exporter.storage.layout import DELTA_NAME, VARIABLES_PREFIX
from exporter.verify.version_files import verify_bytes, verify_files


class Damage(Struct, frozen=True):
    """A damaged version, delta or hold, and the error that describes it."""

    path: Path
    error: ExportError


def _problem(path: Path, error: ExportError | OSError) -> Damage:
    """Return the damage that an error shows, of the version, delta or hold at `path`.

    Raises the error itself if it shows no damage: CheckpointChanged, PositionMoved, DiskFull or EngineFailed.
    """
    if isinstance(error, CheckpointChanged | PositionMoved | DiskFull | EngineFailed):
        raise error
    error = as_export_error(error)
    # published files are read like checkpoints, but their damage is not damage of a checkpoint
    if isinstance(error, CorruptFile | TruncatedFile | MissingShard | UnsupportedFormat):
        error = VerificationError(error.message, cause=error.cause, hint=error.hint)
    return Damage(path, error)


class VerifiedModel(Struct, frozen=True):
    """The result for a model.

    `versions` is the number of its versions. `hold` is the position of its hold; None without one, or if it
    cannot be read. `log` is None if the newest version takes no deltas, or if that is not known; then
    `unread` says why.
    """

    versions: int
    log: DeltaLog | None
    hold: int | None
    damage: tuple[Damage, ...]
    identity: str | None = None
    """The random id of the model; None if an earlier release published it."""
    unread: ExportError | None = None

    @property
    def problems(self) -> tuple[ExportError, ...]:
        """The errors of all damage."""
        return tuple(problem.error for problem in self.damage)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the log's bases and of the ends of its deltas, ascending; () without a log.

        The ends are read from the deltas' names.
        """
        if self.log is None:
            return ()
        bases = {base.at.position for base in self.log.bases}
        return tuple(sorted(bases | {delta.end for delta in self.log.deltas}))

    @property
    def at(self) -> Position | None:
        """The newest position of the log and its training step; None without a log.

        None also if the manifest at that position cannot be read.
        """
        try:
            return self.log.at if self.log else None
        except ManifestError:
            return None


def verify_model(model: Path, *, bytes_: bool = False, runner: Runner = LOCAL) -> VerifiedModel:
    """Verify a model's versions, its newest log and its hold; return the published state and all damage.

    With `bytes_` all values of versions are read and compared with their checksums, by tasks of `runner`. The
    values of deltas are always read. In the local mirror of a store, the space of each delta's files is freed
    after they were read. Errors that prevent reading, such as a store that does not answer or an engine that
    ends early, are among the damage, too.

    Raises:
        NotUpdatable: nothing is published.
        ManifestError: the model's directory cannot be listed.
        CheckpointChanged, PositionMoved: files changed meanwhile.
        DiskFull: files of a model in a store do not fit the local disk.
    """
    damage: list[Damage] = []
    versions, manifests = _verify_versions(model, damage, every_byte=bytes_, runner=runner)
    if not versions:
        raise nothing_published(model)
    named = (manifest.identity for manifest in manifests.values())
    identity = next((each for each in named if each is not None), None)
    trusted = [child.version for child in versions if child.path.name in manifests]
    damage = [each for each in damage if not _is_before(each, min(trusted, default=-1))]
    for copy, original in originals(manifests).items():
        damage.append(Damage(model / copy, a_copy(model, copy, original)))
    try:
        log = read_log(model)
    except NotUpdatable:
        hold = _read_hold(Hold(model), damage)
        return VerifiedModel(len(versions), None, hold, tuple(damage), identity)
    except ExportError as error:
        problem = _problem(versions[0].path, error)
        if problem.error.message not in [each.error.message for each in damage]:
            damage.append(problem)
        return VerifiedModel(len(versions), None, None, tuple(damage), identity, problem.error)
    begun = min((base.at.position for base in log.bases), default=-1)
    damage += (each for each in _damaged_deltas(log) if not _is_before(each, begun))
    if any(is_gone(path) for path in (log.base.path, *(delta.path for delta in log.deltas))):
        log = read_log(model)  # retention removes a delta only after its replacement is published
    damage += _broken_ways(log)
    hold = _read_hold(log.hold, damage)
    return VerifiedModel(len(versions), log, hold, tuple(damage), identity)


def _verify_versions(
    model: Path, damage: list[Damage], *, every_byte: bool, runner: Runner
) -> tuple[list[VersionDir], dict[str, Manifest]]:
    """Verify each version of a model and append each damaged one, with its error, to `damage`.

    Return the versions that still exist, newest first, and the manifests that can be read, by directory name.
    With `every_byte` the values of the versions are read by tasks of `runner`. Raises CheckpointChanged,
    PositionMoved or DiskFull, which show no damage, and ManifestError if the model cannot be listed.
    """
    versions = [*published_versions(model)]
    manifests: dict[str, Manifest] = {}
    for child in [*versions]:
        try:
            manifests[child.path.name] = manifest = read_manifest(child.path)
            check_place(manifest, child.path)
            _verify_files(child.path, manifest, every_byte=every_byte)
            if every_byte:
                verify_bytes(read_catalog(child.path / VARIABLES_PREFIX), runner=runner)
        except (ExportError, OSError) as error:
            if is_gone(child.path):  # retention removed it meanwhile: it was complete, and is not needed
                versions.remove(child)
            else:
                damage.append(_problem(child.path, error))
    return versions, manifests


def _broken_ways(log: DeltaLog) -> Iterator[Damage]:
    """Yield, as damage, each base from which deltas reach neither the newest position nor a newer base.

    Servers load the newest base by themselves, whatever position they are at. In a copy that was rolled back,
    what lies before it can end where the copy's own deltas end. Raises CheckpointChanged, PositionMoved or
    DiskFull, which show no damage.
    """
    for base in log.bases:
        if reached(log.deltas, base.at.position) < log.base.at.position:
            continue
        try:
            log.chain(base.at.position)
        except DeltaGap as error:
            gap = DeltaGap(error.message, cause=error.cause, hint=BROKEN_LOG_HINT)
            yield Damage(base.path, gap)
        except ExportError as error:
            yield _problem(base.path, error)


def _verify_files(
    directory: Path, manifest: Manifest, *, every_byte: bool, prefix: Path | None = None
) -> None:
    """Compare the files of a version or delta with its manifest.

    `prefix` is the bundle's prefix if the directory has no SavedModel, like a delta's. If `every_byte` or if
    keys are trusted there, the SHA-256 digests of a signed manifest are compared as well; if keys are
    trusted, unlisted files are refused. Raises VerificationError for a difference, CheckpointError or OSError
    if a file cannot be read.
    """
    unlisted = verify_files(directory, manifest.tensors, manifest.files, prefix=prefix)
    is_trusted = trust_of(directory) is not None
    if is_trusted and unlisted:
        raise VerificationError(
            f"{directory} holds {unlisted[0]!r}, which its manifest does not list",
            cause="servers may read it, and nobody has signed it",
            hint="remove it",
        )
    if manifest.signature is not None and (is_trusted or every_byte):
        from exporter.publish.signing import verify_digests

        verify_digests(directory, manifest.files)


def _is_before(each: Damage, begun: int) -> bool:
    """True for damage that no server reads: an untrusted publication that ends at `begun` or before.

    `begun` is the position of the first base that a trusted key has signed. Only damage that is NotTrusted
    counts.
    """
    end = each.path.name.rpartition("-")[2]
    return isinstance(each.error, NotTrusted) and end.isdecimal() and int(end) <= begun


def _read_hold(hold: Hold, damage: list[Damage]) -> int | None:
    try:
        return hold.read()
    except ManifestError as error:
        damage.append(Damage(hold.path, error))
        return None


def _damaged_deltas(log: DeltaLog) -> Iterator[Damage]:
    for delta in log.deltas:
        try:
            _verify_delta(log, delta)
        except (ExportError, OSError) as error:
            if not is_gone(delta.path):
                yield _problem(delta.path, error)
        with suppress(OSError):
            for path in delta.path.iterdir():  # of a model in a store: all deltas may be larger than the disk
                mirror.forget(path)


def delta_damage(path: Path) -> str:
    """Read all files of the published delta at `path` and return a description of their damage; "" if intact.

    Also "" for errors that show no damage: the delta is gone, its files change meanwhile, the disk is full,
    or they cannot be read (`is_unread`). No ExportError or OSError is raised.
    """
    try:
        manifest = read_manifest(path)
        check_place(manifest, path)
        verify_files(path, manifest.tensors, manifest.files, prefix=Path(DELTA_NAME))
        verify_bytes(read_catalog(path / DELTA_NAME))
    except (ExportError, OSError) as error:
        if not (is_gone(path) or is_unread(error)):
            with suppress(ExportError):
                found = _problem(path, error).error
                return ": ".join(filter(None, (found.message, found.cause)))
    return ""


def _verify_delta(log: DeltaLog, delta: LogDelta) -> None:
    """Read a delta's files and compare them with its manifest, its name and its log.

    Raises VerificationError or CorruptFile if they differ, mostly with a hint on broken logs; other
    CheckpointErrors or OSError if a file cannot be read, PositionError if it is another log's.
    """
    try:
        _verify_files(delta.path, delta.manifest, every_byte=True, prefix=Path(DELTA_NAME))
    except VerificationError as error:
        error.hint = BROKEN_LOG_HINT
        raise
    found = log.open(delta)
    said, holds = delta.entry, found.header
    if (said.rows, said.only_from) != (found.rows, holds.only_from):
        raise VerificationError(
            f"{delta.path}: its manifest and its header describe different deltas", hint=BROKEN_LOG_HINT
        )
