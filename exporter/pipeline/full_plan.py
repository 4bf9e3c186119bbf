"""Plan a full export: the version's contents, and the source of each value. Nothing is written."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.bundle.mapped_tables import Unmapped, choose_mapped
from exporter.bundle.tables_in_8_bits import choose_for_8_bits
from exporter.bundle.variables import ShardPlan, plan_shards, size_of_work
from exporter.bundle.warmup import WarmupRequest, read_requests
from exporter.catalog import Catalog, Extra
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.admission import Admission
from exporter.checkpoint.identity import Identity
from exporter.errors import (
    ManifestError,
    MissingAsset,
    NotServable,
    NotUpdatable,
    UnknownTensor,
    UsageError,
)
from exporter.graph.feeds import mode_switches
from exporter.graph.graph_digest import graph_digest
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphSource, SourceGraph, load_source
from exporter.graph.old_servers import require_had, text_of
from exporter.graph.origin import GraphOrigin
from exporter.graph.outside import require_harmless
from exporter.graph.servable import by_library
from exporter.graph.training_graph import TrainingGraph
from exporter.graph.training_mode import check_dropout
from exporter.mapping.build import VariableMapping, check_casts, check_rules
from exporter.mapping.extras import classify_extras
from exporter.mapping.mapping_rules import MappingRules, parse_admission, parse_rules
from exporter.mapping.served_graph import as_served
from exporter.mapping.training_variables import check_batch_statistics, with_training
from exporter.newer_python import sha256_of
from exporter.options import DataMode, ExportFormat, ExportRequest, Verify, digest_fields, require_local
from exporter.pipeline.both_sides import advised, read_both
from exporter.pipeline.hot_files import HotChoice, choose_hot
from exporter.pipeline.table_layout import lay_out_tables, map_laid_out
from exporter.pipeline.trainer_graph import training_graph
from exporter.publish.commit import VersionRule
from exporter.publish.delta_log import LogBase
from exporter.publish.manifest import overwritten_notes
from exporter.publish.model import PublishedAlready, newest_made_from
from exporter.publish.permission import Permission
from exporter.publish.versions import newest_version, read_manifest, require_base_path
from exporter.storage import mirror
from exporter.storage.files import regular_file
from exporter.storage.local_paths import quoted, require_no_pattern
from exporter.tables.lay_out import TableLayout
from exporter.verify.golden import GoldenRequest, read_golden
from exporter.wire.stock_ops import Version, version_of

_MAPS: Version = (2, 4)
"""The oldest known TensorFlow whose `ImmutableConst` maps a file."""


class Plan(Struct, frozen=True, dict=True):
    """The plan of an export; nothing has been written yet."""

    request: ExportRequest
    catalog: Catalog
    checkpoint: Identity
    source: SourceGraph
    graph: InferenceGraph
    mapping: VariableMapping
    version: VersionRule
    rules: MappingRules
    admission: Admission
    warmup: tuple[WarmupRequest, ...] = ()
    probes: tuple[WarmupRequest, ...] = ()
    training: TrainingGraph | None = None
    target_notes: tuple[str, ...] = ()
    origin: GraphOrigin | None = None
    layout: TableLayout | None = None
    golden: tuple[GoldenRequest, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    hot: tuple[HotChoice, ...] = ()
    overwritten: tuple[str, ...] = ()  # a warning if the trainer wrote into files of the newest version

    def __repr__(self) -> str:
        size = f"{len(self.mapping.sources)} variables"
        return f"Plan({str(self.catalog.prefix)!r} to {str(self.request.out)!r}, {size})"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people: on checkpoint, graph, mapping, target and overwritten files, in this order."""
        own = (*self.catalog.notes, *self.graph.notes, *self.mapping.notes)
        return (*own, *self.target_notes, *self.overwritten)

    @property
    def data(self) -> DataMode:
        """The requested way to store values, but COMPACT for AUTO if the trainer overwrites linked files.

        The trainer does if it has written into a file to which the newest version has a link.
        """
        is_auto = self.request.data is DataMode.AUTO
        return DataMode.COMPACT if is_auto and self.overwritten else self.request.data

    @cached_property
    def digest(self) -> str:
        """A SHA-256 (hex) of options, graph and mapping, which differs between plans for the same checkpoint.

        Raises MissingAsset if a file of the graph cannot be read, LfsPointer if it is a Git LFS pointer.
        """
        return _digest(self)

    @cached_property
    def work(self) -> tuple[int, int]:
        """The number of tasks that write values, and the bytes that they read; (0, 0) for archives.

        Both are estimates for indexes of tables. Raises MappingError if values would have to move between
        parts that are not ranges of rows, UsageError if tasks are so small that there would be too many
        shards.
        """
        if not self.catalog.is_bundle:
            return 0, 0
        most = self.request.jobs.task_bytes
        tasks, size = size_of_work(self.mapping, self.request.out, most)
        if self.layout is not None:
            more, read = self.layout.index_job(self.admission, most).size_of_work
            tasks, size = tasks + more, size + read
        return tasks, size

    @cached_property
    def shards(self) -> list[ShardPlan]:
        """The checkpoint's shards that the version links or copies; none if the checkpoint is archives.

        Raises MappingError as `work`.
        """
        if not self.catalog.is_bundle:
            return []
        own = set(self.catalog.shards)  # the shards with indexes of tables by keys do not exist yet
        planned = plan_shards(self.mapping, self.request.out, self.data)
        return [shard for shard in planned if shard.source in own]

    @property
    def server(self) -> Version | None:
        """(major, minor) of the TensorFlow of the servers for which the version is made; None: the newest."""
        return server_of(self.request)

    @property
    def ignored(self) -> tuple[Extra, ...]:
        """The checkpoint's tensors that are not served, each with its probable purpose.

        They are of the plan's own catalog: the mapping's may lack them.
        """
        served = {source.tensor.name for source in self.mapping.sources}
        if self.layout is not None:
            served |= self.layout.served_names
        return tuple(classify_extras(self.catalog, served))


