"""Read numpy's `.npz` archives, which TensorLayer and hand-written trainers use for weights.

`save_npz_dict(...)` and `np.savez(file, **{variable.name: value})` store names; `np.savez(file, *values)`
stores `arr_0`, `arr_1`, ..., TensorLayer's first `save_npz_dict` stored `0`, `1`, ..., and a sole member
`params` is `save_npz`'s list, stacked because all its arrays have one shape: in these only the order
identifies an array. A `params` of several shapes is a pickle, which is never opened.

Source: numpy/lib/_format_impl.py; tensorlayer/files/utils.py.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.lib import format as npy

from exporter.catalog import Catalog, Naming, TensorRef
from exporter.checkpoint.file_range import FileRange, whole_items
from exporter.checkpoint.zip_members import Member, read_members
from exporter.errors import CorruptFile, TruncatedFile, UnsafeArchive, UnsupportedFormat
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

_MAX_HEADER_BYTES = 1 << 16
BEGIN_BYTES = _MAX_HEADER_BYTES + 12  # enough for a header
_MAX_TRANSPOSED_BYTES = 256 << 20  # Fortran order is transposed in memory, twice the size of the array
_MAX_LISTED = 100_000  # each element of a stacked list becomes a tensor
_LIST = "params"
# Errors that numpy's reader raises for headers that numpy did not write.
_BAD_HEADER = (ValueError, SyntaxError, TokenError, TypeError, KeyError, MemoryError, RecursionError)
_NUMBERED = re.compile(r"(arr_)?(0|[1-9][0-9]*)")


class Header(Struct, frozen=True):
    """A `.npy` header: its size in bytes, the stored type, the order and the shape."""

    size: int
    stored: np.dtype[Any]
    dtype: DType
    is_fortran: bool
    shape: tuple[int, ...]


class NpyValues(Struct, frozen=True):
    """The values of a member, or `count` of them from element `start`."""

    member: Member
    header: Header
    start: int
    count: int

    def blocks(self) -> Iterator[Array]:
        """Yield the values as flat numpy arrays in C order; an array in Fortran order as one block.

        Raised during the iteration: CheckpointChanged if the file was replaced; after the last block, when
        the member's checksum is compared, CorruptFile, TruncatedFile or UnsafeArchive as `Member.stream`.
        """
        if self.header.is_fortran:
            data = b"".join(self.member.stream())[self.header.size :]
            values = self._numbers(data).reshape(self.header.shape, order="F")
            yield np.ascontiguousarray(values).reshape(-1)
            return
        itemsize = self.header.stored.itemsize
        begin = self.header.size + self.start * itemsize
        end = begin + self.count * itemsize
        yield from map(self._numbers, whole_items(self._bytes(begin, end), itemsize))

    def _bytes(self, begin: int, end: int) -> Iterator[bytes]:
        position = 0
        for chunk in self.member.stream():  # to its end, where the member's checksum is compared
            yield chunk[max(0, begin - position) : max(0, end - position)]
            position += len(chunk)

    def _numbers(self, data: bytes) -> Array:
        return np.frombuffer(data, self.header.stored).astype(self.header.dtype.numpy, copy=False)


def read_npz(path: Path) -> Catalog:
    """Read the catalog of an archive's arrays, by name or as a list; arrays of texts are only noted.

    Raises:
        CorruptFile: it holds something else, two arrays of one name, or no array of numbers; or is damaged.
        UnsafeArchive: it holds a pickle, unsafe names, links, overlaps or bombs.
        UnsupportedFormat: it is encrypted, or an array has a type, version or layout that is not read.
        TruncatedFile: the archive or an array is cut short.
        CheckpointNotFound: the archive does not exist.
        CheckpointError: it cannot be read; CheckpointChanged if it was replaced meanwhile.
    """
    members = read_members(path)
    found: dict[str, TensorRef] = {}
    skipped = []
    for member in members.values():
        name = member.name.removesuffix(".npy").partition(":")[0]
        if not member.name.endswith(".npy") or not name:
            raise CorruptFile(f"{path} is not an npz archive: it holds {member.name!r}")
        header = read_header(f"{path}: {member.name!r}", _begin(path, member), member.size)
        if header is None:
            skipped.append(name)
            continue
        if name in found:
            raise CorruptFile(f"{path} holds two arrays named {name!r}")
        content = NpyValues(member, header, 0, math.prod(header.shape))
        found[name] = TensorRef(name, header.dtype, header.shape, content=content)
    if not found:
        raise CorruptFile(f"{path} holds no arrays of numbers")
    listed = _as_list(found)
    return Catalog(
        "npz, a list" if listed else "npz, by names",
        path,
        listed or found,
        (path,),
        (FileRange.whole(path).size,),
        notes=(f"left out, because they hold texts: {', '.join(skipped[:5])}",) if skipped else (),
        naming=Naming.ORDER if listed else Naming.NAMES,
    )


def _as_list(found: dict[str, TensorRef]) -> dict[str, TensorRef] | None:
    """Return the arrays, by name, in the order of the list that they are; None if they have their own names.

    `found` is all arrays by their names in the archive.
    """
    if found.keys() == {_LIST}:
        return _unstacked(found[_LIST])
    matches = {name: match for name in found if (match := _NUMBERED.fullmatch(name))}
    numbers = {name: int(match[2]) for name, match in matches.items()}
    is_one_style = len({match[1] for match in matches.values()}) == 1
    if not is_one_style or len(numbers) != len(found) or sorted(numbers.values()) != list(range(len(found))):
        return None
    return {name: found[name] for name in sorted(found, key=numbers.__getitem__)}


def _unstacked(ref: TensorRef) -> dict[str, TensorRef] | None:
    """Return the elements, by name in order, of a list of arrays of one shape that numpy stored as one array.

    None for an array in Fortran order, without a dimension or elements, or with more than 100,000 of them.
    """
    assert isinstance(ref.content, NpyValues)
    if not ref.shape or ref.content.header.is_fortran or ref.shape[0] > _MAX_LISTED:
        return None
    shape, count = ref.shape[1:], math.prod(ref.shape[1:])
    parts = {}
    for number in range(ref.shape[0]):
        content = NpyValues(ref.content.member, ref.content.header, number * count, count)
        name = f"{_LIST}/{number}"
        parts[name] = TensorRef(name, ref.dtype, shape, content=content)
    return parts or None


def read_header(where: str, data: bytes, size: int) -> Header | None:
    """Parse the header of an array of `size` bytes that begins with `data`; None for an array of texts.

    `where` names the array in errors. CorruptFile if the header is damaged or the array is longer than it
    declares, TruncatedFile if `data` or the array is too short, UnsupportedFormat for a type, version or
    layout that is not read, UnsafeArchive for a pickle.
    """
    file = io.BytesIO(data)
    try:
        major = npy.read_magic(file)[0]
    except ValueError as error:
        raise CorruptFile(f"{where} is not an npy array", cause=str(error)) from None
    # Behind 6 bytes of magic and 2 of version: two bytes, from version 2 on four.
    length = int.from_bytes(data[8 : 10 if major == 1 else 12], "little")
    if major > 3 or length > _MAX_HEADER_BYTES:
        raise UnsupportedFormat(f"{where} has version {major} and a header of {length} bytes")
    # Version 3 is version 2 with fields' names in UTF-8, and arrays with fields are refused below.
    read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
    try:
        shape, is_fortran, stored = read(file, max_header_size=_MAX_HEADER_BYTES)
    except _BAD_HEADER as error:
        if str(error).startswith("EOF"):
            raise TruncatedFile(f"{where} ends within its header") from None
        cause = f"{error!s:.200}"  # numpy quotes the header, of up to 64 KiB
        raise CorruptFile(f"{where} has a damaged header", cause=cause) from None
    if not all(type(length) is int and length >= 0 for length in shape):
        raise CorruptFile(f"{where} has the shape {shape!r:.99}")
    _refuse_objects(stored, where)
    if stored.kind in "SU":
        return None
    is_fortran = is_fortran and len(shape) > 1
    header = Header(file.tell(), stored, _known(stored, where), is_fortran, shape)
    expected = header.size + math.prod(shape) * stored.itemsize
    if size != expected:
        error_type = TruncatedFile if size < expected else CorruptFile
        raise error_type(f"{where} has {size} bytes, its header declares {expected}")
    if header.is_fortran and expected > _MAX_TRANSPOSED_BYTES:
        raise UnsupportedFormat(
            f"{where} has its columns in sequence and is too large to be turned in memory",
            hint="save np.ascontiguousarray(array) instead",
        )
    return header


def _begin(path: Path, member: Member) -> bytes:
    """Return the first bytes of a member, enough for a header; all bytes of a smaller one.

    CheckpointError and subclasses, as `Member.stream`, if they cannot be read or unpacked.
    """
    data = b""
    for chunk in member.stream():
        data += chunk
        if len(data) >= min(member.size, BEGIN_BYTES):
            break
    return data


def _refuse_objects(stored: np.dtype[Any], where: str) -> None:
    if stored.hasobject:
        raise UnsafeArchive(
            f"{where} is a pickle: reading it would run code that its author put there",
            cause="save_npz pickles a list of arrays that differ in shape",
            hint="if you trust it: np.savez(NEW, *np.load(OLD, allow_pickle=True)['params']), "
            "then export NEW",
        )
    if stored.names or stored.subdtype:
        raise UnsupportedFormat(f"{where} is an array of records: {stored!r:.99}")


def _known(stored: np.dtype[Any], where: str) -> DType:
    try:
        return DType.of(stored.name)
    except KeyError:
        raise UnsupportedFormat(
            f"{where} has the type {stored.str}, which no variable has",
            hint="save bfloat16 as float32: array.astype(np.float32)",
        ) from None
