"""Operators' work on a published model: merge its deltas, roll it back, resume, and tidy.

With `dry_run` an operation reads and checks the same input, writes nothing, and returns its plan.
`exporter.pipeline.restoration` restores earlier values, and says what servers see of it.

Other processes publish to a log meanwhile, and tidy it. `undisturbed` repeats a command's work if they
removed files that it was reading. `skip_abandoned` gets past an abandoned upload to a store: its path may
never be used again, because the process may only be slow, and still write there (see
`exporter.transfer.head`). Exports choose another number. A merged delta cannot: so the log gets a delta
without changes, and the merged delta ends after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.format import span_name
from exporter.delta.spans import Position, Span, merge_due, merged, plan_chain
from exporter.errors import (
    CheckpointError,
    ModelHeld,
    NotFinite,
    NotUpdatable,
    PositionMoved,
    PositionUnknown,
    PublishError,
    TargetBusy,
    UsageError,
    VerificationError,
)
from exporter.options import LOCALLY, Jobs
from exporter.publish.commit import (
    PublishedDelta,
    PublishedVersion,
    Staging,
    UnderLock,
    model_lock,
    next_delta_position,
)
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogDelta, list_deltas, log_of, read_log
from exporter.publish.delta_publication import Publication, header_of, publish_changes, publish_written
from exporter.publish.finite import require_merger_finite, unchecked
from exporter.publish.hold import Decided, HeldBy, Hold
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.permission import binding, judged, require_on_way
from exporter.publish.retention import RetiredDeltas, retire_deltas, retire_logs
from exporter.publish.tags import Standing, resolve_position
from exporter.publish.versions import (
    VersionDir,
    in_force,
    is_taken,
    is_trusting,
    log_directories,
    newest_of,
    newest_version,
    nothing_published,
    version_dirs,
)
from exporter.storage import mirror
from exporter.storage.files import remove_tree, writing
from exporter.storage.layout import CANARY_LOCK_FILE, DELTA_NAME
from exporter.storage.local_paths import quoted
from exporter.terminal.progress import ProgressFactory, no_progress

if TYPE_CHECKING:
    from exporter.delta.merge_deltas import DeltaMerger
    from exporter.jobs.runner import Runner
    from exporter.pipeline.restoration import Planned, Restoration, Restored, Restorer

T = TypeVar("T")
RACE_SECONDS = 60.0
"""Seconds for which an operator's command tries again while others remove files that it reads."""


def delta_path(log: DeltaLog, span: Span) -> Path:
    """Return the path of a log's delta with this span; it need not exist."""
    return log.path / span_name(span.start, span.end)


class Merged(Struct, frozen=True):
    """A merger: the deltas that become one, its span and path, and the number of tasks that write it.

    `published` is None for a plan; `meets` lists what a plan would meet in a store.
    """

    parts: tuple[LogDelta, ...]
    span: Span
    path: Path
    tasks: int
    published: PublishedDelta | None = None
    meets: tuple[str, ...] = ()


def merge(
    model: Path,
    start: int | str | None = None,
    end: int | str | None = None,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
    *,
    dry_run: bool = False,
) -> Merged | None:
    """Merge the deltas between two positions of the newest log into one, and publish it.

    `start` is by default the newest base, `end` the newest position. Returns None if there is nothing to
    merge: at most one delta is between them, or they are merged already. Positions are numbers or names
    (`exporter.publish.tags`). A `dry_run` reads and checks the deltas, writes nothing, and returns the plan.
    If others remove files that are read, the work is repeated, for up to a minute.

    Raises:
        NotUpdatable: nothing is published, or the newest version takes no deltas.
        UsageError: `start` is not before `end`.
        PositionUnknown: one of them is not a position of the newest log.
        DeltaGap, StaleDelta: deltas do not reach from `start` to `end`.
        ModelHeld: the merged delta would bring servers to a position that was rolled back.
        NotFinite: the merged delta would have values that the model refuses.
        CheckpointError, VerificationError: a delta is damaged.
        ManifestError: the log's manifests cannot be read.
        PositionMoved: others published and removed deltas for a minute.
        EngineFailed: the engine of `jobs` failed.
        PublishError: see errors.py; nothing was published.
    """
    start, end = _positions(model, start, end)

    def work(log: DeltaLog) -> Merged | None:
        run = _run(log, start, end)
        if len(run) < 2 or _is_merged(log, run):
            return None
        if dry_run:
            return _planned(log, run, jobs, is_whole=end is None)
        if end is None:
            log = skip_abandoned(log, delta_path(log, merged(run)))
            run = _run(log, start, end)
        return _merge(log, run, jobs, progress)

    return undisturbed(model, work)


