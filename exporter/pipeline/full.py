"""Full exports: plan, stage, verify, publish.

`plan` reads the checkpoint and the graph, and decides everything before anything is written. `execute` stages
what was planned, checks it as `--verify` says, and publishes it. `export` does both, again where a trainer
pruned the checkpoint meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.mapped_tables import (
    NOTHING_MAPPED,
    MappedTables,
    Unmapped,
    choose_mapped,
)
from exporter.bundle.saved_model_writer import keep_pair_alone, write_pair, write_saved_model
from exporter.bundle.tables_in_8_bits import choose_for_8_bits
from exporter.bundle.variables import (
    VariablesReport,
    as_rewritten,
    mapped_files,
    size_of_work,
    write_variables,
)
from exporter.bundle.warmup import WarmupRequest, read_requests, write_warmup
from exporter.catalog import Catalog
from exporter.checkpoint import candidates, open_checkpoint
from exporter.checkpoint.convert import write_bundle
from exporter.checkpoint.identity import Identity
from exporter.errors import (
    AccessRefused,
    CheckpointChanged,
    CheckpointError,
    LinkRefused,
    ManifestError,
    MissingAsset,
    NotServable,
    NotUpdatable,
    TensorFlowNeeded,
    UsageError,
)
from exporter.graph.feeds import mode_switches
from exporter.graph.graph_digest import graph_digest
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphSource, SourceGraph, load_source, run_builders_once
from exporter.graph.origin import GraphOrigin
from exporter.graph.outside import require_harmless
from exporter.graph.servable import by_library
from exporter.graph.training_graph import TrainingGraph
from exporter.graph.training_mode import check_dropout
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.jobs.runner import Runner
from exporter.mapping.build import Extra, VariableMapping, check_casts, check_rules, classify_extras
from exporter.mapping.mapping_rules import MappingRules, parse_rules
from exporter.mapping.mapping_spec import MappingSpec
from exporter.mapping.training_variables import check_batch_statistics, with_training
from exporter.newer_python import sha256_of
from exporter.options import DataMode, ExportFormat, ExportRequest, Verify, require_local, told_in_digest
from exporter.pipeline.both_sides import advised, read_both
from exporter.pipeline.newest_base import (
    BaseState,
    UpdatableBase,
    as_served,
    lay_increments_over,
    make_base,
    newest_state,
    update_notes,
)
from exporter.pipeline.overlay_room import room_for
from exporter.pipeline.same_graph import SourceFiles
from exporter.pipeline.table_deltas import note_index_written
from exporter.pipeline.table_layout import lay_out_tables, map_laid_out, write_tables
from exporter.pipeline.trainer_graph import training_graph
from exporter.publish.commit import (
    PublishedVersion,
    ReservedPosition,
    Staging,
    VersionRule,
    publish_version,
    reserve_position,
)
from exporter.publish.delta_log import LogBase, log_path
from exporter.publish.finite import require_base_finite
from exporter.publish.manifest import (
    BaseEntry,
    ManifestDraft,
    MappedRecord,
    MappedTable,
    Origin,
    UnmappedTable,
    tensor_entries,
)
from exporter.publish.model import PublishedAlready, newest_made_from
from exporter.publish.permission import Permission
from exporter.publish.versions import newest_version, read_manifest, require_base_path
from exporter.storage import mirror
from exporter.storage.files import writing
from exporter.storage.layout import ASSETS_DIRECTORY
from exporter.storage.local_paths import quoted, require_no_pattern
from exporter.subgraph.make_updatable import mapped_counter
from exporter.tables.lay_out import TableLayout
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.verify.golden import GoldenRequest, read_golden
from exporter.verify.outputs import Difference, Probe, compare_outputs, require_golden
from exporter.verify.table_index import verify_tables
from exporter.verify.version_files import verify_bytes, verify_files
from exporter.version import __version__


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
    unmapped: tuple[Unmapped, ...] = ()

    def __repr__(self) -> str:
        size = f"{len(self.mapping.sources)} variables"
        return f"Plan({str(self.catalog.prefix)!r} to {str(self.request.out)!r}, {size})"

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
        """How many tasks write values, and how many bytes they read; of indexes, about."""
        if not self.catalog.is_bundle:
            return 0, 0
        most = self.request.jobs.task_bytes
        tasks, size = size_of_work(self.mapping, self.request.out, most)
        if self.layout is not None:
            more, read = self.layout.index_job(self.rules.admission, most).size_of_work
            tasks, size = tasks + more, size + read
        return tasks, size

    @property
    def ignored(self) -> tuple[Extra, ...]:
        """What of the checkpoint is not served; the mapping's own catalog may hold served variables alone."""
        served = {source.tensor.name for source in self.mapping.sources}
        if self.layout is not None:
            served |= self.layout.served_names
        return tuple(classify_extras(self.catalog, served))


