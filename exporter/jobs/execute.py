"""Run one task: the function that engines call, in this process or on another machine.

A task and its outcome cross an engine as JSON bytes, so an engine need not understand either. An error with a
name is an outcome, too: repeating the task would end in the same error. An engine itself repeats a task only
if its worker died.
"""

from __future__ import annotations

import os
from importlib import import_module
from socket import gethostname
from tempfile import gettempdir
from typing import Any

import msgspec
from msgspec import Struct

from exporter import errors
from exporter.errors import ExportError, UsageError
from exporter.jobs.task import Receipt, Task
from exporter.storage.layout import RECEIPTS_DIRECTORY
from exporter.storage.output_directory import Directory, open_directory
from exporter.storage.url import Url
from exporter.version import __version__
from exporter.wire.json_documents import decoder

OPERATIONS = {
    "merge": "exporter.delta.newest_rows:Merge",
    "compare": "exporter.delta.compare_rows:Compare",
    "checksum": "exporter.verify.version_files:Checksum",
    "digest": "exporter.jobs.task:Digest",
    "move": "exporter.bundle.variables:Move",
    "partition": "exporter.tables.place_keys:Partition",
    "place": "exporter.tables.place_keys:PlaceKeys",
}
"""The class of each operation's tasks. They are in the rooms that plan them, which import this one."""


class Work(Struct, frozen=True):
    """A task to run, the directory of its output ("": it has none), and whether its receipt is kept there."""

    operation: str
    task: msgspec.Raw
    directory: str
    keep: bool
    version: str = __version__


class TaskFailure(Struct, frozen=True):
    """An error of `exporter.errors` by its class, and the machine that it happened on ("": not known).

    `errno` is that of the OSError that caused it, None without one: see `is_unread`.
    """

    error: str
    message: str
    cause: str
    hint: str
    host: str = ""
    errno: int | None = None


class Outcome(Struct, frozen=True):
    """A receipt, or the failure that prevented it."""

    receipt: Receipt | None = None
    failure: TaskFailure | None = None

    def settle(self) -> Receipt:
        """Return the receipt; without one, raise the failure as its own class of ExportError.

        The message names the task's machine if it is not this one.
        """
        if self.receipt is not None:
            return self.receipt
        assert self.failure is not None
        found: Any = getattr(errors, self.failure.error, ExportError)
        where = "" if self.failure.host in ("", gethostname()) else f"on {self.failure.host}: "
        error = found(f"{where}{self.failure.message}", cause=self.failure.cause, hint=self.failure.hint)
        raise error from (None if self.failure.errno is None else OSError(self.failure.errno, error.cause))


def encode(task: Task, directory: str, *, keep: bool) -> bytes:
    """Return a task, encoded for `execute`, with the directory of its output.

    `directory` is a path or URL, "" if the task has no output. With `keep`, its receipt is kept there, too.
    """
    return msgspec.json.encode(Work(task.operation, msgspec.Raw(msgspec.json.encode(task)), directory, keep))


def execute(work: bytes) -> bytes:
    """Run an encoded task unless its receipt is kept already, and return the encoded `Outcome`.

    An ExportError is an outcome, too: also for a worker of another version, or one that does not see the
    directory. Other exceptions pass.
    """
    try:
        asked = decoder(Work).decode(work)
        if asked.version != __version__:
            raise UsageError(
                f"this worker has export-model {__version__}, the command {asked.version}",
                hint="install the same version on every worker",
            )
        module, _, name = OPERATIONS[asked.operation].partition(":")
        task: Task = decoder(getattr(import_module(module), name)).decode(asked.task)
        _require_seen(asked.directory)
        directory = open_directory(asked.directory or gettempdir())
        return msgspec.json.encode(Outcome(_do(task, directory, asked.keep)))
    except ExportError as error:
        return failed(error)


def failed(error: ExportError) -> bytes:
    """Return an error encoded as an `Outcome`, with the name of this machine."""
    number = getattr(error.__cause__, "errno", None)
    failed = TaskFailure(type(error).__name__, error.message, error.cause, error.hint, gethostname(), number)
    return msgspec.json.encode(Outcome(failure=failed))


def decode(outcome: bytes) -> Outcome:
    """Return the `Outcome` that `execute` encoded; ValueError for other bytes."""
    found: Outcome = decoder(Outcome).decode(outcome)
    return found


def kept_receipt(directory: Directory, name: str) -> Receipt | None:
    """Return the kept receipt of the task `name`.

    None if the receipt is missing or damaged, or the task's output has another size or tag. CheckpointError
    or PublishError, or a subclass, if the directory cannot be read.
    """
    content = directory.read(f"{RECEIPTS_DIRECTORY}/{name}.json")
    if content is None:
        return None
    try:
        receipt: Receipt = decoder(Receipt).decode(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    is_there = not receipt.written or directory.look(name) == (receipt.written, receipt.tag)
    return receipt if is_there and receipt.task == name else None


def _require_seen(place: str) -> None:
    """Raise UsageError if the command's directory does not exist here: this is another machine.

    URLs and "" (no directory) pass.
    """
    if place and Url.parse(place) is None and not os.path.isdir(place):  # noqa: PTH112 - False on any error
        raise UsageError(
            f"a worker does not see {place}",
            hint="name a directory that all workers see, of a shared file system or in an object store: "
            "--job-dir DIR|URL",
        )


def _do(task: Task, directory: Directory, keep: bool) -> Receipt:
    """Run a task and return its receipt; with `keep`, write the receipt into `directory`.

    If `keep` and the directory has a valid receipt, return that and run nothing. The task's own errors pass;
    CheckpointError or PublishError, or a subclass, if the directory cannot be read or written.
    """
    if keep and (done := kept_receipt(directory, task.name)) is not None:
        return done
    receipt = task.run(directory)
    if keep:
        # After the output: a worker that dies in between leaves a task to be repeated, never a receipt
        # without its output.
        directory.put(f"{RECEIPTS_DIRECTORY}/{task.name}.json", msgspec.json.encode(receipt))
    return receipt