def _planned(log: DeltaLog, run: tuple[LogDelta, ...], jobs: Jobs, *, is_whole: bool) -> Merged:
    """Return the plan of `merge_run`, now; all deltas of `run` are read and checked.

    `is_whole`: they reach the newest position, so that the merger may end later, to avoid an abandoned path
    (see `position_of_merger`). Raises VerificationError, CheckpointError or OSError if a delta is damaged or
    cannot be read, VersionExists or PositionError if no later position is left.
    """
    for delta in run:
        log.open(delta)
    span = merged(run)
    path = delta_path(log, span)
    tasks = _merger(log, run, path, jobs)[0].tasks
    if is_whole and (position := position_of_merger(log, path)) != span.end:
        run, span = (*run, LogDelta(log.path, span.end, position)), Span(span.start, position)
    return Merged(run, span, delta_path(log, span), tasks)


def _positions(model: Path, *named: int | str | None) -> list[int | None]:
    """Return the positions meant by numbers or names, in order; None stays None.

    Raises UsageError for a malformed name, PositionUnknown for an unknown one, NotUpdatable if nothing is
    published, ManifestError if a manifest cannot be read.
    """
    return [None if each is None else resolve_position(each, model) for each in named]


def _run(log: DeltaLog, start: int | None, end: int | None) -> tuple[LogDelta, ...]:
    """Return the deltas from `start` to `end`, in order; None is the newest base, or the newest position.

    Raises UsageError if `start` is not before `end`, PositionUnknown if one is not a position of the log,
    DeltaGap if deltas are missing, StaleDelta if `end` is before the newest base and `start` is None,
    ManifestError if a manifest cannot be read.
    """
    for position in (start, end):
        if position is not None and not log.has(position):
            _require_not_ended(log, position)
            log.standing(position)
    if start is not None and end is not None and start >= end:
        turned = f"export-model merge {quoted(log.model)} --from {end} --to {start}"
        raise UsageError(
            f"position {start} does not come before position {end}",
            hint=f"list the positions: export-model history {quoted(log.model)}" if start == end else turned,
        )
    return log.chain(log.base.at.position if start is None else start, end)


def _require_not_ended(log: DeltaLog, position: int) -> None:
    """Raise PositionUnknown if an earlier log has the position: its deltas are no longer merged.

    ManifestError if the model's other logs cannot be listed.
    """
    other = Standing(log.model, log, log.versions).log_at(position)
    if other is not None:
        raise PositionUnknown(
            f"position {position} is of a log that has ended: deltas of the newest log alone are merged",
            cause=f"that begins with version {log.number}",
            hint=f"list the positions: export-model history {quoted(log.model)}",
        )


def merge_run(
    log: DeltaLog, run: Sequence[LogDelta], jobs: Jobs = LOCALLY, progress: ProgressFactory = no_progress
) -> Merged | None:
    """Merge and publish the neighbouring deltas `run` of a log; None if the merger is published already.

    Another process may publish it meanwhile; None also if others published a base of another log. `run` is in
    order, at least one delta. `jobs` says where tasks run.

    Raises:
        NotFinite: the model would refuse the merged delta.
        ModelHeld: it would bring servers to a position that was rolled back.
        DeltaGap: the deltas are not neighbours.
        CheckpointError, VerificationError: a delta is damaged.
        NotUpdatable: the newest version takes no deltas any more.
        UsageError: the log is signed, and the merger would not be; or an option of the engine is wrong.
        EngineFailed: the engine of `jobs` failed.
        PublishError: and subclasses: the merger cannot be written, or the model not locked.
    """
    return None if _is_merged(log, run) else _merge(log, run, jobs, progress)


