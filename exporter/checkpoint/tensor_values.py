"""Read values of a tensor bundle: memory maps, small arrays, checksums.

A numeric tensor is its elements in C order, little endian, at least one byte each (int4 and int2 are not
packed). A string tensor is the strings' lengths (varint64 each), a masked crc32c of the lengths, the bytes:

    that crc covers each length as 4 bytes little endian (8 if it needs them), not the varints on disk;
    the entry's crc covers these, the checksum of the lengths, and the bytes.

A variant tensor is, for each element, length (varint64), bytes, and a masked crc32c of all before; its crc
covers lengths as 8 bytes. Source: WriteStringTensor, ReadStringTensor and WriteVariantTensor in
tensorflow/core/util/tensor_bundle/tensor_bundle.cc.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exporter.catalog import Catalog, Extent, SliceRef, TensorRef
from exporter.checkpoint.source_shard import open_shard, reading, written_to
from exporter.errors import CorruptFile, MappingError, NotFinite, UnsupportedFormat
from exporter.storage import mirror
from exporter.storage.files import FileIdentity
from exporter.wire.crc32c import CHUNK, crc_of, extend, mask, read_into
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import beside_codes, to_codes
from exporter.wire.protos import varint

Array = np.ndarray[Any, Any]

_CHECKSUM_BYTES = 4
_LONGEST_VARINT = 10  # of 64 bits, 7 in each byte


def memory_map(catalog: Catalog, ref: TensorRef, part: SliceRef | None = None) -> Array:
    """Map a numeric tensor, or a stored slice of it, read-only; its checksum is not verified.

    The array keeps the shard's data alive, also after the file is removed.

    Raises:
        ValueError: the tensor is partitioned and no `part` was given, or the part is not stored.
        UnsupportedFormat: strings and variants have no array on disk.
        CheckpointChanged: the shard vanished or shrank since the catalog was read.
        CheckpointError: the shard cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be written.
    """
    extent, shape = _mappable_extent(ref, part)
    with _open_extent(catalog, extent) as fd:
        raw = map_bytes(fd, extent)
    # perhaps unaligned, with which numpy copes; it keeps the shard's data alive after an unlink
    return raw.view(ref.dtype.numpy).reshape(shape)


def checked_map(catalog: Catalog, ref: TensorRef, part: SliceRef | None = None) -> Array:
    """Map a numeric tensor, or a stored slice of it, read-only after verifying its checksum.

    From a store, a private copy is mapped.

    Raises:
        CorruptFile: the checksum is wrong.
        ValueError: the tensor is partitioned and no `part` was given, or it is not in a bundle.
        UnsupportedFormat: strings and variants have no array on disk.
        CheckpointChanged: the shard vanished or shrank since the catalog was read, or was written to
            meanwhile.
        CheckpointError: the shard cannot be read, or fetched from a store.
        DiskFull, PublishError: bytes fetched from a store cannot be written.
    """
    extent, shape = _mappable_extent(ref, part)
    path = catalog.path_of(extent)
    copy = mirror.copy(path, extent.offset, extent.offset + extent.size)
    if copy is None:
        with _open_extent(catalog, extent) as fd:
            compare_checksum(path, ref.name, extent, mask(crc_of(fd, extent.offset, extent.size)))
            return map_bytes(fd, extent).view(ref.dtype.numpy).reshape(shape)
    with copy, reading(path):
        compare_checksum(path, ref.name, extent, mask(crc_of(copy.fileno(), 0, extent.size)))
        return map_range(copy.fileno(), 0, extent.size).view(ref.dtype.numpy).reshape(shape)


def read_array(catalog: Catalog, ref: TensorRef) -> Array:
    """Read a small tensor into memory, with verified checksums, joined slices, and strings as `bytes`.

    Strings are in an object array.

    Raises:
        CorruptFile: a checksum is wrong, or slices of the tensor are missing.
        UnsupportedFormat: variants are not decoded.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
        CheckpointError: a file cannot be read; for a tensor outside a bundle also the subclasses of its
            reader.
        DiskFull, PublishError: bytes fetched from a store cannot be written.
    """
    if ref.extent is not None:
        return _read_extent(catalog, ref, ref.extent, ref.shape)
    if ref.content is not None:  # of another kind of file, without a checksum
        return np.concatenate([np.empty(0, _dtype(ref)), *ref.content.blocks()]).reshape(ref.shape)
    if not ref.is_complete:
        raise CorruptFile(f"{catalog.prefix}: {ref.name!r} is partitioned and parts of it are not stored")
    whole = np.empty(ref.shape, _dtype(ref))
    for part in ref.slices:
        if part.extent is not None:
            box = tuple(
                slice(start, start + length)
                for start, length in zip(part.spec.starts, part.spec.lengths, strict=True)
            )
            whole[box] = _read_extent(catalog, ref, part.extent, part.spec.lengths)
    return whole


def _dtype(ref: TensorRef) -> Any:
    return object if ref.dtype is DType.STRING else ref.dtype.numpy


def read_blocks(catalog: Catalog, ref: TensorRef, count: int) -> Iterator[Array]:
    """Yield the values of a numeric tensor stored as a whole, flat, `count` elements at a time.

    Blocks of a tensor outside a bundle have other sizes. Raised during the iteration, before the first block:
    CorruptFile if the checksum is wrong, CheckpointChanged if the shard vanished or shrank, CheckpointError
    if it cannot be read, DiskFull or PublishError if bytes fetched from a store cannot be written, ValueError
    if the tensor is stored in slices. Before the last block at the latest: CheckpointChanged if the shard was
    cut or written to after it was verified. For a tensor outside a bundle the CheckpointErrors are its
    reader's, and may come after any block.
    """
    if ref.content is not None:
        yield from ref.content.blocks()
        return
    extent, shape = stored_extent(ref, None)
    check_values(catalog, ref)
    with _open_extent(catalog, extent) as fd:
        elements, itemsize, crc = math.prod(shape), ref.dtype.numpy.itemsize, 0
        for start in range(0, elements, count):
            block = np.empty(min(count, elements - start), ref.dtype.numpy)
            crc = read_into(fd, extent.offset + start * itemsize, block.view(np.uint8), crc)
            # before the last block: a caller may stop after it. The bytes were right when they were verified
            if start + count >= elements and mask(crc) != extent.crc32c:
                raise written_to(catalog.path_of(extent))
            yield block


def read_step(catalog: Catalog, *names: str) -> int | None:
    """Return the training step from the first of the tensors `names` that is one integer, stored as a whole.

    None if there is none, or it is negative. CheckpointError and subclasses if the tensor is damaged or
    cannot be read, DiskFull or PublishError if its bytes cannot be fetched from a store: see `read_array`.
    """
    for name in names:
        ref = catalog.tensors.get(name)
        if ref is not None and ref.shape == () and ref.dtype in (DType.INT32, DType.INT64) and not ref.slices:
            step = int(read_array(catalog, ref))
            return step if step >= 0 else None
    return None


def check_values(
    catalog: Catalog, ref: TensorRef, part: SliceRef | None = None, *, keep: bool = True
) -> None:
    """Read one extent, of a tensor or of its slice `part`, and compare its checksum with the index.

    With `keep`, bytes fetched from a store are kept for later readers; without, numbers are not kept.

    Raises:
        CorruptFile: the checksums differ, or the bytes are not the strings that the index declares.
        CheckpointChanged: the shard vanished or shrank since the catalog was read.
        CheckpointError: the shard cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be written.
        ValueError: the tensor, or the slice, is not stored in one piece.
    """
    extent, shape = stored_extent(ref, part)
    path, where = catalog.path_of(extent), _damaged(catalog, ref, extent)
    if not keep and ref.dtype.itemsize is not None:
        crc = mirror.checksum(path, extent.offset, extent.offset + extent.size)
        if crc is not None:
            compare_checksum(path, ref.name, extent, mask(crc))
            return
    with _open_extent(catalog, extent) as fd:
        if ref.dtype is DType.STRING:
            found = _string_crc(map_bytes(fd, extent), math.prod(shape), where)
        elif ref.dtype is DType.VARIANT:
            found = _variant_crc(map_bytes(fd, extent), math.prod(shape), where)
        else:
            found = mask(crc_of(fd, extent.offset, extent.size))
        compare_checksum(path, ref.name, extent, found)


def compare_checksum(path: Path, name: str, extent: Extent, found: int, *, hint: str = "") -> None:
    """Require that `found`, the masked crc32c of the stored bytes of a tensor, is the index's.

    `path`, `name` and `hint` are for the error.

    Raises:
        CorruptFile: they differ.
    """
    if found != extent.crc32c:
        raise CorruptFile(
            f"{path} is damaged at {name!r}: its checksum is {found:08x}, expected {extent.crc32c:08x}",
            hint=hint,
        )


def check_tensor(catalog: Catalog, ref: TensorRef) -> None:
    """Read each stored slice of a tensor of a bundle and compare its checksum with the index.

    Slices that are not stored are skipped. CorruptFile if a checksum differs, CheckpointChanged if a shard
    vanished or shrank, CheckpointError if it cannot be read; DiskFull or PublishError if bytes fetched from a
    store cannot be written.
    """
    for part in ref.slices or (None,):
        if part is None or part.extent is not None:
            check_values(catalog, ref, part)


def encode_strings(strings: Iterable[bytes]) -> tuple[bytes, int]:
    """Return a string tensor's bytes as a bundle stores them, and the masked crc32c for its index entry."""
    strings = list(strings)
    lengths = list(map(len, strings))
    crc = extend(0, _crc_form(np.array(lengths, np.uint64)))
    checksum = mask(crc).to_bytes(_CHECKSUM_BYTES, "little")
    data = b"".join(strings)
    return b"".join([*map(varint, lengths), checksum, data]), mask(extend(extend(crc, checksum), data))


