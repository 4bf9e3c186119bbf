"""`diff A B`: compare two states, checkpoints or published positions, by variables, rows and keys.

A state is a checkpoint (directory or prefix), a published version, or a model with a position: `MODEL` for
the newest, `MODEL@POSITION` for another, by number or name (`exporter.publish.tags`). The module has three
parts: tables that two checkpoints partition in different ways, tables by keys, and the comparison.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.bundle.hot_rows import without_layout
from exporter.catalog import Catalog, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.embedding_variables import EmbeddingVariable, embedding_variables, find_variable
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH, index_path, read_catalog, write_bundle
from exporter.delta.compare_rows import differing_rows
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_hashes import BlockHasher
from exporter.delta.row_reader import RowReader, SliceOrder, row_readers
from exporter.delta.spans import Position
from exporter.delta.table_changes import ServedTable
from exporter.errors import UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.keys import trained_strategies
from exporter.graph.metagraph import read_metagraph
from exporter.increments.changed_tables import TrainedTable
from exporter.jobs.runner import Runner
from exporter.mapping.mapping_rules import mod_lengths
from exporter.mapping.mapping_spec import MappingSpec
from exporter.publish.delta_log import DeltaLog
from exporter.publish.tags import Standing, resolve_position, split_position
from exporter.publish.versions import newest_version
from exporter.storage import mirror
from exporter.storage.layout import VARIABLES_PREFIX
from exporter.storage.local_paths import local_name
from exporter.storage.url import Url
from exporter.tables.integer_sets import among
from exporter.tables.parts import VALUES
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import values_of

_PART = re.compile(r"(.+)/part_([0-9]+)(/.+)?")  # as TensorFlow's partitioners name parts of a variable
_Parts = Mapping[int, TensorRef]


def side_by_side(catalog: Catalog, other: Catalog) -> dict[str, RowReader]:
    """Return readers of `catalog`'s tensors by name, with rows in the order that they have in `other`.

    Incomplete tensors, variants and the object graph are left out; a table's parts are one tensor if the
    other checkpoint partitions it in another way. Raises CorruptFile, LfsPointer, GraphError or UsageError if
    a graph (`.meta`) beside a checkpoint is needed and cannot be read.
    """
    tensors = _joined(_compared(catalog), _compared(other))
    theirs = _joined(_compared(other), _compared(catalog))
    moved = {
        name
        for name, ref in tensors.items()
        if name in theirs and _boxes(ref) != _boxes(theirs[name]) and ref.shape == theirs[name].shape
    }
    # a graph may be large: read it only if rows moved
    strategies = {**_strategies(other), **_strategies(catalog)} if moved else {}
    found = {}
    for name, ref in tensors.items():
        gather = len(ref.slices) if name in moved and _is_mod(ref, _strategy(strategies, name)) else 0
        whole = SliceSpec.whole(ref.shape)
        found[name] = RowReader(name, catalog, ref, whole, ref.dtype, SliceOrder(gather))
    return found


def _compared(catalog: Catalog) -> dict[str, TensorRef]:
    """Return the tensors of a checkpoint that can be compared, by name.

    These are the complete ones, except variants and the object graph.
    """
    return {
        name: ref
        for name, ref in catalog.tensors.items()
        if ref.is_complete and name != OBJECT_GRAPH and ref.dtype is not DType.VARIANT
    }


def _joined(tensors: Mapping[str, TensorRef], others: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Return `tensors`, by name, with the parts of a table as one tensor if `others` has other parts of it.

    That is so, too, if `others` has the table whole. A part is called `<table>/part_<n>`; parts that do not
    fit together stay apart.
    """
    groups, other_groups = _groups(tensors), _groups(others)
    result = dict(tensors)
    for name, parts in groups.items():
        is_there = name in others or name in other_groups
        if not is_there or name in tensors or _shapes(parts) == _shapes(other_groups.get(name, {})):
            continue
        if (table := _table(name, parts)) is not None:
            for part in parts.values():
                del result[part.name]
            result[name] = table
    return result


