"""Stage a base with a log's values at a position: for the same log, or for a new one.

Tasks write the base's variables with the deltas applied on top, and read each byte once. The graph stays,
except for the initial position of its variables; in a new log also for the log and the lineage. If no delta
is merged, the base's files are linked.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.hot_rows import HotRows, HotTable, hot_in, lay_hot_rows, names_of
from exporter.bundle.link import link_or_copy
from exporter.bundle.mapped_tables import move_tries
from exporter.bundle.variables import own_file, served_runs
from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.checkpoint.tensor_values import checked_map
from exporter.delta.format import log_name
from exporter.delta.merge_base import BaseMerger
from exporter.delta.spans import nearest_base
from exporter.errors import CorruptFile, ManifestError, UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.nodes import bodies
from exporter.jobs.runner import LOCAL, Runner
from exporter.publish.commit import Staging
from exporter.publish.delta_log import BROKEN_LOG_HINT, DeltaLog, LogBase, LogDelta, log_path
from exporter.publish.manifest import (
    BaseEntry,
    Manifest,
    ManifestDraft,
    MappedRecord,
    MappedTable,
    MergedFrom,
    MergedPart,
    tensor_entries,
)
from exporter.publish.versions import MAX_MANIFEST_BYTES, VersionDir, delta_named, require_signed_bytes
from exporter.storage import mirror
from exporter.storage.files import copy_file, make_directories, read_record, read_regular
from exporter.storage.layout import (
    ASSETS_DIRECTORY,
    EXTRA_DIRECTORY,
    MANIFEST_FILE,
    MAPPED_ID_FILE,
    SAVED_MODEL_FILE,
    UPDATABLE_FILE,
    VARIABLES_DIRECTORY,
    VARIABLES_PREFIX,
)
from exporter.subgraph.make_updatable import UPDATE_SIGNATURE
from exporter.terminal.progress import ProgressFactory, no_progress
from exporter.verify.version_files import verify_bytes, verify_file, verify_files
from exporter.version import __version__
from exporter.wire import tensor_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

FIRST_POSITION = "first_position"
"""The constant of the incremental subgraph with position and step of its base, and -1."""


class BasePlace(Struct, frozen=True):
    """The position of a base, and the number and lineage of the log whose deltas it takes."""

    position: int
    log: int
    lineage: str


class WrittenBase(Struct, frozen=True):
    """The staged files of a base: its tensors, its mapped tables, and the number of tasks that wrote it."""

    catalog: Catalog
    mapped: MappedRecord | None
    tasks: int


def write_base(
    log: DeltaLog,
    of: LogBase | LogDelta,
    place: BasePlace,
    staging: Staging,
    task_bytes: int,
    runner: Callable[[int], Runner] = lambda _: LOCAL,
    progress: ProgressFactory = no_progress,
) -> tuple[ManifestDraft, int]:
    """Stage a base with a log's values at `of`; return its manifest's draft and the number of tasks.

    `place` is its position, and the log whose deltas it takes. `runner` returns the runner for a number of
    tasks, each of about `task_bytes`.

    Raises:
        VerificationError: the log's base is damaged.
        CheckpointError, OSError: a delta is damaged, or a file cannot be read or written.
        PositionError: no base is left from which deltas reach it.
        NotServable: a tensor of the base has a name that hot rows need.
        EngineFailed, UsageError: the engine of `runner` failed, or does not accept its options.
        PublishError: the files cannot be written.
    """
    base, chain = way_to(log, of.at.position)
    at, trained = of.at, of.entry.trained
    require_signed_bytes(base.path, base.manifest)  # first: what others altered must not be signed anew
    mapped_id = secrets.token_hex(16)
    written = write_files(
        log, base, chain, place, at.step or 0, mapped_id, staging.path, task_bytes, runner, progress
    )
    draft = ManifestDraft(
        tensors=tensor_entries(written.catalog),
        # It has that checkpoint with increments on top: no checkpoint has these contents.
        source=replace(base.manifest.source, checkpoint=trained.checkpoint.name, digest=None),
        exporter=__version__,
        step=at.step,
        lineage=place.lineage,
        incremental=replace(base.entry, log=place.log, trained=trained, state=of.manifest.state_id),
        tensorflow=base.manifest.tensorflow,
        mapped=written.mapped,
        for_server=base.manifest.for_server,
        oldest_server=base.manifest.oldest_server,
        opened_batch=base.manifest.opened_batch,
        merged_from=_record(log.model, [base.path, *(delta.path for delta in chain)], task_bytes),
    )
    return draft, written.tasks


def write_files(
    log: DeltaLog,
    base: LogBase,
    chain: Sequence[LogDelta],
    place: BasePlace,
    step: int,
    mapped_id: str,
    bundle: Path,
    task_bytes: int,
    runner: Callable[[int], Runner] = lambda _: LOCAL,
    progress: ProgressFactory = no_progress,
) -> WrittenBase:
    """Write the files of a base with the deltas of `chain` on top into the directory `bundle`.

    The same arguments give the same bytes on every machine. Without deltas the base's variables are linked.
    `place` is the new base's position and log, `step` the training step of the values, and `mapped_id` the id
    of the tables that servers map. `runner` returns the runner for a number of tasks, each of about
    `task_bytes`.

    Raises:
        VerificationError: the base is damaged; ManifestError if its graph has no incremental subgraph of a
            known form.
        CheckpointError, OSError: a delta is damaged, or a file cannot be read or written.
        NotServable: a tensor of the base has a name that hot rows need.
        EngineFailed, UsageError: the engine of `runner` failed, or does not accept its options.
        PublishError: the files cannot be written.
    """
    if chain:
        merger = merger_of(log, base, chain, bundle, task_bytes)
        catalog, tasks, hot = _write_merged(log, base, chain[-1].end, merger, bundle, runner, progress)
        record = _mapped_again(base, catalog, hot)
    else:
        catalog, tasks, record = _link_variables(base, bundle), 0, base.manifest.mapped
    mapped = _mapped_elsewhere(record, place.position, mapped_id)
    _copy_graph(base, bundle, place, step, mapped)
    verify_files(bundle, tensor_entries(catalog))
    return WrittenBase(catalog, mapped, tasks)


def write_again(
    model: Path,
    manifest: Manifest,
    bundle: Path,
    runner: Callable[[int], Runner],
    progress: ProgressFactory = no_progress,
) -> None:
    """Write the files of a base that was merged elsewhere into `bundle`, from this model's base and deltas.

    `manifest` is the merged base's. The caller has to compare each file with it: they may differ. `runner`
    returns the runner for a number of tasks.

    Raises:
        ManifestError: the base was not merged, or not from a base and deltas that are here.
        ExportError: VerificationError, CheckpointError and others, if something that the base is merged from
            is damaged; PublishError if a file cannot be written.
        OSError: a file cannot be read or written.
    """
    record, entry = manifest.merged_from, manifest.incremental
    if record is None or not isinstance(entry, BaseEntry):
        raise ManifestError("the base was not merged")
    base = LogBase.read(model / record.parts[0].path)
    named = [delta_named(Path(each.path).name) for each in record.parts[1:]]
    log = log_path(model, base.entry.log)
    chain = tuple(LogDelta(log, *each[1:]) for each in named if each is not None)
    if not chain or [model / each.path for each in record.parts] != [base.path, *(d.path for d in chain)]:
        raise ManifestError("the base was merged from what is not a log")
    size = base.manifest.bytes_ + sum(delta.manifest.bytes_ for delta in chain)
    if size > record.task_bytes * _MOST_TASKS:
        raise ManifestError(f"{size} bytes are divided into tasks of {record.task_bytes}")
    if manifest.signature is not None:  # before anything is made of what others may have altered here
        from exporter.publish.signing import verify_digests

        verify_digests(base.path, (file for file in base.manifest.files if file.crc32c is not None))
        for delta in chain:
            verify_digests(delta.path, delta.manifest.files)
    of = DeltaLog(model, base, (VersionDir(base.at.position, base.path, has_manifest=True),), chain)
    place = BasePlace(manifest.position, entry.log, manifest.lineage or "")
    mapped_id, step = "" if manifest.mapped is None else manifest.mapped.id, manifest.step or 0
    write_files(of, base, chain, place, step, mapped_id, bundle, record.task_bytes, runner, progress)


_MOST_TASKS = 1 << 20  # a manifest from a store must not ask for a task a byte


def _record(model: Path, parts: Sequence[Path], task_bytes: int) -> MergedFrom | None:
    """Return the record of the parts of a merged base: their paths below `model`, and manifests' digests.

    `parts` are the directories of a base and of deltas; the size of a task is recorded, too, as it decides
    the bytes. None for a base alone. Raises OSError or CheckpointError if a manifest cannot be read.
    """

    def part(path: Path) -> MergedPart:
        content = read_record(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
        return MergedPart(path.relative_to(model).as_posix(), hashlib.sha256(content).hexdigest())

    return MergedFrom(tuple(map(part, parts)), task_bytes) if parts[1:] else None


def way_to(log: DeltaLog, position: int) -> tuple[LogBase, tuple[LogDelta, ...]]:
    """Return the base of a log from which the fewest deltas reach a position, and these deltas in order.

    () if a base is there. Raises PositionUnknown if there is none, ManifestError if a delta's manifest cannot
    be read.
    """
    bases = {base.at.position: base for base in log.bases}
    base = bases[nearest_base(log.deltas, bases, position)]
    return base, log.chain(base.at.position, position)


def _write_merged(
    log: DeltaLog,
    base: LogBase,
    position: int,
    merger: BaseMerger,
    bundle: Path,
    runner: Callable[[int], Runner],
    progress: ProgressFactory,
) -> tuple[Catalog, int, Mapping[str, HotTable]]:
    """Write a base's variables with deltas on top into `bundle`, and append its hot rows again.

    Returns the new catalog, the number of tasks, and tables with hot rows by name. `merger` writes the
    variables; `position` is the end of the deltas; `runner` returns the runner for a number of tasks. Raises
    VerificationError if the base is damaged, CheckpointError if a delta is, NotServable if a tensor has a
    name that hot rows need, EngineFailed or UsageError from the engine, PublishError or OSError if files
    cannot be read or written.
    """
    with ExitStack() as stack, progress("merging", merger.bytes_) as bar:
        try:
            merger.write(stack, runner(merger.tasks), lambda: log.state(position), bar)
        except CorruptFile:
            # a more exact error if the base is damaged
            verify_bytes(read_catalog(base.path / VARIABLES_PREFIX))
            raise
        # Copied anew: deltas may have changed rows that are hot.
        catalog, hot = _laid_again(base, read_catalog(bundle / VARIABLES_PREFIX), bundle)
    return catalog, merger.tasks, hot


def _link_variables(base: LogBase, bundle: Path) -> Catalog:
    """Verify all bytes of a base's variables, link (or copy) them into a bundle, and return their catalog.

    Raises VerificationError if they are damaged; CheckpointError if they cannot be fetched from a store;
    PublishError, DiskFull or OSError if they cannot be copied.
    """
    verify_bytes(read_catalog(base.path / VARIABLES_PREFIX))
    for file in base.manifest.files:
        # The new base gets an id of its own: with the old one, servers would map the old base's files.
        if file.path.startswith(f"{VARIABLES_DIRECTORY}/") and file.path != str(MAPPED_ID_FILE):
            make_directories((bundle / file.path).parent)
            link_or_copy(base.path / file.path, bundle / file.path)
    return read_catalog(bundle / VARIABLES_PREFIX)


def merger_of(
    log: DeltaLog, base: LogBase, chain: Sequence[LogDelta], bundle: Path, task_bytes: int
) -> BaseMerger:
    """Return the writer of the base's variables with the deltas of `chain` applied on top, into `bundle`.

    Nothing is written yet; `task_bytes` is the size of a task. Raises CheckpointError or OSError if the base
    or a delta cannot be read.
    """
    return BaseMerger(
        bundle,
        base.entry.mapping_spec,
        log.schema,
        base.stored(),
        [log.tensors(delta) for delta in chain],
        task_bytes=task_bytes,
        mapped={table.name for table in _mapped_tables(base)},
        hint=BROKEN_LOG_HINT,
    )


def require_local(base: LogBase) -> None:
    """Raise UsageError if a base has hot rows and is in an object store, where they cannot be laid out."""
    if mirror.is_remote(base.path) and any(table.hot_rows for table in _mapped_tables(base)):
        raise UsageError(
            "a base with hot rows is laid out in files, and the model is in an object store",
            hint="publish a new base, or merge in the directory that was pushed, and push it again",
        )


def _mapped_tables(base: LogBase) -> tuple[MappedTable, ...]:
    record = base.manifest.mapped
    return () if record is None else record.tables


def _laid_again(base: LogBase, written: Catalog, bundle: Path) -> tuple[Catalog, Mapping[str, HotTable]]:
    """Append the base's hot rows to its merged tables in `bundle`; return the new catalog and these tables.

    The tables are by name. `written` is the catalog before; without hot rows it is returned with {}. Raises
    CorruptFile if the base's record of hot rows is damaged, other CheckpointErrors or OSError if it cannot be
    read, NotServable if a tensor has a name that hot rows need, PublishError if nothing can be written.
    """
    hot = {table.name: table.hot_rows for table in _mapped_tables(base) if table.hot_rows}
    if not hot:
        return written, {}
    before = read_catalog(base.path / VARIABLES_PREFIX)
    tables: dict[str, HotRows] = {}
    for source in base.entry.mapping_spec.sources():
        for run in served_runs(source, written):
            name, rows = run.variable.served_name, run.box.lengths
            if name not in hot or name in tables:
                continue
            assert run.extent is not None
            ref = before.tensors.get(names_of(name)[1])
            if ref is None or ref.shape != rows[:1] or ref.dtype not in (DType.INT32, DType.INT64):
                raise CorruptFile(f"{before.prefix} does not say where the hot rows of {name!r} lie")
            scratch = bundle.with_name(f"hot-{len(tables)}")
            blocks = hot_in(checked_map(before, ref), hot[name], scratch)
            tables[name] = HotRows(name, source.dtype, rows, run.extent, 0, blocks, os.fspath(base.path))
    return lay_hot_rows(bundle / VARIABLES_PREFIX, written, tables.values())


def _mapped_again(base: LogBase, written: Catalog, hot: Mapping[str, HotTable]) -> MappedRecord | None:
    """Return the base's record of mapped tables, with the files of `written` that have them now.

    `written` is the new catalog, `hot` its tables with hot rows by name. None, or a record without tables, is
    returned as it is.
    """
    record = base.manifest.mapped
    if record is None or not record.tables:
        return record
    sources = base.entry.mapping_spec.sources()
    runs = {run.variable.served_name: run for source in sources for run in served_runs(source, written)}
    tables = []
    for table in record.tables:
        file, size = own_file(runs[table.name], written)
        assert size == table.bytes_, f"{table.name} has {size} bytes, expected {table.bytes_}"
        places = hot[table.name].file if table.name in hot else ""
        tables.append(replace(table, file=file, places=places))
    return replace(record, tables=tuple(tables))


def _mapped_elsewhere(record: MappedRecord | None, position: int, id_: str) -> MappedRecord | None:
    """Return the record of mapped tables for a version with another position and id.

    None, or a record without tables, is returned as it is.
    """
    if record is None or not record.tables:
        return record
    directory = str(Path(record.directory).parent / str(position))
    return replace(record, id=id_, directory=directory)


def _copy_graph(
    log_base: LogBase, bundle: Path, place: BasePlace, step: int, mapped: MappedRecord | None
) -> None:
    """Write to `bundle` a base's files except its variables, changed for its new position, log and tables.

    `place` is the new position and log, `step` the training step of the new values, `mapped` the new record
    of mapped tables, None without any. The base's files are verified first.

    Raises:
        VerificationError: a file of the base is damaged.
        CheckpointError, OSError: a file cannot be read or written.
        ManifestError: the graph has no incremental subgraph of a known form.
    """
    base, position = log_base.path, place.position
    for file in log_base.manifest.files:  # otherwise the new manifest would vouch for damaged files
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
    if place.log != log_base.entry.log:
        _move_log(saved_model, log_base, place)
    before = log_base.manifest.mapped
    if before is not None and mapped is not None and mapped.tables:
        pairs = [*zip(before.tables, mapped.tables, strict=True)]
        files = {was.file: now.file for was, now in pairs} | {was.places: now.places for was, now in pairs}
        for meta_graph in saved_model.meta_graphs:
            move_tries(meta_graph.graph_def, position, (before.id, mapped.id), files)
        (bundle / MAPPED_ID_FILE).write_text(mapped.id)
    # The same bytes on every machine: copies of a store make a merged base again, and compare.
    (bundle / SAVED_MODEL_FILE).write_bytes(saved_model.SerializeToString(deterministic=True))
    for file in log_base.manifest.files:  # only these, as the new manifest vouches for every file
        if PurePosixPath(file.path).parts[0] in (ASSETS_DIRECTORY, EXTRA_DIRECTORY):
            make_directories((bundle / file.path).parent)
            copy_file(base / file.path, bundle / file.path)
    description = json.loads(read_regular(bundle / UPDATABLE_FILE, _LONGEST_DESCRIPTION))
    description |= {"lineage": place.lineage, "log": place.log, "position": position, "step": step}
    (bundle / UPDATABLE_FILE).write_text(json.dumps(description) + "\n")


def _first_position(saved_model: Proto) -> Proto | None:
    """Return the constant with the base's position, in the scope of the update signature; None without one.

    The scope has another name if the user's own model has a scope `incremental`.
    """
    for meta_graph in saved_model.meta_graphs:
        names = {f"{scope}/{FIRST_POSITION}" for scope in _scopes(meta_graph)}
        for node in meta_graph.graph_def.node:
            if node.op == "Const" and node.name in names:
                return node
    return None


def _scopes(meta_graph: Proto) -> set[str]:
    """Return the name scopes of a graph's incremental subgraph (one, as a rule); empty without a subgraph."""
    signature = meta_graph.signature_def.get(UPDATE_SIGNATURE)
    return {info.name.partition("/")[0] for info in signature.outputs.values()} if signature else set()


