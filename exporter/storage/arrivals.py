"""Sleep until something changes in a directory: a trainer's for exporters, a model's for agents.

The kernel reports changes of local disks (inotify, by the C library: there is nothing to install). Of network
file systems it reports only this machine's changes, and only Linux reports any. So each wait has a time
limit.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY, INCREMENTS_DIRECTORY

RENAMED = 0x80
"""IN_MOVED_TO of <sys/inotify.h>: a file written elsewhere has got its name, and is complete."""
WRITTEN = 0x8
"""IN_CLOSE_WRITE: the writer of a file has closed it."""
CHANGED = 0xFC8
"""IN_MOVED_TO, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_CREATE, IN_DELETE: all changes of names; and IN_DELETE_SELF,
IN_MOVE_SELF: the directory itself, as when a volume is unmounted.
"""

_QUIET_S = 0.003
"""Seconds within which changes count as one arrival: a save, or a publication, renames several files."""
_LONGEST_BURST_S = 0.05  # a writer without pauses must not delay a look for ever
_BUFFER_BYTES = 1 << 16  # less than an event with the longest name is refused (EINVAL)
_EVENT = struct.Struct("iIII")  # struct inotify_event; as many bytes of a name follow as its last field says
_NO_MATTER = {errno.ENOENT, errno.ENOTDIR, errno.EACCES}
"""The next call tries such a directory again; errors are reported by whoever lists it."""
_LONGEST_LOOK_S = 1e6  # `select` refuses to wait for ever by a number
_LOOK_S = 0.1  # `select` cannot wait for a `threading.Event`


class Arrivals:
    """A watch on directories. Names that begin with a dot (locks, unfinished work) do not wake it.

    `kind` is `RENAMED`, `WRITTEN` or `CHANGED`: the changes that count. A file whose name ends with one of
    `written` counts, too, once its writer closes it.
    """

    def __init__(
        self, directories: Iterable[Path] = (), kind: int = RENAMED, written: Iterable[str] = ()
    ) -> None:
        self._written = tuple(map(os.fsencode, written))
        self._kind = kind | WRITTEN if self._written else kind
        self._directories = list(directories)
        self._libc, self._events = _inotify()
        self.watch(self._directories)  # so that changes before the first `sleep` count, too

    @classmethod
    def of_trainer(cls, ckpt_dir: Path, archives: Iterable[str] = ()) -> Arrivals:
        """Return a watch for the files that a trainer finishes in its checkpoint directory.

        Names that end with one of `archives` may be written in place: such a file is finished when it is
        closed. For other files closing means nothing, as a checkpoint has several.
        """
        increments = (INCREMENTS_DIRECTORY, DEEPREC_INCREMENTS_DIRECTORY)
        return cls([ckpt_dir, *(ckpt_dir / name for name in increments)], written=archives)

    def sleep(self, seconds: float) -> None:
        """Wait up to `seconds` for a change in the directories, which need not exist yet.

        Returns 3 to 50 ms after a change; a change since the last call counts. Without inotify it always
        waits the whole time.
        """
        self.watch(self._directories)
        self.wait(seconds)

    def watch(self, directories: Iterable[Path]) -> str:
        """Ask the kernel to report changes in these directories, too.

        Returns the reason, in words, if the kernel refuses, else "". Directories that do not exist or cannot
        be read are skipped.
        """
        if self._libc is None:
            return "the system does not report them"
        for directory in directories:  # one that is known costs a call to the system
            if self._libc.inotify_add_watch(self._events, os.fsencode(directory), self._kind) < 0:
                import ctypes

                if (code := ctypes.get_errno()) not in _NO_MATTER:
                    return os.strerror(code)
        return ""

    def wait(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Wait up to `seconds` for a change since the last call, or until `stop` is set.

        After a change it waits until 3 ms have passed without another, at most 50 ms. `stop` is looked at ten
        times a second. Without inotify no change is seen.
        """
        until = time.monotonic() + seconds
        longest = _LONGEST_LOOK_S if stop is None else _LOOK_S
        while not self._arrives(max(0.0, min(until - time.monotonic(), longest))):
            if time.monotonic() >= until or (stop is not None and stop.is_set()):
                return
        until = time.monotonic() + _LONGEST_BURST_S
        while self._arrives(_QUIET_S) and time.monotonic() < until:
            pass

    def _arrives(self, seconds: float) -> bool:
        """Wait up to `seconds` for events, and read them; True if one is about a name that matters.

        Without inotify it sleeps and returns False.
        """
        if self._libc is None:
            time.sleep(seconds)
            return False
        if not select.select([self._events], [], [], seconds)[0]:
            return False
        return any(self._matters(*event) for event in _events(os.read(self._events, _BUFFER_BYTES)))

    def _matters(self, kind: int, name: bytes) -> bool:
        """True if an event of this kind, about this name, wakes a waiting thread.

        An event without a name is about a watched directory itself, or events were lost: it wakes.
        """
        if self._written and kind & WRITTEN and not name.endswith(self._written):
            return not name
        return not name.startswith(b".")

    def __del__(self) -> None:
        if self._events >= 0:
            os.close(self._events)


def _events(read: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, name) of the events in a buffer read from inotify.

    The name is empty if events were lost, or a directory is gone.
    """
    at = 0
    while at < len(read):
        _, kind, _, size = _EVENT.unpack_from(read, at)
        at += _EVENT.size + size
        yield kind, read[at - size : at].rstrip(b"\0")


def _inotify() -> tuple[Any, int]:
    """Return the C library and a new descriptor for events.

    None and -1 if the kernel does not offer inotify, or allows this user no more instances.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None, -1
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    return (libc, descriptor) if descriptor >= 0 else (None, -1)
