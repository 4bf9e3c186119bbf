"""Increments: deltas of the trainer's own variables, which it writes between its full checkpoints.

    <ckpt-dir>/increments/<from>-<to>/delta.index, delta.data-00000-of-00001, manifest.json

`from` and `to` are training steps, zero-padded to 20 digits; if another session has used the name,
`-<session>` follows (the first 8 digits of its id). The bundle holds only the variables that changed since
the increment's parent, under the same names and keys as in a delta (`exporter.delta.format`): `<name>/ids`
and `<name>/values` for rows of a table, `<name>/value` [1, ...] for a variable as a whole. Names are the
trainer's; row numbers are those of the whole variable, also if it is partitioned. Optimizer slots and the
global step are included, so that full checkpoint + increments can also restore a training. Tables by keys,
which stock TensorFlow trains, are stored by their keys: see `exporter.increments.changed_tables`.

*Meaning of a position.* Every write that belongs to a step up to `to` is in the increment or in one before
it; a row may be newer, and is then in the next increment again. A full checkpoint of step f, `from` <= f <
`to`, was read before the increment's rows were collected, so the increment fits it as well as its parent. The
order of increments and full checkpoints is in `exporter.increments.history`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.format import Change, ChangeKind, Rows, ServedVariable
from exporter.delta.table_changes import KeyedChange, KeyedRows
from exporter.errors import CorruptFile, UnsupportedFormat
from exporter.increments.changed_tables import (
    ChangedTable,
    TableRows,
    check_ids,
    read_listed,
    read_table,
)
from exporter.increments.trained import CheckpointId as CheckpointId
from exporter.storage.layout import DELTA_NAME
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import (
    Count,
    DocumentError,
    DtypeLabel,
    Id,
    Moment,
    Shape,
    Text,
    decode,
    doc,
    encode_indented,
    format_version,
)

T = TypeVar("T")

FORMAT_VERSION = 1


class Changed(Struct, frozen=True):
    """A variable in an increment, in the trainer's form, and the number of its rows there (dense: 1)."""

    variable: ServedVariable
    rows: int

    @property
    def is_table(self) -> bool:
        """True if the increment holds rows of the variable, False if it holds all of it."""
        return self.variable.kind is ChangeKind.TABLE


class Contents(Struct, frozen=True):
    """The variables and the tables by keys in an increment; false if there are none."""

    variables: tuple[Changed, ...] = ()
    tables: tuple[ChangedTable, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.variables or self.tables)


class Increment(Struct, frozen=True, kw_only=True):
    """An increment; `parent` is an increment's id, or the full checkpoint that a run begins at.

    `session` is the id of the trainer's session that wrote it, None if it is not known (it is of an older
    release). `generation` is one more than the highest generation when the session began. `event_time` is the
    time of the newest event that its steps were trained on; None if it is not known.
    """

    id: str
    run: str
    generation: int
    parent: str | CheckpointId
    from_step: int
    to_step: int
    variables: tuple[Changed, ...]
    tables: tuple[ChangedTable, ...] = ()
    session: str | None = None
    event_time: datetime | None = None

    @property
    def rows(self) -> int:
        """The number of changed rows of all tables together, also of tables by keys, without removed keys."""
        by_number = sum(changed.rows for changed in self.variables if changed.is_table)
        return by_number + sum(table.rows for table in self.tables)

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors in the increment's bundle: first of variables, then of tables by keys."""
        by_number = [key for changed in self.variables for key in changed.variable.keys]
        return by_number + [key for table in self.tables for key in table.keys]


