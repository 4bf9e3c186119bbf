"""Beam: for users of Dataflow, Flink or Spark; without these, worker processes on this machine.

A pipeline shows its outcomes at its end, and Beam's own runner hangs when a worker dies. So workers put each
outcome into a directory, and a pipeline that produces nothing for too long is abandoned. Options are Beam's,
and `results` (the directory or URL, if workers do not see this machine's files; nothing stays there) and
`stall` (seconds without any outcome).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from os import urandom
from socket import gethostname
from typing import Any

from exporter.errors import EngineFailed, ExportError, UsageError
from exporter.jobs.engines.engine_options import place, seconds, why
from exporter.jobs.engines.process import Asked
from exporter.jobs.execute import execute
from exporter.storage.output_directory import Directory, open_directory

LIBRARY = "apache_beam"

OUTCOMES, _WORKS = "outcomes", "works"
_LOOK_S = 0.2
_LOCAL = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
_ELSEWHERE = {"DataflowRunner", "FlinkRunner", "SparkRunner", "PortableRunner"}
_FEW = 256  # works in a file: the description of a pipeline must stay small
_TELL_S = 1.0  # workers collect outcomes for this time: an object in a store for each would cost 9 ms a task


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """Run works on Beam and yield their outcomes, in any order.

    Workers put outcomes into a new directory below `results`, which is removed at the end.
    `threading.excepthook` is replaced. Raised during the iteration: UsageError if workers elsewhere have no
    place for results, an option is malformed, more workers are wanted than fit into memory, or the library
    that reads stores is not installed; EngineFailed if the pipeline fails, or has no outcome for `stall`
    seconds (900); CheckpointError, PublishError or a subclass if the directory of results cannot be read or
    written.
    """
    options = dict(asked.options)
    stall_s = seconds("stall", options.pop("stall", "900"))
    results = place("results", options.pop("results", ""))
    if not results and (asked.address or options.get("runner") in _ELSEWHERE):
        raise UsageError(
            "workers elsewhere have to be told where to put what they did",
            hint="name a directory that they and this command see: --engine results=DIR|URL",
        )
    directory = open_directory(f"{results or asked.files}/{urandom(8).hex()}")
    pipeline = Pipeline(directory.place, asked, options)
    left, seen, came = set(range(put_works(directory, works))), set[str](), time.monotonic()
    try:
        pipeline.begin()
        while left:
            is_over = pipeline.is_over  # before the look: then all outcomes before the end are seen
            new = [name for name in directory.names(OUTCOMES) if name not in seen]
            for name in new:
                for number, outcome in outcomes_of(directory, name):
                    if number in left:  # a work may be done twice
                        left.remove(number)
                        yield outcome
            seen.update(new)
            came = time.monotonic() if new else came
            if not new and (is_over or time.monotonic() - came > stall_s):
                raise pipeline.failure(stall_s, results and directory.place)
            time.sleep(_LOOK_S)
    finally:
        pipeline.end()
        with suppress(ExportError):  # left-overs do no harm: the directory's name is used once
            directory.remove()


class Pipeline:
    """Runs a pipeline in a thread: on the runner in the options, at an address, or on this machine.

    `place` is the path or URL of the directory with the works; `error` is the pipeline's exception, or None.
    """

    error: BaseException | None = None

    def __init__(self, place: str, asked: Asked, options: Mapping[str, str]) -> None:
        there = {"runner": "PortableRunner", "job_endpoint": asked.address}
        flags = there if asked.address else {"runner": _LOCAL}
        flags |= options
        if flags["runner"] == _LOCAL:
            flags |= {"direct_running_mode": "multi_processing", "direct_num_workers": str(asked.cores)}
        self._running: list[Any] = []
        arguments = (place, [f"--{name}={value}" for name, value in flags.items()])
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)

    def begin(self) -> None:
        """Start to run the works in the directory, in a thread; replaces `threading.excepthook`."""
        # Beam's own runner loses workers in threads of its own, and waits.
        threading.excepthook = self._failed
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True if no more work will be done: the pipeline has ended or failed."""
        return self.error is not None or not self._thread.is_alive()

    def end(self) -> None:
        """Cancel the pipeline if it runs elsewhere; on this machine it ends with this process."""
        for each in self._running:
            if self._thread.is_alive():
                each.cancel()

    def failure(self, stall_s: float, results: str) -> EngineFailed:
        """Return the error to raise: the pipeline failed, or no outcome came for `stall_s` seconds.

        `results` is the directory of outcomes if it is on other machines, whose workers may go on; else "".
        """
        if self.error is not None:
            cause, hint = why(self.error)
            found = EngineFailed("the pipeline of Beam failed", cause=cause, hint=hint)
        else:
            found = EngineFailed(
                f"no task of the pipeline of Beam was done for {stall_s:g} s: "
                "it hangs, or a task takes longer",
                hint="run the same command again: tasks that are done are not done again; "
                "for longer tasks add --engine stall=SECONDS",
            )
        if results:
            found.hint += f"; remove what its workers may yet write below {results}"
        return found

    def _run(self, place: str, flags: list[str]) -> None:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        pipeline = beam.Pipeline(options=PipelineOptions(flags))
        files = pipeline | beam.Create(open_directory(place).names(_WORKS))
        # Reshuffled: without it Beam fuses the steps, and one worker does all works of a file.
        works = files | beam.FlatMap(partial(numbered_works, place)) | beam.Reshuffle()
        told = beam.BatchElements(max_batch_size=_FEW, target_batch_duration_secs=_TELL_S)
        _ = works | told | beam.Map(partial(do, place))
        self._running.append(pipeline.run())
        self._running[0].wait_until_finish()

    def _failed(self, found: threading.ExceptHookArgs) -> None:
        self.error = found.exc_value or found.exc_type()


def put_works(directory: Directory, works: Iterable[bytes]) -> int:
    """Write works into files of the directory, from which workers read them; return their number.

    PublishError or a subclass if that fails.
    """
    waiting, count = iter(works), 0
    while some := list(islice(waiting, _FEW)):
        directory.put(f"{_WORKS}/{count}", b"\n".join(some))  # works are JSON in one line each
        count += len(some)
    return count


def outcomes_of(directory: Directory, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number of a work, its outcome) for each line of the file `name`.

    Nothing if it does not exist. CheckpointError, PublishError or a subclass if it cannot be read.
    """
    for line in (directory.read(name) or b"").splitlines():
        number, _, outcome = line.partition(b" ")
        yield int(number), outcome


def numbered_works(place: str, name: str) -> Iterator[tuple[int, bytes]]:
    """Return an iterator over (number, work) for the works in file `name` of the directory `place`.

    Workers call it. EngineFailed if this machine does not see the file; CheckpointError, PublishError or a
    subclass if it cannot be read; UsageError if the library that reads stores is not installed here.
    """
    content = open_directory(place).read(name)
    if content is None:
        raise EngineFailed(f"a worker on {gethostname()} does not see {place}")
    return enumerate(content.split(b"\n"), int(name.rpartition("/")[2]))


def do(place: str, works: list[tuple[int, bytes]]) -> None:
    """Run numbered works and write one file of their outcomes into the directory `place`.

    Workers call it; the command sees outcomes in such files only. PublishError or a subclass if the file
    cannot be written; CheckpointError or UsageError if a store cannot be opened.
    """
    outcomes = (b"%d %s" % (number, execute(work)) for number, work in works)
    open_directory(place).put(f"{OUTCOMES}/{urandom(8).hex()}", b"\n".join(outcomes))
