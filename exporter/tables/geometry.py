"""The index of a dynamic table: four ordinary variables that map any 64-bit key to a row of values.

    <table>/index_seeds  int64 [groups]           groups = 2 ** group_bits
    <table>/index_rows   int32 [slots]            slots = groups * stride + WINDOW
    <table>/keys         int64 [capacity]         the key of each row
    <table>/values       dtype [capacity, dim]    the rows

The group of a key is the upper bits of `(key + OFFSET) * MULTIPLIER`. Each group has a *window* of `WINDOW`
slots; the windows of neighbours overlap. The place of a key in its window depends on the group's seed, an odd
number that the exporter has chosen so that no two keys share a slot. So a lookup tries one slot:

    group = upper group_bits of (key + OFFSET) * MULTIPLIER
    slot  = group * stride + upper WINDOW_BITS of (key + OFFSET) * index_seeds[group]
    row   = index_rows[slot]
    found = keys[row] == key

The last `defaults` rows are read for absent keys: key k reads row `capacity - defaults + floormod(k,
defaults)`.

An empty slot holds the last row, and the key of the last row is -1. Only key -1 could mistake that for its
own row, and an absent key -1 reads the last row anyway: so every 64-bit integer is a legal key. The row
before the default rows is never looked up; its key is the *cursor*, the first row that has never been used.

Measured on two busy cores, TensorFlow 2.21, one thread, 1 M and 10 M random keys, rows of 16 floats, from key
to values, processor time of whole calls relative to DenseHashTable and a gather: with 64 ids 1.2 times, with
1,000 1.4 times, with 100,000 1.4 and 1.6 times (330 ns a key of 10 M). A lookup is fifteen operations, theirs
two: with 64 ids in each of 100 tables, each looked up by itself, it takes 2.3 to 2.9 times as long. So such
lookups are joined (`exporter.graph.joined_lookups`).

Most of the time goes into memory that no cache holds, read by three gathers before that of the values: with
64 ids in each of 100 tables of 20,000 keys, one gather more takes 4 to 6 us, any other operation 0.4 to 1.1
us. CONTRIBUTING.md, under "An index of seeds", has the alternatives that were measured.

`TableGeometry` has a table's sizes; `TablePlan` its four tensors, and their places in a new shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.embedding_variables import EmbeddingVariable
from exporter.errors import UsageError
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS, KEYS, VALUES
from exporter.wire.dtypes import Array, DType

OFFSET = 0x243F6A8885A308D3
"""Added to keys first: without it, 0 and other keys with many zeros at the end would get the same slots under
every seed.
"""

MULTIPLIER = 0x9E3779B97F4A7C15
"""2 ** 64 over the golden ratio: consecutive keys, and keys that share their lower bits, are spread
evenly.
"""

WINDOW_BITS = 7
WINDOW = 1 << WINDOW_BITS
"""The slots available to a group's keys: even in a crowded table, a window has free ones."""

# By trial with 235,000 random keys: with 1.1 slots a row, some groups find no seed. Groups of 7
# rows take seven times as long to place as groups of 3.6, and some groups of 14 find no seed.
SLOTS_PER_ROW = 1.5  # slots for each row of the capacity, at least
ROWS_PER_GROUP = 3.6  # rows of the capacity for each group, at most; half of that at least

EMPTY_KEY = -1
"""The key of the last row, which empty slots hold."""

MAX_ROWS = 2**31 - 1  # the index has them as int32


