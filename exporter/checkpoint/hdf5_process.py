"""Read one HDF5 file, in a process that `exporter.limited.worker_process` limits.

`hdf5.py` sends the requests. This process opens no file; it reads only the descriptor that it was given.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from exporter.limited.worker_process import BLOCK_BYTES, Deadline, Refused

LIBRARY = "h5py"

_CACHE_BYTES = 64 << 20
# Filters that the library brings along; others would be loaded from plug-in directories.
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}


class Walk:
    """One pass over a file's groups, following hard links only, each object once."""

    def __init__(self, request: Mapping[str, Any], deadline: Deadline) -> None:
        self._wanted: Mapping[str, bool] = request["attributes"]
        self._limits: Mapping[str, int] = request["limits"]
        self._deadline = deadline
        self._seen: dict[int, str] = {}
        self._attribute_bytes = 0
        self.datasets: list[dict[str, Any]] = []
        self.attributes: dict[str, dict[str, list[str]]] = {}
        self.skipped: list[str] = []

    def group(self, group: Any, path: str, depth: int) -> None:
        """Add a group and everything below it to `datasets`, `attributes` and `skipped`.

        `path` is "" for the root, whose `depth` is 0. Refused, with the error's kind, for what is unsafe,
        damaged or not supported.
        """
        import h5py

        if depth > self._limits["depth"]:
            self._unsafe(path, f"groups lie more than {self._limits['depth']} deep")
        self._enter(group, path)
        self._read_attributes(group, path)
        for name in group:
            below = f"{path}/{name}" if path else name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                self._unsafe(below, f"it is {_link_text(link)}")
            child = group[name]
            if isinstance(child, h5py.Group):
                self.group(child, below, depth + 1)
            elif isinstance(child, h5py.Dataset):
                self._enter(child, below)
                self._dataset(child, below)

    def _enter(self, item: Any, path: str) -> None:
        import h5py

        self._deadline.start()
        address = h5py.h5o.get_info(item.id).addr
        if address in self._seen:
            self._unsafe(path, f"it is {self._seen[address] or '/'} again, by a second link")
        self._seen[address] = path
        if len(self._seen) > self._limits["objects"]:
            self._unsafe(path, f"the file holds more than {self._limits['objects']} objects")

    def _read_attributes(self, group: Any, path: str) -> None:
        found = {}
        for name, continued in self._wanted.items():
            parts = [name] if name in group.attrs else []
            if continued and not parts:
                parts = [f"{name}{n}" for n in range(len(group.attrs)) if f"{name}{n}" in group.attrs]
            if parts:
                found[name] = [text for part in parts for text in self._texts(group, part, path)]
        if found:
            self.attributes[path] = found

    def _texts(self, group: Any, name: str, path: str) -> list[str]:
        import numpy as np

        self._deadline.start()
        attribute = group.attrs.get_id(name)
        if not attribute.get_space().get_select_npoints():  # the library reports its size 0 as an error
            return []
        self._attribute_bytes += attribute.get_storage_size()
        if self._attribute_bytes > (limit := self._limits["attribute_bytes"]):
            self._unsafe(path, f"with its attribute {name}, attributes have more than {limit} bytes")
        value = group.attrs[name]
        items = [value] if isinstance(value, str | bytes) else np.asarray(value).ravel().tolist()
        if not all(isinstance(item, str | bytes) for item in items):
            raise Refused("CorruptFile", f" is damaged at {path!r}: {name} is not text")
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]

    def _dataset(self, dataset: Any, path: str) -> None:
        import h5py

        properties = dataset.id.get_create_plist()
        if properties.get_layout() == h5py.h5d.VIRTUAL:
            self._unsafe(path, "it is a virtual dataset, made of parts of other files")
        if properties.get_external_count():
            self._unsafe(path, "its data lies in another file")
        stored = dataset.dtype
        dtype = _dtype(dataset)
        if dtype is None:
            self.skipped.append(path)
            return
        shape = [int(size) for size in dataset.shape or ()]
        size = math.prod(shape) * stored.itemsize
        offset = dataset.id.get_offset()
        is_plain = offset is not None and stored.newbyteorder("<") == stored
        if not is_plain:
            self._check_packed(dataset, properties, path, size)
        self.datasets.append(
            {
                "path": path,
                "dtype": dtype,
                "shape": shape,
                "offset": int(offset) if is_plain else None,
                "size": size,
            }
        )

    def _check_packed(self, dataset: Any, properties: Any, path: str, size: int) -> None:
        storage = dataset.id.get_storage_size()
        limit = (
            max(self._limits["ratio_floor_bytes"], storage * self._limits["ratio"])
            if dataset.chunks
            else storage
        )
        if size > limit:
            self._unsafe(path, f"it declares {size} bytes and stores {storage}")
        for position in range(properties.get_nfilters()):
            number = properties.get_filter(position)[0]
            if number not in _FILTERS:
                raise Refused(
                    "UnsupportedFormat",
                    f": {path!r} is packed by the HDF5 filter {number}, which is not read",
                    hint=f"write it again without compression, or by one of {', '.join(_FILTERS.values())}",
                )
        limit = self._limits["chunk_bytes"]
        if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > limit:
            self._unsafe(path, f"one chunk of it unpacks to more than {limit >> 20} MiB")

    def _unsafe(self, path: str, what: str) -> None:
        raise Refused("UnsafeArchive", f": {path or '/'!r} is refused: {what}")


