"""Publish a staged directory as a version or a delta: durable, immutable, visible whole or not at all.

seal      modes, sizes, checksums; wait until our bytes are on disk     no lock: this may take long (`seal`)
number    read what is published, choose version and position          under <model>/.lock
commit    write manifest.json, rename the bundle, sync the directory    under <model>/.lock
retire    move old versions out of sight                                under <model>/.lock, deleted after
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.format import POSITION_LIMIT
from exporter.errors import (
    ExportError,
    NotUpdatable,
    PositionError,
    PositionMoved,
    PublishError,
    TargetBusy,
    UsageError,
    VerificationError,
    VersionExists,
    os_error,
)
from exporter.publish.delta_log import DeltaLog, LogDelta, log_of
from exporter.publish.hold import HeldBy, this_user
from exporter.publish.manifest import DeltaEntry, FileEntry, LinkedFile, Manifest, ManifestDraft, to_json
from exporter.publish.permission import REFUSING, Permission
from exporter.publish.retention import GRACE_SECONDS, Keep, KeptVersion, Retired, retire
from exporter.publish.staging import Staging
from exporter.publish.versions import (
    VersionDir,
    greatest,
    identities_of,
    last_position,
    require_signer,
    several_models,
    signer_of,
    taken,
    version_dirs,
)
from exporter.storage import mirror
from exporter.storage.files import (
    close_quietly,
    lock_within,
    make_directories,
    open_lock,
    regular_file,
    remove_tree,
    sync,
    write_durably,
    writing,
)
from exporter.storage.layout import HOLD_FILE, LOCK_FILE, MANIFEST_FILE, TURN_FILE
from exporter.storage.local_paths import quoted
from exporter.wire.crc32c import crc_of, mask

_DATA_SHARD = re.compile(r".*\.data-[0-9]{5}-of-[0-9]{5}")


def seal(bundle: Path) -> tuple[FileEntry, ...]:
    """Make the staged tree readable and durable; return an entry for each of its files, sorted by path.

    Every directory gets the mode of `bundle`, every file the same without execute bits, and both are synced
    to disk. A file with a second hard link keeps its mode and is not synced. Each entry has the size, and the
    checksum unless the file is a data shard.

    Raises:
        VerificationError: something in the tree is neither a regular file nor a directory.
        PublishError and subclasses, OSError: the tree cannot be read, changed or synced.
        CheckpointError: a file is a pointer that Git LFS has not replaced.
    """
    mode = stat.S_IMODE(bundle.stat().st_mode)
    files: list[FileEntry] = []
    for name, directories, names in os.walk(bundle, topdown=False, onerror=_raise):
        directory = Path(name)  # bottom-up: syncing a directory makes the names in it durable
        # os.walk lists a link to a directory among directories, and does not enter it: refused as a file
        links = [child for child in directories if (directory / child).is_symlink()]
        files += [_seal_file(bundle, directory / child, mode) for child in names + links]
        _set_mode(directory, mode)
        sync(directory)
    return tuple(sorted(files, key=lambda file: file.path))


def _seal_file(bundle: Path, path: Path, mode: int) -> FileEntry:
    found = path.lstat()  # of the name itself: a link must not be published
    if not stat.S_ISREG(found.st_mode):
        raise VerificationError(f"the staged {path} is not a regular file")
    is_shared = found.st_nlink > 1
    if not is_shared:  # a file with a second link is the trainer's: its mode and its bytes are not ours
        _set_mode(path, mode & 0o666)
        sync(path)
    crc = None if _DATA_SHARD.fullmatch(path.name) else _masked_crc(path)
    shown = None if crc is None else f"{crc:08x}"
    linked = LinkedFile.of(found) if is_shared and crc is None else None
    return FileEntry(path.relative_to(bundle).as_posix(), found.st_size, shown, linked=linked)


def _masked_crc(path: Path) -> int:
    with regular_file(path) as file:
        return mask(crc_of(file.fileno(), 0, os.fstat(file.fileno()).st_size))


def _set_mode(path: Path, mode: int) -> None:
    """Set the permission bits of a file or directory to `mode` if they differ.

    OSError if that is not permitted. Temporary files are private, and servers run as other users.
    """
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def _raise(error: OSError) -> None:
    raise error


__all__ = [
    "TAKING_THE_LOCK",
    "PublishedDelta",
    "PublishedVersion",
    "ReservedPosition",
    "Staging",
    "UnderLock",
    "VersionRule",
    "model_lock",
    "next_delta_position",
    "next_position",
    "publish_delta",
    "publish_version",
    "reserve_position",
]

LOCK_SECONDS = 60.0
"""The longest wait for another exporter, which holds the lock for some milliseconds."""

_MAX_VERSION = (1 << 63) - 1
LARGEST_ASKED = _MAX_VERSION >> 1
"""The largest version or step that is accepted: as many numbers stay free for later publications."""


class VersionRule(Struct, frozen=True):
    """The rule that numbers a version: its position (the default), seconds since 1970, or a given number."""

    choice: int | Literal["position", "time"] = "position"

    @classmethod
    def parse(cls, asked: str | int | None) -> VersionRule:
        """The rule for a value of `--version`: `time`, an integer, or None (number versions by position).

        An integer is the number of the version. Raises UsageError if it is neither `time` nor an integer from
        0 below 2**62.
        """
        if asked is None:
            return cls()
        text = str(asked)
        if text == "time":
            return cls("time")
        # the length first: of thousands of digits `int` raises an error of its own
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= LARGEST_ASKED):
            raise UsageError(
                f"--version {text!r} is neither `time` nor an integer in [0, 2**62)",
                hint="leave it out: the next free position is taken; no server knows a version above 2**63, "
                "so that nothing could be published after the largest ones",
            )
        return cls(int(text))

    def choose(
        self, step: int | None, *, newest: int | None, last: int | None, now: float
    ) -> tuple[int, int]:
        """Return the version and the position of the next publication, as numbers.

        The position is as `next_position` gives it, after all numbers in use. By position, the version is
        equal to it. By time, the version is `now`, or `newest` + 1 if that is greater. With a given number,
        the version is that number.

        `step` is the training step of its values, or None. `newest` is the greatest version number in use,
        `last` the greatest position; None if there is none. `now` is in seconds since 1970. Raises
        VersionExists if a given number would not be the newest version, or no greater number is left.
        """
        if self.choice == "position":
            position = next_position(step, greatest(newest, last))
            return position, position
        position = next_position(step, last)
        if self.choice == "time":
            return _within_int64(max(int(now), -1 if newest is None else newest + 1)), position
        if newest is not None and self.choice <= newest:
            raise VersionExists(
                f"version {self.choice} would not be the newest: {newest} is published",
                hint=f"use --version {newest + 1} or greater, or leave --version out",
            )
        return self.choice, position


_BY_POSITION = VersionRule()


class ReservedPosition(Struct, frozen=True):
    """A position that is known before publishing, because it is stored inside the files to publish.

    `last` was the greatest position then. Publishing fails with PositionMoved if the log advanced since,
    except for a base in a log that continues (`is_passed`): the deltas published meanwhile apply to that
    base, too.
    """

    position: int
    last: int | None
    is_passed: bool = False


class PublishedVersion(Struct, frozen=True):
    """A version that was published, and the older ones that retention wanted to remove.

    `removed` has the numbers of those that it removed, `kept` the others and why. `warnings` are failures
    after readers could see the version.
    """

    path: Path
    version: int
    manifest: Manifest
    removed: tuple[int, ...] = ()
    kept: tuple[KeptVersion, ...] = ()
    warnings: tuple[ExportError, ...] = ()

    def __repr__(self) -> str:
        return f"PublishedVersion({str(self.path)!r}, position={self.position})"

    @property
    def position(self) -> int:
        """The position of a server right after loading this version."""
        return self.manifest.position


class PublishedDelta(Struct, frozen=True):
    """A delta that was published; `warnings` are failures after readers could see it.

    `log` is the newest version's log right after that, read under the model's lock.
    """

    path: Path
    manifest: Manifest
    log: DeltaLog
    warnings: tuple[ExportError, ...] = ()

    def __repr__(self) -> str:
        return f"PublishedDelta({str(self.path)!r}, position={self.manifest.position})"


class UnderLock(Struct, frozen=True):
    """The conditions under which a delta is published while the model is locked.

    `is_ours`: the caller has the lock already, and has read the log under it. `permit` gets the log as it is
    under the lock, and raises if the delta may not be published. With `holds` the log is held at the delta's
    end from the instant in which readers can see the delta; or right after it, if a canary's hold keeps all
    servers before the delta (`follows_canary`). `why` is the reason kept with the hold; None: none.
    """

    is_ours: bool = False
    permit: Callable[[DeltaLog], None] = lambda _: None
    holds: bool = False
    follows_canary: bool = False
    why: str | None = None


TAKING_THE_LOCK = UnderLock()
"""The default: the lock is acquired for the commit."""


def reserve_position(model: Path, step: int | None) -> ReservedPosition:
    """The next position of a log under `model`: greater than every version and position used or abandoned.

    `step` is the training step of the values, or None; see `next_position`. Nothing is written: publishing
    checks that the position is still free.

    Raises:
        ManifestError: the newest version's manifest is damaged, or a directory cannot be listed.
        CheckpointError: that manifest cannot be fetched from its store.
        VersionExists: no number is left.
        PositionError: the position would not be below `POSITION_LIMIT`, as those of deltas are.
    """
    versions = version_dirs(model)
    last, others = last_position(model, versions), taken(model)
    # all versions, also without a manifest: servers load whatever has a number
    newest = greatest(last, versions[0].version if versions else None, others.version)
    return ReservedPosition(_next_of_log(step, greatest(newest, others.position)), last)


def next_delta_position(log: DeltaLog, step: int | None) -> int:
    """Return the position for the next delta of a log: greater than all positions in use or abandoned.

    `step` is the training step of the values, or None; see `next_position`.

    Raises:
        VersionExists: no number is left.
        PositionError: the position would not be below `POSITION_LIMIT`, as those of deltas are.
        ManifestError: a directory of the model cannot be listed.
    """
    return _next_of_log(step, greatest(log.last, taken(log.model).position))


def _next_of_log(step: int | None, last: int | None) -> int:
    """The next position of a delta, or of a base that takes deltas, after the greatest one in use (`last`).

    `step` and `last` are as in `next_position`. Raises PositionError if the result is not below
    `POSITION_LIMIT`, VersionExists if no number is left.
    """
    position = next_position(step, last)
    if position >= POSITION_LIMIT:
        raise PositionError(
            f"the next position is {position}, and deltas count to {POSITION_LIMIT - 1}",
            cause=f"step {step}" if position == step else f"version {position - 1} is there",
            hint="remove what has that number, or publish plain versions: without --incr and --new-base",
        )
    return position


def next_position(step: int | None, last: int | None) -> int:
    """Return the training step if it is greater than the last position, else the last position + 1.

    Without a step (None) and a last position (None) it is 1. A step above `LARGEST_ASKED` is ignored. Raises
    VersionExists if no number below 2**63 is left.
    """
    if step is not None and (last is None or step > last) and step <= LARGEST_ASKED:
        return step
    return _within_int64((last or 0) + 1)


def publish_version(
    staging: Staging,
    draft: ManifestDraft,
    rule: VersionRule | ReservedPosition = _BY_POSITION,
    *,
    keep: Keep | None = None,
    permission: Permission = REFUSING,
    permit: Callable[[], None] = lambda: None,
    is_locked: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    clock: Callable[[], float] = time.time,
) -> PublishedVersion:
    """Rename `staging.path` to `<model>/<version>`; with `keep`, also remove older versions.

    `draft` has the manifest's fields that are known before; the manifest is completed, signed if a key is in
    force, and written. `rule` numbers the version; a reserved position is its number, too. `permit` is called
    under the model's lock, and raises if the version may not be published; `is_locked`: the caller has that
    lock already. `grace_seconds` is how long a superseded version stays; `clock` returns seconds since 1970.
    A failure to remove older versions is only a warning of the result.

    When this returns, the version survives a power cut, except files with a second link (the trainer's
    shards): these are neither synced, which would cost O(bytes), nor changed in their mode.

    Raises:
        UsageError: `keep` would leave no version, or the newest version is signed and this one would not
            be.
        ModelHeld, ChainEnds: the model is held, or this version would end a log, and `permission` does
            not permit that.
        VersionExists: a given number would not be the newest version; a directory without a manifest has
            the reserved number, or a greater one; or no number is left.
        PositionMoved: something was published since the position was reserved.
        NotTrusted: it would be signed, and the versions there are of several models, or of another one.
        TargetBusy: another exporter held the lock for `LOCK_SECONDS`.
        ManifestError: the newest version's manifest is damaged, so that the next position is unknown.
        VerificationError: the staged tree holds something that is neither a file nor a directory.
        CheckpointError: a staged file is a pointer that Git LFS has not replaced.
        TargetNotWritable, DiskFull, PublishError: the operating system refused; nothing was published.
    """
    if keep is not None and keep.newest < 1:
        raise UsageError(f"--keep {keep.newest} would leave no version to serve", hint="use --keep 1 or more")
    retired = Retired()
    with writing(staging.model):
        files = _sealed(staging)
        with _locked(staging.model, is_ours=is_locked):
            permit()
            versions = version_dirs(staging.model)
            takes_deltas = draft.incremental is not None
            # again: what was permitted before the work may be held by now
            permission.check(staging.model, takes_deltas=takes_deltas, versions=versions)
            published = _commit(staging, draft, files, rule, versions, clock())
            warnings = [*published.warnings]
            if keep is not None:
                try:
                    done = VersionDir(published.version, published.path, has_manifest=True)
                    there = (done, *versions)
                    # after the commit and under its lock: what is retired is superseded for sure
                    retired = retire(there, keep=keep, now=clock(), grace_seconds=grace_seconds)
                except ExportError as error:
                    warnings.append(error)
                except OSError as error:
                    warnings.append(os_error(error, staging.model))
    for trash in retired.trash:  # without the lock: deleting many gigabytes takes seconds
        remove_tree(trash)
    return replace(published, removed=retired.removed, kept=retired.kept, warnings=tuple(warnings))


def publish_delta(
    staging: Staging,
    draft: ManifestDraft,
    log: DeltaLog,
    *,
    position: int,
    last: int | None,
    under_lock: UnderLock,
) -> PublishedDelta:
    """Rename `staging.path` to the delta `<from>-<position>` of a log: whole, durable and immutable.

    `draft` has the start of the delta (`from_position`) and the manifest's other known fields; the manifest
    is completed, signed if a key is in force, and written. `position` is the delta's end. `last` was the
    greatest position of the model when the delta was made; None where that does not matter, as for a merger
    of published deltas. With `under_lock.holds` the log's hold is set, too. An error of `under_lock.permit`
    is raised as it is.

    Raises:
        PositionMoved: this delta is published already, or another process published meanwhile.
        UsageError: the log is signed, and this delta would not be.
        NotUpdatable, ManifestError: the newest version takes no deltas any more, or cannot be read.
        NotTrusted: it would be signed, and the versions there are of several models, or of another one.
        VerificationError: the staged tree holds something that is neither a file nor a directory.
        CheckpointError: a staged file is a pointer that Git LFS has not replaced.
        TargetBusy, TargetNotWritable, DiskFull, PublishError: it could not be written; nothing was
            published.
    """
    with writing(staging.model):
        held = None
        if under_lock.holds:
            held = log.hold.prepare(position, staging)
            # before sealing, so that the manifest lists it: the hold is published with the delta
            shutil.copyfile(held, staging.path / HOLD_FILE)
        files = _sealed(staging)
        with _locked(staging.model, is_ours=under_lock.is_ours):
            # Others may have published, merged or removed since the log was read; under the lock none can.
            now = log if under_lock.is_ours else _log_now(log, last)
            under_lock.permit(now)
            if not under_lock.follows_canary:  # a canary's rollback stays in its copy: nobody else reads it
                require_signer(staging.model, now.newest.manifest)
            make_directories(log.path)
            delta = LogDelta(log.path, draft.from_position or 0, position)
            target = delta.path
            # os.rename would replace an empty directory
            if target.exists():
                raise PositionMoved(f"{target} is published already")
            _require_one_model(staging.model, now.versions)
            identity = now.base.manifest.identity
            manifest = _complete(staging, draft, files, target, position, time.time(), identity)
            if held is not None:
                back_to = draft.incremental.back_to if isinstance(draft.incremental, DeltaEntry) else None
                log.hold.announce(HeldBy.now(position, under_lock.why, values_of=back_to), staging)
            # A link into the delta: with one rename the delta is seen and the hold is read. A hold that came
            # first would let servers go on to what is rolled back (`exporter.pipeline.restoration`).
            if held is not None and not under_lock.follows_canary:
                log.hold.promise(target.name, held, staging)
            warnings = _install(staging, target)
            if held is not None:
                log.hold.settle(held)
    now = now.followed_by(delta) if now.path == log.path else now  # a merger may come after its log's end
    return PublishedDelta(target, manifest, now, warnings)


def _commit(
    staging: Staging,
    draft: ManifestDraft,
    files: tuple[FileEntry, ...],
    rule: VersionRule | ReservedPosition,
    versions: Sequence[VersionDir],
    now: float,
) -> PublishedVersion:
    newest = versions[0].version if versions else None
    if isinstance(rule, ReservedPosition):
        number = position = rule.position
        if newest is not None and newest >= number:
            if not versions[0].has_manifest:
                raise VersionExists(
                    f"{versions[0].path} is in the way of version {number}: it has no {MANIFEST_FILE}",
                    cause="it has lost that file, or something else has made the directory",
                    hint=f"see what to do with it: export-model doctor {quoted(staging.model)}",
                )
            if rule.is_passed:
                raise PositionMoved(f"version {newest} was published meanwhile")
        if not rule.is_passed:
            _require(staging.model, rule.last, last_position(staging.model, versions))
    else:
        last, newest = last_position(staging.model, versions), greatest(newest, taken(staging.model).version)
        number, position = rule.choose(draft.step, newest=newest, last=last, now=now)
    target = staging.model / str(number)
    identity = _identity(staging.model, versions)
    manifest = _complete(staging, draft, files, target, position, now, identity)
    return PublishedVersion(target, number, manifest, warnings=_install(staging, target))


def _identity(model: Path, versions: Sequence[VersionDir]) -> str:
    """Return the identity of a model: the one in the manifests of its versions, or else a new random one.

    `versions` are as `version_dirs` lists them. Raises NotTrusted if a signing key is in force, and the
    versions are of several models; CheckpointError if a manifest cannot be fetched.
    """
    _require_one_model(model, versions)
    return next(iter(identities_of(versions)), "") or os.urandom(16).hex()


def _require_one_model(model: Path, versions: Sequence[VersionDir]) -> None:
    """Raise NotTrusted if publications under `model` are signed here and its versions are of several models.

    Without a signing key in force nothing is refused or read. CheckpointError if a manifest cannot be
    fetched.
    """
    if signer_of(model) is not None and len(found := identities_of(versions)) > 1:
        raise several_models(model, found)


def _log_now(log: DeltaLog, last: int | None) -> DeltaLog:
    """Read the newest version's log again, and return it if nothing was published since `log` was read.

    Raises PositionMoved if the newest version has another log, or `last` is not the model's greatest
    position; with `last` None neither is compared. Raises NotUpdatable or ManifestError if the newest version
    takes no deltas, or cannot be read; CheckpointError if its manifest cannot be fetched.
    """
    model = log.model
    versions = version_dirs(model)
    try:
        now = log_of(model, versions)
    except NotUpdatable:  # a version that takes no deltas has ended the log: it has a position, too
        if last is not None:
            _require(model, last, last_position(model, versions))
        raise
    if last is not None:
        _require(model, last, now.last, is_same_log=now.lineage == log.lineage)
    return now


def _require(model: Path, expected: int | None, found: int | None, *, is_same_log: bool = True) -> None:
    if found != expected or not is_same_log:
        before = "there was none" if expected is None else f"it was {expected}"
        raise PositionMoved(
            f"another command published under {model}: position {found} is the newest now, {before}"
        )


def _sealed(staging: Staging) -> tuple[FileEntry, ...]:
    """Seal the staged directory and return an entry for each of its files, sorted by path.

    The entries have a SHA-256 if a signing key is in force for the model. Raises VerificationError,
    PublishError and its subclasses, CheckpointError and OSError as `seal`.
    """
    files = seal(staging.path)
    if signer_of(staging.model) is None:
        return files
    from exporter.publish.signing import with_digests

    return with_digests(staging.path, files)


def _complete(
    staging: Staging,
    draft: ManifestDraft,
    files: tuple[FileEntry, ...],
    target: Path,
    position: int,
    now: float,
    identity: str | None,
) -> Manifest:
    """Complete the draft, write it as the staged `manifest.json`, the last file, and return the manifest.

    It states `position`, the staged `files` and the time of publication, `now`, in seconds since 1970.
    `identity` is the model's (None: of an earlier release). If a signing key is in force, the manifest is
    signed as the publication that will be at `target`. Raises NotTrusted if the key is for another identity,
    PublishError and its subclasses if the file cannot be written or synced.
    """
    manifest = replace(draft, identity=identity).complete(
        position=position,
        created=datetime.fromtimestamp(now, timezone.utc),
        files=files,
        publisher=this_user(),
    )
    if (signer := signer_of(staging.model)) is not None:
        signer.require(identity, staging.model)
        manifest = signer.signed(manifest, target.relative_to(staging.model).as_posix())
    write_durably(staging.path / MANIFEST_FILE, to_json(manifest).encode("ascii"))
    # Before the rename: a power cut must not keep the new name of the directory and lose a name inside it.
    sync(staging.path)
    return manifest


def _install(staging: Staging, target: Path) -> tuple[ExportError, ...]:
    """Rename the staged bundle to `target`, sync the parent directory, and return warnings, () without any.

    From the rename on readers have it, so that a later failure is a warning, not an error. That a file system
    cannot sync is reported once per process and model. OSError if the rename fails.
    """
    os.rename(staging.path, target)  # noqa: PTH104  the commit: one call, in plain sight
    try:
        is_durable = sync(target.parent)
    except ExportError as error:
        error.message = f"{target} is published, but may not survive a power cut: {error.message}"
        return (error,)
    if is_durable or staging.model in _told_of:
        return ()
    _told_of.add(staging.model)
    return (PublishError(cannot_sync(staging.model), hint=NO_SYNC_HINT),)


_told_of: set[Path] = set()
"""Models for which this process has warned already: a watch publishes a thousand times."""

NO_SYNC_HINT = "keep the model on a local disk or NFS and push it from there, if that is not enough"


def cannot_sync(model: Path) -> str:
    """Return the text of the warning for a model whose file system cannot sync directories."""
    return (
        f"the file system of {model} does not say when the names of files are on disk: readers see what is "
        "published whole or not at all, but a power cut of its server may lose the last of it"
    )


@contextmanager
def model_lock(model: Path, seconds: float = LOCK_SECONDS, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold a model's lock during the block, against other exporters on any machine that shares its files.

    Waits up to `seconds`. `name` is the lock file's, made if needed; this process's id and host name are
    written into it. The default lock of a model in a store also begins a person's decision there, if this
    process was opened for one: see `exporter.storage.mirror.locked`.

    Raises (on entry):
        TargetBusy: other exporters held it for `seconds`.
        OSError: the lock file cannot be opened or made, or the file system has no locks.
        ExportError: the decision could not begin in the store; ModelHeld or PositionMoved because of others.
    """
    path, is_published_to = model / name, name == LOCK_FILE
    # the file is never removed: else two processes could lock two files of this name
    lock = open_lock(path)
    try:
        if not (_lock_in_turn(model, lock, seconds) if is_published_to else lock_within(lock, seconds)):
            holder = os.pread(lock, 200, 0).decode("ascii", "replace").strip() or "unknown"
            raise TargetBusy(f"{path} stayed locked for {seconds:g} s", cause=f"it is held by {holder}")
        with suppress(OSError):  # for a waiting process's message; a full disk is reported where it matters
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        if is_published_to:
            mirror.locked(model)
        yield
    finally:
        close_quietly(lock)


def _lock_in_turn(model: Path, lock: int, seconds: float) -> bool:
    """Acquire the model's lock (descriptor `lock`) before any process that asks for it later.

    False if that takes more than `seconds`. Waiting processes try every 20 ms, and a process that publishes
    without a pause would nearly always have the lock again by then. So each first locks the file of the turn,
    and keeps it until it has the lock. OSError if the file of the turn cannot be opened, or the file system
    has no locks.
    """
    deadline = time.monotonic() + seconds
    turn = open_lock(model / TURN_FILE)
    try:
        return lock_within(turn, seconds) and lock_within(lock, deadline - time.monotonic())
    finally:
        close_quietly(turn)


def _locked(model: Path, *, is_ours: bool) -> AbstractContextManager[None]:
    """A context manager that locks the model as `model_lock` does; with `is_ours` it does nothing.

    It waits up to a minute. It raises TargetBusy if others hold the lock that long, OSError if the lock's
    file cannot be opened.
    """
    return nullcontext() if is_ours else model_lock(model)


def _within_int64(number: int) -> int:
    if number > _MAX_VERSION:
        raise VersionExists(f"there is no version number above {_MAX_VERSION}")
    return number
