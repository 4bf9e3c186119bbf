"""The format of deltas, version 1: the changes between two positions, as a tensor bundle.

A delta is `delta.index` and `delta.data-00000-of-00001` in `<model>/deltas/<log>/<from>-<to>/`; a large
merged delta has several shards, and the ids and values of a table may be in slices. Positions have 20 digits,
are below 10**18, and `from < to`. It is tied to a log by its *lineage* and to the served variables by their
*schema*. It always holds the same tensors, so that a graph can name them beforehand:

    delta/position   int64 [6]   version (1), from, to, step, flags, rows (of all tables together)
    delta/lineage    string []   the log's random id
    delta/schema     string []   the schema's digest, hex

and for each variable of the schema, under its name:

    table:  <name>/ids      int64 [n]            rows that changed, strictly increasing, 0 <= id < rows
            <name>/values   dtype [n, ...]       their values, whole rows
    dense:  <name>/value    dtype [k, ...]       k = 1: the whole value; k = 0: it did not change

A lookup table that training fills is two dense variables, its keys and its values, as in the checkpoint, with
as many entries as it has then (a table with all buckets: as many as it has buckets). A delta holds both or
neither, and both of one length:

    <name of keys>/value    dtype [k, n, ...]
    <name of values>/value  dtype [k, n, ...]

Values are absolute: a delta may be applied twice, and it fits every state of its log at a position `p` with
`from <= p < to`. Flag 1 (`only_from`) says that it fits only `p = from`, because rows were left out or
rounded; merged deltas of such deltas fit every state inside (`exporter.delta.spans`). A reader must refuse a
delta with flags that it does not know.

Flags 2 and 4 (not both) say that rows are packed, as bfloat16 or as int8 (`exporter.delta.packing`). Tables
of float32 and float64 whose rows get smaller by it then have these tensors, where n = e + m:

    <name>/ids      int64 [n]                all rows, as above
    <name>/values   dtype [e, ...]           rows that no codes give exactly
    <name>/exact    int64 [e]                their places in `ids`, strictly increasing
    <name>/packed   bfloat16|int8 [m, ...]   the codes of the other rows, in order
    <name>/scales   float32 [m]              for int8: 0, or from 2**-126 to 2**120

A packed row equals the values of its codes, bit for bit. Packing concerns only the storage of a delta;
whether rows were *rounded* before, so that they would pack, is in its manifest. A graph that takes deltas
reads all three forms.

The *schema* has the served variables and how the graph reads them, in the order of their names: name, dtype
and shape as served, kind. A variable that the graph only gathers rows from is a *table*, one that it reads
whole is *dense*. Each part of a partitioned variable is a variable of its own, `<key>[<its slice>]`, with row
numbers of its own: the graph needs no arithmetic to find a row, and the encoder, which knows the order of the
parts' rows, does it once. The contents of a lookup table have the shape [-1, ...], and a fifth field: the
table, "keys" or "values", and whether they are buckets. The digest is the SHA-256 of the schema's JSON form
without spaces.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from msgspec import Meta, Struct, convert, to_builtins

from exporter.newer_python import StrEnum
from exporter.options import DeltaDtype
from exporter.wire.dtypes import Array, DType
from exporter.wire.json_documents import DtypeLabel

if TYPE_CHECKING:
    from exporter.catalog import Catalog
    from exporter.delta.packing import RowValues

FORMAT_VERSION = 1  # published graphs refuse any other
POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY = "delta/position", "delta/lineage", "delta/schema"
POSITION_LIMIT = 10**18
"""All positions are smaller: the 20 digits of a name then always fit an int64."""


def log_name(first_position: int) -> str:
    """The name of a log's directory under `deltas/`, for a log that began with a base at this position."""
    return f"{first_position:020d}"


def span_name(start: int, end: int) -> str:
    """Return the name of a delta's directory: `<start>-<end>`, both positions with 20 digits."""
    return f"{start:020d}-{end:020d}"


_LARGE_DENSE_BYTES = 16 << 20  # from this size on a note says that each delta holds the whole variable


class ChangeKind(StrEnum):
    """The way in which a served variable changes: by rows, or as a whole."""

    TABLE = "table"
    DENSE = "dense"


OPEN = -1
"""A first dimension in a served shape that each delta may change."""


class TableSide(StrEnum):
    """One of the two tensors of a lookup table."""

    KEYS = "keys"
    VALUES = "values"


