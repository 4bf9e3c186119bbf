"""Read an HDF5 file as a list of datasets. The file is not trusted: only plain data inside it is taken.

The HDF5 library runs in a process of its own (`hdf5_process.py`), with limits of memory and time. A dataset
that is one run of bytes is then streamed from the file itself; a chunked one comes from that process.
Links to other places, data kept in other files, virtual datasets, groups that contain themselves and datasets
that declare far more than they store are refused by name; nothing of another file is ever opened.
Format: HDF5 File Format Specification 3.0.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter import errors
from exporter.checkpoint.file_range import FileRange, PlainValues, verify
from exporter.checkpoint.hdf5_process import REFUSED
from exporter.errors import CheckpointError, CorruptFile, UnsafeArchive
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

MAGIC = b"\x89HDF\r\n\x1a\n"

_MAX_OBJECTS = 1_000_000
_MAX_DEPTH = 64
_MAX_ATTRIBUTE_BYTES = 64 << 20
_MAX_CHUNK_BYTES = 256 << 20  # the library unpacks a chunk at once
_RATIO_FLOOR_BYTES = 64 << 20
_MAX_RATIO = 1100  # gzip's 1032 to 1, and something for the other filters

# Damaged files kept the library busy beyond SIGTERM, and made it take 1.6 GB.
_PROGRAM = Path(__file__).with_name("hdf5_process.py")
_MEMORY_BYTES = 768 << 20  # beyond what the process needs to start: two chunks, and the library's cache
_STEP_CPU_SECONDS = 5  # for one object, or one block of values
_STEP_SECONDS = 60.0  # the same, also where it waits and computes nothing
_IDLE_SECONDS = 5.0  # then a process that is asked nothing ends by itself
_BLOCK_BYTES = 4 << 20  # a multiple of every item's size
_MAX_LIST_BYTES = 256 << 20
_SETTINGS = {"OPENBLAS_NUM_THREADS": "1", "HDF5_PLUGIN_PRELOAD": "::"}  # no threads, and no plug-ins
# The process whose file is likely to be asked for again. Threads read, too: it is taken in one step.
_idle: deque[_Library] = deque()


class Dataset(Struct, frozen=True):
    """A numeric dataset: its path in the file, its type and shape, and its values."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    content: PlainValues | Packed


class FileContents(Struct, frozen=True):
    """The datasets of a file, texts by group ("" is the root) and name, and paths of those of texts."""

    datasets: tuple[Dataset, ...]
    attributes: Mapping[str, Mapping[str, tuple[str, ...]]]
    skipped: tuple[str, ...]


class Packed(Struct, frozen=True):
    """A dataset that only the HDF5 library can read: chunked, compressed, compact, or big endian."""

    archive: FileRange
    path: str
    dtype: DType
    shape: tuple[int, ...]

    def blocks(self) -> Iterator[Array]:
        """See `Content.blocks`."""
        verify(self.archive)
        if not math.prod(self.shape):  # a dimension may be huge where another one is 0
            return
        size = math.prod(self.shape) * self.dtype.numpy.itemsize
        with _library(self.archive) as library:
            for data in library.values(self.path, size):
                yield np.frombuffer(data, self.dtype.numpy)


# Keras splits a list of names that is too long for one attribute into `weight_names0`, `weight_names1`, ...
def read_hdf5(source: FileRange, attributes: Mapping[str, bool]) -> FileContents:
    """Every dataset of a file, and every group's texts of these attributes (True: it may be continued).

    CorruptFile if it is no HDF5 file; else the CheckpointError of the process that reads it.
    """
    if source.size < len(MAGIC) or source.part(0, len(MAGIC)).read() != MAGIC:
        raise CorruptFile(f"{source.path} is not an HDF5 file", cause="it does not begin as one does")
    limits = {
        "objects": _MAX_OBJECTS,
        "depth": _MAX_DEPTH,
        # no file can hold more text than it has bytes
        "attribute_bytes": min(_MAX_ATTRIBUTE_BYTES, source.size),
        "chunk_bytes": _MAX_CHUNK_BYTES,
        "ratio_floor_bytes": _RATIO_FLOOR_BYTES,
        "ratio": _MAX_RATIO,
    }
    with _library(source) as library:
        document = library.contents({"attributes": attributes, "limits": limits})
    datasets, skipped = [], document["skipped"]
    for found in document["datasets"]:
        dataset = _dataset(source, found)
        if dataset is None:
            skipped.append(found["path"])
        else:
            datasets.append(dataset)
    texts = {
        group: {name: tuple(items) for name, items in attributes.items()}
        for group, attributes in document["attributes"].items()
    }
    return FileContents(tuple(datasets), texts, tuple(skipped))


