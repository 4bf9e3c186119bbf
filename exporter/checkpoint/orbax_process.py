"""Read arrays of an Orbax checkpoint, in a process of its own that `exporter.limited.worker_process` limits.

`orbax.py` sends the requests. tensorstore opens only files below the directory that `config` names.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from exporter.limited.worker_process import BLOCK_BYTES, Deadline, Refused

LIBRARY = "tensorstore"

_DRIVERS = {"/.zarray": "zarr", "/zarr.json": "zarr3"}  # by how the key of an array's description ends
_THREADS = {"limit": 4}


class Arrays:
    """The arrays of a directory, or of the key-value store (OCDBT) in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import tensorstore as ts

        place = {"driver": "file", "path": f"{config['directory']}/"}
        self._store = {"driver": "ocdbt", "base": place} if config["is_ocdbt"] else place
        self._fills = config["fills"]
        self._context = ts.Context({"data_copy_concurrency": _THREADS, "file_io_concurrency": _THREADS})

    def answer(self, request: Mapping[str, Any], deadline: Deadline) -> Iterator[Any]:
        """Yield the answer to a request: the list of all arrays as one line of JSON, or one array's bytes.

        {"values": path} asks for bytes, in C order and little endian; {"list": limits} for the list, in order
        of names: `path`, `dtype`, `shape` and `box_bytes` (the most bytes read at once) of each. `deadline`
        is started again for each array or block. Refused if values are missing, or there are too many.
        """
        try:
            if "values" in request:
                name, _, driver = request["values"].rpartition("/")
                yield from _blocks(self._open(name, driver), deadline)
            else:
                yield json.dumps(list(self._listed(request["list"], deadline))).encode() + b"\n"
        except ValueError as error:
            text = str(error).splitlines()[0]
            if text.startswith("NOT_FOUND"):
                raise Refused("MissingShard", " lacks values that it lists", text) from error
            raise

    def _listed(self, limits: Mapping[str, int], deadline: Deadline) -> Iterator[dict[str, Any]]:
        import tensorstore as ts

        store = ts.KvStore.open(self._store, context=self._context).result()
        keys = store.list().result()
        if len(keys) > limits["objects"]:
            raise Refused("UnsafeArchive", f" is refused: it holds {len(keys)} values")
        for key in sorted(keys):
            for ending, driver in _DRIVERS.items():
                if key.endswith(ending.encode()):
                    deadline.start()
                    name = key.removesuffix(ending.encode()).decode("utf-8", "replace")
                    yield self._described(name, driver)

    def _described(self, name: str, driver: str) -> dict[str, Any]:
        array = self._open(name, driver)
        return {
            "path": f"{name}/{driver}",
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "box_bytes": _Boxes(array).bytes_,
        }

    def _open(self, name: str, driver: str) -> Any:
        import tensorstore as ts

        place = {**self._store, "path": f"{self._store.get('path', '')}{name}/"}
        spec = {"driver": driver, "kvstore": place, "fill_missing_data_reads": self._fills}
        return ts.open(spec, open=True, read=True, context=self._context).result()


class _Boxes:
    """Boxes of an array in the order of its elements, each of whole chunks, so that no chunk is read twice.

    A box has one index in each dimension before `axis`, `step` indices along it, and all in the dimensions
    after it.
    """

    def __init__(self, array: Any) -> None:
        self._shape = array.shape or (1,)
        itemsize = array.dtype.numpy_dtype.itemsize
        chunk = array.chunk_layout.read_chunk.shape or (1,)
        rows = [math.prod(self._shape[at + 1 :]) * itemsize for at in range(len(self._shape))]
        self._axis = next(at for at, row in enumerate(rows) if chunk[at] > 1 or row <= BLOCK_BYTES)
        least, row = chunk[self._axis], rows[self._axis]
        self._step = least * max(1, BLOCK_BYTES // max(1, least * row))
        self.bytes_ = min(self._step, self._shape[self._axis]) * row

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for outer in itertools.product(*map(range, self._shape[: self._axis])):
            for start in range(0, self._shape[self._axis], self._step):
                yield (*outer, slice(start, min(start + self._step, self._shape[self._axis])))


def _blocks(array: Any, deadline: Deadline) -> Iterator[memoryview]:
    import numpy as np

    for box in _Boxes(array) if array.shape else [()]:
        deadline.start()
        found = np.asarray(array[box].read(order="C").result())
        little = found.astype(found.dtype.newbyteorder("<"), copy=False)
        raw = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
        for start in range(0, raw.size, BLOCK_BYTES):
            yield raw[start : start + BLOCK_BYTES].data


@contextmanager
def opened(config: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any], Deadline], Iterator[Any]]]:
    """Yield the function that answers requests about the checkpoint in a directory: see `Arrays.answer`.

    `config` has `directory`, `is_ocdbt` (its store is OCDBT) and `fills` (missing values are the fill value).
    """
    yield Arrays(config).answer
