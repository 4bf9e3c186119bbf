"""Fetch a model's publications from an object store into its base path, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import (
    DiskFull,
    ExportError,
    NotTrusted,
    PublicationDamaged,
    StoreUnavailable,
    TargetBusy,
    UsageError,
)
from exporter.options import Trusting
from exporter.publish.judge import Code
from exporter.publish.room import Room
from exporter.publish.spared import Spared
from exporter.storage.waiting import SLOW_SECONDS, Calls, GivenUp, counted, until
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
"""Seconds for which the agent, at its end, waits for a publication that is being written."""


class Trouble(Struct, frozen=True):
    """The reason why a look into a store failed, or is pending.

    `code` is the finding's; `text` is the problem, `why` the call and its answer; `since` is when looks began
    to fail. `hint` is the advice; of a full disk it is a command.
    """

    code: Code
    text: str
    why: str
    since: datetime
    hint: str = ""


class Fetched(Struct, frozen=True):
    """The state of a model's directory compared with its store.

    `complete` is the start of the last look into the store after which nothing was left to fetch (monotonic
    seconds), or the agent's start before the first one. `trouble` says why the last look failed; None if it
    succeeded. `newest` is the position and time of the newest publication in the store; None before one was
    seen. `waiting` lists publications that do not fit after a rollback here, `way_on` the shell command that
    gets past them (empty if there is none yet), `untrusted` the reasons why others are not fetched. `spared`
    tells how the newest version came, if this agent fetched one that was here in part, or could have been
    merged here.
    """

    url: str
    complete: float
    trouble: Trouble | None = None
    newest: tuple[int, datetime] | None = None
    waiting: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    spared: Spared | None = None
    way_on: str = ""


class Puller:
    """A thread's task: bring a model's directory up to date with a store, periodically.

    A failure is reported once.
    """

    def __init__(
        self,
        model: FollowedModel,
        url: str,
        journal: Journal,
        poll_s: float,
        trust: Trust | None = None,
        *,
        has_canary: bool = False,
    ) -> None:
        self._model, self._url, self._journal, self._poll_s = model, url, journal, poll_s
        self._has_canary = has_canary
        self._trust = trust
        self._calls = Calls()
        self._fetched = Fetched(url, time.monotonic())

    @property
    def fetched(self) -> Fetched:
        """Return the state after the last look into the store.

        A look that waits for an answer of the store for 15 s or longer is already reported as trouble.
        """
        found, call = self._fetched, self._calls.slow()
        if call is None or found.trouble is not None:
            return found
        what, seconds = call
        since = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        why = f"{what} was asked for, and not answered within {SLOW_SECONDS:g} s"
        return replace(found, trouble=Trouble(Code.STORE, "the store does not answer", why, since))

    def follow(self, stop: threading.Event) -> None:
        """Fetch new publications from the store every `poll_s`, until `stop` is set; report errors as events.

        Nothing is reported while another process fetches into the directory. A fetch that `stop` interrupts
        is resumed by the next agent.
        """
        copy = LocalCopy(
            self._url,
            self._model.path,
            prune=True,
            trust=self._trust,
            holds_new_logs=self._has_canary,
            workers=1,  # beside servers: one processor, and that at idle priority
        )
        with suppress(GivenUp), until(stop), counted(self._calls):
            while not stop.is_set():
                self._look(copy)
                stop.wait(self._poll_s)

    def _look(self, copy: LocalCopy) -> None:
        began, before = time.monotonic(), self._fetched
        at = datetime.now(timezone.utc)
        try:
            done = copy.update()
        except TargetBusy:  # another agent fetches into the directory; if it hangs, `complete` shows it
            return
        except ExportError as error:
            self._fail(self._trouble(error, at), copy)
        except Exception as error:  # noqa: BLE001 - report any error, and try again
            self._fail(
                Trouble(Code.STORE, "the store cannot be fetched", f"{type(error).__name__}: {error}", at),
                copy,
            )
        else:
            complete = before.complete if done.incomplete else began
            untrusted = tuple(error.message for error in done.untrusted)
            spared = next(reversed(done.spared), before.spared)
            self._fetched = Fetched(
                self._url, complete, None, copy.newest, done.waiting, untrusted, spared, done.way_on
            )
            if done.is_pinned_now:
                self._report(EventKind.SEEN, f"{self._url} is the model {done.identity}: no other is taken")
            if before.trouble is not None:
                self._report(EventKind.SEEN, f"{self._url} is fetched again")
            for each in done.spared:
                self._report(EventKind.SEEN, each.text)
            if done.waiting and done.waiting != before.waiting:
                what = ", ".join(done.waiting)
                then = done.way_on or "it waits for what the store publishes next"
                self._report(EventKind.CANARY, f"{what} cannot be fetched after the rollback here: {then}")
            if done.repeated:
                self._report(
                    EventKind.SEEN, f"{done.repeated} repeats what {self._url} went back to, or resumed"
                )
            if untrusted and untrusted != before.untrusted:
                self._report(EventKind.FAILED, f"not taken: {untrusted[0]}")

    def _fail(self, trouble: Trouble, copy: LocalCopy) -> None:
        before = self._fetched
        if before.trouble is not None:
            trouble = replace(trouble, since=before.trouble.since)
        self._fetched = replace(before, trouble=trouble, newest=copy.newest or before.newest)
        if before.trouble is None or before.trouble.text != trouble.text:
            self._report(EventKind.FAILED, f"{self._url} cannot be fetched: {trouble.text}: {trouble.why}")

    def _report(self, what: EventKind, message: str) -> None:
        self._journal.write(AgentEvent(what, message, self._model.name))

    def _trouble(self, error: ExportError, at: datetime) -> Trouble:
        """Return the trouble that an error of a look means; `at` is the time at which the look began."""
        text, why, hint = error.message, error.cause, error.hint
        match error:
            case PublicationDamaged():
                code = Code.DAMAGED
            case DiskFull():
                code, text, why = Code.DISK_FULL, f"no space left: {error.cause}", error.message
                with suppress(OSError, ExportError):
                    room = Room.of(self._model.path)
                    why, hint = f"{why}; {room.text}", room.command(self._url)
            case NotTrusted():
                code = Code.UNTRUSTED
            case StoreUnavailable():
                code, text = Code.STORE, "the store cannot be read"
                why = f"{error.message}: {error.cause}" if error.cause else error.message
            case _:
                code = Code.STORE
        return Trouble(code, text, why, at, hint)


def pullers_of(
    options: Sequence[str],
    models: Mapping[str, Path],
    journal: Journal,
    poll_s: float,
    trusting: Trusting,
    canaries: Container[str] = (),
) -> dict[str, Puller]:
    """Return the pullers of the models that have a URL, by the model's name; nothing is fetched yet.

    `options` are `[NAME=]URL`, where NAME may be left out if there is one model. `models` has the
    directories; `journal` gets the events; `poll_s` is in seconds; `trusting` names the keys. Each new log of
    a model in `canaries` is held at its base from its first moment.

    Raises:
        UsageError: an option names an unknown model, or a model twice, or its URL is not a model's; two
            models share a directory; a key cannot be used; the library for object stores is not installed.
        NotTrusted: the identity that is pinned in a directory cannot be read.
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
        model.name: Puller(
            model, url, journal, poll_s, trust_in(trusting, url), has_canary=model.name in canaries
        )
        for model in fetched
        for url in [urls[model.name]]
    }


@contextmanager
def pulling(pullers: Sequence[Puller]) -> Iterator[None]:
    """Run a thread for each puller inside the block; at its end they have 5 s in all to end.

    The next agent resumes a fetch that the end of the block interrupts.
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