def plan(request: ExportRequest, load: GraphSource = load_source) -> Plan:
    """Read the checkpoint and the graph and decide where every variable comes from.

    Raises:
        PublishedAlready: the checkpoint is published by this plan, and `again` is not asked for.
        UsageError, CheckpointError, GraphError, MappingError: see errors.py.
    """
    planned, is_known = _planned(request, load)
    if is_known:
        require_new(request, planned.checkpoint, planned.digest)
        check_permission(request)
    return planned


def _planned(request: ExportRequest, load: GraphSource) -> tuple[Plan, bool]:
    """The plan, and whether a version was made from the same checkpoint, perhaps by the same plan."""
    require_local(request)
    version = VersionRule.parse(request.version)
    require_base_path(request.out)
    if not mirror.is_remote(request.out):
        require_no_pattern("--out", request.out)
    _require_consistent(request)
    rules = parse_rules(request)
    catalog = open_checkpoint(request.ckpt_dir)
    checkpoint = Identity.of(catalog)
    is_known = not request.again and newest_made_from(request.out, checkpoint.digest) is not None
    if not is_known:
        check_permission(request)
    found = read_both(request, rules, catalog, checkpoint, load)
    require_own_directory(request.out, found.catalog)
    _require_runnable(request, found.graph)
    graph, layout = lay_out_tables(found.graph, found.catalog, found.rules, request.table_head_room)
    with advised(request, found.catalog):
        mapping = map_laid_out(graph, found.catalog, layout, found.rules)
    check_casts(mapping, found.rules.casts)
    check_rules(request, graph, found.catalog, mapping)
    if not request.allow_batch_statistics:
        switches = mode_switches(graph.meta_graph.graph_def, found.source.feeds)
        check_batch_statistics(graph, found.catalog, mapping.sources, switches)
    if not request.allow_dropout:
        check_dropout(graph, found.source.feeds)
    in_8_bits = choose_for_8_bits(graph, mapping)
    graph, mapping = in_8_bits.graph, in_8_bits.mapping
    unmapped: tuple[Unmapped, ...] = ()
    if request.map_tables:
        indexes = layout.index_names if layout is not None else ()
        chosen = choose_mapped(graph, mapping, takes_deltas=request.updates is not None, indexes=indexes)
        graph, mapping, unmapped = chosen.graph, chosen.mapping, chosen.unmapped
    training = training_graph(request, found.catalog)
    if training is not None:
        mapping = with_training(mapping, training)
    planned = Plan(
        request=request,
        catalog=found.catalog,
        checkpoint=found.checkpoint,
        source=found.source,
        graph=graph,
        mapping=mapping,
        version=version,
        rules=found.rules,
        warmup=read_requests(request.warmup, graph.meta_graph) if request.warmup else (),
        probes=read_requests(request.verify_inputs, graph.meta_graph) if request.verify_inputs else (),
        training=training,
        target_notes=_base_notes(request, graph, mapping) if request.updates else target_notes(request.out),
        origin=found.origin,
        layout=layout,
        golden=read_golden(request.golden) if request.golden else (),
        unmapped=unmapped,
    )
    return planned, is_known


def _require_consistent(request: ExportRequest) -> None:
    """Refuse options that contradict each other."""
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
    if request.map_tables:
        _require_mappable(request)


