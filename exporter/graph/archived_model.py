"""Build the model that a Keras archive's config describes, without its weights; find its variables' places.

*Code.* A config is data, but it may name code. Keras' own classes are code that the user installed. A
Lambda's byte code, a class of another module, or a model in another file are not, and are refused before
Keras sees them, unless the user allows them: `--custom-objects pkg.mod` (or `file.py`) imports a module whose
classes the config may name, `--allow-code` trusts the archive.

*Places* (`keras_places`). Keras' own walk over the model runs with a store that only records where each
variable is put. So layers that arrange their values in their own way are handled as Keras handles them.
Source: `_save_state` in saving_lib.py of Keras 3 and of tf-keras.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from exporter.catalog import TensorRef
from exporter.checkpoint.keras_archive import ModelConfig, read_config, unpack_assets
from exporter.errors import BuilderError, CodeRefused, UsageError
from exporter.graph.object_models import keras_of
from exporter.graph.source_graph import ANY_FILES, Trust
from exporter.graph.sources import import_code
from exporter.graph.user_errors import error_line, keras_choice, way_out
from exporter.tables.dynamic_table import ServedEmbedding
from exporter.while_needed import WhileNeeded
from exporter.wire.dtypes import DType


def keras_places(model: Any, node_of: Callable[[Any], str] | None = None) -> dict[str, TensorRef]:
    """The tensor that a weights file has for each variable, by the variable's node.

    `node_of` names the TensorFlow variables of a model that was built outside of a graph. The result is empty
    for an object that is not a Keras model, and for a model that computes the values that it saves.
    """
    import tensorflow as tf

    try:
        stored = list(_walk(model))
    except Exception:  # noqa: BLE001 - a layer's own save method; then layers are matched by their names
        return {}
    places = {}
    for path, owner, value in stored:
        variable: Any = getattr(value, "value", None)  # a Keras 3 variable's own; of TensorFlow's, a method
        variable = variable if isinstance(variable, tf.Variable) else value
        if isinstance(variable, tf.Variable):
            shape = tuple(int(size) for size in variable.shape)
            dtype = DType(variable.dtype.base_dtype.as_datatype_enum)
            node = node_of(variable) if node_of else variable.handle.op.name
            places[node] = TensorRef(path, dtype, shape, owner=owner)
    return places


def _walk(model: Any) -> Iterator[tuple[str, str, Any]]:
    """(path in a weights file, names of the layers on the way, the value); nothing for other objects."""
    keras, tf_keras = sys.modules.get("keras"), sys.modules.get("tf_keras")
    store = _Recorder()
    if keras is not None and isinstance(model, keras.Model) and not hasattr(keras, "Variable"):
        from keras.src.saving import saving_lib  # Keras 2, beside TensorFlow 2.15

        with _symbols_saved(keras.layers.Layer)():
            saving_lib._save_state(model, store, None, "", set())
    elif keras is not None and isinstance(model, keras.Model):
        from keras.src.saving import saving_lib

        store_class = type("Recorder", (_Recorder, saving_lib.H5IOStore), {})  # it asks for its own class
        saving_lib._save_state(model, store := store_class(), None, "", set())
    elif tf_keras is not None and isinstance(model, tf_keras.Model):
        from tf_keras.src.saving import saving_lib

        with _symbols_saved(tf_keras.layers.Layer)():
            saving_lib._save_state(model, store, None, "", set())
    for path, key, value in store.values:
        yield (f"{path}/vars/{key}" if path else f"vars/{key}"), store.owner(path), value


class _Recorder:
    """A stand-in for a weights file in Keras' walk; it records the places of values."""

    def __init__(self) -> None:
        self.values: list[tuple[str, str, Any]] = []
        self._names: dict[str, str] = {}
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        """Begin the values of one object."""
        self._path = path
        if path and metadata:
            self._names[path] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.values.append((self._path, key, value))

    def owner(self, path: str) -> str:
        """The names of the layers on a path, "" if the last one is unknown."""
        parts = path.split("/")
        scopes = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        names = [self._names[scope] for scope in scopes if scope in self._names]
        return "/".join(names) if path in self._names else ""


