"""Files of which a few are open at a time: a table of 2,000 parts has as many."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from exporter.checkpoint.source_shard import open_shard

_MOST_OPEN = 256  # more gain nothing


class FewFiles:
    """Descriptors of files by their numbers. A context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: OrderedDict[int, tuple[int, ExitStack]] = OrderedDict()
        self._most = most_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._close_one()

    def __getitem__(self, number: int) -> int:
        """A descriptor to read with before other ones are asked for.

        Raises:
            CheckpointChanged, CheckpointError: see `open_shard`.
        """
        if number in self._open:
            self._open.move_to_end(number)
        else:
            if len(self._open) >= self._most:
                self._close_one()
            stack = ExitStack()
            self._open[number] = stack.enter_context(open_shard(self._paths[number])), stack
        return self._open[number][0]

    def _close_one(self) -> None:
        """Close what was not used for longest."""
        _, (_, stack) = self._open.popitem(last=False)
        stack.close()


def most_open() -> int:
    """How many files a task may have open, of what the system allows the process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = len(os.sched_getaffinity(0))
    return min(_MOST_OPEN, max(8, allowed // (4 * threads))) if allowed > 0 else _MOST_OPEN