def _require_mappable(request: ExportRequest) -> None:
    """Refuse what does not go together with mapped tables: a path is baked into the graph."""
    if request.overlay_rows is not None and not request.updates:
        raise UsageError(
            "--overlay-rows: this version takes no deltas, and has no overlay",
            hint="leave it out, or add --incr or --updatable",
        )
    if request.format is not ExportFormat.SAVED_MODEL:
        raise UsageError(
            f"--map-tables --format {request.format.value}: only a SavedModel's tables are mapped"
        )
    if request.data is DataMode.LINK:
        raise UsageError(
            "--map-tables gives each table a file of its own, --data link copies nothing",
            hint="leave --data out: what can be linked is",
        )
    if request.version == "time":
        raise UsageError(
            "--map-tables --version time: the version is part of a path that the graph holds",
            hint="leave --version out, or name a number",
        )
    place = request.served_at
    if place is None and mirror.is_remote(request.out):
        raise UsageError(
            f"--map-tables: servers do not map files of {request.out}",
            hint="name the directory that they see after a pull: --served-at /models/NAME",
        )
    if place is not None and (not place.startswith("/") or "\0" in place):
        raise UsageError(
            f"--served-at {place!r}: expected an absolute path",
            hint=f"name the model's directory as servers see it: --served-at /models/{request.out.name}",
        )
    if place is not None:
        require_no_pattern("--served-at", Path(place))


def _require_runnable(request: ExportRequest, graph: InferenceGraph) -> None:
    """Refuse what this process would have to run, where it lacks operations, or may not run them."""
    has_state = bool(graph.state.importing)
    if request.updates and (graph.foreign or has_state):
        raise NotServable(
            "a model with state or operations of another library takes no deltas",
            cause=f"it needs {by_library(graph.foreign)}"
            if graph.foreign
            else "only its own restore fills it",
            hint="publish full versions: leave --incr and --updatable out",
        )
    asked = "--verify outputs" if request.verify is Verify.OUTPUTS else "--golden" if request.golden else ""
    if imported := asked or ("--updatable" if request.updates else ""):
        require_harmless(graph.outside, imported, is_allowed=request.allow_code)
    if asked and graph.foreign:
        raise UsageError(
            f"{asked} runs the model here, where TensorFlow lacks {by_library(graph.foreign)}",
            hint=f"leave {asked} out (--verify bytes runs nothing), and ask a server that knows them",
        )


def require_own_directory(model: Path, catalog: Catalog) -> None:
    """Keep versions out of the trainer's directory: it is pruned, copied and removed by other rules."""
    directory = catalog.prefix.parent
    if catalog.is_bundle and model.is_dir() and model.samefile(directory):
        raise UsageError(
            f"--out {model} is the directory of the checkpoint",
            cause="versions, deltas and unfinished work would lie among the trainer's files",
            hint=f"name a directory of the model's own: --out {quoted(model / 'served')}",
        )


def target_notes(model: Path) -> tuple[str, ...]:
    """A plain version over one that takes deltas ends the freshness of every server that loads it."""
    newest = newest_version(model)
    if newest is None:
        return ()
    with suppress(NotUpdatable, ManifestError):
        LogBase.read(newest.path)
        return (
            f"{newest.path} takes deltas, what replaces it does not: --updatable publishes one that does",
        )
    return ()


def _base_notes(request: ExportRequest, graph: InferenceGraph, mapping: VariableMapping) -> tuple[str, ...]:
    notes = update_notes(graph, mapping)
    if request.updates and request.updates.finite and not request.verify.includes(Verify.BYTES):
        return (*notes, "--require-finite checks deltas; with --verify bytes the base's own values, too")
    return notes


def require_new(request: ExportRequest, checkpoint: Identity, digest: str) -> None:
    """Refuse to publish a checkpoint a second time, by the same plan (of this digest)."""
    made = newest_made_from(request.out, checkpoint.digest)
    choice = VersionRule.parse(request.version).choice
    number = choice if isinstance(choice, int) else None
    takes_deltas = request.updates is not None
    if made is not None and made.is_by(digest, takes_deltas=takes_deltas, number=number):
        raise PublishedAlready(made)


