"""Print the results of commands on published models, as a JSON document, and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from exporter.cli.documents import Status
from exporter.cli.documents import logs as documents
from exporter.cli.documents.logs import Merge, Rebase, Rollback
from exporter.errors import ExportError
from exporter.options import Signing, arguments
from exporter.storage.local_paths import quoted
from exporter.terminal.output import Output, labelled
from exporter.terminal.progress import count, human_bytes
from exporter.wire.json_documents import in_utc

if TYPE_CHECKING:
    from exporter.pipeline.log_maintenance import Merged, RollbackResult
    from exporter.pipeline.rebase import Rebased
    from exporter.pipeline.tagging import Tagging
    from exporter.publish.commit import PublishedDelta, PublishedVersion
    from exporter.publish.model import Event, Model
    from exporter.publish.tags import ListedTag
    from exporter.storage.url import Url
    from exporter.verify.log import VerifiedModel


def merged(done: Merged | None, sink: Output, *, dry_run: bool) -> None:
    """Print a merger of deltas, or with `dry_run` its plan; None as `done`: there is nothing to merge.

    A plan has no size yet. Warnings of the publication are printed, too.
    """
    if done is None:
        document = Merge(dry_run=dry_run, status=Status.NOTHING_TO_DO)
        sink.result(document, [_NOTHING_TO_MERGE], is_done=not dry_run)
        return
    size = done.published.manifest.bytes_ if done.published else None
    by = f"by {count(done.tasks, 'task')}" if size is None else human_bytes(size)
    document = Merge(
        dry_run=dry_run,
        status=Status.done(is_plan=dry_run),
        path=str(done.path),
        from_position=done.span.start,
        position=done.span.end,
        merged=[delta.path.name for delta in done.parts],
        bytes=size,
        tasks=done.tasks,
        meets=done.meets,
    )
    lines = [
        labelled(_would("merge", "merged", dry_run), f"{count(len(done.parts), 'delta')}, {by}"),
        labelled(_would("publish", "published", dry_run), str(done.path)),
        *_met(done.meets),
    ]
    sink.result(document, lines, is_done=not dry_run)
    _warn(done.published, sink)


def _met(meets: Sequence[str]) -> list[str]:
    return [labelled("would meet", each) for each in meets]


def rebased(done: Rebased | None, sink: Output, *, dry_run: bool = False) -> None:
    """Print a new base, or with `dry_run` its plan; None as `done`: a base is at the newest position already.

    A plan has no removed versions: these are decided when the base is published. Warnings of the publication
    are printed, too.
    """
    if done is None:
        document = Rebase(dry_run=dry_run, status=Status.NOTHING_TO_DO)
        sink.result(document, [_NOTHING_TO_REBASE], is_done=not dry_run)
        return
    published = done.published
    removed = None if published is None else published.removed
    kept = None if published is None else published.kept
    document = Rebase(
        dry_run=dry_run,
        status=Status.done(is_plan=dry_run),
        path=str(done.path),
        position=done.at.position,
        step=done.at.step,
        deltas=done.deltas,
        tasks=done.tasks,
        versions_removed=removed,
        versions_kept=kept,
        meets=done.meets,
    )
    by = f", by {count(done.tasks, 'task')}" if dry_run else ""
    lines = [
        labelled(_would("merge", "merged", dry_run), f"the base and {count(done.deltas, 'delta')}{by}"),
        *(labelled("removed", f"version {number}") for number in removed or ()),
        *(labelled("kept", f"version {each.version}, too: {each.reason}") for each in kept or ()),
        labelled(_would("publish", "published", dry_run), str(done.path)),
        *_met(done.meets),
    ]
    sink.result(document, lines, is_done=not dry_run)
    _warn(published, sink)


_PUBLISHED_ALREADY = "nothing: these values are published already"


def taken_back(done: RollbackResult, model: Path, signing: Signing, sink: Output, *, dry_run: bool) -> None:
    """Print a rollback or resumption, or with `dry_run` its plan, or that there is nothing to do.

    After a rollback of `model`, the command that lifts its hold is printed, with the options of `signing`.
    Warnings of the publication are printed, too.
    """
    status, lines = Status.NOTHING_TO_DO, _nothing_held(done)
    if done.was_held:
        status = Status.done(is_plan=dry_run) if dry_run or done.published is not None else Status.HOLD_LIFTED
        lifted = ("would lift", "the hold: servers take what is published") if dry_run else ("hold", "lifted")
        held = (_would("hold", "hold", dry_run), _held(done))
        lines = [
            labelled("values", f"of position {done.values_of}"),
            labelled(_would("publish", "published", dry_run), str(done.path or _PUBLISHED_ALREADY)),
            *_why_base(done),
            labelled(*(lifted if done.hold is None else held)),
        ]
        if done.hold is not None and not (done.is_canary or dry_run):
            words = ["export-model", "resume", model, *arguments(signing)]
            lines.append(labelled("to lift it", " ".join(map(quoted, words))))
    if (old := done.replaced) is not None:
        lines.append(
            labelled(_would("replace", "replaced", dry_run), f"the hold at {old.position}, {old.text}")
        )
    document = Rollback(
        dry_run=dry_run,
        status=status,
        path=None if done.path is None else str(done.path),
        from_position=done.before.position,
        position=done.position,
        values_of=done.values_of.position,
        step=done.values_of.step,
        hold=done.hold,
        is_canary=done.is_canary,
        replaced=done.replaced,
        made=None if done.made is None else done.made.value,
        meets=done.meets,
    )
    sink.result(document, lines + _met(done.meets), is_done=not dry_run)
    _warn(done.published, sink)


def _why_base(done: RollbackResult) -> list[str]:
    """Return the line about the new base that restores the values, in a list; [] if they need no base."""
    if done.made is None or done.made.value != "base":
        return []
    return [labelled("a new base", f"the log of position {done.values_of} has ended: servers load it")]


def _would(act: str, done: str, dry_run: bool) -> str:
    return f"would {act}" if dry_run else done


def _held(found: RollbackResult) -> str:
    beyond = "the agent's canary decides about what lies beyond"
    return f"at {found.hold}: {beyond if found.is_canary else 'servers go no further until it is lifted'}"


def _nothing_held(found: RollbackResult) -> list[str]:
    if found.hold is None:
        return [labelled("nothing to do", "the model is not held")]
    return [
        labelled("nothing to do", "no person and no rollback holds the model"),
        labelled("hold", _held(found)),
        labelled("next", "to have servers take that unjudged: stop the agent's canary, then --lift-canary"),
    ]


def _warn(published: PublishedDelta | PublishedVersion | None, sink: Output) -> None:
    """Print the warnings of a publication: errors that came after it. Nothing for None."""
    for warning in () if published is None else published.warnings:
        sink.warn(warning.message)


def verified(found: VerifiedModel, sink: Output, *, says_model: bool = False) -> None:
    """Print counts and problems of a verified model.

    With `says_model`, the lines for people name its identity. They leave out the first problem: the caller
    raises it.
    """
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
        identity=found.identity,
    )
    lines = [
        *([labelled("model", found.identity or "without an identity")] if says_model else []),
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
        return "unknown" if found.unread else "the newest version takes no deltas"
    return str(found.at) if found.at else "unknown"


def _positions(known: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, known[-10:]))
    return shown if len(known) <= 10 else f"{len(known)}, the last {shown}"


def tagged(done: Tagging, sink: Output, *, dry_run: bool) -> None:
    """Print a change of a tag, done or, with `dry_run`, planned; or that there is nothing to do."""
    now, before = (None if tag is None else tag.position for tag in (done.tag, done.before))
    document = documents.Tag(
        dry_run=dry_run,
        status=Status.done(is_plan=dry_run) if done.changes else Status.NOTHING_TO_DO,
        name=done.name,
        position=now,
        before=before,
        meets=done.meets,
    )
    would = "would " if dry_run else ""
    if now is None:
        line = labelled(f"{would}delete" if dry_run else "deleted", f"{done.name}, which named {before}")
    elif not done.changes:
        line = labelled("nothing to do", f"{done.name} names position {now} already")
    else:
        was = "" if before is None else f", no more {before}" if before != now else ", for another reason"
        line = labelled(f"{would}tag" if dry_run else "tagged", f"{done.name} names position {now}{was}")
    sink.result(document, [line, *_met(done.meets)], is_done=not dry_run)


def tags(found: Sequence[ListedTag], model: Path | Url, sink: Output) -> None:
    """Print the tags of a model, or that there are none; the document names the model as `model`."""
    sink.result(documents.Tags(str(model), found), [] if found else [labelled("tags", "none")])
    if not found:
        return
    columns = {"tag": "left", "position": "right", "time (UTC)": "left", "who": "left", "": "left"}
    rows = [
        (tag.name, tag.position, f"{in_utc(tag.when):%Y-%m-%d %H:%M:%S}", tag.who, note)
        for tag in found
        for note in ["; ".join(filter(None, (tag.why_gone and f"gone: {tag.why_gone}", tag.why)))]
    ]
    sink.table("", columns, rows)


def history(found: Model, sink: Output, last: int | None, *, changes: bool = False) -> None:
    """Print a model's publications, all or the `last` ones; with `changes` also the changes of each delta.

    None or 0 as `last` means all. The table has a column with the publishers (user and machine) if there are
    several. With `changes`, files of the deltas are read; changes that cannot be read are left out.
    """
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
    several = len({event.publisher for event in events} - {None}) > 1
    columns = {
        "time (UTC)": "left",
        "what": "left",
        "position": "right",
        "step": "right",
        **({"who": "left"} if several else {}),
        "": "left",
    }
    sink.table("", columns, (_row(event, several=several) for event in events))


def _with_changes(found: Model, event: Event) -> Event:
    """Return an event with the changes of its delta, which are read from the delta's files.

    An event that is not a delta of the current log is returned as it is, and so is one whose files cannot be
    read.
    """
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
    if found.is_hold_unread:
        from exporter.publish.hold import UNREAD

        yield labelled("hold", UNREAD)
        yield labelled("to lift it", f"export-model resume {quoted(found.path)}")
    if found.hold is not None:
        waiting = sum(event.is_past_hold for event in found.publications)
        is_canary = found.current is not None and found.current.hold.is_canary
        by = found.held_by
        who = f", {by.origin}" if by is not None else ", by the agent's canary" if is_canary else ""
        yield labelled("hold", f"at {found.hold}{who}; {waiting or 'nothing'} published beyond it")
        if by is not None and by.why:
            yield labelled("why", by.why)
        words = ["export-model", "resume", str(found.path), *(["--lift-canary"] if is_canary else [])]
        words = words if by is None else by.lifting(found.path)
        yield labelled("to lift it", " ".join(map(quoted, words)))
    if found.listed_tags:
        yield labelled("tags", ", ".join(map(_tag, found.listed_tags)))
    if shown < len(found.publications):
        yield labelled("shown", f"the last {shown} of {len(found.publications)} events")


def _tag(found: ListedTag) -> str:
    """Return a text for people on a tag: name and position, and a note if the position is gone."""
    keeps = "" if found.keeps is None else f", but keeps version {found.keeps}"
    return f"{found.name} {found.position}" + (f" (gone{keeps})" if found.gone else "")


def _row(event: Event, *, several: bool) -> tuple[Any, ...]:
    when = "" if event.created is None else event.created.strftime("%Y-%m-%d %H:%M:%S")
    step = "" if event.step is None else event.step
    who = (event.publisher or "",) if several else ()
    return when, event.what.value, event.position, step, *who, "; ".join(_notes(event))


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
        yield f"changes since {event.from_position}"
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
    yield from _standing(event)


def _standing(event: Event) -> Iterator[str]:
    """Yield texts on the time of a publication's newest training event, its merger, tags, hold and log."""
    if event.event_time is not None:
        yield f"trained on events up to {in_utc(event.event_time):%Y-%m-%d %H:%M:%S}"
    if event.merged_into is not None:
        yield f"merged into {event.merged_into}"
    if event.tags:
        yield f"tagged {', '.join(event.tags)}"
    if event.is_past_hold:
        yield "waits behind the hold"
    if not event.is_current:
        yield "of before" if event.log is None else f"of the log {event.log}, which has ended"


_NOTHING_TO_MERGE = labelled("nothing to do", "there is at most one delta to merge")
_NOTHING_TO_REBASE = labelled("nothing to do", "the newest base stands at the newest position")
