"""Cut the wanted pieces of an object, and the parts of an upload, into requests.

A request costs about as much time as a megabyte: large pieces are cut into parts that are fetched in
parallel, and small ones near each other come with one request, with the bytes between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The most bytes per request: at this size its latency hardly counts, and a retry costs little.
PART_BYTES = 8 << 20
GAP_BYTES = 1 << 20  # the most unused bytes between two pieces of one request
# The most parts of one upload at S3 and Google; Azure accepts 50,000.
MOST_PARTS = 10_000
MOST_COPIED = 5 << 30  # the largest object that S3 copies by one request
# The most bytes of one upload in memory, and the most of its parts at a time.
_UPLOADING_BYTES, _UPLOADS = 512 << 20, 16


class Piece(NamedTuple):
    """A range of an object, and its offset in the target."""

    start: int
    stop: int
    offset: int


class Request(NamedTuple):
    """A range to fetch, and the pieces in it."""

    start: int
    stop: int
    pieces: list[Piece]

    @property
    def wanted(self) -> int:
        """The total bytes of its pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def requests(pieces: Iterable[tuple[int, int, int]]) -> Iterator[Request]:
    """Yield the requests for pieces (start, stop, offset in the target), in the order of their starts.

    Pieces are cut into parts of at most `PART_BYTES`; parts near each other share a request.
    """
    request: Request | None = None
    # in order: the loop compares each with the request before it alone
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
    """Return the bytes of each part of an upload of `size` bytes, and the number of parts sent at a time."""
    part = max(PART_BYTES, -(-size // MOST_PARTS))
    return part, max(1, min(_UPLOADS, _UPLOADING_BYTES // part))


def aligned(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the range (start, stop) to fetch for a read of `start` to `stop` of an object of `size` bytes.

    It is extended to whole MiB, or to the object's end, because neighbours are often read next.
    """
    return start // GAP_BYTES * GAP_BYTES, min(-(-stop // GAP_BYTES) * GAP_BYTES, size)


def _parts(start: int, stop: int, offset: int) -> Iterator[Piece]:
    for at in range(start, stop, PART_BYTES):
        yield Piece(at, min(at + PART_BYTES, stop), offset + at - start)
