"""Merge a base and its deltas into a new base of the same log.

Tasks write the base's variables with the deltas applied on top, and read each byte once. The graph stays, but
for the position that its variables begin with. Servers load the new base beside the old one; deltas that lead
on from its position fit both.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.mapped_tables import move_tries
from exporter.catalog import Catalog, SliceRef, SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, encode_index, index_path, read_catalog, shard_path
from exporter.delta.delta_files import DeltaTensors
from exporter.delta.format import Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.merge_deltas import copied_value, newest_value
from exporter.delta.newest_rows import Merge, NewestRows, table_sections
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.delta.spans import Position, Span
from exporter.errors import CorruptFile, ManifestError
from exporter.graph.saved_model import read_saved_model
from exporter.jobs.runner import Runner
from exporter.jobs.shard_job import Place, Placed, ShardJob, Sources, Stored, stored_runs, tensors_of
from exporter.jobs.task import Range
from exporter.mapping.mapping_spec import MappingSpec
from exporter.options import LOCALLY, Jobs
from exporter.pipeline.log_maintenance import past_given_up, position_of_merger, runner_for, undisturbed
from exporter.pipeline.newest_base import row_blocks
from exporter.pipeline.restoration import approved_by_canary
from exporter.publish.commit import PublishedVersion, ReservedPosition, Staging, publish_version
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogBase, LogDelta
from exporter.publish.finite import require_merger_finite
from exporter.publish.manifest import ManifestDraft, MappedRecord, MappedTable, tensor_entries
from exporter.publish.permission import Permission
from exporter.storage.files import copy_file, writing
from exporter.storage.layout import (
    ASSETS_DIRECTORY,
    EXTRA_DIRECTORY,
    MAPPED_ID_FILE,
    SAVED_MODEL_FILE,
    UPDATABLE_FILE,
    VARIABLES_DIRECTORY,
    VARIABLES_PREFIX,
)
from exporter.subgraph.make_updatable import UPDATE_SIGNATURE
from exporter.terminal.progress import Progress, ProgressFactory, no_progress
from exporter.verify.version_files import verify_bytes, verify_file, verify_files
from exporter.version import __version__
from exporter.wire import tensor_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


class BaseMerger:
    """The variables of a base, `stored`, with `deltas` applied on top, oldest first.

    Those that servers map, `mapped`, get files of their own.
    """

    def __init__(
        self,
        bundle: Path,
        mapping_spec: MappingSpec,
        schema: Schema,
        stored: Mapping[str, RowReader],
        deltas: Sequence[DeltaTensors],
        *,
        task_bytes: int,
        mapped: Collection[str] = (),
        hint: str = "",
    ) -> None:
        self._prefix = bundle / VARIABLES_PREFIX
        self._sources = mapping_spec.sources()
        self._variables = {variable.name: variable for variable in schema.variables}
        self._stored, self._deltas = stored, deltas
        self._mapped = mapped
        self._files = Sources(hint)
        self._left: list[tuple[str, SliceSpec | None, str]] = []
        self._job = ShardJob(Merge, self._files, self._places(task_bytes), task_bytes)
        self.tasks = self._job.tasks

    @property
    def bytes_(self) -> int:
        """Bytes that tasks read."""
        return self._job.bytes_

    def write(
        self,
        stack: ExitStack,
        runner: Runner,
        state: Callable[[], LayeredState],
        progress: Progress | None = None,
    ) -> None:
        """Write `variables/`. A job that is kept ends with the stack.

        `state` has the values of what lies in the base in boxes that are no ranges of rows: no task's.
        """
        self._prefix.parent.mkdir()
        others = bool(self._left) or not self.tasks
        placed = self._job.run(stack, runner, self._prefix, behind=others, progress=progress).placed
        left = self._write_left(state) if others else ()
        tensors = list(tensors_of((*self._boxes(placed), *left)))
        index_path(self._prefix).write_bytes(encode_index(tensors, self.tasks + others))

    def _places(self, task_bytes: int) -> Iterator[Place[str]]:
        """What tasks write, by the names of variables."""
        for source in self._sources:
            if not source.variables:  # the keys or values of a lookup table
                yield from self._copied(source.key, source.key, None)
            for part in source.variables:
                variable = self._variables[part.served_name]
                runs = self._runs(variable) if variable.is_table else []
                if not runs:
                    yield from self._copied(variable.name, source.key, part.part and source.stored(part.part))
                    continue
                is_mapped = variable.name in self._mapped  # from one file: one task writes all of it
                sections = table_sections(
                    variable,
                    self._deltas,
                    self._files,
                    packing=None,
                    task_bytes=sys.maxsize if is_mapped else task_bytes,
                    base=runs,
                )
                yield from (Place(section, variable.name, alone=is_mapped) for section in sections)

    def _copied(self, name: str, key: str, part: SliceSpec | None) -> Iterator[Place[str]]:
        """What is served whole: as the newest delta has it, else the base."""
        copied = newest_value(name, self._deltas) if not self._variables[name].is_table else None
        reader = self._stored[name]
        if copied is None and reader.extent is not None:
            run = next((run.part for run in reader.runs if run.extent == reader.extent), None)
            copied = Stored(reader.catalog, reader.tensor, run)
        if copied is None:
            self._left.append((key, part, name))
        else:
            yield copied_value(name, copied, self._files)

    def _runs(self, variable: ServedVariable) -> list[tuple[int, Range]]:
        """The rows of a table as runs of whole rows in the base; none if they do not lie so."""
        reader = self._stored[variable.name]
        tensor, box = reader.tensor, reader.box
        if reader.order != SliceOrder() or reader.dtype is not tensor.dtype or not _has_whole_rows(box):
            return []
        runs: list[tuple[int, Range]] = []
        at, end = box.starts[0], box.starts[0] + box.lengths[0]
        for spec, stored in stored_runs(reader.catalog, tensor):
            first, count = spec.starts[0], spec.lengths[0]
            if not _has_whole_rows(spec):
                return []
            low, high = max(first, at), min(first + count, end)
            if low >= high:
                continue
            if low != at:
                return []
            whole = self._files.range_of(stored)
            row = whole.size // count
            run = Range(whole.input, whole.offset + (low - first) * row, (high - low) * row)
            runs.append((high - low, run))
            at = high
        return runs if at == end else []

    def _write_left(self, state: Callable[[], LayeredState]) -> Iterator[tuple[str, DType, SliceRef]]:
        """Write the shard of what no task writes; its tensors by key, dtype and box."""
        aside = self._prefix.with_name("left")
        values = state()
        with BundleWriter(aside) as writer:
            for key, part, name in self._left:
                variable = self._variables[name]
                if variable.is_table:
                    values.stored[name].fetch()  # it is read twice: for its checksums, and to be written
                    values.check([name])
                    writer.add_chunks(key, variable.dtype, variable.shape, row_blocks(values, variable), part)
                else:
                    writer.add(key, values.whole(name), part)
        shard_path(aside, 0, 1).rename(shard_path(self._prefix, self.tasks, self.tasks + 1))
        index_path(aside).unlink()
        for tensor in writer.tensors:
            whole = [SliceRef(SliceSpec.whole(tensor.shape), tensor.extent)] if tensor.extent else []
            for part_ in (*tensor.slices, *whole):
                assert part_.extent is not None
                extent = replace(part_.extent, shard=self.tasks)
                yield tensor.name, tensor.dtype, SliceRef(part_.spec, extent)

    def _boxes(self, placed: Sequence[Placed[str]]) -> Iterator[tuple[str, DType, SliceRef]]:
        """What tasks wrote, by key, dtype and box."""
        found: dict[str, list[Placed[str]]] = defaultdict(list)
        for each in placed:
            found[each.place.what].append(each)
        for source in self._sources:
            parts = [(v.served_name, v.part and source.stored(v.part)) for v in source.variables]
            for name, part in parts or [(source.key, None)]:
                for each in found.get(name, ()):
                    box = part or SliceSpec.whole(self._shape(each, name))
                    section = each.place.section
                    if isinstance(section, NewestRows):
                        box = _rows_of_box(box, section.low, section.high)
                    yield source.key, self._variables[name].dtype, SliceRef(box, each.extents[0])

    def _shape(self, each: Placed[str], name: str) -> tuple[int, ...]:
        """The shape of a variable; of the contents of a lookup table that which they have now."""
        variable, copied = self._variables[name], each.place.copied
        if variable.contents is None or copied is None:
            return variable.shape
        is_of_base = copied.catalog is self._stored[name].catalog
        return copied.tensor.shape[0 if is_of_base else 1 :]


def _has_whole_rows(box: SliceSpec) -> bool:
    return bool(box.full_shape) and box.lengths[1:] == box.full_shape[1:]


def _rows_of_box(box: SliceSpec, low: int, high: int) -> SliceSpec:
    starts = (box.starts[0] + low, *box.starts[1:])
    return SliceSpec(box.full_shape, starts, (high - low, *box.lengths[1:]))


FIRST_POSITION = "first_position"
"""The constant of the incremental subgraph that holds position and step of its base, and -1."""


class Rebased(Struct, frozen=True):
    """The new base, how many deltas it holds, and how many tasks wrote it."""

    published: PublishedVersion
    deltas: int
    tasks: int


class Rebasing(Struct, frozen=True):
    """A new base as it is planned: its place, where it stands, the deltas that it will hold, and tasks."""

    path: Path
    at: Position
    deltas: int
    tasks: int


def plan_rebase(model: Path, *, despite_hold: bool, jobs: Jobs) -> Rebasing | None:
    """What `rebase` would do now; the deltas are read and checked, the base's values are not.

    Raises:
        ModelHeld, CheckpointError, PositionMoved: as `rebase`.
    """
    permission = Permission(despite_hold)

    def plan(log: DeltaLog) -> Rebasing | None:
        permission.check(model, takes_deltas=True, versions=log.versions)
        at = _newest_approved(log).at
        if log.base.at.position >= at.position:
            return None
        log.state(at.position)
        chain = log.chain(log.base.at.position, at.position)
        _require_finite(log, chain)
        position = position_of_merger(log, model / str(at.position)) if at == log.at else at.position
        path, deltas = model / str(position), len(chain) + (position != at.position)
        tasks = _merger(log, chain, path, jobs).tasks
        return Rebasing(path, Position(position, at.step), deltas, tasks)

    return undisturbed(model, plan)


def rebase(
    model: Path,
    *,
    keep: int | None = None,
    despite_hold: bool = False,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
) -> Rebased | None:
    """Publish a base at the newest position of the log; None if the newest base stands there already.

    Deltas that are published meanwhile lead on from it. Servers load a base by themselves: under a canary's
    hold it stands at what is approved.

    Raises:
        ModelHeld: the model is held, unless `despite_hold`.
        VerificationError: the old base is damaged.
        CheckpointError: a delta is damaged.
        PositionMoved, PublishError: see errors.py; nothing was published.
    """
    permission = Permission(despite_hold)
    return undisturbed(model, lambda log: _rebase(log, keep, permission, jobs, progress))


def _rebase(
    log: DeltaLog,
    keep: int | None,
    permission: Permission,
    jobs: Jobs = LOCALLY,
    progress: ProgressFactory = no_progress,
) -> Rebased | None:
    permission.check(log.model, takes_deltas=True, versions=log.versions)
    model, base, newest = log.model, log.base, _newest_approved(log)
    if base.at.position >= newest.at.position:
        return None
    if newest.at == log.at:
        log = past_given_up(log, model / str(newest.at.position))
        newest = _newest_approved(log)
    at, trained = newest.at, newest.entry.trained
    chain = log.chain(base.at.position, at.position)
    _require_finite(log, chain)
    with Staging(model) as staging, writing(staging.path), ExitStack() as stack:
        merger = _merger(log, chain, staging.path, jobs)
        with progress("merging", merger.bytes_) as bar:
            try:
                runner = runner_for(jobs, model, merger.tasks)
                merger.write(stack, runner, lambda: log.state(at.position), bar)
            except CorruptFile:
                verify_bytes(read_catalog(base.path / VARIABLES_PREFIX))  # says what is wrong with a base
                raise
        catalog = read_catalog(staging.path / VARIABLES_PREFIX)
        mapped = _mapped_again(base, catalog, at.position)
        _copy_graph(base, staging.path, at.position, at.step or 0, mapped)
        verify_files(staging.path, tensor_entries(catalog))
        draft = ManifestDraft(
            tensors=tensor_entries(catalog),
            # It holds what increments made of that checkpoint: no checkpoint has these contents.
            source=replace(base.manifest.source, checkpoint=trained.checkpoint.name, digest=None),
            exporter=__version__,
            step=at.step,
            lineage=log.lineage,
            incremental=replace(base.entry, trained=trained, state=newest.manifest.state_id),
            tensorflow=base.manifest.tensorflow,
            mapped=mapped,
        )
        place = ReservedPosition(at.position, last=at.position, is_passed=True)
        published = publish_version(staging, draft, place, keep=keep, permission=permission)
        return Rebased(published, len(chain), merger.tasks)


def _require_finite(log: DeltaLog, chain: Sequence[LogDelta]) -> None:
    """Refuse a base with values that servers of the base before have refused."""
    require_merger_finite(log, chain, Span(chain[0].start, chain[-1].end))


def _merger(log: DeltaLog, chain: Sequence[LogDelta], bundle: Path, jobs: Jobs) -> BaseMerger:
    """What writes the variables of the log's base with deltas applied on top."""
    return BaseMerger(
        bundle,
        log.base.entry.mapping_spec,
        log.schema,
        log.base.stored(),
        [log.tensors(delta) for delta in chain],
        task_bytes=jobs.task_bytes,
        mapped={table.name for table in _mapped_tables(log.base)},
        hint=BROKEN_LOG_HINT,
    )


