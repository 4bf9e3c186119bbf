"""The steps of a base that takes deltas, which may begin its log at the trainer's newest increment.

A base links the bytes of a full checkpoint, and its first delta has the increments since. Servers answer by
the base until they have applied that delta. Where they already serve newer values than the checkpoint's, that
would be a step back: there the increments are applied on top of the staged variables, which are rewritten.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec.structs import asdict, replace

from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.variables import ShardOrigin, ShardReport
from exporter.bundle.warmup import MAX_RECORDS, parse_request
from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.delta_files import read_tensors, write_delta
from exporter.delta.format import DeltaHeader
from exporter.delta.layered_state import LayeredState
from exporter.delta.layers import fold_whole, merge_changes, needs_folding
from exporter.delta.merge_base import BaseMerger
from exporter.delta.row_reader import served_in
from exporter.errors import CheckpointError, UsageError
from exporter.graph.joined_lookups import join_lookups
from exporter.graph.origin import CodePlaces
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId
from exporter.increments.trained import TrainerVersion
from exporter.jobs.runner import LOCAL
from exporter.mapping.mapping_spec import MappingSpec
from exporter.mapping.served_graph import as_served
from exporter.options import Updates
from exporter.pipeline.full_plan import Plan
from exporter.pipeline.overlay_room import room_of_mapped
from exporter.pipeline.same_graph import SourceFiles
from exporter.pipeline.stage_hot_rows import lay_chosen_rows
from exporter.pipeline.staged import Staged, write_graph
from exporter.pipeline.table_deltas import note_index_written, told_changes
from exporter.pipeline.trainer_state import TrainerState, read_trainer
from exporter.publish.commit import PublishedVersion, reserve_position
from exporter.publish.delta_log import LogBase, log_path
from exporter.publish.manifest import BaseEntry
from exporter.storage.files import writing
from exporter.storage.layout import ASSETS_DIRECTORY, DELTA_NAME, VARIABLES_DIRECTORY, VARIABLES_PREFIX
from exporter.subgraph.make_updatable import (
    IncrementalOptions,
    first_requests,
    make_updatable,
    mapped_counter,
    schema_of,
)


def make_base(staged: Staged, updates: Updates, beyond: int) -> None:
    """Add the incremental subgraph to the staged graph, for the position where the base will be published.

    The position is chosen, and publishing fails if another process uses it first; `staged` gets the graph,
    the mapping, the manifest's entry and the warm-up requests. `updates` are the options of deltas. A base
    whose checkpoint's step is below `beyond` also gets the trainer's increments. Warm-up requests catch up
    with the log first and last, before a server lets the version answer: the requests between may take
    seconds in which more is published. These are for the base's own signatures, and the given ones, or
    generated ones.

    Raises:
        UsageError: there are too many warm-up requests.
        NotServable, GraphError: the graph cannot take deltas.
        AmbiguousRename: rules rename two variables to one name.
        CheckpointError, OSError: the checkpoint changed, or an increment is damaged or cannot be read.
        SchemaChanged: an increment does not fit the checkpoint.
        ManifestError, PositionError, VersionExists: there is no next position.
    """
    planned, request = staged.plan, staged.plan.request
    trained = _find_state(staged, beyond)  # first: it may change the step, which decides the position
    # Now, as the graph has the number; publishing fails if another process uses it meanwhile.
    place = staged.place = reserve_position(request.out, staged.step)
    graph, staged.mapping = as_served(planned.graph, planned.mapping)
    schema, staged.lineage = schema_of(graph), secrets.token_hex(16)
    is_given = request.warmup or request.no_warmup
    requests = planned.warmup if is_given else made_up_requests(graph)
    options = IncrementalOptions(
        lineage=staged.lineage,
        log=place.position,
        position=place.position,
        step=staged.step or 0,
        **asdict(updates),
        warmed=frozenset(request.signature for request in requests),
    )
    scratch = staged.scratch("scratch")
    scratch.mkdir()
    staged.graph = make_updatable(
        join_lookups(graph), options, scratch, room_of_mapped(planned.mapping, request)
    )
    staged.counter = mapped_counter(staged.graph)
    spec = _spec(planned)
    staged.entry = BaseEntry.of(place.position, schema, spec, trained, updates)
    signatures = staged.graph.meta_graph.signature_def
    own = [parse_request(text, signatures) for text in first_requests(schema, signatures)]
    staged.warmup = (*own, *requests, own[0])
    if len(staged.warmup) > MAX_RECORDS:
        room = MAX_RECORDS - len(own) - 1
        raise UsageError(
            f"{len(requests)} warm-up requests; a base that takes deltas has room for {room}",
            hint="leave some out: one of a kind is enough",
        )


def _find_state(staged: Staged, beyond: int) -> TrainerVersion:
    """Return the trainer's state that the base will have: the checkpoint, or the increments on top of it.

    Increments count only if the checkpoint's step is before `beyond`; then `staged.step` and
    `staged.increments` are set. Raises CheckpointError or OSError if the checkpoint changed or an increment
    is damaged, SchemaChanged if one does not fit, GraphError or NotServable if the graph cannot take deltas,
    AmbiguousRename if rules rename two variables to one name.
    """
    planned = staged.plan
    full, step = _trained(planned), planned.catalog.step
    if step is None or beyond <= step or planned.training is not None:
        return full
    schema = schema_of(as_served(planned.graph, planned.mapping)[0])
    trainer = read_trainer(planned.catalog.prefix, _spec(planned), schema, full)
    plan = trainer.plan
    if not plan.is_known or not plan.increments or plan.target.checkpoint != full.checkpoint:
        return full
    staged.step, staged.increments = plan.step, trainer
    return plan.target


def _spec(planned: Plan) -> MappingSpec:
    return MappingSpec.of(planned.graph, planned.rules, planned.mapping, planned.admission)


def _trained(planned: Plan) -> TrainerVersion:
    """Return the checkpoint's state; increments beside it may record the time of its newest event.

    Raises CheckpointChanged if its files were replaced since the plan was made.
    """
    prefix = planned.catalog.prefix
    digest = planned.checkpoint.content_digest()  # of the files whose values are staged, or it raises
    checkpoint = CheckpointId(prefix.name, planned.catalog.step or 0, digest)
    event_time = None
    with suppress(CheckpointError):  # the stage that reads increments reports damage
        event_time = read_history(prefix.parent).newest_event(checkpoint)
    return TrainerVersion.of(checkpoint, None, event_time)


def lay_increments_over(staged: Staged) -> None:
    """Rewrite the staged variables with the trainer's increments on top; do nothing without any.

    Hot rows are appended again. Mapped tables get new files, whose names are in the graph, so that the graph
    is rewritten, too. `staged.variables` gets the new catalog.

    Raises:
        CorruptFile: a staged value, or an increment, is damaged.
        CheckpointError, GraphError, TableFull, SchemaChanged, MappingError, NotFinite, PublishError: see
            errors.py.
        UsageError: a chosen hot row is outside its table, or chosen twice.
        OSError: a file cannot be read.
    """
    trainer, entry = staged.increments, staged.entry
    if trainer is None or entry is None:
        return
    mapped = {v.served_name for each in staged.mapping.sources if each.is_mapped for v in each.variables}
    written = merge_increments(entry, trainer, staged.bundle, staged.scratch("scratch"), mapped)
    why = "increments applied on top of the checkpoint"
    sizes = zip(written.shards, written.shard_sizes, strict=True)
    shards = tuple(ShardReport(None, ShardOrigin.REWRITTEN, why, size, path=path) for path, size in sizes)
    # `rounded` stays: it counts the checkpoint's rows, and increments have few.
    staged.variables = replace(staged.variables, catalog=written, shards=shards, work=(0, 0), job=None)
    lay_chosen_rows(staged)
    if staged.tables.files:
        write_graph(staged)


def merge_increments(
    entry: BaseEntry, trainer: TrainerState, bundle: Path, scratch: Path, mapped: Collection[str] = ()
) -> Catalog:
    """Rewrite a bundle's variables with the trainer's increments on top; return their catalog.

    `entry` is the base's, in its manifest. The increments become one delta in the directory `scratch`, to
    which the old variables are moved; variables in `mapped` (names) get files of their own. Memory is
    bounded.

    Raises CheckpointError or OSError if something is damaged or cannot be read, TableFull or SchemaChanged if
    increments do not fit the base, MappingError or NotFinite if a value does not fit the served dtype,
    PublishError if nothing can be written.
    """
    before, prefix = scratch / "full", scratch / DELTA_NAME
    with writing(bundle):  # a rename: nothing that is staged is copied
        before.mkdir()
        (bundle / VARIABLES_DIRECTORY).rename(before / VARIABLES_DIRECTORY)
    spec, schema, catalog = entry.mapping_spec, entry.schema, read_catalog(before / VARIABLES_PREFIX)
    stored = {found.name: found for each in spec.sources() for found in served_in(catalog, each)}
    full = LayeredState(stored)
    full.check(name for table in spec.dynamic for name in table.keys[:-1])  # rows are placed by the index
    layers = (*trainer.layers(), told_changes(spec, schema, full, trainer, None))
    state = LayeredState(stored, layers)
    if needs_folding(layers, schema):
        layers = fold_whole(layers, schema, full)
    header = DeltaHeader(
        "0" * 32, schema.digest, entry.log, entry.log + 1, trainer.plan.step
    )  # no log reads it
    with writing(scratch):
        write_delta(prefix, schema, header, merge_changes(layers, schema, scratch))
    deltas, task_bytes = [read_tensors(prefix, schema)], LOCAL.task_bytes
    merger = BaseMerger(bundle, spec, schema, stored, deltas, task_bytes=task_bytes, mapped=mapped)
    with writing(bundle), ExitStack() as stack:
        # By threads of this process: workers on other machines cannot see the staged files.
        merger.write(stack, LOCAL, lambda: state)
    return read_catalog(bundle / VARIABLES_PREFIX)


def entry_with_origin(staged: Staged) -> BaseEntry | None:
    """Return the base's entry with digests of its graph's sources, and of its copies of tables' files.

    The entry unchanged without an origin; None if the version takes no deltas. Raises PublishError or
    LfsPointer if a copy cannot be read.
    """
    entry, origin, bundle = staged.entry, staged.plan.origin, staged.bundle
    if entry is None or origin is None:
        return entry
    assets = {each.file_name: bundle / ASSETS_DIRECTORY / each.file_name for each in staged.plan.graph.assets}
    with writing(bundle):
        return replace(entry, origin=origin.with_graph(staged.plan.graph, assets))


def note_sources(planned: Plan, published: PublishedVersion, entry: BaseEntry) -> None:
    """Write caches beside a new log: the paths of its graph's files, and that tables' indexes are verified.

    `published` is the log's base, `entry` the base's entry in the manifest. A failure to write them is
    ignored.
    """
    log = log_path(planned.request.out, entry.log)
    places = {asset.file_name: asset.source for asset in planned.graph.assets}
    SourceFiles(places, code=CodePlaces.of(planned.source.code)).save(log)
    note_index_written(LogBase(published.path, published.manifest, entry), log)
