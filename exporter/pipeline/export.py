"""`exporter.export`: publish a version or, with `save_incr_model`, a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from exporter.errors import NothingChanged
from exporter.options import ExportRequest, require_exact
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.delta_log import read_log

if TYPE_CHECKING:
    from exporter.pipeline.full import Exported


@overload
def export(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    *,
    save_incr_model: Literal[False] = False,
) -> Exported: ...
@overload
def export(
    request: ExportRequest, progress: ProgressFactory = no_progress, *, save_incr_model: Literal[True]
) -> ExportedDelta: ...
def export(
    request: ExportRequest, progress: ProgressFactory = no_progress, *, save_incr_model: bool = False
) -> Exported | ExportedDelta:
    """Publish a version; with `save_incr_model`, what changed since the newest position as a delta.

    The trainer's increments (DeepRec's, too) say what changed, or it is found by comparing its newest
    checkpoint with what is published. A checkpoint that is new counts, even if every value is as it was.
    `export_incremental` does the same, but begins with a base and takes it for no error if nothing changed.

    Raises:
        NotUpdatable: `save_incr_model`, and nothing is published that a delta could continue.
        NothingChanged: `save_incr_model`, and there is no increment or checkpoint that is not published.
        UsageError: `min_change` or `delta_dtype` without `save_incr_model`: a version is exact.
        ExportError: any other of errors.py.
    """
    if not save_incr_model:
        require_exact(request)
        from exporter.pipeline import full

        return full.export(request, progress)
    at = read_log(request.out).at
    done = export_incremental(request, progress)
    if not isinstance(done, ExportedDelta) or done.published is None:
        raise NothingChanged(f"{request.ckpt_dir} holds nothing beyond position {at}, which is published")
    return done
