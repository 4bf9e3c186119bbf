"""Full exports: plan, stage, verify, publish.

A plan is executed by steps, each in the module that knows how. They fill a staging directory, which is
published at the end. `export` plans and executes, and repeats that if a trainer pruned the checkpoint
meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from msgspec import Struct

from exporter.bundle.saved_model_writer import keep_pair_alone, write_pair
from exporter.bundle.variables import VariablesReport
from exporter.bundle.warmup import write_warmup
from exporter.checkpoint import is_named
from exporter.errors import CheckpointChanged
from exporter.graph.load import GraphSource, run_builders_once
from exporter.graph.old_servers import text_of
from exporter.options import ExportFormat, ExportRequest
from exporter.pipeline.full_plan import Plan, made_plan, permission, plan, require_new
from exporter.pipeline.stage_hot_rows import lay_chosen_rows
from exporter.pipeline.staged import (
    Staged,
    Step,
    check_published,
    check_staged,
    mapped_record,
    name_plain_version,
    write_graph,
    write_values,
)
from exporter.publish.commit import PublishedVersion, Staging, publish_version
from exporter.publish.kept_export import keep_command
from exporter.publish.manifest import ManifestDraft, Origin, tensor_entries
from exporter.publish.model import PublishedAlready
from exporter.publish.retention import Keep
from exporter.publish.versions import read_manifest
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.verify.outputs import Difference
from exporter.version import __version__

__all__ = ["Exported", "Plan", "execute", "export", "export_unless_published", "plan"]

_ATTEMPTS = 3
"""The number of tries if checkpoints vanish while they are exported."""


class Exported(Struct, frozen=True):
    """The result of an export; `differences` is empty unless outputs were compared.

    `is_new` is False if the checkpoint was published before by the same plan: nothing was written, and
    `published` is that version.
    """

    plan: Plan
    published: PublishedVersion
    variables: VariablesReport
    differences: tuple[Difference, ...]
    seconds: float
    is_new: bool = True

    def __repr__(self) -> str:
        path, step = str(self.published.path), self.published.manifest.step
        return f"Exported({path!r}, step={step}, is_new={self.is_new})"


def export(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    load: GraphSource | None = None,
    *,
    beyond: int = 0,
) -> Exported:
    """Plan, stage, verify and publish a full version of the request's checkpoint, and return the result.

    If a trainer prunes a directory's checkpoint meanwhile, its newest one is exported, in up to three tries.
    `load` reads the graph; None: it is read anew in each try, but a builder runs once. A base whose
    checkpoint's step is below `beyond` also gets the trainer's increments.

    Raises:
        PublishedAlready: the checkpoint is published by this plan, and `again` is not asked for.
        ExportError: any of errors.py; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    load = load or run_builders_once()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return execute(plan(request, load), progress, beyond=beyond)
        except CheckpointChanged:
            # A named checkpoint is gone: no other one may be exported in its place.
            if attempt == _ATTEMPTS or is_named(request.ckpt_dir):
                raise
    raise AssertionError("the loop returns or raises")


def export_unless_published(request: ExportRequest, progress: ProgressFactory) -> Exported:
    """Export as `export`; if the checkpoint is published already, return that version, with `is_new` False.

    The same plan has published that version. The result then says of no file how it was written.

    Raises:
        ExportError: any of errors.py; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    started, load = time.monotonic(), run_builders_once()
    try:
        return export(request, progress, load)
    except PublishedAlready as error:
        made = error.made
        planned, _ = made_plan(request, load)
        there = PublishedVersion(made.path, made.version, read_manifest(made.path))
        variables = VariablesReport(planned.mapping.catalog, ())
        return Exported(planned, there, variables, (), time.monotonic() - started, is_new=False)


def steps_of(planned: Plan, beyond: int) -> Iterator[Step]:
    """Yield the functions that stage the planned version, in the order in which they must run.

    A base whose checkpoint's step is below `beyond` also gets the trainer's increments.
    """
    request = planned.request
    yield write_values
    yield lay_chosen_rows  # before the graph: it renames shards, and graphs hold names of mapped ones
    if request.updates is None:
        yield name_plain_version
    else:
        from exporter.pipeline.newest_base import lay_increments_over, make_base  # plain ones need neither

        yield partial(make_base, updates=request.updates, beyond=beyond)
    yield write_graph
    if request.format is not ExportFormat.SAVED_MODEL:
        yield lambda staged: write_pair(staged.graph, staged.mapping, staged.bundle, planned.server)
    yield lambda staged: write_warmup(staged.warmup, staged.bundle) if staged.warmup else None
    yield check_staged
    if request.format is ExportFormat.METAGRAPH:
        yield lambda staged: keep_pair_alone(staged.bundle)  # only now: the check reads `saved_model.pb`
    if request.updates is not None:
        yield lay_increments_over  # after the check, which compares with the checkpoint
    yield check_published


def execute(planned: Plan, progress: ProgressFactory = no_progress, *, beyond: int = 0) -> Exported:
    """Stage, verify and publish the planned version; keep the command beside the model.

    A base that takes deltas also gets the trainer's increments, if its checkpoint is from an earlier step
    than `beyond`.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        PublishedAlready: another process published the same meanwhile, and `again` is not asked for.
        ExportError: PublishError, VerificationError and others, see errors.py; nothing was published.
        OSError: the operating system refuses to read a file; nothing was published.
    """
    started, request = time.monotonic(), planned.request
    digest = planned.digest  # before an archive becomes a bundle, which changes the mapping
    # Asked once more under the model's lock: another process may have published the same meanwhile.
    permit = partial(require_new, request, planned.checkpoint, digest)
    with Staging(request.out) as staging, ExitStack() as jobs:
        staged = Staged.of(planned, staging, jobs, progress)
        for step in steps_of(planned, beyond):
            step(staged)
        published = publish_version(
            staging,
            _draft(staged, digest),
            staged.place,
            keep=Keep.of(request),
            permission=permission(request),
            permit=(lambda: None) if request.again else permit,
        )
    keep_command(request)
    if staged.entry is not None:  # caches beside the published log; losing them only costs time
        from exporter.pipeline.newest_base import note_sources

        note_sources(staged.plan, published, staged.entry)
    seconds = time.monotonic() - started
    return Exported(staged.plan, published, staged.variables, staged.differences, seconds)


def _draft(staged: Staged, plan_digest: str) -> ManifestDraft:
    """Return the manifest of the staged version, without the fields that publishing adds.

    `plan_digest` is the digest of the plan as it was made. Of a base, copies of the graph's files are read:
    PublishError or LfsPointer if one cannot be.
    """
    planned, entry = staged.plan, staged.entry
    if entry is not None:
        from exporter.pipeline.newest_base import entry_with_origin

        entry = entry_with_origin(staged)
    # With increments no checkpoint has these contents.
    digest = None if staged.increments else planned.checkpoint.digest
    return ManifestDraft(
        tensors=tensor_entries(staged.variables.catalog),
        source=Origin.of(planned.catalog.prefix, digest),
        exporter=__version__,
        step=staged.step,
        lineage=staged.lineage,
        incremental=entry,
        plan_digest=plan_digest,
        tensorflow=getattr(sys.modules.get("tensorflow"), "__version__", None),  # None if none runs here
        mapped=mapped_record(staged),
        for_server=planned.request.for_server,
        oldest_server=text_of(staged.oldest_server),
        opened_batch=planned.graph.opened_batch,
    )