def plan(request: ExportRequest, load: GraphSource = load_source) -> Plan:
    """Read the checkpoint and the graph, and decide the source of every variable; nothing is written.

    `load` reads the graph. Permission to publish is checked.

    Raises:
        PublishedAlready: the checkpoint is published by this plan, and `again` is not asked for.
        ModelHeld, ChainEnds: a hold, or a log that takes deltas, forbids the publication.
        TargetNotWritable: the target, or a parent, is a file or a broken symbolic link.
        UsageError, CheckpointError, GraphError, MappingError, ManifestError, TensorFlowNeeded: see errors.py.
        OSError: the trainer's directory cannot be listed, or a file of hot rows cannot be read.
    """
    planned, is_known = made_plan(request, load)
    if is_known:
        require_new(request, planned.checkpoint, planned.digest)
        permission(request).check(request.out, takes_deltas=request.updates is not None)
    return planned


def made_plan(request: ExportRequest, load: GraphSource) -> tuple[Plan, bool]:
    """Plan as `plan`, even if it is published already; also return whether any plan published the checkpoint.

    `load` reads the graph.
    Permission to publish is checked only if none did. With `again` in the request, it is always checked, and
    the second value is False.

    Raises:
        ModelHeld, ChainEnds: a hold, or a log that takes deltas, forbids the publication.
        TargetNotWritable: the target, or a parent, is a file or a broken symbolic link.
        UsageError, CheckpointError, GraphError, MappingError, ManifestError, TensorFlowNeeded: see errors.py.
        OSError: the trainer's directory cannot be listed, or a file of hot rows cannot be read.
    """
    require_local(request)
    version = VersionRule.parse(request.version)
    require_base_path(request.out)
    if not mirror.is_remote(request.out):
        require_no_pattern("--out", request.out)  # TensorFlow lists files by patterns: see `MatchingFiles`
    _require_consistent(request)
    rules, admission = parse_rules(request), parse_admission(request)
    catalog = open_checkpoint(request.ckpt_dir)
    checkpoint = Identity.of(catalog)
    is_known = not request.again and newest_made_from(request.out, checkpoint.digest) is not None
    if not is_known:  # early, as a graph takes long to load; of a known checkpoint `plan` first compares
        permission(request).check(request.out, takes_deltas=request.updates is not None)
    try:
        found = read_both(request, rules, catalog, checkpoint, load)
    except UnknownTensor as error:
        if isinstance(request.model, str):
            error.advise(f"list the graph's tensors: export-model inspect {quoted(request.model)} --tensors")
        raise
    _require_own_directory(request.out, found.catalog)
    _require_runnable(request, found.graph)
    graph, layout = lay_out_tables(
        found.graph, found.catalog, found.rules, admission, request.table_head_room
    )
    with advised(request, found.catalog):
        mapping = map_laid_out(graph, found.catalog, layout, found.rules)
    check_casts(mapping, found.rules.casts)
    check_rules(request, graph, found.catalog, mapping)
    if not request.allows("batch-statistics"):
        switches = mode_switches(graph.meta_graph.graph_def, found.source.feeds)
        check_batch_statistics(graph, found.catalog, mapping.sources, switches)
    if not request.allows("dropout"):
        check_dropout(graph, found.source.feeds)
    # Before the choice of mapped tables: their bytes as stored decide.
    in_8_bits = choose_for_8_bits(graph, mapping)
    graph, mapping = in_8_bits.graph, in_8_bits.mapping
    unmapped: tuple[Unmapped, ...] = ()
    if request.map_tables:
        indexes = {v.key for table in graph.dynamic_tables for v in table.variables[:-1]}
        chosen = choose_mapped(graph, mapping, takes_deltas=request.updates is not None, indexes=indexes)
        graph, mapping, unmapped = chosen.graph, chosen.mapping, chosen.unmapped
    hot = choose_hot(request, graph, mapping, unmapped, layout)
    if (server := server_of(request)) is not None:
        require_had(graph.meta_graph.graph_def, server)
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
        admission=admission,
        warmup=read_requests(request.warmup, graph.meta_graph) if request.warmup else (),
        probes=read_requests(request.verify_inputs, graph.meta_graph) if request.verify_inputs else (),
        training=training,
        target_notes=_base_notes(request, graph, mapping) if request.updates else _target_notes(request.out),
        origin=found.origin,
        layout=layout,
        golden=read_golden(request.golden) if request.golden else (),
        unmapped=unmapped,
        hot=hot,
        overwritten=_overwritten(request.out),
    )
    return planned, is_known