def _groups(tensors: Mapping[str, TensorRef]) -> dict[str, dict[int, TensorRef]]:
    """Return the tensors called `<table>/part_<n>`, by the table's name and then by n.

    Also `<table>/part_<n>/<slot>`: by `<table>/<slot>`.
    """
    found: dict[str, dict[int, TensorRef]] = {}
    for ref in tensors.values():
        if match := _PART.fullmatch(ref.name):
            found.setdefault(f"{match[1]}{match[3] or ''}", {})[int(match[2])] = ref
    return found


def _shapes(parts: _Parts) -> dict[int, tuple[int, ...]]:
    return {number: ref.shape for number, ref in parts.items()}


def _table(name: str, parts: _Parts) -> TensorRef | None:
    """Return a table's parts, given by number, as one tensor called `name`, with the parts as its slices.

    None unless `parts` has all numbers from 0, stored whole, with one numeric dtype and rows of one shape.
    """
    ordered = [parts[number] for number in sorted(parts)]
    first = ordered[0]
    fits = all(
        ref.extent is not None and ref.dtype is first.dtype and ref.shape and ref.shape[1:] == first.shape[1:]
        for ref in ordered
    )
    if sorted(parts) != list(range(len(parts))) or not fits or first.dtype.itemsize is None:
        return None
    shape = (sum(ref.shape[0] for ref in ordered), *first.shape[1:])
    slices, start = [], 0
    for ref in ordered:
        slices.append(SliceRef(SliceSpec(shape, (start, *(0 for _ in shape[1:])), ref.shape), ref.extent))
        start += ref.shape[0]
    return TensorRef(name, first.dtype, shape, slices=tuple(slices))


def _boxes(ref: TensorRef) -> frozenset[SliceSpec]:
    return frozenset(part.spec for part in ref.slices)


def _strategies(catalog: Catalog) -> Mapping[str, PartitionStrategy]:
    """Return the partition strategies of tables, by name, from the graph (`.meta`) beside a checkpoint.

    {} without such a graph. Raises CorruptFile or GraphError if it is damaged, LfsPointer if it is a Git LFS
    pointer, UsageError if it cannot be opened.
    """
    path = catalog.prefix.with_name(f"{catalog.prefix.name}.meta")
    return trained_strategies(read_metagraph(path)) if path.is_file() else {}


def _strategy(strategies: Mapping[str, PartitionStrategy], name: str) -> PartitionStrategy | None:
    """Return the partition strategy of a table, or of the table to which a slot or an average belongs.

    `strategies` are by table name. The owner is the table with the shortest name that `name` begins with.
    None if no strategy is known.
    """
    owners = [owner for owner in strategies if name == owner or name.startswith(f"{owner}/")]
    return strategies[min(owners, key=len)] if owners else None


def _is_mod(ref: TensorRef, strategy: PartitionStrategy | None) -> bool:
    """True if a table's rows are distributed in turn over its slices (row i in slice i modulo their number).

    That is so if its `strategy` is `mod`, the tensor `ref` has several slices, and these have the lengths
    that `mod` gives. False if the strategy is not known (None).
    """
    if strategy is not PartitionStrategy.MOD or len(ref.slices) < 2:
        return False
    boxes = sorted(_boxes(ref), key=lambda box: box.starts)
    return [box.lengths for box in boxes] == [
        (rows, *ref.shape[1:]) for rows in mod_lengths(ref.shape[0], len(boxes))
    ]


Array = np.ndarray[Any, Any]

_ROWS_AT_ONCE = 1 << 16  # of rows of 1 KiB each side holds 64 MiB in memory


class TableDifference(Struct, frozen=True):
    """A table by keys that differs."""

    name: str
    """Its name."""
    keys: int
    """The number of keys on both sides."""
    only_a: int
    """The number of keys only on the first side."""
    only_b: int
    """The number of keys only on the second side."""
    changed_rows: int
    """The number of keys on both sides whose rows differ."""
    norm: float | None
    """The Euclidean norm of these rows' difference; null if it is not finite."""
    largest: float | None
    """The largest absolute difference of an element; null if it is not finite."""

    @property
    def is_empty(self) -> bool:
        """True if both sides hold the same keys and the same bits."""
        return not (self.only_a or self.only_b or self.changed_rows)


