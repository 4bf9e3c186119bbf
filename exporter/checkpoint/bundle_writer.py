"""Write tensor bundles: an index over shards that exist already, or a new shard with its index.

TensorFlow reads these files, and an index has exactly the bytes that TensorFlow would write. The key of a
slice of a partitioned tensor is TensorFlow's ordered code of its name and box:

    key = number(0) string(name) number(rank) (signed(start) signed(length))*

A dimension taken whole may be start 0, length -1 there. Sources:
tensorflow/core/util/saved_tensor_slice_util.cc, tensorflow/core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from exporter.catalog import Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.sstable import write_table
from exporter.wire import protos
from exporter.wire.crc32c import CHUNK, extend, mask
from exporter.wire.dtypes import DType

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

Array: TypeAlias = "np.ndarray[Any, Any]"
Buffer: TypeAlias = "bytes | bytearray | memoryview | Array"

_VERSION = 1  # kTensorBundleVersion, the producer that TensorFlow writes
MAX_SHARDS = 100_000  # of a bundle: their names have five digits
WHOLE = (0, -1)  # start and length of a dimension that the writer left open (`-` in a slice spec)


def index_path(prefix: Path) -> Path:
    """Return the path of a bundle's index: `<prefix>.index`."""
    return prefix.parent / f"{prefix.name}.index"


def shard_path(prefix: Path, shard: int, num_shards: int) -> Path:
    """Return the path of shard number `shard`, counted from 0: `<prefix>.data-00003-of-00016`."""
    return prefix.parent / f"{prefix.name}.data-{shard:05d}-of-{num_shards:05d}"


def encode_index(tensors: Iterable[TensorRef], num_shards: int) -> bytes:
    """Return the bytes of an index over `num_shards` shards; `tensors` may be in any order.

    Only name, dtype, shape and extents of a tensor matter. ValueError if two tensors have one name.
    """
    header = protos.BundleHeaderProto(num_shards=num_shards)
    header.version.producer = _VERSION
    encoder = _EntryEncoder()
    entries = [(b"", header.SerializeToString())]
    for ref in tensors:
        entries += encoder.entries(ref)
    # By bytes, as TensorFlow's reader searches: slices' keys, which begin with 0, come before all names.
    entries.sort(key=itemgetter(0))
    return write_table(entries)


class _EntryEncoder:
    """Encodes tensors as table entries."""

    def __init__(self) -> None:
        # filled again for each tensor: a model has far fewer kinds
        self._messages: dict[tuple[DType, tuple[int, ...]], protos.Proto] = {}

    def entries(self, ref: TensorRef) -> Iterator[tuple[bytes, bytes]]:
        key = ref.name.encode()
        if ref.extent is not None:
            yield key, self._stored(ref.dtype, ref.shape, ref.extent)
            return
        whole = _message(ref.dtype, ref.shape)
        for part in ref.slices:
            boxes = list(zip(part.spec.starts, part.spec.lengths, strict=True))
            declared = whole.slices.add()
            for start, length in boxes:
                declared.extent.add(start=start, length=length)
            if part.extent is not None:
                yield slice_key(key, boxes), self._stored(ref.dtype, part.spec.lengths, part.extent)
        yield key, whole.SerializeToString()

    def _stored(self, dtype: DType, shape: tuple[int, ...], extent: Extent) -> bytes:
        message = self._messages.get((dtype, shape))
        if message is None:
            message = self._messages[dtype, shape] = _message(dtype, shape)
        message.shard_id, message.offset = extent.shard, extent.offset
        message.size, message.crc32c = extent.size, extent.crc32c
        return bytes(message.SerializeToString())


def _message(dtype: DType, shape: tuple[int, ...]) -> protos.Proto:
    message = protos.BundleEntryProto(dtype=int(dtype))
    message.shape.SetInParent()  # a scalar's is present and empty
    for size in shape:
        message.shape.dim.add(size=size)
    return message


