"""Rebuild a replica that holds something else than was published: take its model out, and put it back.

A stock server loads a version anew, from its base, only after the model was out of its configuration, and a
configuration replaces the whole one before it. So this needs the file that the servers run with
(`--rebuild-config`), and every target is expected to run with exactly that. Deltas cannot do it: they lead
forward only, and hold the rows that they changed.

- What is published is read and checked first, so that what cannot be loaded is not put in its place.
- A replica is rebuilt only while another one serves the model that no audit called wrong, and one of a model
  at a time. While it is rebuilt it answers NOT_FOUND for this model; its other models go on.
- An agent that is killed in between leaves a server without the model. The next one finds every version
  ended, without an error, and sends the whole configuration.
- Two agents that do it at once load it twice, and harm nothing else.

Without the file nothing is rebuilt: an event says so, and `/livez` fails, so that an orchestrator restarts
the server's process, which has the same effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock

from exporter.errors import CallFailed, ExportError, ServerError, UsageError
from exporter.publish.delta_log import read_log
from exporter.terminal.server_access import ServerAccess
from exporter.wire.protos import Proto, message_class
from serving.client import ModelClient
from serving.model_config import absent, listed_models, read_config_file
from serving.reload import Reloader
from serving.status import StatusError, VersionState

_LOADS_S = 600.0
_POLL_S = 0.1


class Rebuilder:
    """Takes a model out of a server, and puts it back.

    `is_served_elsewhere` answers for an address and a model: does another server serve it rightly?
    """

    def __init__(
        self,
        config: Proto,
        access: ServerAccess,
        deadline_s: float,
        is_served_elsewhere: Callable[[str, str], bool],
    ) -> None:
        self._config = config
        self._access = access
        self._deadline_s = deadline_s
        self._is_served_elsewhere = is_served_elsewhere
        self._locks = {model.name: Lock() for model in config.model_config_list.config}

    def rebuild(self, address: str, model: str, path: Path) -> str:
        """Load a model again, which is published under `path`; why it was not done, empty if it was.

        Raises:
            ServerError: the server refused, or did not do it in time; the model may be out of it.
        """
        if not self._is_served_elsewhere(address, model):
            return "no other replica would serve meanwhile"
        lock = self._locks[model]
        if not lock.acquire(blocking=False):
            return "another replica is being rebuilt"
        try:
            if problem := _problem_of(path):
                return problem
            if problem := self._would_wait(address, model):
                return problem
            with self._client(address, model) as client:
                client.configure(self._without(model), self._deadline_s)
                self._wait_until_gone(client)
            self.restore(address, model)
            return ""
        finally:
            lock.release()

    def restore(self, address: str, model: str) -> None:
        """Give a server the whole configuration, and wait until it serves it.

        Raises:
            ServerError: it refused, or cannot load a version.
        """
        if problem := self._would_wait(address, model):
            raise ServerError(f"{address} is not given its configuration: {problem}")
        # The model's own path is not looked for: the server served it from there, wherever that is.
        connect = partial(self._client, address)
        Reloader(self._config, connect, _LOADS_S, checks_paths=False).run()

    def _would_wait(self, address: str, model: str) -> str:
        """Why a server would take no further configuration after this one; empty if it would.

        The file may list another model that the server was never given.
        """
        for entry in self._config.model_config_list.config:
            is_other = entry.name != model
            if is_other and (problem := absent(entry)) and not self._serves(address, entry.name):
                return f"--rebuild-config lists {entry.name}, which it does not serve yet: {problem}"
        return ""

    def _serves(self, address: str, model: str) -> bool:
        with self._client(address, model) as client:
            try:
                return any(status.state is VersionState.AVAILABLE for status in client.status())
            except CallFailed as error:
                if error.code == "NOT_FOUND":
                    return False
                raise

    def _client(self, address: str, model: str) -> ModelClient:
        return ModelClient(address, model, deadline_s=self._deadline_s, access=self._access)

    def _without(self, name: str) -> Proto:
        config = message_class("serving.ModelServerConfig")()
        config.model_config_list.SetInParent()  # an empty list is no empty configuration
        kept = [model for model in self._config.model_config_list.config if model.name != name]
        config.model_config_list.config.extend(kept)
        return config

    def _wait_until_gone(self, client: ModelClient) -> None:
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:
            try:
                if all(status.state is VersionState.END for status in client.status()):
                    return
            except CallFailed as error:
                if error.code == "NOT_FOUND":
                    return
                raise
            time.sleep(_POLL_S)
        raise ServerError(f"{client.address} does not end {client.model}")


def _problem_of(model: Path) -> str:
    """Why the newest version could not be loaded from what is published; empty if it could."""
    try:
        log = read_log(model)
        log.state().check(variable.name for variable in log.schema.variables)
    except (OSError, ExportError) as error:
        return f"what is published is damaged: {error}"
    return ""


def read_rebuild_config(file: Path, models: Sequence[str]) -> Proto:
    """The configuration that every target runs with.

    Raises:
        UsageError: it cannot be read, is none, or lacks a model that is looked after.
    """
    config = read_config_file(file)
    try:
        listed = {model.name for model in listed_models(config)}
    except (StatusError, ExportError) as error:
        raise UsageError(
            f"--rebuild-config {file} cannot be used", cause=str(error), hint="name the servers' own file"
        ) from error
    if missing := sorted(set(models) - listed):
        raise UsageError(
            f"--rebuild-config {file} does not list {missing[0]!r}",
            cause="a server unloads every model that it does not find in it",
            hint="name the file that the servers run with",
        )
    return config
