"""Merge a base and its deltas into a new base of the same log (`exporter.pipeline.merged_base`).

Servers load the new base beside the old one; deltas after its position apply to both.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from msgspec import Struct

from exporter.delta.spans import Position, merged
from exporter.options import LOCALLY, Jobs
from exporter.pipeline.log_maintenance import position_of_merger, runner_for, skip_abandoned, undisturbed
from exporter.pipeline.merged_base import BasePlace, merger_of, require_local, write_base
from exporter.pipeline.restoration import approved_by_canary
from exporter.publish.commit import PublishedVersion, ReservedPosition, Staging, publish_version
from exporter.publish.delta_log import DeltaLog, LogBase, LogDelta
from exporter.publish.finite import require_merger_finite
from exporter.publish.permission import Permission
from exporter.publish.retention import Keep
from exporter.storage.files import writing
from exporter.terminal.progress import ProgressFactory, no_progress


class Rebased(Struct, frozen=True):
    """A new base: its path and position, the deltas merged in it, and the number of tasks that write it.

    `published` is None for a plan; `meets` lists what a plan would meet in a store.
    """

    path: Path
    at: Position
    deltas: int
    tasks: int
    published: PublishedVersion | None = None
    meets: tuple[str, ...] = ()


def rebase(
    model: Path,
    *,
    keep: Keep | None = None,
    despite_hold: bool = False,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
    dry_run: bool = False,
) -> Rebased | None:
    """Publish a base at the newest position of the log; return None if there is one already.

    Deltas that are published meanwhile apply to it, too. Servers load a base by themselves, so under a
    canary's hold it has the newest position that is approved. `keep` says which older versions stay (None:
    all), `jobs` which engine runs the tasks. A `dry_run` reads and checks the deltas, not the base's values;
    it writes nothing, and returns the plan. While others remove files that are read, the work is repeated for
    up to a minute.

    Raises:
        NotUpdatable: nothing is published, or the newest version takes no deltas.
        UsageError: the base has hot rows, and is in an object store; or an option is wrong.
        ModelHeld: the model is held, unless `despite_hold`.
        NotFinite: it would have values that the model refuses.
        ManifestError, VerificationError: the old base is damaged.
        CheckpointError: a delta is damaged.
        PositionError: deltas are missing, or no later position is left.
        EngineFailed: the engine of `jobs` failed.
        PositionMoved, PublishError: see errors.py; nothing was published.
        OSError: of a `dry_run`, a file cannot be read.
    """
    permission = Permission(despite_hold)

    def work(log: DeltaLog) -> Rebased | None:
        permission.check(model, takes_deltas=True, versions=log.versions)
        at = _newest_approved(log).at
        if log.base.at.position >= at.position:
            return None
        require_local(log.base)
        chain = log.chain(log.base.at.position, at.position)
        require_merger_finite(log, chain, merged(chain))
        if dry_run:
            return _planned(log, at, chain, jobs)
        if at == log.at:
            log = skip_abandoned(log, model / str(at.position))
        return _rebase(log, keep, permission, jobs, progress)

    return undisturbed(model, work)


def _planned(log: DeltaLog, at: Position, chain: tuple[LogDelta, ...], jobs: Jobs) -> Rebased:
    """Return the plan of a new base at `at`, now; its deltas are checked, the base's values are not read.

    `chain` are the deltas, and `jobs` has the size of a task, by which their number is computed. Raises
    VerificationError or CheckpointError if a delta is damaged, VersionExists or PositionError if no position
    is left.
    """
    model = log.model
    log.state(at.position)
    position = position_of_merger(log, model / str(at.position)) if at == log.at else at.position
    path, deltas = model / str(position), len(chain) + (position != at.position)
    tasks = merger_of(log, log.base, chain, path, jobs.task_bytes).tasks
    return Rebased(path, Position(position, at.step), deltas, tasks)


def _rebase(
    log: DeltaLog, keep: Keep | None, permission: Permission, jobs: Jobs, progress: ProgressFactory
) -> Rebased:
    model, newest = log.model, _newest_approved(log)
    at = newest.at
    deltas = len(log.chain(log.base.at.position, at.position))
    with Staging(model) as staging, writing(staging.path):
        place = BasePlace(at.position, log.number, log.lineage)
        runner = partial(runner_for, jobs, model)
        draft, tasks = write_base(log, newest, place, staging, jobs.task_bytes, runner, progress)
        published = publish_version(
            staging,
            draft,
            ReservedPosition(at.position, last=at.position, is_passed=True),
            keep=keep,
            permission=permission,
        )
        return Rebased(published.path, at, deltas, tasks, published)


def _newest_approved(log: DeltaLog) -> LogBase | LogDelta:
    """Return the base or delta at the newest position; under a canary, at the newest approved one.

    Raises ManifestError if the hold cannot be read, PositionUnknown if nothing is published at its position.
    """
    approved = approved_by_canary(log)
    return log.newest if approved is None or approved >= log.at.position else log.standing(approved)
