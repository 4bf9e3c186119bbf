"""Archives for tests: by h5py and numpy as trainers write them, and hostile ones by hand."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import read_array, write_bundle

LAYERS = {
    "layers/dense": ("hidden", [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)]),
    "layers/dense_1": ("out", [np.full((3, 1), 2, np.float32), np.zeros(1, np.float32)]),
}
"""Two layers as Keras 3 stores them: path -> (name, values)."""


def weights_file(target: Any, layers: Mapping[str, tuple[str, list[Any]]] = LAYERS) -> Any:
    """A `.weights.h5` of Keras 3 at a path or in a binary file."""
    with h5py.File(target, "w") as file:
        for path, (name, values) in layers.items():
            group = file.create_group(path).create_group("vars")
            group.attrs["name"] = name
            for number, value in enumerate(values):
                group[str(number)] = value
    return target


def keras_archive(
    path: Path, *, config: str = "{}", weights: bytes | None = None, version: str = "3.10.0", **options: Any
) -> Path:
    """A `.keras` archive; `options` go to ZipFile."""
    if weights is None:
        weights_file(buffer := io.BytesIO())
        weights = buffer.getvalue()
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("metadata.json", f'{{"keras_version": "{version}"}}')
        archive.writestr("config.json", config)
        archive.writestr("model.weights.h5", weights)
    return path


def legacy_file(path: Path, layers: Mapping[str, Mapping[str, Any]], **attributes: str) -> Path:
    """A legacy h5 file: layer name -> weight name -> value."""
    with h5py.File(path, "w") as file:
        for key, value in attributes.items():
            file.attrs[key] = value
        file.attrs["layer_names"] = [name.encode() for name in layers]
        for layer, weights in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = [name.encode() for name in weights]
            for name, value in weights.items():
                group.create_dataset(name, data=value)
    return path


def zip_of(path: Path, members: Iterable[tuple[zipfile.ZipInfo | str, bytes]], **options: Any) -> Path:
    """A zip of (name or info, bytes), doubled names allowed."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def npy(value: Any) -> bytes:
    np.lib.format.write_array(buffer := io.BytesIO(), np.asanyarray(value), allow_pickle=True)
    return buffer.getvalue()


def npy_header(text: str, *, version: int = 1) -> bytes:
    """A `.npy` that is nothing but a header that says `text`."""
    data = text.encode("latin1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(data)) + data


def patched(path: Path, change: Callable[[bytearray], None]) -> Path:
    """The file with its bytes changed in place."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def values(catalog: Catalog, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a catalog, by way of the bundle that it is exported through."""
    written = write_bundle(catalog, catalog.tensors.values(), directory / "converted")
    return {name: read_array(written, ref) for name, ref in written.tensors.items()}


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))
