"""Where Keras 3 would look for each variable of a model in a weights file.

Keras' own walk over the model is run with a store that only remembers which variable was put where; so layers
that arrange their values in their own way are told apart as Keras does it.
Source: `_save_state` in keras/src/saving/saving_lib.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from exporter.catalog import TensorRef
from exporter.dtypes import DType


def keras_places(model: Any) -> dict[str, TensorRef]:
    """By each variable's node: the tensor that a weights file has for it.

    Empty for what is no Keras 3 model, and for one that computes what it saves.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        return {}
    try:
        stored = list(_walk(model))
    except Exception:  # noqa: BLE001 - a layer's own save method; then layers are matched by their names
        return {}
    places = {}
    for path, owner, value in stored:
        variable = getattr(value, "value", value)
        node = getattr(getattr(variable, "handle", None), "op", None)
        if node is not None:
            shape = tuple(int(size) for size in variable.shape)
            places[node.name] = TensorRef(path, DType(variable.dtype.as_datatype_enum), shape, owner=owner)
    return places


def _walk(model: Any) -> Iterator[tuple[str, str, Any]]:
    """(path in a weights file, names of the layers on the way, the value)."""
    from keras.src.saving import saving_lib

    class Recorder(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras has no types
        """A store that opens no file: `_save_state` asks for this class."""

        def __init__(self) -> None:
            self.values: list[tuple[str, str, Any]] = []
            self.names: dict[str, str] = {}
            self._path = ""

        def __bool__(self) -> bool:
            return True

        def make(self, path: str, metadata: Any = None) -> Any:
            self._path = path
            if path and metadata:
                self.names[path] = metadata["name"]
            return self

        def __setitem__(self, key: str, value: Any) -> None:
            self.values.append((self._path, key, value))

    recorder = Recorder()
    optimizer = [model.optimizer] if getattr(model, "optimizer", None) is not None else []
    visited = {id(item) for item in optimizer}
    saving_lib._save_state(model, recorder, None, "", visited)
    for path, key, value in recorder.values:
        parts = path.split("/") if path else []
        scopes = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        names = [recorder.names[scope] for scope in scopes if scope in recorder.names]
        owner = "/".join(names) if path in recorder.names else ""
        yield (f"{path}/vars/{key}" if path else f"vars/{key}"), owner, value
