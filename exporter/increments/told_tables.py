"""What increments of either kind tell of tables by keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from exporter.catalog import Catalog
from exporter.delta.table_changes import KeyedChange, KeyedRows, merged
from exporter.increments.deeprec import DeepRecIncrement, read_increment, touched_keys
from exporter.increments.history import identify, read_history
from exporter.increments.increment import StoredIncrement
from exporter.increments.plan import AnyIncrement

Array = np.ndarray[Any, Any]


def keyed_changes_of(increments: Iterable[AnyIncrement], names: Collection[str]) -> dict[str, KeyedChange]:
    """What increments that follow one another change of some tables, by name, every checksum verified.

    Raises:
        CorruptFile: a checksum is wrong, or rows do not fit their table.
    """
    stored, newest = _by_kind(increments)
    if newest is not None:
        none = np.empty(0, np.int64)  # no deletion is recorded in them
        return {rows.name: KeyedChange(rows, none) for rows in newest.keyed(names)}
    return merged(change for change in _keyed(stored) if change.rows.name in names)


def published_before(
    increments: Iterable[AnyIncrement], last: str | None, names: Collection[str]
) -> Mapping[str, KeyedRows]:
    """What the increment that was published last held of tables, where the next one holds it again."""
    _, newest = _by_kind(increments)
    return {} if newest is None else newest.published_before(last, names)


def awaited_keys(increments: Iterable[AnyIncrement]) -> Counter[str]:
    """How many keys of each table increments hold; some may be new, or there twice."""
    stored, newest = _by_kind(increments)
    if newest is not None:
        return touched_keys(newest.catalog)
    found: Counter[str] = Counter()
    for each in stored:
        found.update({table.name: table.rows for table in each.increment.tables})
    return found


def keys_to_come(catalog: Catalog) -> Counter[str]:
    """How many keys of each table the increments on top of a full checkpoint hold.

    Raises:
        CheckpointError: an increment, or a manifest, is damaged.
    """
    history = read_history(catalog.prefix.parent)
    full = identify(catalog.prefix, catalog.step or 0) if history.increments else None
    chain = () if full is None else history.after(full)
    if chain:
        return awaited_keys(chain)
    newest = read_increment(catalog)
    return Counter() if newest is None else awaited_keys([newest])


def _keyed(increments: Iterable[StoredIncrement]) -> Iterator[KeyedChange]:
    """What they hold of tables by keys, oldest first, each table of each increment by itself."""
    for stored in increments:
        for table, rows in stored.tables():
            yield KeyedChange(KeyedRows(table.name, rows.keys, rows.values), rows.removed)


def _by_kind(
    increments: Iterable[AnyIncrement],
) -> tuple[list[StoredIncrement], DeepRecIncrement | None]:
    found = list(increments)
    deeprec = (each for each in found if isinstance(each, DeepRecIncrement))
    return [each for each in found if isinstance(each, StoredIncrement)], next(deeprec, None)
