"""Sleep until a trainer has finished writing something, or until the time is over.

The kernel tells at once of what is renamed into a directory on a local disk, which is how trainers finish
increments and checkpoints. It tells nothing of network file systems: there, and where it cannot be asked, the
time is what counts.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exporter.layout import DEEPREC_INCREMENTS_DIRECTORY, INCREMENTS_DIRECTORY

_MOVED_TO = 0x80  # IN_MOVED_TO of <sys/inotify.h>
_QUIET_S = 0.003
"""A save renames several files; what comes within so short a time is one arrival."""
_LONGEST_BURST_S = 0.05
_BUFFER_BYTES = 1 << 16


class Arrivals:
    """Sleeps beside some directories, which need not exist yet."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._libc, self._events = _inotify()

    @classmethod
    def of_trainer(cls, ckpt_dir: Path) -> Arrivals:
        """Beside what a trainer writes into its checkpoint directory."""
        increments = (INCREMENTS_DIRECTORY, DEEPREC_INCREMENTS_DIRECTORY)
        return cls([ckpt_dir, *(ckpt_dir / name for name in increments)])

    def sleep(self, seconds: float) -> None:
        """Return when something has arrived, or when so many seconds are over."""
        if self._libc is None:
            time.sleep(seconds)
            return
        for directory in self._directories:  # asked again, one that is known costs a call to the system
            self._libc.inotify_add_watch(self._events, os.fsencode(directory), _MOVED_TO)
        if self._arrives(seconds):
            until = time.monotonic() + _LONGEST_BURST_S
            while self._arrives(_QUIET_S) and time.monotonic() < until:
                pass

    def _arrives(self, seconds: float) -> bool:
        if not select.select([self._events], [], [], seconds)[0]:
            return False
        os.read(self._events, _BUFFER_BYTES)
        return True

    def __del__(self) -> None:
        if self._events >= 0:
            os.close(self._events)


def _inotify() -> tuple[Any, int]:
    """The C library and a descriptor to read events from; None and -1 if the kernel cannot be asked."""
    import ctypes

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return None, -1
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    return (libc, descriptor) if descriptor >= 0 else (None, -1)
