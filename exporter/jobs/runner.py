"""Run a plan of tasks on an engine: receipts in the order of the tasks, and none done twice across commands.

A job that is kept has a directory named by the digest of its plan, with each output and, written after it,
its receipt. The same command finds them there, whatever engine it runs on and wherever; a plan that differs
in anything begins anew. Whoever planned the job reads the receipts and publishes: workers publish nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct, field

from exporter.errors import EngineFailed
from exporter.jobs.engines import Engine
from exporter.jobs.engines.local import LocalEngine
from exporter.jobs.execute import decode, encode, kept_receipt
from exporter.jobs.task import Receipt, Task
from exporter.layout import JOBS_DIRECTORY, RECEIPTS_DIRECTORY
from exporter.options import DEFAULT_TASK_BYTES, EngineName, Jobs
from exporter.progress import NoProgress, Progress
from exporter.storage import mirror
from exporter.storage.output_directory import open_directory

_FORMAT = 1
_LOOKS = 16  # receipts that are asked for at a time


class Runner(Struct, frozen=True):
    """How jobs are run: the engine, bytes of a task, and where jobs are kept (a path or URL; "": nowhere)."""

    engine: Engine = field(default_factory=LocalEngine)
    task_bytes: int = DEFAULT_TASK_BYTES
    kept: str = ""

    @classmethod
    def of(cls, jobs: Jobs, model: Path | None = None) -> Runner:
        """The runner that a user asked for.

        Jobs that write a model are kept below it, if an engine is named or the model is in a store.

        Raises:
            UsageError: the engine is not installed, or does not know an option.
        """
        from exporter.jobs.engines.choose import choose_engine  # engines are processes, which few ask for

        name = jobs.engine or EngineName.LOCAL
        engine = choose_engine(name, jobs.workers, jobs.address, jobs.settings)
        if jobs.directory or model is None:
            return cls(engine, jobs.task_bytes, jobs.directory)
        place = mirror.shown(os.fspath(model))
        is_kept = jobs.engine is not None or place != os.fspath(model)
        return cls(engine, jobs.task_bytes, f"{place}/{JOBS_DIRECTORY}" if is_kept else "")

    @property
    def sees_our_files(self) -> bool:
        """True if tasks are done by this process."""
        return isinstance(self.engine, LocalEngine)

    def directory_of(self, tasks: Sequence[Task]) -> str:
        """The directory of a kept job; "" if jobs are not kept."""
        return self.kept and f"{self.kept}/{plan_digest(tasks)[:32]}"

    def run(
        self, tasks: Sequence[Task], directory: str = "", progress: Progress | None = None
    ) -> Generator[Receipt, None, None]:
        """Receipts in the order of the tasks, whose outputs go to `directory`; kept if the runner keeps jobs.

        Closing the iterator cancels what has not begun.

        Raises:
            ExportError: the first error that a task ended with, whatever it was.
        """
        progress = progress or NoProgress()
        keep = bool(self.kept)
        found = _known(tasks, directory) if keep else {}
        left = [task for task in tasks if task.name not in found]
        progress.advance(sum(task.bytes_ for task in tasks if task.name in found))
        sizes = {task.name: task.bytes_ for task in left}
        with closing(self.engine.run(encode(task, directory, keep=keep) for task in left)) as outcomes:
            for task in tasks:
                while task.name not in found:
                    receipt = self._next(outcomes)
                    if receipt.task in sizes:  # a task may be done twice
                        progress.advance(sizes.pop(receipt.task))
                        found[receipt.task] = receipt
                yield found.pop(task.name)

    def _next(self, outcomes: Iterator[bytes]) -> Receipt:
        outcome = next(outcomes, None)
        if outcome is None:
            raise EngineFailed(f"{self.engine.name} ended before all tasks were done")
        return decode(outcome).settle()


LOCAL = Runner()
"""Threads of this process; nothing is kept."""


def plan_digest(tasks: Sequence[Task]) -> str:
    """Lower-case SHA-256 of a plan: equal for equal inputs, options and divisions alone."""
    digest = hashlib.sha256(b"%d\n" % _FORMAT)
    for task in tasks:
        digest.update(task.operation.encode() + b" " + msgspec.json.encode(task) + b"\n")
    return digest.hexdigest()


def _known(tasks: Sequence[Task], directory: str) -> dict[str, Receipt]:
    """The receipts of a job that was begun before."""
    place = open_directory(directory)
    names = set(place.names(RECEIPTS_DIRECTORY))
    begun = [task.name for task in tasks if f"{RECEIPTS_DIRECTORY}/{task.name}.json" in names]
    with ThreadPoolExecutor(_LOOKS, "receipts") as pool:
        found = pool.map(lambda name: kept_receipt(place, name), begun)
        return {receipt.task: receipt for receipt in found if receipt is not None}
