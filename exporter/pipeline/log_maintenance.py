"""Merge, roll back, resume and clean a published log.

A rollback goes forward: it publishes a delta with the values of an earlier position, so that servers take it
as they take any other, and holds the log there, so that the trainer's next delta does not overrun it.
Resuming publishes the values of before the rollback again, unless newer ones have been published, and lifts
the hold.

*What servers see of a rollback from B to G, which becomes position R = B + 1.* They follow `up_to = -1`: of
the deltas that fit they take the one that leads furthest without passing the hold.

1. The model's lock is taken: nobody else publishes, merges or tidies until the end. It may take as long as
   the rows since G take to read; a watch waits, or says so and tries again.
2. The hold goes to G, unless it is lower. Servers at G or before stop there; the others stay where they are.
3. The delta to R is staged. It fits everybody from the earliest position on from which some delta leads past
   G, and holds all rows touched since then: so nobody passes B on the way to R.
4. The hold becomes a link to the file `hold` of the staged delta's future place. It cannot be read: nobody
   moves by himself.
5. The delta is renamed into place. With this one call it can be seen, and the hold is R: all go to R, at
   once, and no further.
6. The link is replaced by a file that says the same.

A process that is killed in 1-4 has not rolled back, and no server has moved towards B; running the command
again, or `resume`, goes on from there. Killed in 5-6, it has. A server lists the deltas after it has read the
hold: one that knows the hold of 5 sees the delta, too. Where links cannot be made, 4 sets the hold to R, and
a server that is before G can be led on to B until 5; its next call leads to R.

*Under a canary's hold* at G all servers but the canary stop there already, and publishers go on: only such a
rollback may be asked for that finds this hold (`if_canary`). It leaves out 2 and 4; killed between 5 and 6,
the canary is judged again.

Decide what a rollback or a resumption would publish; nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from exporter.delta.format import DeltaHeader, span_name
from exporter.delta.merge_deltas import DeltaMerger
from exporter.delta.newest_rows import restoring
from exporter.delta.spans import Position, Span, SpanLike, merge_due, merged, plan_chain
from exporter.errors import (
    ManifestError,
    ModelHeld,
    NotFinite,
    PositionError,
    PositionMoved,
    PositionUnknown,
    PublishError,
    TargetBusy,
    UsageError,
)
from exporter.files import remove_tree, writing
from exporter.layout import CANARY_LOCK_FILE, DELTA_NAME
from exporter.local_paths import quoted
from exporter.options import LOCALLY, DeltaDtype, Jobs
from exporter.pipeline import republish
from exporter.pipeline.republish import RollbackPlan, RollbackResult, rollback_accepted
from exporter.pipeline.undisturbed import past_given_up, position_of_merger, runner_for, undisturbed
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.approval import did_fail
from exporter.publish.commit import PublishedDelta as Published
from exporter.publish.commit import Staging, UnderLock, model_lock, next_delta_position
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogBase, LogDelta, read_log
from exporter.publish.delta_publication import Publication, header_of, publish_changes, publish_written
from exporter.publish.finite import require_finite, require_merger_finite, unchecked
from exporter.publish.manifest import DeltaOrigin
from exporter.publish.permission import binding
from exporter.publish.retention import RetiredDeltas, retire_deltas, retire_logs


class Restoration(Struct, frozen=True):
    """Values of an earlier position to be published as the next one, by a delta that fits from `start` on.

    `before` is where resuming is to lead; by default where the log stands.
    """

    of: int
    made: DeltaOrigin
    start: int
    before: int | None = None
    holds: bool = False
    reason: str | None = None
    follows_canary: bool = False
    canary: bool = False
    failed: bool = False


def rollback_of(log: DeltaLog, to: int) -> Restoration:
    """What leads to the values of `to` again.

    Raises:
        PositionUnknown: nothing published stands there.
        UsageError: it is the newest position.
        ModelHeld: a canary decides about the log, and the values of `to` did not pass.
    """
    log.trained_at(to)
    if to == log.at.position:
        raise UsageError(f"position {to} is the newest: there is nothing to roll back")
    before = _before_rollbacks(log) if log.held.binds else None  # those that were lifted are accepted
    start, canary = _jumps_from(log, to), is_canaried(log)
    if canary and did_fail(log, to):
        raise ModelHeld(
            f"the canary of an agent judged the values of {to}, and they did not pass",
            hint=f"let it judge what was taken back once more: export-model resume {quoted(log.model)}; "
            "to do without it: --lift-canary",
        )
    return Restoration(to, DeltaOrigin.ROLLBACK, start, before, holds=True, canary=canary)


def is_canaried(log: DeltaLog) -> bool:
    """True if a canary's hold stands, or stood when the log was rolled back to where it is held.

    Raises:
        ManifestError: what the log is held at does not say.
    """
    if log.held.is_canary or not log.held.binds:
        return log.held.is_canary
    try:
        held = log.standing(log.hold() or 0)
    except (ManifestError, PositionUnknown):  # the hold says nothing, or no rollback set it
        return False
    return isinstance(held, LogDelta) and held.entry.canary


def approved_by_canary(log: DeltaLog) -> int | None:
    """How far a canary approved the log, also where a rollback holds it there; None if there is no canary."""
    return log.hold() if is_canaried(log) else None


def lifts(log: DeltaLog, lift_canary: bool) -> bool:
    """True if a resumption finds a hold that it is to lift."""
    return bool(binding(log.model, log.base.entry.log)) or (lift_canary and log.held.is_canary)


def resumption_of(log: DeltaLog, lift_only: bool) -> Restoration | None:
    """What publishes the values of before a rollback again; None if the values stay.

    They stay where nothing is held: whoever lifted the hold published them first, or accepted the rollback.

    Raises:
        UsageError: the rollback was accepted, and the values of before are asked for.
    """
    before = None if lift_only else _before_rollbacks(log)
    if before is None or _leads_back_to(log, before):
        return None
    if binding(log.model, log.base.entry.log):
        return Restoration(before, DeltaOrigin.RESUME, log.at.position)
    if log.held.is_canary:
        return None
    raise rollback_accepted(log.model, log.at.position, before)


def rollback_plan(
    log: DeltaLog, restoration: Restoration | None, approved: int | None = None, *, was_held: bool = True
) -> RollbackPlan:
    """What `_restore` would publish; what it would read of deltas is read and checked, values where it must.

    `approved` is where a canary's hold stands then, if that is what is left.

    Raises:
        PositionUnknown, NotFinite, CheckpointError: as `_restore`.
    """
    is_canary = approved is not None
    if restoration is None:
        return RollbackPlan(log.at, log.at, None, log.at.position, approved, is_canary, was_held)
    _, step = log.trained_at(restoration.of)
    taken_back = [log.open(delta).changes for delta in since(log, restoration)]
    values = log.state(restoration.of)
    span = Span(restoration.start, next_delta_position(log.model, None, log.at.position))
    if log.base.entry.updates.finite:
        with TemporaryDirectory() as scratch:
            changes = restoring(taken_back, values, log.schema, Path(scratch))
            require_finite(log, changes, span, _instead(log, restoration))
    hold = span.end if restoration.holds else approved
    return RollbackPlan(
        log.at, Position(restoration.of, step), delta_path(log, span), span.end, hold, is_canary
    )


def since(log: DeltaLog, restoration: Restoration) -> tuple[LogDelta, ...]:
    """The deltas whose rows a restoration takes back."""
    chain = log.chain(min(restoration.of, restoration.start))
    if not chain:
        raise PositionUnknown(f"no delta leads on from position {restoration.of}")
    return chain


def _jumps_from(log: DeltaLog, to: int) -> int:
    """The earliest position from which a merged delta leads past `to`: from there on all must jump."""
    return min([to, *(delta.start for delta in log.deltas if delta.start < to < delta.end)])


def _before_rollbacks(log: DeltaLog) -> int | None:
    """The position before the first of the rollbacks that nothing was published on; None if there are none.

    A rollback says it, or, of an earlier release, begins where the log stood before.
    """
    at: LogBase | LogDelta = log.newest
    before = None
    while isinstance(at, LogDelta) and at.entry.made is DeltaOrigin.ROLLBACK:
        if at.entry.before is not None:
            return at.entry.before
        before = at.start
        ending = [delta for delta in log.deltas if delta.end == before]
        at = max(ending, key=lambda delta: delta.start, default=log.base)
    return before


def _leads_back_to(log: DeltaLog, position: int) -> bool:
    """True if the newest delta has restored the values of this position."""
    return isinstance(log.newest, LogDelta) and log.newest.entry.back_to == position


def delta_path(log: DeltaLog, span: Span) -> Path:
    """Where a delta of this span is published."""
    return log.path / span_name(span.start, span.end)


class Merged(Struct, frozen=True):
    """A merger: the deltas that became one, and that one."""

    parts: tuple[LogDelta, ...]
    published: Published
    tasks: int

    @property
    def path(self) -> Path:
        """The delta that holds them all."""
        return self.published.path

    @property
    def span(self) -> Span:
        """From where to where it leads."""
        return merged(self.parts)


def merge(
    model: Path,
    start: int | None = None,
    end: int | None = None,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
) -> Merged | None:
    """Merge the deltas that lead from `start` (by default the newest base) to `end` (by default the newest).

    None if a single delta, or none, leads there.

    Raises:
        DeltaGap, StaleDelta: no deltas lead so.
        CheckpointError: a delta is damaged.
        PublishError: see errors.py; nothing was published.
    """

    def merge_all(log: DeltaLog) -> Merged | None:
        run = _run(log, start, end)
        if len(run) > 1 and end is None:
            log = past_given_up(log, delta_path(log, merged(run)))
            run = _run(log, start, end)
        return None if len(run) < 2 else merge_run(log, run, jobs, progress)

    return undisturbed(model, merge_all)


class Merging(Struct, frozen=True):
    """A merger as it is planned: the deltas that become one, its place, and how many tasks write it."""

    parts: tuple[LogDelta, ...]
    span: Span
    path: Path
    tasks: int


def plan_merge(
    model: Path, start: int | None = None, end: int | None = None, jobs: Jobs = LOCALLY
) -> Merging | None:
    """What `merge` would do now; the deltas are read and checked, and nothing is written.

    Raises:
        DeltaGap, StaleDelta, CheckpointError, ModelHeld: as `merge`.
    """

    def plan(log: DeltaLog) -> Merging | None:
        run = _run(log, start, end)
        if len(run) < 2:
            return None
        for delta in run:
            log.open(delta)
        span = merged(run)
        _require_on_way(log, span)
        path = delta_path(log, span)
        if path.exists():
            return None
        _require_finite(log, run)
        tasks = _merger(log, run, path, jobs)[0].tasks
        if end is None and (position := position_of_merger(log, path)) != span.end:
            run, span = (*run, LogDelta(log.path, span.end, position)), Span(span.start, position)
        return Merging(run, span, delta_path(log, span), tasks)

    return undisturbed(model, plan)


def _run(log: DeltaLog, start: int | None, end: int | None) -> tuple[LogDelta, ...]:
    return log.chain(log.base.at.position if start is None else start, end)


def merge_run(
    log: DeltaLog, run: Sequence[LogDelta], jobs: Jobs = LOCALLY, progress: ProgressFactory = no_progress
) -> Merged | None:
    """Merge neighbouring deltas; None if their merger is published already.

    Raises:
        NotFinite: the model would refuse it.
    """
    _require_finite(log, run)
    with Staging(log.model) as staging, writing(staging.path), ExitStack() as stack:
        merger, what = _merger(log, run, staging.path, jobs)
        with progress("merging", merger.bytes_) as bar:
            rows = merger.write(stack, runner_for(jobs, log.model, merger.tasks), bar)
        how = UnderLock(permit=lambda now: _require_on_way(now, what.span))
        try:
            published = publish_written(log, staging, rows, what, last=None, under_lock=how)
        except PositionMoved:
            return None
        return Merged(tuple(run), published, merger.tasks)


def _merger(
    log: DeltaLog, run: Sequence[LogDelta], directory: Path, jobs: Jobs
) -> tuple[DeltaMerger, Publication]:
    """What writes the merger of deltas into a directory, and what it says of itself."""
    newest, parts = run[-1], [log.tensors(delta) for delta in run]
    what = Publication(
        merged(run),
        newest.at.step,
        DeltaOrigin.MERGE,
        newest.entry.trained,
        packing=_packing(part.header for part in parts),
        state=newest.manifest.state_id,
    )
    header, hint = header_of(log, what), BROKEN_LOG_HINT
    prefix = directory / DELTA_NAME
    return DeltaMerger(prefix, log.schema, header, parts, task_bytes=jobs.task_bytes, hint=hint), what


def _require_finite(log: DeltaLog, run: Sequence[LogDelta]) -> None:
    hint = (
        "train on until these values are finite, and merge again; or take them back: "
        f"export-model rollback {quoted(log.model)} --to {quoted(str(run[0].start))}"
    )
    require_merger_finite(log, run, merged(run), hint)


def _require_on_way(log: DeltaLog, span: Span) -> None:
    """Refuse a merger that would lead servers to a position which a hold and a rollback lead them past.

    Raises:
        ModelHeld: it would.
    """
    try:
        hold = log.hold()
    except ManifestError:
        return  # nobody moves
    if hold is None or not span.end <= hold:
        return
    known: list[SpanLike] = [delta for delta in log.deltas if delta.end <= hold]
    passed, then = (_passed(spans, span.start) for spans in (known, [*known, span]))
    if span.end in then - passed:
        raise ModelHeld(
            f"{log.path} is held at {hold}: a delta {span} would lead servers to {span.end} again"
        )


def _passed(spans: Sequence[SpanLike], start: int) -> set[int]:
    try:
        return {span.end for span in plan_chain(spans, start)}
    except PositionError:
        return set()


def tidy(
    model: Path,
    log: DeltaLog | None = None,
    *,
    removes: bool = True,
    clock: Callable[[], float] = time.time,
) -> tuple[tuple[Merged, ...], RetiredDeltas]:
    """Merge what is due and, if it `removes`, remove what is not needed; neither while the log is held.

    `log` is the model's as it was read last, under the lock.

    Under a canary's hold, what it has yet to approve stays as it is: it may be taken back, and servers that
    start now go as far as the hold.

    Where the model wants finite values, what an earlier release published unchecked is merged with what
    follows, as soon as that is finite: so servers that refused a delta pass it.

    Raises:
        CheckpointError: a delta is damaged.
        PublishError: see errors.py.
    """
    done: list[Merged] = []
    log = read_log(model) if log is None else log
    if log.held.binds:  # what is held may still be taken back, delta by delta
        return (), RetiredDeltas()
    while run := merge_due(_approved(log)):
        try:
            merger = merge_run(log, run)
        except ModelHeld:
            break
        if merger is None:
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
        if log.held.binds:
            return tuple(done), RetiredDeltas()
        log.held.sweep()
        retired = retire_deltas(log, now=now) + retire_logs(log, now=now)
    for trash in retired.trash:
        remove_tree(trash)
    return tuple(done), retired


def _past_unchecked(log: DeltaLog) -> tuple[LogDelta, ...]:
    """The deltas that lead from before the first that its model may refuse to the newest position."""
    if not log.base.entry.updates.finite:
        return ()
    deltas = _approved(log)
    start = min((delta.start for delta in unchecked(deltas)), default=None)
    return () if start is None else plan_chain(deltas, start)


def _approved(log: DeltaLog) -> tuple[LogDelta, ...]:
    """The deltas that no canary has yet to approve."""
    approved = log.approved
    return tuple(delta for delta in log.deltas if approved is None or delta.end <= approved)


def rollback(model: Path, to: int, *, reason: str | None = None, if_canary: bool = False) -> RollbackResult:
    """Publish the values of position `to` as the next position, and hold the log there.

    Where the newest version takes no deltas, `to` is a version, which is published again as the newest. The
    `reason` is kept with what is published. `if_canary`: only if a canary's hold stands at `to`; others may
    have decided meanwhile. What of the `reason` is not Unicode is kept escaped.

    Raises:
        PositionUnknown: nothing published stands at `to`, or its values are gone.
        UsageError: `to` is the newest position.
        ModelHeld: a canary decides about the log, and the values of `to` did not pass.
        PositionMoved: no canary's hold stands at `to`, if one is to.
        TargetBusy: another exporter had the model's lock for too long.
        CheckpointError, PublishError: see errors.py; nothing was published, and the hold is as it was.
    """
    if reason is not None:
        reason = reason.encode(errors="backslashreplace").decode()
    if republish.is_plain(model) and not if_canary:
        return republish.rollback(model, to, reason)
    with _operating(model) as (log, staging):
        _require_canary(log, to, if_canary)
        restoration = replace(rollback_of(log, to), reason=reason, follows_canary=if_canary, failed=if_canary)
        with log.held.put_back_on_failure(staging):
            _stop_at(log, to, staging)
            done = _restore(log, staging, restoration)
        return RollbackResult(log.at, Position(to, done.manifest.step), done, done.manifest.position)


def _require_canary(log: DeltaLog, to: int, if_canary: bool) -> None:
    if if_canary and log.approved != to:
        raise PositionMoved(f"{log.path} is not held at {to} by a canary: others decided meanwhile")


def plan_rollback(model: Path, to: int, *, if_canary: bool = False) -> RollbackPlan:
    """What `rollback` would do now; the deltas on the way are read and checked, and nothing is written.

    Raises:
        PositionUnknown, UsageError, ModelHeld, PositionMoved, CheckpointError: as `rollback`.
    """
    if republish.is_plain(model) and not if_canary:
        return republish.plan_rollback(model, to)
    _require_canary(read_log(model), to, if_canary)  # not below: it would be tried again as a disturbance
    return undisturbed(model, lambda log: rollback_plan(log, rollback_of(log, to)))


def resume(model: Path, *, lift_only: bool = False, lift_canary: bool = False) -> RollbackResult:
    """Lift the hold; after a rollback that nothing was published on, publish the values of before it again.

    Where a canary approved what was published, its hold takes the place of the rollback's: it is to approve
    what comes back, too. That hold is lifted with `lift_canary` alone: servers then take whatever is
    published, also what no canary has passed. After several rollbacks, the values are those of before the
    first of those that are still in force. With `lift_only` they stay those of the rollback.

    Where nothing is held, or by a canary alone, there is nothing to do.

    Raises:
        UsageError: the rollback was accepted by a resumption with `lift_only`.
        PositionUnknown: the values of before the rollback are gone.
        TargetBusy: the canary of a running agent would have its hold back at once; or as everywhere.
        CheckpointError, ManifestError, PublishError: see errors.py; the log is still held, whether or not the
            values are published: running it again goes on from there.
    """
    if republish.is_plain(model):
        return republish.resume(model, lift_only=lift_only)
    with _operating(model) as (log, staging):
        restoration, approved, was_held = _resuming(log, lift_only, lift_canary)
        done, at = None, log.at
        if restoration is not None:
            done = _restore(log, staging, restoration)
            at = Position(restoration.of, done.manifest.step)
        try:
            if approved is not None and log.held.binds:  # nobody is to pass what no canary has seen, not for
                log.held.put(approved, staging, canary=True)  # an instant
            for hold in binding(model, log.base.entry.log):
                hold.lift()
            if lift_canary:
                log.held.lift()
        except PublishError as error:
            if done is not None:
                error.message = f"{done.path} is published, but may still be held back: {error.message}"
            error.advise("run the command again: it goes on from there")
            raise
        return RollbackResult(log.at, at, done, approved, is_canary=approved is not None, was_held=was_held)


def plan_resume(model: Path, *, lift_only: bool = False, lift_canary: bool = False) -> RollbackPlan:
    """What `resume` would do now; the deltas on the way are read and checked, and nothing is written.

    Raises:
        UsageError, PositionUnknown, TargetBusy, CheckpointError: as `resume`.
    """
    if republish.is_plain(model):
        return republish.plan_resume(model, lift_only=lift_only)

    def plan(log: DeltaLog) -> RollbackPlan:
        restoration, approved, was_held = _resuming(log, lift_only, lift_canary)
        return rollback_plan(log, restoration, approved, was_held=was_held)

    return undisturbed(model, plan)


def _resuming(
    log: DeltaLog, lift_only: bool, lift_canary: bool
) -> tuple[Restoration | None, int | None, bool]:
    """What a resumption publishes, where a canary's hold stands after it, and whether it lifts any hold."""
    if lift_canary:
        _require_no_canary_at_work(log.model)
    approved = None if lift_canary else approved_by_canary(log)
    was_held = lifts(log, lift_canary)
    is_canarys_alone = approved is not None and not was_held
    return None if is_canarys_alone else resumption_of(log, lift_only), approved, was_held


