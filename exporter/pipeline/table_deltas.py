"""The changes in a log's dynamic tables: as increments report them, or found by comparing keys and rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.embedding_variables import EmbeddingVariable, embedding_variables, find_variable
from exporter.checkpoint.source_shard import written_to
from exporter.delta.format import Change, Schema
from exporter.delta.layered_state import CheckedFiles, LayeredState
from exporter.delta.table_changes import KeyedChange, ServedTable, compared, upserted
from exporter.errors import CheckpointError, SchemaChanged
from exporter.increments.changed_tables import TrainedTable, in_dtype
from exporter.mapping.mapping_spec import DynamicTable, MappingSpec
from exporter.pipeline.trainer_state import TrainerState
from exporter.publish.delta_log import DeltaLog, LogBase
from exporter.storage.files import identity_of
from exporter.storage.layout import CHECKED_DIRECTORY


class TableChanges(Struct, frozen=True):
    """Changes by served variable, and the number of served bytes that were compared for them."""

    changes: dict[str, Change]
    compared_bytes: int = 0


def ordinary(schema: Schema, mapping_spec: MappingSpec) -> Schema:
    """Return the schema without the variables of dynamic tables, as `mapping_spec` lists them."""
    if not mapping_spec.dynamic:
        return schema
    others = {key for table in mapping_spec.dynamic for key in table.keys}
    return Schema.of(variable for variable in schema.variables if variable.name not in others)


def without_index(changes: Mapping[str, Change], mapping_spec: MappingSpec) -> dict[str, Change]:
    """Return the changes, by variable, without variables of dynamic tables' indexes (not rows to people)."""
    index = {key for table in mapping_spec.dynamic for key in table.keys[:-1]}
    return {name: change for name, change in changes.items() if name not in index}


def table_changes(log: DeltaLog, trainer: TrainerState, scratch: Path) -> TableChanges:
    """Return the changes that bring the log's dynamic tables to the trainer's state, by served variable.

    {} without dynamic tables. They are the changes that increments report, or else the differences of keys
    and rows, of which large ones are files in `scratch`. DeepRec's increments report no deletions: these come
    with the comparison, after the next full checkpoint. The published index is verified before it is used.

    Raises:
        CorruptFile: something published is damaged; other CheckpointErrors if files cannot be read.
        TableFull: a table has no room for its new keys.
        SchemaChanged: the checkpoint lacks a table, or has other rows.
        MappingError, NotFinite: a value does not fit the served dtype.
        VerificationError, PositionUnknown: the published state cannot be opened.
        DiskFull, PublishError, OSError: what is fetched, or a scratch file, cannot be written.
    """
    if not log.base.entry.mapping_spec.dynamic:
        return TableChanges({})
    if not trainer.plan.is_known:
        return _compared(log, trainer, scratch)
    return TableChanges(_told(log, trainer) if trainer.plan.increments else {})


def has_room(log: DeltaLog, trainer: TrainerState) -> bool:
    """True if the log began with the trainer's full checkpoint, and with room for all increments since.

    If a table of such a log is full, because keys collide in its index, it would be full in a new base, too.
    Raises CheckpointError or OSError if the checkpoint or an increment is damaged or cannot be read.
    """
    if log.base.entry.trained.checkpoint != trainer.plan.target.checkpoint:
        return False
    spec, known = log.base.entry.mapping_spec, embedding_variables(trainer.catalog)
    shapes = {variable.name: variable.shape for variable in log.schema.variables}
    from exporter.increments.keyed_changes import keys_to_come

    awaited = keys_to_come(trainer.catalog)
    for table in spec.dynamic:
        name = spec.trained_name(table)
        room = shapes[table.keys[2]][0] - table.defaults - 1
        variable = find_variable(known, name)
        if variable is not None and variable.rows + awaited[variable.name] > room:
            return False
    return True


class _Table(Struct, frozen=True):
    """A dynamic table: in the log's mapping, in the trainer's checkpoint, and as published."""

    table: DynamicTable
    variable: EmbeddingVariable
    served: ServedTable


def _tables(spec: MappingSpec, schema: Schema, catalog: Catalog, published: LayeredState) -> Iterator[_Table]:
    """Yield the dynamic tables in the order of the mapping, as trained and as in the `published` state.

    Raises, while iterated, SchemaChanged if the checkpoint lacks one or has rows of another dtype or
    dimension, CheckpointError if its tables are damaged or cannot be read.
    """
    known = embedding_variables(catalog)
    for table in spec.dynamic:
        name = spec.trained_name(table)
        if (variable := find_variable(known, name)) is None:
            raise SchemaChanged(f"{catalog.prefix.name} has no embedding variable {name!r}, which is served")
        if (variable.value_dtype, variable.dim) != (table.value_dtype, table.dim):
            raise SchemaChanged(
                f"{catalog.prefix.name} has rows {variable.value_dtype.label}[{variable.dim}] of {name!r}, "
                f"the base was made of {table.value_dtype.label}[{table.dim}]"
            )
        yield _Table(table, variable, ServedTable.of(table, schema, published))


