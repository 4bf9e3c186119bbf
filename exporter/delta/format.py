"""The delta's format, version 1: what changed between two positions, as a tensor bundle of one shard.

A delta is `delta.index` and `delta.data-00000-of-00001` in `<model>/deltas/<log>/<from>-<to>/`; positions
have 20 digits, are below 10**18, and `from < to`. It is tied to a log by its *lineage* and to the served
variables by their *schema*. It always holds the same tensors, so that a graph can name them beforehand:

    delta/position   int64 [6]   version (1), from, to, step, flags, rows (of all tables together)
    delta/lineage    string []   the log's random id
    delta/schema     string []   the schema's digest, hex

and for each variable of the schema, under its name:

    table:  <name>/ids      int64 [n]            rows that changed, strictly increasing, 0 <= id < rows
            <name>/values   dtype [n, ...]       their values, whole rows
    dense:  <name>/value    dtype [k, ...]       k = 1: the whole value; k = 0: it did not change

Values are absolute: a delta may be applied twice, and it fits every state of its log at a position `p` with
`from <= p < to`. Flag 1 (`only_from`) says that it fits `p = from` alone, because rows were left out or
rounded. Flags that a reader does not know make a delta unreadable to it.

The *schema* is what is served and how the graph reads it, variable by variable in the order of their names:
name, dtype and shape as served, kind. A variable that the graph only gathers rows from is a *table*, one that
it reads whole is *dense*. Each part of a partitioned variable is a variable of its own, `<key>[<its slice>]`,
with row numbers of its own: the graph needs no arithmetic to find a row, and the encoder, which knows the
order of the parts' rows, does it once. The digest is the SHA-256 of the schema's JSON form without spaces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.tensor_bundle import BundleWriter, memory_map, read_array, read_catalog
from exporter.dtypes import DType
from exporter.errors import CorruptFile, UnsupportedFormat

Array = np.ndarray[Any, Any]

FORMAT_VERSION = 1
FILE_PREFIX = "delta"
POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY = "delta/position", "delta/lineage", "delta/schema"
POSITION_LIMIT = 10**18
"""Positions are smaller: 20 digits of a name that always fit an int64."""


def log_name(first_position: int) -> str:
    """The directory under `deltas/` of the log that began with a base at this position."""
    return f"{first_position:020d}"


class Kind(StrEnum):
    """How a served variable changes: by rows, or as a whole."""

    TABLE = "table"
    DENSE = "dense"


class Flag(IntFlag):
    """What `delta/position` may say beyond positions."""

    ONLY_FROM = 1


@dataclass(frozen=True, slots=True)
class ServedVariable:
    """A variable as a delta sees it; `shape` and `dtype` are the served ones."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its tensors in a delta: ids and values, or the value."""
        if self.kind is Kind.TABLE:
            return f"{self.name}/ids", f"{self.name}/values"
        return (f"{self.name}/value",)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of the tensors that `keys` names."""
        return (DType.INT64, self.dtype) if self.kind is Kind.TABLE else (self.dtype,)

    @property
    def element_shape(self) -> tuple[int, ...]:
        """The shape of what one entry of the first dimension holds: a row, or the whole variable."""
        return self.shape[1:] if self.kind is Kind.TABLE else self.shape


@dataclass(frozen=True)
class Schema:
    """The served variables in the order of their names."""

    variables: tuple[ServedVariable, ...]

    @classmethod
    def of(cls, variables: Iterable[ServedVariable]) -> Schema:
        """The schema of these variables, in whatever order they come.

        Raises:
            ValueError: two have one name, or two tensors of a delta would.
        """
        schema = cls(tuple(sorted(variables, key=lambda variable: variable.name)))
        keys = [POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY, *schema.keys]
        if len(set(keys)) != len(keys):
            raise ValueError(f"tensors of a delta would share a name: {_first_double(keys)!r}")
        return schema

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all variables' tensors in a delta, in order."""
        return tuple(key for variable in self.variables for key in variable.keys)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of the tensors that `keys` names."""
        return tuple(dtype for variable in self.variables for dtype in variable.dtypes)

    @cached_property
    def digest(self) -> str:
        """64 hex digits that two schemas share only if they are equal."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> list[list[Any]]:
        """The schema as a JSON value: `[name, dtype, shape, kind]` of each variable."""
        return [[v.name, v.dtype.label, list(v.shape), v.kind.value] for v in self.variables]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """The schema that `to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            return cls.of(
                ServedVariable(str(name), DType.of(dtype), tuple(map(int, shape)), Kind(kind))
                for name, dtype, shape, kind in value
            )
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a schema: {exc}") from exc


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """Which states a delta fits, and where it leads."""

    lineage: str
    schema_digest: str
    from_position: int
    to_position: int
    step: int
    only_from: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.from_position < self.to_position < POSITION_LIMIT:
            raise ValueError(f"a delta cannot lead from {self.from_position} to {self.to_position}")

    @property
    def directory_name(self) -> str:
        """The name of its directory: `00000000000000000100-00000000000000000120`."""
        return f"{self.from_position:020d}-{self.to_position:020d}"

    def accepts(self, position: int) -> bool:
        """True if a state of the same log and schema at `position` may take the delta."""
        if self.only_from:
            return position == self.from_position
        return self.from_position <= position < self.to_position


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table: `ids` int64 [n], strictly increasing; `values` [n, ...] in the table's dtype."""

    ids: Array
    values: Array


