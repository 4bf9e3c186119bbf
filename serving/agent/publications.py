"""What is published of a model, kept current: a thread lists its directory when something changes in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from serving.agent.directory import ModelDirectory
from serving.agent.journal import EventKind, FleetEvent, Journal


class FollowedModel(Struct, frozen=True):
    """A model's name on the servers, and its base path as the agent sees it."""

    name: str
    path: Path


class Publications:
    """What is published of one model, kept current by a thread; workers wait here for news."""

    def __init__(self, model: FollowedModel, journal: Journal, poll_s: float) -> None:
        self.model = model
        self.directory = ModelDirectory(model.path)
        self._journal = journal
        self._poll_s = poll_s
        self._news = threading.Condition()
        self._looking = threading.Lock()
        self._told = ""
        self._count = 0
        self.current = self.directory.read()
        if self.current.problem:
            self._tell(EventKind.UNSEEN, self.current.problem)

    def wait(self, seen: int, timeout_s: float) -> int:
        """Sleep until there are news beyond `seen`, or for `timeout_s`; the number of the last news."""
        with self._news:
            self._news.wait_for(lambda: self._count != seen, timeout_s)
            return self._count

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._news:
            self._count += 1
            self._news.notify_all()

    def follow(self, stop: threading.Event) -> None:
        """List the directory whenever something appears in it, and every `poll_s`, until `stop`."""
        while not stop.is_set():
            places = self.directory.places()
            try:
                for _ in changes(places, stop, self._poll_s):
                    self.look()
                    if self.directory.places() != places or stop.is_set():
                        break
            except Exception as error:  # noqa: BLE001 - too many watches, for example: then it is polled
                self._tell_once(f"changes under {self.model.path} are not told, it is polled: {error}")
                stop.wait(self._poll_s)
                self.look()

    def look(self) -> None:
        """List the directory now."""
        with self._looking:
            before, found = self.current, self.directory.read()
            self.current = found
        if found == before:
            return
        if found.problem != before.problem:
            what = EventKind.UNSEEN if found.problem else EventKind.SEEN
            self._tell(what, found.problem or f"{self.model.path} can be seen now")
        self.wake()

    def _tell_once(self, message: str) -> None:
        if message != self._told:
            self._told = message
            self._tell(EventKind.FAILED, message)

    def _tell(self, what: EventKind, message: str) -> None:
        self._journal.write(FleetEvent(what, message, self.model.name))


def changes(places: Iterable[Path], stop: threading.Event, poll_s: float) -> Iterator[None]:
    """Yield whenever something may have changed in one of the directories, and at least every `poll_s`.

    The kernel tells of changes on local disks; on network file systems it tells of one's own alone, so that
    the period is what counts there.
    """
    if not places:
        stop.wait(poll_s)
        yield
        return
    import watchfiles

    told = watchfiles.watch(
        *places,
        watch_filter=_is_published,
        debounce=20,
        step=2,
        stop_event=stop,
        rust_timeout=max(1, int(poll_s * 1000)),
        yield_on_timeout=True,
        raise_interrupt=False,
        recursive=False,
        ignore_permission_denied=True,
    )
    yield  # what appeared before the watch began
    try:
        for _ in told:
            yield
    except FileNotFoundError:  # a place vanished
        stop.wait(poll_s)


def _is_published(change: object, path: str) -> bool:
    """True for what readers see; locks, what is staged and what is removed begin with a dot."""
    return not os.path.basename(path).startswith(".")  # noqa: PTH119  called for each change