class TableGeometry(Struct, frozen=True):
    """The sizes of a table's variables.

    `defaults` is the number of default rows; `capacity` includes them, and the cursor's row.
    """

    group_bits: int
    stride: int
    capacity: int
    defaults: int = 1

    @classmethod
    def for_keys(cls, count: int, head_room: float = 0.25, defaults: int = 1) -> TableGeometry:
        """Return sizes for `count` keys with room for more: `head_room` times as many, but at least 1,000.

        `defaults` is the number of default rows, at least 1.
        """
        usable = count + max(math.ceil(count * head_room), 1000)
        # At least one bit: TensorFlow clamps a shift by 64 to 63 (cwise_ops.h), which makes two groups.
        group_bits = max(1, math.ceil(math.log2(usable / ROWS_PER_GROUP)))
        stride = max(1, math.ceil(usable * SLOTS_PER_ROW / (1 << group_bits)))
        return cls(group_bits, stride, usable + 1 + defaults, defaults)

    @classmethod
    def of_shapes(cls, groups: int, slots: int, capacity: int, defaults: int = 1) -> TableGeometry:
        """Return the sizes of a published table, given the lengths of its variables.

        They are the lengths of `index_seeds`, `index_rows` and `keys`. `defaults` is the number of its
        default rows. Raises ValueError if the lengths do not fit together.
        """
        group_bits = groups.bit_length() - 1
        stride, rest = divmod(slots - WINDOW, groups) if groups > 0 else (0, 1)
        if rest or stride < 1 or groups != 1 << group_bits or capacity < defaults + 1 or defaults < 1:
            raise ValueError(
                f"{groups} groups, {slots} slots, {capacity} rows with {defaults} defaults make no table"
            )
        return cls(group_bits, stride, capacity, defaults)

    @classmethod
    def unset(cls, defaults: int = 1) -> TableGeometry:
        """Return the least sizes, with which a graph is built until a checkpoint determines the true ones."""
        return cls(1, 1, defaults + 1, defaults)

    @property
    def groups(self) -> int:
        """The number of groups: the length of `index_seeds`."""
        return 1 << self.group_bits

    @property
    def slots(self) -> int:
        """The number of slots: the length of `index_rows`."""
        return self.groups * self.stride + WINDOW

    @property
    def usable_rows(self) -> int:
        """The number of rows that keys may have, from row 0 on."""
        return self.capacity - self.defaults - 1

    @property
    def cursor_row(self) -> int:
        """The row whose key is the cursor: the first row after all rows that keys may have."""
        return self.usable_rows

    @property
    def first_default(self) -> int:
        """The number of the first default row; the default rows are the table's last ones."""
        return self.capacity - self.defaults

    @property
    def empty_row(self) -> int:
        """The row number that empty slots hold: the last row of the table."""
        return self.capacity - 1

    @property
    def index_bytes(self) -> int:
        """The bytes of `index_seeds`, `index_rows` and `keys` together."""
        return 8 * self.groups + 4 * self.slots + 8 * self.capacity

    def groups_of(self, keys: Array) -> Array:
        """Return the group number, int64, of each key (int64 [n])."""
        return self.group_of_hash(hashes_of(keys))

    def group_of_hash(self, hashed: Array) -> Array:
        """Return the group number, int64, of each hash of `hashes_of` (uint64 [n])."""
        return (hashed >> np.uint64(64 - self.group_bits)).view(np.int64)

    def slots_of(self, keys: Array, groups: Array, seeds: Array) -> Array:
        """Return the slot number, int64, of each key (int64 [n]).

        `groups` has the group of each key, `seeds` the seed of that group, int64 [n] both.
        """
        return groups * self.stride + places_of(keys, seeds)


def hashes_of(keys: Array) -> Array:
    """Return the hash, uint64, of each key (int64 [n]); different keys have different hashes."""
    return (keys.view(np.uint64) + np.uint64(OFFSET)) * np.uint64(MULTIPLIER)


def keys_of(hashed: Array) -> Array:
    """Return the keys, int64, with these hashes (uint64 [n]): the inverse of `hashes_of`."""
    return (hashed * np.uint64(pow(MULTIPLIER, -1, 1 << 64)) - np.uint64(OFFSET)).view(np.int64)


def places_of(keys: Array, seeds: Array) -> Array:
    """Return each key's place in its group's window, int64 from 0 to WINDOW - 1.

    `keys` are int64 [n]; `seeds`, int64 [n], are those of the keys' groups.
    """
    spread = (keys.view(np.uint64) + np.uint64(OFFSET)) * seeds.view(np.uint64)
    return (spread >> np.uint64(64 - WINDOW_BITS)).view(np.int64)


def seeds(first: int, count: int) -> Array:
    """Return `count` seeds from number `first` on, int64, in the order in which they are tried.

    They are a fixed pseudorandom sequence of odd numbers.
    """
    # Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (splitmix64).
    state = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    # Odd: only then the products of two different keys with one seed always differ.
    return ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_ALIGNED = 64