class ServedKeys(Struct, frozen=True, eq=False):
    """A published table as keys and their rows."""

    table: ServedTable
    rows: Array
    keys: Array

    @classmethod
    def read(cls, table: ServedTable) -> ServedKeys:
        """Read all keys of a published table, and the numbers of their rows, after verifying its checksums.

        Raises CorruptFile if a checksum differs or the index does not fit, other CheckpointErrors if files
        are gone or cannot be read.
        """
        table.check()
        return cls(table, *table.live())

    @property
    def dtype(self) -> DType:
        """The dtype of the table's rows, as served."""
        return self.table.row_values.dtype

    def values(self, places: Array) -> Array:
        """Read the rows of the keys at `places`, indices of `keys`, in this order and in the served dtype.

        Raises CheckpointError if a file is gone or cannot be read; checksums are not verified again.
        """
        return self.table.state.rows_at(self.table.row_values.name, self.rows[places])


Keyed: TypeAlias = "ServedKeys | TrainedTable"


def tables_of_log(log: DeltaLog, position: int) -> dict[str, Keyed]:
    """Read the keys of a log's dynamic tables at a position, by table name, every checksum verified.

    Raises PositionUnknown if no base reaches the position, CheckpointError or VerificationError if files are
    damaged.
    """
    spec, state = log.base.entry.mapping_spec, log.state(position)
    tables = (ServedTable.of(table, log.schema, state) for table in spec.dynamic)
    return {table.name: ServedKeys.read(table) for table in tables}


def tables_as_served(catalog: Catalog, log: DeltaLog) -> dict[str, Keyed]:
    """Read a checkpoint's embedding variables as a log would serve them, by the log's table names.

    Tables that the checkpoint lacks or has with another dimension are left out; keys that the log's admission
    refuses, too. Raises CheckpointError and subclasses if the tables are damaged or cannot be read; DiskFull
    or PublishError if they cannot be fetched from a store.
    """
    spec: MappingSpec = log.base.entry.mapping_spec
    known = embedding_variables(catalog) if spec.dynamic else {}
    dtypes = {variable.name: variable.dtype for variable in log.schema.variables}
    found: dict[str, Keyed] = {}
    for table in spec.dynamic:
        variable = find_variable(known, spec.trained_name(table))
        if variable is not None and variable.dim == table.dim:
            dtype = dtypes[table.keys[3]]
            found[table.name] = TrainedTable.read(catalog, variable, dtype, spec.admission)
    return found


def common_tables(a: Catalog, b: Catalog) -> tuple[dict[str, Keyed], dict[str, Keyed], set[str]]:
    """Read the embedding variables that both checkpoints have with rows of the same dimension and dtype.

    Returns the tables of `a` and of `b`, each by name, and the names of all tensors of which they consist.
    Raises CheckpointError and subclasses if they are damaged or cannot be read; DiskFull or PublishError if
    they cannot be fetched from a store.
    """
    ours, theirs = embedding_variables(a), embedding_variables(b)
    names = [
        name
        for name in ours
        if name in theirs
        and (ours[name].dim, ours[name].value_dtype) == (theirs[name].dim, theirs[name].value_dtype)
    ]
    tensors = {
        tensor
        for variable in (*map(ours.get, names), *map(theirs.get, names))
        if variable is not None
        for part in variable.parts
        for tensor in part.tensor_names
    }
    return _trained(a, ours, names), _trained(b, theirs, names), tensors


def compare_tables(
    a: Mapping[str, Keyed], b: Mapping[str, Keyed], in_8_bits: Collection[str] = ()
) -> Iterator[TableDifference]:
    """Yield the difference of each table that both sides have with rows of one dtype and shape.

    A table without a difference is yielded, too (`is_empty`).

    `a` and `b` are tables by name; the order is that of `a`. `in_8_bits` has the names of variables,
    `<table>/<part>`, whose rows are codes with a scale: these are measured as numbers. While iterating,
    raises CheckpointError if rows cannot be read, MappingError or NotFinite if a trained value does not fit
    the served dtype.
    """
    for name, ours in a.items():
        theirs = b.get(name)
        if theirs is not None and _row_form(ours) == _row_form(theirs):
            yield _compare_keys(name, ours, theirs, is_coded=f"{name}/{VALUES}" in in_8_bits)


