"""Fetch what is published of a model in an object store into its base path, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import ExportError, TargetBusy, UsageError
from exporter.storage.waiting import GivenUp, until
from exporter.transfer.pull import LocalCopy
from exporter.transfer.push import parse
from serving.agent.journal import EventKind, FleetEvent, Journal
from serving.agent.publications import FollowedModel
from serving.optional_libraries import require_libraries

_END_SECONDS = 5.0
"""How long the end of the agent waits for what is being written of a publication."""


class Fetched(Struct, frozen=True):
    """How a model's directory stands against the store that it is fetched from.

    `complete` is when a look into the store began after which nothing was to be fetched (monotonic seconds);
    before the first one, when the agent began. `problem` is why the last look failed, empty if it did not;
    `waiting` what may not be fetched after a canary's rollback.
    """

    url: str
    complete: float
    problem: str = ""
    waiting: tuple[str, ...] = ()


class Puller:
    """Brings a model's directory to what is in a store, again and again; a failure is told once."""

    def __init__(self, model: FollowedModel, url: str, journal: Journal, poll_s: float) -> None:
        self._model, self._url, self._journal, self._poll_s = model, url, journal, poll_s
        self.fetched = Fetched(url, time.monotonic())

    def follow(self, stop: threading.Event) -> None:
        """Look into the store every `poll_s`, until `stop`."""
        copy = LocalCopy(self._url, self._model.path, prune=True)
        with suppress(GivenUp), until(stop):
            while not stop.is_set():
                self._look(copy)
                stop.wait(self._poll_s)

    def _look(self, copy: LocalCopy) -> None:
        began, before = time.monotonic(), self.fetched
        try:
            done = copy.update()
        except TargetBusy:  # another agent fetches into the same directory; `complete` tells if it hangs
            return
        except ExportError as error:
            why = f"{error.message}: {error.cause}" if error.cause else error.message
            self._fail(why, error.message)
        except Exception as error:  # noqa: BLE001 - the next look may succeed, and nobody else would say it
            self._fail(f"{type(error).__name__}: {error}", str(error))
        else:
            complete = before.complete if done.incomplete else began
            self.fetched = Fetched(self._url, complete, waiting=done.waiting)
            if before.problem:
                self._tell(EventKind.SEEN, f"{self._url} is fetched again")
            if done.waiting and done.waiting != before.waiting:
                what = ", ".join(done.waiting)
                self._tell(
                    EventKind.CANARY, f"{what} cannot be taken after the rollback here: merge {self._url}"
                )

    def _fail(self, why: str, kind: str) -> None:
        problem = f"{self._url} is not fetched: {why}"
        before, self.fetched = self.fetched, replace(self.fetched, problem=problem)
        if kind not in before.problem or not before.problem:
            self._tell(EventKind.FAILED, problem)

    def _tell(self, what: EventKind, message: str) -> None:
        self._journal.write(FleetEvent(what, message, self._model.name))


def pullers_of(
    options: Sequence[str], models: Sequence[FollowedModel], journal: Journal, poll_s: float
) -> dict[str, Puller]:
    """Who fetches, by the models' names; the name may be left out where there is one model.

    Raises:
        UsageError: an option names no model, or one twice, or no URL of a model; two models would be fetched
            into one directory; the library that reads stores is not installed.
    """
    if options:
        require_libraries("stores", "--pull", "obstore")
    found: dict[str, str] = {}
    for text in options:
        name, separator, url = text.partition("=")
        if not separator:
            name, url = models[0].name if len(models) == 1 else "", text
        if name not in {model.name for model in models} or name in found:
            raise UsageError(
                f"--pull {text} names no model" if name not in found else f"--pull names {name} twice",
                hint="--pull NAME=URL, with a NAME of --model-base-path",
            )
        found[name] = str(parse(url))
    fetched = [model for model in models if model.name in found]
    for model, other in pairwise(sorted(fetched, key=lambda model: model.path)):
        if model.path == other.path:
            raise UsageError(
                f"--pull fetches {model.name} and {other.name} into one directory, {model.path}",
                hint="give each its own: --model-base-path NAME=DIR",
            )
    return {model.name: Puller(model, found[model.name], journal, poll_s) for model in fetched}


@contextmanager
def pulling(pullers: Sequence[Puller]) -> Iterator[None]:
    """Fetch while the block runs; what is being fetched when it ends is fetched on by the next agent.

    The threads that ask for it end before the process does, which would wait for them.
    """
    stop = threading.Event()
    threads = [
        threading.Thread(target=puller.follow, args=(stop,), name="pull", daemon=True) for puller in pullers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + _END_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