def _merge(log: DeltaLog, run: Sequence[LogDelta], jobs: Jobs, progress: ProgressFactory) -> Merged | None:
    """Merge and publish `run`, for which `_is_merged` returned False; results and errors as `merge_run`."""
    with Staging(log.model) as staging, writing(staging.path), ExitStack() as stack:
        merger, what = _merger(log, run, staging.path, jobs)
        with progress("merging", merger.bytes_) as bar:
            rows = merger.write(stack, runner_for(jobs, log.model, merger.tasks), bar)
        how = UnderLock(permit=lambda now: require_on_way(now, what.span))
        try:
            # Without `last`: a merger takes no new position, so later deltas may come meanwhile.
            published = publish_written(log, staging, rows, what, last=None, under_lock=how)
        except PositionMoved:  # another process tidied at the same time
            return None
        return Merged(tuple(run), what.span, published.path, merger.tasks, published)


def _merger(
    log: DeltaLog, run: Sequence[LogDelta], directory: Path, jobs: Jobs
) -> tuple[DeltaMerger, Publication]:
    """Return the writer of a merged delta, and the publication to be made; nothing is written yet.

    The writer makes the delta in `directory`, by tasks as `jobs` says. Of the deltas `run`, only headers and
    descriptions are read: CheckpointError or OSError if they are damaged or cannot be read; DeltaGap if `run`
    has gaps.
    """
    from exporter.delta.merge_deltas import DeltaMerger  # late: of the deltas that are tidied few are merged
    from exporter.pipeline.restoration import packing_of

    newest, parts = run[-1], [log.tensors(delta) for delta in run]
    packing, state = packing_of(part.header for part in parts), newest.manifest.state_id
    step, trained = newest.at.step, newest.entry.trained
    what = Publication.of(log, merged(run), step, DeltaOrigin.MERGE, trained, packing, state=state)
    header, hint = header_of(log, what), BROKEN_LOG_HINT
    prefix = directory / DELTA_NAME
    return DeltaMerger(prefix, log.schema, header, parts, task_bytes=jobs.task_bytes, hint=hint), what


def _is_merged(log: DeltaLog, run: Sequence[LogDelta]) -> bool:
    """True if the merger of the deltas `run` is published already.

    Deltas that were not checked when they were published are read. Raises ModelHeld if the merger would bring
    servers to a position that was rolled back; NotFinite if it would have NaN or infinity, and the model
    wants finite values; DeltaGap if the deltas are not neighbours, CheckpointError if one is damaged.
    """
    span = merged(run)
    require_on_way(log, span)
    if delta_path(log, span).exists():
        return True
    hint = (
        "train on until these values are finite, and merge again; or take them back: "
        f"export-model rollback {quoted(log.model)} --to {quoted(str(run[0].start))}"
    )
    require_merger_finite(log, run, span, hint)
    return False


def tidy(
    model: Path,
    log: DeltaLog | None = None,
    *,
    removes: bool = True,
    clock: Callable[[], float] = time.time,
) -> tuple[tuple[Merged, ...], RetiredDeltas]:
    """Merge the deltas that are due and, if `removes`, remove spare ones; do neither while the log is held.

    Returns the mergers and the removed deltas. `log` is the model's, as last read under the lock (None: it is
    read now); `clock` returns seconds since 1970. Under a canary's hold, deltas beyond the hold stay as they
    are: they may be reverted. If the model wants finite values, deltas that an earlier release published
    unchecked are merged with later ones, as soon as these are finite, so that servers get past them.

    Raises ExportError (TargetBusy among others) if the log cannot be read or locked, or a merger cannot be
    published; earlier mergers stay. ModelHeld is not raised: it ends the merging. Files that cannot be
    deleted are left.
    """
    done: list[Merged] = []
    log = read_log(model) if log is None else log
    if log.hold.binds:  # the rollback may still be reverted, delta by delta
        return (), RetiredDeltas()
    while run := merge_due(judged(log)):
        try:
            merger = merge_run(log, run)
        except ModelHeld:
            break
        if merger is None or merger.published is None:
            break
        done.append(merger)
        log = merger.published.log
    if not removes:
        return tuple(done), RetiredDeltas()
    with suppress(ModelHeld, NotFinite):
        run = _past_unchecked(log)
        if len(run) > 1 and (merger := merge_run(log, run)) is not None:
            done.append(merger)
    with model_lock(model):
        # Again: a hold, a rollback or a base that came meanwhile needs deltas that were spare before.
        log, now = read_log(model), clock()
        if log.hold.binds:
            return tuple(done), RetiredDeltas()
        log.hold.sweep()
        retired = retire_deltas(log, now=now) + retire_logs(log, now=now)
    for trash in retired.trash:  # without the lock: large files take long to delete
        remove_tree(trash)
    return tuple(done), retired