def _row_form(table: Keyed) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and the shape of a table's rows."""
    return table.dtype, table.values(np.empty(0, np.int64)).shape[1:]


def _trained(catalog: Catalog, known: Mapping[str, EmbeddingVariable], names: list[str]) -> dict[str, Keyed]:
    return {name: TrainedTable.read(catalog, known[name], known[name].value_dtype) for name in names}


def _compare_keys(name: str, a: Keyed, b: Keyed, *, is_coded: bool) -> TableDifference:
    """Compare two tables by their keys, and the rows of common keys bit for bit; `name` is the table's.

    With `is_coded`, rows are codes with a scale, and norm and largest difference are measured between the
    numbers. Both are None for rows that are not numbers. Raises CheckpointError if rows cannot be read,
    MappingError or NotFinite if a trained value does not fit the served dtype.
    """
    ours, theirs = np.argsort(a.keys), np.argsort(b.keys)
    in_both, in_ours = among(a.keys[ours], b.keys[theirs]), among(b.keys[theirs], a.keys[ours])
    places_a, places_b = ours[in_both], theirs[in_ours]
    changed = 0

    def differing() -> Iterator[tuple[Array, Array]]:
        nonlocal changed
        for start in range(0, len(places_a), _ROWS_AT_ONCE):
            step = slice(start, start + _ROWS_AT_ONCE)
            before, after = a.values(places_a[step]), b.values(places_b[step])
            differ = differing_rows(before, after)
            changed += len(differ)
            yield before[differ], after[differ]

    norm, largest = _norms(_numbers(differing(), is_coded=is_coded))
    gone, come = int(np.count_nonzero(~in_both)), int(np.count_nonzero(~in_ours))
    return TableDifference(name, len(places_a), gone, come, changed, norm, largest)


_HASHER = BlockHasher(0)  # a fixed seed, as hashes are not kept: so a comparison has the same tasks again


class ComparedState(Struct, frozen=True):
    """One of two states: position `at` of a `log`, or a checkpoint, `catalog`."""

    label: str
    at: Position | None
    log: DeltaLog | None = None
    catalog: Catalog | None = None

    @property
    def published(self) -> LayeredState | None:
        """The values at the log's position, to be read on demand; None for a checkpoint.

        Raises PositionUnknown if no base reaches it, CheckpointError or VerificationError if files are
        damaged.
        """
        return self.log.state(self.at.position) if self.log is not None and self.at is not None else None

    @property
    def side(self) -> Side:
        """The state's name, position and step, without its values."""
        position = self.at.position if self.at is not None and self.log is not None else None
        return Side(self.label, position, None if self.at is None else self.at.step)


class Side(Struct, frozen=True):
    """One side of a comparison."""

    label: str
    """What was compared, as it was named."""
    position: int | None
    """Its position, if it is published."""
    step: int | None
    """Its training step."""

    def __str__(self) -> str:
        if self.position is not None:
            return f"{self.label}, position {Position(self.position, self.step)}"
        return self.label if self.step is None else f"{self.label}, step {self.step}"


class VariableDifference(Struct, frozen=True):
    """A variable that differs."""

    name: str
    """Its name."""
    changed_rows: int
    """The number of its rows that differ."""
    rows: int
    """The number of its rows."""
    norm: float | None
    """The Euclidean norm of the difference; null if it is not finite."""
    largest: float | None
    """The largest absolute difference of an element; null if it is not finite."""