def check_permission(request: ExportRequest) -> None:
    """Refuse what a hold or a log forbids."""
    permission(request).check(request.out, takes_deltas=request.updates is not None)


def permission(request: ExportRequest) -> Permission:
    """What the request may do that goes against what is published."""
    return Permission(request.despite_hold, request.plain)


def plan_digest(
    request: ExportRequest,
    graph: InferenceGraph,
    mapping: VariableMapping,
    warmup: Iterable[WarmupRequest],
    training: TrainingGraph | None,
) -> str:
    """A lower-case SHA-256."""
    told: dict[str, object] = told_in_digest(request) | {
        "graph": _graph(graph),
        "assets": [[asset.file_name, _file(asset.source)] for asset in graph.assets],
        "variables": [
            [s.key, s.tensor.name, s.dtype.label, s.gather_parts, s.scatter_parts] for s in mapping.sources
        ],
        "training": None if training is None else [training.tag, _proto(training.meta_graph)],
        "warmup": [hashlib.sha256(line.record).hexdigest() for line in warmup],
    }
    if request.min_freq or request.max_age_steps is not None:  # so spelt since the first release
        told["admission"] = [request.min_freq, request.max_age_steps]
    if graph.dynamic_tables:
        tables = {variable.key for table in graph.dynamic_tables for variable in table.variables}
        told["tables"] = [[s.key, s.tensor.shape] for s in mapping.sources if s.key in tables]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _graph(graph: InferenceGraph) -> str:
    """Each run of a builder gives functions other names; without functions, the bytes decide."""
    if graph.meta_graph.graph_def.library.function:
        return graph_digest(graph)
    return _proto(graph.meta_graph)


