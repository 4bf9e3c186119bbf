"""Read the members of a zip archive as byte ranges of its file, without extracting them.

Keras and numpy write members uncompressed, so that a member is a range of bytes; `savez_compressed` deflates
them. Names that leave the archive, links, doubled names, overlaps and bombs are refused. Format: PKWARE's
APPNOTE.TXT; DEFLATE cannot shrink by more than 1032 to 1 (zlib's documentation).
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from exporter.checkpoint.file_range import FileRange
from exporter.errors import CorruptFile, TruncatedFile, UnsafeArchive, UnsupportedFormat
from exporter.storage.files import below
from exporter.wire.crc32c import CHUNK

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 0x1
_MAX_MEMBERS = 200_000  # an npz has one for each tensor
_MAX_DEFLATE_RATIO = 1032  # deflate reaches no more: 258 bytes from two bits
_RATIO_FLOOR_BYTES = 1 << 16  # below it nothing is worth calling a bomb


class Member(Struct, frozen=True):
    """A member: its stored bytes, its size once unpacked, whether it is deflated, and its checksum."""

    name: str
    stored: FileRange
    size: int
    is_deflated: bool
    crc32: int

    def stream(self) -> Iterator[bytes]:
        """Yield the unpacked bytes in chunks of bounded size, and compare their checksum after the last one.

        Until then it is unknown whether they are right. Errors come during the iteration, not at the call.

        Raises:
            UnsafeArchive: they are more than declared.
            TruncatedFile: they are fewer.
            CorruptFile: they have another checksum, or cannot be unpacked.
            CheckpointError: as `FileRange.chunks`.
        """
        crc = done = 0
        for chunk in self._inflated() if self.is_deflated else self.stored.chunks():
            done += len(chunk)
            if done > self.size:
                raise UnsafeArchive(
                    f"{self.stored.path}: {self.name!r} unpacks to more than the {self.size} bytes declared"
                )
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if done < self.size:
            raise TruncatedFile(
                f"{self.stored.path}: {self.name!r} unpacks to {done} bytes of {self.size} declared"
            )
        if crc != self.crc32:
            raise CorruptFile(
                f"{self.stored.path} is damaged: the crc32 of {self.name!r} is {crc:08x}, "
                f"its directory says {self.crc32:08x}"
            )

    def read(self, limit: int) -> bytes:
        """Return the whole member, unpacked; UnsafeArchive if it has more than `limit` bytes.

        CorruptFile, TruncatedFile, UnsafeArchive or another CheckpointError, as `Member.stream`, if it is
        damaged or cannot be read.
        """
        if self.size > limit:
            raise UnsafeArchive(
                f"{self.stored.path}: {self.name!r} has {self.size} bytes, expected {limit} at most"
            )
        return b"".join(self.stream())

    def _inflated(self) -> Iterator[bytes]:
        # Negative: deflate in a zip has no header of zlib.
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            for chunk in self.stored.chunks():
                while chunk:
                    # Limited, or a chunk of a bomb would become a thousand times as many bytes at once.
                    unpacked = inflater.decompress(chunk, CHUNK)
                    if unpacked:
                        yield unpacked
                    chunk = inflater.unconsumed_tail
            yield inflater.flush()
        except zlib.error as error:
            raise CorruptFile(
                f"{self.stored.path} is damaged: {self.name!r} cannot be inflated", cause=str(error)
            ) from None


def read_members(path: Path) -> dict[str, Member]:
    """Return the members of an archive by name, without directories.

    CheckpointNotFound if there is no such file; CheckpointChanged if it was replaced meanwhile;
    CheckpointError if it cannot be opened; TruncatedFile or CorruptFile if it is not a whole zip archive;
    UnsupportedFormat for encryption or another packing; UnsafeArchive for too many members, two of one name,
    unsafe names, links, overlaps or bombs.
    """
    whole = FileRange.whole(path)
    with whole.opened() as file:
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
            raise _unreadable(whole, error) from None
    if len(infos) > _MAX_MEMBERS:
        raise UnsafeArchive(f"{path} holds {len(infos)} members, expected {_MAX_MEMBERS} at most")
    members: dict[str, Member] = {}
    for info in infos:
        _check_name(path, info)
        if info.filename in members:
            raise UnsafeArchive(f"{path} holds two members named {info.filename!r}")
        if not info.is_dir():
            members[info.filename] = _member(whole, info)
    _refuse_overlaps(path, members)
    return members


def _unreadable(whole: FileRange, error: Exception) -> CorruptFile | TruncatedFile:
    begins = whole.part(0, min(4, whole.size)).read()
    if begins == _LOCAL_MAGIC:
        return TruncatedFile(f"{whole.path} is a zip archive without its end", cause=str(error))
    return CorruptFile(f"{whole.path} is not a zip archive", cause=str(error))


def _check_name(path: Path, info: zipfile.ZipInfo) -> None:
    """Raise UnsafeArchive for a member that is a link, or whose name points outside the archive."""
    # a directory's name ends in a slash; other systems write `\` for one, and begin with a drive
    name = info.filename.replace("\\", "/").removesuffix("/")
    below(path.parent, name, f"{path}: member", UnsafeArchive)
    if name.partition("/")[0].endswith(":"):
        raise UnsafeArchive(f"{path}: member {info.filename!r} leads out of the archive")
    # The upper half is the mode on Unix.
    if stat.S_ISLNK(info.external_attr >> 16):
        raise UnsafeArchive(f"{path}: member {info.filename!r} is a symbolic link")


def _member(whole: FileRange, info: zipfile.ZipInfo) -> Member:
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedFormat(f"{whole.path}: member {info.filename!r} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsupportedFormat(
            f"{whole.path}: member {info.filename!r} is packed by method {info.compress_type}",
            hint="pack the archive again, stored or deflated",
        )
    is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
    limit = info.compress_size * _MAX_DEFLATE_RATIO if is_deflated else info.compress_size
    if info.file_size > max(limit, _RATIO_FLOOR_BYTES if is_deflated else 0):
        raise UnsafeArchive(
            f"{whole.path}: member {info.filename!r} declares {info.file_size} bytes and stores "
            f"{info.compress_size}: no packing does that"
        )
    stored = whole.part(_data_offset(whole, info), info.compress_size, None if is_deflated else info.CRC)
    return Member(info.filename, stored, info.file_size, is_deflated, info.CRC)


def _data_offset(whole: FileRange, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes: behind its own header, whose length is not in the directory.

    CorruptFile if there is no header, UnsafeArchive if it names another member, TruncatedFile if the file
    ends before.
    """
    header = whole.part(info.header_offset, _LOCAL_HEADER.size).read()
    magic, *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    if magic != _LOCAL_MAGIC:
        raise CorruptFile(f"{whole.path} is damaged: no header where {info.filename!r} should begin")
    start = info.header_offset + _LOCAL_HEADER.size
    name = whole.part(start, name_size).read()
    # Bit 11 says UTF-8; without it `zipfile` reads the code page 437, as the format has it.
    if name.decode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace") != info.orig_filename:
        raise UnsafeArchive(
            f"{whole.path}: the directory calls a member {info.filename!r}, its own header {name!r}"
        )
    return start + int(name_size) + int(extra_size)


def _refuse_overlaps(path: Path, members: dict[str, Member]) -> None:
    end, before = 0, ""
    for member in sorted(members.values(), key=lambda member: member.stored.offset):
        if member.stored.offset < end:
            raise UnsafeArchive(f"{path}: members {before!r} and {member.name!r} share bytes")
        end, before = member.stored.offset + member.stored.size, member.name