class StoredIncrement(Struct, frozen=True):
    """An increment and its directory."""

    path: Path
    increment: Increment

    def catalog(self) -> Catalog:
        """Read the catalog of the increment's bundle from its index.

        Raises CheckpointError and subclasses if the index is absent or damaged, or the shard is missing.
        """
        return read_catalog(self.path / DELTA_NAME)

    def changes(self) -> Iterator[tuple[Changed, Change]]:
        """Yield each variable, in manifest order, with its new value or rows, every checksum verified.

        Values are read into memory. Tables by keys are left out (see `tables`). While iterating, raises
        CorruptFile if the bundle does not fit the manifest, and other CheckpointErrors if it cannot be read.
        """
        catalog = self._listed_catalog()
        for changed in self.increment.variables:
            yield changed, _change(catalog, changed)

    def tables(self) -> Iterator[tuple[ChangedTable, TableRows]]:
        """Yield each table by keys, in manifest order, with its rows, read into memory, checksums verified.

        Nothing is read if there are no such tables. While iterating, raises CorruptFile if the bundle does
        not fit the manifest, and other CheckpointErrors if it cannot be read.
        """
        if self.increment.tables:
            catalog = self._listed_catalog()
            for table in self.increment.tables:
                yield table, read_table(catalog, table)

    def keyed_changes(self, names: Collection[str]) -> Iterator[KeyedChange]:
        """Yield the new rows and removed keys of the named tables by keys, every checksum verified.

        Names of tables that are not in the increment are ignored. All its tables by keys are read, whatever
        the names. While iterating, raises CheckpointError and subclasses (CorruptFile) if the bundle is
        damaged or gone.
        """
        for table, rows in self.tables():
            if table.name in names:
                yield KeyedChange(KeyedRows(table.name, rows.keys, rows.values), rows.removed)

    def row_counts(self) -> Counter[str]:
        """Return the number of changed rows of each table, by numbers or keys, from the manifest alone."""
        by_number = {each.variable.name: each.rows for each in self.increment.variables if each.is_table}
        return Counter(by_number | {table.name: table.rows for table in self.increment.tables})

    def _listed_catalog(self) -> Catalog:
        """Read the bundle's catalog; CorruptFile if it has a tensor that the manifest does not list.

        Raises other CheckpointErrors if it cannot be read.
        """
        catalog = self.catalog()
        if unlisted := sorted(catalog.tensors.keys() - set(self.increment.tensor_names)):
            raise CorruptFile(f"{self.path} holds {unlisted[0]!r}, which its manifest does not list")
        return catalog


class ParentDocument(Struct, frozen=True, omit_defaults=True):
    """The parent of an increment: another increment, or a full checkpoint."""

    increment: Annotated[Id | None, doc("the id of the increment before it")] = None
    checkpoint: Annotated[CheckpointId | None, doc("the full checkpoint that a run begins at")] = None


class VariableDocument(Struct, frozen=True):
    """A variable in an increment."""

    name: Annotated[Text, doc("the trainer's name of the variable")]
    dtype: Annotated[DtypeLabel, doc("TensorFlow's name of its dtype")]
    shape: Annotated[Shape, doc("the shape of the whole variable")]
    kind: Annotated[ChangeKind, doc("table: the increment has rows of it; dense: all of it")]
    rows: Annotated[Count, doc("the number of its rows in the increment; 1 for a dense one")]


class IncrementDocument(Struct, frozen=True, kw_only=True):
    """`<ckpt-dir>/increments/<from>-<to>/manifest.json`."""

    format_version: Annotated[Count, doc("the version of this document: 1")] = FORMAT_VERSION
    kind: Annotated[Literal["increment"], doc("the kind of the document")] = "increment"
    id: Annotated[Id, doc("the increment's own id")]
    run: Annotated[Id, doc("the training that wrote it")]
    session: Annotated[Id | None, doc("the trainer's session that wrote it; null: not known")] = None
    generation: Annotated[Count, doc("one more than the highest one when the session began")]
    parent: Annotated[ParentDocument, doc("the state that the increment follows")]
    from_step: Annotated[Count, doc("the step of the state that it follows")]
    to_step: Annotated[Count, doc("every write up to this step is in it or before it")]
    event_time: Annotated[
        Moment | UnsetType, doc("the time of the newest event that it was trained on; absent: not known")
    ] = UNSET
    variables: Annotated[tuple[VariableDocument, ...], doc("the variables that changed")]
    tables: Annotated[
        tuple[ChangedTable, ...] | UnsetType, doc("tables by keys that changed; absent: none")
    ] = UNSET


