"""Build the index of a whole table: millions of keys a second, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from exporter.errors import CheckpointError, TableFull
from exporter.tables.geometry import WINDOW, TableGeometry, hashes_of, keys_of
from exporter.tables.spread import Crowded, spread

Array = np.ndarray[Any, Any]
KeyBlocks = Callable[[], Iterable[tuple[Array, Array]]]
"""Gives a table's keys from the beginning: blocks of (rows, keys), each of a bounded size."""

PASS_KEYS = 8 << 20
"""Keys in memory at a time: a table with more is gone through once for each so many."""

_CHUNK_GROUPS = 1 << 15


def build_index(
    geometry: TableGeometry, count: int, blocks: KeyBlocks, index_seeds: Array, index_rows: Array
) -> None:
    """Fill `index_seeds` and `index_rows`, which may be mapped files, for `count` keys.

    Raises:
        CheckpointError: a key occurs twice.
        TableFull: the keys crowd in a few places of the index.
    """
    passes = max(1, min(geometry.groups, -(-count // PASS_KEYS)))
    edges = [geometry.groups * number // passes for number in range(passes + 1)]
    index_rows[:] = geometry.empty_row
    for first, last in pairwise(edges):
        keys, rows, groups = _sorted_keys(geometry, blocks, first, last)
        for begin in range(first, last, _CHUNK_GROUPS):
            end = min(begin + _CHUNK_GROUPS, last)
            low, high = np.searchsorted(groups, (begin, end))
            part = slice(low, high)
            _fill(geometry, keys[part], rows[part], groups[part], (begin, end), index_seeds, index_rows)


def _sorted_keys(
    geometry: TableGeometry, blocks: KeyBlocks, first: int, last: int
) -> tuple[Array, Array, Array]:
    """Keys, rows and groups of the keys whose groups are in a range, in the groups' order.

    Raises:
        CheckpointError: a key occurs twice.
    """
    hashes, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    for rows, keys in blocks():
        hashed = hashes_of(keys)
        if last - first < geometry.groups:
            groups = geometry.group_of_hash(hashed)
            inside = (groups >= first) & (groups < last)
            rows, hashed = rows[inside], hashed[inside]
        hashes.append(hashed)
        numbers.append(rows.astype(np.int32))
    hashed = np.concatenate(hashes)
    hashes.clear()
    order = np.argsort(hashed)
    hashed = hashed[order]
    keys = keys_of(hashed)
    twice = np.flatnonzero(hashed[1:] == hashed[:-1])
    if len(twice):
        raise CheckpointError(f"key {keys[twice[0]]} occurs twice in one table")
    return keys, np.concatenate(numbers)[order], geometry.group_of_hash(hashed)


def _fill(
    geometry: TableGeometry,
    keys: Array,
    rows: Array,
    groups: Array,
    span: tuple[int, int],
    index_seeds: Array,
    index_rows: Array,
) -> None:
    """Place the keys of the groups `span[0]` to `span[1]`."""
    begin, end = span
    counts = np.bincount(groups - begin, minlength=end - begin)
    windows = np.arange(end - begin, dtype=np.int64) * geometry.stride
    area = index_rows[begin * geometry.stride : end * geometry.stride + WINDOW]
    try:
        chosen, slots = spread(keys, counts, windows, np.asarray(area != geometry.empty_row))
    except Crowded as error:
        raise TableFull(
            f"{error.args[0]} of a table's keys fall in one place of its index and do not fit there",
            cause=f"the table has {geometry.groups} places for {geometry.usable_rows} keys",
            hint="give it more room: --table-head-room 1",
        ) from None
    area[slots] = rows
    index_seeds[begin:end] = chosen