class TableContents(Struct, frozen=True, array_like=True):
    """The half of a lookup table that a variable holds; `table` is the node that makes the table.

    With `has_all_buckets` it has an entry for each bucket; their number is a power of two.
    """

    table: str
    role: TableSide
    has_all_buckets: bool


class Flag(IntFlag):
    """The flags in `delta/position`."""

    ONLY_FROM = 1
    BFLOAT16 = 2
    INT8 = 4


PACKINGS = {DeltaDtype.BFLOAT16: Flag.BFLOAT16, DeltaDtype.INT8: Flag.INT8}
"""The flag of each packing."""


class PackedTensor(Struct, frozen=True):
    """A further tensor of packed rows: its name, its dtype, and its shape after the first dimension."""

    key: str
    dtype: DType
    element_shape: tuple[int, ...] = ()


class ServedVariable(Struct, frozen=True, array_like=True):
    """A variable in a delta, with dtype and shape as served: a row of the schema.

    `contents` is None unless it is half of a lookup table, whose shape is [OPEN, ...].
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: ChangeKind
    contents: TableContents | None = None

    def __post_init__(self) -> None:
        is_open = self.shape[:1] == (OPEN,)
        if is_open is not (self.contents is not None) or (is_open and self.kind is not ChangeKind.DENSE):
            raise ValueError(f"{self.name!r} has shape {list(self.shape)} and is {self.kind.value}")

    @property
    def is_table(self) -> bool:
        """True if the variable changes by rows."""
        return self.kind is ChangeKind.TABLE

    @property
    def bytes_(self) -> int:
        """The bytes of all values as served; 0 for strings.

        Meaningless for keys or values of a lookup table, whose number is open.
        """
        return math.prod(self.shape) * (self.dtype.itemsize or 0)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, as served; of a vector the bytes of an element.

        Raises TypeError for strings.
        """
        return math.prod(self.shape[1:]) * self.dtype.numpy.itemsize

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the variable's tensors in a delta.

        They are `<name>/ids` and `<name>/values` of a table, `<name>/value` of a dense variable.
        """
        if self.kind is ChangeKind.TABLE:
            return f"{self.name}/ids", f"{self.name}/values"
        return (f"{self.name}/value",)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of the tensors in `keys`, in their order."""
        return (DType.INT64, self.dtype) if self.kind is ChangeKind.TABLE else (self.dtype,)

    @property
    def element_shape(self) -> tuple[int | None, ...]:
        """The shape of a table's row, or of a dense variable; None in dimensions where any size fits."""
        if self.kind is ChangeKind.TABLE:
            return self.shape[1:]
        return self.shape if self.contents is None else (None, *self.shape[1:])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if an array of this shape may be a row of the table, or the dense variable's value."""
        wanted = self.element_shape
        return len(shape) == len(wanted) and all(
            size in (None, found) for size, found in zip(wanted, shape, strict=True)
        )

    def packed(self, packing: DeltaDtype | None) -> tuple[PackedTensor, ...]:
        """Return the further tensors of a table whose rows are packed.

        They are `exact`, `packed`, and for int8 `scales`. Empty without packing (None), for dense variables,
        and for tables whose rows would not shrink.
        """
        # late: manifests, with their schemas, are read without numpy
        from exporter.delta.packing import shrinks

        if (
            packing is None
            or self.kind is ChangeKind.DENSE
            or not shrinks(packing, self.dtype, self.shape[1:])
        ):
            return ()
        places = PackedTensor(f"{self.name}/exact", DType.INT64)
        codes = PackedTensor(f"{self.name}/packed", DType.of(packing), self.shape[1:])
        scales = PackedTensor(f"{self.name}/scales", DType.FLOAT)
        return (places, codes) if packing is DeltaDtype.BFLOAT16 else (places, codes, scales)


_Row: TypeAlias = Annotated[tuple[Any, ...], Meta(min_length=4)]


