"""Run a plan of tasks on an engine: receipts come in the tasks' order, finished tasks are not repeated.

A job that is kept has a directory named by the digest of its plan, with each output and, written after it,
its receipt. Running the same command again finds them, on any engine and any machine, and so resumes a killed
job; a plan that differs in anything is another job. The command that planned the job reads the receipts and
publishes: workers publish nothing.

Several commands may run one plan at once: their tasks write the same. The last one removes the directory. A
directory that no command has used for a week is removed by a later job of the same model.

    <model>/.jobs/<plan>/.lock      on a file system: locked (flock) by each command that uses the directory
    <model>/.jobs/<plan>/driver     in a store, which has no locks: the last command that began to use it
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Protocol

import msgspec
from msgspec import Struct, field

from exporter.errors import (
    CorruptFile,
    EngineFailed,
    ExportError,
    NothingChanged,
    UsageError,
    VerificationError,
)
from exporter.jobs.engines import Engine
from exporter.jobs.execute import decode, encode, execute, kept_receipt
from exporter.jobs.task import Receipt, Task
from exporter.options import DEFAULT_TASK_BYTES, EngineName, Jobs
from exporter.storage import mirror
from exporter.storage.files import close_quietly, open_lock, remove_tree, still_at, try_lock, writing
from exporter.storage.layout import JOBS_DIRECTORY, LOCK_FILE, RECEIPTS_DIRECTORY
from exporter.storage.objects import ObjectWriter
from exporter.storage.output_directory import Directory, open_directory
from exporter.storage.url import Url
from exporter.storage.waiting import workers
from exporter.terminal.progress import NoProgress, Progress
from exporter.version import __version__

ABANDONED_SECONDS = 7 * 86400.0
"""A job that no command has used for this time is removed: a week, so that a weekend does not end it."""

_DRIVER = "driver"
_POLL_SECONDS = 0.02
_PLAN = re.compile(r"[0-9a-f]{32}", re.ASCII)  # as `Job` cuts a plan's digest
_OWNER = secrets.token_hex(8)
_LOOKS = 16  # receipts read at a time
_AHEAD = 2  # works submitted for each thread: enough to keep it busy


class LocalEngine:
    """Runs works by threads of this process; 0 `workers` means one for each processor."""

    # Threads suffice: they wait for disks and networks, and compute outside the GIL. The other engines need a
    # library, and run in a process of their own: see `exporter.jobs.engines.process`.

    name = "local"

    def __init__(self, workers: int = 0) -> None:
        self._workers = workers or len(os.sched_getaffinity(0))

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        """Run the works by threads and yield their outcomes, in the order in which they end.

        Twice as many works as threads are read ahead. Closing the iterator drops works that have not begun,
        and waits for the others. An exception that is not an ExportError ends the iteration.
        """
        pending: set[Future[bytes]] = set()
        with workers(self._workers, "jobs") as pool:
            for work in works:
                pending.add(pool.submit(execute, work))
                if len(pending) > _AHEAD * self._workers:
                    yield from _finished(pending)
            while pending:
                yield from _finished(pending)


def _finished(pending: set[Future[bytes]]) -> Iterator[bytes]:
    """Wait for at least one of `pending`; remove all that are done, and yield their results in any order.

    Raises the exception of one that failed.
    """
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    pending -= done
    for each in done:
        yield each.result()


def choose_engine(
    name: str, workers: int = 0, address: str = "", options: Mapping[str, str] | None = None
) -> Engine:
    """Return the engine with this name; nothing is started yet.

    `workers` is their number, 0 for as many as there are processors; `address` is the address of a cluster,
    "" for this machine; `options` are the engine's own, which are checked when it runs. UsageError for an
    unknown name, an engine whose library is not installed, and an address or options for `local`.
    """
    if name not in [*EngineName]:
        raise UsageError(f"there is no engine {name!r}", hint=f"one of {', '.join(EngineName)}")
    if name != EngineName.LOCAL:
        from exporter.jobs.engines.process import Asked, ProcessEngine

        return ProcessEngine(Asked(name, workers, address, options or {}))
    if address or options:
        raise UsageError("the engine local takes neither an address nor options", hint="add --engine ray")
    return LocalEngine(workers)


class Runner(Struct, frozen=True):
    """Runs jobs on an engine, and keeps them below the path or URL `kept` ("": they are not kept).

    `task_bytes` is the approximate size of a task. With `resumes`, a kept job is continued: its receipts are
    used, which are not signed, and which others may have written.
    """

    engine: Engine = field(default_factory=LocalEngine)
    task_bytes: int = DEFAULT_TASK_BYTES
    kept: str = ""
    resumes: bool = True

    @classmethod
    def of(cls, jobs: Jobs, model: Path | None = None, *, resumes: bool = True) -> Runner:
        """Return the runner that a user asked for by `jobs`.

        Jobs are kept in the directory that the user named. Without one, jobs that write a model are kept
        below `model` if an engine is named or the model is in a store; other jobs are not kept. `model` is
        None for a job that writes no model. Without `resumes` a kept job begins anew. UsageError for an
        unknown engine, an engine whose library is not installed, and an address or options for `local`.
        """
        name = jobs.engine or EngineName.LOCAL
        engine = choose_engine(name, jobs.workers, jobs.address, jobs.settings)
        if jobs.directory or model is None:
            return cls(engine, jobs.task_bytes, jobs.directory, resumes)
        place = mirror.shown(os.fspath(model))
        is_kept = jobs.engine is not None or place != os.fspath(model)
        return cls(engine, jobs.task_bytes, f"{place}/{JOBS_DIRECTORY}" if is_kept else "", resumes)

    @property
    def sees_our_files(self) -> bool:
        """True if this process runs the tasks."""
        return isinstance(self.engine, LocalEngine)

    def job(self, tasks: Sequence[Task], scratch: str = "") -> Job:
        """Return a new `Job` for the tasks, or the kept one to resume.

        If the runner keeps no jobs, outputs go to `scratch`. `scratch` is a directory, which is made; "" if
        the tasks have no outputs. Waits while another command removes the kept job. PublishError and
        subclasses if a directory cannot be made, CheckpointError or UsageError if a store cannot be opened.
        """
        return Job(self, tasks, scratch)


class Job:
    """The tasks of a plan on an engine, and the directory of their outputs; a context manager.

    If the block raises, a job that is kept stays for the same command, run again. Otherwise it is removed,
    unless another command uses it or its outputs are still to be copied; so it is after NothingChanged, and
    after CorruptFile or VerificationError, when no output can be trusted. Running tasks are cancelled.
    """

    def __init__(self, runner: Runner, tasks: Sequence[Task], scratch: str) -> None:
        # The caller may replace them by the same tasks with other inputs: files that a command makes have
        # another path each time, which would change the plan's digest.
        self.tasks = tasks
        self._runner = runner
        self._used: UsedJob | None = None
        self._receipts: Generator[Receipt, None, None] | None = None
        self._read_until_stored: Path | None = None
        self._place = scratch
        if self.is_kept:
            self._place = f"{runner.kept}/{plan_digest(tasks)[:32]}"
            self._used = use(self._place)
        elif scratch:
            with writing(Path(scratch)):
                Path(scratch).mkdir(parents=True, exist_ok=True)
        self.directory = open_directory(self._place or gettempdir())

    @property
    def is_kept(self) -> bool:
        """True if the job's directory outlives a command that fails."""
        return bool(self._runner.kept and self.tasks)

    def receipts(
        self, progress: Progress | None = None, tasks: Sequence[Task] | None = None
    ) -> Generator[Receipt, None, None]:
        """Return an iterator that runs tasks, by default all, and yields their receipts in the tasks' order.

        Closing the iterator cancels the tasks that are left. `progress` advances by each task's bytes. Raised
        during the iteration: EngineFailed if the engine ends early, OSError if its process cannot be started;
        a task's failure as its own class of ExportError; CheckpointError, PublishError or a subclass if kept
        receipts cannot be read.
        """
        # A plan in which tasks read others' outputs is run in several calls.
        self._receipts = self._run(self.tasks if tasks is None else tasks, progress or NoProgress())
        return self._receipts

    def keep_until_stored(self, path: Path) -> None:
        """Leave the job's removal to the upload of `path`, if both are in stores; otherwise do nothing."""
        # The upload reads the job's outputs: if it is killed, the next command resumes the job.
        if mirror.is_remote(path) and self.directory.is_in_store:
            self._read_until_stored = path

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._receipts is not None:
            self._receipts.close()
        used, self._used = self._used, None
        if used is None:
            return
        if kind is None and self._read_until_stored is not None:
            mirror.remove_after_upload(self._read_until_stored, self.directory.place)
            used.leave()
        elif not self.directory.is_stood_for and (kind is None or issubclass(kind, _OVER)):
            used.remove()
            remove_abandoned(self._runner.kept)
        else:
            used.leave()

    def _run(self, tasks: Sequence[Task], progress: Progress) -> Generator[Receipt, None, None]:
        """Yield the receipts of `tasks`, in their order: kept ones at once, others when the engine has them.

        `progress` advances by each task's bytes. EngineFailed if the engine ends early, OSError if its
        process cannot be started; a task's failure as its own class of ExportError; CheckpointError,
        PublishError or a subclass if kept receipts cannot be read.
        """
        keep, place = self.is_kept and self._runner.resumes, self._place and self.directory.place
        found = _known(tasks, self.directory) if keep else {}
        left = [task for task in tasks if task.name not in found]
        progress.advance(sum(task.bytes_ for task in tasks if task.name in found))
        sizes = {task.name: task.bytes_ for task in left}
        works = (encode(task, place, keep=keep) for task in left)
        with closing(self._runner.engine.run(works)) as outcomes:
            for task in tasks:
                while task.name not in found:
                    if (outcome := next(outcomes, None)) is None:
                        raise EngineFailed(f"{self._runner.engine.name} ended before all tasks were done")
                    receipt = decode(outcome).settle()
                    if receipt.task in sizes:  # a task may be done twice
                        progress.advance(sizes.pop(receipt.task))
                        found[receipt.task] = receipt
                yield found.pop(task.name)


