"""Cut the wanted pieces of an object, and the parts of an upload, into requests.

A request costs about as much time as a megabyte: large pieces are cut into parts that are fetched in
parallel, and small ones that lie near each other come with one request, the bytes between them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The most that a request fetches: its first byte hardly counts then, and a retry costs little.
PART_BYTES = 8 << 20
GAP_BYTES = 1 << 20  # bytes that may lie unused between two pieces of one request
# Of one upload: S3 and Google take no more. Azure takes 50,000.
MOST_PARTS = 10_000
MOST_COPIED = 5 << 30  # bytes of an object that S3 copies by one request
# Bytes of one upload in memory, and its parts under way, at most.
_UPLOADING_BYTES, _UPLOADS = 512 << 20, 16


class Piece(NamedTuple):
    """A range of an object, and its offset in the target."""

    start: int
    stop: int
    offset: int


class Request(NamedTuple):
    """A range to fetch, and the pieces that lie in it."""

    start: int
    stop: int
    pieces: list[Piece]

    @property
    def wanted(self) -> int:
        """Bytes of its pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def requests(pieces: Iterable[tuple[int, int, int]]) -> Iterator[Request]:
    """Yield the requests for pieces (start, stop, offset in the target)."""
    request: Request | None = None
    for piece in sorted(part for whole in pieces for part in _parts(*whole)):
        if request is not None:
            stop = max(request.stop, piece.stop)
            if piece.start - request.stop <= GAP_BYTES and stop - request.start <= PART_BYTES:
                request.pieces.append(piece)
                request = request._replace(stop=stop)
                continue
            yield request
        request = Request(piece.start, piece.stop, [piece])
    if request is not None:
        yield request


def upload_parts(size: int) -> tuple[int, int]:
    """The size of the parts of an upload of `size` bytes, and how many are uploaded at once."""
    part = max(PART_BYTES, -(-size // MOST_PARTS))
    return part, max(1, min(_UPLOADS, _UPLOADING_BYTES // part))


def aligned(start: int, stop: int, size: int) -> tuple[int, int]:
    """The range to fetch for one that is read from an object: neighbours are likely to be read next."""
    return start // GAP_BYTES * GAP_BYTES, min(-(-stop // GAP_BYTES) * GAP_BYTES, size)


def _parts(start: int, stop: int, offset: int) -> Iterator[Piece]:
    for at in range(start, stop, PART_BYTES):
        yield Piece(at, min(at + PART_BYTES, stop), offset + at - start)
