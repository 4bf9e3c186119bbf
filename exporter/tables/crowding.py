"""The error for keys that crowd in one place of an index, and the room that would spread them."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.errors import TableFull
from exporter.tables.geometry import MAX_ROWS, WINDOW, TableGeometry, hashes_of

Array = np.ndarray[Any, Any]

_EASY = WINDOW // 4
"""So many keys more than others have are easily placed in a window."""


def table_full(geometry: TableGeometry, keys: Array) -> TableFull:
    """The error for the keys of a group, in ascending order, that have no place together."""
    found = TableFull(
        f"{len(keys)} of a table's keys fall in one place of its index and do not fit there",
        cause=f"the table has {geometry.groups} places for {geometry.usable_rows} keys",
    )
    room = _room_to_spread(geometry, keys)
    if room is not None:
        found.hint = f"publish a base with more room: a full export with --table-head-room {room}"
    else:
        found.hint = (
            f"no room spreads keys like {keys[0]} and {keys[-1]}, which seem to be made to collide: "
            "train the table with other ids, such as hashes of these with a secret"
        )
    return found


def _room_to_spread(geometry: TableGeometry, keys: Array) -> int | None:
    """For how many times as many keys a table must have room to place these easily; None: for too many."""
    hashed = np.sort(hashes_of(keys))
    near = WINDOW // geometry.stride  # groups whose windows overlap
    for more in range(1, 64 - geometry.group_bits):
        if geometry.usable_rows << (more + 1) > MAX_ROWS:
            break
        groups = (hashed >> np.uint64(64 - geometry.group_bits - more)).view(np.int64)
        if (groups[_EASY:] > groups[:-_EASY] + near).all():
            return int(2 << more)
    return None
