"""Send a new configuration to a running model server, and wait until the server serves it. Labels move last.

`HandleReloadConfigRequest` replaces the whole configuration: the server unloads a model that it leaves out.
It accepts a label only for an available version. So a configuration whose labels name new versions is sent
twice: first with the labels as they are, then, when the versions are available, as wanted.

A stock server waits for a new model whose base path does not exist, and every later configuration waits
behind that call: `ServerCore::ReloadConfig` holds its mutex until the new models are available
(tensorflow_serving/model_servers/server_core.cc). So base paths are checked before anything is sent, if this
machine can see them.
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
"""A server reports old failures until it has polled the new base path, about once a second."""
COMING = (VersionState.START, VersionState.LOADING)


class Labels(Struct, frozen=True):
    """The available versions and the labels of a model, before its configuration changes."""

    available: Set[int]
    current: Mapping[str, int]


class Reloaded(Struct, frozen=True):
    """A model of the new configuration: its available versions, the newest first, and its labels."""

    model: str
    versions: Sequence[int]
    labels: Mapping[str, int]


def first_step(wanted: Proto, known: Mapping[str, Labels]) -> Proto | None:
    """Return the configuration to send before `wanted`; None if every label of `wanted` can be set at once.

    `known` has the versions and labels of each model in `wanted`, by name. A label whose new version is not
    available yet keeps its current version; a policy of specific versions then also lists that version, so
    that it stays loaded. A label without an available current version is left out.
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
    """Return the reason why a server does not yet serve a model as its entry requires; None if it does.

    `model` is the entry in the configuration; `statuses` has all versions of the model on the server.
    """
    states = {status.version: status for status in statuses}
    for version in sorted(needed_versions(model)):
        status = states.get(version)
        if status is None or status.state is not VersionState.AVAILABLE:
            found = "missing" if status is None else _described(status)
            return f"version {version} of {model.name} is {found}"
    for status in statuses:
        if status.state in COMING and not status.code:
            return f"version {status.version} of {model.name} is {_described(status)}"
    if not any(status.state is VersionState.AVAILABLE for status in statuses):
        listed = ", ".join(f"version {status.version} is {_described(status)}" for status in statuses)
        return f"no version of {model.name} is available" + (f": {listed}" if listed else "")
    return None


def has_failed(model: Proto, statuses: Sequence[VersionStatus]) -> bool:
    """Return True if waiting longer will not help: a version that the entry `model` names failed, or all.

    `statuses` has all versions of the model on the server.
    """
    failed = {s.version for s in statuses if s.code and s.state is VersionState.END}
    others = {s.version for s in statuses} - failed
    return bool(needed_versions(model) & failed) or bool(failed and not others)


def needed_versions(model: Proto) -> set[int]:
    """Return the versions that an entry of a configuration names by its policy or by labels."""
    return {*model.model_version_policy.specific.versions, *model.version_labels.values()}


def require_there(new: Iterable[Proto]) -> None:
    """Raise ModelPathNotFound if files of new models do not exist, before the models are sent to a server.

    `new` are their entries. A path that this machine cannot judge passes, as one whose parent directory is
    not here. OSError if this user may not look at a path.
    """
    for entry in new:
        if problem := absent(entry):
            raise ModelPathNotFound(
                f"model {entry.name} cannot be served: {problem}",
                cause="a stock server waits for it, and accepts no other configuration until it appears",
                hint="name an existing path with --model-base-path; use --no-path-check if it is only on "
                "the server's machine, or appears later",
            )


class Reloader:
    """A tool that sends one configuration to one server, and polls its models until a deadline."""

    def __init__(
        self,
        wanted: Proto,
        connect: Callable[[str], ModelClient],
        deadline_s: float,
        *,
        checks_paths: bool = True,
    ) -> None:
        """Prepare a reload; `run` sends the configuration.

        Args: wanted: the `ModelServerConfig`; it lists at least one model. connect: makes a client for the
        model of a name; `run` closes it. deadline_s: seconds for the whole reload, from now on. checks_paths:
        check that the files of models new to the server exist.
        """
        self._wanted = wanted
        self._connect = connect
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._checks_paths = checks_paths

    def run(self) -> list[Reloaded]:
        """Send the configuration, and wait until it is served; return the models in its order.

        If labels name versions that are not available yet, it is sent twice, the second time with these
        labels. Errors of `connect` pass.

        Raises:
            UsageError: an entry would block a stock server; nothing was sent.
            ModelPathNotFound: a server would wait for a path that does not exist; nothing was sent.
            OSError: this user may not look at a path; nothing was sent.
            CallFailed: the server did not respond, or refused.
            ServerError: a model cannot be loaded, or is not served before the deadline.
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
        available = {s.version for s in statuses(client) if s.state is VersionState.AVAILABLE}
        found = {label: client.labelled(label) for label in model.version_labels} if available else {}
        return Labels(available, {label: version for label, version in found.items() if version is not None})

    def _served(self, client: ModelClient, model: Proto) -> list[int]:
        """Wait until a model is served as its entry `model` requires; return its available versions.

        The newest is first. The server is asked every 0.1 s. ServerError if the model cannot be loaded, or at
        the deadline; CallFailed if the server does not respond.
        """
        began = time.monotonic()
        while (problem := problem_of(model, found := statuses(client))) is not None:
            is_settled = time.monotonic() >= min(began + _SETTLE_SECONDS, self._until)
            if self._left() <= 0 or (is_settled and has_failed(model, found)):
                raise ServerError(
                    problem,
                    cause="it cannot be loaded"
                    if has_failed(model, found)
                    else f"after {self._deadline_s:g} s; the server continues with the configuration",
                    hint=f"see its progress: {client.status_command}",
                )
            time.sleep(_POLL_SECONDS)
        return [s.version for s in found if s.state is VersionState.AVAILABLE]

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())


def statuses(client: ModelClient) -> list[VersionStatus]:
    """Return the states of a model's versions on a server, the newest first; [] for an unknown model.

    CallFailed if the server does not respond, or refuses for another reason.
    """
    try:
        return client.status()
    except CallFailed as error:
        if error.code != Code.NOT_FOUND.name:
            raise
        return []


def _described(status: VersionStatus) -> str:
    return f"{status.state.name}, {error_text(status)}" if status.code else status.state.name
