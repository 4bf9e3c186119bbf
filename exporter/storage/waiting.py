"""Waits for a store's answer that end when it is no longer wanted: a silent store may take minutes.

Another thread sees in `Calls` which calls are in progress, and since when.

Requests of the main thread end with SIGINT and SIGTERM, those of `workers` when their block is interrupted,
and those of a thread in `until` once its event is set. The store may still complete such a request, as after
a kill of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.1  # a set event is noticed within this time: one cannot wait for both
SLOW_SECONDS = 15.0
"""A call to a store without an answer for this long is reported before it ends, which may take minutes."""


class GivenUp(BaseException):  # no `except Exception` on the way may take it for a failure
    """The work is no longer wanted. This is not a failure, and is not reported."""


class Calls:
    """The calls to stores that a block, with its workers, has in progress."""

    def __init__(self) -> None:
        self._began: dict[object, tuple[float, str]] = {}
        self._slow: tuple[float, str] | None = None

    def slow(self) -> tuple[str, float] | None:
        """Return the first call that had no answer within `SLOW_SECONDS`, and the seconds since it began.

        It may have ended: a store is slow until it answers a call in time. None if no call is slow. The call
        is named as in `entered`.
        """
        ended = () if self._slow is None else (self._slow,)
        # a copy: other threads begin and end calls meanwhile
        began, what = min((*tuple(self._began.values()), *ended), default=(0.0, ""))
        seconds = time.monotonic() - began
        return (what, seconds) if what and seconds >= SLOW_SECONDS else None

    @contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """Count a call as in progress inside the block; `what` names it for people."""
        key, call = object(), (time.monotonic(), what)
        self._began[key] = call
        try:
            yield
        except GivenUp:
            call = time.monotonic(), what  # it was not the store that took so long
            raise
        finally:
            del self._began[key]
            is_slow = time.monotonic() - call[0] >= SLOW_SECONDS
            self._slow = min(call, self._slow or call) if is_slow else None


class _Thread(threading.local):
    """The events that end a thread's requests, and the counter of its calls."""

    ends: tuple[threading.Event, ...] = ()
    calls = Calls()


_this = _Thread()


@contextmanager
def until(end: threading.Event) -> Iterator[None]:
    """Make requests of this thread and of its workers inside the block raise `GivenUp` once `end` is set."""
    before = _this.ends
    _this.ends = (*before, end)
    try:
        yield
    finally:
        _this.ends = before


@contextmanager
def counted(calls: Calls) -> Iterator[None]:
    """Count the calls that this thread and its workers make inside the block in `calls`."""
    before = _this.calls
    _this.calls = calls
    try:
        yield
    finally:
        _this.calls = before


def calling(what: str) -> AbstractContextManager[None]:
    """Return a context that counts its block as one call to a store, in the `Calls` of this thread.

    `what` names the call for people.
    """
    return _this.calls.entered(what)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the time of a block that makes requests to `seconds`.

    A request that is waiting then, or begins later, ends the block without an error. Other code of the block
    is not interrupted.
    """
    end = threading.Event()
    timer = threading.Timer(seconds, end.set)
    timer.daemon = True  # the process does not wait for it to end
    timer.start()
    try:
        with suppress(GivenUp), until(end):
            yield
    finally:
        timer.cancel()


@contextmanager
def setting_if_interrupted(end: threading.Event) -> Iterator[None]:
    """Set the event `end` if a BaseException that is not an Exception ends the block, as after SIGINT.

    The exception passes.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            end.set()
        raise


@contextmanager
def workers(count: int, name: str) -> Iterator[Executor]:
    """Yield an executor of `count` threads for tasks that ask a store.

    The end of the block waits for running tasks. `name` is the prefix of the threads' names. If the block
    raises, tasks that have not begun are dropped; if a BaseException that is not an Exception ends it, as by
    SIGINT, the requests of running tasks end, too.
    """
    from concurrent.futures import ThreadPoolExecutor

    end = threading.Event()
    ends, calls = (*_this.ends, end), _this.calls

    def begin() -> None:
        _this.ends, _this.calls = ends, calls

    pool = ThreadPoolExecutor(count, name, begin)
    try:
        with setting_if_interrupted(end):
            yield pool
            # inside: SIGINT while this waits for the tasks ends their requests, too
            pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)  # the process waits for these threads


def awaited(ask: Callable[[], T]) -> T:
    """Return the result of `ask`, or raise its exception; GivenUp once the request is not wanted any more.

    If this is the main thread, or a thread in `until` or `workers`, `ask` runs in another thread, and may
    still be running after GivenUp. Otherwise `ask` runs here, to its end.
    """
    ends = _this.ends
    if not ends and threading.current_thread() is not threading.main_thread():
        return ask()
    # Python cannot break off a request, and runs signal handlers only after the main thread is back from the
    # library. So another thread asks, a daemon, for which the end of the process does not wait.
    answer = Future[T]()

    def take() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is awaited
            answer.set_exception(error)

    _require_wanted(ends)
    threading.Thread(target=take, name="ask", daemon=True).start()
    while not answer.done():
        # without events only a signal ends it: Python's main thread runs handlers while it waits for a lock
        wait([answer], _LOOK_SECONDS if ends else None)
        _require_wanted(ends)
    return answer.result()


def _require_wanted(ends: tuple[threading.Event, ...]) -> None:
    if any(end.is_set() for end in ends):
        raise GivenUp
