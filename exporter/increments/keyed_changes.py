"""The changes of tables by keys in a trainer's increments of either kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from exporter.catalog import Catalog
from exporter.delta.table_changes import KeyedChange, KeyedRows, merged
from exporter.increments.deeprec import DeepRecIncrement, read_increment
from exporter.increments.history import identify, read_history
from exporter.increments.plan import AnyIncrement


def keyed_changes_of(increments: Iterable[AnyIncrement], names: Collection[str]) -> dict[str, KeyedChange]:
    """Merge the changes of the named tables in consecutive increments, oldest first, into one for each table.

    The result is by table name; tables without changes are absent. Every checksum is verified.

    Raises:
        CorruptFile: a checksum is wrong, or rows do not fit their table.
        CheckpointError: an increment cannot be read; CheckpointChanged if its files vanished.
    """
    return merged(change for each in increments for change in each.keyed_changes(names))


def published_before(
    increments: Iterable[AnyIncrement], last: str | None, names: Collection[str]
) -> Mapping[str, KeyedRows]:
    """Return, by table name, the rows of the named tables in the DeepRec increment that was published last.

    `last` is its id. DeepRec's increments repeat all rows since the full save: rows that are also in the
    result, unchanged, need not be sent again. Empty if `last` is None, gone or damaged, or if `increments`
    has none of DeepRec's. Raises OSError if the index of that increment cannot be read.
    """
    deeprec = (each for each in increments if isinstance(each, DeepRecIncrement))
    newest = next(deeprec, None)
    return {} if newest is None else newest.published_before(last, names)


def keys_to_come(catalog: Catalog) -> Counter[str]:
    """Return the number of keys of each table, by name, in the increments on top of a full checkpoint.

    Keys may be counted several times, and some may already be in the checkpoint. Only manifests and indexes
    are read.

    Raises:
        CheckpointError: an increment or a manifest is damaged (CorruptFile, for example), or the checkpoint's
            index cannot be read.
    """
    history = read_history(catalog.prefix.parent)
    full = identify(catalog.prefix, catalog.step or 0) if history.increments else None
    increments: list[AnyIncrement] = [] if full is None else [*history.after(full)]
    if not increments and (newest := read_increment(catalog)) is not None:
        increments.append(newest)
    found: Counter[str] = Counter()
    for each in increments:
        found.update(each.row_counts())
    return found
