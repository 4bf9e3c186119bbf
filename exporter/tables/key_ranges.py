"""Ranges of a table's groups: what keys are sorted by first, so that each range is placed by itself.

A range reaches with the window of its last groups into the next one's slots. So every other range is placed
first, into empty slots, and those between around them: what is built depends on keys, rows and sizes alone,
not on who places which range, or when.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from exporter.tables.geometry import WINDOW, TableGeometry

Array = np.ndarray[Any, Any]

RANGE_KEYS = 1 << 18
"""Keys of a range, at most twice as many as on average: all ranges are equally wide, and hashes even."""

KEY_BYTES = 12
"""Bytes of a sorted key: its hash (uint64) and its row (int32)."""

_LEAST_GROUPS = WINDOW
"""Groups that a range has at least: its slots begin and end with a window of their own."""


class KeyRanges(Struct, frozen=True):
    """A table's groups in `1 << bits` ranges of the same width."""

    geometry: TableGeometry
    bits: int

    @classmethod
    def of(cls, geometry: TableGeometry, count: int) -> KeyRanges:
        """The ranges for about `count` keys."""
        wanted = max(0, (-(-count // RANGE_KEYS) - 1).bit_length())
        most = geometry.group_bits - (_LEAST_GROUPS - 1).bit_length()
        return cls(geometry, max(0, min(wanted, most)))

    @property
    def count(self) -> int:
        """How many ranges there are."""
        return 1 << self.bits

    @property
    def groups(self) -> int:
        """Groups of each range."""
        return self.geometry.groups >> self.bits

    @property
    def slots(self) -> int:
        """Slots of each range, but for the window in which it reaches into the next one."""
        return self.groups * self.geometry.stride

    @property
    def room(self) -> int:
        """More keys than this have no place in a range."""
        return self.slots + WINDOW

    def of_hashes(self, hashed: Array) -> Array:
        """The range of each hash, in a type that is sorted quickly."""
        if not self.bits:
            return np.zeros(len(hashed), np.uint8)
        return (hashed >> np.uint64(64 - self.bits)).astype(np.uint8 if self.bits <= 8 else np.uint16)
