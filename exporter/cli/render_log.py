"""Print what commands on published models found and did: as a JSON document, and as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from exporter.cli.documents import Status
from exporter.cli.documents import logs as documents
from exporter.cli.documents.logs import Merge, Rebase, Rollback
from exporter.errors import ExportError
from exporter.storage.local_paths import quoted
from exporter.terminal.output import Output, labelled
from exporter.terminal.progress import count, human_bytes

if TYPE_CHECKING:
    from exporter.pipeline.log_maintenance import Merged, Merging, RollbackPlan, RollbackResult
    from exporter.pipeline.rebase import Rebased, Rebasing
    from exporter.pipeline.tagging import Tagging
    from exporter.publish.model import Event, Model
    from exporter.publish.tags import ListedTag
    from exporter.verify.log import VerifiedModel


def merged(done: Merged | None, sink: Output) -> None:
    """Print a merger; None: there was nothing to merge."""
    if done is None:
        sink.result(Merge(dry_run=False, status=Status.NOTHING_TO_DO), [_NOTHING_TO_MERGE], is_done=True)
        return
    size = sum(file.bytes_ for file in done.published.manifest.files)
    lines = [
        labelled("merged", f"{count(len(done.parts), 'delta')}, {human_bytes(size)}"),
        labelled("published", str(done.published.path)),
    ]
    sink.result(_merge(done, Status.PUBLISHED, size), lines, is_done=True)
    _warn(done.published.warnings, sink)


def merging(plan: Merging | None, sink: Output) -> None:
    """Print a planned merger, by the document of the run; its `bytes` are not known yet."""
    if plan is None:
        sink.result(Merge(dry_run=True, status=Status.NOTHING_TO_DO), [_NOTHING_TO_MERGE])
        return
    lines = [
        labelled("would merge", f"{count(len(plan.parts), 'delta')}, by {count(plan.tasks, 'task')}"),
        labelled("would publish", str(plan.path)),
    ]
    sink.result(_merge(plan, Status.PLANNED, None), lines)


def _merge(merger: Merged | Merging, status: Status, size: int | None) -> Merge:
    return Merge(
        dry_run=status is Status.PLANNED,
        status=status,
        path=str(merger.path),
        from_position=merger.span.start,
        position=merger.span.end,
        merged=[delta.path.name for delta in merger.parts],
        bytes=size,
        tasks=merger.tasks,
    )


def rebased(done: Rebased | None, sink: Output) -> None:
    """Print a new base; None: the newest base stands at the newest position."""
    if done is None:
        sink.result(Rebase(dry_run=False, status=Status.NOTHING_TO_DO), [_NOTHING_TO_REBASE], is_done=True)
        return
    published = done.published
    document = Rebase(
        dry_run=False,
        status=Status.PUBLISHED,
        path=str(published.path),
        position=published.position,
        step=published.manifest.step,
        deltas=done.deltas,
        tasks=done.tasks,
        versions_removed=published.removed,
        versions_kept=published.kept,
    )
    lines = [
        labelled("merged", f"the base and {count(done.deltas, 'delta')}"),
        *(labelled("removed", f"version {number}") for number in published.removed),
        *(labelled("kept", f"version {kept.version}, too: {kept.reason}") for kept in published.kept),
        labelled("published", str(published.path)),
    ]
    sink.result(document, lines, is_done=True)
    _warn(published.warnings, sink)


def rebasing(plan: Rebasing | None, sink: Output) -> None:
    """Print a planned base; which versions are removed is decided when it is published."""
    if plan is None:
        sink.result(Rebase(dry_run=True, status=Status.NOTHING_TO_DO), [_NOTHING_TO_REBASE])
        return
    document = Rebase(
        dry_run=True,
        status=Status.PLANNED,
        path=str(plan.path),
        position=plan.at.position,
        step=plan.at.step,
        deltas=plan.deltas,
        tasks=plan.tasks,
    )
    lines = [
        labelled(
            "would merge", f"the base and {count(plan.deltas, 'delta')}, by {count(plan.tasks, 'task')}"
        ),
        labelled("would publish", str(plan.path)),
    ]
    sink.result(document, lines)


def taken_back(done: RollbackResult, sink: Output) -> None:
    """Print a rollback or resumption."""
    if not done.was_held:
        sink.result(_rollback(done, Status.NOTHING_TO_DO, dry_run=False), _nothing_held(done), is_done=True)
        return
    lines = [
        labelled("values", f"of position {done.values_of}"),
        labelled("published", str(done.path or "nothing: the values stay")),
        labelled("hold", "lifted" if done.hold is None else _held(done)),
    ]
    status = Status.HOLD_LIFTED if done.published is None else Status.PUBLISHED
    sink.result(_rollback(done, status, dry_run=False), lines, is_done=True)
    if done.published is not None:
        _warn(done.published.warnings, sink)


def _held(found: RollbackResult | RollbackPlan) -> str:
    return f"at {found.hold}" + (
        ": the agent's canary decides about what lies beyond" if found.is_canary else ""
    )


def _nothing_held(found: RollbackResult | RollbackPlan) -> list[str]:
    if found.hold is None:
        return [labelled("nothing to do", "the model is not held")]
    return [
        labelled("nothing to do", "no person and no rollback holds the model"),
        labelled("hold", _held(found)),
        labelled("next", "to have servers take that unjudged: stop the agent's canary, then --lift-canary"),
    ]


def taking_back(plan: RollbackPlan, sink: Output) -> None:
    """Print a planned rollback or resumption, by the document of the run."""
    if not plan.was_held:
        sink.result(_rollback(plan, Status.NOTHING_TO_DO, dry_run=True), _nothing_held(plan))
        return
    lines = [
        labelled("values", f"of position {plan.values_of}"),
        labelled("would publish", str(plan.path or "nothing: the values stay")),
        labelled("would hold", _held(plan))
        if plan.hold is not None
        else labelled("would lift", "the hold: servers take what is published"),
    ]
    sink.result(_rollback(plan, Status.PLANNED, dry_run=True), lines)


def _rollback(what: RollbackResult | RollbackPlan, status: Status, *, dry_run: bool) -> Rollback:
    return Rollback(
        dry_run=dry_run,
        status=status,
        path=None if what.path is None else str(what.path),
        from_position=what.before.position,
        position=what.position,
        values_of=what.values_of.position,
        step=what.values_of.step,
        hold=what.hold,
        is_canary=what.is_canary,
    )


def _warn(warnings: Iterable[ExportError], sink: Output) -> None:
    """Print errors that came after something was published, as warnings."""
    for warning in warnings:
        sink.warn(warning.message)


def verified(found: VerifiedModel, sink: Output) -> None:
    """Print what is published of a model, and what is wrong with it."""
    deltas = len(found.log.deltas) if found.log else 0
    document = documents.Verification(
        versions=found.versions,
        deltas=deltas,
        log=found.log.base.entry.log if found.log else None,
        lineage=found.log.lineage if found.log else None,
        position=found.at.position if found.at else None,
        step=found.at.step if found.at else None,
        positions=found.positions,
        hold=found.hold,
        problems=[documents.Problem(type(e).__name__, e.message) for e in found.problems],
    )
    lines = [
        labelled("versions", str(found.versions)),
        labelled("deltas", str(deltas)),
        labelled("position", _newest(found)),
        *([labelled("positions", _positions(found.positions))] if found.positions else []),
        *([labelled("hold", f"at {found.hold}")] if found.hold is not None else []),
        labelled("problems", str(len(found.problems)) if found.problems else "none"),
        *(labelled("", problem.message) for problem in found.problems[1:]),
    ]
    sink.result(document, lines)


def _newest(found: VerifiedModel) -> str:
    if found.log is None:
        return "the newest version takes no deltas"
    return str(found.at) if found.at else "unknown"


def _positions(known: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, known[-10:]))
    return shown if len(known) <= 10 else f"{len(known)}, the last {shown}"


def tagged(done: Tagging, sink: Output, *, dry_run: bool) -> None:
    """Print a change of a tag, done or planned."""
    status = Status.PLANNED if dry_run else Status.PUBLISHED
    now, before = (None if tag is None else tag.position for tag in (done.tag, done.before))
    document = documents.Tag(
        dry_run=dry_run,
        status=status if done.changes else Status.NOTHING_TO_DO,
        name=done.name,
        position=now,
        before=before,
    )
    would = "would " if dry_run else ""
    if now is None:
        line = labelled(f"{would}delete" if dry_run else "deleted", f"{done.name}, which named {before}")
    elif not done.changes:
        line = labelled("nothing to do", f"{done.name} names position {now} already")
    else:
        was = "" if before is None else f", no more {before}" if before != now else ", for another reason"
        line = labelled(f"{would}tag" if dry_run else "tagged", f"{done.name} names position {now}{was}")
    sink.result(document, [line], is_done=not dry_run)


def tags(found: Sequence[ListedTag], model: Path, sink: Output) -> None:
    """Print the tags of a model."""
    sink.result(documents.Tags(str(model), found), [] if found else [labelled("tags", "none")])
    if not found:
        return
    columns = {"tag": "left", "position": "right", "time (UTC)": "left", "who": "left", "": "left"}
    rows = [
        (tag.name, tag.position, f"{tag.when.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}", tag.who, note)
        for tag in found
        for note in ["; ".join(filter(None, (tag.gone and f"gone: {tag.gone}", tag.why)))]
    ]
    sink.table("", columns, rows)


def history(found: Model, sink: Output, last: int | None, *, changes: bool = False) -> None:
    """Print a model's publications, all or the `last` ones; with `changes` also what each delta changed."""
    events = found.publications[-last:] if last else found.publications
    if changes:
        events = tuple(_with_changes(found, event) for event in events)
    document = documents.History(
        model=str(found.path),
        position=found.at.position if found.at else None,
        step=found.at.step if found.at else None,
        log=found.current.number if found.current else None,
        hold=found.hold,
        held_by=found.held_by,
        tags=found.listed_tags,
        events=events,
    )
    changed = [
        labelled("changed", f"at {event.position}, {change.text}")
        for event in events
        for change in event.changes or ()
    ]
    sink.result(document, [*_history_lines(found, len(events)), *changed])
    columns = {
        "time (UTC)": "left",
        "what": "left",
        "position": "right",
        "step": "right",
        "": "left",
    }
    sink.table("", columns, (_row(event) for event in events))


