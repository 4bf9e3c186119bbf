"""`export-model` without `--incr`: run it once, or follow training, and say what it did."""

from __future__ import annotations

from functools import partial

from exporter import report
from exporter.command import outlived
from exporter.following import Watching
from exporter.options import ExportRequest
from exporter.output import Output
from exporter.pipeline import full
from exporter.pipeline.watch import watch


def run(request: ExportRequest, sink: Output, watching: Watching | None, *, dry_run: bool) -> None:
    """Export the newest checkpoint, or each newest one while watching; or print what would be exported.

    Raises:
        ExportError: any of errors.py.
    """
    if dry_run:
        report.plan(full.plan(request), sink)
    elif watching is None:
        report.exported(full.export(request, sink.progress), sink)
    else:
        for done in watch(request, watching, partial(outlived, sink), sink.progress):
            report.exported(done, sink)
