"""`export-model` with and without `--incr`: export once, or follow training, and print the result.

The stages of a full export take as long to import as a delta to make: they are imported where one is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from exporter.cli.documents import Status
from exporter.cli.documents.deltas import DeltaExport, DeltaPlan
from exporter.cli.notify import NOBODY, Notified, Servers
from exporter.delta.deviation import Budgeted
from exporter.errors import (
    ExportError,
    NoNewBase,
    PositionError,
    PositionMoved,
    UsageError,
    as_export_error,
)
from exporter.options import ExportRequest
from exporter.pipeline import incremental
from exporter.pipeline.incremental import ExportedDelta, Incremental, IncrementalPlan, plan_incremental
from exporter.pipeline.trainer_state import MARKER_SECONDS
from exporter.pipeline.watch_loop import Poll, Watching, follow, is_for_a_person
from exporter.publish.commit import PublishedDelta
from exporter.publish.permission import Permission, hold_in_force
from exporter.storage.local_paths import quoted
from exporter.terminal.edge import outlived, until_interrupted, watch_ended
from exporter.terminal.output import Output, escape, labelled
from exporter.terminal.parameters import TAKEN
from exporter.terminal.progress import count, human_bytes, human_time
from exporter.training.roles import Role
from exporter.transfer.opened import OpenModel

if TYPE_CHECKING:
    from exporter.cli.watched import Watched
    from exporter.pipeline.rebase import Rebased
    from exporter.publish.model import PublishedAlready


def stand_by(role: Role, sink: Output) -> None:
    """Print that this node of a cluster does not export, because of its `role`, and how to export anyway.

    The text names the environment variable from which the role was read.
    """
    from exporter.cli.documents.exported import StandBy

    document = StandBy("nothing_to_do", None, role.type, role.index, role.source)
    why = f"this node is {role} ({role.source}), and the chief exports; --despite role exports here, too"
    sink.result(document, [labelled("nothing to do", why)], is_done=True)


def run_full(
    request: ExportRequest,
    sink: Output,
    target: OpenModel,
    watching: Watching | None,
    seen: Watched | None,
    *,
    dry_run: bool,
) -> None:
    """Export the newest checkpoint, or each newest one while watching, and print the results.

    A watch runs until its limit or Ctrl-C; it needs both `watching` and `seen`, the recorder of its metrics.
    Without it, `dry_run` only prints the plan, and a checkpoint that is published already is printed as such,
    without an error. `target` is the model, opened; its `carry` brings the publication to a store.

    Raises:
        ExportError: the export failed; in a watch only if neither time nor another checkpoint helps, or it
            ends with a failed look. See errors.py.
    """
    from exporter.cli import render
    from exporter.graph.load import run_builders_once
    from exporter.pipeline import full
    from exporter.pipeline.watch import watch
    from exporter.publish.model import PublishedAlready

    if watching is not None and seen is not None:
        tell, ended = partial(outlived, sink), partial(watch_ended, sink)
        with until_interrupted(sink) as published:
            progress = seen.progress(sink.progress)
            for done in watch(request, watching, tell, progress, ended, target.carry, seen.looked):
                published.add(done.published.path)  # before it is printed: an interruption there counts it
                seen.published(done.published.manifest)
                render.exported(done, sink)
        return
    try:
        if dry_run:
            render.plan(target.carry(lambda: full.plan(request)), sink)
        else:
            graphs = run_builders_once()  # outside: `carry` repeats its work if another machine was faster
            done = target.carry(lambda: full.export(request, sink.progress, graphs), sink.progress)
            render.exported(done, sink)
    except PublishedAlready as error:
        published_already(request, error, sink, dry_run=dry_run)


def published_already(
    request: ExportRequest, error: PublishedAlready, sink: Output, *, dry_run: bool
) -> None:
    """Print that the checkpoint is published already, by the same plan; `error` has that version.

    The newest version is printed, too, if it is another one, and the hold if there is one. `dry_run` is a
    field of the document.
    """
    from exporter.cli.documents.exported import PublishedAlready as Document

    made = error.made
    hold, is_newest = hold_in_force(request.out), made.version == made.newest
    held = None if hold is None else hold.for_servers()
    document = Document(
        dry_run=dry_run,
        status="nothing_to_do",
        path=str(made.path),
        version=made.version,
        position=made.head.position,
        newest_version=made.newest,
        hold=None if held is None or held.position < 0 else held.position,
        message=error.message,
    )
    lines = [labelled("nothing to do", error.message)]
    if not is_newest:
        lines.append(labelled("newest", f"version {made.newest}; to publish this one again: --again"))
    if held is not None:
        place = request.out if held.by is None else held.by.place(request.out)
        until = f"until export-model resume {quoted(place)}"
        ends = "as far as its canary has approved" if held.is_canary else until
        lines.append(labelled("hold", f"{held.said}, {ends}"))
    sink.result(document, lines, is_done=True)


class RunOptions(Struct, frozen=True):
    """The opened model of an incremental export, and its further steps; without `watching` it runs once.

    `full_on_mismatch`: publish a base where no delta fits; `rebase`: publish a merged base after each delta.
    `servers` are asked to apply each publication; `seen` records a watch for its metrics.
    """

    target: OpenModel
    full_on_mismatch: bool = False
    rebase: bool = False
    watching: Watching | None = None
    servers: Servers = NOBODY
    seen: Watched | None = None


def run_incremental(request: ExportRequest, sink: Output, how: RunOptions, *, dry_run: bool) -> None:
    """Publish the next delta, or the first base, and print it; with `dry_run` only print the plan.

    Servers in `how` are asked to apply it, and are waited for. A watch continues until its limit or Ctrl-C,
    and prints errors that may pass.

    Raises:
        UsageError: `--verify graph` is combined with `--watch` or `--new-base if-needed`.
        ModelHeld: the model is held, and `--new-base merged` would publish a base.
        NoNewBase: a delta is published, but `--new-base merged` failed.
        ExportError: the export failed; see errors.py.
        OSError: nothing new was published, and `--new-base merged` failed.
    """
    if request.check_graph and (how.watching is not None or how.full_on_mismatch):
        raise UsageError(
            "--verify graph goes neither with --watch nor with --new-base if-needed",
            cause="a builder is run once in a process: of a second run, layers have other names",
        )
    if dry_run:
        _dry_run(request, sink, how)
    elif how.watching is None or how.seen is None:
        if (
            how.rebase
        ):  # refused before anything is published; a watch continues to publish deltas beyond a hold
            Permission(request.despite_hold).check(request.out, takes_deltas=True)
        _once(request, sink, how)
    else:
        from exporter.checkpoint.families import ARCHIVE_SUFFIXES
        from exporter.graph.origin import check_named
        from exporter.storage.arrivals import Arrivals

        check_named(request.model)
        if how.servers.addresses:
            sink.note(f"each delta is announced to {', '.join(how.servers.addresses)}")
        tell, ended = partial(outlived, sink), partial(watch_ended, sink)
        sleep = Arrivals.of_trainer(request.ckpt_dir, ARCHIVE_SUFFIXES).sleep
        with until_interrupted(sink) as published:
            look = partial(_look, request, sink, how)
            for done in follow(look, how.watching, tell, ended=ended, looked=how.seen.looked, sleep=sleep):
                if done.published is not None:
                    published.add(done.published.path)
                    how.seen.published(done.published.manifest)
                _report(done, sink, how)
                if how.rebase:
                    _rebase_or_tell(request, done, sink, how)


def _once(request: ExportRequest, sink: Output, how: RunOptions) -> None:
    """Publish, rebase if `how.rebase`, and print one document of both; also if the rebase fails.

    Raises NoNewBase if the rebase fails after a publication, otherwise the error of either: an ExportError,
    or an OSError of the rebase.
    """
    done, based = _publish(request, sink, how), None
    try:
        if how.rebase:
            based = _rebase(request, done, how)
    finally:
        _report(done, sink, how, based)


def _publish(request: ExportRequest, sink: Output, how: RunOptions) -> Incremental:
    progress = sink.progress if how.seen is None else how.seen.progress(sink.progress)
    return how.target.carry(
        lambda: incremental.export_incremental(
            request,
            progress,
            full_on_mismatch=how.full_on_mismatch,
            is_watching=how.watching is not None,
            marker_seconds=MARKER_SECONDS,
            look_seconds=0.0 if how.watching is None else how.watching.interval_seconds,
        ),
        progress,
    )


def _look(request: ExportRequest, sink: Output, how: RunOptions) -> Poll[Incremental]:
    done = _publish(request, sink, how)
    if not isinstance(done, ExportedDelta):
        return Poll(done, done.published.manifest.step)
    if done.published is not None:
        return Poll(done, done.at.step)
    if how.rebase:  # the rebase that failed after the last delta
        _rebase(request, done, how)
    return Poll(None, done.at.step)


def _rebase(request: ExportRequest, done: Incremental, how: RunOptions) -> Rebased | None:
    """Publish a base that includes all deltas; None if the newest base is at the newest position.

    `done` is the result of the export before. If the rebase fails, raises NoNewBase if that export published
    something; otherwise the error itself, an ExportError or OSError.
    """
    from exporter.pipeline.rebase import rebase
    from exporter.publish.retention import Keep

    try:
        return how.target.carry(
            lambda: rebase(
                request.out, keep=Keep.of(request), despite_hold=request.despite_hold, jobs=request.jobs
            )
        )
    except (ExportError, OSError) as error:
        if done.published is None:
            raise
        why = as_export_error(error)
        what = f"{done.published.path} is published, but no new base: {why.message}"
        raise NoNewBase(what, cause=why.cause, hint=why.hint) from why


def _rebase_or_tell(request: ExportRequest, done: Incremental, sink: Output, how: RunOptions) -> None:
    """Publish a base that includes all deltas, in a watch, and print it, or an error that the watch survives.

    `done` is the result of the export before. Raises the ExportError if only a person can repair it.
    """
    try:
        based = _rebase(request, done, how)
    except ExportError as error:
        why = error.__cause__ if isinstance(error, NoNewBase) else error
        if isinstance(why, ExportError) and is_for_a_person(why):
            raise
        outlived(sink, error)
        return
    if based is not None and based.published is not None:
        from exporter.cli.render_log import rebased

        rebased(based, sink)
        if how.seen is not None:
            how.seen.published(based.published.manifest)


def _report(done: Incremental, sink: Output, how: RunOptions, based: Rebased | None = None) -> None:
    if isinstance(done, ExportedDelta):
        exported(done, sink, how.servers, based)
        return
    from exporter.cli import render

    render.exported(done, sink)


def exported(
    done: ExportedDelta, sink: Output, servers: Servers = NOBODY, based: Rebased | None = None
) -> None:
    """Ask `servers` to apply an incremental export, wait for them, and print its result and theirs.

    A server that does not apply it is a warning, and so is an error after the delta was published. Servers
    are asked even if nothing was published. `based` is the base that was published after the delta, None
    without one.
    """
    plan = done.plan
    left_out, rounded = done.left_out, done.rounded
    document = DeltaExport(
        **asdict(_document(plan, Status.NOTHING_TO_DO if done.published is None else Status.PUBLISHED)),
        path=None if done.published is None else str(done.published.path),
        position=done.at.position,
        hold=plan.log.hold.position,  # a damaged file is not reported here, because the work is done
        step=done.at.step,
        rows=done.rows,
        variables_changed=done.variables,
        left_out=left_out,
        rounded=rounded,
        bytes_compared=done.compared_bytes,
        seconds=round(done.seconds, 4),
        warnings=[warning.message for warning in done.warnings],
        budget=done.budgeted,
        wild=done.wild,
        # Even if nothing is new: at the last run, the servers may have been down, or misspelt.
        notified=servers.notify(plan.log.model.name, done.at.position),
        new_base=None if based is None else str(based.path),
    )
    lines, brief = list(_plan_lines(plan)), ""
    if done.published is None:
        lines.append(labelled("nothing to do", f"position {done.at} is published already"))
    else:
        size = done.published.manifest.bytes_
        what = f"{changed(done.rows, done.variables)}, {human_bytes(size)}"
        lines.append(labelled("delta", what))
        brief = f"{done.published.path} (step {done.at.step}): {what}, in {done.seconds:.2f} s"
        if left_out is not None:
            near = f"less than {left_out.bound:g}, {left_out.largest:.3g} at most"
            waits = (
                ""
                if left_out.since is None
                else f"; the oldest waits for {_waited(done.published, left_out.since)}"
            )
            lines.append(labelled("left out", f"{count(left_out.rows, 'row')} that moved {near}{waits}"))
        if done.budgeted is not None:
            lines.append(labelled("budget", budget_used(done.budgeted)))
        if rounded is not None:
            off = f"to {rounded.dtype.value}, off by {rounded.largest:.3g} at most"
            lines.append(labelled("rounded", f"{count(rounded.rows, 'row')} {off}"))
        lines.append(labelled("published", f"{done.published.path} in {done.seconds:.2f} s"))
    lines += [labelled("notified", _notified_text(one)) for one in document.notified]
    if done.published is not None:
        lines += _next_lines(plan, is_told=bool(document.notified))
    if based is not None:
        holds = f"the base and {count(based.deltas, 'delta')}"
        lines.append(labelled("new base", f"{based.path}: {holds}"))
    sink.result(document, lines, brief=escape(brief), is_done=True)
    if done.budgeted is not None and done.budgeted.excess:
        sink.warn(budget_exceeded(plan.request, done.budgeted))
    for found in done.wild:
        sink.warn(f"{found.said} (hint: --on-wild hold-row keeps what is served)")
    for warning in done.warnings:
        sink.warn(f"the delta is published; {warning.message} (hint: {warning.hint})")
    for one in document.notified:
        if one.problem is not None:
            what = "the delta is published" if done.published is not None else "nothing new was published"
            again = f"serve-model update {one.address} --model-name {quoted(plan.log.model.name)}"
            sink.warn(f"{what}; {one.address} did not take it: {one.problem} (hint: {again})")


def _waited(published: PublishedDelta, since: datetime) -> str:
    return human_time(max(0.0, (published.manifest.created - since).total_seconds()))


def budget_used(found: Budgeted) -> str:
    """Return a text for people on a delta's use of its budget: size, limit, and the share of changes sent."""
    return (
        f"{human_bytes(found.sent)} of {human_bytes(found.allowed)}; all changes would take "
        f"{human_bytes(found.changes)}; {found.share:.1%} of the change is sent"
    )


