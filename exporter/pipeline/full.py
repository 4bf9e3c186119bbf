"""Full exports: `plan()` reads and decides, `execute()` writes."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.metagraph_pair import keep_pair_alone, write_pair
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import VariablesReport, as_rewritten, size_of_work, write_variables
from exporter.bundle.warmup_requests import WarmupRequest, read_requests, write_warmup
from exporter.catalog import Catalog
from exporter.checkpoint import candidates, open_checkpoint
from exporter.checkpoint.convert import write_bundle
from exporter.checkpoint.identity import Identity
from exporter.errors import CheckpointChanged, CheckpointError, LinkRefused, UsageError
from exporter.files import writing
from exporter.golden import GoldenRequest, read_golden
from exporter.graph.feeds import mode_switches
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphSource, SourceGraph, load_source, run_builders_once
from exporter.graph.origin import GraphOrigin
from exporter.graph.training_graph import TrainingGraph
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.jobs.runner import Runner
from exporter.layout import ASSETS_DIRECTORY
from exporter.mapping.batch_statistics import check_batch_statistics
from exporter.mapping.build import MappingRules, VariableMapping, check_casts
from exporter.mapping.extras import Extra, classify_extras
from exporter.mapping.mapping_spec import MappingSpec
from exporter.mapping.request_rules import parse_rules
from exporter.mapping.training_variables import with_training
from exporter.options import DataMode, ExportFormat, ExportRequest
from exporter.pipeline.both_sides import read_both
from exporter.pipeline.newest_base import BaseState, lay_increments_over, newest_state
from exporter.pipeline.plan_digest import plan_digest
from exporter.pipeline.same_graph import SourceFiles
from exporter.pipeline.staged_checks import check_staged
from exporter.pipeline.table_deltas import note_index_written
from exporter.pipeline.table_layout import lay_out_tables, map_laid_out, write_tables
from exporter.pipeline.target import (
    check_permission,
    permission,
    require_new,
    require_own_directory,
    target_notes,
)
from exporter.pipeline.trainer_graph import training_graph
from exporter.pipeline.updatable import UpdatableBase, make_base, update_notes
from exporter.progress import ProgressFactory, no_progress
from exporter.publish.commit import Published, Staging, VersionRule, publish_version, reserve_position
from exporter.publish.delta_log import LogBase, log_path
from exporter.publish.log_entries import BaseEntry
from exporter.publish.made_from import newest_made_from
from exporter.publish.manifest import ManifestDraft, Origin, tensor_entries
from exporter.publish.versions import require_base_path
from exporter.storage import mirror
from exporter.storage.output_directory import open_directory
from exporter.tables.lay_out import TableLayout
from exporter.verify.answers import require_golden
from exporter.verify.outputs import Difference
from exporter.version import __version__

_ATTEMPTS = 3
"""Checkpoints that may vanish under our hands before we give up."""


class Plan(Struct, frozen=True, dict=True):
    """What an export will do; nothing has been written yet."""

    request: ExportRequest
    catalog: Catalog
    checkpoint: Identity
    source: SourceGraph
    graph: InferenceGraph
    mapping: VariableMapping
    version: VersionRule
    rules: MappingRules
    warmup: tuple[WarmupRequest, ...] = ()
    probes: tuple[WarmupRequest, ...] = ()
    training: TrainingGraph | None = None
    target_notes: tuple[str, ...] = ()
    origin: GraphOrigin | None = None
    layout: TableLayout | None = None
    golden: tuple[GoldenRequest, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the choices made."""
        return (*self.catalog.notes, *self.graph.notes, *self.mapping.notes, *self.target_notes)

    @cached_property
    def digest(self) -> str:
        """A digest that differs between plans for the same checkpoint."""
        return plan_digest(self.request, self.graph, self.mapping, self.warmup, self.training)

    @cached_property
    def work(self) -> tuple[int, int]:
        """How many tasks write values, and how many bytes they read."""
        if not self.catalog.is_bundle:
            return 0, 0
        return size_of_work(self.mapping, self.request.out, self.request.jobs.task_bytes)

    @property
    def ignored(self) -> tuple[Extra, ...]:
        """What of the checkpoint is not served; the mapping's own catalog may hold served variables alone."""
        served = {source.tensor.name for source in self.mapping.sources}
        if self.layout is not None:
            served |= self.layout.served_names
        return tuple(classify_extras(self.catalog, served))


class Exported(Struct, frozen=True):
    """What an export did; `differences` is empty unless outputs were compared."""

    plan: Plan
    published: Published
    variables: VariablesReport
    differences: tuple[Difference, ...]
    seconds: float