class Differences(Struct, frozen=True):
    """The document that `diff` prints."""

    a: Side
    """The first side."""
    b: Side
    """The second side."""
    equal: bool
    """True if both hold the same variables with the same bits."""
    compared: int
    """How many variables both have."""
    variables: tuple[VariableDifference, ...]
    """Those that differ."""
    tables: tuple[TableDifference, ...]
    """Tables by keys that differ."""
    only_a: tuple[str, ...]
    """Names that only the first side has."""
    only_b: tuple[str, ...]
    """Names that only the second side has."""

    @property
    def is_empty(self) -> bool:
        """True if the states hold the same bits."""
        return self.equal


def parse_side(text: str) -> ComparedState:
    """Read the state that an argument of `diff` names: a checkpoint, a version, or a model and its position.

    A URL is read through a local mirror. Values are not read yet.

    Raises:
        UsageError: the position is malformed, or nothing is published under the model of `MODEL@POSITION`.
        PositionUnknown: no position has this name, or its values are gone.
        ExportError: the state cannot be read, see errors.py.
    """
    if Url.parse(text) is not None:
        path = mirror.local(Path(text))
    else:
        text = local_name("side", text)
        path = Path(text)
        named = split_position(text)
        # A path may itself hold an `@`.
        if named is not None and not path.exists():
            model = Path(named[0])
            if not named[1].isdecimal() and newest_version(model) is None:
                raise UsageError(f"{text!r}: expected MODEL@POSITION", cause=f"{model} is not a model")
            return _of_model(model, resolve_position(named[1], model), text)
    # First: `open_checkpoint` opens a version, too, with its hot rows as further tensors.
    if index_path(path / VARIABLES_PREFIX).exists():
        return _of_catalog(without_layout(read_catalog(path / VARIABLES_PREFIX)), text)
    if path.is_dir() and newest_version(path) is not None:
        return _of_model(path, None, text)
    return _of_catalog(open_checkpoint(path), text)


