"""Read what a mirror's file stands for and keep nothing of it: for who comes by each byte of much once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exporter.storage import mirror
from exporter.storage.objects import ObjectReader, RemoteObject


def read(path: Path, pieces: Sequence[tuple[int, int, int]], buffer: memoryview) -> bool:
    """Read pieces (start, stop, offset in the buffer) of the object that a mirror's file stands for.

    Nothing of it is kept. False if there is no need: the file has them all, or stands for none.

    Raises:
        CheckpointChanged, CheckpointError: as `Mirror.fetch`.
    """

    def put(offset: int, content: memoryview) -> None:
        buffer[offset : offset + len(content)] = content

    def take(reader: ObjectReader, each: RemoteObject) -> bool:
        reader.take(each, pieces, put)
        return True

    found = mirror.find(path)
    ranges = ((start, stop) for start, stop, _ in pieces)
    return found is not None and found[0].ask_store(found[1], ranges, take) is not None


def checksum(path: Path, start: int, stop: int) -> int | None:
    """The plain crc32c of a range, of which nothing is kept; None where `read` is false.

    Raises:
        CheckpointChanged, CheckpointError: as `Mirror.fetch`.
    """

    def take(reader: ObjectReader, each: RemoteObject) -> int:
        return reader.checksums(each, [(start, stop)])[0]

    found = mirror.find(path)
    return None if found is None else found[0].ask_store(found[1], [(start, stop)], take)