def _overwritten(model: Path) -> tuple[str, ...]:
    """Return a warning, in a tuple, if the trainer wrote into files that a model's newest version links to.

    () if it did not, there is no version, or its manifest is damaged.
    """
    newest = newest_version(model)
    if newest is not None and newest.has_manifest:
        with suppress(ManifestError):
            return overwritten_notes(read_manifest(newest.path), newest.path)
    return ()


def _require_consistent(request: ExportRequest) -> None:
    """Raise UsageError for options of a request that contradict each other."""
    if request.plain and request.updates:
        raise UsageError(
            "--despite deltas: this version takes deltas",
            hint="leave out --despite deltas, or --incr and --new-base",
        )
    if request.updates and request.version:
        raise UsageError("a base that takes deltas is named by its position", hint="leave --version out")
    if request.updates and request.format is not ExportFormat.SAVED_MODEL:
        raise UsageError(f"--format {request.format.value}: only a SavedModel takes deltas")
    if request.golden and request.format is ExportFormat.METAGRAPH:
        raise UsageError("--golden asks a SavedModel", hint="leave out --golden, or --format metagraph")
    if request.warmup and request.no_warmup:
        raise UsageError("--requests FILE and --requests none: requests, or none", hint="leave one out")
    if request.map_tables:
        _require_mappable(request)