_OVER = (NothingChanged, CorruptFile, VerificationError)  # after these nobody resumes a job

LOCAL = Runner()
"""Threads of this process; nothing is kept."""


def plan_digest(tasks: Sequence[Task]) -> str:
    """Return the SHA-256, in hex, of a plan.

    It changes with the inputs, options, order and division of the tasks, and with this program's version.
    """
    # Another version of this program may write other bytes for the same task.
    digest = hashlib.sha256(f"{__version__}\n".encode())
    for task in tasks:
        digest.update(task.operation.encode() + b" " + msgspec.json.encode(task) + b"\n")
    return digest.hexdigest()


def _known(tasks: Sequence[Task], place: Directory) -> dict[str, Receipt]:
    """Return the kept receipts of these tasks, by the tasks' names, if their outputs are unchanged.

    CheckpointError or PublishError, or a subclass, if the directory cannot be read.
    """
    names = set(place.names(RECEIPTS_DIRECTORY))
    begun = [task.name for task in tasks if f"{RECEIPTS_DIRECTORY}/{task.name}.json" in names]
    with workers(_LOOKS, "receipts") as pool:
        found = pool.map(lambda name: kept_receipt(place, name), begun)
        return {receipt.task: receipt for receipt in found if receipt is not None}


# --- directories of kept jobs ------------------------------------------------------------------------------


