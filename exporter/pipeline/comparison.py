"""`diff A B`: compare two states, checkpoints or published positions, by variables and rows.

A side is a checkpoint (directory or prefix), a published version, or a model with a position: `MODEL` for the
newest, `MODEL@POSITION` for another.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.convert import write_bundle
from exporter.checkpoint.tensor_bundle import index_path, read_catalog
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import Change, ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.row_hashes import BlockHasher
from exporter.delta.row_reader import RowReader, row_readers
from exporter.delta.snapshot import Snapshot
from exporter.delta.spans import Position
from exporter.errors import NotUpdatable, UsageError
from exporter.jobs.runner import Runner
from exporter.layout import VARIABLES_PREFIX
from exporter.local_paths import local_name
from exporter.pipeline.layouts import side_by_side
from exporter.pipeline.table_comparison import (
    Keyed,
    TableDifference,
    common_tables,
    compare_tables,
    tables_as_served,
    tables_of_log,
)
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.versions import newest_version, published_versions
from exporter.storage import mirror
from exporter.storage.url import Url

Array = np.ndarray[Any, Any]

_HASHER = BlockHasher(0)  # nobody keeps the hashes, and the tasks of one comparison are always the same
_ROWS_AT_ONCE = 1 << 16


class Side(Struct, frozen=True):
    """One of two states. `log` is the one that it is a position of; `catalog` the checkpoint that it is."""

    label: str
    at: Position | None
    log: DeltaLog | None = None
    catalog: Catalog | None = None


class VariableDifference(Struct, frozen=True):
    """How a variable differs: rows of `rows`, the Euclidean norm and the largest element of the difference.

    The norms are None for values that are no numbers, and for lookup tables.
    """

    name: str
    changed_rows: int
    rows: int
    norm: float | None
    largest: float | None


class Differences(Struct, frozen=True):
    """What differs between two states; `only_a` and `only_b` are variables that the other lacks or has
    otherwise. `tables` are compared by their keys.
    """

    a: Side
    b: Side
    variables: tuple[VariableDifference, ...]
    compared: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tables: tuple[TableDifference, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if the states hold the same bits."""
        return not (self.variables or self.tables or self.only_a or self.only_b)


def parse_side(text: str) -> Side:
    """What an argument of `diff` names.

    Raises:
        UsageError: the position is malformed.
        ExportError: what is named cannot be read, see errors.py.
    """
    if Url.parse(text) is not None:
        path = mirror.local(Path(text))
    else:
        text = local_name("side", text)
        path = Path(text)
        name, at, position = text.rpartition("@")
        if at and not path.exists():
            if not position.isdecimal():
                raise UsageError(f"{text!r}: expected MODEL@POSITION")
            return _of_model(Path(name), int(position), text)
    if index_path(path / VARIABLES_PREFIX).exists():
        return _of_catalog(read_catalog(path / VARIABLES_PREFIX), text)
    if path.is_dir() and newest_version(path) is not None:
        return _of_model(path, None, text)
    return _of_catalog(open_checkpoint(path), text)


