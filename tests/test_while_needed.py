"""Changes to the process: made once for all threads, undone by whoever leaves last, in a fork, too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import pytest

from exporter.while_needed import WhileNeeded
from tests.support.budget import times


class Recorded:
    """A change that notes what becomes of it, and which cannot be made twice."""

    def __init__(self) -> None:
        self.is_made = False
        self.made = 0
        self.needed = WhileNeeded(self._change)

    @contextmanager
    def _change(self) -> Iterator[None]:
        assert not self.is_made
        self.is_made = True
        self.made += 1
        try:
            yield
        finally:
            assert self.is_made
            self.is_made = False


def test_it_lasts_until_the_last_of_all_leaves() -> None:
    change = Recorded()
    first, second = change.needed(), change.needed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert change.is_made
    second.__exit__(None, None, None)
    assert (change.is_made, change.made) == (False, 1)


def test_threads_come_and_go() -> None:
    change, missed = Recorded(), []

    def run() -> None:
        for _ in range(times(300)):
            with change.needed():
                missed.extend([] if change.is_made else [1])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missed
    assert not change.is_made


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_ends_a_block_undoes_it(error: type[BaseException]) -> None:
    change = Recorded()
    with suppress(error), change.needed(), change.needed():
        raise error
    assert not change.is_made


def test_a_change_that_cannot_be_made_is_not_undone() -> None:
    undone = []

    @contextmanager
    def change() -> Iterator[None]:
        raise OSError
        yield
        undone.append(1)

    needed = WhileNeeded(change)
    for _ in range(2):
        with pytest.raises(OSError), needed():
            pass
    assert not undone


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_fork_keeps_what_the_forking_thread_needs_alone(is_inside: bool) -> None:
    change, go, end = Recorded(), threading.Event(), threading.Event()

    def other() -> None:
        with change.needed():
            go.set()
            end.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    go.wait(60)
    with change.needed() if is_inside else nullcontext():
        if not (child := os.fork()):
            inside = change.is_made
            with change.needed():  # its lock is free
                pass
            os._exit(0 if inside == is_inside == change.is_made else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert change.is_made
    end.set()
    thread.join()
    assert not change.is_made


@pytest.mark.landing
@pytest.mark.filterwarnings("ignore:.*fork")
def test_forks_in_the_midst_of_changes_never_hang() -> None:
    change, end = Recorded(), threading.Event()

    def come_and_go() -> None:
        while not end.is_set():
            with change.needed():
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(times(20)):
            if not (child := os.fork()):
                with change.needed():
                    os._exit(0)
            until = time.monotonic() + 60
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                assert time.monotonic() < until, "a fork waits for a lock that nobody has"
                time.sleep(0.001)
            assert ended[1] == 0
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not change.is_made