def _past_unchecked(log: DeltaLog) -> tuple[LogDelta, ...]:
    """Return the deltas from the first that was not checked for NaN to the newest; () if all were checked.

    Only deltas up to a canary's approval count; () also if the model accepts NaN. Raises ManifestError if a
    manifest, or the hold, cannot be read, DeltaGap if a delta is missing between them.
    """
    if not log.base.entry.updates.finite:
        return ()
    deltas = judged(log)
    start = min((delta.start for delta in unchecked(deltas)), default=None)
    return () if start is None else plan_chain(deltas, start)


class RollbackResult(Struct, frozen=True):
    """A rollback or resumption: the model's position before, whose values it gets, and how.

    `path` is the publication at `position`; None if the values do not have to change. `is_canary`: the
    remaining hold is a canary's. `was_held` is False if there was no hold to lift: nothing was done.
    `published` is None for a plan, and if the values did not have to change. `replaced` is a person's hold
    that a rollback's replaces. `made` is the form of the restored values, a base if their log has ended; None
    if the values stay. `meets` lists what a plan would meet in a store.
    """

    before: Position
    values_of: Position
    path: Path | None
    position: int
    hold: int | None
    is_canary: bool = False
    was_held: bool = True
    published: PublishedDelta | PublishedVersion | None = None
    replaced: HeldBy | None = None
    made: Restored | None = None
    meets: tuple[str, ...] = ()


def rollback(
    model: Path, to: int | str, *, reason: str | None = None, if_canary: bool = False, dry_run: bool = False
) -> RollbackResult:
    """Publish the values of position `to`, a number or a name, as the next position; hold the model there.

    Values of a log that has ended are published as a new base; those of a version that takes no deltas, as
    the newest version. The `reason` is kept in the manifest; what is not valid Unicode in it is escaped.
    `if_canary`: only if a canary's hold is at `to`, as others may have decided meanwhile. A `dry_run` reads
    and checks its input, writes nothing, and returns the plan.

    Raises:
        NotUpdatable: nothing is published.
        PositionUnknown: `to` is not a published position, or its values are gone.
        UsageError: `to` is the newest position, or not a position's name.
        ModelHeld: a canary decides about the log, and rejected the values of `to`; or the store of this copy
            holds it.
        PositionMoved: with `if_canary`, there is no canary's hold at `to`.
        OverlayFull, NotFinite: servers would refuse the restored values.
        PositionError: other subclasses: deltas are missing, or no later position is left.
        TargetBusy: another exporter had the model's lock for too long.
        VerificationError, CheckpointError, PublishError: see errors.py; nothing was published, and the hold
            is as it was.
        OSError: of a `dry_run`, a file cannot be read.
    """
    if reason is not None:
        # Bytes of a command line that are not UTF-8 are lone surrogates, which no manifest can hold.
        reason = reason.encode(errors="backslashreplace").decode()

    def plan(restorer: Restorer, at: int) -> _Plan:
        _require_own(model, restorer, "rollback", f"--to {at}")
        asked = replace(restorer.rollback_of(at), reason=reason, by_canary=if_canary)
        return _Plan(restorer, asked, replaced=restorer.hold.by if restorer.hold.binds else None)

    if dry_run:
        first = restorer_of(model)
        at = _position_for(first, to, if_canary)  # not in `plan`, which is repeated for such an error
        return _undisturbed(model, first, lambda restorer: plan(restorer, at).foreseen())
    with _operating(model) as (restorer, staging):
        planned = plan(restorer, _position_for(restorer, to, if_canary))
        with restorer.hold.put_back_on_failure(staging):  # the hold comes before the values
            return planned.execute(staging)