def _dataset(source: FileRange, found: Mapping[str, Any]) -> Dataset | None:
    """A dataset as the process described it; None for a type that no variable has."""
    try:
        dtype = DType.of(found["dtype"])
    except KeyError:
        return None
    path, shape = found["path"], tuple(found["shape"])
    content: PlainValues | Packed = Packed(source, path, dtype, shape)
    if found["offset"] is not None:
        content = PlainValues(source.part(found["offset"], found["size"]), source, dtype)
    return Dataset(path, dtype, shape, content)


@contextmanager
def _library(source: FileRange) -> Iterator[_Library]:
    """A process with `source` open: an idle one, or else a new one. It is ended if the block fails."""
    with source.open() as descriptor:
        library = _take(source) or _Library(source, descriptor)
    try:
        yield library
    except BaseException:
        library.end()  # the rest of an answer is still in its pipe
        raise
    # kept: starting one takes 0.2 s, and a file may have hundreds of packed datasets
    library.idle_since = time.monotonic()
    _end_idle()
    _idle.append(library)


def _take(source: FileRange) -> _Library | None:
    """The idle process, if it has `source` open; None, and another one stays idle."""
    with suppress(IndexError):
        if (library := _idle.popleft()).is_for(source):
            return library
        _idle.append(library)
    return None


@atexit.register
def _end_idle() -> None:
    with suppress(IndexError):
        while True:
            _idle.popleft().end()


class _Library:
    """The HDF5 library with one file open, in a process that limits itself: see `hdf5_process.py`."""

    def __init__(self, source: FileRange, descriptor: int) -> None:
        self.idle_since = 0.0
        self._source = source
        self._owner = os.getpid()  # a fork of this process has the same pipes: it must leave them alone
        config = {
            "path": [*filter(None, sys.path), os.fspath(_PROGRAM.parents[2])],
            "descriptor": descriptor,
            "offset": source.offset,
            "size": source.size,
            "memory_bytes": _MEMORY_BYTES,
            "cpu_seconds": _STEP_CPU_SECONDS,
            "step_seconds": _STEP_SECONDS,
            "idle_seconds": _IDLE_SECONDS,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.fspath(_PROGRAM), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=os.environ | _SETTINGS,
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot read {source.path}", cause=f"no process to read it can be started: {error}"
            ) from None

    def is_for(self, source: FileRange) -> bool:
        """True if it has this file open, and waits for a request."""
        is_fresh = time.monotonic() - self.idle_since < _IDLE_SECONDS / 2  # it ends by itself
        is_ours = self._owner == os.getpid() and self._process.poll() is None
        return is_fresh and is_ours and self._source == source

    def contents(self, wanted: Mapping[str, Any]) -> Any:
        """The document that `hdf5_process.Walk` makes; waits for it.

        UnsafeArchive if it is too long; the CheckpointError of the process if that ends before.
        """
        self._ask({"list": wanted})
        assert self._process.stdout is not None
        line = self._process.stdout.readline(_MAX_LIST_BYTES)
        if len(line) == _MAX_LIST_BYTES:
            raise UnsafeArchive(
                f"{self._source.path} is refused as an HDF5 file: its list has more than {len(line)} bytes"
            )
        if not line.endswith(b"\n"):
            raise self._ending()
        return json.loads(line)

    def values(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the `size` bytes of a dataset; raises the process's CheckpointError if it ends before."""
        self._ask({"values": path})
        assert self._process.stdout is not None
        for start in range(0, size, _BLOCK_BYTES):
            block = self._process.stdout.read(wanted := min(_BLOCK_BYTES, size - start))
            if len(block) < wanted:
                raise self._ending()
            yield block

    def end(self) -> None:
        """Kill the process: the library may be where no request reaches it."""
        if self._owner == os.getpid():
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()

    def _ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # stderr, or how it ended, says why
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _ending(self) -> CheckpointError:
        """Wait for the process to end; returns the error that says why it did."""
        assert self._process.stderr is not None
        said, code = self._process.stderr.read(), self._process.wait()
        path = self._source.path
        if code == REFUSED:
            found = json.loads(said)
            kind: type[CheckpointError] = getattr(errors, found["kind"])
            return kind(f"{path}{found['message']}", cause=found["cause"], hint=found["hint"])
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            computing = code == -signal.SIGXCPU
            limit = f"{_STEP_CPU_SECONDS} s of computing" if computing else f"{_STEP_SECONDS:g} s"
            cause = f"the HDF5 library came to no end with one object of it in {limit}"
            return UnsafeArchive(f"{path} is refused as an HDF5 file", cause=cause)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        cause = f"the process that read it ended {how}"
        return CorruptFile(f"{path} is damaged as an HDF5 file", cause=cause)
