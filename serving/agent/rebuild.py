"""Rebuild a replica with wrong values: remove its model from the server, and add it again.

A stock server loads a version again from its base only after its model was out of the configuration, and each
configuration replaces the previous one completely. So a rebuild needs the servers' configuration file
(`--rebuild-config`), and every target has to run with exactly that; each rebuild reads it anew. Deltas cannot
repair a replica: they only go forward, and hold only the rows that changed.

- The published files are read and checked first, so that a damaged version does not replace a loaded one.
- A replica is rebuilt only while another one serves the model that passed its last audit, and only one
  replica of a model at a time. During the rebuild it responds NOT_FOUND for this model; its other models are
  served.
- An agent that is killed during a rebuild leaves a server without the model. The next agent finds that every
  version has ended without an error, and sends the whole configuration.
- Two agents that rebuild at the same time load the model twice, and do no other harm.

Without the file the agent does not rebuild: it reports an event and `/livez` fails, so that an orchestrator
restarts the server, which has the same effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

from exporter.errors import ExportError, LfsPointer, ServerError, UsageError
from exporter.publish.delta_log import read_log
from exporter.terminal.server_access import ServerAccess
from exporter.wire.protos import Proto, message_class
from serving.client import ModelClient
from serving.model_config import absent
from serving.reload import Reloader, statuses
from serving.status import VersionState

_LOADS_S = 600.0
_POLL_S = 0.1


class Rebuilder:
    """A tool that removes a model from a server, and adds it again.

    `read` returns the servers' present configuration, or raises UsageError or LfsPointer.
    `is_served_elsewhere` takes an address and a model, and is True if another server serves it correctly.
    """

    def __init__(
        self,
        read: Callable[[], Proto],
        access: ServerAccess,
        deadline_s: float,
        is_served_elsewhere: Callable[[str, str], bool],
    ) -> None:
        self._read = read
        self._access = access
        self._deadline_s = deadline_s
        self._is_served_elsewhere = is_served_elsewhere
        self._locks: dict[str, Lock] = {}

    def rebuild(self, address: str, model: str, path: Path) -> str:
        """Have a server load a model again; return the reason if that was not done, "" if it was.

        `path` is the model's directory here, whose newest published files are read and checked first. This
        waits until the model is unloaded, up to `deadline_s`, and for the load, up to ten minutes; meanwhile
        the server does not serve the model. Nothing is sent if no other server serves it, another replica of
        it is being rebuilt, the published files are damaged or cannot be read, the configuration cannot be
        used, or the server would wait for another model.

        Raises:
            ServerError: the server does not answer or refuses (CallFailed), or does not unload the model or
                load it again in time.
            UsageError: a file for TLS or the token cannot be used.
            LfsPointer: the configuration, or one of these files, is a pointer of Git LFS.
            OSError: this user may not look at another model's path.
        """
        if not self._is_served_elsewhere(address, model):
            return "no other replica would serve the model meanwhile"
        lock = self._locks.setdefault(model, Lock())  # one lock for all threads: `setdefault` is atomic
        # Without waiting: this thread has a replica of its own to keep fresh.
        if not lock.acquire(blocking=False):
            return "another replica is being rebuilt"
        try:
            if problem := _problem_of(path):
                return problem
            try:
                config = self._read()
            except (UsageError, LfsPointer) as error:
                return error.message
            if problem := self._would_wait(config, address, model):
                return problem
            with self._client(address, model) as client:
                client.configure(_without(config, model), self._deadline_s)
                self._wait_until_gone(client)  # a version that is still loaded would stay, with its values
            self._send(config, address, model)
            return ""
        finally:
            lock.release()

    def restore(self, address: str, model: str) -> None:
        """Send a server the whole configuration, and wait, up to ten minutes, until the server serves it.

        Nothing is sent if the server would have to wait for another model than `model`.

        Raises:
            ServerError: the configuration cannot be used, the server would have to wait, does not answer or
                refuses (CallFailed), or cannot load a model.
            UsageError: a file for TLS or the token cannot be used.
            LfsPointer: the configuration, or one of these files, is a pointer of Git LFS.
            OSError: this user may not look at another model's path.
        """
        try:
            config = self._read()
        except (UsageError, LfsPointer) as error:
            raise ServerError(f"{address} is not sent its configuration: {error.message}") from error
        self._send(config, address, model)

    def _send(self, config: Proto, address: str, model: str) -> None:
        if problem := self._would_wait(config, address, model):
            raise ServerError(f"{address} is not sent its configuration: {problem}")
        # The model's own path is not checked: the server served the model from it, on whichever machine.
        connect = partial(self._client, address)
        Reloader(config, connect, _LOADS_S, checks_paths=False).run()

    def _would_wait(self, config: Proto, address: str, model: str) -> str:
        """Return the reason why a server would accept no configuration after this one; "" if it would.

        That happens if `config` lists another model than `model` that the server at `address` does not serve,
        and whose path is missing. CallFailed if the server does not answer, OSError if this user may not look
        at the path; UsageError or LfsPointer if a file for TLS or the token cannot be used.
        """
        for entry in config.model_config_list.config:
            is_other = entry.name != model
            if is_other and (problem := absent(entry)) and not self._serves(address, entry.name):
                return f"--rebuild-config lists {entry.name}, which it does not serve yet: {problem}"
        return ""

    def _serves(self, address: str, model: str) -> bool:
        with self._client(address, model) as client:
            return any(status.state is VersionState.AVAILABLE for status in statuses(client))

    def _client(self, address: str, model: str) -> ModelClient:
        return ModelClient(address, model, deadline_s=self._deadline_s, access=self._access)

    def _wait_until_gone(self, client: ModelClient) -> None:
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until:
            if all(status.state is VersionState.END for status in statuses(client)):
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{client.address} does not unload {client.model}")


def _without(config: Proto, name: str) -> Proto:
    """Return a copy of the configuration without the model `name`."""
    left = message_class("serving.ModelServerConfig")()
    left.model_config_list.SetInParent()  # an empty list differs from an empty configuration
    left.model_config_list.config.extend(
        model for model in config.model_config_list.config if model.name != name
    )
    return left


def _problem_of(model: Path) -> str:
    """Check the newest published files in a model's directory; return the problem, "" without one.

    All values are read.
    """
    try:
        log = read_log(model)
        log.state().check(variable.name for variable in log.schema.variables)
    except (OSError, ExportError) as error:
        return f"the published files are damaged: {error}"
    return ""