def _link_text(link: Any) -> str:
    target = f" to {link.path!r}" if hasattr(link, "path") else ""
    file = f" in file {link.filename!r}" if hasattr(link, "filename") else ""
    return f"a link{target}{file}, not an object of this file"


def _dtype(dataset: Any) -> str | None:
    """Return numpy's name of the element type; None for texts, references and records."""
    import h5py

    stored = dataset.dtype
    is_opaque = isinstance(dataset.id.get_type(), h5py.h5t.TypeOpaqueID)
    # bfloat16 is opaque to HDF5. Keras 3 marks it by an attribute; Keras 2 does not (and cannot read it
    # back), but no other type of two bytes is written as opaque.
    if is_opaque and stored.itemsize == 2 and dataset.attrs.get("dtype", "bfloat16") == "bfloat16":
        return "bfloat16"
    return str(stored.name) if stored.kind in "biufc" else None


def _blocks(dataset: Any) -> Iterator[memoryview]:
    """Yield a dataset's bytes in C order and little endian, at most `BLOCK_BYTES` at a time."""
    import numpy as np

    for box in _boxes(dataset.shape, dataset.dtype.itemsize):
        block = np.asarray(dataset[box])
        block = np.ascontiguousarray(block.astype(block.dtype.newbyteorder("<"), copy=False)).reshape(-1)
        yield block.view(np.uint8).data


def _boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield index boxes of a tensor of at most `BLOCK_BYTES` each, in the order of its elements.

    A scalar has the one box (); a tensor without elements has none.
    """
    if not shape or not math.prod(shape):
        yield from [()] if not shape else []
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * itemsize <= BLOCK_BYTES)
    rows = max(1, BLOCK_BYTES // (math.prod(shape[axis + 1 :]) * itemsize))
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, slice(start, min(start + rows, shape[axis])))


@contextmanager
def opened(config: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any], Deadline], Iterator[Any]]]:
    """Open the HDF5 file in a range of an open file; close it at the end of the block.

    `config` has the open file's `descriptor`, and the range's `offset` and `size` in bytes. Yields the
    function that answers requests: for {"values": path} a dataset's bytes in blocks, for {"list": ...} one
    line of JSON with the datasets, attributes and skipped paths. It raises Refused.
    """
    import h5py

    from exporter.storage.open_files import Window

    window = Window(config["descriptor"], config["offset"], config["size"])
    with h5py.File(window, "r", rdcc_nbytes=_CACHE_BYTES) as file:

        def answer(request: Mapping[str, Any], deadline: Deadline) -> Iterator[bytes | memoryview]:
            if "values" in request:
                yield from _blocks(file[request["values"]])
                return
            walk = Walk(request["list"], deadline)
            walk.group(file, "", 0)
            found = {"datasets": walk.datasets, "attributes": walk.attributes, "skipped": walk.skipped}
            yield json.dumps(found).encode() + b"\n"

        yield answer
