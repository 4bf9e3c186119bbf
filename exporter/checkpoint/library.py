"""Let a library read files in a process of its own, with limits of memory and time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from exporter import errors
from exporter.checkpoint.file_range import FileRange
from exporter.errors import CheckpointError, CorruptFile, UnsafeArchive
from exporter.limited.worker import Ended, LimitedWork, NotStarted, Worker, worker


class Reading(Struct, frozen=True):
    """A process that reads a file, and its limits.

    `source` is opened for it; `reader` is its module; `kind` is the file's name in errors, as in "an HDF5
    file". It may use `memory_bytes` beyond those it needs to start, and for each object or block of values
    `cpu_seconds` of computing and `step_seconds` of elapsed time. `details` are the reader's own.
    """

    source: FileRange
    reader: str
    kind: str
    memory_bytes: int
    cpu_seconds: int
    step_seconds: float
    details: Mapping[str, Any] = {}

    @property
    def work(self) -> LimitedWork:
        """The description of the process, for `exporter.limited`."""
        place = {"kind": self.kind, "offset": self.source.offset, "size": self.source.size}
        return LimitedWork(
            program=self.reader,
            key=self.source,
            memory_bytes=self.memory_bytes,
            cpu_seconds=self.cpu_seconds,
            step_seconds=self.step_seconds,
            details=place | dict(self.details),
        )


@contextmanager
def library(reading: Reading) -> Iterator[Library]:
    """Yield a process with the file open, an idle or a new one; it is killed if the block fails.

    If the process ends during the block, the block ends in the CheckpointError that the process reported:
    UnsafeArchive at a limit of time, CorruptFile if it died. CheckpointError if no process can be started;
    CheckpointChanged if the file was replaced.
    """
    try:
        with reading.source.open() as opened, worker(reading.work, opened) as process:
            yield Library(reading, process)
    except NotStarted as error:
        raise CheckpointError(
            f"cannot read {reading.source.path}", cause=f"no process to read it can be started: {error}"
        ) from None
    except Ended as ended:
        raise _error(reading, ended) from None


class Library(Struct, frozen=True):
    """A library with files open, in a process that limits itself: see `exporter.limited.worker_process`."""

    reading: Reading
    process: Worker

    def contents(self, wanted: Mapping[str, Any]) -> Any:
        """Return the document that the reader makes of the whole file; waits for it.

        `wanted` is the reader's request. UnsafeArchive if the document is too long. If the process ends
        early, `Ended` is raised, which `library` converts into a CheckpointError at the end of its block.
        """
        line = self.process.ask({"list": wanted})
        if not line.endswith(b"\n"):
            raise UnsafeArchive(
                f"{self.reading.source.path} is refused as an {self.reading.kind}: its list has more than "
                f"{len(line)} bytes"
            )
        return json.loads(line)

    def values(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the `size` bytes of the array at `path` in the file, in blocks.

        If the process ends early, `Ended` is raised, which `library` converts into a CheckpointError.
        """
        return self.process.blocks(size, {"values": path})


def _error(reading: Reading, ended: Ended) -> CheckpointError:
    """Return the error that explains why a process that reads a file ended."""
    path, kind = reading.source.path, reading.kind
    if ended.refusal is not None:
        error: type[CheckpointError] = getattr(errors, ended.refusal["kind"])
        refusal = ended.refusal
        return error(f"{path}{refusal['message']}", cause=refusal["cause"], hint=refusal["hint"])
    if ended.limit:
        cause = f"the {kind.partition(' ')[0]} library came to no end with one object of it in {ended.limit}"
        return UnsafeArchive(f"{path} is refused as an {kind}", cause=cause)
    return CorruptFile(f"{path} is damaged as an {kind}", cause=f"the process that read it ended {ended.how}")
