"""Run the HDF5 library in a process of its own: `python hdf5_process.py CONFIG`.

A damaged file can keep the library busy for ever, make it allocate without measure, or crash it. Here that
ends this process alone: its memory and the CPU time of each step are limited, and the parent ends it when
nothing has come for a while. It imports h5py and numpy only, and none of the exporter, so that it starts
quickly; it opens no file, but reads the descriptor that it was given.

A request is one line of JSON on stdin, its answer frames on stdout: a kind (one byte), a length (uint64,
little endian) and that many bytes. `P`: still at work. `V`: values. `J`: the end of the answer, in
JSON. `E`: why there is none, in JSON. `hdf5.py` is the other side. Without a request for a while the process
ends by itself.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import resource
import select
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FRAME = struct.Struct("<cQ")

_LIBRARY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError)
_HEARTBEAT_SECONDS = 0.5
_BLOCK_BYTES = 4 << 20
_CACHE_BYTES = 64 << 20
_UNKNOWN_SIZE = 4 << 30
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
"""Filters that the library brings along; others would be loaded from plug-in directories."""


class Refused(Exception):
    """What the parent raises: the name of an error class, and its message after the file's name."""

    def __init__(self, kind: str, message: str, cause: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.document = {"kind": kind, "message": message, "cause": cause, "hint": hint}


class Answers:
    """The way back to the parent."""

    def __init__(self, descriptor: int, cpu_seconds: int) -> None:
        self._descriptor = descriptor
        self._cpu_seconds = cpu_seconds
        self._last = time.monotonic()

    def send(self, kind: bytes, *parts: Any) -> None:
        """One frame; `parts` are its bytes, or arrays of bytes."""
        views = [memoryview(part) for part in parts]
        for view in (memoryview(FRAME.pack(kind, sum(view.nbytes for view in views))), *views):
            while view.nbytes:
                view = view[os.write(self._descriptor, view) :]
        self._last = time.monotonic()
        self.allow()

    def step(self) -> None:
        """One more object is done: the next one has as much CPU time again, and the parent hears of it."""
        self.allow()
        if time.monotonic() - self._last > _HEARTBEAT_SECONDS:
            self.send(b"P")

    def allow(self) -> None:
        """Limit the CPU time from now on."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = math.ceil(time.process_time())
        limit = used + self._cpu_seconds
        resource.setrlimit(
            resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
        )


class Window(io.RawIOBase):
    """A range of the file as a file of its own."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a place in the range."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer, /) -> int:  # type: ignore[no-untyped-def]  # the base class names no type either
        """Fill a buffer as far as the range goes."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        done = 0
        while done < view.nbytes:
            got = os.preadv(self._descriptor, [view[done:]], self._offset + self._position + done)
            if not got:
                break
            done += got
        self._position += done
        return done


class Walk:
    """One pass over a file's groups, by hard links alone, each object once."""

    def __init__(self, request: Mapping[str, Any], answers: Answers) -> None:
        self._wanted: Mapping[str, bool] = request["attributes"]
        self._limits: Mapping[str, int] = request["limits"]
        self._answers = answers
        self._seen: dict[int, str] = {}
        self._attribute_bytes = 0
        self.datasets: list[dict[str, Any]] = []
        self.attributes: dict[str, dict[str, list[str]]] = {}
        self.skipped: list[str] = []

    def group(self, group: Any, path: str, depth: int) -> None:
        """A group and everything below it."""
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

        self._answers.step()
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

        self._answers.step()
        attribute = group.attrs.get_id(name)
        if not attribute.get_space().get_select_npoints():  # the library takes its size for an error
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
    """The element type by numpy's name; None for texts, references and records.

    bfloat16 is opaque to HDF5. Keras 3 marks it by an attribute; Keras 2 does not (and cannot read it back),
    but no other type of two bytes is written so.
    """
    import h5py

    stored = dataset.dtype
    is_opaque = isinstance(dataset.id.get_type(), h5py.h5t.TypeOpaqueID)
    if is_opaque and stored.itemsize == 2 and dataset.attrs.get("dtype", "bfloat16") == "bfloat16":
        return "bfloat16"
    return str(stored.name) if stored.kind in "biufc" else None


def send_values(dataset: Any, answers: Answers) -> None:
    """A dataset in C order and little endian, in frames of bounded size."""
    import numpy as np

    for box in _boxes(dataset.shape, dataset.dtype.itemsize):
        block = np.asarray(dataset[box])
        block = np.ascontiguousarray(block.astype(block.dtype.newbyteorder("<"), copy=False)).reshape(-1)
        answers.send(b"V", block.view(np.uint8))


def _boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int | slice, ...]]:
    """A tensor cut into runs of at most a block, in the order of its elements."""
    if not shape or not math.prod(shape):
        yield from [()] if not shape else []
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * itemsize <= _BLOCK_BYTES)
    rows = max(1, _BLOCK_BYTES // (math.prod(shape[axis + 1 :]) * itemsize))
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, slice(start, min(start + rows, shape[axis])))


def _answer(file: Any, request: Mapping[str, Any], answers: Answers) -> None:
    if request["do"] == "values":
        send_values(file[request["path"]], answers)
        answers.send(b"J", b"{}")
        return
    walk = Walk(request, answers)
    walk.group(file, "", 0)
    found = {"datasets": walk.datasets, "attributes": walk.attributes, "skipped": walk.skipped}
    answers.send(b"J", json.dumps(found).encode())


def _serve(config: Mapping[str, Any], answers: Answers) -> None:
    import h5py

    _limit_memory(config["memory_bytes"])
    answers.allow()
    window = Window(config["descriptor"], config["offset"], config["size"])
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    try:
        with h5py.File(window, "r", rdcc_nbytes=_CACHE_BYTES) as file:
            while waiting.poll(config["idle_seconds"] * 1000) and (line := sys.stdin.buffer.readline()):
                _answer(file, json.loads(line), answers)
    except Refused as refused:
        answers.send(b"E", json.dumps(refused.document).encode())
    except MemoryError:
        what = f"the HDF5 library asked for more than {config['memory_bytes'] >> 20} MiB of memory"
        document = {"kind": "UnsafeArchive", "message": " is refused as an HDF5 file", "cause": what}
        answers.send(b"E", json.dumps(document).encode())
    except _LIBRARY_ERRORS as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind, what = (
            ("TruncatedFile", "is an HDF5 file cut off")
            if "truncated" in text
            else ("CorruptFile", "is damaged as an HDF5 file")
        )
        answers.send(b"E", json.dumps({"kind": kind, "message": f" {what}", "cause": text}).encode())


def _limit_memory(more_bytes: int) -> None:
    """Let the process grow by so much beyond what its libraries have mapped already."""
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        mapped = _UNKNOWN_SIZE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more_bytes
    with suppress(OSError, ValueError):  # a system that does not limit it
        resource.setrlimit(
            resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
        )


def main() -> None:
    """Answer requests until stdin ends or stays silent."""
    config = json.loads(sys.argv[1])
    sys.path[:] = config["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = Answers(os.dup(1), config["cpu_seconds"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a library prints is no answer
    _serve(config, answers)


if __name__ == "__main__":
    main()