@contextmanager
def _open_extent(catalog: Catalog, extent: Extent) -> Iterator[int]:
    """Open the shard of an extent and yield its descriptor; OSErrors of the block become named errors, too.

    Raises:
        CheckpointChanged: the shard vanished, is too short for the extent, or was written to meanwhile; then
            also in place of a CorruptFile of the block.
        CheckpointError: it cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be written.
    """
    path = catalog.path_of(extent)
    with open_shard(path, extent) as fd, reading(path):
        before = os.fstat(fd)
        if before.st_size < extent.offset + extent.size:
            raise EOFError
        try:
            yield fd
        except CorruptFile as error:
            if _is_changed(path, fd, before):
                raise written_to(path) from error
            raise
        if _is_changed(path, fd, before):
            raise written_to(path)


def _is_changed(path: Path, fd: int, before: os.stat_result) -> bool:
    """True if a shard was written to since it had the status `before`; False in a mirror, which fills it."""
    return not mirror.is_remote(path) and FileIdentity.of(os.fstat(fd)) != FileIdentity.of(before)


def stored_extent(ref: TensorRef, part: SliceRef | None) -> tuple[Extent, tuple[int, ...]]:
    """Return the extent and the shape of a tensor, or of its slice `part`.

    Raises:
        ValueError: it is not stored in one piece, or is not in a bundle.
    """
    extent, shape = (ref.extent, ref.shape) if part is None else (part.extent, part.spec.lengths)
    if extent is None:
        raise ValueError(f"{ref.name!r} is stored in slices: name one of those that are there")
    return extent, shape


