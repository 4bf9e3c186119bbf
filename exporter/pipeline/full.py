"""Full exports: what was planned is written, verified and published.

What is checked of a staged version: `--verify`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.metagraph_pair import keep_pair_alone, write_pair
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import VariablesReport, as_rewritten, write_variables
from exporter.bundle.warmup_requests import write_warmup
from exporter.checkpoint import candidates
from exporter.checkpoint.convert import write_bundle
from exporter.errors import CheckpointChanged, CheckpointError, LinkRefused
from exporter.files import writing
from exporter.graph.load import GraphSource, run_builders_once
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.jobs.runner import Runner
from exporter.layout import ASSETS_DIRECTORY
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import DataMode, ExportFormat, ExportRequest, Verify
from exporter.pipeline.full_plan import Plan, plan
from exporter.pipeline.newest_base import BaseState, lay_increments_over, newest_state
from exporter.pipeline.same_graph import SourceFiles
from exporter.pipeline.table_deltas import note_index_written
from exporter.pipeline.table_layout import write_tables
from exporter.pipeline.target import permission, require_new
from exporter.pipeline.updatable import UpdatableBase, make_base
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.commit import (
    TAKING_THE_LOCK,
    Published,
    Staging,
    UnderLock,
    publish_version,
    reserve_position,
)
from exporter.publish.delta_log import LogBase, log_path
from exporter.publish.manifest import BaseEntry, ManifestDraft, Origin, tensor_entries
from exporter.verify.answers import require_golden
from exporter.verify.outputs import Difference, Request, compare_outputs
from exporter.verify.table_index import verify_tables
from exporter.verify.version_files import verify_bytes, verify_files
from exporter.version import __version__


def check_staged(
    planned: Plan, bundle: Path, variables: VariablesReport, progress: ProgressFactory
) -> tuple[Difference, ...]:
    """Check as much as was asked for; how far outputs differ, if they were compared.

    Raises:
        VerificationError, CheckpointError: what is wrong.
    """
    request = planned.request
    if request.verify.includes(Verify.FILES):
        verify_files(bundle, tensor_entries(variables.catalog))
    if request.verify.includes(Verify.BYTES):
        with progress("verify", variables.catalog.bytes_) as bar:
            runner = Runner.of(request.jobs)
            verify_bytes(variables.catalog, runner=runner, progress=bar)
    if planned.layout is not None and request.verify is not Verify.NONE:
        is_filtered = not planned.rules.admission.is_everyone
        verify_tables(planned.layout, variables.catalog, is_filtered=is_filtered)
    if not request.verify.includes(Verify.OUTPUTS):
        return ()
    probes = [Request(probe.signature, probe.inputs) for probe in planned.probes or planned.warmup]
    return compare_outputs(
        planned.source,
        planned.mapping,
        bundle,
        requests=probes,
        tolerance=request.tolerance,
        traced_rows=planned.graph.traced_rows,
        tables=planned.layout.geometries if planned.layout else None,
    )


_ATTEMPTS = 3
"""Checkpoints that may vanish under our hands before we give up."""


class Exported(Struct, frozen=True):
    """What an export did; `differences` is empty unless outputs were compared."""

    plan: Plan
    published: Published
    variables: VariablesReport
    differences: tuple[Difference, ...]
    seconds: float


def execute(
    planned: Plan, progress: ProgressFactory = no_progress, *, not_backwards: bool = False
) -> Exported:
    """Stage, verify and publish what was planned.

    With `not_backwards` a base that takes deltas holds the trainer's increments, too, if more than its
    checkpoint is served.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        PublishedAlready: somebody else published the same meanwhile, and `again` is not asked for.
        PublishError, VerificationError: see errors.py; nothing was published.
    """
    started, request = time.monotonic(), planned.request
    digest = planned.digest
    permit = partial(require_new, request, planned.checkpoint, digest)
    with Staging(request.out) as staging, ExitStack() as jobs:
        planned, variables = _write_variables(planned, staging, jobs, progress)
        planned.checkpoint.require_same_files()
        state = _state(planned, not_backwards=not_backwards)
        base = _updatable(planned, staging, state) if request.updates else None
        graph, mapping = (base.graph, base.mapping) if base else (planned.graph, planned.mapping)
        write_saved_model(graph, mapping, staging.path, planned.training)
        if request.format is not ExportFormat.SAVED_MODEL:
            write_pair(graph, mapping, staging.path)
        if warmup := base.warmup if base else planned.warmup:
            write_warmup(warmup, staging.path)
        differences = check_staged(planned, staging.path, variables, progress)
        if request.format is ExportFormat.METAGRAPH:
            keep_pair_alone(staging.path)
        if base is not None and state.increments is not None:
            scratch = staging.path.with_name("scratch")
            variables = lay_increments_over(base.entry, state.increments, staging.path, scratch)
        require_golden(staging.path, planned.golden)
        draft = ManifestDraft(
            tensors=tensor_entries(variables.catalog),
            # With increments no checkpoint has these contents.
            source=Origin.of(planned.catalog.prefix, None if state.increments else planned.checkpoint.digest),
            exporter=__version__,
            step=state.step,
            lineage=base.lineage if base else None,
            incremental=_with_origin(base.entry, planned, staging.path) if base else None,
            plan_digest=digest,
        )
        published = publish_version(
            staging,
            draft,
            base.place if base else planned.version,
            keep=request.keep,
            permission=permission(request),
            under_lock=TAKING_THE_LOCK if request.again else UnderLock(permit=permit),
        )
    if base is not None:
        places = {asset.file_name: asset.source for asset in planned.graph.assets}
        log = log_path(request.out, base.entry.log)
        SourceFiles(places).save(log)
        note_index_written(LogBase(published.path, published.manifest, base.entry), log)
    return Exported(planned, published, variables, differences, time.monotonic() - started)


def export(
    request: ExportRequest,
    progress: ProgressFactory = no_progress,
    load: GraphSource | None = None,
    *,
    not_backwards: bool = False,
) -> Exported:
    """Plan and execute; when a trainer prunes the checkpoint meanwhile, take the next newest.

    Raises:
        ExportError: any of errors.py.
    """
    load = load or run_builders_once()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return execute(plan(request, load), progress, not_backwards=not_backwards)
        except CheckpointChanged:
            if attempt == _ATTEMPTS or candidates(request.ckpt_dir) == [request.ckpt_dir]:
                raise
    raise AssertionError("the loop returns or raises")


def _write_variables(
    planned: Plan, staging: Staging, jobs: ExitStack, progress: ProgressFactory
) -> tuple[Plan, VariablesReport]:
    """Write `variables/`; what is in no tensor bundle goes into one first, from which the plan goes on.

    The jobs that do it are left with the stack.
    """
    data, catalog = planned.request.data, planned.catalog
    runner, index_work = Runner.of(planned.request.jobs, planned.request.out), (0, 0)
    if not catalog.is_bundle:
        if data is DataMode.LINK:
            raise LinkRefused(f"{catalog.prefix} is not a tensor bundle: its bytes are written anew")
        planned, data = _in_bundle(planned, staging.path.with_name("source"), progress), DataMode.AUTO
    if planned.layout is not None:
        admission, scratch = planned.rules.admission, staging.path.with_name("tables")
        index_work = planned.layout.index_job(admission, runner.task_bytes).size_of_work
        # The bundle that an archive became is here, and nobody else's: so is the index of its keys then.
        indexer = runner if catalog.is_bundle else Runner(task_bytes=runner.task_bytes)
        with progress("indexes", index_work[1]) as bar:
            tables = write_tables(planned.layout, planned.mapping, admission, scratch, indexer, bar)
        jobs.push(tables.job)
        tables.job.keep_until_stored(planned.request.out)
        planned = replace(planned, mapping=tables.mapping)
    with progress("variables", planned.mapping.bytes_) as bar:
        made = staging.path.parent
        variables = write_variables(
            planned.mapping, staging.path, data=data, runner=runner, made=made, progress=bar
        )
    if variables.job is not None:
        jobs.push(variables.job)
    tasks, size = variables.work
    variables = replace(variables, work=(tasks + index_work[0], size + index_work[1]))
    if not catalog.is_bundle:
        variables = as_rewritten(variables, catalog.prefix, catalog.family)
    return planned, variables


def _in_bundle(planned: Plan, directory: Path, progress: ProgressFactory) -> Plan:
    """The plan with what it needs in a bundle under `directory`, which goes with the staging."""
    mapping, layout = planned.mapping, planned.layout
    laid_out = layout.shapes if layout is not None else {}
    # By name: one may be served cast, and kept as it is for a training graph.
    needed = {item.tensor.name: item.tensor for item in mapping.sources if item.tensor.name not in laid_out}
    if layout is not None:
        needed |= {name: planned.catalog.tensors[name] for name in layout.stored_names}
    with progress("read", sum(ref.bytes_ for ref in needed.values())) as bar:
        catalog = write_bundle(planned.catalog, needed.values(), directory / "model.ckpt", bar)
    if layout is not None:
        layout = layout.with_source(catalog)
        catalog = layout.catalog
    sources = tuple(replace(item, tensor=catalog.tensors[item.tensor.name]) for item in mapping.sources)
    return replace(planned, mapping=replace(mapping, catalog=catalog, sources=sources), layout=layout)


def _updatable(planned: Plan, staging: Staging, state: BaseState) -> UpdatableBase:
    """The planned graph as it takes deltas, at the position that it will be published at."""
    updates = planned.request.updates
    assert updates is not None
    scratch = staging.path.with_name("scratch")
    scratch.mkdir()
    return make_base(
        planned.graph,
        planned.mapping,
        MappingSpec.of(planned.graph, planned.rules, planned.mapping),
        state.trained,
        state.step,
        reserve_position(planned.request.out, state.step),
        updates,
        scratch,
        planned.warmup if planned.request.warmup or planned.request.no_warmup else None,
    )


def _state(planned: Plan, *, not_backwards: bool) -> BaseState:
    """The trainer's state that is published: the checkpoint's, or that of the increments since."""
    full = BaseState(_trained(planned), planned.catalog.step)
    if not not_backwards or planned.request.updates is None or planned.training is not None:
        return full
    spec = MappingSpec.of(planned.graph, planned.rules, planned.mapping)
    model, prefix = planned.request.out, planned.catalog.prefix
    return newest_state(model, full, prefix, planned.graph, planned.mapping, spec)


def _trained(planned: Plan) -> TrainerVersion:
    """The state that is exported; increments beside the checkpoint may tell how new its events are."""
    prefix = planned.catalog.prefix
    checkpoint = CheckpointId(prefix.name, planned.catalog.step or 0, planned.checkpoint.digest)
    event_time = None
    with suppress(CheckpointError):  # whoever needs the increments says what is wrong with them
        event_time = read_history(prefix.parent).newest_event(checkpoint)
    return TrainerVersion.of(checkpoint, None, event_time)


def _with_origin(entry: BaseEntry, planned: Plan, bundle: Path) -> BaseEntry:
    """The entry with what the base was made from; of its tables' files, what was copied into it counts."""
    if planned.origin is None:
        return entry
    assets = {asset.file_name: bundle / ASSETS_DIRECTORY / asset.file_name for asset in planned.graph.assets}
    with writing(bundle):
        return replace(entry, origin=planned.origin.with_graph(planned.graph, assets))
