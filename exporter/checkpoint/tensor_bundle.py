"""Read TensorFlow's checkpoint format V2, the tensor bundle: `<prefix>.index` to a Catalog.

The index is a sorted string table: key "" holds a `BundleHeaderProto`, a tensor's name its
`BundleEntryProto`, a slice key the entry of one slice of a partitioned tensor. Values are stored in
`<prefix>.data-<shard>-of-<shards>`. Sources: tensorflow/core/util/tensor_bundle/tensor_bundle.{h,cc},
tensorflow/core/protobuf/tensor_bundle.proto.

`bundle_writer` writes bundles, `tensor_values` reads values; both are offered here too.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from google.protobuf.message import DecodeError
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Content, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.bundle_writer import (
    MAX_SHARDS,
    WHOLE,
    BundleWriter,
    encode_index,
    index_path,
    overlap,
    shard_path,
    slice_key,
)
from exporter.checkpoint.sstable import Entry, read_table
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsupportedFormat,
    os_error,
)
from exporter.late_names import late_names
from exporter.storage.files import FileIdentity, close_quietly, open_regular, read_regular
from exporter.terminal.progress import NoProgress, Progress
from exporter.wire import protos
from exporter.wire.dtypes import DType

if TYPE_CHECKING:
    from exporter.checkpoint.tensor_values import check_tensor as check_tensor
    from exporter.checkpoint.tensor_values import check_values as check_values
    from exporter.checkpoint.tensor_values import memory_map as memory_map
    from exporter.checkpoint.tensor_values import read_array as read_array

__all__ = [
    "MAX_SHARDS",
    "BundleWriter",
    "Index",
    "check_tensor",
    "check_values",
    "encode_index",
    "index_path",
    "memory_map",
    "parse_index",
    "read_array",
    "read_catalog",
    "shard_path",
    "step_in_name",
    "write_bundle",
]
_OF_VALUES = ("check_tensor", "check_values", "memory_map", "read_array")
__getattr__ = late_names(__name__, dict.fromkeys(_OF_VALUES, "exporter.checkpoint.tensor_values"))

GLOBAL_STEP = "global_step"
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

_VERSION = 1  # kTensorBundleVersion: what this reader understands
MAX_INDEX_BYTES = 1 << 30
_STEP_LIMIT = 1 << 63  # a training step is an int64
_MAX_RANK = 254  # TensorShape::MaxDimensions
_MAX_ELEMENTS = 1 << 63  # TensorFlow counts them in an int64
_MAX_BYTES = 1 << 63
_LEAST_STRING_BYTES = 4  # the checksum of the lengths; each length has a byte or more


def read_catalog(prefix: Path) -> Catalog:
    """Read the catalog of the bundle with the index `<prefix>.index`; a shard without tensors has size 0.

    Of values only the step is read: it is that of the tensor `global_step`, or else of the prefix's name.

    Raises:
        CheckpointNotFound: there is no such index.
        MissingShard: a shard that has tensors does not exist.
        TruncatedFile: the index or a shard is shorter than it should be.
        CorruptFile: the index is damaged, or a file is not a regular file.
        UnsupportedFormat: the bundle has a byte order, version, compression or type that is not read.
        CheckpointChanged: the index was replaced while it was read.
        CheckpointError: a file cannot be read, or is a pointer of Git LFS.
    """
    path = index_path(prefix)
    data, identity = _read_index_file(path)
    index = parse_index(data, path)
    shards = tuple(shard_path(prefix, shard, index.num_shards) for shard in range(index.num_shards))
    sizes = tuple(
        _shard_size(shard, index.reach[number], path) if number in index.reach else 0
        for number, shard in enumerate(shards)
    )
    # After the look at the shards: those of another checkpoint of this name may have come meanwhile.
    if _identity(path) != identity:
        raise CheckpointChanged(f"{path} was replaced while it was read")
    family = "TensorFlow V2, object-based" if OBJECT_GRAPH in index.tensors else "TensorFlow V2, name-based"
    digest = hashlib.sha256(data).hexdigest()
    catalog = Catalog(family, prefix, index.tensors, shards, sizes, index_digest=digest)
    step = None
    if GLOBAL_STEP in index.tensors:
        from exporter.checkpoint.tensor_values import read_step  # late: with numpy

        step = read_step(catalog, GLOBAL_STEP)
    return replace(catalog, step=step_in_name(prefix.name) if step is None else step)


class Index(Struct, frozen=True):
    """An index's contents: the number of shards, and the tensors by name.

    `reach` has, by the number of each shard that is used, the byte at which its last tensor ends, and that
    tensor's name.
    """

    num_shards: int
    tensors: dict[str, TensorRef]
    reach: dict[int, tuple[int, str]]


def parse_index(data: bytes, path: Path) -> Index:
    """Parse an index's bytes and check all that can be checked without the shards; errors name `path`.

    Raises:
        TruncatedFile: the index is cut short.
        CorruptFile: its structure or a checksum is wrong.
        UnsupportedFormat: the bundle has a byte order, version, compression or type that is not read.
    """
    table = read_table(data, path)
    parser = _Parser(path, _check_header(table, path))
    try:
        tensors = parser.tensors(table)
    except DecodeError as error:
        raise CorruptFile(
            f"{path} is damaged: an entry is not a BundleEntryProto", cause=str(error)
        ) from None
    return Index(parser.num_shards, tensors, parser.reach)


def step_in_name(name: str) -> int | None:
    """Return the step at the end of a checkpoint's name, 1200 for `model.ckpt-1200`.

    None if no hyphen and number are at the end, or the number does not fit in an int64.
    """
    found = re.search(r"-([0-9]+)$", name)
    return int(found[1]) if found and int(found[1]) < _STEP_LIMIT else None


def _read_index_file(path: Path) -> tuple[bytes, FileIdentity]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CorruptFile(f"{path} is not a regular file")
        identity = _identity(path)
        if identity.size > MAX_INDEX_BYTES:
            raise UnsupportedFormat(f"{path} has {identity.size} bytes; the largest index read is 1 GiB")
        return read_regular(path, MAX_INDEX_BYTES), identity
    except FileNotFoundError:
        raise CheckpointNotFound(f"there is no {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from error


def _identity(path: Path) -> FileIdentity:
    try:
        return FileIdentity.of(path.stat())
    except FileNotFoundError:
        raise CheckpointChanged(f"{path} vanished while it was read") from None


def _check_header(table: list[Entry], path: Path) -> int:
    """Return the number of shards that a table's header states; CorruptFile if it is missing or damaged.

    UnsupportedFormat if the bundle has a byte order or version that is not read.
    """
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
    if not 1 <= header.num_shards <= MAX_SHARDS:
        raise CorruptFile(f"{path} is damaged: its header lists {header.num_shards} shards")
    return int(header.num_shards)


class _Layout(Struct, frozen=True):
    """An entry's dtype and shape, and the least and most bytes that its values take."""

    dtype: DType
    shape: tuple[int, ...]
    least_bytes: int
    most_bytes: int