def repeat(model: Path, to: int, made: DeltaOrigin, held: HeldBy | None) -> Path | None:
    """Publish the values of position `to` as a copy's next delta, as its store did; return the delta's path.

    None if no delta leads back to these values: nothing is done then. `made` is a rollback or a resumption,
    `held` the store's hold after it, None without a hold: the copy is held by it from then on, at the new
    position. The copy's own hold stays beside it. Nobody else reads the delta, so no key has to sign it.

    Raises:
        NotUpdatable: nothing is published in the copy.
        UsageError: of a rollback, `to` is the copy's newest position.
        ModelHeld: a canary of the copy rejected the values.
        PositionUnknown, OverlayFull, NotFinite: the values are gone, or servers would refuse them.
        PositionError: other subclasses: deltas are missing, or no later position is left.
        TargetBusy: another process had the model's lock for too long.
        VerificationError, CheckpointError, PublishError: see errors.py; the copy's hold is as it was.
    """
    from exporter.pipeline.restoration import Restored

    with in_force(model, unsigned=True), _operating(model) as (restorer, staging):
        if made is DeltaOrigin.ROLLBACK:
            asked = replace(restorer.rollback_of(to), reason=None if held is None else held.why or None)
        else:
            asked = restorer.resumption_of(to)
        if asked.way.made is not Restored.DELTA:
            return None
        # Before `publish`: for a rollback, that sets a hold of its own.
        hold, own = restorer.hold, restorer.hold.decided().own
        with hold.put_back_on_failure(staging):
            done = restorer.publish(asked, staging)
        if held is not None:
            held = replace(held, position=done.manifest.position, values_of=to)
        hold.set(Decided(own).following(held), staging)
        return done.path


def _position_for(restorer: Restorer, to: int | str, if_canary: bool) -> int:
    """Return the position that `to` means, a number or a name.

    PositionMoved if `if_canary` and no canary's hold is at this position; errors as `_positions`.
    """
    at, hold = resolve_position(to, restorer.model), restorer.hold
    if if_canary and hold.approved() != at:
        raise PositionMoved(f"{hold.directory} is not held at {at} by a canary: others decided meanwhile")
    return at


def _require_own(model: Path, restorer: Restorer, command: str, option: str) -> None:
    """Raise ModelHeld if the hold in force was set in the store of which `model` is a copy.

    Nothing is raised for a model that is held only here, or not at all. The store decides for all copies: a
    decision in one of them alone would send its servers another way. `command` and `option` are what the user
    typed, for the hint.
    """
    holds = {hold.directory: hold for hold in (restorer.hold, *binding(model, restorer.log))}
    for hold in holds.values():
        by = hold.by
        if by is not None and by.url:
            typed = by.lifting(model) if command == "resume" else ["export-model", command, by.url]
            words = " ".join(filter(None, (*map(quoted, typed), option)))
            raise ModelHeld(
                f"{model} is held at {by.position} by its store, for all copies",
                cause=by.text,
                hint=f"decide there: {words}",
            )