class UsedJob(Protocol):
    """A job's directory while this command uses it."""

    def leave(self) -> None:
        """End the use, and its lock; the directory stays for a command that resumes the job."""

    def remove(self) -> None:
        """End the use, and remove the directory unless another command uses it; that command will remove it.

        Errors of the removal are ignored.
        """


def use(place: str) -> UsedJob:
    """Begin to use the job's directory at a path or URL, created if need be; return the use, to be ended.

    A local directory is locked (shared), after waiting while another command removes it; in a store an object
    with this command's name is written. PublishError or a subclass if it cannot be made; CheckpointError or
    UsageError if the store cannot be opened.
    """
    url = Url.parse(place)
    return _LocalJob(Path(place)) if url is None else StoredJob(place)


class _LocalJob:
    """A job's directory in a file system, locked (shared) while it is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            while (lock := _locked(path)) is None:
                time.sleep(_POLL_SECONDS)  # it is being removed
            os.utime(path)  # the week of `_is_abandoned` begins anew
        self._lock = lock

    def leave(self) -> None:
        close_quietly(self._lock)

    def remove(self) -> None:
        if try_lock(self._lock):
            remove_tree(self._path)
        self.leave()


def _locked(path: Path) -> int | None:
    """Create the directory and return a descriptor that holds its lock, shared.

    None if another command is removing the directory. OSError if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # the directory of all jobs was removed meanwhile, being empty
        path.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_lock(path / LOCK_FILE)
    except FileNotFoundError:
        return None
    # The command that removes the directory holds the lock and unlinks the file: a lock on an unlinked file
    # protects nothing.
    if try_lock(lock, shared=True) and still_at(lock, path / LOCK_FILE):
        return lock
    close_quietly(lock)
    return None