class Schema(Struct, frozen=True, dict=True):
    """The served variables in the order of their names."""

    variables: tuple[ServedVariable, ...]

    @classmethod
    def of(cls, variables: Iterable[ServedVariable]) -> Schema:
        """Return the schema of these variables, sorted by name.

        Raises ValueError if two tensors would have one name (a variable given twice, or one called as the
        header), or a lookup table has only keys or only values.
        """
        schema = cls(tuple(sorted(variables, key=lambda variable: variable.name)))
        keys = [POSITION_KEY, LINEAGE_KEY, SCHEMA_KEY, *schema.keys]
        if doubled := [key for key, count in Counter(keys).items() if count > 1]:
            raise ValueError(f"tensors of a delta would share a name: {doubled[0]!r}")
        halves = [variable for variable in schema.variables if variable.contents]
        if len(halves) != 2 * len(schema.lookups):
            raise ValueError("a lookup table is one variable of keys and one of values")
        return schema

    @cached_property
    def lookups(self) -> tuple[tuple[ServedVariable, ServedVariable], ...]:
        """The variables (keys, values) of each lookup table, ordered by the table's name.

        A table without values is left out.
        """
        halves = {(v.contents.table, v.contents.role): v for v in self.variables if v.contents}
        tables = sorted(table for table, role in halves if role is TableSide.KEYS)
        pairs = ((halves[table, TableSide.KEYS], halves.get((table, TableSide.VALUES))) for table in tables)
        return tuple((keys, values) for keys, values in pairs if values is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all variables' tensors in a delta, in the order of the variables."""
        return tuple(key for variable in self.variables for key in variable.keys)

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes of the tensors in `keys`, in their order."""
        return tuple(dtype for variable in self.variables for dtype in variable.dtypes)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the schema's JSON form without spaces, in hex."""
        # By `json`, which escapes what is not ASCII: published graphs hold the digest, so no byte may change.
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each dense variable of at least 16 MiB: deltas that change it hold all of it.

        Lookup tables are left out.
        """
        whole = (v for v in self.variables if v.kind is ChangeKind.DENSE and v.contents is None)
        return tuple(
            f"variable {v.name!r} is read whole by the graph: every delta that changes it holds all its "
            f"{v.bytes_} bytes"
            for v in whole
            if v.bytes_ >= _LARGE_DENSE_BYTES
        )

    def to_json(self) -> list[list[Any]]:
        """Return the schema as a JSON value: `[name, dtype, shape, kind]` per variable.

        The contents are the fifth element, if there are any.
        """
        return [
            to_builtins([v.name, v.dtype.label, [*v.shape], v.kind, *([v.contents] if v.contents else [])])
            for v in self.variables
        ]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Return the schema that a JSON value in the form of `to_json` describes.

        Raises ValueError if `value` has another form, or `Schema.of` refuses the variables.
        """
        found = convert(value, list[_Row])
        named = convert([row[:2] for row in found], list[tuple[Any, DtypeLabel]])
        rows = [[name, DType.of(label), *row[2:]] for (name, label), row in zip(named, found, strict=True)]
        return cls.of(convert(rows, list[ServedVariable]))


class DeltaHeader(Struct, frozen=True):
    """The states that a delta fits, the position at its end, and how its rows are packed."""

    lineage: str
    schema_digest: str
    from_position: int
    to_position: int
    step: int
    only_from: bool = False
    packing: DeltaDtype | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.from_position < self.to_position < POSITION_LIMIT:
            raise ValueError(f"a delta cannot lead from {self.from_position} to {self.to_position}")


class Rows(Struct, frozen=True):
    """Rows of a table: `ids` int64 [n], strictly increasing; `values` [n, ...] in the table's dtype."""

    ids: Array
    values: RowValues


Change: TypeAlias = "Rows | Array"
"""A variable's change in a delta: rows of a table, or a dense variable's whole value."""


def check_lookups(schema: Schema, changes: Mapping[str, Change]) -> None:
    """Require that changes hold both keys and values of each lookup table, as many of each, or neither.

    Raises ValueError otherwise, or if a table with all buckets has a number of them that is not a power of
    two.
    """
    for pair in schema.lookups:
        found = [changes[half.name] for half in pair if half.name in changes]
        lengths = {len(half) for half in found if not isinstance(half, Rows)}
        if found and (len(found) < len(pair) or len(lengths) > 1):
            keys, values = (half.name for half in pair)
            raise ValueError(f"{keys!r} and {values!r} are not as many")
        for half in pair:
            has_all_buckets = half.contents is not None and half.contents.has_all_buckets
            if has_all_buckets and any(length < 1 or length & (length - 1) for length in lengths):
                raise ValueError(f"{half.name!r} are {max(lengths)} buckets, which is not a power of two")


class Delta(Struct, frozen=True):
    """A delta on disk: its header, and its changes as memory maps."""

    header: DeltaHeader
    catalog: Catalog
    changes: Mapping[str, Change]

    @property
    def rows(self) -> int:
        """The number of changed rows of all tables together; dense variables do not count."""
        return count_rows(self.changes)


def count_rows(changes: Mapping[str, Change]) -> int:
    """Return the number of changed rows of all tables together; dense variables do not count."""
    return sum(len(change.ids) for change in changes.values() if isinstance(change, Rows))