def _mappable_extent(ref: TensorRef, part: SliceRef | None) -> tuple[Extent, tuple[int, ...]]:
    """Return what `stored_extent` does; UnsupportedFormat for strings and variants."""
    if ref.dtype.itemsize is None:
        raise UnsupportedFormat(f"{ref.name!r} is a {ref.dtype.label} tensor: it cannot be mapped")
    return stored_extent(ref, part)


def map_bytes(fd: int, extent: Extent) -> Array:
    """Map an extent of an open shard read-only, as uint8.

    EOFError if the shard is too short, OSError if the system cannot map it.
    """
    return map_range(fd, extent.offset, extent.size)


def _read_extent(catalog: Catalog, ref: TensorRef, extent: Extent, shape: tuple[int, ...]) -> Array:
    path = catalog.path_of(extent)
    with _open_extent(catalog, extent) as fd:
        if ref.dtype is DType.STRING:
            raw, where = map_bytes(fd, extent), _damaged(catalog, ref, extent)
            compare_checksum(path, ref.name, extent, _string_crc(raw, math.prod(shape), where))
            return _read_strings(raw, shape, where)
        if ref.dtype.itemsize is None:
            raise UnsupportedFormat(f"{path}: {ref.name!r} is a {ref.dtype.label} tensor: it cannot be read")
        data = np.empty(extent.size, np.uint8)
        compare_checksum(path, ref.name, extent, mask(read_into(fd, extent.offset, data)))
    return data.view(ref.dtype.numpy).reshape(shape)


