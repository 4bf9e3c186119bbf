"""Fetch what is published of a model in an object store into its base path, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from exporter.errors import ExportError, UsageError
from exporter.transfer.pull import pull
from exporter.transfer.push import parse
from serving.agent.journal import Event, Journal, What
from serving.agent.publications import Model


class Puller:
    """Brings a model's directory to what is in a store, again and again; a failure is told once."""

    def __init__(self, model: Model, url: str, journal: Journal, poll_s: float) -> None:
        self._model, self._url, self._journal, self._poll_s = model, url, journal, poll_s
        self._told = ""

    def follow(self, stop: threading.Event) -> None:
        """Look into the store every `poll_s`, until `stop`."""
        known = None
        while not stop.is_set():
            try:
                known = pull(self._url, self._model.path, prune=True, known=known).stored
            except ExportError as error:
                self._tell(What.FAILED, f"{self._url} is not fetched: {error.message}")
            except Exception as error:  # noqa: BLE001 - the next look may succeed, and nobody else would say it
                self._tell(What.FAILED, f"{self._url} is not fetched: {type(error).__name__}: {error}")
            else:
                if self._told:
                    self._tell(What.SEEN, f"{self._url} is fetched again")
                    self._told = ""
            stop.wait(self._poll_s)

    def _tell(self, what: What, message: str) -> None:
        if message != self._told:
            self._told = message
            self._journal.write(Event(what, message, self._model.name))


def parse_pulls(options: Sequence[str], models: Sequence[Model]) -> dict[str, str]:
    """The URLs to fetch from, by the models' names; the name may be left out where there is one model.

    Raises:
        UsageError: an option names no model, or one twice, or no URL of a model.
    """
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
    return found


@contextmanager
def pulling(
    urls: Mapping[str, str], models: Sequence[Model], journal: Journal, poll_s: float
) -> Iterator[None]:
    """Fetch while the block runs; what is being fetched when it ends is fetched on by the next agent."""
    stop = threading.Event()
    pullers = [Puller(model, urls[model.name], journal, poll_s) for model in models if model.name in urls]
    for puller in pullers:
        threading.Thread(target=puller.follow, args=(stop,), name="pull", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