Change = Rows | Array
"""What a delta holds for a variable: rows of a table, or a dense variable's whole value."""


@dataclass(frozen=True)
class Delta:
    """A delta on disk: what it says of itself, and as memory maps what changed."""

    header: DeltaHeader
    catalog: Catalog
    changes: Mapping[str, Change]

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(len(change.ids) for change in self.changes.values() if isinstance(change, Rows))


def write_delta(
    prefix: Path, schema: Schema, header: DeltaHeader, changes: Mapping[str, Change]
) -> tuple[TensorRef, ...]:
    """Write the bundle `prefix`.index and .data-00000-of-00001; a variable without a change is left out.

    Returns the tensors that were written. Nothing is synced and nothing is published by this.

    Raises:
        ValueError: a change does not fit its variable, or names none of the schema.
    """
    if header.schema_digest != schema.digest:
        raise ValueError("the header names another schema")
    unknown = changes.keys() - {variable.name for variable in schema.variables}
    if unknown:
        raise ValueError(f"the schema has no variable {min(unknown)!r}")
    tensors = [array for v in schema.variables for array in _tensors(v, changes.get(v.name))]
    rows = sum(len(change.ids) for change in changes.values() if isinstance(change, Rows))
    with BundleWriter(prefix) as writer:
        writer.add(POSITION_KEY, _position(header, rows))
        writer.add(LINEAGE_KEY, np.array(header.lineage.encode(), object))
        writer.add(SCHEMA_KEY, np.array(header.schema_digest.encode(), object))
        for key, array in zip(schema.keys, tensors, strict=True):
            writer.add(key, array)
    return writer.tensors


def read_header(catalog: Catalog) -> DeltaHeader:
    """What the delta in `catalog` says of itself, checksums verified.

    Raises:
        UnsupportedFormat: it is not a delta, or of another version.
        CorruptFile: a checksum or a value is wrong.
    """
    return _header(catalog)[0]


def read_delta(prefix: Path, schema: Schema) -> Delta:
    """The delta at `prefix`, its structure checked against `schema`; the values' checksums are not read.

    Raises:
        CheckpointError: it cannot be read, see errors.py.
        UnsupportedFormat: it is not a delta, of another version, or made for other variables.
        CorruptFile: a checksum, a row number or the number of rows is wrong.
    """
    catalog = read_catalog(prefix)
    header, rows = _header(catalog)
    if header.schema_digest != schema.digest:
        raise UnsupportedFormat(
            f"{prefix} was made for other variables",
            cause=f"its schema is {header.schema_digest[:12]}, expected {schema.digest[:12]}",
        )
    found = {v.name: change for v in schema.variables if (change := _change(catalog, v)) is not None}
    delta = Delta(header, catalog, found)
    if delta.rows != rows:
        raise CorruptFile(f"{prefix} is damaged: it tells of {rows} rows and holds {delta.rows}")
    return delta


def _position(header: DeltaHeader, rows: int) -> Array:
    flags = Flag.ONLY_FROM if header.only_from else Flag(0)
    fields = (FORMAT_VERSION, header.from_position, header.to_position, header.step, flags, rows)
    return np.array(fields, np.int64)


