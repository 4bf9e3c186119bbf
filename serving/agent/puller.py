"""Fetch a model's publications from an object store into its base path, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import ExportError, TargetBusy, UsageError
from exporter.options import Trusting
from exporter.storage.waiting import GivenUp, until
from exporter.transfer.opened import trust_in
from exporter.transfer.pull import LocalCopy
from exporter.transfer.push import parse
from serving.agent.by_model import by_model
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.publications import FollowedModel
from serving.optional_libraries import require_libraries

if TYPE_CHECKING:
    from exporter.publish.signing import Trust

_END_SECONDS = 5.0
"""How long the agent waits at its end for a publication that is being written."""


class Fetched(Struct, frozen=True):
    """The state of a model's directory compared with its store.

    `complete` is the start of the last look into the store after which nothing was left to fetch (monotonic
    seconds), or the agent's start before the first one. `problem` says why the last look failed, empty if it
    succeeded; `waiting` lists publications that do not fit after a canary's rollback, `untrusted` says why
    others are left where they are.
    """

    url: str
    complete: float
    problem: str = ""
    waiting: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()


class Puller:
    """Brings a model's directory up to date with a store, periodically; reports a failure once."""

    def __init__(
        self,
        model: FollowedModel,
        url: str,
        journal: Journal,
        poll_s: float,
        trust: Trust | None = None,
    ) -> None:
        self._model, self._url, self._journal, self._poll_s = model, url, journal, poll_s
        self._trust = trust
        self.fetched = Fetched(url, time.monotonic())

    def follow(self, stop: threading.Event) -> None:
        """Look into the store every `poll_s`, until `stop`."""
        copy = LocalCopy(self._url, self._model.path, prune=True, trust=self._trust)
        with suppress(GivenUp), until(stop):
            while not stop.is_set():
                self._look(copy)
                stop.wait(self._poll_s)

    def _look(self, copy: LocalCopy) -> None:
        began, before = time.monotonic(), self.fetched
        try:
            done = copy.update()
        except TargetBusy:  # another agent fetches into the directory; if it hangs, `complete` shows it
            return
        except ExportError as error:
            why = f"{error.message}: {error.cause}" if error.cause else error.message
            self._fail(why, error.message)
        except Exception as error:  # noqa: BLE001 - report any error, and try again
            self._fail(f"{type(error).__name__}: {error}", str(error))
        else:
            complete = before.complete if done.incomplete else began
            untrusted = tuple(error.message for error in done.untrusted)
            self.fetched = Fetched(self._url, complete, waiting=done.waiting, untrusted=untrusted)
            if before.problem:
                self._report(EventKind.SEEN, f"{self._url} is fetched again")
            if done.waiting and done.waiting != before.waiting:
                what = ", ".join(done.waiting)
                self._report(
                    EventKind.CANARY, f"{what} cannot be fetched after the rollback here: merge {self._url}"
                )

            if untrusted and untrusted != before.untrusted:
                self._report(EventKind.FAILED, f"not taken: {untrusted[0]}")

    def _fail(self, why: str, kind: str) -> None:
        problem = f"{self._url} cannot be fetched: {why}"
        before, self.fetched = self.fetched, replace(self.fetched, problem=problem)
        if kind not in before.problem or not before.problem:
            self._report(EventKind.FAILED, problem)

    def _report(self, what: EventKind, message: str) -> None:
        self._journal.write(AgentEvent(what, message, self._model.name))


def pullers_of(
    options: Sequence[str],
    models: Mapping[str, Path],
    journal: Journal,
    poll_s: float,
    trusting: Trusting,
) -> dict[str, Puller]:
    """The pullers by model; `options` are `[NAME=]URL`, and may leave out the name if there is one model.

    Raises:
        UsageError: an option names an unknown model, or a model twice, or its URL is not that of a model; two
            models share a directory; the library for object stores is not installed.
    """
    if options:
        require_libraries("stores", "--pull", "obstore")
    urls = {name: str(parse(url)) for name, url in by_model("--pull", options, models).items()}
    fetched = [FollowedModel(name, path, is_copy=True) for name, path in models.items() if name in urls]
    for model, other in pairwise(sorted(fetched, key=lambda model: model.path)):
        if model.path == other.path:
            raise UsageError(
                f"--pull fetches {model.name} and {other.name} into one directory, {model.path}",
                hint="give each its own: --model-base-path NAME=DIR",
            )
    return {
        model.name: Puller(model, url, journal, poll_s, trust_in(trusting, url))
        for model in fetched
        for url in [urls[model.name]]
    }


@contextmanager
def pulling(pullers: Sequence[Puller]) -> Iterator[None]:
    """Fetch inside the block; the next agent resumes a fetch that the end of the block interrupts."""
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
