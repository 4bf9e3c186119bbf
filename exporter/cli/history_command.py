"""`export-model history MODEL`: list what was published, by position, and where the model stands."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exporter.cli.documents import logs as documents
from exporter.cli.log_commands import ModelArgument
from exporter.local_paths import quoted
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.markup import labelled
from exporter.terminal.output import Output
from exporter.transfer.opened import opened

if TYPE_CHECKING:
    from exporter.publish.timeline import Event, Timeline


def history(
    model: ModelArgument,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show only the newest N events.")
    ] = None,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """List what was published, in order: versions, bases, deltas, mergers, rollbacks; and the hold.

    \b
    Examples:
      export-model history models/ranker
      export-model history models/ranker --last 20 --json
    """
    with command(printing) as sink, opened(model, read_only=True) as target:
        from exporter.publish.timeline import read_timeline

        told(target.carry(lambda: read_timeline(target.path)), sink, last)


def told(found: Timeline, sink: Output, last: int | None) -> None:
    """What `history` prints, all of it or the `last` events."""
    events = found.events[-last:] if last else found.events
    document = documents.History(
        model=str(found.model),
        position=found.at.position if found.at else None,
        step=found.at.step if found.at else None,
        log=found.log,
        hold=found.hold,
        events=[_document(event) for event in events],
    )
    sink.result(document, _lines(found, len(events)))
    columns = {"time (UTC)": "left", "what": "left", "position": "right", "step": "right", "": "left"}
    sink.table("", columns, (_row(event) for event in events))


def _document(event: Event) -> documents.Event:
    return documents.Event(
        what=event.what.value,
        position=event.position,
        from_position=event.start,
        path=str(event.path),
        created=event.created,
        step=event.step,
        log=event.log,
        checkpoint=event.checkpoint,
        rows=event.rows,
        compared=event.compared,
        parts=event.parts,
        merged_away=event.merged_away,
        merged_into=event.merged_into,
        back_to=event.back_to,
        reason=event.reason,
        is_past_hold=event.is_past_hold,
        is_current=event.is_current,
        problem=event.problem,
        event_time=event.event_time,
    )


def _lines(found: Timeline, shown: int) -> Iterator[str]:
    yield labelled("model", str(found.model))
    began = f"; its log of deltas began with version {found.log}" if found.log is not None else ""
    yield labelled("position", f"{found.at or 'unknown'}{began}")
    if found.hold is not None:
        waiting = sum(event.is_past_hold for event in found.events)
        who = ", by the agent's canary" if found.is_canary else ""
        yield labelled("hold", f"at {found.hold}{who}; {waiting or 'nothing'} published beyond it")
        more = " --lift-canary" if found.is_canary else ""
        yield labelled("next", f"to lift it: export-model resume {quoted(found.model)}{more}")
    if shown < len(found.events):
        yield labelled("shown", f"the last {shown} of {len(found.events)} events")


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
    if event.start is not None:
        yield f"from {event.start} on"
    if what == "merge":
        away = f", {event.merged_away} of them merged away" if event.merged_away else ""
        yield f"{event.parts} publications in one{away}"
    elif event.rows is not None:
        yield f"{event.rows} rows" + (", found by comparison" if event.compared else "")
    if event.event_time is not None:
        yield f"trained on events up to {event.event_time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    if event.merged_into is not None:
        yield f"merged into {event.merged_into}"
    if event.is_past_hold:
        yield "waits behind the hold"
    if not event.is_current:
        yield "of before" if event.log is None else f"of the log {event.log}, which has ended"