def _header(catalog: Catalog) -> tuple[DeltaHeader, int]:
    position = _read(catalog, POSITION_KEY, DType.INT64, (6,))
    version, start, end, step, flags, rows = position.tolist()
    if version != FORMAT_VERSION or flags & ~sum(Flag):
        raise UnsupportedFormat(
            f"{catalog.prefix} has delta format {version} with flags {flags}; "
            f"this program reads format {FORMAT_VERSION} with flags {sum(Flag)} or fewer",
            hint="use the export-model that published it, or a newer one",
        )
    lineage = _read(catalog, LINEAGE_KEY, DType.STRING, ()).item().decode(errors="replace")
    digest = _read(catalog, SCHEMA_KEY, DType.STRING, ()).item().decode(errors="replace")
    try:
        return DeltaHeader(lineage, digest, start, end, step, bool(flags & Flag.ONLY_FROM)), rows
    except ValueError as exc:
        raise CorruptFile(f"{catalog.prefix} is damaged: {exc}") from exc


def _read(catalog: Catalog, key: str, dtype: DType, shape: tuple[int, ...]) -> Array:
    return read_array(catalog, _ref(catalog, key, dtype, shape))


def _ref(catalog: Catalog, key: str, dtype: DType, shape: tuple[int | None, ...]) -> TensorRef:
    """The tensor `key`, which has this dtype and, where it is not None, this shape."""
    ref = catalog.tensors.get(key)
    if ref is None:
        raise UnsupportedFormat(f"{catalog.prefix} is not a delta: it has no tensor {key!r}")
    fits = len(ref.shape) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, ref.shape, strict=True)
    )
    if ref.dtype is not dtype or not fits or ref.extent is None:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise CorruptFile(
            f"{catalog.prefix} is damaged: {key!r} is {ref.dtype.label}{list(ref.shape)}, "
            f"expected {dtype.label}[{wanted}]"
        )
    return ref


def _change(catalog: Catalog, variable: ServedVariable) -> Change | None:
    refs = [
        _ref(catalog, key, dtype, (None, *(variable.element_shape if key == variable.keys[-1] else ())))
        for key, dtype in zip(variable.keys, variable.dtypes, strict=True)
    ]
    if refs[-1].shape[0] == 0 and refs[0].shape[0] == 0:
        return None
    if variable.kind is Kind.DENSE:
        if refs[0].shape[0] != 1:
            raise CorruptFile(f"{catalog.prefix} is damaged: {refs[0].shape[0]} values of {variable.name!r}")
        return _array(catalog, refs[0])[0, ...]
    ids, values = _array(catalog, refs[0]), _array(catalog, refs[1])
    try:
        _check_ids(variable, ids, values)
    except ValueError as exc:
        raise CorruptFile(f"{catalog.prefix} is damaged: {exc}") from exc
    return Rows(ids, values)


def _array(catalog: Catalog, ref: TensorRef) -> Array:
    return read_array(catalog, ref) if ref.dtype is DType.STRING else memory_map(catalog, ref)


def _tensors(variable: ServedVariable, change: Change | None) -> Iterator[Array]:
    """The arrays of `variable.keys`."""
    numpy = np.dtype(object) if variable.dtype is DType.STRING else variable.dtype.numpy
    if change is None:
        if variable.kind is Kind.TABLE:
            yield np.empty(0, np.int64)
        yield np.empty((0, *variable.element_shape), numpy)
        return
    if isinstance(change, Rows) is not (variable.kind is Kind.TABLE):
        raise ValueError(f"{variable.name!r} is {variable.kind.value}, its change is not")
    values = change.values if isinstance(change, Rows) else np.asarray(change)[np.newaxis, ...]
    if values.dtype != numpy or values.shape[1:] != variable.element_shape:
        wanted = f"{variable.dtype.label}{list(variable.element_shape)}"
        raise ValueError(f"{variable.name!r} takes {wanted}, not {values.dtype}{list(values.shape[1:])}")
    if isinstance(change, Rows):
        _check_ids(variable, change.ids, values)
        yield change.ids
    yield values


def _check_ids(variable: ServedVariable, ids: Array, values: Array) -> None:
    if ids.dtype != np.int64 or ids.shape != values.shape[:1]:
        raise ValueError(f"{variable.name!r}: {ids.dtype}{list(ids.shape)} ids for {len(values)} rows")
    increasing = bool((ids[1:] > ids[:-1]).all())
    if len(ids) and not (increasing and ids[0] >= 0 and ids[-1] < variable.shape[0]):
        raise ValueError(
            f"{variable.name!r}: row numbers are not strictly increasing in 0-{variable.shape[0] - 1}"
        )


def _first_double(keys: list[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