def to_json(increment: Increment) -> str:
    """Return an increment's description as indented JSON, the content of its `manifest.json`."""
    parent = increment.parent
    other_forms = {
        "parent": ParentDocument(parent) if isinstance(parent, str) else ParentDocument(checkpoint=parent),
        "event_time": increment.event_time or UNSET,
        "variables": tuple(
            VariableDocument(v.name, v.dtype.label, v.shape, v.kind, changed.rows)
            for changed in increment.variables
            for v in [changed.variable]
        ),
        "tables": increment.tables or UNSET,
    }
    return encode_indented(IncrementDocument(**{**asdict(increment), **other_forms})).decode()


def from_json(text: bytes, path: Path) -> Increment:
    """Decode `text`, the content of the increment manifest at `path`; the file itself is not read.

    Raises CorruptFile if it is damaged or contradicts itself, UnsupportedFormat for another version.
    """
    document = read_document(text, path, IncrementDocument)
    parent = document.parent.increment or document.parent.checkpoint
    changed = tuple(_changed(variable, path) for variable in document.variables)
    if parent is None:
        raise _damaged(path, "parent names neither an increment nor a checkpoint")
    if document.from_step >= document.to_step:
        raise _damaged(path, f"to_step is {document.to_step}, expected more than {document.from_step}")
    same = {name: getattr(document, name) for name in Increment.__struct_fields__}
    other_forms = {
        "parent": parent,
        "event_time": document.event_time or None,
        "variables": changed,
        "tables": document.tables or (),
    }
    increment = Increment(**{**same, **other_forms})
    if len(set(increment.tensor_names)) != len(increment.tensor_names):
        raise _damaged(path, "variables: one is listed twice")
    return increment


def read_document(text: bytes, path: Path, type_: type[T]) -> T:
    """Decode `text`, the content of the file `path` in the increments directory, as a `type_`.

    Raises UnsupportedFormat for another format version, CorruptFile if it is not valid JSON of this type.
    """
    try:
        if (version := format_version(text, path.name)) != FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}",
                hint="use the version of this program that wrote it, or a newer one",
            )
        found: T = decode(text, type_, path.name, written=encode_indented)
        return found
    except DocumentError as error:
        raise _damaged(path, str(error)) from error


def _changed(document: VariableDocument, path: Path) -> Changed:
    dtype = DType.of(document.dtype)
    variable = ServedVariable(document.name, dtype, document.shape, document.kind)
    if variable.is_table and not variable.shape:
        raise _damaged(path, f"{document.name!r} is a table and has no rows in its shape, []")
    limit = variable.shape[0] if variable.is_table else 1
    if document.rows > limit:
        raise _damaged(path, f"{document.name!r} has {document.rows} rows, expected at most {limit}")
    return Changed(variable, document.rows)


def _damaged(path: Path, cause: str) -> CorruptFile:
    return CorruptFile(f"{path} is damaged", cause=cause)


def _change(catalog: Catalog, changed: Changed) -> Change:
    """Read a variable's rows, or the value of a dense one, from an increment's bundle, checksums verified.

    Raises CorruptFile if they do not fit the variable, CheckpointChanged if a shard vanished, other
    CheckpointErrors if it cannot be read.
    """
    variable = changed.variable
    tensors = []
    for key, dtype in zip(variable.keys, variable.dtypes, strict=True):
        shape = (changed.rows, *(variable.element_shape if key == variable.keys[-1] else ()))
        tensors.append(read_listed(catalog, key, dtype, shape))
    if not changed.is_table:
        return tensors[0][0, ...]  # stored as [1, ...]
    ids, values = tensors
    check_ids(catalog, variable.name, ids, variable.shape[0], of=variable.shape)
    return Rows(ids, values)
