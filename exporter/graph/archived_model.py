"""Build the model that a Keras archive's config describes, without its weights.

The config is data until something in it names code. Keras' own classes are code that the user installed; a
Lambda's byte code, a class of another module or a model in another file are not, and are refused before Keras
is asked, unless the user says otherwise: `--custom-objects pkg.mod` (or `file.py`) imports a module whose
classes may be named, `--allow-code` trusts the archive.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from exporter.checkpoint.keras_archive import ModelConfig, read_config, unpack_assets
from exporter.errors import BuilderError, CodeRefused, UsageError
from exporter.graph.code_import import import_code
from exporter.tables.embedding_layer import ServedEmbedding

_OWN_PACKAGES = {"keras", "builtins", "keras_hub", "keras_cv", "keras_nlp", "tf_keras"}
_CARRIES_CODE = {
    "Lambda": "byte code in the archive",
    "__lambda__": "byte code in the archive",
    "TorchModuleWrapper": "a pickled module in the archive",
    "JaxLayer": "pickled functions in the archive",
    "FlaxLayer": "pickled functions in the archive",
    "TFSMLayer": "a SavedModel in another place",
}
_TRAINED_TABLE, _SERVED_TABLE = "exporter>TrainableEmbedding", "exporter>ServedEmbedding"
"""What a config calls `exporter.tables.trainable_embedding`, and what takes its place in a served model."""

_CUSTOM_OBJECTS = "--custom-objects pkg.mod, or path/file.py"
_MAX_DEPTH = 200

Builder = Callable[[], Any]


def archive_builder(path: Path, *, allow_code: bool = False, custom_objects: Iterable[str] = ()) -> Builder:
    """A function that makes the archive's model in the graph it is called in.

    Raises:
        CodeRefused: the config names code that was not allowed; each with its place in the config.
        UsageError: the file holds weights alone, or a module of `custom_objects` cannot be imported.
        BuilderError: the Keras that wrote it is not installed.
        CheckpointError: the archive is damaged or hostile.
    """
    described = read_config(path)
    if described is None:
        raise UsageError(f"{path} holds weights and no model", hint="name the model too: --model pkg.mod:fn")
    keras = _keras(described)
    known = {_SERVED_TABLE: ServedEmbedding} | dict(_public_objects(custom_objects))
    config = _parsed(path, described)
    for _, entry in _entries(config, "", 0):
        if entry.get("registered_name") == _TRAINED_TABLE:  # by its name, as what is registered comes first
            entry |= {"registered_name": _SERVED_TABLE, "class_name": ServedEmbedding.__name__}
    if allow_code:
        known |= dict(_public_objects(_named_modules(config)))
    else:
        _refuse_code(path, config, known, keras)
    if isinstance(config, dict):
        config.pop("compile_config", None)

    def build() -> Any:
        try:
            with keras.utils.custom_object_scope(known):
                if described.is_legacy:
                    return _legacy_reader(keras)(config, custom_objects=known)
                model = keras.saving.deserialize_keras_object(config, safe_mode=not allow_code)
        except (TypeError, ValueError) as error:  # of a class that Keras does not find; the reason comes last
            raise BuilderError(
                f"Keras cannot make the model that {path} describes",
                cause=str(error).rpartition("Exception encountered: ")[2].partition("\n")[0],
                hint=f"name what defines its classes: {_CUSTOM_OBJECTS}",
            ) from error

        _load_assets(path, model, keras)
        return model

    return build


def _load_assets(path: Path, model: Any, keras: Any) -> None:
    """Give layers what they learned and keep beside their weights, by Keras' own walk: vocabularies.

    Raises:
        BuilderError: a layer does not take what the archive has for it.
        CheckpointError: the archive is damaged or hostile.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if not unpack_assets(path, Path(scratch)):
            return
        saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
        store = saving_lib.DiskIOStore(scratch, mode="r")
        try:
            with _sizes_as_numbers(keras):
                saving_lib._load_state(model, None, store, "", False, set())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise BuilderError(
                f"a layer of {path} cannot be given its vocabulary",
                cause=text,
                hint="name a builder that makes the model with it: --model pkg.mod:fn",
            ) from error


