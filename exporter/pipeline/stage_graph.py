"""The step that writes the graph, and the step that prepares a plain version for it."""

from __future__ import annotations

import os

from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.mapped_tables import NOTHING_MAPPED, MappedTables
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import mapped_files
from exporter.bundle.warmup import WarmupRequest
from exporter.errors import AccessRefused, TensorFlowNeeded
from exporter.graph.joined_lookups import join_lookups
from exporter.graph.outside import require_harmless
from exporter.graph.table_marks import mark_tables
from exporter.mapping.served_graph import as_served
from exporter.pipeline.full_plan import Plan, served_at
from exporter.pipeline.overlay_room import room_of_mapped
from exporter.pipeline.staged import Staged
from exporter.publish.commit import ReservedPosition, reserve_position
from exporter.publish.manifest import MappedRecord, MappedTable, UnmappedTable


def name_plain_version(staged: Staged) -> None:
    """Decide a plain version's tables by keys and warm-up; reserve its number if paths of mapped tables need
    it.
    """
    planned = staged.plan
    mapped = [source for source in staged.mapping.sources if source.is_mapped]
    apart = [variable.node for source in mapped for variable in source.variables]
    staged.graph = join_lookups(mark_tables(staged.graph), apart)
    staged.warmup = _plain_warmup(planned)
    if any(source.is_mapped for source in staged.mapping.sources) and planned.version.choice == "position":
        staged.place = reserve_position(planned.request.out, planned.catalog.step)


def _plain_warmup(planned: Plan) -> tuple[WarmupRequest, ...]:
    """The given warm-up requests; without any, generated ones if tables are mapped: first reads of these are
    slow.
    """
    request = planned.request
    if request.warmup or request.no_warmup or not request.map_tables:
        return planned.warmup
    try:
        # Requests run here while they are made.
        require_harmless(planned.graph.outside, "warm-up", is_allowed=request.allows("code"))
        return made_up_requests(as_served(planned.graph, planned.mapping)[0])
    except (AccessRefused, ImportError, TensorFlowNeeded):  # a plain export of a given graph needs no warm-up
        return ()


def write_graph(staged: Staged) -> None:
    """Write `saved_model.pb` and assets; if tables are mapped, with the paths of the staged shards."""
    files = mapped_files(staged.plan.mapping, staged.variables.catalog)
    staged.tables = NOTHING_MAPPED
    if files:
        place = staged.place
        number = place.position if isinstance(place, ReservedPosition) else place.choice
        directory = served_at(staged.plan.request) / str(number)
        variables = (v for source in staged.plan.mapping.sources for v in source.variables)
        hot = {v.node: staged.hot[v.served_name] for v in variables if v.served_name in staged.hot}
        staged.tables = MappedTables.of(directory, files, staged.counter, hot)
    plan = staged.plan
    staged.oldest_server = write_saved_model(
        staged.graph, staged.mapping, staged.bundle, plan.training, staged.tables, plan.server
    )
    if files:
        staged.tables.write_id(staged.bundle)


def mapped_record(staged: Staged) -> MappedRecord | None:
    """Return the manifest's record of the mapped tables, and of those that could not be mapped.

    None if mapping is not asked for.
    """
    if not staged.plan.request.map_tables:
        return None
    written = {shard.path.name: shard.bytes_ for shard in staged.variables.shards}
    overlays = room_of_mapped(staged.plan.mapping, staged.plan.request)
    mapped = [
        MappedTable(
            variable.served_name,
            file,
            written[file],
            overlays.get(variable.node),
            hot.rows if (hot := staged.tables.hot.get(variable.node)) else 0,
            hot.file if hot else "",
        )
        for source in staged.plan.mapping.sources
        for variable in source.variables
        if (file := staged.tables.files.get(variable.node)) is not None
    ]
    restored = [UnmappedTable(each.key, each.bytes_, each.why) for each in staged.plan.unmapped]
    # A path need not be UTF-8.
    place = os.fsencode(staged.tables.directory).decode(errors="backslashreplace") if mapped else ""
    return MappedRecord(staged.tables.id, place, tuple(mapped), tuple(restored))
