"""Read an HDF5 file as a list of datasets. The file is not trusted: only plain data inside it is read.

The HDF5 library runs in a process of its own (`hdf5_process.py`), with limits of memory and time. A dataset
stored as consecutive bytes is then streamed from the file itself; a chunked one comes from that process.
Links to other places, data kept in other files, virtual datasets, groups that contain themselves and datasets
that declare far more than they store are refused by name; no other file is ever opened. Format: HDF5 File
Format Specification 3.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.checkpoint.file_range import FileRange, PlainValues, verify
from exporter.checkpoint.library import Reading, library
from exporter.errors import CorruptFile, UnsafeArchive
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

MAGIC = b"\x89HDF\r\n\x1a\n"

_MAX_OBJECTS = 1_000_000
_MAX_DEPTH = 64
_MAX_ATTRIBUTE_BYTES = 64 << 20
_MAX_CHUNK_BYTES = 256 << 20  # the library unpacks a chunk at once
_RATIO_FLOOR_BYTES = 64 << 20
_MAX_RATIO = 1100  # gzip reaches 1032 to 1; a little more for the other filters

# Damaged files kept the library busy beyond SIGTERM, and made it take 1.6 GB.
_MEMORY_BYTES = 768 << 20  # beyond what the process needs to start: two chunks, and the library's cache
_STEP_CPU_SECONDS = 5  # for one object, or one block of values
_STEP_SECONDS = 60.0  # elapsed time for the same, waiting included


class Dataset(Struct, frozen=True):
    """A numeric dataset: its path in the file, its type and shape, and its values."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    content: PlainValues | Packed


class FileContents(Struct, frozen=True):
    """A file's datasets, text attributes by group ("": the root) and name, and paths of skipped datasets."""

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
        """Yield the values as flat numpy arrays in C order, from the process that reads the file.

        Raised during the iteration: CorruptFile if the archive's checksum is wrong or the data are damaged,
        UnsafeArchive beyond a limit, CheckpointChanged if the file was replaced; else the CheckpointError
        that the process reports.
        """
        verify(self.archive)
        if not math.prod(self.shape):  # a dimension may be huge where another one is 0
            return
        size = math.prod(self.shape) * self.dtype.numpy.itemsize
        with library(_reading(self.archive)) as process:
            for data in process.values(self.path, size):
                yield np.frombuffer(data, self.dtype.numpy)


# Keras splits a list of names that is too long for one attribute into `weight_names0`, `weight_names1`, ...
def read_hdf5(source: FileRange, attributes: Mapping[str, bool]) -> FileContents:
    """Return every numeric dataset of a file, and the text attributes of its groups.

    Only attributes whose names are keys of `attributes` are read; if the value is True, the attribute may be
    stored as `<name>0`, `<name>1`, ... Datasets of types that no variable has are `skipped`. CorruptFile if
    it is not an HDF5 file, UnsafeArchive if it declares more than it can store, CheckpointChanged if it was
    replaced; else the CheckpointError of the process that reads it.
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
    with library(_reading(source)) as process:
        document = process.contents({"attributes": attributes, "limits": limits})
    _require_stored(source, document["datasets"])
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


def _require_stored(source: FileRange, datasets: Sequence[Mapping[str, Any]]) -> None:
    """Raise UnsafeArchive if datasets together have more bytes than the file can store.

    Such datasets share bytes, or unpack to too much. `datasets` are descriptions by the process, with `size`
    in bytes and `offset`, which is None if packed.
    """
    for is_plain, most in ((True, source.size), (False, max(_RATIO_FLOOR_BYTES, _MAX_RATIO * source.size))):
        declared = sum(found["size"] for found in datasets if (found["offset"] is not None) is is_plain)
        if declared > most:
            cause = f"its datasets declare {declared} bytes, and it has {source.size}"
            raise UnsafeArchive(f"{source.path} is refused as an HDF5 file", cause=cause)


def _dataset(source: FileRange, found: Mapping[str, Any]) -> Dataset | None:
    """Return a dataset from its description by the process; None for a type that no variable has.

    `found` has `path`, `dtype` (numpy's name), `shape`, `size` (bytes) and `offset` (None if packed).
    TruncatedFile if it ends behind the file.
    """
    try:
        dtype = DType.of(found["dtype"])
    except KeyError:
        return None
    path, shape = found["path"], tuple(found["shape"])
    content: PlainValues | Packed = Packed(source, path, dtype, shape)
    if found["offset"] is not None:
        content = PlainValues(source.part(found["offset"], found["size"]), source, dtype)
    return Dataset(path, dtype, shape, content)


def _reading(source: FileRange) -> Reading:
    return Reading(
        source,
        "exporter.checkpoint.hdf5_process",
        "HDF5 file",
        _MEMORY_BYTES,
        _STEP_CPU_SECONDS,
        _STEP_SECONDS,
    )