def resume(
    model: Path, *, lift_only: bool = False, lift_canary: bool = False, dry_run: bool = False
) -> RollbackResult:
    """Lift the hold; after a rollback without later publications, publish the values before it again.

    Where a canary had approved publications, its hold replaces the rollback's: it must approve the resumed
    values, too. Only `lift_canary` lifts that hold: servers then apply everything, also what no canary has
    approved. After several rollbacks, the values are those before the first that is still in force. With
    `lift_only` the values stay the rollback's.

    Without a hold, or with a canary's hold alone and without `lift_canary`, nothing is done. A `dry_run`
    reads and checks its input, writes nothing, and returns the plan.

    Raises:
        NotUpdatable: nothing is published.
        UsageError: the rollback was accepted by a resumption with `lift_only`.
        ModelHeld: the model is a copy, and its store holds it.
        PositionUnknown: the values before the rollback are gone.
        PositionMoved: of a `dry_run`, others published and removed files for a minute.
        OverlayFull, NotFinite: servers would refuse the restored values.
        TargetBusy: the canary of a running agent would set its hold again at once; or another exporter had
            the lock.
        VerificationError, CheckpointError, ManifestError, PublishError: see errors.py; the model is still
            held, whether or not the values are published: running it again continues.
    """
    plan = partial(_resumption, model, lift_only=lift_only, lift_canary=lift_canary)
    if dry_run:
        return _undisturbed(model, restorer_of(model), lambda restorer: plan(restorer).foreseen())
    with _operating(model) as (restorer, staging):
        # Before the hold is lifted: after a failure here the model is still held.
        done = plan(restorer).execute(staging)
        try:
            if done.hold is not None and restorer.hold.binds:
                # First, and in one rename: servers must not for an instant pass the canary's approval.
                restorer.hold.put(done.hold, staging, canary=True)
            for hold in binding(model, restorer.log):
                hold.lift(staging)
            for ended in map(Hold, log_directories(model)):  # a copy goes back to a log of its store
                _release(ended, staging, model, lift_canary=lift_canary)
            if lift_canary:
                restorer.hold.lift(staging)
        except PublishError as error:
            if done.published is not None:
                error.message = f"{done.path} is published, but may still be held back: {error.message}"
            error.advise("run the command again: it goes on from there")
            raise
        return done


def _is_left(hold: Hold, lift_canary: bool) -> bool:
    """True if a resumption lifts the hold of an ended log: it is not of a store, and not a canary's alone.

    A canary's, too, with `lift_canary`.
    """
    by = hold.by
    return by is not None and not by.url and (hold.binds or lift_canary)


def _release(hold: Hold, staging: Staging, model: Path, *, lift_canary: bool) -> None:
    """Lift the hold of an ended log, by which a rollback over a change of structure stopped its servers.

    If `model` has a canary's lock file, a canary's hold at the same position replaces it, unless
    `lift_canary`. A hold that `_is_left` does not count stays. PublishError if a hold cannot be written.
    """
    by = hold.by
    if by is None or not _is_left(hold, lift_canary):
        return
    if hold.binds and not lift_canary and (model / CANARY_LOCK_FILE).exists():
        hold.put(by.position, staging, canary=True)
    else:
        hold.lift(staging)


class _Plan(Struct, frozen=True):
    """The plan of a rollback or resumption; None as `asked` means that the values stay.

    `approved` is the position of the remaining canary's hold, or None; `was_held` and `replaced` are for the
    result.
    """

    restorer: Restorer
    asked: Restoration | None
    approved: int | None = None
    was_held: bool = True
    replaced: HeldBy | None = None

    def foreseen(self) -> RollbackResult:
        """Read and check the input of `execute`, and return what it would do; nothing is written.

        Raises OverlayFull or NotFinite if servers would refuse the values; PositionError, VersionExists,
        UsageError, VerificationError, CheckpointError or OSError if the values cannot be restored.
        """
        return self._result(None if self.asked is None else self.asked.plan())

    def execute(self, staging: Staging) -> RollbackResult:
        """Publish the values, unless they stay, and return what was done; errors as `Restorer.publish`."""
        if self.asked is None:
            return self._result(None)
        from exporter.pipeline.restoration import Planned

        done = self.restorer.publish(self.asked, staging)
        at = Planned(done.path, done.manifest.position, done.manifest.step)
        return replace(self._result(at), published=done)

    def _result(self, found: Planned | None) -> RollbackResult:
        asked, at, approved = self.asked, self.restorer.at, self.approved
        stays = RollbackResult(at, at, None, at.position, approved, approved is not None, self.was_held)
        if asked is None or found is None:
            return stays
        return replace(
            stays,
            values_of=Position(asked.of, found.step),
            path=found.path,
            position=found.position,
            hold=found.position if asked.is_rollback else approved,
            replaced=self.replaced,
            made=asked.way.made,
        )


