"""Changes to the whole process, made once for all threads that need them at the same time.

The first thread makes the change, and the last one undoes it, in whatever order they end: separate changes
would restore each other's states. User code never runs under the lock, so that code that starts threads, or
exports, cannot deadlock.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

_LOCK = threading.RLock()  # reentrant: a signal's handler may run during a change, and export


class WhileNeeded:
    """A change as a context manager that any number of threads may be in at once.

    `change` returns a context manager that makes the change and undoes it.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change = change
        self._made: AbstractContextManager[object] | None = None
        self._users: list[int] = []
        _ALL.add(self)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Make the change, unless it is in effect; undo it at the end of the last block that needs it.

        Other threads wait while it is made or undone. An error of making or undoing it reaches the block that
        does so.
        """
        me = threading.get_ident()
        try:
            with _LOCK:
                self._users.append(me)
                if self._made is None:
                    made = self._change()
                    made.__enter__()
                    self._made = made
            yield
        finally:
            with _LOCK:
                self._leave(me)

    def _leave(self, user: int) -> None:
        if user in self._users:
            self._users.remove(user)
        if not self._users and self._made is not None:
            made, self._made = self._made, None
            made.__exit__(None, None, None)

    def _keep_only(self, user: int) -> None:
        for other in {*self._users} - {user}:
            while other in self._users:
                self._leave(other)


_ALL: weakref.WeakSet[WhileNeeded] = weakref.WeakSet()


def _in_child() -> None:
    """Release the lock in a forked child, and undo the changes that only threads of the parent needed."""
    for each in [*_ALL]:
        each._keep_only(threading.get_ident())
    _LOCK.release()


os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_in_child)


@contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


uncollected = WhileNeeded(_no_collection)
"""A pause of Python's garbage collection, for code that builds a graph of TensorFlow.

A collection in another thread visits objects that the first has half built: a model server died of SIGSEGV in
a third of the starts under load (2.21, Python 3.11).
"""
