"""Give a running model server another configuration, and wait until it serves it: labels move last.

`HandleReloadConfigRequest` replaces the whole configuration: a model that is left out is unloaded. A server
takes labels for available versions alone, so a configuration whose labels name new versions is sent twice:
first with the labels as they are, then, when the versions are available, as it is wanted.

A stock server that gets a new model whose base path is not there waits for it, and later configurations wait
behind that one. So it is looked for before anything is sent, as far as one can see from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack

from msgspec import Struct

from exporter.errors import CallFailed, ModelPathNotFound, ServerError
from exporter.wire.protos import Proto, message_class
from serving.client import ModelClient
from serving.model_config import absent, check_to_send
from serving.status import Code, VersionState, VersionStatus, error_text

_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 3.0
"""What failed before may be told until the server looks at the new place, within a second or so."""
_COMING = (VersionState.START, VersionState.LOADING)


class Labels(Struct, frozen=True):
    """A model before its configuration changes: the available versions, and the labels as they are."""

    available: Set[int]
    current: Mapping[str, int]


class Reloaded(Struct, frozen=True):
    """A model of the new configuration: its available versions, the newest first, and its labels."""

    model: str
    versions: Sequence[int]
    labels: Mapping[str, int]


def first_step(wanted: Proto, known: Mapping[str, Labels]) -> Proto | None:
    """The configuration to send before `wanted`; None if `wanted` has no label that must wait.

    A label that is to move to a version that is not available stays where it is, and that version stays
    loaded, as far as a policy can say so; a new one is left out.
    """
    first = message_class("serving.ModelServerConfig")()
    first.CopyFrom(wanted)
    for model in first.model_config_list.config:
        before = known[model.name]
        for label, version in list(model.version_labels.items()):
            if version in before.available:
                continue
            del model.version_labels[label]
            current = before.current.get(label)
            if current in before.available:
                model.version_labels[label] = current
                specific = model.model_version_policy.specific
                if model.model_version_policy.HasField("specific") and current not in specific.versions:
                    specific.versions.append(current)
    return None if first == wanted else first


def problem_of(model: Proto, statuses: Sequence[VersionStatus]) -> str | None:
    """Why a model is not served yet as its entry in a configuration says; None if it is."""
    states = {status.version: status for status in statuses}
    for version in sorted(needed_versions(model)):
        status = states.get(version)
        if status is None or status.state is not VersionState.AVAILABLE:
            found = "not there" if status is None else _told(status)
            return f"version {version} of {model.name} is {found}"
    for status in statuses:
        if status.state in _COMING and not status.code:
            return f"version {status.version} of {model.name} is {_told(status)}"
    if not any(status.state is VersionState.AVAILABLE for status in statuses):
        told = ", ".join(f"version {status.version} is {_told(status)}" for status in statuses)
        return f"no version of {model.name} is available" + (f": {told}" if told else "")
    return None


def has_failed(model: Proto, statuses: Sequence[VersionStatus]) -> bool:
    """True if waiting longer will not help."""
    failed = {s.version for s in statuses if s.code and s.state is VersionState.END}
    others = {s.version for s in statuses} - failed
    return bool(needed_versions(model) & failed) or bool(failed and not others)


def needed_versions(model: Proto) -> set[int]:
    """The versions that an entry of a configuration names."""
    return {*model.model_version_policy.specific.versions, *model.version_labels.values()}


def require_there(new: Iterable[Proto]) -> None:
    """Look for the files of models that a server is about to be given.

    Raises:
        ModelPathNotFound: some are not there, as far as one can see from here.
    """
    for entry in new:
        if problem := absent(entry):
            raise ModelPathNotFound(
                f"model {entry.name} cannot be served: {problem}",
                cause="a stock server waits for it, and takes no other configuration until it comes",
                hint="name what is there, with --model-base-path; --no-path-check sends it if the path is on "
                "the server's machine alone, or comes later",
            )


class Reloader:
    """One server, asked about the models of a configuration until a deadline."""

    def __init__(
        self,
        wanted: Proto,
        connect: Callable[[str], ModelClient],
        deadline_s: float,
        *,
        checks_paths: bool = True,
    ) -> None:
        """Prepare; nothing is sent before `run`.

        Args:
            wanted: the `ModelServerConfig`; it lists a model at least.
            connect: a client for the model of a name.
            deadline_s: how long all of it may take.
            checks_paths: look for the files of models that the server does not serve yet.
        """
        self._wanted = wanted
        self._connect = connect
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._checks_paths = checks_paths

    def run(self) -> list[Reloaded]:
        """Send the configuration, and wait until it is served.

        Raises:
            UsageError: a stock server would keep what it refuses; nothing was sent.
            ModelPathNotFound: a new model's files are not there; nothing was sent.
            CallFailed: the server refused, or did not answer.
            ServerError: a version cannot be loaded, or was not in time.
        """
        check_to_send(self._wanted)
        with ExitStack() as stack:
            models = {model.name: model for model in self._wanted.model_config_list.config}
            clients = {name: stack.enter_context(self._connect(name)) for name in models}
            before = {name: self._known(clients[name], model) for name, model in models.items()}
            if self._checks_paths:
                require_there(model for name, model in models.items() if not before[name].available)
            for config in filter(None, (first_step(self._wanted, before), self._wanted)):
                next(iter(clients.values())).configure(config, self._left())
                found = {name: self._served(clients[name], models[name]) for name in models}
            return [
                Reloaded(name, found[name], dict(sorted(model.version_labels.items())))
                for name, model in models.items()
            ]

    def _known(self, client: ModelClient, model: Proto) -> Labels:
        available = {s.version for s in _statuses(client) if s.state is VersionState.AVAILABLE}
        found = {label: client.labelled(label) for label in model.version_labels} if available else {}
        return Labels(available, {label: version for label, version in found.items() if version is not None})

    def _served(self, client: ModelClient, model: Proto) -> list[int]:
        """The available versions of a model, once it is served as its entry says."""
        began = time.monotonic()
        while (problem := problem_of(model, statuses := _statuses(client))) is not None:
            is_settled = time.monotonic() >= min(began + _SETTLE_SECONDS, self._until)
            if self._left() <= 0 or (is_settled and has_failed(model, statuses)):
                raise ServerError(
                    problem,
                    cause="it cannot be loaded"
                    if has_failed(model, statuses)
                    else f"after {self._deadline_s:g} s; the server goes on with the configuration",
                    hint=f"see how it goes: {client.status_command}",
                )
            time.sleep(_POLL_SECONDS)
        return [s.version for s in statuses if s.state is VersionState.AVAILABLE]

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())


def _statuses(client: ModelClient) -> list[VersionStatus]:
    try:
        return client.status()
    except CallFailed as error:
        if error.code != Code.NOT_FOUND.name:
            raise
        return []


def _told(status: VersionStatus) -> str:
    return f"{status.state.name}, {error_text(status)}" if status.code else status.state.name