def _move_log(saved_model: Proto, base: LogBase, place: BasePlace) -> None:
    """Replace a base's log and lineage in its graph, where they are constants and in names of resources.

    `saved_model` is changed; `place` has the new log and lineage. Raises ManifestError if it has no such
    constants.
    """
    lineage = (base.manifest.lineage or "").encode(), place.lineage.encode()
    log = log_name(base.entry.log).encode(), log_name(place.log).encode()
    changed = Counter[bytes]()
    for meta_graph in saved_model.meta_graphs:
        scopes = tuple(_scopes(meta_graph))
        for body in bodies(meta_graph.graph_def):
            of = None if body.function is None else body.function.signature.name
            for node in body.nodes:
                # Nodes of the user's model may hold the same texts.
                if not (node.name if of is None else of).startswith(scopes):
                    continue
                if "shared_name" in node.attr:
                    named = node.attr["shared_name"]
                    # Names of resources hold the lineage, too: see `GraphEditor.owner`.
                    named.s = named.s.replace(*(b"/%s/" % each for each in lineage))
                texts = node.attr["value"].tensor.string_val if node.op == "Const" else []
                for before, now in (lineage, log):
                    if [*texts] == [before]:
                        texts[0] = now
                        changed[before] += 1
    if len(changed) < 2:  # lineage and log: with one of them left, the base would belong to no log
        raise ManifestError(
            f"{base.path / SAVED_MODEL_FILE} has no incremental subgraph that this program knows"
        )


_LONGEST_DESCRIPTION = 64 << 20