@contextlib.contextmanager
def _sizes_as_numbers(keras: Any) -> Iterator[None]:
    """Let lookup layers compare the size of a vocabulary in a graph, where a table's own size is a symbol."""
    name = f"{keras.__name__}.src.layers.preprocessing.index_lookup"
    layer = importlib.import_module(name).IndexLookup
    make_table, vocabulary_size = layer._lookup_table_from_tokens, layer.vocabulary_size
    sizes: dict[int, int] = {}

    def lookup_table_from_tokens(self: Any, tokens: Any) -> Any:
        sizes[id(self)] = len(tokens) + self._token_start_index()
        return make_table(self, tokens)

    def size(self: Any) -> Any:
        return sizes[id(self)] if id(self) in sizes else vocabulary_size(self)

    layer._lookup_table_from_tokens, layer.vocabulary_size = lookup_table_from_tokens, size
    try:
        yield
    finally:
        layer._lookup_table_from_tokens, layer.vocabulary_size = make_table, vocabulary_size


def _keras(described: ModelConfig) -> Any:
    """The Keras that understands a config: Keras 2 lives on as tf-keras."""
    name = "tf_keras" if described.keras_version.startswith("2.") else "keras"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BuilderError(
            f"the model was saved by Keras {described.keras_version}, and {name} is not installed",
            cause=str(error),
            hint=f"pip install {name.replace('_', '-')}, or name a builder: --model pkg.mod:fn",
        ) from error


def _legacy_reader(keras: Any) -> Callable[..., Any]:
    if keras.__name__ == "tf_keras":
        return keras.models.model_from_config  # type: ignore[no-any-return]  # Keras has no types
    from keras.src.legacy.saving import saving_utils

    return saving_utils.model_from_config  # type: ignore[no-any-return]


def _parsed(path: Path, described: ModelConfig) -> Any:
    try:
        return json.loads(described.text)
    except (ValueError, RecursionError) as error:
        raise BuilderError(f"the config of {path} is not JSON", cause=str(error)) from None


def _public_objects(modules: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Classes and functions of modules, which importing them may also register with Keras."""
    for name in modules:
        try:
            module = import_code(name)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"--custom-objects {name}: it cannot be imported",
                cause=str(error),
                hint="name a module that Python finds from here, or a file: pkg.mod, path/file.py",
            ) from error
        yield from ((key, value) for key, value in vars(module).items() if callable(value))


def _named_modules(config: Any) -> list[str]:
    """Modules outside Keras that a config names."""
    found = (entry.get("module") for _, entry in _entries(config, "", 0))
    return [
        *dict.fromkeys(m for m in found if isinstance(m, str) and m.partition(".")[0] not in _OWN_PACKAGES)
    ]


def _refuse_code(path: Path, config: Any, known: Mapping[str, Any], keras: Any) -> None:
    for place, entry in _entries(config, "", 0):
        name = str(entry["class_name"])
        module = entry.get("module")
        if name in _CARRIES_CODE and name not in known:
            raise CodeRefused(
                f"{path} asks to run {_CARRIES_CODE[name]}: {name} at {place or '/'}",
                hint="if you trust it: --allow-code; otherwise name a builder: --model pkg.mod:fn",
            )
        registered = entry.get("registered_name")
        registered_name = str(registered or name)
        is_known = name in known or registered_name in known
        is_known = is_known or keras.saving.get_registered_object(registered_name) is not None
        is_own = module is None and not _is_custom(registered, name)
        if not (is_known or is_own or str(module).partition(".")[0] in _OWN_PACKAGES):
            raise CodeRefused(
                f"{path} asks for {module or registered}.{name} at {place or '/'}, which is not Keras' own",
                hint=f"name what defines it: {_CUSTOM_OBJECTS}",
            )


def _is_custom(registered: object, name: str) -> bool:
    return isinstance(registered, str) and registered != name


def _entries(value: Any, place: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a config that names a class, with its place."""
    if depth > _MAX_DEPTH:
        raise CodeRefused(f"the config is nested more than {_MAX_DEPTH} deep at {place[:99]}")
    if isinstance(value, dict):
        if "class_name" in value:
            yield place, value
        for key, child in value.items():
            yield from _entries(child, f"{place}/{key}", depth + 1)
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _entries(child, f"{place}/{number}", depth + 1)
