"""Read and write the format of an `.index` file, a sorted string table.

    table  = block* metaindex-block index-block footer
    block  = entry* restart-offset* (uint32) restart-count (uint32) | type (1 byte) | masked crc32c (uint32)
    entry  = shared, unshared, value-length (varint32 each), the key's unshared bytes, the value
    index  = a block: separator key -> handle of a data block; a handle is varint64 offset, varint64 size
    footer = handles of metaindex and index, zero-padded to 40 bytes, and a magic number (8 bytes)

Sources: LevelDB's doc/table_format.md; tensorflow/core/lib/io/{table_builder,block_builder,format}.cc.
TensorFlow writes 256 KiB blocks, restarts every 16 entries (every entry in the index block), no compression.
Some builds of it compress blocks by snappy (type 1), and all builds read those; the checksum covers the
compressed bytes.

The reader does not trust the file: blocks must tile it from its first byte to its footer, so neither overlaps
nor loops exist, every checksum is verified, and neither a block nor its keys may expand beyond the limits of
snappy and of restarts every 16 entries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from exporter.errors import CheckpointError, CorruptFile, TruncatedFile, UnsupportedFormat
from exporter.wire.crc32c import masked_crc
from exporter.wire.protos import varint

Entry = tuple[bytes, bytes]

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_FOOTER_BYTES = 48  # two handles, padded to 40 bytes, and the magic number
_TRAILER_BYTES = 5  # of each block: how it is compressed, and its checksum
# These two as in TensorFlow's table_options.h, so that an index has the same bytes.
_BLOCK_BYTES = 262_144
_RESTART_INTERVAL = 16
_LONGEST_VARINT = 10
_PLAIN, _SNAPPY = 0, 1
_COMPRESSION = {2: "zstd"}
_MAX_SNAPPY_RATIO = 22  # three bytes copy 64 at most; a library need not allocate what a length claims


def read_table(data: bytes, path: Path) -> list[Entry]:
    """Return all (key, value) pairs of a table in key order, after a check of each block.

    CorruptFile if it is damaged, TruncatedFile if it is cut short, UnsupportedFormat for another compression
    than snappy; they name `path`.
    """
    metaindex, index = _read_footer(data, path)
    entries: list[Entry] = []
    end = 0
    for _, value in _read_block(data, index, path, "index block"):
        handle, _ = _read_handle(value, 0, path)
        end = _follow(end, handle, path, f"data block at byte {handle[0]}")
        block = _read_block(data, handle, path, f"data block at byte {handle[0]}")
        if entries and block and block[0][0] <= entries[-1][0]:
            raise CorruptFile(f"{path} is damaged: blocks are out of order at byte {handle[0]}")
        entries += block
    end = _follow(end, metaindex, path, "metaindex block")
    _read_block(data, metaindex, path, "metaindex block")
    end = _follow(end, index, path, "index block")
    if end + _FOOTER_BYTES != len(data):
        raise CorruptFile(f"{path} is damaged: its blocks end at byte {end}, its footer begins elsewhere")
    return entries


def read_first_block(data: bytes, path: Path) -> list[Entry]:
    """Return the (key, value) pairs of a table's first block; empty if it has none.

    `data` may be a memory map, of which only the footer, the index and the first block are read and checked.
    CorruptFile, TruncatedFile and UnsupportedFormat as `read_table`.
    """
    _, index = _read_footer(data, path)
    for _, value in _read_block(data, index, path, "index block"):
        return _read_block(data, _read_handle(value, 0, path)[0], path, "first block")
    return []


def _read_footer(data: bytes, path: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    if len(data) < _FOOTER_BYTES:
        raise TruncatedFile(f"{path} has {len(data)} bytes, an index has at least {_FOOTER_BYTES}")
    if data[-8:] != MAGIC:
        raise _wrong_magic(data, path)
    footer = data[-_FOOTER_BYTES:-8]
    metaindex, position = _read_handle(footer, 0, path)
    index, position = _read_handle(footer, position, path)
    if footer.count(0, position) != len(footer) - position:
        raise CorruptFile(f"{path} is damaged: the footer's padding is not zero")
    return metaindex, index


def _wrong_magic(data: bytes, path: Path) -> CheckpointError:
    equal = sum(found == expected for found, expected in zip(data[-8:], MAGIC, strict=True))
    if equal >= 6:  # a cut file ends in something else altogether
        return CorruptFile(
            f"{path} is damaged: its magic number is {data[-8:].hex()}, expected {MAGIC.hex()}"
        )
    at = data.rfind(MAGIC)
    if at > 0:
        return CorruptFile(f"{path} has {len(data) - at - 8} bytes after its end")
    return TruncatedFile(
        f"{path} does not end as an index does: it is cut short, or it is something else",
        cause=f"its last 8 bytes are {data[-8:].hex()}, expected {MAGIC.hex()}",
    )


def _follow(end: int, handle: tuple[int, int], path: Path, what: str) -> int:
    """Return the end, in bytes, of a block with its trailer; CorruptFile unless it begins at `end`.

    `handle` is the block's offset and size, `what` its name in the error.
    """
    offset, size = handle
    if offset != end:
        raise CorruptFile(f"{path} is damaged: {what} begins at byte {offset}, expected {end}")
    return offset + size + _TRAILER_BYTES


def _read_handle(data: bytes, position: int, path: Path) -> tuple[tuple[int, int], int]:
    offset, position = _read_varint(data, position, path)
    size, position = _read_varint(data, position, path)
    return (offset, size), position


def _read_varint(data: bytes, position: int, path: Path) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(data[position : position + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            if shift and not byte:  # no writer encodes this; a flipped bit in a footer's padding gives it
                break
            return value, position + shift + 1
    raise CorruptFile(f"{path} is damaged: the length at byte {position} of a block is not one")


def _read_block(data: bytes, handle: tuple[int, int], path: Path, what: str) -> list[Entry]:
    offset, size = handle
    end = offset + size
    if size < 4 or end + _TRAILER_BYTES + _FOOTER_BYTES > len(data):  # 4: the count of restarts
        raise CorruptFile(f"{path} is damaged: the {what} lies at bytes {offset}-{end} of {len(data)}")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    found = masked_crc(data[offset : end + 1])
    if found != stored:
        raise CorruptFile(f"{path} is damaged: the {what} has checksum {found:08x}, expected {stored:08x}")
    return _parse_block(_unpacked(data[offset:end], data[end], path, what), path, what)


def _unpacked(contents: bytes, type_: int, path: Path, what: str) -> bytes:
    if type_ == _PLAIN:
        return contents
    if type_ != _SNAPPY:
        how = _COMPRESSION.get(type_, f"type {type_}")
        raise UnsupportedFormat(f"{path} is compressed ({how}); only uncompressed and snappy tables are read")
    import cramjam

    try:
        size = cramjam.snappy.decompress_raw_len(contents)
        if not 4 <= size <= _MAX_SNAPPY_RATIO * len(contents):
            raise CorruptFile(
                f"{path} is damaged: the {what} of {len(contents)} bytes claims to unpack to {size}"
            )
        return bytes(cramjam.snappy.decompress_raw(contents))
    except cramjam.DecompressionError as error:
        raise CorruptFile(f"{path} is damaged: the {what} cannot be unpacked", cause=str(error)) from None


def _parse_block(block: bytes, path: Path, what: str) -> list[Entry]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise CorruptFile(f"{path} is damaged: the {what} claims {restarts} restarts")
    entries: list[Entry] = []
    key, position = b"", 0
    # time and memory stay proportional to the file's size, whatever lengths its entries claim
    key_bytes_left = _RESTART_INTERVAL * len(block)
    while position < end:
        head = block[position : position + 3]
        if max(head) < 0x80 and len(head) == 3:  # nearly all: three lengths of one byte each
            shared, unshared, value_bytes = head
            position += 3
        else:
            shared, position = _read_varint(block, position, path)
            unshared, position = _read_varint(block, position, path)
            value_bytes, position = _read_varint(block, position, path)
        value_at = position + unshared
        next_ = value_at + value_bytes
        if next_ > end or shared > len(key):
            raise CorruptFile(f"{path} is damaged: an entry of the {what} is longer than the block")
        key_bytes_left -= shared + unshared
        if key_bytes_left < 0:
            raise CorruptFile(
                f"{path} is damaged: keys of the {what} expand to over {_RESTART_INTERVAL} times its size"
            )
        previous, key = key, key[:shared] + block[position:value_at]
        if key <= previous and entries:
            raise CorruptFile(f"{path} is damaged: keys of the {what} are out of order")
        entries.append((key, block[value_at:next_]))
        position = next_
    return entries


def write_table(entries: Iterable[Entry]) -> bytes:
    """Return the bytes of a table of (key, value) pairs, exactly as TensorFlow writes it.

    ValueError unless the keys increase.
    """
    table = bytearray()
    index = _BlockBuilder(restart_interval=1)
    block = _BlockBuilder(_RESTART_INTERVAL)
    handle = b""
    last: bytes | None = None
    for key, value in entries:
        if last is not None and key <= last:
            raise ValueError(f"table keys must increase: {key!r} after {last!r}")
        if handle and last is not None:
            index.add(_separator(last, key), handle)
            handle = b""
        block.add(key, value)
        last = key
        if block.bytes_ >= _BLOCK_BYTES:
            handle = _append_block(table, block)
            block = _BlockBuilder(_RESTART_INTERVAL)
    if block.count:
        handle = _append_block(table, block)
    metaindex_handle = _append_block(table, _BlockBuilder(_RESTART_INTERVAL))
    if handle and last is not None:
        index.add(_successor(last), handle)
    footer = metaindex_handle + _append_block(table, index)
    table += footer.ljust(_FOOTER_BYTES - 8, b"\0") + MAGIC
    return bytes(table)


class _BlockBuilder:
    def __init__(self, restart_interval: int) -> None:
        self.count = 0
        self._interval = restart_interval
        self._buffer = bytearray()
        self._restarts = [0]
        self._last = b""

    @property
    def bytes_(self) -> int:
        return len(self._buffer) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self.count % self._interval:
            shared = _common_prefix(self._last, key)
        elif self.count:
            self._restarts.append(len(self._buffer))
        sizes = (shared, len(key) - shared, len(value))
        if max(sizes) < 0x80:  # nearly always: each is a varint of one byte
            self._buffer += bytes(sizes)
        else:
            self._buffer += b"".join(map(varint, sizes))
        self._buffer += key[shared:]
        self._buffer += value
        self._last = key
        self.count += 1

    def finish(self) -> bytes:
        words = [*self._restarts, len(self._restarts)]
        return bytes(self._buffer) + struct.pack(f"<{len(words)}I", *words)


def _append_block(table: bytearray, block: _BlockBuilder) -> bytes:
    """Append a block, its type and its checksum to the table; return its encoded handle."""
    contents = block.finish()
    handle = varint(len(table)) + varint(len(contents))
    typed = contents + b"\0"
    table += typed + struct.pack("<I", masked_crc(typed))
    return handle


def _common_prefix(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    difference = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return length - (difference.bit_length() + 7) // 8


def _separator(last: bytes, next_: bytes) -> bytes:
    """Return a short key in [last, next_), which the index stores between two blocks."""
    at = _common_prefix(last, next_)
    # As LevelDB's FindShortestSeparator does, byte for byte: an index has TensorFlow's own bytes.
    if at < min(len(last), len(next_)) and last[at] < 0xFF and last[at] + 1 < next_[at]:
        return last[:at] + bytes([last[at] + 1])
    return last


def _successor(last: bytes) -> bytes:
    """Return a short key >= last, which the index stores for the last block."""
    # LevelDB's FindShortSuccessor.
    for at, byte in enumerate(last):
        if byte < 0xFF:
            return last[:at] + bytes([byte + 1])
    return last