class _Parser:
    """Parses table entries as tensors, and checks all that can be checked without the shards."""

    def __init__(self, path: Path, num_shards: int) -> None:
        self._path = path
        self.num_shards = num_shards
        self.reach: dict[int, tuple[int, str]] = {}
        self._parse = protos.BundleEntryProto.FromString
        self._layouts: dict[tuple[int, bytes], _Layout] = {}  # a model has far fewer than tensors

    def tensors(self, table: list[Entry]) -> dict[str, TensorRef]:
        """Return the tensors by name in key order; also fills `reach`.

        Slice entries are found through the tensor that declares them. CorruptFile if an entry is impossible,
        UnsupportedFormat for a name or type that is not read, DecodeError if an entry cannot be decoded.
        """
        slices = {key: value for key, value in table[1:] if key[0] == 0}
        found = {}
        for key, value in table[1 + len(slices) :]:
            name = self._name(key)
            found[name] = self._tensor(name, key, value, slices)
        # A slice key that no tensor declares is a tensor name that begins with NUL. It may have slices as
        # well, whose keys are among these, before or after it.
        for key in sorted(slices, key=lambda key: not self._parse(slices[key]).slices):
            if key in slices:
                name = self._name(key)
                found[name] = self._tensor(name, key, slices.pop(key), slices)
        return found

    def _name(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise UnsupportedFormat(
                f"{self._path} holds a tensor whose name is not UTF-8: {key[:99]!r}"
            ) from None

    def _tensor(self, name: str, key: bytes, value: bytes, slices: dict[bytes, bytes]) -> TensorRef:
        entry = self._parse(value)
        layout = self._layout(name, entry)
        if not entry.slices:
            return TensorRef(name, layout.dtype, layout.shape, self._extent(name, layout, entry))
        parts = tuple(self._slice(name, key, layout, part, slices) for part in entry.slices)
        clash = overlap([part.spec for part in parts])
        if clash:
            self._corrupt(name, f"its slices overlap: {clash}")
        return TensorRef(name, layout.dtype, layout.shape, slices=parts)

    def _slice(
        self, name: str, key: bytes, whole: _Layout, part: protos.Proto, slices: dict[bytes, bytes]
    ) -> SliceRef:
        boxes = [(box.start, box.length) if box.HasField("length") else WHOLE for box in part.extent]
        if len(boxes) != len(whole.shape):
            self._corrupt(name, f"a slice of rank {len(boxes)} in a tensor of rank {len(whole.shape)}")
        dimensions = list(zip(boxes, whole.shape, strict=True))
        lengths = tuple(full if box == WHOLE else box[1] for box, full in dimensions)
        if any(box != WHOLE and not 0 <= box[0] <= box[0] + box[1] <= full for box, full in dimensions):
            self._corrupt(name, f"slice {boxes[:8]} lies outside of {_brief(whole.shape)}")
        spec = SliceSpec(whole.shape, tuple(start for start, _ in boxes), lengths)
        value = slices.pop(slice_key(key, boxes), None)
        if value is None:
            return SliceRef(spec, None)
        entry = self._parse(value)
        layout = self._layout(name, entry)
        if layout.dtype is not whole.dtype or layout.shape != lengths:
            self._corrupt(name, f"slice {boxes[:8]} holds {layout.dtype.label}{_brief(layout.shape)}")
        return SliceRef(spec, self._extent(name, layout, entry))

    def _layout(self, name: str, entry: protos.Proto) -> _Layout:
        key = (entry.dtype, entry.shape.SerializeToString())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._new_layout(name, entry)
        return layout

    def _new_layout(self, name: str, entry: protos.Proto) -> _Layout:
        try:
            dtype = DType(entry.dtype)
        except ValueError:
            dtype = None
        if dtype is None or dtype != entry.dtype:  # reference types are never stored
            raise UnsupportedFormat(f"{self._path}: {name[:99]!r} has the unknown data type {entry.dtype}")
        shape = tuple(dim.size for dim in entry.shape.dim)
        if len(shape) > _MAX_RANK or entry.shape.unknown_rank or min(shape, default=0) < 0:
            self._corrupt(name, f"{_brief(shape)} is not a shape")
        elements = math.prod(shape)
        if elements >= _MAX_ELEMENTS:
            self._corrupt(name, f"its shape {_brief(shape)} has 2^63 elements or more")
        if dtype is DType.STRING:
            return _Layout(dtype, shape, elements + _LEAST_STRING_BYTES, _MAX_BYTES)
        try:
            itemsize = dtype.itemsize
        except TypeError as error:
            raise UnsupportedFormat(
                f"{self._path}: {name[:99]!r} has the data type {dtype.label}",
                cause=str(error),
                hint="python3 -m pip install 'ml-dtypes>=0.5', which TensorFlow 2.18 and newer allow",
            ) from None
        if itemsize is None:
            return _Layout(dtype, shape, 0, _MAX_BYTES)
        return _Layout(dtype, shape, elements * itemsize, elements * itemsize)

    def _extent(self, name: str, layout: _Layout, entry: protos.Proto) -> Extent:
        shard, offset, size = entry.shard_id, entry.offset, entry.size
        if not 0 <= shard < self.num_shards:
            self._corrupt(name, f"it lies in shard {shard} of {self.num_shards}")
        if offset < 0 or not layout.least_bytes <= size <= layout.most_bytes:
            what = f"{layout.dtype.label}{_brief(layout.shape)} has {layout.least_bytes}"
            self._corrupt(name, f"it has {size} bytes from byte {offset}, {what}")
        if offset + size > self.reach.get(shard, (-1,))[0]:
            self.reach[shard] = (offset + size, name)
        return Extent(shard, offset, size, entry.crc32c)

    def _corrupt(self, name: str, what: str) -> NoReturn:
        raise CorruptFile(f"{self._path} is damaged at {name[:99]!r}: {what}")


def _brief(shape: tuple[int, ...]) -> str:
    sizes = ", ".join(map(str, shape[:8]))
    return f"[{sizes}]" if len(shape) <= 8 else f"[{sizes}, ... ({len(shape)} dimensions)]"


def _shard_size(path: Path, reach: tuple[int, str], index: Path) -> int:
    end, name = reach
    try:
        found = path.stat()
    except FileNotFoundError:
        raise MissingShard(f"there is no {path}", cause=f"{index} places {name[:99]!r} in it") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile(f"{path} is not a regular file")
    if found.st_size < end:
        close_quietly(open_regular(path, ranges=()))  # a pointer of Git LFS is said by name
        raise TruncatedFile(f"{path} has {found.st_size} bytes, {name[:99]!r} ends at byte {end}")
    return found.st_size


def write_bundle(
    catalog: Catalog, tensors: Iterable[TensorRef], prefix: Path, progress: Progress | None = None
) -> Catalog:
    """Write tensors of `catalog` into a new bundle at `prefix`, in blocks, and return its catalog.

    Missing directories are made; `progress` advances by each tensor's bytes. Family, step, naming and the
    tensors' owners are those of `catalog`, so that tensors are mapped as before.

    Raises:
        CheckpointError: a source is damaged, or changed since the catalog was read.
        PublishError: the target cannot be written: TargetNotWritable, DiskFull.
        ValueError: a tensor is stored in a bundle already, or is given twice.
    """
    progress, owners = progress or NoProgress(), dict[str, str]()
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with BundleWriter(prefix) as writer:
            for ref in tensors:
                if ref.content is None:
                    raise ValueError(f"{ref.name!r} is in a bundle already")
                owners[ref.name] = ref.owner
                if not ref.slices:
                    _add(writer, ref, ref.content, ref.shape)
                for part in ref.slices:
                    assert part.content is not None
                    _add(writer, ref, part.content, part.spec.lengths, part.spec)
                progress.advance(ref.bytes_)
    except OSError as error:
        raise os_error(error, prefix) from error
    written = read_catalog(prefix)
    owned = {name: replace(ref, owner=owners[name]) for name, ref in written.tensors.items()}
    return replace(written, family=catalog.family, tensors=owned, step=catalog.step, naming=catalog.naming)


def _add(
    writer: BundleWriter,
    ref: TensorRef,
    content: Content,
    shape: tuple[int, ...],
    part: SliceSpec | None = None,
) -> None:
    if ref.dtype is DType.STRING:
        import numpy as np

        texts = [text for block in content.blocks() for text in block.tolist()]
        writer.add(ref.name, np.array(texts, object).reshape(shape), part)
        return
    writer.add_chunks(ref.name, ref.dtype, shape, content.blocks(), part)
