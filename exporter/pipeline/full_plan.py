"""Full exports, planned: what is read and decided before anything is written.

Digest a plan: everything but the checkpoint's values that decides what a version is.

Two exports of one checkpoint by plans of one digest publish the same version. Whoever changes an option, a
graph, a vocabulary or a file of warm-up requests gets another digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from exporter.bundle.variables import size_of_work
from exporter.bundle.warmup_requests import WarmupRequest, read_requests
from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.identity import Identity
from exporter.errors import MissingAsset, NotServable, UsageError
from exporter.golden import GoldenRequest, read_golden
from exporter.graph.feeds import mode_switches
from exporter.graph.graph_digest import graph_digest
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphSource, SourceGraph, load_source
from exporter.graph.origin import GraphOrigin
from exporter.graph.outside import require_harmless
from exporter.graph.servable import told
from exporter.graph.training_graph import TrainingGraph
from exporter.mapping.batch_statistics import check_batch_statistics
from exporter.mapping.build import Extra, VariableMapping, check_casts, classify_extras
from exporter.mapping.mapping_rules import MappingRules, parse_rules
from exporter.mapping.training_variables import with_training
from exporter.options import ExportFormat, ExportRequest, Verify
from exporter.pipeline.both_sides import read_both
from exporter.pipeline.table_layout import lay_out_tables, map_laid_out
from exporter.pipeline.target import check_permission, require_new, require_own_directory, target_notes
from exporter.pipeline.trainer_graph import training_graph
from exporter.pipeline.updatable import update_notes
from exporter.publish.commit import VersionRule
from exporter.publish.made_from import newest_made_from
from exporter.publish.versions import require_base_path
from exporter.tables.lay_out import TableLayout


def plan_digest(
    request: ExportRequest,
    graph: InferenceGraph,
    mapping: VariableMapping,
    warmup: Iterable[WarmupRequest],
    training: TrainingGraph | None,
) -> str:
    """A lower-case SHA-256.

    Raises:
        MissingAsset: a file of the graph's tables is gone.
    """
    told: dict[str, object] = {
        "graph": _graph(graph),
        "assets": [[asset.file_name, _file(asset.source)] for asset in graph.assets],
        "variables": [
            [s.key, s.tensor.name, s.dtype.label, s.gather_parts, s.scatter_parts] for s in mapping.sources
        ],
        "training": None if training is None else [training.tag, _proto(training.meta_graph)],
        "warmup": [hashlib.sha256(line.record).hexdigest() for line in warmup],
        "no_warmup": request.no_warmup,
        "updates": None if request.updates is None else asdict(request.updates),
        "format": request.format.value,
        "data": request.data.value,
        "verify": request.verify.value,
    }
    if request.min_freq or request.max_age_steps is not None:
        told["admission"] = [request.min_freq, request.max_age_steps]
    if graph.dynamic_tables:
        tables = {variable.key for table in graph.dynamic_tables for variable in table.variables}
        told["tables"] = [[s.key, s.tensor.shape] for s in mapping.sources if s.key in tables]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _graph(graph: InferenceGraph) -> str:
    """Functions are called otherwise each time that a builder runs; without any, the bytes tell."""
    if graph.meta_graph.graph_def.library.function:
        return graph_digest(graph)
    return _proto(graph.meta_graph)


def _proto(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MissingAsset(f"{path} cannot be read", cause=error.strerror or str(error)) from error


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
    version = VersionRule.parse(request.version)
    require_base_path(request.out)
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
    mapping = map_laid_out(graph, found.catalog, layout, found.rules)
    check_casts(mapping, found.rules.casts)
    if not request.allow_batch_statistics:
        switches = mode_switches(graph.meta_graph.graph_def, found.source.feeds)
        check_batch_statistics(graph, found.catalog, mapping.sources, switches)
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
        target_notes=update_notes(graph, mapping) if request.updates else target_notes(request.out),
        origin=found.origin,
        layout=layout,
        golden=read_golden(request.golden) if request.golden else (),
    )
    if is_known:
        require_new(request, checkpoint, planned.digest)
        check_permission(request)
    return planned


def _require_runnable(request: ExportRequest, graph: InferenceGraph) -> None:
    """Refuse what this process would have to run, where it lacks operations, or may not run them."""
    has_state = bool(graph.state.importing)
    if request.updates and (graph.foreign or has_state):
        raise NotServable(
            "a model with state or operations of another library takes no deltas",
            cause=f"it needs {told(graph.foreign)}" if graph.foreign else "only its own restore fills it",
            hint="publish full versions: leave --incr and --updatable out",
        )
    asked = "--verify outputs" if request.verify is Verify.OUTPUTS else "--golden" if request.golden else ""
    if asked:
        require_harmless(graph.outside, asked, is_allowed=request.allow_code)
    if asked and graph.foreign:
        raise UsageError(
            f"{asked} runs the model here, where TensorFlow lacks {told(graph.foreign)}",
            hint=f"leave {asked} out (--verify bytes runs nothing), and ask a server that knows them",
        )


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