def budget_exceeded(request: ExportRequest, found: Budgeted) -> str:
    """Return a warning for people: the delta's least size, its budget, and a budget that would be enough."""
    is_rate = (request.delta_budget or "").endswith("/s")
    enough = f"{math.ceil(found.due / max(found.seconds, 1.0))}B/s" if is_rate else f"{found.due}B"
    age = "" if request.max_row_age is None else ", rows that waited for --delta-budget age,"
    return (
        f"the budget allowed {found.allowed} B, and {found.due} B had to go: what is served whole, new "
        f"keys{age} and the delta's own index; --delta-budget {enough} would be enough"
    )


def changed(rows: int, variables: int) -> str:
    """Return a delta's contents in words, from the numbers of its rows and of its changed variables.

    With 0 rows the variables are sent whole; with 0 of both it is "no change".
    """
    if rows:
        return f"{count(rows, 'row')} in {count(variables, 'variable')}"
    return f"{count(variables, 'variable')}, whole" if variables else "no change"


def _notified_text(one: Notified) -> str:
    where = f"{one.address}: " + ("" if one.position is None else f"at {one.position} ")
    return f"{where}after {one.seconds:.2f} s" if one.problem is None else f"{where}{one.problem}"


def _next_lines(plan: IncrementalPlan, *, is_told: bool) -> Iterator[str]:
    """Yield lines with the command that makes servers apply the delta, or about a hold and how to lift it.

    Nothing is yielded if a server was notified (`is_told`) and the log is not held.
    """
    held = plan.log.hold.for_servers()
    if held is not None and held.is_canary:
        yield labelled("hold", f"at {held.position}: the agent's canary decides about what lies beyond")
    elif held is not None:
        further = "" if held.position < 0 else ": servers go no further until it is lifted"
        yield labelled("hold", f"{held.said}{further}")
        place = plan.log.model if held.by is None else held.by.place(plan.log.model)
        yield labelled("to lift it", f"export-model resume {quoted(place)}")
    elif not is_told:
        yield labelled("next", f"serve-model update HOST:PORT --model-name {quoted(plan.log.model.name)}")


