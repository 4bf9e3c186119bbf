"""A full export in progress: the values that its steps pass to each other, and the steps.

They write `variables/`, write the graph, and check what is staged before it is published; hot rows are
appended by `exporter.pipeline.stage_hot_rows`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.hot_rows import HotTable
from exporter.bundle.made_up_requests import made_up_requests
from exporter.bundle.mapped_tables import NOTHING_MAPPED, MappedTables
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import VariablesReport, as_rewritten, mapped_files, write_variables
from exporter.bundle.warmup import WarmupRequest
from exporter.checkpoint.tensor_bundle import write_bundle
from exporter.errors import AccessRefused, LinkRefused, TensorFlowNeeded
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.joined_lookups import join_lookups
from exporter.graph.lookup_tables import table_geometries
from exporter.graph.outside import require_harmless
from exporter.graph.table_marks import mark_tables
from exporter.jobs.runner import Runner
from exporter.mapping.build import VariableMapping
from exporter.mapping.served_graph import as_served
from exporter.options import DataMode, Verify
from exporter.pipeline.full_plan import Plan, served_at
from exporter.pipeline.overlay_room import room_of_mapped
from exporter.pipeline.table_layout import write_tables
from exporter.publish.commit import ReservedPosition, Staging, VersionRule, reserve_position
from exporter.publish.finite import require_base_finite
from exporter.publish.manifest import BaseEntry, MappedRecord, MappedTable, UnmappedTable, tensor_entries
from exporter.publish.versions import is_trusting
from exporter.terminal.progress import ProgressFactory
from exporter.verify.outputs import Difference, Probe, Running, compare_outputs, require_golden
from exporter.verify.table_index import verify_tables
from exporter.verify.version_files import verify_bytes, verify_files
from exporter.wire.stock_ops import OLDEST, Version

if TYPE_CHECKING:
    from exporter.pipeline.trainer_state import TrainerState


class Staged(Struct):
    """A version that is being staged. Steps read fields that earlier ones set, and set fields for later ones.

    `plan` follows the values: its mapping refers to the checkpoint, then to a bundle made from an archive,
    and to indexes of tables. `graph` and `mapping` are the ones to publish: in a base that takes deltas, with
    the incremental subgraph, whose node `counter` counts mapped tables. `jobs` are closed after publication,
    so that until then a second run finds completed tasks. `increments` are those that staged values do not
    include yet. `hot` are the tables with hot rows, by their names as served.
    """

    plan: Plan
    staging: Staging
    jobs: ExitStack
    progress: ProgressFactory
    graph: InferenceGraph
    mapping: VariableMapping
    variables: VariablesReport
    place: VersionRule | ReservedPosition
    step: int | None
    warmup: tuple[WarmupRequest, ...]
    counter: str = ""
    tables: MappedTables = NOTHING_MAPPED
    hot: Mapping[str, HotTable] = {}
    oldest_server: Version = OLDEST
    entry: BaseEntry | None = None
    lineage: str | None = None
    increments: TrainerState | None = None
    differences: tuple[Difference, ...] = ()

    @classmethod
    def of(cls, planned: Plan, staging: Staging, jobs: ExitStack, progress: ProgressFactory) -> Staged:
        """Return the state before the first step: nothing is written, and the version has no increments.

        Jobs of later steps are pushed on `jobs`, to be closed by the caller after publication.
        """
        graph, mapping, step = planned.graph, planned.mapping, planned.catalog.step
        nothing = VariablesReport(mapping.catalog, ())
        return cls(planned, staging, jobs, progress, graph, mapping, nothing, planned.version, step, ())

    @property
    def bundle(self) -> Path:
        """The directory that becomes the version."""
        return self.staging.path

    def scratch(self, name: str) -> Path:
        """Return the path of `name` beside the bundle, for scratch files; it is removed with the staging.

        Nothing is made there.
        """
        return self.staging.path.with_name(name)


Step: TypeAlias = Callable[[Staged], object]
"""A function that writes into the bundle and sets fields for later steps, or raises."""


def write_values(staged: Staged) -> None:
    """Write `variables/` and set `staged.variables`, `staged.mapping` and the mapping of `staged.plan`.

    A checkpoint that is not a tensor bundle is first converted into one; indexes of tables by keys are built.
    Jobs that wrote are pushed on `staged.jobs`.

    Raises:
        CheckpointChanged: the trainer removed or replaced files since the plan was made.
        LinkRefused: links are asked for, and are impossible, or the checkpoint is not a tensor bundle.
        CheckpointError, MappingError, NotFinite, EngineFailed, PublishError: see errors.py.
        UsageError: tasks are so small that there would be too many shards, or the engine is unknown.
    """
    request, catalog = staged.plan.request, staged.plan.catalog
    data, runner = (
        staged.plan.data,
        Runner.of(request.jobs, request.out, resumes=not is_trusting(request.out)),
    )
    indexer = runner
    if not catalog.is_bundle:
        if data is DataMode.LINK:
            raise LinkRefused(f"{catalog.prefix} is not a tensor bundle: its bytes have to be rewritten")
        _convert(staged)
        # The new bundle is only on this machine, so its keys are indexed here, too.
        data, indexer = DataMode.AUTO, Runner(task_bytes=runner.task_bytes)
    index_tasks, index_bytes = _write_indexes(staged, indexer)
    # Indexes first: they are sources of this mapping, linked like the checkpoint's own shards.
    with staged.progress("variables", staged.plan.mapping.bytes_) as bar:
        made = staged.bundle.parent
        variables = write_variables(
            staged.plan.mapping, staged.bundle, data=data, runner=runner, made=made, progress=bar
        )
    if variables.job is not None:
        staged.jobs.push(variables.job)
    tasks, size = variables.work
    variables = replace(variables, work=(tasks + index_tasks, size + index_bytes))
    if not catalog.is_bundle:
        variables = as_rewritten(variables, catalog.prefix, catalog.family)
    staged.variables, staged.mapping = variables, staged.plan.mapping
    # After the last read: a shard that was replaced while it was linked or copied is not published.
    staged.plan.checkpoint.require_same_files()


def _write_indexes(staged: Staged, runner: Runner) -> tuple[int, int]:
    """Write the indexes of dynamic tables by tasks; return the number of tasks, and of bytes that they read.

    (0, 0) if there are no such tables. The number of bytes is an estimate. The mapping of `staged.plan` then
    has the indexes as sources; the job is pushed on `staged.jobs`. Raises CheckpointError if tables are
    damaged, PublishError or EngineFailed if the indexes cannot be written.
    """
    layout, admission = staged.plan.layout, staged.plan.admission
    if layout is None:
        return 0, 0
    work = layout.index_job(admission, runner.task_bytes).size_of_work
    with staged.progress("indexes", work[1]) as bar:
        tables = write_tables(layout, staged.plan.mapping, admission, staged.scratch("tables"), runner, bar)
    staged.jobs.push(tables.job)
    tables.job.keep_until_stored(staged.plan.request.out)
    staged.plan = replace(staged.plan, mapping=tables.mapping)
    return work


def _convert(staged: Staged) -> None:
    """Write the tensors that the mapping needs from an archive into a bundle beside the staged one.

    The mapping and layout of `staged.plan` then refer to that bundle. Raises CheckpointError if the archive
    is damaged or cannot be read, PublishError if the bundle cannot be written.
    """
    mapping, layout = staged.plan.mapping, staged.plan.layout
    laid_out = layout.shapes if layout is not None else {}
    # By name: one tensor may be served with a cast, and kept without it for a training graph.
    needed = {item.tensor.name: item.tensor for item in mapping.sources if item.tensor.name not in laid_out}
    if layout is not None:
        needed |= {name: staged.plan.catalog.tensors[name] for name in layout.stored_names}
    with staged.progress("read", sum(ref.bytes_ for ref in needed.values())) as bar:
        prefix = staged.scratch("source") / "model.ckpt"
        catalog = write_bundle(staged.plan.catalog, needed.values(), prefix, bar)
    if layout is not None:
        layout = layout.with_source(catalog)
        catalog = layout.catalog
    staged.plan = replace(staged.plan, mapping=mapping.over(catalog), layout=layout)


def name_plain_version(staged: Staged) -> None:
    """Set `staged.graph` and `staged.warmup` of a plain version, which takes no deltas.

    If the paths of mapped tables need its number, `staged.place` is set to the next position; nothing is
    reserved. Raises ManifestError, PositionError or VersionExists if there is no next position, MappingError
    or GraphError if warm-up requests cannot be made for the graph.
    """
    planned = staged.plan
    mapped = [source for source in staged.mapping.sources if source.is_mapped]
    apart = [variable.node for source in mapped for variable in source.variables]
    staged.graph = join_lookups(mark_tables(staged.graph), apart)
    staged.warmup = _plain_warmup(planned)
    if any(source.is_mapped for source in staged.mapping.sources) and planned.version.choice == "position":
        staged.place = reserve_position(planned.request.out, planned.catalog.step)


def _plain_warmup(planned: Plan) -> tuple[WarmupRequest, ...]:
    """Return the given warm-up requests; without any, generated ones if tables are mapped.

    First reads of mapped tables are slow. () if requests are refused by option, or cannot be generated here:
    the graph may not be run, or TensorFlow is missing. Raises MappingError if a variable that is to be cast
    is used in a way that forbids it, GraphError if an input has an unknown dtype.
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
    """Write `saved_model.pb` and assets, and set `staged.tables` and `staged.oldest_server`.

    If tables are mapped, the graph has the paths that the shards will have, and their id is written, too.
    Raises MappingError, NotServable or GraphError if the graph cannot be written with these variables,
    LfsPointer if an asset is a Git LFS pointer, PublishError if files cannot be written.
    """
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
    """Return the manifest's record of the mapped tables, and of tables that could not be mapped.

    None if mapping is not asked for. To be called after `write_graph`.
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


def check_staged(staged: Staged) -> None:
    """Compare files, bytes, indexes of tables and outputs with the checkpoint, to the extent of `--verify`.

    Differences of outputs within the tolerance are recorded in `staged.differences`.

    Raises:
        VerificationError: something differs, or the graph cannot be run.
        AccessRefused, TensorFlowNeeded: outputs are to be compared, and the graph may not or cannot be run.
        NotServable: outputs are to be compared, and a function of the source graph calls itself.
        MissingAsset: outputs are to be compared, and a file of the source graph's tables is missing.
        CheckpointError, OSError: a file cannot be read; CheckpointChanged if the trainer removed it
            meanwhile.
        UsageError, EngineFailed: the engine is unknown, or failed.
    """
    planned, catalog = staged.plan, staged.variables.catalog
    request, layout = planned.request, planned.layout
    if request.verify.includes(Verify.FILES):
        verify_files(staged.bundle, tensor_entries(catalog))
    if request.verify.includes(Verify.BYTES):
        with staged.progress("verify", catalog.bytes_) as bar:
            verify_bytes(catalog, runner=Runner.of(request.jobs), progress=bar)
    if layout is not None and request.verify is not Verify.NONE:
        verify_tables(layout, catalog, is_filtered=not planned.admission.is_everyone)
    if request.verify.includes(Verify.OUTPUTS):
        staged.differences = compare_outputs(
            planned.source,
            planned.mapping,
            staged.bundle,
            requests=[Probe(each.signature, each.inputs) for each in planned.probes or planned.warmup],
            tolerance=request.tolerance,
            traced_rows=planned.graph.traced_rows,
            tables=table_geometries(planned.graph),
            running=_running(staged),
        )


def check_published(staged: Staged) -> None:
    """Check the values that servers get, including increments: finite, and as golden requests expect.

    They are checked for NaN and infinity only if a base refuses these in deltas and `--verify` includes
    bytes, and by golden requests only if some are given. Raises NotFinite or VerificationError if they do not
    pass, CheckpointError or OSError if they cannot be read, TensorFlowNeeded if golden requests cannot be
    run.
    """
    request = staged.plan.request
    if request.updates and request.updates.finite and request.verify.includes(Verify.BYTES):
        require_base_finite(staged.variables.catalog)
    require_golden(staged.bundle, staged.plan.golden, _running(staged))


def _running(staged: Staged) -> Running:
    """Return the limits within which graphs are run to verify the staged version.

    They run in this process, without limits, if code is allowed or operations of another library are loaded.
    """
    planned = staged.plan
    trusted = planned.source.trust.code or bool(planned.graph.foreign)
    return Running(staged.variables.catalog.bytes_, trusted)