@cache
def _symbols_saved(layer: Any) -> WhileNeeded:
    """Let tf-keras' layers store their variables themselves in a `_Recorder`: a graph lacks their values."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        before = layer.save_own_variables

        def save_own_variables(self: Any, store: Any) -> None:
            if not isinstance(store, _Recorder):  # another thread's, which saves a model
                before(self, store)
                return
            for number, variable in enumerate(self._trainable_weights + self._non_trainable_weights):
                store[f"{number}"] = variable

        layer.save_own_variables = save_own_variables
        try:
            yield
        finally:
            layer.save_own_variables = before

    return WhileNeeded(patched)


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
"""The registered name of `exporter.tables.trainable_embedding`, and of the layer that serves it."""

_FILES = ("vocabulary", "merges", "proto")
"""Keys of a layer's config whose value is a file's path if it is a string: lookups, KerasHub's tokenizers."""

_MAKER = "give the function that makes it: model=make_model, which takes no arguments"
_CUSTOM_OBJECTS = "--custom-objects pkg.mod, or path/file.py"
_MAX_DEPTH = 200

Builder = Callable[[], Any]


def archive_builder(
    path: Path, *, allow_code: bool = False, custom_objects: Iterable[str] = (), trust: Trust = ANY_FILES
) -> Builder:
    """A function that makes the archive's model in the graph it is called in.

    Raises:
        AccessRefused: the config names a file that it may not read.
        CodeRefused: the config names code that was not allowed; the message gives each with its place.
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
    for file in _named_files(config):
        trust.require_file(Path(file), path.parent)
    _serve_tables(config)
    if allow_code:
        known |= dict(_public_objects(_named_modules(config)))
    else:
        _refuse_code(path, config, known, keras)
    _require_one_keras(path, described, config, known, keras)
    if isinstance(config, dict):
        config.pop("compile_config", None)

    def build() -> Any:
        try:
            with keras.utils.custom_object_scope(known):
                if described.is_legacy:
                    return _legacy_reader(keras)(config, custom_objects=known)
                model = keras.saving.deserialize_keras_object(config, safe_mode=not allow_code)
        except Exception as error:
            foreign = _foreign(_parsed(path, described), known, keras)
            if foreign and not allow_code:
                raise _not_keras_own(path, *foreign) from error
            raise BuilderError(
                f"Keras cannot make the model that {path} describes",
                cause=f"nothing defines {foreign[0]} at {foreign[1]}" if foreign else error_line(error),
                hint=way_out(error)
                or f"name what defines its classes and functions: {_CUSTOM_OBJECTS}, "
                "or a builder: --model pkg.mod:fn",
            ) from error

        _load_assets(path, model, keras)
        return model

    return build


def model_builder(model: Any) -> Builder:
    """A function that makes a Keras model of this program once more, in the graph it is called in.

    Its config says how, as in an archive; its classes and functions are the program's own. Weights are left
    behind, vocabularies are taken along.

    Raises:
        BuilderError: the model cannot be described.
    """
    keras, label = keras_of(model), f"the Keras model {model.name!r}"
    try:
        config = keras.saving.serialize_keras_object(model)
    except Exception as error:
        raise BuilderError(
            f"Keras cannot describe {label}",
            cause=error_line(error),
            hint=_MAKER,
        ) from error
    config.pop("compile_config", None)
    _serve_tables(config)
    layers = {type(layer).__name__: type(layer) for layer in (model, *model._flatten_layers())}
    own = {name: kind for name, kind in layers.items() if kind.__module__.partition(".")[0] != keras.__name__}
    saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
    store = saving_lib.DiskIOStore("assets", mode="w")
    saving_lib._save_state(model, None, store, "", set())

    def build() -> Any:
        try:
            with keras.utils.custom_object_scope(own | {_SERVED_TABLE: ServedEmbedding}):
                made = keras.saving.deserialize_keras_object(config, safe_mode=False)
        except Exception as error:
            raise BuilderError(
                f"Keras cannot make {label} once more",
                cause=error_line(error),
                hint=_MAKER,
            ) from error
        _load_vocabularies(label, made, keras, Path(store.working_dir))
        return made

    weakref.finalize(build, store.close)
    return build


def _serve_tables(config: Any) -> None:
    """Have a config's tables by keys made as they are served."""
    for _, entry in _entries(config, "", 0):
        if entry.get("registered_name") == _TRAINED_TABLE:  # by its name, as what is registered comes first
            entry |= {"registered_name": _SERVED_TABLE, "class_name": ServedEmbedding.__name__}


