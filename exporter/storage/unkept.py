"""Read what a mirror's file stands for and keep nothing of it: for who comes by each byte of much once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TypeVar

from exporter.errors import os_error
from exporter.storage import mirror
from exporter.storage.objects import ObjectReader, RemoteObject

T = TypeVar("T")


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

    return _ask(path, ((start, stop) for start, stop, _ in pieces), take) is not None


def checksum(path: Path, start: int, stop: int) -> int | None:
    """The plain crc32c of a range, of which nothing is kept; None where `read` is false.

    Raises:
        CheckpointChanged, CheckpointError: as `Mirror.fetch`.
    """

    def take(reader: ObjectReader, each: RemoteObject) -> int:
        return reader.checksums(each, [(start, stop)])[0]

    return _ask(path, [(start, stop)], take)


def copy(path: Path, start: int, stop: int) -> IO[bytes] | None:
    """A nameless file of a range, which goes when nobody has it open or mapped; None where `read` is false.

    Raises:
        CheckpointChanged, CheckpointError, DiskFull, PublishError: as `Mirror.fetch`.
    """

    def take(reader: ObjectReader, each: RemoteObject) -> IO[bytes]:
        place = Path(tempfile.gettempdir())
        try:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - who asked for it closes it
        except OSError as error:
            raise os_error(error, place) from error
        try:
            reader.copy(each, file.fileno(), [(start, stop, 0)], place)
        except BaseException:
            file.close()
            raise
        return file

    return _ask(path, [(start, stop)], take)


def _ask(
    path: Path, ranges: Iterable[tuple[int, int]], take: Callable[[ObjectReader, RemoteObject], T]
) -> T | None:
    found = mirror.find(path)
    return None if found is None else found[0].ask_store(found[1], ranges, take)