class BundleWriter:
    """Writes a bundle of one shard while tensors are added; its files get their names when it is finished.

    As a context manager it finishes at the end of the block, and removes its files if the block raises.
    Nothing is synced: `files` names the files to sync. Memory is bounded by a chunk, or a string tensor.
    OSError if the shard's temporary file, beside its final name, cannot be made.

        with BundleWriter(Path("variables/variables")) as writer:
            writer.add("dense/bias", np.zeros(4, np.float32))
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._shard = shard_path(prefix, 0, 1)
        self._temporary = self._shard.with_name(f".{self._shard.name}.{os.getpid()}.tmp")
        self._file = self._temporary.open("wb")  # over what a killed run may have left
        self._offset = 0
        self._tensors: dict[str, TensorRef] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """The final paths of shard and index, in this order; they exist once the bundle is finished."""
        return (self._shard, index_path(self._prefix))

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that were added, in the order of their first addition."""
        return tuple(self._tensors.values())

    def add(self, name: str, array: Array, part: SliceSpec | None = None) -> Extent:
        """Append an array, or slice `part` of a tensor, to the shard and return its extent.

        Strings are `str` or `bytes` objects. ValueError if the tensor was added before (a slice may follow
        other slices), the shape is not that of `part`, or an object is not a string; KeyError for a numpy
        type that TensorFlow lacks; OSError if the shard cannot be written.
        """
        import numpy as np  # late, as below: an index is read and written without it

        from exporter.checkpoint.tensor_values import encode_strings

        array = np.asarray(array)
        if array.dtype.kind not in "OSU":
            dtype = DType.of(array.dtype.name)
            return self.add_chunks(name, dtype, array.shape, _blocks(array, dtype), part)
        ref = self._announce(name, DType.STRING, array.shape, part)
        data, crc = encode_strings(map(_as_bytes, array.ravel().tolist()))
        extent, _ = self._write([data])
        return self._record(ref, replace(extent, crc32c=crc), part)

    def add_chunks(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: Iterable[Buffer],
        part: SliceSpec | None = None,
    ) -> Extent:
        """Append a numeric tensor, or slice `part` of one, from chunks of its bytes, and return its extent.

        `shape` is the shape of the values written. ValueError if the dtype has no fixed size, the tensor was
        added before, `shape` is not that of `part`, or the chunks have another size than the shape; in the
        last case their bytes stay in the shard without a name. OSError if the shard cannot be written; errors
        of `chunks` pass.
        """
        if dtype.itemsize is None:
            raise ValueError(f"{name!r}: {dtype.label} tensors cannot be added as bytes")
        ref = self._announce(name, dtype, shape, part)
        extent, crc = self._write(chunks)
        if extent.size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r}: {extent.size} bytes for {dtype.label}{list(shape)}")
        return self._record(ref, replace(extent, crc32c=mask(crc)), part)

    def finish(self) -> tuple[TensorRef, ...]:
        """Write the index, rename shard and index to their final names and return the bundle's tensors.

        The tensors are in the order of their first addition. Nothing is synced. OSError if the disk is full,
        or refuses a file or a name.
        """
        index = self._temporary.with_name(f"{self._temporary.name}.index")
        index.write_bytes(encode_index(self.tensors, 1))
        self._file.close()
        self._temporary.rename(self._shard)
        # Last: to readers an index means that the checkpoint is complete.
        index.rename(index_path(self._prefix))
        return self.tensors

    def abandon(self) -> None:
        """Close and remove the temporary files, if they exist; the files of a finished bundle stay."""
        with suppress(OSError):  # a full disk fails once more as the buffer is flushed
            self._file.close()
        for path in (self._temporary, self._temporary.with_name(f"{self._temporary.name}.index")):
            with suppress(FileNotFoundError):
                path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._file.closed:
                self.finish()
        finally:
            self.abandon()

    def _announce(self, name: str, dtype: DType, shape: tuple[int, ...], part: SliceSpec | None) -> TensorRef:
        """Return the tensor `name` with the slices that were added, or a new tensor without values.

        ValueError if the tensor was added as a whole, or with another dtype or shape, or `shape` is not the
        shape of `part`.
        """
        if part is not None and shape != part.lengths:
            raise ValueError(f"{name!r}: shape {shape} for a slice of {part.lengths}")
        known = self._tensors.get(name)
        if known is None:
            return TensorRef(name, dtype, shape if part is None else part.full_shape)
        if part is None or not known.slices or known.dtype is not dtype or known.shape != part.full_shape:
            raise ValueError(f"{name!r} was added before")
        return known

    def _record(self, ref: TensorRef, extent: Extent, part: SliceSpec | None) -> Extent:
        if part is None or part.is_full:
            self._tensors[ref.name] = replace(ref, extent=extent)
        else:
            self._tensors[ref.name] = replace(ref, slices=(*ref.slices, SliceRef(part, extent)))
        return extent

    def _write(self, chunks: Iterable[Buffer]) -> tuple[Extent, int]:
        """Append bytes to the shard; return their extent, whose checksum is 0, and their plain crc32c.

        OSError if the disk refuses; errors of `chunks` pass.
        """
        start, crc = self._offset, 0
        for chunk in chunks:
            flat = _flat_bytes(chunk)
            for at in range(0, flat.size, CHUNK):
                piece = flat[at : at + CHUNK].tobytes()
                crc = extend(crc, piece)
                self._file.write(piece)
                self._offset += len(piece)
        return Extent(0, start, self._offset - start, 0), crc


