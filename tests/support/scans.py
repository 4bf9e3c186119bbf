"""How often this process lists which directories: the interpreter reports each listing to an audit hook."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_counts: list[Counter[Path]] = []
"""The counters of the blocks that are running; a hook cannot be removed, and does nothing without any."""
_is_installed = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _counts and event in ("os.scandir", "os.listdir") and isinstance(arguments[0], str | os.PathLike):
        for count in _counts:
            count[Path(arguments[0])] += 1


@contextmanager
def counted_scans() -> Iterator[Counter[Path]]:
    """Count the listings of each directory within the block."""
    global _is_installed
    if not _is_installed:
        sys.addaudithook(_hook)
        _is_installed = True
    count: Counter[Path] = Counter()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)
