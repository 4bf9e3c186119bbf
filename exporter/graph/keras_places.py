"""Find where Keras stores each variable of a model in a weights file.

Keras' own walk over the model is run with a store that only remembers which variable was put where; so layers
that arrange their values in their own way are told apart as Keras does it.
Source: `_save_state` in saving_lib.py of Keras 3 and of tf-keras.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from exporter.catalog import TensorRef
from exporter.wire.dtypes import DType


def keras_places(model: Any, node_of: Callable[[Any], str] | None = None) -> dict[str, TensorRef]:
    """By each variable's node: the tensor that a weights file has for it.

    `node_of` names the TensorFlow variables of a model that was built in no graph. Empty for what is no Keras
    model, and for one that computes what it saves.
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
    if keras is not None and isinstance(model, keras.Model):
        from keras.src.saving import saving_lib

        store_class = type("Recorder", (_Recorder, saving_lib.H5IOStore), {})  # it asks for its own class
        saving_lib._save_state(model, store := store_class(), None, "", set())
    elif tf_keras is not None and isinstance(model, tf_keras.Model):
        from tf_keras.src.saving import saving_lib

        with _symbols_saved(tf_keras.layers.Layer):
            saving_lib._save_state(model, store, None, "", set())
    for path, key, value in store.values:
        yield (f"{path}/vars/{key}" if path else f"vars/{key}"), store.owner(path), value


class _Recorder:
    """What Keras takes for a weights file."""

    def __init__(self) -> None:
        self.values: list[tuple[str, str, Any]] = []
        self._names: dict[str, str] = {}
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        """Begin with what one object stores."""
        self._path = path
        if path and metadata:
            self._names[path] = metadata["name"]
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.values.append((self._path, key, value))

    def owner(self, path: str) -> str:
        """The names of the layers that a path leads through, "" if its own is not known."""
        parts = path.split("/")
        scopes = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        names = [self._names[scope] for scope in scopes if scope in self._names]
        return "/".join(names) if path in self._names else ""


@contextlib.contextmanager
def _symbols_saved(layer: Any) -> Iterator[None]:
    """Let tf-keras' layers store their variables, where they would ask for values that a graph lacks."""

    def save_own_variables(self: Any, store: Any) -> None:
        for number, variable in enumerate(self._trainable_weights + self._non_trainable_weights):
            store[f"{number}"] = variable

    before = layer.save_own_variables
    layer.save_own_variables = save_own_variables
    try:
        yield
    finally:
        layer.save_own_variables = before