def compare(a: ComparedState, b: ComparedState, runner: Runner | None = None) -> Differences:
    """Compare two states bit for bit and return their differences.

    Tables are compared by tasks of `runner`, or in this process if it is None. In a temporary directory,
    scratch files are written, and the tensors of an archive are copied.

    Raises:
        UsageError: they have no variable in common.
        ExportError: a side cannot be read, or the engine of `runner` failed; see errors.py.
        OSError: a file cannot be read, or nothing can be written in the temporary directory.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = _as_bundle(a, Path(scratch) / "a"), _as_bundle(b, Path(scratch) / "b")
        return _compare(*sides, Comparison(Path(scratch), hasher=_HASHER, runner=runner, changes=True))


def _as_bundle(side: ComparedState, directory: Path) -> ComparedState:
    """Return a side whose rows can be read in place: an archive's tensors are first copied into `directory`.

    Raises CheckpointError if the archive is damaged or cannot be read, PublishError if nothing can be
    written.
    """
    if side.catalog is None or side.catalog.is_bundle:
        return side
    catalog = write_bundle(side.catalog, side.catalog.tensors.values(), directory / "model.ckpt")
    # The archive's own prefix: errors name it.
    return replace(side, catalog=replace(catalog, prefix=side.catalog.prefix))


def _compare(a: ComparedState, b: ComparedState, how: Comparison) -> Differences:
    """Compare two states whose rows can be read in place; `how` has the scratch directory and the runner.

    Raises UsageError if they have no variable in common, CheckpointError or VerificationError (and
    subclasses) if one is damaged, GraphError or UsageError if a graph beside a checkpoint is needed and
    cannot be read, SchemaChanged or MappingError if a checkpoint does not fit the log it is compared with,
    EngineFailed from the runner's engine, OSError if scratch files cannot be written.
    """
    tables, apart = _compared_tables(a, b)
    old, new = _variables(a, b, apart), _variables(b, a, apart)
    contents = _lookups(a) | _lookups(b)
    comparable = {
        name
        for name, variable in old.items()
        if name in new
        and variable.dtype is new[name].dtype
        and (variable.shape == new[name].shape or name in contents)
    }
    # A lookup table only with both of its halves: a schema refuses one alone.
    common = [name for name in old if comparable >= {name, *contents.get(name, (name,))}]
    if not common and not tables:
        raise UsageError(f"{a.label} and {b.label} have no variable in common")
    schema = Schema.of(
        contents[name][name] if name in contents else _as_compared(old[name]) for name in common
    )
    states = (a.published or LayeredState(old), b.published or LayeredState(new))
    found = diff(*states, schema, how)
    in_8_bits = _in_8_bits(a) | _in_8_bits(b)
    variables = tuple(
        _difference(variable, states[0], found.changes[variable.name], is_coded=variable.name in in_8_bits)
        for variable in schema.variables
        if variable.name in found.changes
    )
    shared, differ = set(common), tuple(table for table in tables if not table.is_empty)
    only_a, only_b = (tuple(sorted(side.keys() - shared)) for side in (old, new))
    equal = not any((variables, differ, only_a, only_b))
    return Differences(a.side, b.side, equal, len(common) + len(tables), variables, differ, only_a, only_b)


def _compared_tables(a: ComparedState, b: ComparedState) -> tuple[tuple[TableDifference, ...], set[str]]:
    """Compare the tables by keys that both sides have with rows of one dtype and shape.

    Returns their differences, also empty ones of equal tables, and the names of all variables (for two
    checkpoints: tensors) of which these tables consist. Raises CheckpointError or VerificationError if
    a table is damaged or cannot be read, MappingError or NotFinite if a trained value does not fit the
    served dtype, PositionUnknown if a log's values are gone.
    """
    if a.log is None and b.log is None:
        assert a.catalog is not None
        assert b.catalog is not None
        ours, theirs, apart = common_tables(a.catalog, b.catalog)
        return tuple(compare_tables(ours, theirs)), apart
    found = tuple(compare_tables(_tables(a, b), _tables(b, a), _in_8_bits(a) | _in_8_bits(b)))
    names = {table.name for table in found}
    logs = (side.log for side in (a, b) if side.log is not None)
    dynamic = (table for log in logs for table in log.base.entry.mapping_spec.dynamic)
    return found, {key for table in dynamic if table.name in names for key in table.keys}


def _tables(side: ComparedState, other: ComparedState) -> dict[str, Keyed]:
    """Read a side's tables by keys, by name, in the form that a log serves.

    A log's tables are read at its position, a checkpoint's as the other side's log would serve them. At least
    one side must be a log's. Raises CheckpointError or VerificationError if tables are damaged or cannot be
    read, PositionUnknown if the log's values are gone, PublishError if tables cannot be fetched
    from a store.
    """
    if side.log is not None and side.at is not None:
        return tables_of_log(side.log, side.at.position)
    assert side.catalog is not None
    assert other.log is not None
    return tables_as_served(side.catalog, other.log)


def _of_model(model: Path, position: int | None, label: str) -> ComparedState:
    """Return a model's state at a position, also of a log that has ended; the newest if `position` is None.

    `label` names it for people. Raises PositionUnknown if the position is not published or its values are
    gone, NotUpdatable if nothing is published, ManifestError or CheckpointError if it cannot be read.
    """
    there = Standing.of(model)
    at = there.newest if position is None else position
    there.require(at)
    if (log := there.log_at(at)) is None:
        return _of_catalog(without_layout(read_catalog(there.plain[at] / VARIABLES_PREFIX)), label)
    return ComparedState(label, Position(at, log.trained_at(at)[1]), log=log)


def _of_catalog(catalog: Catalog, label: str) -> ComparedState:
    at = None if catalog.step is None else Position(catalog.step, catalog.step)
    return ComparedState(label, at, catalog=catalog)


def _variables(side: ComparedState, other: ComparedState, apart: Collection[str]) -> dict[str, RowReader]:
    """Return readers of a side's variables, by name: as served if either side is a log's, else by tensors.

    `apart` are the names of variables of tables that are compared by keys: they are left out. Raises
    SchemaChanged or MappingError if a checkpoint lacks a variable that the other side's log serves,
    CheckpointError if it cannot be read, GraphError or UsageError if a graph beside a checkpoint is needed
    and cannot be read.
    """
    if (published := side.published) is not None:
        return {name: reader for name, reader in published.stored.items() if name not in apart}
    assert side.catalog is not None
    if other.log is not None:
        mapping = other.log.base.entry.mapping_spec.mapping(side.catalog)
        found = (v for source in mapping.sources for v in row_readers(side.catalog, source))
        return {variable.name: variable for variable in found}
    assert other.catalog is not None
    return side_by_side(_without(side.catalog, apart), _without(other.catalog, apart))


def _without(catalog: Catalog, names: Collection[str]) -> Catalog:
    return replace(catalog, tensors={n: ref for n, ref in catalog.tensors.items() if n not in names})


def _lookups(side: ComparedState) -> dict[str, dict[str, ServedVariable]]:
    """Return the two variables (keys, values) of each lookup table of a log, by the name of either variable.

    The two are again by their names. They are compared whole, as the number of entries differs between
    positions. {} if `side` is a checkpoint.
    """
    pairs = side.log.schema.lookups if side.log is not None else ()
    return {half.name: {each.name: each for each in pair} for pair in pairs for half in pair}


def _as_compared(variable: RowReader) -> ServedVariable:
    """Return the form in which to compare a variable: by rows, or whole if rows cannot be read one by one."""
    by_rows = variable.is_row_addressable and math.prod(variable.shape) > 0
    kind = ChangeKind.TABLE if by_rows else ChangeKind.DENSE
    return ServedVariable(variable.name, variable.dtype, variable.shape, kind)


def _in_8_bits(side: ComparedState) -> set[str]:
    """Return the names of a log's variables whose rows are 8-bit codes with a scale.

    An empty set if `side` is a checkpoint.
    """
    sources = side.log.base.entry.mapping_spec.sources() if side.log is not None else ()
    return {part.served_name for source in sources if source.is_in_8_bits for part in source.variables}


def _difference(
    variable: ServedVariable, old: LayeredState, change: Change, *, is_coded: bool
) -> VariableDifference:
    """Measure a variable's `change` from the state `old`: the changed rows' number, and their distance.

    A variable that is not a table counts as one row. With `is_coded`, rows are codes with a scale, and the
    distance is between the numbers. Norm and largest difference are None for lookup tables and values that
    are not numbers. Raises CheckpointError if old values cannot be read.
    """
    rows = variable.shape[0] if variable.kind is ChangeKind.TABLE else 1
    if isinstance(change, Rows):
        pairs: Iterable[tuple[Array, Array]] = (
            (old.rows_at(variable.name, change.ids[start:stop]), change.values[start:stop])
            for start in range(0, len(change.ids), _ROWS_AT_ONCE)
            for stop in [start + _ROWS_AT_ONCE]
        )
        pairs = _numbers(pairs, is_coded=is_coded)
        count = len(change.ids)
    else:
        count = 1
        pairs = [] if variable.contents else [(old.whole(variable.name), change)]
    norm, largest = (None, None) if variable.contents else _norms(pairs)
    return VariableDifference(variable.name, count, rows, norm, largest)


def _numbers(pairs: Iterable[tuple[Array, Array]], *, is_coded: bool) -> Iterable[tuple[Array, Array]]:
    """Return pairs of (old, new) rows as numbers: with `is_coded`, codes are multiplied by their scale."""
    return ((values_of(old), values_of(new)) for old, new in pairs) if is_coded else pairs


def _norms(pairs: Iterable[tuple[Array, Array]]) -> tuple[float | None, float | None]:
    """Return the Euclidean norm and the largest absolute element of the differences of all pairs.

    Pairs are (old, new) arrays. Both are None for strings and booleans, 0 without pairs, and may be infinite
    or NaN.
    """
    squares = largest = 0.0
    for before, after in pairs:
        if before.dtype == object or before.dtype.kind == "b":
            return None, None
        # Differences of unsigned integers would wrap round, squares of float16 be infinite.
        wide = np.complex128 if before.dtype.kind == "c" else np.float64
        moved = np.abs(after.astype(wide) - before.astype(wide))
        squares += float((moved**2).sum())
        largest = float(np.maximum(largest, moved.max(initial=0.0)))  # `max` passes over NaN
    return math.sqrt(squares), largest