def _load_assets(path: Path, model: Any, keras: Any) -> None:
    """Load the vocabularies that layers keep beside their weights, by Keras' own walk.

    Raises:
        BuilderError: a layer does not accept the archive's data.
        CheckpointError: the archive is damaged or hostile.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if unpack_assets(path, Path(scratch)):
            _load_vocabularies(str(path), model, keras, Path(scratch))


def _load_vocabularies(label: str, model: Any, keras: Any, directory: Path) -> None:
    saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
    store = saving_lib.DiskIOStore(str(directory), mode="r")
    try:
        saving_lib._load_state(model, None, store, "", False, set())
    except Exception as error:
        raise BuilderError(
            f"a layer of {label} cannot be given its vocabulary",
            cause=error_line(error),
            hint="name a builder that makes the model with it: --model pkg.mod:fn",
        ) from error


def _keras(described: ModelConfig) -> Any:
    """The Keras that a config was written by; tf-keras is Keras 2."""
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


def _named_files(config: Any) -> Iterator[str]:
    """Files that layers would read while they are made: vocabularies, and models of tokenizers."""
    for _, entry in _entries(config, "", 0):
        given = entry.get("config")
        if isinstance(given, dict):
            yield from (value for name in _FILES if isinstance(value := given.get(name), str))


def _public_objects(modules: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of modules; importing a module may also register some with Keras."""
    for name in modules:
        try:
            module = import_code(name)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"--custom-objects {name}: it cannot be imported",
                cause=error_line(error),
                hint=way_out(error)
                or "name a module that Python finds from here, or a file: pkg.mod, path/file.py",
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
            raise _not_keras_own(path, f"{module or registered}.{name}", place or "/")


def _require_one_keras(
    path: Path, described: ModelConfig, config: Any, known: Mapping[str, Any], keras: Any
) -> None:
    """Refuse classes of Keras 3 in a model that Keras 2 saved, and the other way round: they do not mix.

    Raises:
        BuilderError: one of `known` that the config names is of the other Keras.
    """
    other = sys.modules.get("keras" if keras.__name__ == "tf_keras" else "tf_keras")
    for _, entry in _entries(config, "", 0):
        found = known.get(str(entry.get("registered_name"))) or known.get(str(entry["class_name"]))
        if other is None or not isinstance(found, type) or issubclass(found, keras.layers.Layer):
            continue
        if issubclass(found, other.layers.Layer):
            raise BuilderError(
                f"{path} was saved by Keras {described.keras_version}, and {found.__name__} is a class of "
                f"Keras {other.__version__}",
                cause=f"{found.__module__} defines it",
                hint=keras_choice(keras.__name__ == "tf_keras", [inspect.getsourcefile(found) or ""])
                or f"derive it from a class of {keras.__name__}, or name a builder: --model pkg.mod:fn",
            )


def _foreign(config: Any, known: Mapping[str, Any], keras: Any) -> tuple[str, str] | None:
    """The first class or function, with its place, that is neither Keras' own nor in `known`."""
    loaded = [module for name, module in sys.modules.items() if name.startswith(f"{keras.__name__}.")]
    for place, entry in _entries(config, "", 0):
        is_function = entry["class_name"] == "function"
        name = entry.get("config" if is_function else "class_name")
        if not isinstance(name, str) or name.startswith("__") or name in known:
            continue
        if is_function or not any(isinstance(vars(module).get(name), type) for module in loaded):
            return name, place or "/"
    return None


def _not_keras_own(path: Path, name: str, place: str) -> CodeRefused:
    return CodeRefused(
        f"{path} asks for {name} at {place}, which is not Keras' own",
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