def _with_changes(found: Model, event: Event) -> Event:
    """The event with what its delta changed, if it is one of the current log that can be read."""
    from exporter.publish.what_changed import what_changed

    log = found.current
    if log is None or event.from_position is None or not event.is_current:
        return event
    with suppress(ExportError, OSError, StopIteration):
        delta = next(one for one in log.deltas if one.path == event.path)
        return replace(event, changes=what_changed(log, delta))
    return event


def _history_lines(found: Model, shown: int) -> Iterator[str]:
    yield labelled("model", str(found.path))
    began = f"; its log of deltas began with version {found.current.number}" if found.current else ""
    yield labelled("position", f"{found.at or 'unknown'}{began}")
    if found.hold is not None:
        waiting = sum(event.is_past_hold for event in found.publications)
        is_canary = found.current is not None and found.current.hold.is_canary
        by = found.held_by
        who = f", {by.origin}" if by is not None else ", by the agent's canary" if is_canary else ""
        yield labelled("hold", f"at {found.hold}{who}; {waiting or 'nothing'} published beyond it")
        if by is not None and by.why:
            yield labelled("why", by.why)
        more = " --lift-canary" if is_canary else ""
        yield labelled("next", f"to lift it: export-model resume {quoted(found.path)}{more}")
    if found.listed_tags:
        told = (f"{one.name} {one.position}{' (gone)' * bool(one.gone)}" for one in found.listed_tags)
        yield labelled("tags", ", ".join(told))
    if shown < len(found.publications):
        yield labelled("shown", f"the last {shown} of {len(found.publications)} events")


