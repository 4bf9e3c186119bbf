"""The pipeline of Beam's engine: files of works, each work on any worker, outcomes put into a directory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from os import urandom
from socket import gethostname
from typing import Any

from exporter.errors import EngineFailed
from exporter.jobs.engines.engine_options import why
from exporter.jobs.engines.process import Asked
from exporter.jobs.execute import execute
from exporter.storage.output_directory import Directory, open_directory

OUTCOMES, _WORKS = "outcomes", "works"
_LOCAL = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
_FEW = 256  # works in a file: the description of a pipeline must stay small
_TELL_S = 1.0  # workers report outcomes after so long: an object of a store for each would cost 9 ms a task


class Pipeline:
    """A pipeline: on the runner that the options name, that of an address, or on this machine."""

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
        """Do the works that are at its place."""
        # Beam's own runner loses workers in threads of its own, and waits.
        threading.excepthook = self._failed
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """No task will be done any more."""
        return self.error is not None or not self._thread.is_alive()

    def end(self) -> None:
        """Cancel it, if it runs elsewhere; what runs here ends with this process."""
        for each in self._running:
            if self._thread.is_alive():
                each.cancel()

    def failure(self, stall_s: float, results: str) -> EngineFailed:
        """Why it is abandoned: its error, or that nothing came for so many seconds.

        `results` is the directory of outcomes where that is on other machines, whose workers may go on.
        """
        if self.error is not None:
            cause, hint = why(self.error)
            found = EngineFailed("the pipeline of Beam failed", cause=cause, hint=hint)
        else:
            found = EngineFailed(
                f"no task of the pipeline of Beam was done for {stall_s:g} s: "
                "it hangs, or a task takes longer",
                hint="run the same command again: tasks that are done are not done again; "
                "for longer tasks add --engine-option stall=SECONDS",
            )
        if results:
            found.hint += f"; remove what its workers may yet write below {results}"
        return found

    def _run(self, place: str, flags: list[str]) -> None:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        pipeline = beam.Pipeline(options=PipelineOptions(flags))
        files = pipeline | beam.Create(open_directory(place).names(_WORKS))
        works = files | beam.FlatMap(partial(numbered_works, place)) | beam.Reshuffle()
        told = beam.BatchElements(max_batch_size=_FEW, target_batch_duration_secs=_TELL_S)
        _ = works | told | beam.Map(partial(do, place))
        self._running.append(pipeline.run())
        self._running[0].wait_until_finish()

    def _failed(self, found: threading.ExceptHookArgs) -> None:
        self.error = found.exc_value or found.exc_type()


def put_works(directory: Directory, works: Iterable[bytes]) -> int:
    """Put works where workers find them; their number."""
    waiting, count = iter(works), 0
    while some := list(islice(waiting, _FEW)):
        directory.put(f"{_WORKS}/{count}", b"\n".join(some))
        count += len(some)
    return count


def outcomes_of(directory: Directory, name: str) -> Iterator[tuple[int, bytes]]:
    """The outcomes in a file of them, each with its work's number."""
    for line in (directory.read(name) or b"").splitlines():
        number, _, outcome = line.partition(b" ")
        yield int(number), outcome


def numbered_works(place: str, name: str) -> Iterator[tuple[int, bytes]]:
    """The works in a file of them, each with its number.

    Raises:
        EngineFailed: it is not there.
    """
    content = open_directory(place).read(name)
    if content is None:
        raise EngineFailed(f"a worker on {gethostname()} does not see {place}")
    return enumerate(content.split(b"\n"), int(name.rpartition("/")[2]))


def do(place: str, works: list[tuple[int, bytes]]) -> None:
    """Do works and report them together: in a store the command waits for each file that it reads."""
    outcomes = (b"%d %s" % (number, execute(work)) for number, work in works)
    open_directory(place).put(f"{OUTCOMES}/{urandom(8).hex()}", b"\n".join(outcomes))
