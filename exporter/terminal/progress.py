"""Report the progress of long work, independently of how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias


class Progress(Protocol):
    """The receiver of a long work's progress: `advance` counts bytes or items done."""

    def advance(self, amount: int) -> None:
        """Note `amount` more units as done."""


class NoProgress:
    """Progress that is not shown."""

    def advance(self, amount: int) -> None:
        """Do nothing."""


ProgressFactory: TypeAlias = Callable[[str, int], AbstractContextManager[Progress]]
"""A function that makes a progress bar for one long work from a label and its number of bytes."""


class _NotShown:
    def __call__(self, label: str, total: int) -> AbstractContextManager[Progress]:
        return nullcontext(NoProgress())

    def __repr__(self) -> str:
        return "no_progress"


no_progress = _NotShown()
"""A factory of progress bars that are not shown; `help` shows this default by its name."""


def human_bytes(count: float) -> str:
    """Return a number of bytes as text, in the largest fitting binary unit: `1.5 KiB` for 1536, `17 B`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_time(seconds: float) -> str:
    """Return seconds as text, in the largest unit that gives at least two: `42 s`, `5 min`, `3 h`, `2 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: int, thing: str) -> str:
    """Return a number with the noun `thing`, in the plural unless it is 1: `1 delta`, `2 deltas`."""
    return f"{number} {thing}{'s' * (number != 1)}"
