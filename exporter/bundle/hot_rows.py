"""Copy the most read rows of a mapped table to the end of its file, side by side.

When memory is smaller than a table, the kernel keeps some of its pages. A popular row among unpopular ones
occupies a whole page; popular rows side by side share pages. For a table with this layout, the bundle holds

    the table             [rows, ...]            at offset 0 of its file, by row number, as without the layout
    hot_rows/<table>      [rows + hot, ...]      the same bytes, followed by the hot rows by popularity
    hot_places/<table>    int32 or int64 [rows]  in a file of its own: the row number that a lookup reads

Servers map the second and the third (`exporter.graph.placed_reads`). Deltas, merges and verification read the
first, by row number, so they need not know of the layout, and it can be added to any table after writing.

Two other ways were considered. A table stored in the order of popularity is no larger, but every reader of a
version's rows would have to know that order, and the kernel could not copy the table as one range. Hot rows
put into an overlay at load take memory of the process, must be read at each load, and plain versions have no
overlay.

Memory is bounded: one block of row numbers and one of rows. Places are written to a file, then mapped and
changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, TensorRef
from exporter.checkpoint.tensor_bundle import encode_index, index_path, shard_path
from exporter.checkpoint.tensor_values import map_range
from exporter.errors import CorruptFile, NotServable, UsageError
from exporter.storage.files import regular_file, writing
from exporter.storage.open_files import write_at
from exporter.wire.crc32c import combine, crc_of, extend, mask, unmask
from exporter.wire.dtypes import Array, DType

BLOCK_ROWS = 1 << 20  # row numbers in memory at a time
_BLOCK_BYTES = 64 << 20

Blocks = Callable[[], Iterator[Array]]
"""Yields blocks of row numbers, int64, the most read rows first. It is called twice and must yield the
same.
"""


class HotRows(Struct, frozen=True):
    """A mapped table to lay out: its served name, its type and shape, the extent of its rows, its `hot` rows.

    `hot` yields row numbers of the whole variable; the table holds the rows from `first` on. `said` names who
    chose the rows, for error messages.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    extent: Extent
    first: int
    hot: Blocks
    said: str

    @property
    def blocks(self) -> Iterator[Array]:
        """Yield the hot rows of this table, int64 counted from its first row, the most read ones first.

        Empty blocks are left out.
        """
        rows = self.shape[0]
        for block in self.hot():
            own = block - self.first
            own = own[(own >= 0) & (own < rows)]
            if len(own):
                yield own


class HotTable(Struct, frozen=True):
    """A table with hot rows: their number, its tensor with them, its places, and the file of the places."""

    rows: int
    whole: TensorRef
    places: TensorRef
    file: str


def names_of(table: str) -> tuple[str, str]:
    """Return the names of two tensors in a bundle: the table with its hot rows, and the table's places."""
    return f"hot_rows/{table}", f"hot_places/{table}"


def without_layout(catalog: Catalog) -> Catalog:
    """Return the catalog without the tensors of hot rows and of places; the same catalog if it has none."""
    again = {name for table in _tables_of(catalog) for name in names_of(table)}
    left = {name: ref for name, ref in catalog.tensors.items() if name not in again}
    return replace(catalog, tensors=left) if again else catalog


def _tables_of(catalog: Catalog) -> Iterator[str]:
    """Yield the names of the tables with hot rows in a bundle.

    The name of a part of a partitioned table contains its slice.
    """
    prefix, _ = names_of("")
    for name in catalog.tensors:
        table = name.removeprefix(prefix)
        if table != name and all(each in catalog.tensors for each in names_of(table)):
            yield table


def lay_hot_rows(
    prefix: Path, catalog: Catalog, tables: Iterable[HotRows]
) -> tuple[Catalog, dict[str, HotTable]]:
    """Append hot rows to the tables of a bundle that is being staged.

    Return the bundle's new catalog, and the tables that got hot rows, by served name. Tables without hot rows
    are left as they are; if none has any, nothing changes. All shards are renamed, as their total number is
    part of their names, and the index is written anew. Errors of a table's `hot` pass.
    After an error the bundle may be incomplete.

    Raises:
        NotServable: a variable of the model has the name that hot rows would have; nothing was changed.
        UsageError: a row is named twice.
        DiskFull, PublishError: the files cannot be written.
    """
    laid: list[tuple[HotRows, Path, int]] = []
    asked = [*tables]
    if taken := catalog.tensors.keys() & {name for table in asked for name in names_of(table.name)}:
        raise NotServable(f"the model has a variable {min(taken)!r}, as hot rows would be called")
    with writing(prefix.parent):
        for table in asked:
            places = prefix.with_name(f"places-{len(laid)}")
            if count := _write_places(places, table):
                laid.append((table, places, count))
            else:
                places.unlink()
        if not laid:
            return catalog, {}
        total = len(catalog.shards) + len(laid)
        shards = [path.rename(shard_path(prefix, n, total)) for n, path in enumerate(catalog.shards)]
        sizes, tensors, found = [*catalog.shard_sizes], dict(catalog.tensors), {}
        for table, places, count in laid:
            extent = table.extent
            assert (extent.offset, extent.size) == (0, sizes[extent.shard]), f"{table.name} has no own file"
            crc = combine(unmask(extent.crc32c), *_append(shards[extent.shard], table))
            sizes[extent.shard] = shards[extent.shard].stat().st_size
            file = places.rename(shard_path(prefix, len(shards), total))
            shape, whole = table.shape, Extent(extent.shard, 0, sizes[extent.shard], mask(crc))
            own = Extent(len(shards), 0, file.stat().st_size, _checksum(file))
            shards.append(file)
            sizes.append(own.size)
            key, places_key = names_of(table.name)
            made = HotTable(
                count,
                TensorRef(key, table.dtype, (shape[0] + count, *shape[1:]), whole),
                TensorRef(places_key, _places_dtype(shape[0]), shape[:1], own),
                file.name,
            )
            found[table.name] = made
            tensors |= {each.name: each for each in (made.whole, made.places)}
        # by bytes, as an index is sorted
        tensors = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))
        index_path(prefix).write_bytes(encode_index(tensors.values(), total))
    known = replace(catalog, tensors=tensors, shards=tuple(shards), shard_sizes=tuple(sizes))
    return known, found