def _resumption(model: Path, restorer: Restorer, *, lift_only: bool, lift_canary: bool) -> _Plan:
    """Return the plan of a resumption.

    The values stay if nothing is held, if they have come back already, and with `lift_only`.

    Raises:
        PositionUnknown: the values before the rollback cannot be restored.
        UsageError: the hold of the rollback was lifted before.
        ModelHeld: the model is a copy, and its store holds it.
        TargetBusy: with `lift_canary`, an agent's canary is running.
        ManifestError: a manifest, or the hold, cannot be read.
    """
    _require_own(model, restorer, "resume", "--lift-only" if lift_only else "")
    if lift_canary and restorer.log is not None:
        _require_no_canary_at_work(model)
    approved = None if lift_canary else restorer.approved_by_canary()
    is_held = bool(binding(model, restorer.log))
    was_held = is_held or (lift_canary and restorer.hold.is_canary)
    before = None if lift_only or (approved is not None and not was_held) else restorer.before_rollbacks()
    if before is None or restorer.leads_back_to(before) or (restorer.hold.is_canary and not is_held):
        # A resumption that was killed may have left the hold of an ended log, which it lifts last.
        was_held = was_held or any(_is_left(Hold(log), lift_canary) for log in log_directories(model))
        return _Plan(restorer, None, approved, was_held)
    if is_held:
        return _Plan(restorer, restorer.resumption_of(before), approved, was_held)
    raise UsageError(
        f"{model} is not held: the rollback at {restorer.at.position} was accepted when its hold was lifted",
        hint=f"serve the values of {before} again: export-model rollback {quoted(model)} --to {before}, "
        f"then export-model resume {quoted(model)} --lift-only",
    )


def restorer_of(model: Path) -> Restorer:
    """Read a published model, with a log or plain versions, as the object that restores earlier values.

    Raises NotUpdatable if nothing is published, ManifestError if the newest manifest cannot be read.
    """
    from exporter.pipeline.restoration import Restorer  # late: deltas bring nothing back

    versions = version_dirs(model)
    try:
        return Restorer(model, versions, log_of(model, versions))
    except NotUpdatable:
        if newest_of(versions) is None:
            raise
        return Restorer(model, versions, None)


def _undisturbed(model: Path, first: Restorer, plan: Callable[[Restorer], T]) -> T:
    """Return the result of `plan`, called with the published model; call it again if others removed files.

    `first` is the model as read before the first try. A model without a log is read once. Raises
    PositionMoved if that goes on for a minute, NotUpdatable or ManifestError if the log cannot be read again,
    and what `plan` raises.
    """
    from exporter.pipeline.restoration import Restorer

    if first.published is None:
        return plan(first)
    return undisturbed(model, lambda log: plan(Restorer(model, log.versions, log)), first.published)


@contextmanager
def _operating(model: Path) -> Iterator[tuple[Restorer, Staging]]:
    """Lock a model for a block and yield it with a staging directory: no other process publishes or tidies.

    Left-overs of killed rollbacks are removed first. Raises NotUpdatable if nothing is published, before any
    file is made; TargetBusy if another exporter had the lock for too long, ManifestError if the newest
    manifest cannot be read, PublishError if nothing can be written. An OSError of the block becomes a
    PublishError.
    """
    if newest_version(model) is None:  # without a publication make nothing, not even a lock
        raise nothing_published(model)
    with Staging(model) as staging, writing(staging.path), model_lock(model):
        restorer = restorer_of(model)
        restorer.hold.sweep()
        _lift_unborn(model, restorer.versions)
        yield restorer, staging