def _mapped_tables(base: LogBase) -> tuple[MappedTable, ...]:
    record = base.manifest.mapped
    return () if record is None else record.tables


def _mapped_again(base: LogBase, written: Catalog, position: int) -> MappedRecord | None:
    """What servers map of the new base: the same tables, from other files, under another id."""
    record = base.manifest.mapped
    if record is None or not record.tables:
        return record
    runs = {}
    for source in base.entry.mapping_spec.sources():
        boxes = {box: run.extent for box, run in stored_runs(written, written.tensors[source.key])}
        for part in source.variables:
            whole = SliceSpec.whole(written.tensors[source.key].shape)
            runs[part.served_name] = boxes.get(source.stored(part.part) if part.part else whole)
    tables = []
    for table in record.tables:
        extent = runs[table.name]
        is_alone = extent is not None and (extent.offset, extent.size) == (0, table.bytes_)
        assert extent is not None and is_alone, f"{table.name} has no file of its own"
        tables.append(replace(table, file=written.path_of(extent).name))
    directory = str(Path(record.directory).parent / str(position))
    return replace(record, id=secrets.token_hex(16), directory=directory, tables=tuple(tables))


def _newest_approved(log: DeltaLog) -> LogBase | LogDelta:
    """What leads to the newest position that no canary has yet to approve, nor has failed."""
    approved = approved_by_canary(log)
    return log.newest if approved is None or approved >= log.at.position else log.standing(approved)


