"""Tasks that take the digests of files."""

from __future__ import annotations

from typing import ClassVar

from exporter.jobs.task import Range, Receipt, Task
from exporter.storage.files import file_digest
from exporter.storage.output_directory import Directory


class Digest(Task, frozen=True, kw_only=True):
    """A task that reads a file; it has no output. The tag of its receipt is the file's SHA-256."""

    operation: ClassVar[str] = "digest"

    def run(self, directory: Directory) -> Receipt:
        """Read the file; return a receipt whose tag is its SHA-256 (lower-case hex).

        CheckpointChanged if the file is not as planned, CheckpointError or OSError if it cannot be read,
        PublishError or DiskFull if an object cannot be copied into `directory.scratch`, UsageError if the
        library that reads stores is not installed on this machine.
        """
        (source,) = self.inputs
        with source.file((Range(0, 0, source.size),), directory.scratch) as path:
            return Receipt(self.name, tag=file_digest(path))
