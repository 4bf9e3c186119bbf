"""A state: the values of every served variable at one moment, as a bundle with changes laid over it.

Both sides of a comparison are states: what is published (a base and its deltas) and what the trainer has (a
full checkpoint and its increments). Nothing is copied until it is asked for, and then by rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from exporter.delta.format import Change, Rows
from exporter.delta.stored import StoredVariable

Array = np.ndarray[Any, Any]

Changes = Mapping[str, Change]
"""Changes by the served variable's name."""


@dataclass(frozen=True)
class State:
    """Variables as stored, by name, and the changes since, oldest first."""

    stored: Mapping[str, StoredVariable]
    layers: tuple[Changes, ...] = ()

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a table."""
        values = self.stored[name].rows(start, stop)
        own = False
        for layer in self.layers:
            change = layer.get(name)
            if change is None:
                continue
            if not isinstance(change, Rows):
                values, own = change[start:stop], False
                continue
            low, high = np.searchsorted(change.ids, (start, stop))
            if low < high:
                values = values if own else np.array(values)
                own = True
                values[change.ids[low:high] - start] = change.values[low:high]
        return values

    def rows_at(self, name: str, ids: Array) -> Array:
        """Rows `ids` (int64 [n], increasing) of a table, as a copy."""
        values = np.array(self.stored[name].rows_at(ids))
        for layer in self.layers:
            change = layer.get(name)
            if isinstance(change, Rows) and len(change.ids):
                at = np.minimum(np.searchsorted(change.ids, ids), len(change.ids) - 1)
                found = change.ids[at] == ids
                values[found] = change.values[at[found]]
            elif change is not None and not isinstance(change, Rows):
                values = change[ids]
        return values

    def whole(self, name: str) -> Array:
        """A variable that is read as a whole; rows laid over it count as well."""
        value = self.stored[name].whole()
        own = False
        for layer in self.layers:
            change = layer.get(name)
            if isinstance(change, Rows):
                value = value if own else value.copy()
                own = True
                value[change.ids] = change.values
            elif change is not None:
                value, own = change, False
        return value