def _dry_run(request: ExportRequest, sink: Output, how: RunOptions) -> None:
    if not incremental.is_begun(request):
        _dry_run_base(request, sink, how)
        return
    try:
        planned = how.target.carry(lambda: plan_incremental(request))
    except PositionMoved:
        raise
    except PositionError as error:
        if not how.full_on_mismatch:
            raise
        sink.note(f"a new base is due: {error.message}" + (f" ({error.cause})" if error.cause else ""))
        _dry_run_base(request, sink, how)
        return
    what = "nothing" if planned.is_nothing else f"the delta {planned.span}"
    status = Status.NOTHING_TO_DO if planned.is_nothing else Status.PLANNED
    lines = [*_plan_lines(planned), labelled("would write", f"{what} under {planned.log.path}")]
    document = _document(planned, status, dry_run=True)
    if not planned.is_nothing:
        rows = "not known: a dry run does not compare them"
        if document.listed_rows is not None:
            rows = f"{document.listed_rows}, listed by {count(len(document.increments), 'increment')}"
        lines.append(labelled("rows", rows))
    if how.rebase:
        lines.append(labelled("new base", "the base and all deltas, unless the newest base stands there"))
    sink.result(document, lines)
    for note in planned.notes:
        if note not in planned.setbacks:  # which are among the lines
            sink.note(f"note: {note}")


