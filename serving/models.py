"""The models of a server by name: requests get a version; new configurations apply, also from a file."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from exporter.errors import LfsPointer, ServerError, UsageError
from exporter.wire.protos import Proto
from serving.loader import LoadedModel
from serving.manager import VersionManager
from serving.model_config import ModelConfig, listed_models, read_config_file, require_platform
from serving.status import Code, StatusError, VersionState, VersionStatus, invalid

_log = logging.getLogger(__name__)


class ServedModels:
    """The models of a server by name; `create` makes the manager of a new one.

    A model that a new configuration omits is unloaded; the last statuses of its versions stay known. With
    `labels_unavailable_versions` new labels may name versions that are not available.
    """

    def __init__(
        self, create: Callable[[ModelConfig], VersionManager], *, labels_unavailable_versions: bool = False
    ) -> None:
        self._create = create
        self._labels_unavailable_versions = labels_unavailable_versions
        self._managers: dict[str, VersionManager] = {}
        self._labels: Mapping[str, Mapping[str, int]] = {}
        self._awaited: Counter[str] = Counter()
        """The number of calls of `serve` that wait for each model."""
        self._configuring = threading.Lock()
        self._is_stopping = False

    def stop(self, grace_seconds: float) -> None:
        """Unload all models, one after another, and refuse further configurations.

        Waits; requests in progress have `grace_seconds` in all before they are cut off.
        """
        # Once this is set under the lock, no configuration adds a manager that the loop below would miss.
        with self._configuring:
            self._is_stopping = True
        deadline = time.monotonic() + grace_seconds
        for manager in self._managers.values():
            manager.stop(max(0.0, deadline - time.monotonic()))

    def served(self) -> dict[str, VersionManager]:
        """Return the managers of the models in the current configuration, by name."""
        # `list`: another thread may add a model during the iteration.
        return {name: found for name, found in list(self._managers.items()) if not found.is_retired}

    def is_available(self, name: str | None = None) -> bool:
        """Return True if the model has an available version; without a name, True if every model has one.

        False for a model that is not served; True for a server without models.
        """
        served = self.served()
        if name is None:
            return all(manager.is_available() for manager in served.values())
        return name in served and served[name].is_available()

    def labels(self, name: str) -> Mapping[str, int]:
        """Return the versions of a model by label; empty for an unknown model."""
        return self._labels.get(name, {})

    def versions(self, name: str) -> list[VersionStatus]:
        """Return the last status of every version of a model that the server has ever seen, the newest first.

        Empty for an unknown model.
        """
        manager = self._managers.get(name)
        return manager.statuses() if manager else []

    @contextmanager
    def borrow(self, spec: Proto) -> Iterator[tuple[int, LoadedModel]]:
        """Yield number and model of the version that a `ModelSpec` names: by number, by label, or the newest.

        It stays loaded inside the `with` block. StatusError INVALID_ARGUMENT if no model is named or the
        label is unknown, NOT_FOUND if the model is not served or the version is not available.
        """
        if not spec.name:
            raise invalid("ModelSpec has no name specified.")
        version = self._version(spec)
        manager = self._managers.get(spec.name)
        if manager is None or manager.is_retired:
            wanted = f"Latest({spec.name})" if version is None else f"Specific({spec.name}, {version})"
            raise StatusError(Code.NOT_FOUND, f"Servable not found for request: {wanted}")
        # `enter_context`, not `with`: a StatusError of the caller's block is not a version that is gone.
        with ExitStack() as stack:
            try:
                borrowed = stack.enter_context(manager.borrow(version))
            except StatusError:
                if (moved := self._version(spec)) == version:
                    raise
                borrowed = stack.enter_context(manager.borrow(moved))  # the label moved meanwhile
            yield borrowed

    def statuses(self, spec: Proto) -> list[VersionStatus]:
        """Return the statuses of a model's versions, the newest first; only one if `spec` names a version.

        `spec` is a `ModelSpec`. There is at least one status. StatusError NOT_FOUND if no version of the
        model, or not this one, was ever seen, INVALID_ARGUMENT if the label is unknown.
        """
        statuses = self.versions(spec.name)
        version = self._version(spec)
        if version is None:
            if not statuses:
                raise StatusError(Code.NOT_FOUND, f"Could not find any versions of model {spec.name}")
            return statuses
        for status in statuses:
            if status.version == version:
                return [status]
        raise StatusError(Code.NOT_FOUND, f"Could not find version {version} of model {spec.name}")

    def configure(self, wanted: Sequence[ModelConfig]) -> None:
        """Start to serve exactly these models, and do not wait for them.

        StatusError if the configuration is refused, because of a platform or a label, or the server is
        stopping; then nothing changes.
        """
        with self._configuring:
            self._configure(wanted)

    def serve(
        self,
        wanted: Sequence[ModelConfig],
        timeout_seconds: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start to serve exactly these models, and wait until each new one has an available version.

        A model also counts as new while another call still waits for it, or while its first version loads. A
        model that never became available, and for which no call waits, does not: so a caller can send the
        same configuration again without waiting for it again.

        StatusError if the configuration is refused (then nothing changes), or a model does not become
        available: DEADLINE_EXCEEDED if the time is over, else UNKNOWN.

        Args: wanted: the models. timeout_seconds: the longest wait; the configuration stays in effect
        afterwards. is_wanted: called about once a second; the wait ends, with StatusError, when it returns
        False.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._configuring:
            before = self.served()
            self._configure(wanted)
            names = [model.name for model in wanted if self._is_to_come(model.name, before)]
            managers = [self._managers[name] for name in names]
            self._awaited.update(names)
        try:
            _wait_for(managers, deadline, is_wanted)
        finally:
            with self._configuring:
                self._awaited.subtract(names)

    def _is_to_come(self, name: str, before: Mapping[str, VersionManager]) -> bool:
        return name not in before or self._awaited[name] > 0 or before[name].is_coming()

    def _configure(self, wanted: Sequence[ModelConfig]) -> None:
        if self._is_stopping:
            raise StatusError(Code.UNAVAILABLE, "the server is stopping")
        served = self.served()
        require_platform(wanted, served)
        self._check_labels(wanted)
        # All checks are above: a configuration is applied as a whole, or changes nothing. Labels move before
        # versions are loaded or unloaded, as in server_core.cc.
        self._labels = {model.name: model.labels for model in wanted}
        for name in served.keys() - {model.name for model in wanted}:
            served[name].retire()
        for model in wanted:
            self._follow(model)

    def _follow(self, model: ModelConfig) -> None:
        if (manager := self._managers.get(model.name)) is not None:
            manager.follow(model.base_path, model.policy)
        else:
            manager = self._managers[model.name] = self._create(model)
            manager.start()

    def _check_labels(self, wanted: Sequence[ModelConfig]) -> None:
        """Raise StatusError if a label would move to a version that is not available.

        Its requests would fail. A new label may name such a version only with `labels_unavailable_versions`.
        """
        for model in wanted:
            current = self.labels(model.name)
            available = self._available(model.name)
            for label, version in model.labels.items():
                is_moved = label in current and current[label] != version
                if version not in available and (is_moved or not self._labels_unavailable_versions):
                    raise StatusError(
                        Code.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {model.name}, "
                        "which is not currently available for inference",
                    )

    def _available(self, name: str) -> set[int]:
        if name not in self.served():
            return set()
        return {s.version for s in self.versions(name) if s.state is VersionState.AVAILABLE}

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


def _wait_for(models: Sequence[VersionManager], deadline: float, is_wanted: Callable[[], bool]) -> None:
    failed = []
    for model in models:
        try:
            model.wait_available(max(0.0, deadline - time.monotonic()), is_wanted)
        except ServerError as error:
            failed.append(f"{error.message}: {error.cause}")
    if failed:
        text = f"{len(failed)} model(s) did not become available: {'; '.join(failed)}"
        raise StatusError(Code.DEADLINE_EXCEEDED if time.monotonic() >= deadline else Code.UNKNOWN, text)


class ConfigFile:
    """A file that lists the models to serve; `follow` reads it every `poll_seconds`, unless that is 0."""

    def __init__(self, path: Path, poll_seconds: float = 0.0) -> None:
        self.path = path
        self._poll_seconds = poll_seconds
        self._stopping = threading.Event()
        self._problem = ""

    def read(self, *, may_be_empty: bool = True) -> tuple[ModelConfig, ...]:
        """Read the file, and return the models that it lists, in its order.

        UsageError if it cannot be used, or is empty and `may_be_empty` is False; LfsPointer if it is a
        pointer of Git LFS.
        """
        try:
            config = read_config_file(self.path)
            if not may_be_empty and config.WhichOneof("config") is None:
                raise StatusError(Code.FAILED_PRECONDITION, "it no longer holds a model_config_list")
            return listed_models(config)
        except StatusError as error:
            raise UsageError(
                f"{self.path}: {error.message}", cause=error.code.name, hint="correct the file"
            ) from error

    def follow(self, models: ServedModels) -> None:
        """Begin to read the file every `poll_seconds`, in a thread, and apply its content to `models`.

        This goes on until `stop`. A configuration that cannot be applied changes nothing; its error is
        logged, but not again while it stays the same. With `poll_seconds` 0 nothing happens.
        """
        if self._poll_seconds > 0:
            name = f"models of {self.path.name}"
            threading.Thread(target=self._follow, args=(models,), name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop reading the file; does not wait."""
        self._stopping.set()

    def _follow(self, models: ServedModels) -> None:
        while not self._stopping.wait(self._poll_seconds):
            try:
                # A file that is being written may be empty: as a configuration it would unload all models.
                models.configure(self.read(may_be_empty=False))
                problem = ""
            except (UsageError, LfsPointer) as error:
                problem = f"{error.message} ({error.cause or error.hint})"
            except StatusError as error:
                problem = f"{error.code.name}: {error.message}"
            if problem and problem != self._problem:
                _log.warning("the configuration is unchanged: %s", problem)
            self._problem = problem