class TablePlan(Struct, frozen=True, eq=False):
    """A table to serve: its name, the trainer's variable, its sizes, and its default rows [d, dim]."""

    name: str
    variable: EmbeddingVariable
    geometry: TableGeometry
    defaults: Array

    @classmethod
    def of(
        cls, name: str, variable: EmbeddingVariable, defaults: Array, head_room: float, awaited: int = 0
    ) -> TablePlan:
        """Plan a table for the keys of a variable and `awaited` more, with room for further keys.

        The room is `head_room` times as many keys, but at least 1,000. `defaults` are the default rows [d,
        dim]. Raises UsageError if the table would have more than `MAX_ROWS` rows.
        """
        geometry = TableGeometry.for_keys(variable.rows + awaited, head_room, len(defaults))
        if geometry.capacity > MAX_ROWS:
            raise UsageError(
                f"table {name!r} would have {geometry.capacity} rows, {MAX_ROWS} are possible",
                hint="leave less room for new keys: --table-head-room 0",
            )
        return cls(name, variable, geometry, defaults)

    def tensors(self, shard: int, offset: int) -> tuple[dict[str, TensorRef], int]:
        """Return the table's four tensors by their names in `PARTS`, and the offset behind them.

        Stored keys and rows stay slices of the checkpoint's shards; the rest gets extents in `shard`, a
        shard's number, from `offset` on; the returned offset is behind them. These extents have no checksum
        yet (0).
        """
        size, place = self.geometry, _Allocation(shard, offset)
        parts, wide = self.variable.parts, self.variable.key_dtype is DType.INT64
        # int32 keys are served as int64: their bytes cannot be shared
        keys = [part.keys for part in parts] if wide else []
        dim, dtype = self.variable.dim, self.variable.value_dtype
        made = {
            INDEX_SEEDS: self._joined(INDEX_SEEDS, DType.INT64, (size.groups,), [], place),
            INDEX_ROWS: self._joined(INDEX_ROWS, DType.INT32, (size.slots,), [], place),
            KEYS: self._joined(KEYS, DType.INT64, (size.capacity,), keys, place),
            VALUES: self._joined(VALUES, dtype, (size.capacity, dim), [part.values for part in parts], place),
        }
        return made, place.offset

    def _joined(
        self, part: str, dtype: DType, shape: tuple[int, ...], stored: Iterable[TensorRef], place: _Allocation
    ) -> TensorRef:
        """Return a tensor whose first rows are the `stored` tensors, in order.

        It is the variable `part` of the table, of this full shape. Its other rows get the next extent of
        `place`, which advances. Stored tensors without an extent get one in shard -1, to be replaced; empty
        ones are left out.
        """
        slices, row = [], 0
        for ref in stored:
            if ref.shape[0]:
                # Without extent it is copied to a bundle before it is read: see `TableLayout.with_source`.
                extent = ref.extent or Extent(-1, 0, ref.bytes_, 0)
                slices.append(SliceRef(row_box(shape, row, ref.shape[0]), extent))
                row += ref.shape[0]
        rest = row_box(shape, row, shape[0] - row)
        extent = place.take(int(np.prod(rest.lengths)) * (dtype.itemsize or 0))
        name = f"{self.name}/{part}"
        if not slices:
            return TensorRef(name, dtype, shape, extent)
        return TensorRef(name, dtype, shape, slices=(*slices, SliceRef(rest, extent)))


class _Allocation(Struct):
    """Assigns aligned places in a shard, one after another."""

    shard: int
    offset: int

    def take(self, size: int) -> Extent:
        """Reserve the next `size` bytes of the shard and return their extent.

        The next one begins at a multiple of 64.
        """
        extent = Extent(self.shard, self.offset, size, 0)
        self.offset += -(-size // _ALIGNED) * _ALIGNED
        return extent


def row_box(shape: tuple[int, ...], first: int, count: int) -> SliceSpec:
    """Return the box of `count` whole rows, from row `first` on, of a tensor of this full shape."""
    rest = shape[1:]
    return SliceSpec(shape, (first, *(0 for _ in rest)), (count, *rest))
