"""Build the model that a Keras archive's config describes, without its weights; find its variables' places.

*Code.* A config is data, but it may name code. Keras' own classes are code that the user installed. A
Lambda's byte code, a class of another module, or a model in another file are not, and are refused before
Keras sees them, unless the user allows them: `--custom-objects pkg.mod` (or `file.py`) imports a module whose
classes the config may name, `--allow code` trusts the archive.

*Places* (`keras_places`). Keras' own walk over the model runs with a store that only records where each
variable is put. So layers that arrange their values in their own way are handled as Keras handles them.
Source: `_save_state` in saving_lib.py of Keras 3 and of tf-keras.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import re
import stat
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from exporter.catalog import TensorRef
from exporter.checkpoint.keras_archive import (
    ModelConfig,
    list_assets,
    read_config,
    read_keras,
    unpack_assets,
)
from exporter.errors import AccessRefused, BuilderError, UnsafeArchive, UsageError
from exporter.graph.archived_code import KERASES, entries, is_known, refuse_code
from exporter.graph.code_recorder import import_code
from exporter.graph.object_models import keras_of
from exporter.graph.source_graph import ANY_FILES, Trust
from exporter.graph.user_errors import error_line, keras_choice, way_out
from exporter.storage.local_paths import quoted
from exporter.tables.dynamic_table import ServedEmbedding
from exporter.while_needed import WhileNeeded
from exporter.wire.dtypes import DType


def keras_places(model: Any, node_of: Callable[[Any], str] | None = None) -> dict[str, tuple[TensorRef, ...]]:
    """Return {variable's node: the tensors that a weights file has for it}, in the order of loading.

    A file has several tensors of a variable that several layers hold: the one that is loaded last counts.
    `node_of` returns a variable's node for a model that was built outside of a graph; None: the node of the
    variable's handle. Variables without a fully known shape are left out. Empty if `model` is not a Keras
    model, or if a layer's own save method fails.
    """
    import tensorflow as tf

    try:
        stored = list(_walk(model))
    except Exception:  # noqa: BLE001 - a layer's own save method; then layers are matched by their names
        return {}
    places = defaultdict[str, tuple[TensorRef, ...]](tuple)
    for path, owner, value in stored:
        value = getattr(value, _WEIGHTS, value)
        variable: Any = getattr(value, "value", None)  # a Keras 3 variable's own; of TensorFlow's, a method
        variable = variable if isinstance(variable, tf.Variable) else value
        if isinstance(variable, tf.Variable) and variable.shape.is_fully_defined():
            shape = tuple(int(size) for size in variable.shape)
            dtype = DType(variable.dtype.base_dtype.as_datatype_enum)
            node = node_of(variable) if node_of else variable.handle.op.name
            places[node] += (TensorRef(path, dtype, shape, owner=owner),)
    return {**places}


def _walk(model: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (path in a weights file, names of the layers around it, value) for each variable of a model.

    The names are joined by slashes, "" if the innermost one is unknown. The value is the variable; a lookup
    that weighs tokens (tf-idf) is its own value. Yields nothing if `model` is not a Keras model. Raises
    whatever a layer's own save method raises.
    """
    store = _Recorder()
    if (keras := keras_of(model)) is not None:
        saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
        if hasattr(keras, "Variable"):  # Keras 3, whose walk asks for its own class
            store = type("Recorder", (_Recorder, saving_lib.H5IOStore), {})()
        with _symbols_saved(keras)():
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
        """Begin to record the values of the object at `path`; return this store itself.

        `metadata` may be a mapping with the object's "name".
        """
        self._path = path
        if path and metadata:
            self._names[path] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.values.append((self._path, key, value))

    def owner(self, path: str) -> str:
        """Return the names of the objects on a path, outermost first, joined by slashes.

        Objects whose name is unknown are left out; "" if the name of the last one is unknown.
        """
        parts = path.split("/")
        scopes = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        names = [self._names[scope] for scope in scopes if scope in self._names]
        return "/".join(names) if path in self._names else ""


@cache
def _symbols_saved(keras: Any) -> WhileNeeded:
    """Return a change of Keras by which its walk puts variables, not their values, into a `_Recorder`.

    While any thread is in a block of the change, `save_own_variables` is replaced in Keras' lookups and
    optimizers, and for Keras 2 in layers; stores of other classes get the values, as always. A lookup that
    weighs tokens puts itself, and an optimizer nothing: in a graph its variables have no values. The change
    is memoised for each Keras module.
    """

    def save_variables(layer: Any, store: Any) -> None:
        for number, variable in enumerate(layer._trainable_weights + layer._non_trainable_weights):
            store[f"{number}"] = variable

    def save_lookup(layer: Any, store: Any) -> None:
        if layer.output_mode == "tf_idf":
            store[_WEIGHTS] = layer

    lookup = importlib.import_module(f"{keras.__name__}.src.layers.preprocessing.index_lookup").IndexLookup
    saving = {lookup: save_lookup, keras.optimizers.Optimizer: lambda _optimizer, _store: None}
    if not hasattr(keras, "Variable"):
        saving[keras.layers.Layer] = save_variables

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        before = {kind: kind.save_own_variables for kind in saving}
        for kind, save in saving.items():
            kind.save_own_variables = _in_recorders(save, before[kind])
        try:
            yield
        finally:
            for kind, method in before.items():
                kind.save_own_variables = method

    return WhileNeeded(patched)


def _in_recorders(save: Callable[[Any, Any], None], before: Callable[[Any, Any], None]) -> Any:
    """Return a method `save_own_variables` that calls `save` if its store is a `_Recorder`, else `before`."""

    def save_own_variables(self: Any, store: Any) -> None:
        (save if isinstance(store, _Recorder) else before)(self, store)

    return save_own_variables


# A lookup's attribute, and its name in a weights file, by which `output_mode="tf_idf"` multiplies.
_WEIGHTS = "idf_weights"

# The registered name of `exporter.tables.trainable_embedding`, and of the layer that serves it.
_TRAINED_TABLE, _SERVED_TABLE = "exporter>TrainableEmbedding", "exporter>ServedEmbedding"

# A config's key for objects that several layers have in common.
_SHARED = "shared_object_id"

# Keys of a config whose value is a file if it is a string: lookups, columns, KerasHub's tokenizers.
_FILES = ("vocabulary", "vocabulary_file", "ckpt_to_load_from", "merges", "proto")

_MAKER = "give the function that makes it: model=make_model, which takes no arguments"
_CUSTOM_OBJECTS = "--custom-objects pkg.mod, or path/file.py"

Builder = Callable[[], Any]


def archive_builder(
    path: Path, *, allow_code: bool = False, custom_objects: Iterable[str] = (), trust: Trust = ANY_FILES
) -> Builder:
    """Return a function that makes an archive's model, without its weights, in the default graph.

    `custom_objects` are modules, or paths of files, that are imported here; what they define, the archive may
    use. With `allow_code` it may use all code, and the modules that it names are imported, too. `trust` says
    which files its layers may read. The returned function raises BuilderError if Keras cannot make the model,
    CheckpointError and subclasses if its vocabularies cannot be read, and OSError if their scratch files
    cannot be written.

    Raises:
        UsageError: the archive has weights alone, or one of the modules cannot be imported.
        ModuleNotFoundError: TensorFlow is not installed.
        BuilderError: its Keras is not installed or cannot be imported, its config is not JSON, or it mixes
            Keras 2 and 3.
        CodeRefused: it names code that is not allowed, or its config is nested more than 200 deep.
        AccessRefused: it names a file that it may not read.
        UnsafeArchive: it names a pipe or a device for a layer to read.
        CheckpointError: it cannot be read (and subclasses).
    """
    described = read_config(path)
    if described is None:
        raise UsageError(f"{path} holds weights and no model", hint="name the model too: --model pkg.mod:fn")
    keras = _keras(described)
    known = {_SERVED_TABLE: ServedEmbedding} | dict(_public_objects(custom_objects))
    config = _parsed(path, described)
    for file in _named_files(config):
        if trust.is_found and "://" in file:  # TensorFlow would fetch it from another machine
            raise AccessRefused(
                f"{path} asks for a file that lies elsewhere: {file!r}",
                cause="the request does not name the archive, which therefore may only read files beside it",
                hint=f"if it may have it, name the archive: --model {quoted(path)}",
            )
        trust.require_file(Path(file), path.parent)
        _require_regular(path, file)
    _serve_tables(config)
    _forget_training(config)
    if allow_code:
        known |= dict(_public_objects(_named_modules(config)))
    else:
        refuse_code(path, config, known, keras)
    _require_one_keras(path, described, config, known, keras)

    def build() -> Any:
        try:
            with keras.utils.custom_object_scope(known):
                if described.is_legacy:
                    return _read_legacy(keras, json.dumps(config), known)
                model = keras.saving.deserialize_keras_object(config, safe_mode=not allow_code)
        except Exception as error:
            foreign = _foreign(_parsed(path, described), known, keras)
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


def names_registered(path: Path) -> bool:
    """True if an archive names a class or function that this program registered with Keras.

    False if no Keras is imported, or if the archive has weights alone. Raises CheckpointError and subclasses
    if it cannot be read, BuilderError if its config is not JSON, CodeRefused if the config is nested more
    than 200 deep.
    """
    imported = [sys.modules[name] for name in KERASES if name in sys.modules]
    if not imported or (described := read_config(path)) is None:
        return False
    _serve_tables(config := _parsed(path, described))
    return any(is_known(entry, {}, keras) for _, entry in entries(config) for keras in imported)


def model_builder(model: Any) -> Builder:
    """Return a function that makes a Keras model of this program again, in the default graph.

    The new model has the same vocabularies, but other weights. The vocabularies are written at once to a
    temporary directory, which is deleted with the function. BuilderError if Keras cannot describe the model,
    CodeRefused if its config is nested more than 200 deep, OSError if the vocabularies cannot be written. The
    returned function raises BuilderError if Keras cannot make the model again, or a layer refuses its
    vocabulary.
    """
    keras, label = keras_of(model), f"the Keras model {model.name!r}"
    try:
        config = keras.saving.serialize_keras_object(model)
    except Exception as error:
        raise BuilderError(f"Keras cannot describe {label}", cause=error_line(error), hint=_MAKER) from error
    _forget_training(config)
    _serve_tables(config)
    layers = {type(layer).__name__: type(layer) for layer in (model, *model._flatten_layers())}
    own = {name: kind for name, kind in layers.items() if kind.__module__.partition(".")[0] != keras.__name__}
    saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
    store = saving_lib.DiskIOStore("assets", mode="w")
    saving_lib._save_state(model, None, store, "", set())
    shapes = {name: tuple(own.idf_weights_const.shape) for name, own in _weighing_lookups(model).items()}

    def build() -> Any:
        try:
            with keras.utils.custom_object_scope(own | {_SERVED_TABLE: ServedEmbedding}):
                made = keras.saving.deserialize_keras_object(config, safe_mode=False)
        except Exception as error:
            raise BuilderError(
                f"Keras cannot make {label} once more", cause=error_line(error), hint=_MAKER
            ) from error
        _shape_weights(made, shapes)
        _load_vocabularies(label, made, keras, Path(store.working_dir))
        return made

    weakref.finalize(build, store.close)
    return build


def model_digest(path: Path, *, as_written: bool = False) -> str:
    """Return the SHA-256, in hexadecimal, of the model that an archive describes, without its training.

    Vocabularies count. The model's own name, and the numbers in names that Keras gave to layers, count only
    with `as_written`, as in the releases before 0.3.0. BuilderError if the archive has weights alone or its
    config is not JSON, CodeRefused if the config is nested more than 200 deep, CheckpointError and subclasses
    if the archive cannot be read.
    """
    described = read_config(path)
    if described is None:
        raise BuilderError(f"{path} holds weights and no model")
    config, numbers = _parsed(path, described), dict[str, int]()
    _forget_training(config)
    for _, entry in entries(config):
        if _SHARED in entry:  # an address in the trainer's memory: what counts is which of them are equal
            entry[_SHARED] = numbers.setdefault(str(entry[_SHARED]), len(numbers))
    if not as_written:
        _count_anew(config)
        for each in (config, config.get("config")):
            if isinstance(each, dict) and "name" in each:
                each["name"] = ""
    total = hashlib.sha256(json.dumps(config).encode())
    for asset in list_assets(path):
        total.update(f"\0{asset.name}\0{asset.size}\0".encode())
        for chunk in asset.stream():
            total.update(chunk)
    return total.hexdigest()


def _serve_tables(config: Any) -> None:
    """Change a config, in place, so that its trained tables by keys become layers `ServedEmbedding`.

    CodeRefused if the config is nested more than 200 deep.
    """
    for _, entry in entries(config):
        if entry.get("registered_name") == _TRAINED_TABLE:  # by its name, as what is registered comes first
            entry |= {"registered_name": _SERVED_TABLE, "class_name": ServedEmbedding.__name__}


def _forget_training(config: Any) -> None:
    """Remove losses, metrics and optimizers from a config, in place.

    CodeRefused if the config is nested more than 200 deep.
    """
    for _, entry in entries(config):
        entry.pop("compile_config", None)


def _count_anew(config: Any) -> None:
    """Rename, in place, the layers of a config that Keras named, as if the program had made no other model.

    Their numbers begin at 0 for each kind and keep their order; number 0 is not written. Names that a program
    gave stay, and all names stay if a new name would equal one of these. CodeRefused if the config is nested
    more than 200 deep.
    """
    found: dict[str, tuple[str, int]] = {}
    given = set[str]()
    for _, entry in entries(config):
        if isinstance(own := entry.get("config"), dict) and isinstance(name := own.get("name"), str):
            counted = _counted(name, str(entry["class_name"]))
            if counted is None:
                given.add(name)
            else:
                found[name] = counted
    used: dict[str, list[int]] = defaultdict(list)
    for stem, number in sorted({*found.values()}):
        used[stem].append(number)
    renames = {
        name: f"{stem}_{rank}" if (rank := used[stem].index(number)) else stem
        for name, (stem, number) in found.items()
    }
    renames |= {
        f"{name}_input": f"{new}_input" for name, new in renames.items()
    }  # of a Sequential of Keras 2
    if not given - renames.keys() & {*renames.values()}:
        _rename_layers(config, renames)


def _counted(name: str, class_name: str) -> tuple[str, int] | None:
    """Return (stem, number) of a name that Keras gave to an object of this class; None for any other name.

    `dense_2` of a Dense gives ("dense", 2); the number is 0 if the name has none.
    """
    found = re.fullmatch(r"((?:forward_|backward_)?(.+?))(?:_([0-9]+))?", name)
    if found is None:
        return None
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    is_own = found[2] in (words, _NAMED_OTHERWISE.get(class_name)) or found[2].startswith("tf.")
    return (found[1], int(found[3] or 0)) if is_own else None


# Classes of Keras 2 whose objects are not named after them.
_NAMED_OTHERWISE = {"InputLayer": "input", "Functional": "model"}


def _rename_layers(value: Any, renames: Mapping[str, str]) -> None:
    """Rename layers in a config, in place, also where other layers name them as their inputs.

    `renames` is {old name: new name}; other names stay.
    """
    if isinstance(value, dict):
        for each in (value, value.get("config")) if "class_name" in value else ():
            if isinstance(each, dict) and isinstance(name := each.get("name"), str):
                each["name"] = renames.get(name, name)
        children = [*value.values()]
    elif isinstance(value, list):
        if len(value) > 2 and isinstance(value[0], str) and all(isinstance(n, int) for n in value[1:3]):
            value[0] = renames.get(value[0], value[0])  # a layer, one of its calls, one of its outputs
        children = value
    else:
        return
    for child in children:
        _rename_layers(child, renames)


def _load_assets(path: Path, model: Any, keras: Any) -> None:
    """Load the vocabularies that a Keras archive keeps beside its weights into a model's layers.

    Weights of lookups that weigh tokens become zeros of the archive's shapes. Does nothing if the archive
    keeps no vocabularies. BuilderError if a layer refuses its vocabulary; CheckpointError and subclasses if
    the archive cannot be read; OSError if scratch files cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if unpack_assets(path, Path(scratch)):
            _shape_weights(model, {name: ref.shape for name, ref in read_keras(path).tensors.items()})
            _load_vocabularies(str(path), model, keras, Path(scratch))


def _shape_weights(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Set the weights of lookups with `output_mode="tf_idf"` to zeros; their values are loaded later.

    `shapes` is {path in a weights file: shape}. Lookups that it lacks are not changed, nor are lookups of
    Keras 2 whose weights have a known shape.
    """
    import tensorflow as tf

    for name, lookup in _weighing_lookups(model).items():
        if name not in shapes:
            continue
        zeros = np.zeros(shapes[name], np.float32)
        if not hasattr(lookup, _WEIGHTS):  # Keras 3 makes the variable of this when it loads a vocabulary
            lookup.idf_weights_const = SimpleNamespace(numpy=lambda zeros=zeros: zeros)
        elif lookup.idf_weights.shape.rank is None or None in lookup.idf_weights.shape:  # Keras 2's
            lookup.idf_weights = tf.Variable(zeros, trainable=False, dtype=lookup.idf_weights.dtype)
            lookup.idf_weights_const = lookup.idf_weights.value()


def _weighing_lookups(model: Any) -> dict[str, Any]:
    """Return {path of a lookup's weights in a weights file: lookup} for lookups that weigh tokens.

    Such a lookup has `output_mode="tf_idf"`.
    """
    if all(getattr(layer, "output_mode", None) != "tf_idf" for layer in model._flatten_layers()):
        return {}
    return {name: value for name, _, value in _walk(model) if name.endswith(f"/{_WEIGHTS}")}


def _load_vocabularies(label: str, model: Any, keras: Any, directory: Path) -> None:
    """Load the vocabularies in a directory into a model's layers, by Keras' own walk.

    `directory` has the files of an archive's `assets/`; `label` names the model in the error. BuilderError if
    a layer refuses its vocabulary.
    """
    saving_lib = importlib.import_module(f"{keras.__name__}.src.saving.saving_lib")
    store = saving_lib.DiskIOStore(str(directory), mode="r")
    inner = (getattr(layer, "_lookup_layer", None) for layer in model._flatten_layers())
    visited = {id(lookup) for lookup in inner}  # TextVectorization loads its own, and not twice
    try:
        saving_lib._load_state(model, None, store, "", False, visited)
    except Exception as error:
        raise BuilderError(
            f"a layer of {label} cannot be given its vocabulary",
            cause=error_line(error),
            hint="name a builder that makes the model with it: --model pkg.mod:fn",
        ) from error


def _keras(described: ModelConfig) -> Any:
    """Import and return the Keras that wrote a config: tf_keras for Keras 2, else keras.

    BuilderError if it is not installed, or cannot be imported; ModuleNotFoundError if TensorFlow is missing.
    """
    name = "tf_keras" if described.keras_version.startswith("2.") else "keras"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing == "tensorflow":
            raise
        why = "is not installed" if missing == name else "cannot be imported"
        wanted = (missing or name).replace("_", "-")
        raise BuilderError(
            f"the model was saved by Keras {described.keras_version}, and {name} {why}",
            cause=str(error),
            hint=f"pip install {wanted}, or name a builder: --model pkg.mod:fn",
        ) from error


def _read_legacy(keras: Any, text: str, known: Mapping[str, Any]) -> Any:
    """Make the model that the JSON `text` of a legacy HDF5 file describes, by Keras' reader of legacy files.

    `known` has the custom objects that the model may use, by name. Raises whatever Keras raises.
    """
    names = ("keras.src.legacy.saving.saving_utils", "keras.src.legacy.saving.json_utils")
    if keras.__name__ == "tf_keras":
        names = ("tf_keras.models", "tf_keras.src.saving.legacy.saved_model.json_utils")
    reader, decoder = map(importlib.import_module, names)
    return reader.model_from_config(decoder.decode(text), custom_objects=known)


def _parsed(path: Path, described: ModelConfig) -> Any:
    """Parse an archive's config, JSON, into a new value, free to change; BuilderError if it is not JSON."""
    try:
        return json.loads(described.text)
    except (ValueError, RecursionError) as error:
        raise BuilderError(f"the config of {path} is not JSON", cause=str(error)) from None


def _named_files(config: Any) -> Iterator[str]:
    """Yield each string in a config that names a file which its layer reads while it is made.

    These are vocabularies and models of tokenizers, as the config has them. CodeRefused, during the
    iteration, if the config is nested more than 200 deep.
    """
    for _, entry in entries(config):
        given = entry.get("config")
        if isinstance(given, dict):
            yield from (value for name in _FILES if isinstance(value := given.get(name), str))


def _require_regular(archive: Path, file: str) -> None:
    """Raise UnsafeArchive if `file`, which an archive names, is there and is a pipe, a device or the like."""
    with contextlib.suppress(OSError, ValueError):
        if not stat.S_ISREG(Path(file).stat().st_mode):
            raise UnsafeArchive(f"{archive} asks for {file!r}, which is not a regular file")


def _public_objects(modules: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Import modules and yield (name, object) for everything callable in them.

    Each module is `pkg.mod` or the path of a file, and is imported when the iteration reaches it. Importing
    runs its code, which may register classes with Keras. UsageError, during the iteration, if one cannot be
    imported.
    """
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
    """Return the modules outside of Keras and `builtins` that a config names, each once, in order.

    The order is that of the config, outer objects first. CodeRefused if the config is nested more than 200
    deep.
    """
    named = dict.fromkeys(entry.get("module") for _, entry in entries(config))
    foreign = (name for name in named if isinstance(name, str))
    return [name for name in foreign if name.partition(".")[0] not in KERASES | {"builtins"}]


def _require_one_keras(
    path: Path, described: ModelConfig, config: Any, known: Mapping[str, Any], keras: Any
) -> None:
    """Raise BuilderError if a config names a class in `known` that is a layer of the other Keras.

    Keras 2 and 3 do not mix. `keras` is the Keras that the archive needs, `known` the custom objects by name.
    Does nothing if the other Keras is not imported. `path` and `described` are for the message. CodeRefused
    if the config is nested more than 200 deep.
    """
    other = sys.modules.get("keras" if keras.__name__ == "tf_keras" else "tf_keras")
    for _, entry in entries(config):
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
    """Return (name, place) of the first object in a config that nothing defines; None if there is none.

    That is a function that is not in `known`, or a class that is neither in `known` nor in a loaded module of
    Keras. The place is its path in the config. Names that begin with `__` do not count.
    """
    loaded = [module for name, module in sys.modules.items() if name.startswith(f"{keras.__name__}.")]
    for place, entry in entries(config):
        is_function = entry["class_name"] == "function"
        name = entry.get("config" if is_function else "class_name")
        if not isinstance(name, str) or name.startswith("__") or name in known:
            continue
        if is_function or not any(isinstance(vars(module).get(name), type) for module in loaded):
            return name, place or "/"
    return None