def _lift_unborn(model: Path, versions: Sequence[VersionDir]) -> None:
    """Lift the hold of a log without base and deltas, left by a rollback that was killed before its base.

    A copy's puller and canary also hold a log before its base: those holds stay. `versions` are the model's,
    at least one. Raises ManifestError if a log cannot be listed, PublishError if a hold cannot be removed.
    """
    newest = max(version.version for version in versions)
    for path in log_directories(model):
        hold = Hold(path)
        if path.name.isdecimal() and int(path.name) > newest and hold.is_set and not list_deltas(path):
            by = hold.by
            if by is None or not (by.url or by.canary):
                hold.lift()


def _require_no_canary_at_work(model: Path) -> None:
    """Raise TargetBusy while an agent's canary is running: it would set its hold again within a second.

    PublishError if its lock file cannot be opened.
    """
    if not (model / CANARY_LOCK_FILE).exists():
        return
    try:
        with model_lock(model, seconds=0, name=CANARY_LOCK_FILE):
            pass
    except TargetBusy as error:
        raise TargetBusy(
            f"the canary of a running agent decides for {model}: it would have its hold back at once",
            cause=error.cause,
            hint="stop that agent, or start it without --canary; then run the command again",
        ) from error


def position_of_merger(log: DeltaLog, path: Path) -> int:
    """Return the end of a merger of the whole log: the newest position, or the next if `path` is abandoned.

    A path is abandoned if an upload to it was begun in the model's store and given up. Raises VersionExists
    or PositionError if no next position is left.
    """
    return next_delta_position(log, None) if is_taken(log.model, path) else log.at.position


def skip_abandoned(log: DeltaLog, path: Path) -> DeltaLog:
    """Publish a delta without changes if `path` is abandoned and may not be used; return the newest log.

    `path` is where a merger of the whole log would be; it is abandoned if an upload to it was begun in the
    model's store and given up. Otherwise the log is returned as it is.

    Raises:
        PositionMoved: another process published meanwhile.
        PositionError, VersionExists: no later position is left, or the newest version takes no deltas.
        UsageError: the log is signed, and the delta would not be.
        ManifestError, CheckpointError: the log, or the written delta, cannot be read.
        PublishError: nothing can be written.
    """
    last = log.at
    end = position_of_merger(log, path)
    if end == last.position:
        return log
    span = Span(last.position, end)
    state = log.newest.manifest.state_id
    what = Publication.of(log, span, last.step, DeltaOrigin.COMPARISON, log.trained, state=state)
    with Staging(log.model) as staging:
        return publish_changes(log, staging, {}, what, last=log.last).log


def runner_for(jobs: Jobs, model: Path, tasks: int) -> Runner:
    """Return the runner of a merger; the job of a single task is not kept, unless an engine is named.

    `jobs` names the engine, `tasks` is the merger's number of tasks. Raises UsageError for an unknown engine
    or options that it does not accept.
    """
    from exporter.jobs.runner import Runner

    is_kept = jobs.engine is not None or tasks > 1
    return Runner.of(jobs, model if is_kept else None, resumes=not is_trusting(model))


def undisturbed(model: Path, action: Callable[[DeltaLog], T], log: DeltaLog | None = None) -> T:
    """Call `action` with the model's log and return its result; call it again if other processes interfere.

    The log is read for each try; for the first only if `log` is None. Another try follows PositionMoved, and
    a CheckpointError or VerificationError if a delta of the log is gone. For a copy of a store there is one
    try.

    Raises:
        PositionMoved: others interfered for `RACE_SECONDS`.
        NotUpdatable, ManifestError: the log cannot be read.
        ExportError: another error of `action`.
    """
    deadline = time.monotonic() + RACE_SECONDS
    while True:
        log = read_log(model) if log is None else log
        try:
            return action(log)
        except (CheckpointError, PositionMoved, VerificationError) as error:
            # `carry` refreshes the copy and tries again; here the copy stays the same.
            if mirror.is_remote(model):
                raise
            if not isinstance(error, PositionMoved) and all(delta.path.exists() for delta in log.deltas):
                raise
            if time.monotonic() >= deadline:
                what = f"others published and tidied under {model} for {RACE_SECONDS:g} s"
                raise PositionMoved(
                    f"{what}: it could not be read in between", cause=error.message
                ) from error
        log = None