def compare(a: Side, b: Side, runner: Runner | None = None) -> Differences:
    """Compare two states bit for bit; with a `runner`, tables by its tasks.

    Raises:
        ExportError: a side cannot be read, or they have nothing in common; see errors.py.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = _as_bundle(a, Path(scratch) / "a"), _as_bundle(b, Path(scratch) / "b")
        return _compare(*sides, Comparison(Path(scratch), hasher=_HASHER, runner=runner, changes=True))


def _as_bundle(side: Side, directory: Path) -> Side:
    """A side whose rows can be read where they lie: an archive is streamed into a tensor bundle first."""
    if side.catalog is None or side.catalog.is_bundle:
        return side
    catalog = write_bundle(side.catalog, side.catalog.tensors.values(), directory / "model.ckpt")
    return replace(side, catalog=catalog)


def _compare(a: Side, b: Side, how: Comparison) -> Differences:
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
    common = [name for name in old if comparable >= {name, *contents.get(name, (name,))}]
    if not common and not tables:
        raise UsageError(f"{a.label} and {b.label} have no variable in common")
    schema = Schema.of(
        contents[name][name] if name in contents else _as_compared(old[name]) for name in common
    )
    states = (_state(a, old), _state(b, new))
    found = diff(*states, schema, how)
    variables = tuple(
        _difference(variable, states[0], found.changes[variable.name])
        for variable in schema.variables
        if variable.name in found.changes
    )
    shared = set(common)
    return Differences(
        a,
        b,
        variables,
        len(common) + len(tables),
        tuple(sorted(old.keys() - shared)),
        tuple(sorted(new.keys() - shared)),
        tuple(table for table in tables if not table.is_empty),
    )


def _compared_tables(a: Side, b: Side) -> tuple[tuple[TableDifference, ...], set[str]]:
    """The tables that both sides have, compared by keys, and the variables that these are made of."""
    if a.log is None and b.log is None:
        assert a.catalog is not None
        assert b.catalog is not None
        ours, theirs, apart = common_tables(a.catalog, b.catalog)
        return tuple(compare_tables(ours, theirs)), apart
    found = tuple(compare_tables(_tables(a, b), _tables(b, a)))
    names = {table.name for table in found}
    logs = (side.log for side in (a, b) if side.log is not None)
    dynamic = (table for log in logs for table in log.base.entry.mapping_spec.dynamic)
    return found, {key for table in dynamic if table.name in names for key in table.keys}


def _tables(side: Side, other: Side) -> dict[str, Keyed]:
    if side.log is not None and side.at is not None:
        return tables_of_log(side.log, side.at.position)
    assert side.catalog is not None
    assert other.log is not None
    return tables_as_served(side.catalog, other.log)


def _of_model(model: Path, position: int | None, label: str) -> Side:
    """What is published at a position, or the newest; of versions that take no deltas, one of them."""
    try:
        log = read_log(model)
    except NotUpdatable:
        versions = published_versions(model)
        found = next((child for child in versions if position in (None, child.version)), None)
        if found is None:
            raise
        return _of_catalog(read_catalog(found.path / VARIABLES_PREFIX), label)
    return _of_log(log, log.at.position if position is None else position, label)


def _of_log(log: DeltaLog, position: int, label: str) -> Side:
    _, step = log.trained_at(position)
    return Side(label, Position(position, step), log=log)


def _of_catalog(catalog: Catalog, label: str) -> Side:
    return Side(
        label, None if catalog.step is None else Position(catalog.step, catalog.step), catalog=catalog
    )


def _variables(side: Side, other: Side, apart: Collection[str]) -> dict[str, RowReader]:
    """The variables of a side: as they are served if either is a position of a log, else by tensor.

    Those that are compared apart are left out.
    """
    if side.log is not None and side.at is not None:
        stored = side.log.state(side.at.position).stored
        return {name: reader for name, reader in stored.items() if name not in apart}
    assert side.catalog is not None
    if other.log is not None:
        mapping = other.log.base.entry.mapping_spec.mapping(side.catalog)
        found = (v for source in mapping.sources for v in row_readers(side.catalog, source))
        return {variable.name: variable for variable in found}
    assert other.catalog is not None
    return side_by_side(_without(side.catalog, apart), _without(other.catalog, apart))


def _without(catalog: Catalog, names: Collection[str]) -> Catalog:
    return replace(catalog, tensors={n: ref for n, ref in catalog.tensors.items() if n not in names})


def _lookups(side: Side) -> dict[str, dict[str, ServedVariable]]:
    """For the keys and for the values of each lookup table both, by their names.

    They are compared whole: they are as long as they are at a position, not as in the base.
    """
    pairs = side.log.schema.lookups if side.log is not None else ()
    return {half.name: {each.name: each for each in pair} for pair in pairs for half in pair}


def _state(side: Side, variables: dict[str, RowReader]) -> Snapshot:
    if side.log is not None and side.at is not None:
        return side.log.state(side.at.position)
    return Snapshot(variables)


def _as_compared(variable: RowReader) -> ServedVariable:
    by_rows = variable.is_row_addressable and math.prod(variable.shape) > 0
    kind = ChangeKind.TABLE if by_rows else ChangeKind.DENSE
    return ServedVariable(variable.name, variable.dtype, variable.shape, kind)


def _difference(variable: ServedVariable, old: Snapshot, change: Change) -> VariableDifference:
    rows = variable.shape[0] if variable.kind is ChangeKind.TABLE else 1
    if isinstance(change, Rows):
        pairs: Iterable[tuple[Array, Array]] = (
            (old.rows_at(variable.name, change.ids[start:stop]), change.values[start:stop])
            for start in range(0, len(change.ids), _ROWS_AT_ONCE)
            for stop in [start + _ROWS_AT_ONCE]
        )
        count = len(change.ids)
    else:
        count = 1
        pairs = [] if variable.contents else [(old.whole(variable.name), change)]
    norm, largest = (None, None) if variable.contents else _norms(pairs)
    return VariableDifference(variable.name, count, rows, norm, largest)


def _norms(pairs: Iterable[tuple[Array, Array]]) -> tuple[float | None, float | None]:
    squares = largest = 0.0
    for before, after in pairs:
        if before.dtype == object or before.dtype.kind == "b":
            return None, None
        wide = np.complex128 if before.dtype.kind == "c" else np.float64
        moved = np.abs(after.astype(wide) - before.astype(wide))
        squares += float((moved**2).sum())
        largest = max(largest, float(moved.max(initial=0.0)))
    return math.sqrt(squares), largest
