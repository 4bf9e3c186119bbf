"""What a pulled copy can do without: the store has no more, and servers have no use for either.

Servers list the directory and then take, and load, what they saw there. So what came a moment ago, or lies
beyond a hold, counts for nothing here: only what is settled does. What the store has no more goes

- if it is replaced: a merger that has all its rows, or a base, is settled and leads at least as far;
- if the copy is quiet: everything of the store is here and settled, a base among it, so servers take whatever
  they find. A rollback and its resumption stay, which a canary may have made here.

So the last base stays, whatever somebody removes from the store.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from exporter.errors import ManifestError
from exporter.layout import MANIFEST_FILE
from exporter.publish.hold import Hold
from exporter.publish.retention import GRACE_SECONDS
from exporter.transfer.items import Item
from exporter.transfer.taken_back import is_restoration


def superseded(
    model: Path, here: Mapping[str, Item], stored: Collection[str], *, is_current: bool
) -> list[Item]:
    """What is `here`, is not `stored` any more, and can go, in the order of positions.

    `is_current`: nothing of what is stored is missing here.

    Raises:
        OSError: the copy cannot be read.
    """
    gone = sorted((item for path, item in here.items() if path not in stored), key=lambda item: item.order)
    if not gone:
        return []
    kept = [item for path, item in here.items() if path in stored]
    settled = _settled(model, kept)
    is_quiet = is_current and len(settled) == len(kept) and not all(item.is_delta for item in kept)
    return [
        item
        for item in gone
        if (is_quiet and not is_restoration(item)) or any(_replaces(each, item) for each in settled)
    ]


def _settled(model: Path, items: Iterable[Item]) -> list[Item]:
    """Those that servers could take for a while now."""
    holds: dict[Path, int | None] = {}
    latest, found = time.time() - GRACE_SECONDS, []
    for item in items:
        path = model / item.path
        if path.parent not in holds:
            holds[path.parent] = _read_hold(path.parent) if item.is_delta else None
        hold = holds[path.parent]
        is_free = hold is None or item.manifest.position <= hold
        if is_free and (path / MANIFEST_FILE).stat().st_mtime <= latest:
            found.append(item)
    return found


def _read_hold(log: Path) -> int | None:
    try:
        return Hold(log).read()
    except ManifestError:  # a rollback is being published: servers go nowhere
        return -1


def _replaces(new: Item, old: Item) -> bool:
    """True if who would have taken `old` takes `new`, and comes as far."""
    if new.manifest.position < old.manifest.position:
        return False
    start, old_start = new.manifest.from_position, old.manifest.from_position
    if start is None:
        return True
    return old_start is not None and start <= old_start and new.log == old.log