def plan(request: ExportRequest, load: GraphSource = load_source) -> Plan:
    """Read the checkpoint and the graph and decide where every variable comes from.

    Raises:
        PublishedAlready: the checkpoint is published by this plan, and `again` is not asked for.
        UsageError, CheckpointError, GraphError, MappingError: see errors.py.
    """
    number = VersionRule.parse(request.version)
    require_base_path(request.out)
    if request.plain and request.updates:
        raise UsageError(
            "--plain: this version takes deltas", hint="leave out --plain, or --incr and --updatable"
        )
    if request.updates and request.version:
        raise UsageError("a base that takes deltas is named by its position", hint="leave --version out")
    if request.updates and request.format is not ExportFormat.SAVED_MODEL:
        raise UsageError(f"--format {request.format.value}: only a SavedModel takes deltas")
    if request.golden and request.format is ExportFormat.METAGRAPH:
        raise UsageError("--golden asks a SavedModel", hint="leave out --golden, or --format metagraph")
    if request.warmup and request.no_warmup:
        raise UsageError("--warmup and --no-warmup: requests, or none", hint="leave one out")
    rules = parse_rules(request)
    catalog = open_checkpoint(request.ckpt_dir)
    checkpoint = Identity.of(catalog)
    is_known = not request.again and newest_made_from(request.out, checkpoint.digest) is not None
    if not is_known:
        check_permission(request)
    found = read_both(request, rules, catalog, checkpoint, load)
    require_own_directory(request.out, found.catalog)
    graph, layout = lay_out_tables(found.graph, found.catalog, found.rules, request.table_head_room)
    mapping = map_laid_out(graph, found.catalog, layout, found.rules)
    check_casts(mapping, found.rules.casts)
    if not request.allow_batch_statistics:
        switches = mode_switches(graph.meta_graph.graph_def, found.source.feeds)
        check_batch_statistics(graph, found.catalog, mapping.sources, switches)
    training = training_graph(request, found.catalog)
    if training is not None:
        mapping = with_training(mapping, training)
    planned = Plan(
        request,
        found.catalog,
        found.checkpoint,
        found.source,
        graph,
        mapping,
        number,
        found.rules,
        read_requests(request.warmup, graph.meta_graph) if request.warmup else (),
        read_requests(request.verify_inputs, graph.meta_graph) if request.verify_inputs else (),
        training,
        update_notes(graph, mapping) if request.updates else target_notes(request.out),
        found.origin,
        layout,
        read_golden(request.golden) if request.golden else (),
    )
    if is_known:
        require_new(request, checkpoint, planned.digest)
        check_permission(request)
    return planned


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
    with Staging(request.out) as staging:
        planned, variables = _write_variables(planned, staging, progress)
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
        place = base.place if base else None
        published = publish_version(
            staging,
            draft,
            version=planned.version,
            place=place,
            keep=request.keep,
            permission=permission(request),
            permit=(lambda: None) if request.again else permit,
        )
    if variables.job and not mirror.has_stand_ins(request.out):  # a version in a store is copied from there
        open_directory(variables.job).remove()
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
    planned: Plan, staging: Staging, progress: ProgressFactory
) -> tuple[Plan, VariablesReport]:
    """Write `variables/`; what is in no tensor bundle goes into one first, from which the plan goes on."""
    data, catalog = planned.request.data, planned.catalog
    if not catalog.is_bundle:
        if data is DataMode.LINK:
            raise LinkRefused(f"{catalog.prefix} is not a tensor bundle: its bytes are written anew")
        planned, data = _in_bundle(planned, staging.path.with_name("source"), progress), DataMode.AUTO
    elif planned.layout is not None:
        laid_out = write_tables(
            planned.layout, planned.mapping, planned.rules, staging.path.with_name("tables")
        )
        planned = replace(planned, mapping=laid_out)
    with progress("variables", planned.mapping.bytes_) as bar:
        runner = Runner.of(planned.request.jobs, planned.request.out)
        variables = write_variables(planned.mapping, staging.path, data=data, runner=runner, progress=bar)
    if not catalog.is_bundle:
        variables = as_rewritten(variables, catalog.prefix, catalog.family)
    return planned, variables


def _in_bundle(planned: Plan, directory: Path, progress: ProgressFactory) -> Plan:
    """The plan with the mapped tensors in a bundle under `directory`, which goes with the staging."""
    mapping = planned.mapping
    by_name = {source.tensor.name: source.tensor for source in mapping.sources}
    tensors = list(by_name.values())  # one may be served cast, and kept as it is for a training graph
    with progress("read", sum(ref.bytes_ for ref in tensors)) as bar:
        catalog = write_bundle(mapping.catalog, tensors, directory / "model.ckpt", bar)
    sources = tuple(replace(item, tensor=catalog.tensors[item.tensor.name]) for item in mapping.sources)
    return replace(planned, mapping=replace(mapping, catalog=catalog, sources=sources))


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
