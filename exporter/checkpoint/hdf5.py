"""An HDF5 file as a list of datasets, read with suspicion: only what lies plainly inside the file counts.

A dataset that is one run of bytes is streamed from the file itself; a chunked one through the HDF5 library,
in blocks of rows. Links to other places, data kept in other files, virtual datasets, groups that contain
themselves and datasets that declare far more than they store are refused by name; nothing of another file is
ever opened.
Format: HDF5 File Format Specification 3.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from exporter.checkpoint.file_range import FileRange, RangeReader, verify
from exporter.dtypes import DType
from exporter.errors import CorruptFile, TruncatedFile, UnsafeArchive, UnsupportedFormat

Array = np.ndarray[Any, Any]

MAGIC = b"\x89HDF\r\n\x1a\n"
BLOCK_BYTES = 4 << 20

_MAX_OBJECTS = 1_000_000
_MAX_DEPTH = 64
_MAX_ATTRIBUTE_BYTES = 64 << 20
_MAX_CHUNK_BYTES = 256 << 20  # the library unpacks a chunk at once
_CACHE_BYTES = 64 << 20
_RATIO_FLOOR_BYTES = 64 << 20
_MAX_RATIO = 1100  # gzip's 1032 to 1, and something for the other filters
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
"""Filters that the library brings along; others would be loaded from plug-in directories."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A numeric dataset: its path in the file, what it holds, and how to get at it."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    content: Plain | Packed


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds.

    `attributes` has the texts asked for: by group (`""` is the root) and name. `skipped` are datasets of
    strings and the like, which are no variables.
    """

    datasets: tuple[Dataset, ...]
    attributes: Mapping[str, Mapping[str, tuple[str, ...]]]
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A dataset that is one run of bytes, little endian: `source` is that run, `archive` what it lies in."""

    source: FileRange
    archive: FileRange
    dtype: DType

    def blocks(self) -> Iterator[Array]:
        """See `Content.blocks`."""
        verify(self.archive)
        itemsize = self.dtype.numpy.itemsize
        rest = b""
        for chunk in self.source.chunks():
            data = rest + chunk if rest else chunk
            whole = len(data) - len(data) % itemsize
            rest = data[whole:]
            yield np.frombuffer(data[:whole] if rest else data, self.dtype.numpy)