def _require_no_canary_at_work(model: Path) -> None:
    """Refuse to lift the hold of a canary that would have it back within a second.

    Raises:
        TargetBusy: the canary of a running agent decides for the model.
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


@contextmanager
def _operating(model: Path) -> Iterator[tuple[DeltaLog, Staging]]:
    """A log that nobody else publishes in, merges or tidies until the block ends."""
    read_log(model)  # where nothing is published nothing is made, not even a lock
    with Staging(model) as staging, writing(staging.path), model_lock(model):
        log = read_log(model)
        log.held.sweep()
        yield log, staging


def _stop_at(log: DeltaLog, to: int, staging: Staging) -> None:
    """Hold the log at `to`, if it is not held before that already."""
    try:
        held = log.hold()
    except ManifestError:
        return  # which nobody passes
    if held is None or held > to:
        log.held.put(to, staging)


def _restore(log: DeltaLog, staging: Staging, restoration: Restoration) -> Published:
    """Publish the values of `restoration.of` as the next position."""
    to, last = restoration.of, log.at.position
    trained, step = log.trained_at(to)
    taken_back = [log.open(delta) for delta in since(log, restoration)]
    touched = [delta.changes for delta in taken_back]
    changes = restoring(touched, log.state(to), log.schema, _scratch(staging))
    what = Publication(
        Span(restoration.start, next_delta_position(log.model, None, last)),
        step,
        restoration.made,
        trained,
        back_to=to,
        before=last if restoration.before is None else restoration.before,
        packing=_packing(delta.header for delta in taken_back),
        reason=restoration.reason,
        canary=restoration.canary,
        failed=restoration.failed,
        hint=_instead(log, restoration),
    )
    how = UnderLock(is_ours=True, holds=restoration.holds, follows_canary=restoration.follows_canary)
    return publish_changes(log, staging, changes, what, last=last, under_lock=how)


def _instead(log: DeltaLog, restoration: Restoration) -> str:
    """What helps where the values that are to come back are refused by the model."""
    if restoration.made is DeltaOrigin.ROLLBACK:
        return f"go back further: export-model history {quoted(log.model)} lists the positions"
    return f"accept the rollback, and train on: export-model resume {quoted(log.model)} --lift-only"


def _packing(headers: Iterable[DeltaHeader]) -> DeltaDtype | None:
    """How the newest of these that is packed is: what is made of them holds rows that pack so, too."""
    return next((header.packing for header in reversed(list(headers)) if header.packing), None)


def _scratch(staging: Staging) -> Path:
    scratch = staging.path.with_name("scratch")
    scratch.mkdir()
    return scratch
