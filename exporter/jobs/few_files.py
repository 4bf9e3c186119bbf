"""Files of which a few are open at a time: a table of 2,000 parts has as many."""

from __future__ import annotations

import errno
import resource
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointError

_MOST_OPEN = 256  # more gain nothing
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_IN_USE: set[FewFiles] = set()  # of all tasks that run in this process


class FewFiles:
    """Descriptors of files by their numbers. A context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: OrderedDict[int, tuple[int, ExitStack]] = OrderedDict()

    def __enter__(self) -> Self:
        _IN_USE.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        _IN_USE.discard(self)
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
            while len(self._open) >= most_open():
                self._close_one()
            self._open[number] = self._opened(self._paths[number])
        return self._open[number][0]

    def _opened(self, path: Path) -> tuple[int, ExitStack]:
        while True:
            stack = ExitStack()
            try:
                return stack.enter_context(open_shard(path)), stack
            except CheckpointError as error:
                if getattr(error.__cause__, "errno", None) not in _TOO_MANY or not self._open:
                    raise
            self._close_one()

    def _close_one(self) -> None:
        """Close what was not used for longest."""
        _, (_, stack) = self._open.popitem(last=False)
        stack.close()


def most_open() -> int:
    """How many files each task may have open: together, a quarter of what the system allows the process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = allowed // (4 * max(1, len(_IN_USE)))
    return min(_MOST_OPEN, max(1, share)) if allowed != resource.RLIM_INFINITY else _MOST_OPEN