def _copy_graph(
    log_base: LogBase, bundle: Path, position: int, step: int, mapped: MappedRecord | None
) -> None:
    """Copy everything of a base but its variables, at another position, with other files to map."""
    base = log_base.path
    for file in log_base.manifest.files:  # the new manifest would vouch for what is damaged here
        if not file.path.startswith(f"{VARIABLES_DIRECTORY}/"):
            verify_file(base, file)
    saved_model = read_saved_model(base)
    constant = _first_position(saved_model)
    if constant is None:
        raise ManifestError(f"{base / SAVED_MODEL_FILE} has no incremental subgraph that this program knows")
    first = tensor_proto.to_array(constant.attr["value"].tensor)
    moved = np.array([position, step, *first.tolist()[2:]], np.int64)
    constant.attr["value"].tensor.Clear()
    tensor_proto.fill(constant.attr["value"].tensor, moved)
    before = log_base.manifest.mapped
    if before is not None and mapped is not None and mapped.tables:
        files = {was.file: now.file for was, now in zip(before.tables, mapped.tables, strict=True)}
        for meta_graph in saved_model.meta_graphs:
            move_tries(meta_graph.graph_def, position, (before.id, mapped.id), files)
        (bundle / MAPPED_ID_FILE).write_text(mapped.id)
    (bundle / SAVED_MODEL_FILE).write_bytes(saved_model.SerializeToString(deterministic=True))
    for directory in (ASSETS_DIRECTORY, EXTRA_DIRECTORY):
        if (base / directory).is_dir():
            shutil.copytree(base / directory, bundle / directory, copy_function=copy_file)
    description = json.loads((bundle / UPDATABLE_FILE).read_text())
    description |= {"position": position, "step": step}
    (bundle / UPDATABLE_FILE).write_text(json.dumps(description) + "\n")


def _first_position(saved_model: Proto) -> Proto | None:
    """The node that holds the base's position: in the scope of the update signature, whatever that is called.

    The subgraph gets another scope where the user's own model has one called `incremental`.
    """
    for meta_graph in saved_model.meta_graphs:
        signature = meta_graph.signature_def.get(UPDATE_SIGNATURE)
        scopes = {info.name.partition("/")[0] for info in signature.outputs.values()} if signature else set()
        for node in meta_graph.graph_def.node:
            if node.op == "Const" and node.name in {f"{scope}/{FIRST_POSITION}" for scope in scopes}:
                return node
    return None