def _proto(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return sha256_of(file)
    except OSError as error:
        raise MissingAsset(f"{path} cannot be read", cause=error.strerror or str(error)) from error


_ATTEMPTS = 3
"""Checkpoints that may vanish under our hands before we give up."""


class Exported(Struct, frozen=True):
    """What an export did; `differences` is empty unless outputs were compared.

    `is_new` is False if the checkpoint was published already, by the same plan: nothing was written, and
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
    """Plan and execute; when a trainer prunes the checkpoint meanwhile, take the next newest.

    Raises:
        ExportError: any of errors.py.
    """
    load = load or run_builders_once()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return execute(plan(request, load), progress, beyond=beyond)
        except CheckpointChanged:
            if attempt == _ATTEMPTS or candidates(request.ckpt_dir) == [request.ckpt_dir]:
                raise
    raise AssertionError("the loop returns or raises")


def export_unless_published(request: ExportRequest, progress: ProgressFactory = no_progress) -> Exported:
    """As `export`; a checkpoint that is published already is no error: the result has that version.

    Raises:
        ExportError: any of errors.py.
    """
    started, load = time.monotonic(), run_builders_once()
    try:
        return export(request, progress, load)
    except PublishedAlready as error:
        made = error.made
        planned, _ = _planned(request, load)
        there = PublishedVersion(made.path, made.version, read_manifest(made.path))
        variables = VariablesReport(planned.mapping.catalog, ())
        return Exported(planned, there, variables, (), time.monotonic() - started, is_new=False)


def execute(planned: Plan, progress: ProgressFactory = no_progress, *, beyond: int = 0) -> Exported:
    """Stage, verify and publish what was planned.

    A base that takes deltas holds the trainer's increments, too, if its checkpoint is of an earlier step than
    `beyond`.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        PublishedAlready: another process published the same meanwhile, and `again` is not asked for.
        PublishError, VerificationError: see errors.py; nothing was published.
    """
    started, request = time.monotonic(), planned.request
    digest = planned.digest  # before an archive becomes a bundle, which is another mapping
    permit = partial(require_new, request, planned.checkpoint, digest)
    with Staging(request.out) as staging, ExitStack() as jobs:
        planned, variables = _write_variables(planned, staging, jobs, progress)
        # After the last read: a shard that was replaced while it was linked or copied is not published.
        planned.checkpoint.require_same_files()
        state = _state(planned, beyond=beyond)
        base = _updatable(planned, staging, state) if request.updates else None
        graph, mapping = (base.graph, base.mapping) if base else (planned.graph, planned.mapping)
        place = base.place if base else _version_place(planned)
        tables = _mapped_tables(planned, place, variables, mapped_counter(graph) if base else "")
        write_saved_model(graph, mapping, staging.path, planned.training, tables)
        if tables.files:
            tables.write_id(staging.path)
        if request.format is not ExportFormat.SAVED_MODEL:
            write_pair(graph, mapping, staging.path)
        if warmup := base.warmup if base else _plain_warmup(planned):
            write_warmup(warmup, staging.path)
        differences = check_staged(planned, staging.path, variables, progress)
        if request.format is ExportFormat.METAGRAPH:
            keep_pair_alone(staging.path)
        if base is not None and state.increments is not None:
            scratch = staging.path.with_name("scratch")
            laid = lay_increments_over(base.entry, state.increments, mapping, staging.path, scratch)
            variables = replace(laid, rounded=variables.rounded)  # the checkpoint's rows; increments are few
            if tables.files:  # they are other shards now, whose names the graph holds
                tables = _mapped_tables(planned, place, variables, mapped_counter(graph) if base else "")
                write_saved_model(graph, mapping, staging.path, planned.training, tables)
                tables.write_id(staging.path)
        if request.updates and request.updates.finite and request.verify.includes(Verify.BYTES):
            require_base_finite(variables.catalog)
        require_golden(staging.path, planned.golden)  # of the values that are published: increments, too
        draft = ManifestDraft(
            tensors=tensor_entries(variables.catalog),
            # With increments no checkpoint has these contents.
            source=Origin.of(planned.catalog.prefix, None if state.increments else planned.checkpoint.digest),
            exporter=__version__,
            step=state.step,
            lineage=base.lineage if base else None,
            incremental=_with_origin(base.entry, planned, staging.path) if base else None,
            plan_digest=digest,
            tensorflow=_running_tensorflow(),
            mapped=_mapped_record(planned, tables, variables),
        )
        published = publish_version(
            staging,
            draft,
            place,
            keep=request.keep,
            permission=permission(request),
            permit=(lambda: None) if request.again else permit,
        )
    if base is not None:
        places = {asset.file_name: asset.source for asset in planned.graph.assets}
        log = log_path(request.out, base.entry.log)
        SourceFiles(places).save(log)
        note_index_written(LogBase(published.path, published.manifest, base.entry), log)
    return Exported(planned, published, variables, differences, time.monotonic() - started)


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
            raise LinkRefused(f"{catalog.prefix} is not a tensor bundle: its bytes have to be rewritten")
        planned, data = _in_bundle(planned, staging.path.with_name("source"), progress), DataMode.AUTO
    if planned.layout is not None:
        admission, scratch = planned.rules.admission, staging.path.with_name("tables")
        index_work = planned.layout.index_job(admission, runner.task_bytes).size_of_work
        # The bundle made from an archive is on this machine alone, so its keys are indexed here, too.
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


def _state(planned: Plan, *, beyond: int) -> BaseState:
    """The trainer's state that is published: the checkpoint's, or that of the increments since."""
    full = BaseState(_trained(planned), planned.catalog.step)
    if not beyond or planned.request.updates is None or planned.training is not None:
        return full
    spec = MappingSpec.of(planned.graph, planned.rules, planned.mapping)
    prefix = planned.catalog.prefix
    return newest_state(full, prefix, planned.graph, planned.mapping, spec, beyond=beyond)


def _trained(planned: Plan) -> TrainerVersion:
    """The state that is exported; increments beside the checkpoint may say how new its events are."""
    prefix = planned.catalog.prefix
    checkpoint = CheckpointId(prefix.name, planned.catalog.step or 0, planned.checkpoint.digest)
    event_time = None
    with suppress(CheckpointError):  # the stage that reads increments reports damage
        event_time = read_history(prefix.parent).newest_event(checkpoint)
    return TrainerVersion.of(checkpoint, None, event_time)


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
        _overlays(planned),
    )


def _plain_warmup(planned: Plan) -> tuple[WarmupRequest, ...]:
    """The given requests; without any, generated ones for mapped tables: their first reads are slow, too."""
    request = planned.request
    if request.warmup or request.no_warmup or not request.map_tables:
        return planned.warmup
    try:
        require_harmless(planned.graph.outside, "warm-up", is_allowed=request.allow_code)  # it is tried here
        return made_up_requests(as_served(planned.graph, planned.mapping)[0])
    except (AccessRefused, ImportError, TensorFlowNeeded):  # a plain export of a given graph works without
        return ()


def _overlays(planned: Plan) -> dict[str, int]:
    """For how many changed rows there is room beside each mapped table of a base, by its node."""
    if not planned.request.updates:
        return {}
    rows = {
        variable.node: variable.shape[0]
        for source in planned.mapping.sources
        if source.is_mapped
        for variable in source.variables
    }
    return {node: room_for(count, planned.request.overlay_rows) for node, count in rows.items()}


def _version_place(planned: Plan) -> VersionRule | ReservedPosition:
    """What names a plain version; where its tables are mapped, the number is known before it is published."""
    is_mapped = any(source.is_mapped for source in planned.mapping.sources)
    if not is_mapped or planned.version.choice != "position":
        return planned.version
    return reserve_position(planned.request.out, planned.catalog.step)


def _mapped_tables(
    planned: Plan, place: VersionRule | ReservedPosition, variables: VariablesReport, counter: str
) -> MappedTables:
    """The files that servers map of the version that will be published, and the node that counts them."""
    files = mapped_files(planned.mapping, variables.catalog)
    if not files:
        return NOTHING_MAPPED
    number = place.position if isinstance(place, ReservedPosition) else place.choice
    return MappedTables.of(served_at(planned.request) / str(number), files, counter)


def served_at(request: ExportRequest) -> Path:
    """Where servers see the model, as far as the request says."""
    return Path(request.served_at) if request.served_at is not None else request.out.absolute()


def _mapped_record(planned: Plan, tables: MappedTables, variables: VariablesReport) -> MappedRecord | None:
    if not planned.request.map_tables:
        return None
    written = {shard.path.name: shard.bytes_ for shard in variables.shards}
    overlays = _overlays(planned)
    mapped = [
        MappedTable(variable.served_name, file, written[file], overlays.get(variable.node))
        for source in planned.mapping.sources
        for variable in source.variables
        if (file := tables.files.get(variable.node)) is not None
    ]
    restored = [UnmappedTable(each.key, each.bytes_, each.why) for each in planned.unmapped]
    place = os.fsencode(tables.directory).decode(errors="backslashreplace")  # a path need not be UTF-8
    return MappedRecord(tables.id, place if mapped else "", tuple(mapped), tuple(restored))


def _running_tensorflow() -> str | None:
    """The version of the TensorFlow that runs in this process; None if none does."""
    tensorflow = sys.modules.get("tensorflow")
    return getattr(tensorflow, "__version__", None)


def _with_origin(entry: BaseEntry, planned: Plan, bundle: Path) -> BaseEntry:
    """The entry with what the base was made from; of its tables' files, what was copied into it counts."""
    if planned.origin is None:
        return entry
    assets = {asset.file_name: bundle / ASSETS_DIRECTORY / asset.file_name for asset in planned.graph.assets}
    with writing(bundle):
        return replace(entry, origin=planned.origin.with_graph(planned.graph, assets))


def check_staged(
    planned: Plan, bundle: Path, variables: VariablesReport, progress: ProgressFactory
) -> tuple[Difference, ...]:
    """Check as much as was asked for; how far outputs differ, if they were compared."""
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
    probes = [Probe(probe.signature, probe.inputs) for probe in planned.probes or planned.warmup]
    return compare_outputs(
        planned.source,
        planned.mapping,
        bundle,
        requests=probes,
        tolerance=request.tolerance,
        traced_rows=planned.graph.traced_rows,
        tables=planned.layout.geometries if planned.layout else None,
    )
