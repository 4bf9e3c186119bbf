"""`export-model` without `--incr`: export once, or follow training, and print the result.

Print that this node of a cluster leaves the export to its chief.
"""

from __future__ import annotations

from functools import partial

from exporter.cli import render
from exporter.cli.documents import exported as documents
from exporter.cli.documents.exported import StandBy
from exporter.graph.load import run_builders_once
from exporter.local_paths import quoted
from exporter.options import ExportRequest
from exporter.pipeline import full, full_plan
from exporter.pipeline.watch import watch
from exporter.pipeline.watch_loop import Watching
from exporter.publish.made_from import PublishedAlready
from exporter.publish.permission import held_at
from exporter.roles import Role
from exporter.terminal.edge import outlived, watch_ended
from exporter.terminal.markup import labelled
from exporter.terminal.output import Output
from exporter.transfer.opened import OpenModel


def stand_by(role: Role, sink: Output) -> None:
    """Say which role the node has, where that is known from, and how to export in spite of it."""
    document = StandBy("nothing_to_do", None, role.type, role.index, role.source)
    why = f"this node is {role} ({role.source}), and the chief exports; --any-role exports here, too"
    sink.result(document, [labelled("nothing to do", why)], is_done=True)


def run(
    request: ExportRequest, sink: Output, target: OpenModel, watching: Watching | None, *, dry_run: bool
) -> None:
    """Export the newest checkpoint, or each newest one while watching; or print what would be exported.

    Raises:
        ExportError: any of errors.py.
    """
    if watching is not None and not dry_run:
        tell, ended = partial(outlived, sink), partial(watch_ended, sink)
        for done in watch(request, watching, tell, sink.progress, ended, target.carry):
            render.exported(done, sink)
        return
    try:
        if dry_run:
            render.plan(target.carry(lambda: full_plan.plan(request)), sink)
        else:
            graphs = run_builders_once()
            done = target.carry(lambda: full.export(request, sink.progress, graphs), sink.progress)
            render.exported(done, sink)
    except PublishedAlready as error:
        published_already(request, error, sink, dry_run=dry_run)


def published_already(
    request: ExportRequest, error: PublishedAlready, sink: Output, *, dry_run: bool
) -> None:
    """Print that the checkpoint is published already, by the same plan."""
    made = error.made
    hold, is_newest = held_at(request.out), made.version == made.newest
    document = documents.PublishedAlready(
        dry_run=dry_run,
        status="nothing_to_do",
        path=str(made.path),
        version=made.version,
        position=made.head.position,
        newest_version=made.newest,
        hold=hold,
        message=error.message,
    )
    lines = [labelled("nothing to do", error.message)]
    if not is_newest:
        lines.append(labelled("newest", f"version {made.newest}; to publish this one again: --again"))
    if hold is not None:
        lines.append(labelled("hold", f"at {hold}, until export-model resume {quoted(request.out)}"))
    sink.result(document, lines, is_done=True)
