"""Keep models by name: requests find their version, and a new configuration can be applied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from exporter.errors import ServerError, UsageError
from exporter.local_paths import local_path
from exporter.wire.protos import Proto
from serving.loader import LoadedModel
from serving.manager import VersionManager
from serving.status import Code, StatusError, VersionState, VersionStatus, invalid
from serving.version_policy import Every, Latest, Policy, Specific

UNLOAD_GRACE_SECONDS = 10.0


class ServedModels:
    """Models by name; `create` makes the manager of a new one."""

    def __init__(self, create: Callable[[str, Path, Policy], VersionManager]) -> None:
        self._create = create
        self._managers: dict[str, VersionManager] = {}
        self._labels: dict[str, dict[str, int]] = {}
        self._configuring = threading.Lock()

    def add(self, name: str, base_path: Path, policy: Policy) -> VersionManager:
        """Begin to serve one more model."""
        manager = self._create(name, base_path, policy)
        self._managers[name] = manager
        manager.start()
        return manager

    def stop(self, grace_seconds: float) -> None:
        """Unload everything."""
        for manager in self._managers.values():
            manager.stop(grace_seconds)

    def served(self) -> dict[str, VersionManager]:
        """The models that are configured now, by name."""
        return dict(self._managers)

    @contextmanager
    def borrow(self, spec: Proto) -> Iterator[tuple[int, LoadedModel]]:
        """The version that a `ModelSpec` asks for, and its number; it stays loaded inside the `with` block.

        Raises:
            StatusError: INVALID_ARGUMENT, no model name or an unknown label; NOT_FOUND, it is not available.
        """
        if not spec.name:
            raise invalid("ModelSpec has no name specified.")
        version = self._version(spec)
        manager = self._managers.get(spec.name)
        if manager is None:
            wanted = f"Latest({spec.name})" if version is None else f"Specific({spec.name}, {version})"
            raise StatusError(Code.NOT_FOUND, f"Servable not found for request: {wanted}")
        with manager.borrow(version) as borrowed:
            yield borrowed

    def statuses(self, spec: Proto) -> list[VersionStatus]:
        """The versions of a model, the newest first, or the one that the `ModelSpec` names.

        Raises:
            StatusError: NOT_FOUND, none was ever seen.
        """
        manager = self._managers.get(spec.name)
        statuses = manager.statuses() if manager else []
        version = self._version(spec)
        if version is None:
            if not statuses:
                raise StatusError(Code.NOT_FOUND, f"Could not find any versions of model {spec.name}")
            return statuses
        for status in statuses:
            if status.version == version:
                return [status]
        raise StatusError(Code.NOT_FOUND, f"Could not find version {version} of model {spec.name}")

    def configure(self, config: Proto, timeout_seconds: float) -> None:
        """Serve exactly the models of a `ModelServerConfig`, and wait until each has an available version.

        Raises:
            StatusError: INVALID_ARGUMENT, not a list of models, or one without name or path;
                FAILED_PRECONDITION, a label for a version that is not available;
                UNKNOWN, a model does not become available.
        """
        if config.WhichOneof("config") != "model_config_list":
            raise invalid(
                "ServerModelConfig type not supported by HandleReloadConfigRequest. "
                "Only ModelConfigList is currently supported"
            )
        wanted = {model.name: model for model in config.model_config_list.config}
        for model in wanted.values():
            if not model.name or not model.base_path:
                raise invalid("Every model of a ModelConfigList needs a name and a base_path.")
        places = {name: _base_path(model) for name, model in wanted.items()}
        with self._configuring:
            for name, model in wanted.items():
                self._serve(name, places[name], _policy(model), timeout_seconds)
            for name in self._managers.keys() - wanted.keys():
                self._managers.pop(name).stop(UNLOAD_GRACE_SECONDS)
            labels = {name: dict(model.version_labels) for name, model in wanted.items()}
            self._check_labels(labels)
            self._labels = labels

    def _serve(self, name: str, base_path: Path, policy: Policy, timeout_seconds: float) -> None:
        manager = self._managers.get(name)
        if manager is not None and manager.base_path == base_path:
            manager.follow(policy)
        else:
            replaced, manager = manager, self._create(name, base_path, policy)
            manager.start()
        try:
            manager.wait_available(timeout_seconds)
        except ServerError as error:
            if self._managers.get(name) is not manager:
                manager.stop(0.0)
            raise StatusError(Code.UNKNOWN, f"{error.message}: {error.cause}") from error
        if self._managers.get(name) is not manager:
            self._managers[name] = manager
            if replaced is not None:
                replaced.stop(UNLOAD_GRACE_SECONDS)

    def _check_labels(self, labels: Mapping[str, Mapping[str, int]]) -> None:
        for name, versions in labels.items():
            available = {
                s.version for s in self._managers[name].statuses() if s.state is VersionState.AVAILABLE
            }
            for version in versions.values():
                if version not in available:
                    raise StatusError(
                        Code.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {name}, "
                        "which is not currently available for inference",
                    )

    def _version(self, spec: Proto) -> int | None:
        choice = spec.WhichOneof("version_choice")
        if choice == "version":
            return int(spec.version.value)
        if choice != "version_label":
            return None
        try:
            return self._labels[spec.name][spec.version_label]
        except KeyError:
            raise invalid(f"Unrecognized servable version label: {spec.version_label}") from None


def _base_path(model: Proto) -> Path:
    try:
        return local_path(f"The base_path of {model.name!r}:", model.base_path)
    except UsageError as error:
        raise invalid(f"{error.message} ({error.cause}); {error.hint}") from error


def _policy(model: Proto) -> Policy:
    policy = model.model_version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return Every()
        case "specific":
            return Specific(frozenset(policy.specific.versions))
        case "latest":
            return Latest(policy.latest.num_versions)
        case _:
            return Latest()