def _damaged(catalog: Catalog, ref: TensorRef, extent: Extent) -> str:
    """Return the beginning of an error's message about a damaged tensor: the shard and the tensor's name."""
    return f"{catalog.path_of(extent)} is damaged at {ref.name!r}"


def _read_strings(raw: Array, shape: tuple[int, ...], where: str) -> Array:
    count = math.prod(shape)
    lengths, position = _decode_lengths(raw, count, where)
    data = raw[position + _CHECKSUM_BYTES :].tobytes()
    ends = np.cumsum(lengths).tolist()
    strings = np.empty(count, object)
    strings[:] = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return strings.reshape(shape)


def _string_crc(raw: Array, count: int, where: str) -> int:
    """Return the masked crc32c of the bytes of a tensor of `count` strings.

    CorruptFile if they are not strings; `where` begins the error's message.
    """
    lengths, position = _decode_lengths(raw, count, where)
    crc = extend(0, _crc_form(lengths))
    checksum = raw[position : position + _CHECKSUM_BYTES].tobytes()
    if int.from_bytes(checksum, "little") != mask(crc):
        raise CorruptFile(f"{where}: the checksum of its strings' lengths is wrong")
    position += _CHECKSUM_BYTES
    total = sum(lengths.tolist())  # of Python numbers: uint64 would wrap around
    if position + total != raw.size:
        raise CorruptFile(f"{where}: its strings have {total} bytes, {raw.size - position} are there")
    crc = extend(crc, checksum)
    for start in range(position, raw.size, CHUNK):
        crc = extend(crc, raw[start : start + CHUNK].tobytes())
    return mask(crc)


def _variant_crc(raw: Array, count: int, where: str) -> int:
    """Return the masked crc32c of the bytes of a tensor of `count` variants.

    CorruptFile if they are not variants; `where` begins the error's message.
    """
    crc = position = 0
    for _ in range(count):
        lengths, start = _decode_lengths(raw[position:], 1, where)
        start += position
        position = start + int(lengths[0]) + _CHECKSUM_BYTES
        if position > raw.size:
            raise CorruptFile(f"{where}: a variant is longer than the tensor")
        crc = extend(crc, lengths.astype("<u8").tobytes())
        crc = extend(crc, raw[start : position - _CHECKSUM_BYTES].tobytes())
        crc = extend(crc, raw[position - _CHECKSUM_BYTES : position].tobytes())
    if position != raw.size:
        raise CorruptFile(f"{where}: its variants have {position} bytes, {raw.size} are there")
    return mask(crc)