class StoredJob:
    """A job's directory in a store, which has no locks: the command that began last removes it.

    The name of this command is written there unless `is_begun`: PublishError if that fails. UsageError or
    CheckpointError if the store cannot be opened.
    """

    def __init__(self, place: str, *, is_begun: bool = False) -> None:
        self._directory = open_directory(place)
        if not is_begun:
            self._directory.put(_DRIVER, _me())

    def leave(self) -> None:
        """End the use; the directory stays, and nothing is written."""

    def remove(self) -> None:
        """Remove the directory unless another command began to use it later.

        Failures of the store are ignored.
        """
        with suppress(ExportError):  # then it is abandoned
            if self._directory.read(_DRIVER) in (_me(), None):
                self._directory.remove()


def _me() -> bytes:
    """Return a name of this thread of this process, unique among all machines."""
    # With the process number, because a fork copies `_OWNER`; with the thread's, as two may use one job.
    return f"{_OWNER}-{os.getpid()}-{threading.get_ident()}".encode()


# --- abandoned jobs ----------------------------------------------------------------------------------------


def abandoned_jobs(kept: Path) -> Iterator[Path]:
    """Yield the directories of jobs below `kept` that no command uses or has used for a week, sorted.

    Directories that cannot be looked at are left out.
    """
    for path in _directories(kept):
        with suppress(OSError):
            if _is_abandoned(path, None) and _is_free(path, remove=False):
                yield path


def remove_abandoned_jobs(kept: Path, now: float | None = None) -> None:
    """Remove `abandoned_jobs`, ignoring errors, and `kept` if it is a model's `.jobs` and empty then.

    `now` is in seconds since 1970; None: the present.
    """
    for path in _directories(kept):
        with suppress(OSError):
            if _is_abandoned(path, now):
                _is_free(path, remove=True)
    if kept.name == JOBS_DIRECTORY:
        with suppress(OSError):
            kept.rmdir()


def remove_abandoned(kept: str, now: float | None = None) -> None:
    """Remove abandoned jobs below a path or a URL, ignoring errors.

    In a store the first error ends the removal. `now` is in seconds since 1970; None: the present. UsageError
    if the URL is malformed.
    """
    if (url := Url.parse(kept)) is None:
        remove_abandoned_jobs(Path(kept), now)
        return
    since = (time.time() if now is None else now) - ABANDONED_SECONDS
    with suppress(ExportError):
        store = ObjectWriter(url)
        for path in store.directories(url.path):
            if _PLAN.fullmatch(path.rpartition("/")[2]):
                store.delete(*_abandoned(store, path, since))


def _abandoned(store: ObjectWriter, path: str, since: float) -> list[str]:
    """Return the keys of all objects of the job at `path`; empty if one was changed at `since` or later.

    `since` is in seconds since 1970. Raises CheckpointError and subclasses if the store cannot be read.
    """
    driver = store.look(f"{path}/{_DRIVER}")  # first: a job in use needs no listing
    if driver is not None and driver.modified >= since:
        return []
    found = [*store.below(path)]
    return [] if any(each.modified >= since for each in found) else [each.key for each in found]


def _directories(kept: Path) -> list[Path]:
    """Return the directories of jobs below `kept`, sorted by name; none if `kept` cannot be read."""
    with suppress(OSError):
        return sorted(path for path in kept.iterdir() if _PLAN.fullmatch(path.name) and not path.is_symlink())
    return []


def _is_abandoned(path: Path, now: float | None) -> bool:
    """True if nothing was made in a job's directory for a week before `now`.

    OSError if it cannot be looked at. `now` is in seconds since 1970; None: the present.
    """
    newest = path.stat().st_mtime  # of a directory: when an entry was last created or removed in it
    with suppress(FileNotFoundError):
        newest = max(newest, (path / RECEIPTS_DIRECTORY).stat().st_mtime)
    return (time.time() if now is None else now) - newest > ABANDONED_SECONDS


def _is_free(path: Path, *, remove: bool) -> bool:
    """Return True if no command uses a job's directory; with `remove`, remove the directory in this case.

    True also if it has no lock file. OSError if the lock file cannot be opened.
    """
    try:
        lock = open_lock(path / LOCK_FILE, flags=0)
    except FileNotFoundError:  # made by a worker after the end, or by an older program
        lock = None
    try:
        is_free = lock is None or try_lock(lock)
        if is_free and remove:
            remove_tree(path)
        return is_free
    finally:
        if lock is not None:
            close_quietly(lock)