def server_of(request: ExportRequest) -> Version | None:
    """Return (major, minor) of the servers' TensorFlow for which a version is made; None: the newest."""
    return version_of(request.for_server) if request.for_server else None


def _require_mappable(request: ExportRequest) -> None:
    """Raise UsageError for options that contradict mapped tables, whose paths are part of the graph."""
    if request.overlay_rows is not None and not request.updates:
        raise UsageError(
            "--overlay-rows: this version takes no deltas, and has no overlay",
            hint="leave it out, or add --incr or --new-base",
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
    server = server_of(request)
    if server is not None and server < _MAPS:
        raise UsageError(
            f"--map-tables --for-server {request.for_server}: such servers copy a table that they are to map",
            hint=f"leave --map-tables out; servers of TensorFlow {text_of(_MAPS)} map tables",
        )
    if request.hot_rows and mirror.is_remote(request.out):
        raise UsageError(
            f"--hot-rows: rows are laid out in files, and {request.out} is in an object store",
            hint=f"publish into a directory, and push it: export-model push DIR {quoted(request.out)}",
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
    """Refuse a graph that cannot take deltas, or may not be run or imported here, if the request needs that.

    Raises:
        NotServable: deltas are asked for, and the model has state or operations of another library.
        AccessRefused: the graph does more than compute and read, and code is not allowed.
        UsageError: the model is to be run here, where TensorFlow lacks its operations.
    """
    has_state = bool(graph.state.importing)
    if request.updates and (graph.foreign or has_state):
        raise NotServable(
            "a model with state or operations of another library takes no deltas",
            cause=f"it needs {by_library(graph.foreign)}"
            if graph.foreign
            else "only its own restore fills it",
            hint="publish full versions: leave --incr and --new-base out",
        )
    asked = "--verify outputs" if request.verify is Verify.OUTPUTS else "--golden" if request.golden else ""
    if imported := asked or ("--new-base always" if request.updates else ""):
        require_harmless(graph.outside, imported, is_allowed=request.allows("code"))
    if asked and graph.foreign:
        raise UsageError(
            f"{asked} runs the model here, where TensorFlow lacks {by_library(graph.foreign)}",
            hint=f"leave {asked} out (--verify bytes runs nothing), and ask a server that knows them",
        )


def _require_own_directory(model: Path, catalog: Catalog) -> None:
    """Raise UsageError if the model's directory holds the checkpoint, unless that consists of archives.

    Trainer and exporter remove files by different rules.
    """
    directory = catalog.prefix.parent
    if catalog.is_bundle and model.is_dir() and model.samefile(directory):
        raise UsageError(
            f"--out {model} is the directory of the checkpoint",
            cause="versions, deltas and unfinished work would lie among the trainer's files",
            hint=f"name a directory of the model's own: --out {quoted(model / 'served')}",
        )


def _target_notes(model: Path) -> tuple[str, ...]:
    """Return a warning, in a tuple, if a plain version ends the deltas of the newest version; else ().

    () also if its manifest is damaged.
    """
    newest = newest_version(model)
    if newest is None:
        return ()
    with suppress(NotUpdatable, ManifestError):
        LogBase.read(newest.path)
        return (
            f"{newest.path} takes deltas, what replaces it does not: --new-base always publishes one that "
            "does",
        )
    return ()


_LARGEST_TABLE_BYTES = 64 << 20  # each delta may hold all of a lookup table, which servers read in one piece


def _base_notes(request: ExportRequest, graph: InferenceGraph, mapping: VariableMapping) -> tuple[str, ...]:
    """Return notes for people on the deltas that a base will take.

    Raises NotServable for a lookup table of more than 64 MiB, GraphError if the graph uses a variable in a
    way that deltas cannot update.
    """
    from exporter.subgraph.make_updatable import schema_of  # plain versions need none of it

    _refuse_large_tables(mapping)
    notes = schema_of(as_served(graph, mapping)[0]).notes
    if request.updates and request.updates.finite and not request.verify.includes(Verify.BYTES):
        return (*notes, "--add nan-check checks deltas; with --verify bytes the base's own values, too")
    return notes


def _refuse_large_tables(mapping: VariableMapping) -> None:
    """Raise NotServable for a lookup table of more than 64 MiB: deltas have a changed table as a whole."""
    sizes = {source.key: source.tensor.bytes_ for source in mapping.sources if not source.variables}
    for table in mapping.tables:
        size = sizes[table.keys] + sizes[table.values]
        if size > _LARGEST_TABLE_BYTES:
            raise NotServable(
                f"lookup table {table.node!r} holds {size} bytes; deltas carry up to {_LARGEST_TABLE_BYTES}",
                cause="each delta after a checkpoint in which it changed would hold all of them",
                hint="publish full versions: leave --incr or --new-base out; or keep vectors in a variable "
                "and only row numbers in the table",
            )


def require_new(request: ExportRequest, checkpoint: Identity, digest: str) -> None:
    """Raise PublishedAlready if this checkpoint is published by a plan of this digest, as the request asks.

    That is: the version takes deltas if the request is for a base, and else not; and it has the number that
    `--version` names, if it names one. Raises ManifestError if the model cannot be listed or the matching
    manifest is damaged, CheckpointError if a manifest is a Git LFS pointer or cannot be fetched.
    """
    made = newest_made_from(request.out, checkpoint.digest)
    choice = VersionRule.parse(request.version).choice
    number = choice if isinstance(choice, int) else None
    takes_deltas = request.updates is not None
    if made is not None and made.is_by(digest, takes_deltas=takes_deltas, number=number):
        raise PublishedAlready(made)


def permission(request: ExportRequest) -> Permission:
    """Return the protections that the request overrides: a hold, and a log that a plain version would end."""
    return Permission(request.despite_hold, request.plain)


def _digest(planned: Plan) -> str:
    request, graph, mapping, training = planned.request, planned.graph, planned.mapping, planned.training
    # Names and forms must stay: with another digest, the same command publishes a checkpoint again.
    told: dict[str, object] = digest_fields(request) | {
        "graph": _graph(graph),
        "assets": [[asset.file_name, _file(asset.source)] for asset in graph.assets],
        "variables": [
            [s.key, s.tensor.name, s.dtype.label, s.gather_parts, s.scatter_parts] for s in mapping.sources
        ],
        "training": None if training is None else [training.tag, _proto(training.meta_graph)],
        "warmup": [hashlib.sha256(line.record).hexdigest() for line in planned.warmup],
    }
    if request.min_freq or request.max_age_steps is not None:  # in this form since the first release
        told["admission"] = [request.min_freq, request.max_age_steps]
    if graph.dynamic_tables:
        tables = {variable.key for table in graph.dynamic_tables for variable in table.variables}
        told["tables"] = [[s.key, s.tensor.shape] for s in mapping.sources if s.key in tables]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _graph(graph: InferenceGraph) -> str:
    """Return a digest (hex) of a graph, which is independent of names that differ between runs."""
    graph_def = graph.meta_graph.graph_def
    shared = (node.attr[_SHARED].s for node in graph_def.node if _SHARED in node.attr)
    if graph_def.library.function or any(map(_UUID.search, shared)):
        return graph_digest(graph)
    return _proto(graph.meta_graph)


# The name by which a session shares a table: Keras' lookups have a random one.
_SHARED, _UUID = "shared_name", re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _proto(message: Any) -> str:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def _file(path: Path) -> str:
    """Return the SHA-256 of a graph's file in hex.

    Raises MissingAsset if it cannot be read, LfsPointer if it is a Git LFS pointer.
    """
    try:
        with regular_file(path) as file:
            return sha256_of(file)
    except OSError as error:
        raise MissingAsset(f"{path} cannot be read", cause=error.strerror or str(error)) from error


def served_at(request: ExportRequest) -> Path:
    """Return the model's directory as servers see it: `--served-at`, by default `--out` made absolute."""
    return Path(request.served_at) if request.served_at is not None else request.out.absolute()