def _decode_lengths(raw: Array, count: int, where: str) -> tuple[Array, int]:
    """Return the first `count` varints of `raw`, as uint64, and the position behind them.

    CorruptFile, whose message `where` begins, if one does not end.
    """
    batches, position = [np.empty(0, np.uint64)], 0
    while count:
        chunk = raw[position : position + CHUNK]
        ends = np.flatnonzero(chunk < 0x80)[:count] + 1
        starts = np.concatenate([[0], ends[:-1]])
        if not ends.size or (ends - starts).max() > _LONGEST_VARINT:
            raise CorruptFile(f"{where}: the lengths of its strings do not end")
        septets = (chunk[: ends[-1]] & 0x7F).astype(np.uint64)
        shifts = 7 * (np.arange(septets.size) - np.repeat(starts, ends - starts))
        batches.append(np.bitwise_or.reduceat(septets << shifts.astype(np.uint64), starts))
        position += int(ends[-1])
        count -= ends.size
    return np.concatenate(batches), position


def _crc_form(lengths: Array) -> bytes:
    """Encode lengths as a crc covers them: 4 bytes each, 8 if a length needs them."""
    if not lengths.size or lengths.max() < 1 << 32:
        return lengths.astype("<u4").tobytes()
    return b"".join(length.to_bytes(4 if length < 1 << 32 else 8, "little") for length in lengths.tolist())


_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED


def map_range(fd: int, offset: int, size: int) -> Array:
    """Map a range of an open file's bytes read-only, as uint8.

    The map exists as long as an array refers to it. EOFError if the range ends behind the file, OSError if
    the system cannot map it.
    """
    if size == 0:  # nothing to map, and the system refuses
        return np.empty(0, np.uint8)
    if offset + size > os.fstat(fd).st_size:
        raise EOFError("the range ends behind the file")
    start = offset - offset % mmap.ALLOCATIONGRANULARITY  # a map begins where a page begins
    pages = _Pages(fd, start, offset + size - start)
    return np.asarray(pages)[offset - start :]


class _Pages:
    """Mapped pages, which numpy keeps as long as it has a view of them."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._unmap, self._address, self._size = _libc().munmap, address, size
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),  # read-only
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):  # not if `mmap` has failed
            self._unmap(self._address, self._size)


@cache
def _libc() -> ctypes.CDLL:
    # not Python's mmap: each of its maps keeps a descriptor open, of which a process may have 1,024, and a
    # checkpoint has more tensors
    library = ctypes.CDLL(None, use_errno=True)
    pages, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [pages, size, number, number, number, ctypes.c_int64]
    library.mmap.restype = pages
    library.munmap.argtypes = [pages, size]
    return library


def not_in_8_bits(name: str, row: Array) -> NotFinite:
    """Return the error for the table `name` with this row, which cannot be stored in 8 bits."""
    worst = row[np.abs(row.astype(np.float64)).argmax()]
    return NotFinite(
        f"table {name!r} cannot be stored in 8 bits: it holds {worst:g}",
        cause="a row has one scale for all its values; NaN, infinity and values above 1.68e38 have no code",
        hint="leave that table out of --cast, or train it without such values",
    )


def cast_values(values: Array, dtype: DType, name: str) -> Array:
    """Return the values of variable `name` cast to `dtype`; the same array if no cast is needed.

    Strings are never cast. With int8 the result is rows [n, dim + 4] of `exporter.wire.int8_codes`: codes and
    a scale.

    Raises:
        MappingError: a finite value is too large for `dtype`.
        NotFinite: rows in int8 hold NaN or infinity, or are too large for a scale.
    """
    if dtype is DType.STRING or values.dtype == dtype.numpy:
        return values
    if dtype is DType.INT8:
        codes, scales, fits = to_codes(values)
        if not fits.all():
            raise not_in_8_bits(name, values[~fits][0])
        return np.asarray(beside_codes(codes, scales))
    with np.errstate(over="ignore"):  # found below, and reported with the variable's name
        converted = values.astype(dtype.numpy)
    if np.isfinite(converted).all():
        return converted
    lost = np.isfinite(values) & ~np.isfinite(converted)
    if lost.any():
        raise MappingError(
            f"variable {name!r} holds {values[lost][0]:g}, which is too large for {dtype.label}",
            hint="cast it to bfloat16, or leave that variable out of --cast; a model that takes deltas then "
            "begins a new log: --new-base if-needed",
        )
    return converted