def _dry_run_base(request: ExportRequest, sink: Output, how: RunOptions) -> None:
    from exporter.cli import render
    from exporter.pipeline.full import plan

    render.plan(how.target.carry(lambda: plan(incremental.as_base(request))), sink)


def _document(planned: IncrementalPlan, status: Status, *, dry_run: bool = False) -> DeltaPlan:
    plan = planned.trainer.plan
    return DeltaPlan(
        dry_run=dry_run,
        status=status,
        checkpoint=str(planned.trainer.catalog.prefix),
        log=planned.log.base.entry.log,
        lineage=planned.log.lineage,
        from_position=planned.log.at.position,
        to_position=planned.log.at.position if planned.is_nothing else planned.position,
        to_step=planned.step,
        increments=[stored.path.name for stored in plan.increments],
        listed_rows=planned.listed_rows,
        compares=not plan.is_known,
        why=plan.reason,
        graph=planned.graph.said,
        notes=planned.notes,
        taken=TAKEN.get(),
    )


def _plan_lines(planned: IncrementalPlan) -> Iterator[str]:
    plan, log = planned.trainer.plan, planned.log
    yield labelled("so far", f"position {log.at}; this log of deltas began with version {log.base.entry.log}")
    tail = f", {count(len(plan.increments), 'increment')}" if plan.increments else ""
    step = "" if planned.step is None else f", step {planned.step}"
    yield labelled("checkpoint", f"{planned.trainer.catalog.label}{step}{tail}")
    yield from (labelled("note", said) for said in planned.setbacks)
    yield labelled("graph", f"and assets: {planned.graph.said}")
    if not plan.is_known:
        yield labelled("compared", f"all rows: {plan.reason}")