@dataclass(frozen=True, slots=True)
class Packed:
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
        with _opened(self.archive) as file:
            dataset = file[self.path]
            if not self.shape:
                yield np.asarray(dataset[()]).reshape(-1).view(self.dtype.numpy)
                return
            row_bytes = max(1, math.prod(self.shape[1:]) * self.dtype.numpy.itemsize)
            rows = max(1, BLOCK_BYTES // row_bytes)
            for start in range(0, self.shape[0], rows):
                block = dataset[start : start + rows]
                yield np.ascontiguousarray(_little(block)).reshape(-1).view(self.dtype.numpy)


def read_hdf5(source: FileRange, attributes: Mapping[str, bool] | None = None) -> Contents:
    """Every dataset of a file, and of every group the attributes named (True: a list that may be continued).

    Keras splits a list of names that is too long for one attribute into `weight_names0`, `weight_names1`, ...

    Raises:
        CorruptFile, TruncatedFile: it is no HDF5 file, or a damaged one.
        UnsafeArchive: it holds links, external or virtual data, loops, or a bomb.
        UnsupportedFormat: a data type or a filter that is not read.
    """
    if source.size < len(MAGIC) or source.part(0, len(MAGIC)).read() != MAGIC:
        raise CorruptFile(f"{source.path} is no HDF5 file", cause="it does not begin as one does")
    with _opened(source) as file:
        walk = _Walk(source, attributes or {})
        walk.group(file, "", 0)
    return Contents(tuple(walk.datasets), walk.attributes, tuple(walk.skipped))


@contextmanager
def _opened(source: FileRange) -> Iterator[Any]:
    """The file in the HDF5 library, through our own descriptor: no name of a file ever reaches it."""
    import h5py

    with source.open() as descriptor:
        try:
            with h5py.File(RangeReader(descriptor, source), "r", rdcc_nbytes=_CACHE_BYTES) as file:
                yield file
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            if "truncated" in text:
                raise TruncatedFile(f"{source.path} is an HDF5 file cut off", cause=text) from None
            raise CorruptFile(f"{source.path} is damaged as an HDF5 file", cause=text) from None


class _Walk:
    """One pass over a file's groups, by hard links alone, each object once."""

    def __init__(self, source: FileRange, wanted: Mapping[str, bool]) -> None:
        self._source = source
        self._wanted = wanted
        self._seen: dict[int, str] = {}
        self.datasets: list[Dataset] = []
        self.attributes: dict[str, dict[str, tuple[str, ...]]] = {}
        self.skipped: list[str] = []

    def group(self, group: Any, path: str, depth: int) -> None:
        import h5py

        if depth > _MAX_DEPTH:
            self._unsafe(path, f"groups lie more than {_MAX_DEPTH} deep")
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

        address = h5py.h5o.get_info(item.id).addr
        if address in self._seen:
            self._unsafe(path, f"it is {self._seen[address] or '/'} again, by a second link")
        self._seen[address] = path
        if len(self._seen) > _MAX_OBJECTS:
            self._unsafe(path, f"the file holds more than {_MAX_OBJECTS} objects")

    def _read_attributes(self, group: Any, path: str) -> None:
        found = {}
        for name, continued in self._wanted.items():
            parts = [name] if name in group.attrs else []
            if continued and not parts:
                parts = [f"{name}{n}" for n in range(len(group.attrs)) if f"{name}{n}" in group.attrs]
            if parts:
                found[name] = tuple(text for part in parts for text in self._texts(group, part, path))
        if found:
            self.attributes[path] = found

    def _texts(self, group: Any, name: str, path: str) -> list[str]:
        attribute = group.attrs.get_id(name)
        if not attribute.get_space().get_select_npoints():  # the library takes its size for an error
            return []
        if attribute.get_storage_size() > _MAX_ATTRIBUTE_BYTES:
            self._unsafe(path, f"its attribute {name} has more than {_MAX_ATTRIBUTE_BYTES >> 20} MiB")
        value = group.attrs[name]
        items = [value] if isinstance(value, str | bytes) else np.asarray(value).ravel().tolist()
        if not all(isinstance(item, str | bytes) for item in items):
            raise CorruptFile(f"{self._source.path} is damaged at {path!r}: {name} is no text")
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
        shape = tuple(int(size) for size in dataset.shape or ())
        size = math.prod(shape) * stored.itemsize
        offset = dataset.id.get_offset()
        if offset is not None and stored.newbyteorder("<") == stored:
            content: Plain | Packed = Plain(self._source.part(offset, size), self._source, dtype)
        else:
            self._check_packed(dataset, properties, path, size)
            content = Packed(self._source, path, dtype, shape)
        self.datasets.append(Dataset(path, dtype, shape, content))

    def _check_packed(self, dataset: Any, properties: Any, path: str, size: int) -> None:
        storage = dataset.id.get_storage_size()
        limit = max(_RATIO_FLOOR_BYTES, storage * _MAX_RATIO) if dataset.chunks else storage
        if size > limit:
            self._unsafe(path, f"it declares {size} bytes and stores {storage}")
        for position in range(properties.get_nfilters()):
            number = properties.get_filter(position)[0]
            if number not in _FILTERS:
                raise UnsupportedFormat(
                    f"{self._source.path}: {path!r} is packed by the HDF5 filter {number}, which is not read",
                    hint=f"write it again without compression, or by one of {', '.join(_FILTERS.values())}",
                )
        if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > _MAX_CHUNK_BYTES:
            self._unsafe(path, f"one chunk of it unpacks to more than {_MAX_CHUNK_BYTES >> 20} MiB")

    def _unsafe(self, path: str, what: str) -> None:
        raise UnsafeArchive(f"{self._source.path}: {path or '/'!r} is refused: {what}")


def _link_text(link: Any) -> str:
    target = f" to {link.path!r}" if hasattr(link, "path") else ""
    file = f" in file {link.filename!r}" if hasattr(link, "filename") else ""
    return f"a link{target}{file}, not an object of this file"


def _dtype(dataset: Any) -> DType | None:
    """The element type; None for texts, references and records.

    bfloat16 is opaque to HDF5. Keras 3 marks it by an attribute; Keras 2 does not (and cannot read it back),
    but no other type of two bytes is written so.
    """
    import h5py

    stored = dataset.dtype
    is_opaque = isinstance(dataset.id.get_type(), h5py.h5t.TypeOpaqueID)
    if is_opaque and stored.itemsize == 2 and dataset.attrs.get("dtype", "bfloat16") == "bfloat16":
        return DType.BFLOAT16
    try:
        return DType.of(stored.name) if stored.kind in "biufc" else None
    except KeyError:
        return None


def _little(block: Array) -> Array:
    return block.astype(block.dtype.newbyteorder("<"), copy=False)