def _row(event: Event) -> tuple[Any, ...]:
    when = "" if event.created is None else event.created.strftime("%Y-%m-%d %H:%M:%S")
    step = "" if event.step is None else event.step
    return when, event.what.value, event.position, step, "; ".join(_notes(event))


def _notes(event: Event) -> Iterator[str]:
    what = event.what.value
    if event.problem:
        yield event.problem
    elif event.back_to is not None:
        yield f"values of {event.back_to} again" + (f", for {event.reason}" if event.reason else "")
    elif what in ("version", "base"):
        yield f"from {event.checkpoint}"
    elif what == "rebase":
        yield "a new base with all deltas so far"
    if event.from_position is not None:
        yield f"from {event.from_position} on"
    if what == "merge":
        away = f", {event.merged_away} of them merged away" if event.merged_away else ""
        yield f"{event.parts} publications in one{away}"
    elif event.rows is not None:
        yield (count(event.rows, "row") if event.rows else "whole variables") + (
            ", found by comparison" if event.compared else ""
        )
    if event.budget is not None:
        yield f"{human_bytes(event.budget.sent)} of {human_bytes(event.budget.changes)}, a budget's"
    if event.left_out is not None and event.from_position is not None:
        yield f"{count(event.left_out.rows, 'row')} held back"
    if event.wild:
        yield f"{count(sum(each.rows for each in event.wild), 'row')} beyond --max-norm"
    if event.event_time is not None:
        yield f"trained on events up to {event.event_time.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}"
    if event.merged_into is not None:
        yield f"merged into {event.merged_into}"
    if event.tags:
        yield f"tagged {', '.join(event.tags)}"
    if event.is_past_hold:
        yield "waits behind the hold"
    if not event.is_current:
        yield "of before" if event.log is None else f"of the log {event.log}, which has ended"


_NOTHING_TO_MERGE = labelled("nothing to merge", "at most one delta leads there")
_NOTHING_TO_REBASE = labelled("nothing to do", "the newest base stands at the newest position")
