"""The models and versions that a server should serve: `ModelServerConfig`, version policies, the next step.

Directory names give the existing versions, a policy chooses the ones to serve, and `next_action` gives the
next load or unload, such that the model stays available. Rules, error codes and messages follow
tensorflow_serving/model_servers/server_core.cc and core/availability_preserving_policy.cc.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from exporter.errors import ExportError, ManifestError, UsageError
from exporter.publish.served import version_number
from exporter.publish.versions import version_dirs
from exporter.storage.local_paths import local_path, require_no_pattern
from exporter.wire.protos import Proto
from serving.status import StatusError, VersionState, invalid
from serving.text_config import read_text_config

PLATFORM = "tensorflow"
_TENSORFLOW_TYPE = 1
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9.+-]*://")


class Latest(Struct, frozen=True):
    """Serve the newest `count` versions; TF Serving's default is one."""

    count: int = 1

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """Return the newest `count` of the existing versions, but at least one; all if they are fewer."""
        return frozenset(sorted(versions)[-max(1, self.count) :])


class Every(Struct, frozen=True):
    """Serve all existing versions."""

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """Return all existing versions."""
        return frozenset(versions)


class Specific(Struct, frozen=True):
    """Serve the listed versions, if they exist."""

    versions: frozenset[int]

    def choose(self, versions: Iterable[int]) -> frozenset[int]:
        """Return the listed versions that exist."""
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
    """Return the directory names that are versions, non-negative int64s in ASCII digits, by their number.

    Other names are left out; of `1` and `01`, one number, the last in sorted order counts (`1`).
    """
    numbers = {}
    for name in sorted(names):
        number = version_number(name)
        if number is not None:
            numbers[number] = name
    return numbers


def next_action(wanted: frozenset[int], states: Mapping[int, VersionState]) -> Load | Unload | None:
    """Return the next step towards serving exactly `wanted`; None when no step is left.

    Loads begin with the greatest number, unloads with the least. A version that is no longer wanted stays
    until a wanted one is available, so that a new version that cannot be loaded never replaces the working
    one. If `wanted` is empty, all versions are unloaded.

    Args: wanted: the versions to serve. states: the state of each known version; one that failed to load
    stays in `END`.
    """
    serving = {version for version, state in states.items() if state is VersionState.AVAILABLE}
    unwanted = serving - wanted
    if unwanted and (not wanted or serving & wanted):
        return Unload(min(unwanted))
    unknown = [version for version in wanted if version not in states]
    return Load(max(unknown)) if unknown else None


class ModelConfig(Struct, frozen=True):
    """A model to serve."""

    name: str
    base_path: Path
    policy: VersionPolicy = Latest()
    labels: Mapping[str, int] = {}
    platform: str = PLATFORM


def read_config_file(path: Path) -> Proto:
    """Read a `ModelServerConfig` in text form from the file of --model-config-file.

    Raises:
        UsageError: the file cannot be read, or has other content.
        LfsPointer: it is a pointer of Git LFS.
    """
    return read_text_config("--model-config-file", path, "serving.ModelServerConfig")


def read_servers_config(option: str, file: Path, models: Iterable[str]) -> Proto:
    """Read the configuration, a `ModelServerConfig`, with which every target of an agent runs.

    `option` names the file in errors.

    Raises:
        UsageError: it cannot be read, has other content, or lacks one of `models`, the names of the agent's.
        LfsPointer: it is a pointer of Git LFS.
    """
    config = read_text_config(option, file, "serving.ModelServerConfig")
    try:
        listed = {model.name for model in listed_models(config)}
    except (StatusError, ExportError) as error:
        raise UsageError(
            f"{option} {file} cannot be used", cause=str(error), hint="name the servers' own file"
        ) from error
    if missing := sorted(set(models) - listed):
        raise UsageError(
            f"{option} {file} does not list {missing[0]!r}",
            cause="a server unloads every model that its configuration does not list",
            hint="name the file that the servers run with",
        )
    return config


def listed_models(config: Proto) -> tuple[ModelConfig, ...]:
    """Return the models of a `ModelServerConfig`, in its order.

    Raises:
        StatusError: INVALID_ARGUMENT, it is not a list of models, names a model twice, or an entry lacks its
            name, path or platform, or its path is relative, not local, or a pattern to TensorFlow. Platforms
            of other names pass.
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
    """Raise StatusError if a model has another platform than `tensorflow`.

    `served` has the names of the models served now, for which the message differs.
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
    """Raise UsageError if an entry of a `ModelServerConfig` would block a stock server.

    Such an entry repeats a name, has a relative path, or gives its platform twice, not at all, or by an
    unknown `model_type`. The server would refuse and keep it, and answer every later configuration with the
    same error until a restart: `ServerCore::ReloadConfig` stores a configuration before it finds the routes
    of its platforms, and compares each later one with the stored one (server_core.cc).
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
                cause="a stock server that receives it refuses every later configuration until a restart",
                hint="correct the entry: it needs a name, a base_path and model_platform: 'tensorflow'",
            ) from error


def absent(entry: Proto) -> str:
    """Return the reason why a server would wait for the files of a new model's `entry`; else "".

    "" also if this machine cannot judge the path: its parent directory does not exist here or is the root,
    or the path cannot be listed. OSError if this user may not look at the path.
    """
    path = Path(entry.base_path)
    if _SCHEME.match(entry.base_path) or path.parent == path.parent.parent or not _is_directory(path.parent):
        return ""
    if not _is_directory(path):
        return f"{path} is not a directory, but {path.parent} is"
    wanted = set(entry.model_version_policy.specific.versions)
    try:
        found = {child.version for child in version_dirs(path)}
    except ManifestError:  # it cannot be listed: the server may see more
        return ""
    if not found or (wanted and not wanted & found):
        return f"{path} holds no version" + (f" {', '.join(map(str, sorted(wanted)))}" if wanted else "")
    return ""


def _is_directory(path: Path) -> bool:
    """True if a directory is at a path; OSError if this user may not look at it.

    `Path.is_dir` says False then, from Python 3.14 on.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a NUL in it
        return False


def _require_absolute(entry: Proto) -> None:
    if not entry.base_path.startswith("/") and not _SCHEME.match(entry.base_path):
        raise invalid(
            f"Expected model {entry.name} to have an absolute path or URI; got base_path()={entry.base_path}"
        )


def _base_path(entry: Proto) -> Path:
    _require_absolute(entry)
    try:
        what = f"The base_path of {entry.name!r}:"
        path = local_path(what, entry.base_path)
        require_no_pattern(what, path)
        return path
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
