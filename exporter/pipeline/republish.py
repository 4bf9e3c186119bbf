"""Roll back and resume models without deltas: publish an older version again as the newest.

Its files are linked, not copied, after they were compared with their manifest and checksums. Servers load the
newest version by themselves; what a rollback must keep off is the trainer's next export. So the model is held
before the version is there, and lifted after the other one is: a process that is killed in between has not
rolled back, or not resumed, and the same command again does it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from exporter.checkpoint.tensor_bundle import index_path, read_catalog
from exporter.delta.spans import Position
from exporter.errors import PositionUnknown, UsageError
from exporter.files import writing
from exporter.layout import PAIR_NAME, VARIABLES_PREFIX
from exporter.local_paths import quoted
from exporter.publish.commit import (
    Published,
    PublishedDelta,
    Staging,
    VersionRule,
    model_lock,
    publish_version,
)
from exporter.publish.hold import Hold
from exporter.publish.manifest import DeltaOrigin, Manifest, ManifestDraft, RestoredValues
from exporter.publish.permission import Permission
from exporter.publish.versions import (
    VersionDir,
    greatest,
    last_position,
    newest_version,
    nothing_published,
    published_versions,
    read_head,
    read_manifest,
    taken,
    version_dirs,
)
from exporter.storage import mirror
from exporter.verify.version_files import verify_bytes, verify_published
from exporter.version import __version__


class RollbackPlan(Struct, frozen=True):
    """A rollback or resumption as it is planned: where the model stands, whose values it gets, and how.

    `path` is what is published at `position`, None if the values do not have to change. `is_canary`: the hold
    is a canary's. `was_held` is False where there is no hold to lift: then there is nothing to do.
    """

    before: Position
    values_of: Position
    path: Path | None
    position: int
    hold: int | None
    is_canary: bool = False
    was_held: bool = True


class RollbackResult(Struct, frozen=True):
    """A rollback or resumption: where the model stood, whose values it has now, and what did it.

    `published` is None if values did not have to change. `is_canary` and `was_held`: as in `RollbackPlan`.
    """

    before: Position
    values_of: Position
    published: PublishedDelta | Published | None
    hold: int | None
    is_canary: bool = False
    was_held: bool = True

    @property
    def path(self) -> Path | None:
        """What was published."""
        return None if self.published is None else self.published.path

    @property
    def position(self) -> int:
        """Where the model stands now."""
        return self.before.position if self.published is None else self.published.manifest.position


def rollback_accepted(model: Path, at: int, before: int) -> UsageError:
    """The error of a resumption whose rollback was accepted: the hold was lifted, and its values stayed."""
    return UsageError(
        f"{model} is not held: the rollback at {at} was accepted when its hold was lifted",
        hint=f"serve the values of {before} again: export-model rollback {quoted(model)} --to {before}, "
        f"then export-model resume {quoted(model)} --lift-only",
    )


def is_plain(model: Path) -> bool:
    """True if something is published, and the newest version takes no deltas.

    Raises:
        ManifestError: its manifest is damaged.
    """
    newest = newest_version(model)
    return newest is not None and read_head(newest.path).log is None


def rollback(model: Path, to: int, reason: str | None = None) -> RollbackResult:
    """Publish version `to` again as the newest, for a reason, and hold the model there.

    Raises:
        PositionUnknown: there is no such version.
        UsageError: it is the newest, or takes deltas.
        VerificationError, CheckpointError: it is damaged.
        TargetBusy, PublishError: see errors.py; nothing was published.
    """
    with _operating(model) as (versions, staging):
        plan, manifest = _plan_rollback(model, versions, to)
        newest, hold, number = versions[0], Hold(model), plan.position
        earlier = _in_force(newest) if hold.is_set else None  # one that was lifted is accepted
        before = newest.version if earlier is None else earlier.before
        with hold.put_back_on_failure(staging):
            hold.put(number, staging)
            told = RestoredValues(DeltaOrigin.ROLLBACK.value, to, before, reason)
            done = _publish(model, staging, to, manifest, told)
        return RollbackResult(plan.before, plan.values_of, done, number)


def plan_rollback(model: Path, to: int) -> RollbackPlan:
    """What `rollback` would do now; that version is checked, and nothing is written.

    Raises:
        PositionUnknown, UsageError, VerificationError, CheckpointError: as `rollback`.
    """
    return _plan_rollback(model, _versions(model), to)[0]


def plan_resume(model: Path, *, lift_only: bool) -> RollbackPlan:
    """What `resume` would do now; the version that comes back is checked, and nothing is written.

    Raises:
        PositionUnknown, UsageError, VerificationError, CheckpointError: as `resume`.
    """
    return _plan_resume(model, _versions(model), lift_only)[0]


def _plan_rollback(model: Path, versions: list[VersionDir], to: int) -> tuple[RollbackPlan, Manifest]:
    newest = versions[0]
    if to == newest.version:
        raise UsageError(f"version {to} is the newest: there is nothing to roll back")
    manifest = _whole(versions, to)
    number = _next_version(model, versions, manifest)
    at = _at(newest.path)
    return RollbackPlan(at, Position(to, manifest.step), model / str(number), number, number), manifest


def _plan_resume(
    model: Path, versions: list[VersionDir], lift_only: bool
) -> tuple[RollbackPlan, tuple[Manifest, int] | None]:
    """The plan, and of the version that comes back its manifest and number, None if the values stay."""
    is_held = Hold(model).is_set
    undone = None if lift_only else _in_force(versions[0])
    at = _at(versions[0].path)
    if undone is None or undone.before == undone.back_to:
        return RollbackPlan(at, at, None, at.position, None, was_held=is_held), None
    if not is_held:
        raise rollback_accepted(model, at.position, undone.before)
    manifest = _whole(versions, undone.before)
    number = _next_version(model, versions, manifest)
    plan = RollbackPlan(at, Position(undone.before, manifest.step), model / str(number), number, None)
    return plan, (manifest, undone.before)


def _next_version(model: Path, versions: list[VersionDir], manifest: Manifest) -> int:
    last = last_position(model, versions)
    newest = greatest(version_dirs(model)[0].version, taken(model).version)
    return VersionRule().choose(manifest.step, newest=newest, last=last, now=0)[0]


def resume(model: Path, *, lift_only: bool) -> RollbackResult:
    """Lift the hold; after a rollback that nothing was published on, publish the version before it again.

    Where nothing is held there is nothing to do.

    Raises:
        UsageError: the rollback was accepted by a resumption with `lift_only`.
        PositionUnknown: that version is gone.
        VerificationError, CheckpointError, TargetBusy, PublishError: see errors.py; the model is still held.
    """
    with _operating(model) as (versions, staging):
        plan, comes_back = _plan_resume(model, versions, lift_only)
        done = None
        if comes_back is not None:
            manifest, number = comes_back
            told = RestoredValues(DeltaOrigin.RESUME.value, number, versions[0].version)
            done = _publish(model, staging, number, manifest, told)
        Hold(model).lift()
        return RollbackResult(plan.before, plan.values_of, done, None, was_held=plan.was_held)


@contextmanager
def _operating(model: Path) -> Iterator[tuple[list[VersionDir], Staging]]:
    """The versions, newest first, while nobody else publishes."""
    with Staging(model) as staging, writing(staging.path), model_lock(model):
        yield _versions(model), staging


def _versions(model: Path) -> list[VersionDir]:
    versions = published_versions(model)
    if not versions:
        raise nothing_published(model)
    return versions


def _at(version_: Path) -> Position:
    manifest = read_manifest(version_)
    return Position(int(version_.name), manifest.step)


def _whole(versions: list[VersionDir], number: int) -> Manifest:
    """The manifest of a version, all of whose bytes were compared with it."""
    found = next((child for child in versions if child.version == number), None)
    if found is None:
        known = ", ".join(str(child.version) for child in versions[:20])
        raise PositionUnknown(
            f"there is no version {number}",
            cause=f"there are {known}",
            hint="name one of these; to leave the values as they are: export-model resume MODEL --lift-only",
        )
    manifest = read_manifest(found.path)
    if manifest.incremental is not None:
        raise UsageError(
            f"version {number} takes deltas, and its log has ended: it cannot be the newest again",
            hint="export its checkpoint once more: --updatable --again",
        )
    verify_published(found.path)
    for prefix in (VARIABLES_PREFIX, PAIR_NAME):
        if index_path(found.path / prefix).exists():
            verify_bytes(read_catalog(found.path / prefix))
    return manifest


def _in_force(newest: VersionDir) -> RestoredValues | None:
    """The rollback that nothing was published on, if there is one."""
    told = read_manifest(newest.path).taken_back
    return told if told is not None and told.made == DeltaOrigin.ROLLBACK.value else None


def _publish(
    model: Path, staging: Staging, number: int, manifest: Manifest, taken_back: RestoredValues
) -> Published:
    for entry in manifest.files:
        target = staging.path / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(model / str(number) / entry.path, target)
    draft = ManifestDraft(
        tensors=manifest.tensors,
        source=manifest.source,
        exporter=__version__,
        step=manifest.step,
        taken_back=taken_back,
        plan_digest=manifest.plan_digest,
    )
    allowed = Permission(despite_hold=True)
    return publish_version(staging, draft, permission=allowed, is_locked=True)


def _link_or_copy(source: Path, target: Path) -> None:
    mirror.fetch(source)  # a link to a file that stands for an object would be empty
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links, or too many of them
        shutil.copyfile(source, target)
