"""A byte range of a file that may be replaced at any moment; reading notices if it was.

Archives that store a tensor as consecutive bytes, little endian, are read in place: see `PlainValues`.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    TruncatedFile,
    UnsafeArchive,
)
from exporter.storage.files import FileIdentity, below, close_quietly, open_regular
from exporter.storage.open_files import Window
from exporter.wire.crc32c import chunks_of
from exporter.wire.dtypes import DType


class FileRange(Struct, frozen=True):
    """`size` bytes at `offset` of the file with this `identity`.

    `crc32` is the zip's checksum of them, or None.
    """

    path: Path
    offset: int
    size: int
    identity: FileIdentity
    crc32: int | None = None

    @classmethod
    def whole(cls, path: Path) -> FileRange:
        """Return the range of all bytes of a regular file; CorruptFile if it is not a regular file.

        CheckpointNotFound if it does not exist, CheckpointError if its status cannot be read.
        """
        try:
            found = path.stat()
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no {path}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}", cause=str(error)) from error
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise CorruptFile(f"{path} is not a regular file")
        return cls(path, 0, found.st_size, FileIdentity.of(found))

    def part(self, offset: int, size: int, crc32: int | None = None) -> FileRange:
        """Return the range of `size` bytes at `offset` of this one.

        `crc32` is the zip's checksum of the new range, None if there is none. TruncatedFile if this range is
        shorter.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise TruncatedFile(
                f"{self.path} is shorter than it says",
                cause=f"bytes {offset} to {offset + size} are asked for, there are {self.size}",
            )
        return FileRange(self.path, self.offset + offset, size, self.identity, crc32)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the file (not only the range) and yield its descriptor, closed after the `with` block.

        An object of a store is fetched whole first: DiskFull or PublishError if it cannot be kept here.
        CheckpointChanged if the file vanished or was replaced, CheckpointError if it cannot be read.
        """
        try:
            descriptor = open_regular(self.path)
        except FileNotFoundError:
            raise CheckpointChanged(f"{self.path} vanished after it was read") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}", cause=str(error)) from error
        try:
            if FileIdentity.of(os.fstat(descriptor)) != self.identity:
                raise CheckpointChanged(f"{self.path} was replaced or written to after it was read")
            yield descriptor
        finally:
            close_quietly(descriptor)

    @contextmanager
    def opened(self) -> Iterator[Window]:
        """Yield the range as a binary file, open inside the `with` block.

        CheckpointChanged if the file vanished or was replaced, CheckpointError if it cannot be read; DiskFull
        or PublishError if an object of a store cannot be kept here.
        """
        with self.open() as descriptor:
            yield Window(descriptor, self.offset, self.size)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes in chunks of at most 1 MiB.

        Raised during the iteration: CheckpointChanged if the file vanished, was replaced or became shorter;
        CheckpointError if it cannot be read; DiskFull or PublishError if an object of a store cannot be kept
        here.
        """
        with self.open() as descriptor:
            try:
                yield from chunks_of(descriptor, self.offset, self.size)
            except EOFError:
                raise CheckpointChanged(f"{self.path} became shorter after it was read") from None

    def read(self) -> bytes:
        """Return all bytes at once, which is for small ranges.

        CheckpointChanged if the file vanished, was replaced or became shorter; CheckpointError if it cannot
        be read; DiskFull or PublishError if an object of a store cannot be kept here.
        """
        return b"".join(self.chunks())


# A range has its file's identity: after the file was replaced it is another key, and read again.
@lru_cache(maxsize=64)
def verify(source: FileRange) -> None:
    """Raise CorruptFile if the bytes of a range do not have its `crc32`; without one nothing is read.

    The last 64 ranges that passed are remembered, and not read again. CheckpointChanged if the file vanished,
    was replaced or became shorter, CheckpointError if it cannot be read; DiskFull or PublishError if an
    object of a store cannot be kept here.
    """
    if source.crc32 is None:
        return
    crc = 0
    for chunk in source.chunks():
        crc = zlib.crc32(chunk, crc)
    if crc != source.crc32:
        raise CorruptFile(
            f"{source.path} is damaged: bytes {source.offset} to {source.offset + source.size} have the "
            f"crc32 {crc:08x}, its directory says {source.crc32:08x}"
        )


def listed_shard(path: Path, name: object) -> Path:
    """Return the path of the shard that an entry `name` of the list at `path` names.

    UnsafeArchive if the name is not the name of a file beside the list, MissingShard if the file does not
    exist.
    """
    shard = below(path.parent, str(name), f"{path}: the shard", UnsafeArchive)
    if not isinstance(name, str) or "/" in name:
        raise UnsafeArchive(f"{path} names the shard {name!r:.99}, which is not beside it")
    if not shard.is_file():
        raise MissingShard(f"there is no {shard}", cause=f"{path.name} names it")
    return shard


class PlainValues(Struct, frozen=True):
    """The bytes of `source` as numbers.

    The checksum of the containing `archive`, if any, is verified first.
    """

    source: FileRange
    archive: FileRange
    dtype: DType

    def blocks(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the values as flat numpy arrays in C order.

        The archive's checksum is verified before the first array. Raised during the iteration: CorruptFile if
        the checksum is wrong, CheckpointChanged if the file was replaced or became shorter, CheckpointError
        if it cannot be read; DiskFull or PublishError if an object of a store cannot be kept here.
        """
        verify(self.archive)
        for data in whole_items(self.source.chunks(), self.dtype.numpy.itemsize):
            yield np.frombuffer(data, self.dtype.numpy)


def whole_items(chunks: Iterable[bytes], itemsize: int) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in chunks that each end where an item ends.

    An item has `itemsize` bytes; an incomplete last one is dropped. Errors of `chunks` pass.
    """
    rest = b""
    for chunk in chunks:
        data = rest + chunk if rest else chunk
        whole = len(data) - len(data) % itemsize
        rest = data[whole:]
        if whole:
            yield data[:whole] if rest else data