def hot_in(places: Array, hot: int, scratch: Path) -> Blocks:
    """Return a function that yields the numbers of the hot rows in blocks, in the order of their copies.

    `places` has the place of each row, `hot` is the number of hot rows. The numbers are
    collected in the new file `scratch`, which must stay. Raises CorruptFile if a place is neither the row
    itself nor a hot row, or if the places name another number of hot rows than `hot`; DiskFull or
    PublishError if the file exists or cannot be written.
    """
    rows, led = len(places), 0
    if not 0 <= hot <= rows:  # before so many are written
        raise CorruptFile(f"there cannot be {hot} hot rows of {rows}")
    with writing(scratch), scratch.open("xb") as file:  # before it is mapped: see `_write_places`
        for start in range(0, hot, BLOCK_ROWS):
            file.write(np.full(min(BLOCK_ROWS, hot - start), -1, np.int64).data)
    found = np.memmap(scratch, np.int64, "r+") if hot else np.empty(0, np.int64)
    for start in range(0, rows, BLOCK_ROWS):
        block = places[start : start + BLOCK_ROWS].astype(np.int64)
        at = np.flatnonzero(block != np.arange(start, start + len(block)))
        behind = block[at] - rows
        if len(behind) and not 0 <= behind.min() <= behind.max() < hot:
            raise CorruptFile("places of hot rows lead to rows that are not there")
        found[behind] = at + start
        led += len(behind)
    if led != hot or (found < 0).any():
        raise CorruptFile(f"places lead to {led} hot rows, expected {hot}")
    return lambda: (np.array(found[start : start + BLOCK_ROWS]) for start in range(0, hot, BLOCK_ROWS))


def _places_dtype(rows: int) -> DType:
    """Return the type that can number a table's `rows` rows and a second copy of each: int32 or int64."""
    return DType.INT32 if 2 * rows <= np.iinfo(np.int32).max else DType.INT64


def _write_places(path: Path, table: HotRows) -> int:
    """Write the places of a table's rows into the new file `path`; return the number of hot rows.

    `path` must not exist, and the table has at least one row. Raises UsageError for a row that is named
    twice, OSError if the file cannot be written.
    """
    rows, dtype = table.shape[0], _places_dtype(table.shape[0]).numpy
    with path.open("xb") as file:  # before it is mapped: on a full disk, a write to a mapping raises SIGBUS
        for start in range(0, rows, BLOCK_ROWS):
            file.write(np.arange(start, min(start + BLOCK_ROWS, rows), dtype=dtype).data)
    places, count = np.memmap(path, dtype, "r+"), 0
    for ids in table.blocks:
        ordered = np.sort(ids)
        # In this block, or moved by an earlier one.
        twice = [*ordered[:-1][ordered[:-1] == ordered[1:]], *ids[places[ids] != ids]]
        if twice:
            raise named_twice(table.said, twice[0] + table.first)
        places[ids] = np.arange(rows + count, rows + count + len(ids), dtype=dtype)
        count += len(ids)
    places.flush()
    return count


def named_twice(said: str, row: int) -> UsageError:
    """Return the error to raise for a row that is named twice; `said` says who named it."""
    return UsageError(
        f"{said} names row {row} twice",
        hint="name the number of each row once, the most read first: numpy.argsort(-counts)[:N]",
    )


def _append(path: Path, table: HotRows) -> tuple[int, int]:
    """Append a table's hot rows to its file; return the hot rows' plain crc32c and size in bytes.

    A file with other hard links, or a read-only one, is replaced by a copy first. Raises OSError if the file
    cannot be written.
    """
    _make_own(path)
    rows, at, crc = table.shape[0], table.extent.size, 0
    step = max(1, _BLOCK_BYTES // (at // rows))
    with path.open("r+b") as file:
        stored = map_range(file.fileno(), 0, at).reshape(rows, -1)
        for ids in table.blocks:
            for some in np.split(ids, range(step, len(ids), step)):
                order = np.argsort(some)
                block = np.empty((len(some), stored.shape[1]), np.uint8)
                block[order] = stored[some[order]]  # in the file's order: a disk reads them in one direction
                flat = block.reshape(-1)
                write_at(file.fileno(), at, flat.data)
                at, crc = at + flat.size, extend(crc, flat)
    return crc, at - table.extent.size


def _make_own(path: Path) -> None:
    """Replace a shard by a copy if it has other hard links or is read-only.

    Its bytes may be the trainer's or a job's. Raises OSError if it cannot be copied.
    """
    if path.stat().st_nlink > 1 or not os.access(path, os.W_OK):
        copy = path.with_name(f"{path.name}.own")
        shutil.copyfile(path, copy)
        copy.replace(path)


def _checksum(path: Path) -> int:
    with regular_file(path) as file:
        return mask(crc_of(file.fileno(), 0, path.stat().st_size))
