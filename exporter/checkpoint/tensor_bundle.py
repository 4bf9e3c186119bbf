"""TensorFlow's checkpoint format V2, the tensor bundle: `<prefix>.index` -> Catalog.

The index is a sorted string table: key "" holds a `BundleHeaderProto`, a tensor's name its
`BundleEntryProto`, a slice key the entry of one slice of a partitioned tensor. Values lie in
`<prefix>.data-<shard>-of-<shards>`. Sources: tensorflow/core/util/tensor_bundle/tensor_bundle.{h,cc},
tensorflow/core/protobuf/tensor_bundle.proto.

Writing is `bundle_writer`, values are `tensor_values`; both are offered here too.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from google.protobuf.message import DecodeError

from exporter import protos
from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.bundle_writer import BundleWriter, encode_index, index_path, shard_path
from exporter.checkpoint.slice_keys import WHOLE, overlap, slice_key
from exporter.checkpoint.sstable import Entry, read_table
from exporter.checkpoint.tensor_values import check_values, memory_map, read_array
from exporter.dtypes import DType
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsupportedFormat,
)

__all__ = [
    "BundleWriter",
    "check_values",
    "encode_index",
    "index_path",
    "memory_map",
    "parse_index",
    "read_array",
    "read_catalog",
    "shard_path",
    "step_in_name",
]

GLOBAL_STEP = "global_step"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

_VERSION = 1  # kTensorBundleVersion: what this reader understands
_MAX_INDEX_BYTES = 1 << 30
_MAX_SHARDS = 100_000  # file names have five digits
_MAX_RANK = 254  # TensorShape::MaxDimensions
_MAX_ELEMENTS = 1 << 63
_SMALLEST_STRINGS = 4  # the checksum of the lengths


def read_catalog(prefix: Path) -> Catalog:
    """The bundle whose index is `<prefix>.index`; only shards that some tensor refers to need to exist.

    The size of a shard that nothing refers to is given as 0.

    Raises:
        CheckpointNotFound: there is no such index.
        MissingShard, TruncatedFile, CorruptFile, UnsupportedFormat: see errors.py.
        CheckpointChanged: the index was replaced while it was read.
    """
    path = index_path(prefix)
    data, identity = _read_index_file(path)
    num_shards, tensors = parse_index(data, path)
    shards = tuple(shard_path(prefix, shard, num_shards) for shard in range(num_shards))
    sizes = _check_extents(tensors, shards, path)
    if _identity(path) != identity:
        raise CheckpointChanged(f"{path} was replaced while it was read")
    family = "TensorFlow V2, object-based" if OBJECT_GRAPH in tensors else "TensorFlow V2, name-based"
    catalog = Catalog(family, prefix, tensors, shards, sizes)
    return Catalog(family, prefix, tensors, shards, sizes, step=_step(catalog))


def parse_index(data: bytes, path: Path) -> tuple[int, dict[str, TensorRef]]:
    """Number of shards and tensors by name in an index's bytes; `path` is for error texts. Opens no shard.

    Raises:
        TruncatedFile, CorruptFile, UnsupportedFormat: see errors.py.
    """
    table = read_table(data, path)
    num_shards = _check_header(table, path)
    try:
        return num_shards, _Parser(path, num_shards).tensors(table)
    except DecodeError as error:
        raise CorruptFile(
            f"{path} is damaged: an entry is not a BundleEntryProto", cause=str(error)
        ) from None


def step_in_name(name: str) -> int | None:
    """The step that a trainer puts behind a prefix: 1200 of `model.ckpt-1200`."""
    found = re.search(r"-([0-9]+)$", name)
    return int(found[1]) if found else None


def _read_index_file(path: Path) -> tuple[bytes, tuple[int, ...]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise CorruptFile(f"{path} is not a regular file")
        identity = _identity(path)
        if identity[-1] > _MAX_INDEX_BYTES:
            raise UnsupportedFormat(f"{path} has {identity[-1]} bytes; the largest index read is 1 GiB")
        return path.read_bytes(), identity
    except FileNotFoundError:
        raise CheckpointNotFound(f"there is no {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from None


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointChanged(f"{path} vanished while it was read") from None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _check_header(table: list[Entry], path: Path) -> int:
    """The number of shards, if the header is one that this reader understands."""
    if not table or table[0][0] != b"":
        raise CorruptFile(f"{path} is a table, but not an index: it has no header")
    try:
        header = protos.BundleHeaderProto.FromString(table[0][1])
    except DecodeError as error:
        raise CorruptFile(f"{path} is damaged: its header cannot be decoded", cause=str(error)) from None
    if header.endianness != header.LITTLE:
        raise UnsupportedFormat(f"{path} was written on a big-endian machine")
    if header.version.min_consumer > _VERSION or _VERSION in header.version.bad_consumers:
        raise UnsupportedFormat(
            f"{path} needs a reader of version {header.version.min_consumer}, this one is {_VERSION}"
        )
    if not 1 <= header.num_shards <= _MAX_SHARDS:
        raise CorruptFile(f"{path} is damaged: its header tells of {header.num_shards} shards")
    return int(header.num_shards)


class _Parser:
    """Table entries -> tensors, with everything checked that can be checked without the shards."""

    def __init__(self, path: Path, num_shards: int) -> None:
        self._path = path
        self._num_shards = num_shards
        self._parse = protos.BundleEntryProto.FromString

    def tensors(self, table: list[Entry]) -> dict[str, TensorRef]:
        """The tensors by name in key order; slice entries are found through the tensor that declares them."""
        slices = {key: value for key, value in table[1:] if key[0] == 0}
        found = {}
        for key, value in table[1 + len(slices) :]:
            name = self._name(key)
            found[name] = self._tensor(name, key, value, slices)
        for key, value in slices.items():  # what no tensor declares is a name that begins with NUL
            name = self._name(key)
            found[name] = self._tensor(name, key, value, {})
        return found

    def _name(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise UnsupportedFormat(
                f"{self._path} holds a tensor whose name is not UTF-8: {key[:200]!r}"
            ) from None

    def _tensor(self, name: str, key: bytes, value: bytes, slices: dict[bytes, bytes]) -> TensorRef:
        entry = self._parse(value)
        dtype = self._dtype(name, entry)
        shape = self._shape(name, entry)
        if not entry.slices:
            return TensorRef(name, dtype, shape, self._extent(name, dtype, shape, entry))
        parts = tuple(self._slice(name, key, dtype, shape, part, slices) for part in entry.slices)
        clash = overlap([part.spec for part in parts])
        if clash:
            self._corrupt(name, f"its slices overlap: {clash}")
        return TensorRef(name, dtype, shape, slices=parts)

    def _slice(
        self,
        name: str,
        key: bytes,
        dtype: DType,
        shape: tuple[int, ...],
        part: protos.Proto,
        slices: dict[bytes, bytes],
    ) -> SliceRef:
        boxes = [(box.start, box.length) if box.HasField("length") else WHOLE for box in part.extent]
        if len(boxes) != len(shape):
            self._corrupt(name, f"a slice of rank {len(boxes)} in a tensor of rank {len(shape)}")
        starts = tuple(start for start, _ in boxes)
        lengths = tuple(full if box == WHOLE else box[1] for box, full in zip(boxes, shape, strict=True))
        for start, length, full in zip(starts, lengths, shape, strict=True):
            if start < 0 or length < 0 or start + length > full:
                self._corrupt(name, f"slice {start},{length} lies outside a dimension of {full}")
        value = slices.pop(slice_key(key, boxes), None)
        spec = SliceSpec(shape, starts, lengths)
        if value is None:
            return SliceRef(spec, None)
        entry = self._parse(value)
        if self._dtype(name, entry) is not dtype or self._shape(name, entry) != lengths:
            self._corrupt(
                name, f"slice {spec.restore_spec} has another dtype or shape than it is declared with"
            )
        return SliceRef(spec, self._extent(name, dtype, lengths, entry))

    def _dtype(self, name: str, entry: protos.Proto) -> DType:
        try:
            return DType(entry.dtype)
        except ValueError:
            raise UnsupportedFormat(f"{self._path}: {name} has the unknown data type {entry.dtype}") from None

    def _shape(self, name: str, entry: protos.Proto) -> tuple[int, ...]:
        shape = tuple([dim.size for dim in entry.shape.dim])
        if len(shape) > _MAX_RANK or entry.shape.unknown_rank or (shape and min(shape) < 0):
            self._corrupt(name, f"its shape is not one: {_brief(shape)}")
        return shape

    def _extent(self, name: str, dtype: DType, shape: tuple[int, ...], entry: protos.Proto) -> Extent:
        extent = Extent(entry.shard_id, entry.offset, entry.size, entry.crc32c)
        elements, itemsize = math.prod(shape), dtype.itemsize
        if elements >= _MAX_ELEMENTS:
            self._corrupt(name, f"its shape {_brief(shape)} has 2^63 elements or more")
        if not 0 <= extent.shard < self._num_shards:
            self._corrupt(name, f"it lies in shard {extent.shard} of {self._num_shards}")
        if extent.offset < 0 or extent.size < 0:
            self._corrupt(name, f"it has {extent.size} bytes from byte {extent.offset}")
        if itemsize is not None and extent.size != elements * itemsize:
            expected = f"{dtype.label}{_brief(shape)} has {elements * itemsize}"
            self._corrupt(name, f"it has {extent.size} bytes, {expected}")
        if dtype is DType.STRING and extent.size < elements + _SMALLEST_STRINGS:
            self._corrupt(name, f"it has {extent.size} bytes for {elements} strings")
        return extent

    def _corrupt(self, name: str, what: str) -> NoReturn:
        raise CorruptFile(f"{self._path} is damaged at {name[:200]!r}: {what}")


def _brief(shape: tuple[int, ...]) -> str:
    sizes = ", ".join(map(str, shape[:8]))
    return f"[{sizes}]" if len(shape) <= 8 else f"[{sizes}, ... ({len(shape)} dimensions)]"


def _check_extents(
    tensors: Mapping[str, TensorRef], shards: tuple[Path, ...], index: Path
) -> tuple[int, ...]:
    """Sizes of the shards, which hold every extent."""
    sizes: dict[int, int] = {}
    for ref in tensors.values():
        for extent in ref.extents:
            size = sizes.get(extent.shard)
            if size is None:
                size = sizes[extent.shard] = _shard_size(shards[extent.shard], ref.name, index)
            if extent.offset + extent.size > size:
                path = shards[extent.shard]
                raise TruncatedFile(
                    f"{path} has {size} bytes, {ref.name!r} lies at bytes "
                    f"{extent.offset}-{extent.offset + extent.size}"
                )
    return tuple(sizes.get(shard, 0) for shard in range(len(shards)))


def _shard_size(path: Path, name: str, index: Path) -> int:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise MissingShard(f"there is no {path}", cause=f"{index} places {name!r} in it") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile(f"{path} is not a regular file")
    return found.st_size


def _step(catalog: Catalog) -> int | None:
    """The global step: what the checkpoint says itself goes before what its name says."""
    ref = catalog.tensors.get(GLOBAL_STEP)
    if ref is not None and ref.shape == () and ref.dtype in (DType.INT32, DType.INT64) and ref.extent:
        step = int(read_array(catalog, ref))
        if step >= 0:
            return step
    return step_in_name(catalog.prefix.name)
