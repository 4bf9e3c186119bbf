"""Which models a server is asked to serve: `ModelServerConfig` messages, checked as TF Serving checks them.

The rules, error codes and messages follow tensorflow_serving/model_servers/server_core.cc.

Decide which version is served, as TF Serving decides it.

The names of directories give the versions that are there, a policy those that ought to be served, and
`next_action` the one step from what is loaded to what ought to be that keeps the model available.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from exporter.errors import UsageError
from exporter.local_paths import local_path
from exporter.publish.versions import version_dirs
from exporter.wire.protos import Proto
from serving.status import StatusError, VersionState, invalid
from serving.text_config import read_text_config

_INT64_MAX = (1 << 63) - 1


class Latest(Struct, frozen=True):
    """Serve the newest versions: TF Serving's default, with one."""

    count: int = 1

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return frozenset(sorted(versions)[-max(1, self.count) :])


class Every(Struct, frozen=True):
    """Serve all versions that are there."""

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return frozenset(versions)


class Specific(Struct, frozen=True):
    """Serve the named versions, as far as they are there."""

    versions: frozenset[int]

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """The versions to serve of those that are there."""
        return self.versions & frozenset(versions)


VersionPolicy = Latest | Every | Specific
NEWEST: VersionPolicy = Latest()
"""The default."""


class Load(Struct, frozen=True):
    """Load this version."""

    version: int


class Unload(Struct, frozen=True):
    """Unload this version."""

    version: int


def versions_among(names: Iterable[str]) -> dict[int, str]:
    """Version to directory name; names that are not wholly a non-negative int64 are no versions."""
    numbers = {}
    for name in sorted(names):
        if name.isascii() and name.isdigit() and int(name) <= _INT64_MAX:
            numbers[int(name)] = name
    return numbers


def next_action(wanted: frozenset[int], states: Mapping[int, VersionState]) -> Load | Unload | None:
    """The next step towards serving exactly `wanted`, or None when there is none to take.

    A version that is no longer wanted stays until a wanted one is available: a new version that cannot be
    loaded never takes the good one away. With nothing wanted, all go.

    Args:
        wanted: the versions that ought to be served.
        states: the state of each version that is known; one that failed to load is left in `END`.
    """
    serving = {version for version, state in states.items() if state is VersionState.AVAILABLE}
    unwanted = serving - wanted
    if unwanted and (not wanted or serving & wanted):
        return Unload(min(unwanted))
    unknown = [version for version in wanted if version not in states]
    return Load(max(unknown)) if unknown else None


PLATFORM = "tensorflow"
_TENSORFLOW_TYPE = 1
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9.+-]*://")


class ModelConfig(Struct, frozen=True):
    """A model to serve."""

    name: str
    base_path: Path
    policy: VersionPolicy = Latest()
    labels: Mapping[str, int] = {}
    platform: str = PLATFORM


def read_config_file(path: Path) -> Proto:
    """The `ModelServerConfig` that a file holds as text.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    return read_text_config("--model-config-file", path, "serving.ModelServerConfig")


def listed_models(config: Proto) -> tuple[ModelConfig, ...]:
    """The models of a `ModelServerConfig`, in its order.

    Raises:
        StatusError: INVALID_ARGUMENT, it is no list of models, names a model twice, or an entry lacks its
            name or platform, or its path is relative or not local.
    """
    if config.WhichOneof("config") == "custom_model_config":
        raise invalid("Only ModelConfigList is currently supported")
    models: dict[str, ModelConfig] = {}
    for entry in config.model_config_list.config:
        if entry.name in models:
            raise invalid(f"Illegal to list model {entry.name} multiple times in config list")
        models[entry.name] = _model(entry)
    return tuple(models.values())


def require_platform(wanted: Iterable[ModelConfig], served: Container[str]) -> None:
    """Refuse what is no TensorFlow model; `served` are the names of models that are served now.

    Raises:
        StatusError: INVALID_ARGUMENT.
    """
    for model in wanted:
        if model.platform != PLATFORM and model.name in served:
            raise invalid(
                f"Illegal to change a model's platform. For model {model.name} platform was {PLATFORM} "
                f"and new platform requested is {model.platform}"
            )
        if model.platform != PLATFORM:
            raise invalid(f"Model {model.name} requests unsupported platform {model.platform}")


def _model(entry: Proto) -> ModelConfig:
    if not entry.name or not entry.base_path:
        raise invalid("Every model of a ModelConfigList needs a name and a base_path.")
    labels = dict(entry.version_labels)
    return ModelConfig(entry.name, _base_path(entry), _policy(entry), labels, _platform(entry))


def _platform(entry: Proto) -> str:
    if entry.model_type and entry.model_platform:
        raise invalid(
            "Illegal setting both ModelServerConfig::model_type (deprecated) and "
            "ModelServerConfig::model_platform."
        )
    if entry.model_type not in (0, _TENSORFLOW_TYPE):
        raise invalid(f"ModelServerConfig::model_type choice {entry.model_type} not supported.")
    if not entry.model_type and not entry.model_platform:
        raise invalid(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            "ModelServerConfig::model_platform."
        )
    return entry.model_platform or PLATFORM


def check_to_send(config: Proto) -> None:
    """Refuse entries that a stock server refuses and keeps: it answers every later configuration with that
    error, until it is restarted.

    Raises:
        UsageError: an entry has no platform, or no absolute path, or its name twice.
    """
    names: set[str] = set()
    for entry in config.model_config_list.config:
        try:
            if entry.name in names:
                raise invalid(f"Illegal to list model {entry.name} multiple times in config list")
            names.add(entry.name)
            _platform(entry)
            _require_absolute(entry)
        except StatusError as error:
            raise UsageError(
                f"the entry of model {entry.name!r} cannot be sent: {error.message}",
                cause="a stock server that got it would refuse every later configuration until a restart",
                hint="correct the entry: it has a name, a base_path and model_platform: 'tensorflow'",
            ) from error


def absent(entry: Proto) -> str:
    """Why a server that is given a new model would wait for its files; empty if it would not, as far as one
    can see from here.

    A path counts as seen from here if the directory that it lies in is there, and is not the root.
    """
    path = Path(entry.base_path)
    if _SCHEME.match(entry.base_path) or path.parent == path.parent.parent or not path.parent.is_dir():
        return ""
    if not path.is_dir():
        return f"{path} is not there, and {path.parent} is"
    wanted = set(entry.model_version_policy.specific.versions)
    found = {child.version for child in version_dirs(path)}
    if not found or (wanted and not wanted & found):
        return f"{path} holds no version" + (f" {', '.join(map(str, sorted(wanted)))}" if wanted else "")
    return ""


def _require_absolute(entry: Proto) -> None:
    if not entry.base_path.startswith("/") and not _SCHEME.match(entry.base_path):
        raise invalid(
            f"Expected model {entry.name} to have an absolute path or URI; got base_path()={entry.base_path}"
        )


def _base_path(entry: Proto) -> Path:
    _require_absolute(entry)
    try:
        return local_path(f"The base_path of {entry.name!r}:", entry.base_path)
    except UsageError as error:
        raise invalid(f"{error.message} ({error.cause}); {error.hint}") from error


def _policy(entry: Proto) -> VersionPolicy:
    policy = entry.model_version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return Every()
        case "specific":
            return Specific(frozenset(policy.specific.versions))
        case "latest":
            return Latest(policy.latest.num_versions)
        case _:
            return Latest()
