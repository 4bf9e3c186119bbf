"""CRC-32C as TensorFlow stores it: masked, so that a checksum of data that holds checksums stays useful.

Source of the mask: tensorflow/core/lib/hash/crc32c.h (rotate right by 15 bits, add a constant).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import google_crc32c

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

CHUNK = 1 << 20  # bytes read at a time: fits a core's cache and keeps memory flat whatever the tensor's size

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bit-reversed: the most significant bit is the coefficient of x^0
_ONE = 1 << 31
_MASK_DELTA = 0xA282EAD8
_WORD = 0xFFFFFFFF


def extend(crc: int, data: bytes | Bytes) -> int:
    """Return the plain crc32c of `data` after the bytes that `crc` covers; begin with 0. Releases the GIL."""
    return int(google_crc32c.extend(crc, data))


def combine(first: int, second: int, second_size: int) -> int:
    """Return the plain crc32c of two consecutive byte strings, given both crcs and the second's length."""
    # A crc is a polynomial over GF(2), the rest of the data's; n bytes more multiply it by x^8n. Source:
    # crc32_combine in zlib; the conditioning with ones cancels out.
    return _multiply(_power_of_x(8 * second_size), first) ^ second


def zeros_crc(size: int) -> int:
    """Return the plain crc32c of `size` zero bytes, computed in log(size) steps."""
    crc, done = 0, 0
    block_crc, block = extend(0, b"\0"), 1
    while size:
        if size & 1:
            crc, done = combine(crc, block_crc, block), done + block
        block_crc, block = combine(block_crc, block_crc, block), block * 2
        size >>= 1
    return crc


def mask(crc: int) -> int:
    """Return a plain crc32c in the masked form in which files store it."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _WORD


def unmask(stored: int) -> int:
    """Return the plain crc32c of a stored, masked one."""
    rotated = (stored - _MASK_DELTA) & _WORD
    return (rotated << 15 | rotated >> 17) & _WORD


def masked_crc(data: bytes) -> int:
    """Return the masked crc32c of `data`, as files store it."""
    return mask(extend(0, data))


# EOFError for `tables.lay_out`, which names the object that was cut; an OSError for all others.
class EndsEarly(EOFError, OSError):
    """A file ends before the bytes that are asked for: it was cut while it was read."""

    def __init__(self, end: int) -> None:
        super().__init__(errno.EIO, f"it ends before byte {end}")


def chunks_of(fd: int, offset: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of an open file from `offset`, in chunks of 1 MiB.

    EndsEarly if the file ends earlier, OSError if reading fails: both after the chunks before.
    """
    end = offset + size
    while offset < end:
        chunk = os.pread(fd, min(CHUNK, end - offset), offset)
        if not chunk:
            # pread returns nothing at the file's end alone: fewer bytes than asked for are no end
            raise EndsEarly(end)
        offset += len(chunk)
        yield chunk


def crc_of(fd: int, offset: int, size: int) -> int:
    """Return the plain crc32c of `size` bytes of an open file from `offset`.

    EndsEarly if the file ends earlier, OSError if reading fails.
    """
    import numpy as np  # late: an index is read without it

    # one buffer for all chunks: the kernel would have to provide new pages for each new one
    buffer, crc, end = np.empty(min(CHUNK, size), np.uint8), 0, offset + size
    while offset < end:
        count = os.preadv(fd, [buffer.data[: end - offset]], offset)
        if not count:
            raise EndsEarly(end)
        # only what this read has filled: behind it are bytes of the chunk before
        crc = extend(crc, buffer[:count])
        offset += count
    return crc


def read_into(fd: int, offset: int, buffer: Bytes, crc: int = 0) -> int:
    """Fill a buffer from an open file, from `offset`; return `crc` (plain) extended by its bytes.

    EndsEarly if the file ends earlier, OSError if reading fails.
    """
    position = 0
    while position < len(buffer):
        count = os.preadv(fd, [buffer.data[position : position + CHUNK]], offset + position)
        if not count:
            raise EndsEarly(offset + len(buffer))
        crc = extend(crc, buffer[position : position + count])  # while the bytes are in a core's cache
        position += count
    return crc


@cache
def _power_of_x(exponent: int) -> int:
    """Return the power of x with this exponent, modulo Castagnoli's polynomial, bit-reversed; memoised."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials, bit-reversed, modulo Castagnoli's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & _WORD
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