def _as_bytes(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes):  # bytes(3) would be three zeros
        raise ValueError(f"{value!r:.99} is not a string")
    return value


def _flat_bytes(chunk: Buffer) -> Array:
    import numpy as np

    if isinstance(chunk, np.ndarray):  # by a view: bfloat16 and its like offer no buffer
        return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    return np.frombuffer(chunk, np.uint8)


def _blocks(array: Array, dtype: DType) -> Iterator[Array]:
    """Yield the array's bytes in C order and little endian as flat uint8 arrays.

    An array that is stored so already is yielded as one view; any other is copied in blocks of about `CHUNK`
    bytes, at least one row each.
    """
    import numpy as np

    if array.flags.c_contiguous and array.dtype == dtype.numpy:
        yield array.reshape(-1).view(np.uint8)
        return
    # by blocks: a copy of the whole could double what a table takes
    rows = max(1, CHUNK * len(array) // max(1, array.nbytes)) if array.ndim else 1
    for start in range(0, len(array) if array.ndim else 1, rows):
        block = array[start : start + rows] if array.ndim else array
        yield np.ascontiguousarray(block, dtype.numpy).reshape(-1).view(np.uint8)


def slice_key(name: bytes, boxes: Iterable[tuple[int, int]]) -> bytes:
    """Return the table key of a slice of tensor `name` (UTF-8), given its (start, length) in each dimension.

    A dimension that the writer left open is `WHOLE`.
    """
    boxes = tuple(boxes)
    numbers = (_signed(number) for box in boxes for number in box)
    return b"".join([_number(0), _string(name), _number(len(boxes)), *numbers])


def _number(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _string(value: bytes) -> bytes:
    """Return the ordered code of a text: 0x00 and 0xff are escaped, so that 0x00 0x01 can only be the end."""
    return re.sub(b"[\x00\xff]", lambda byte: byte[0] + bytes([byte[0][0] ^ 0xFF]), value) + b"\x00\x01"


def _signed(value: int) -> bytes:
    """Return the ordered code of a signed number: its leading ones or zeros encode its number of bytes."""
    length = (value if value >= 0 else ~value).bit_length() // 7 + 1
    header = ((1 << length) - 1) << 7 * length
    return ((value & (1 << 8 * length) - 1) ^ header).to_bytes(length, "big")


def overlap(specs: Sequence[SliceSpec], cuts: int = 8) -> str:
    """Return the specs of two boxes, for an error's message, if any boxes of a tensor overlap; "" if none do.

    The two named are the first of a group that no cut along a dimension separates; the boxes that overlap may
    be others of this group. Grids that need more than `cuts` successive cuts count as overlapping.
    """
    # Every partitioner makes grids of grids, which successive cuts along the dimensions separate. The small
    # number of cuts keeps a hostile index from making this slow.
    if len(specs) < 2:
        return ""
    for axis in range(len(specs[0].full_shape)):
        groups = _separate(specs, axis)
        if len(groups) > 1 and cuts:
            return next(filter(None, (overlap(group, cuts - 1) for group in groups)), "")
    return f"{specs[0].restore_spec} and {specs[1].restore_spec}"


def _separate(specs: Sequence[SliceSpec], axis: int) -> list[list[SliceSpec]]:
    """Return boxes in groups, ordered along `axis`; boxes of different groups do not overlap along `axis`."""
    groups: list[list[SliceSpec]] = []
    end = -1
    for spec in sorted(specs, key=lambda spec: (spec.starts[axis], spec.lengths[axis])):
        if not groups or spec.starts[axis] >= end:
            groups.append([])
        groups[-1].append(spec)
        end = max(end, spec.starts[axis] + spec.lengths[axis])
    return groups
