"""Begin a log: a base that takes deltas, made by a full export."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from exporter.checkpoint import open_checkpoint
from exporter.errors import ManifestError, NotUpdatable
from exporter.options import ExportRequest, Updates
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.delta_log import read_log
from exporter.publish.versions import newest_version

if TYPE_CHECKING:
    from exporter.pipeline.full import Exported


def is_begun(request: ExportRequest) -> bool:
    """True if something is published under the target already."""
    return newest_version(request.out) is not None


def export_base(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    *,
    not_backwards: bool = False,
    is_watching: bool = False,
) -> Exported:
    """Begin a log by a full export; `not_backwards`: with the increments since, if more is served already.

    A watch waits for the graph that a trainer writes last.

    Raises:
        ExportError: any of errors.py.
    """
    # The stages of a full export take as long to import as a delta to make.
    from exporter.pipeline.full import export
    from exporter.pipeline.trainer_graph import require_graph

    if is_watching:
        require_graph(request, open_checkpoint(request.ckpt_dir))
    return export(as_base(request), progress, not_backwards=not_backwards)


def as_base(request: ExportRequest) -> ExportRequest:
    """The full export that begins a log; it takes deltas as the base before it did, unless told otherwise.

    Where the log broke, it is the checkpoint of the base before that is published again.
    """
    request = replace(request, again=True)
    if request.updates not in (None, Updates()):
        return request
    before = Updates()
    with suppress(NotUpdatable, ManifestError):
        before = read_log(request.out).base.entry.updates
    return replace(request, updates=before)