def _told(log: DeltaLog, trainer: TrainerState) -> dict[str, Change]:
    """Return the table changes that increments report, by variable; the published index is verified first.

    Raises CheckpointError or OSError if a file is damaged or cannot be read, TableFull, SchemaChanged,
    MappingError or NotFinite if the changes do not fit the base, VerificationError or PositionUnknown if the
    published state cannot be opened.
    """
    spec = log.base.entry.mapping_spec
    published = log.state(only={key for table in spec.dynamic for key in table.keys})
    _check_index(log, published, spec)
    return told_changes(spec, log.schema, published, trainer, log.trained.increment)


def told_changes(
    spec: MappingSpec, schema: Schema, published: LayeredState, trainer: TrainerState, since: str | None
) -> dict[str, Change]:
    """Return the table changes, by variable, that increments after the increment with the id `since` report.

    With None for `since`, all increments count; {} without any. New keys that the admission refuses are left
    out, and rows that the increment `since` had with the same values. Any part of `published` may be read, so
    the caller verifies its checksums first.

    Raises:
        TableFull: a table has no room for its new keys.
        SchemaChanged: the checkpoint or an increment lacks a table, or has other rows.
        CheckpointError, OSError: a checkpoint or an increment is damaged or cannot be read.
        MappingError, NotFinite: a value does not fit the served dtype.
    """
    if not trainer.plan.increments or not spec.dynamic:
        return {}
    tables = {each.variable.name: each for each in _tables(spec, schema, trainer.catalog, published)}
    told = _told_of(trainer, tables.values())
    from exporter.increments.keyed_changes import published_before

    before = published_before(trainer.plan.increments, since, tables.keys())
    changes: dict[str, Change] = {}
    for name, change in told.items():
        rows, served = change.rows, tables[name].served
        is_new = served.find(rows.keys) < 0
        wanted = ~is_new | (is_new & spec.admission.enough(rows.freqs))
        if name in before:
            wanted &= is_new | ~rows.same_as(before[name])
        if wanted.any() or len(change.removed):
            sent = in_dtype(rows.at(wanted), served.row_values.dtype)
            changes |= upserted(served, sent, change.removed)
    return changes


def _told_of(trainer: TrainerState, tables: Iterable[_Table]) -> dict[str, KeyedChange]:
    """Return the merged reports of the trainer's increments about these tables, by the checkpoint's names.

    Raises SchemaChanged if rows have another dtype or dimension than the checkpoint's, CheckpointError if an
    increment cannot be read.
    """
    known = {each.variable.name: each.variable for each in tables}
    from exporter.increments.keyed_changes import keyed_changes_of

    told = keyed_changes_of(trainer.plan.increments, known.keys())
    for name, change in told.items():
        values, variable = change.rows.values, known[name]
        if values.dtype != variable.value_dtype.numpy or values.shape[1:] != (variable.dim,):
            raise SchemaChanged(
                f"an increment has rows {values.dtype}{list(values.shape[1:])} of {name!r}, "
                f"the checkpoint has {variable.value_dtype.label}[{variable.dim}]"
            )
    return told


def note_index_written(base: LogBase, log: Path) -> None:
    """Record beside the log that a base's table indexes are verified: checksums were made while writing.

    So the first delta need not read all of them, however small it is. A failure to read or write is ignored.
    """
    tables = base.entry.mapping_spec.dynamic
    with suppress(CheckpointError, OSError):
        stored = base.stored() if tables else {}
        index = [stored[name] for table in tables for name in table.keys[:-1]]
        if index:
            files = CheckedFiles.of(log / CHECKED_DIRECTORY, index)
            files.save([run for each in index for run in each.runs])


def _check_index(log: DeltaLog, published: LayeredState, spec: MappingSpec) -> None:
    """Verify the checksums of the tables' indexes, unless the same files were verified before.

    Verified files are recorded beside the log, and in `published`. Raises CorruptFile if a checksum differs,
    other CheckpointErrors if a file cannot be read.
    """
    files = CheckedFiles.of(log.path / CHECKED_DIRECTORY, published.stored.values())
    published.trust(known := files.known(published.stored.values()))
    published.check(name for table in spec.dynamic for name in table.keys[:-1])
    if published.checked:
        files.save(published.checked | known)


def _compared(log: DeltaLog, trainer: TrainerState, scratch: Path) -> TableChanges:
    """Return the differences of the trainer's keys and rows from the published ones; all of these are read.

    Large differences are files in `scratch`. Raises CheckpointError or OSError if a file is damaged or cannot
    be read or written, TableFull, SchemaChanged, MappingError or NotFinite if the changes do not fit the
    base, VerificationError or PositionUnknown if the published state cannot be opened, PublishError if a file
    cannot be fetched from a store.
    """
    spec, published = log.base.entry.mapping_spec, log.state()
    tables = [*_tables(spec, log.schema, trainer.catalog, published)]
    told = _told_of(trainer, tables)
    files = {path: identity_of(path) for path in trainer.catalog.shards}
    changes: dict[str, Change] = {}
    size = 0
    for each in tables:
        each.served.check()
        over, dtype = told.get(each.variable.name), each.served.row_values.dtype
        layer = () if over is None else (over.rows, over.removed)
        now = TrainedTable.read(trainer.catalog, each.variable, dtype, spec.admission, *layer)
        changes |= compared(each.served, now, scratch)
        size += len(now.keys) * each.served.row_values.row_bytes
    # Rows were read in maps, after their checksums: the files are the same, or gone, which leaves maps whole.
    for path, before in files.items():
        if before is not None and identity_of(path) not in (before, None):
            raise written_to(path)
    return TableChanges(changes, size)
