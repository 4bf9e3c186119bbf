"""TFRecord files, uncompressed: records of bytes, each with the masked crc32c of its length and of itself.

Source: tensorflow/core/lib/io/record_writer.h. A record is its length (uint64), the length's checksum
(uint32), the data and the data's checksum (uint32), all little endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO

from exporter.wire.crc32c import masked_crc

_MAX_RECORD_BYTES = (1 << 31) - 1  # a record is one message, and protocol buffers have no larger ones


class DamagedRecord(ValueError):
    """A record is cut off, too long, or its checksum is wrong."""


def encode_records(records: Iterable[bytes]) -> bytes:
    """Return the bytes of a TFRecord file with these records, in order."""
    pieces = []
    for record in records:
        length = len(record).to_bytes(8, "little")
        pieces += [length, _crc(length), record, _crc(record)]
    return b"".join(pieces)


def read_records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the records of a TFRecord file, in order, from its present offset.

    Raises:
        DamagedRecord: one is damaged; all records before it have been yielded.
        OSError: reading fails.
    """
    while header := file.read(12):
        # checked first: a flipped bit in the length would ask for gigabytes
        length = int.from_bytes(_checked(header, 8), "little")
        if length > _MAX_RECORD_BYTES:
            raise DamagedRecord(f"a record claims {length} bytes")
        yield _checked(file.read(length + 4), length)


def _checked(data: bytes, length: int) -> bytes:
    body = data[:length]
    if len(data) != length + 4 or data[length:] != _crc(body):
        raise DamagedRecord("a record is cut off, or its checksum is wrong")
    return body


def _crc(data: bytes) -> bytes:
    return masked_crc(data).to_bytes(4, "little")
