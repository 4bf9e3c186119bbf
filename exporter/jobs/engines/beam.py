"""Beam: for those who have Dataflow, Flink or Spark; without one, worker processes on this machine.

A pipeline shows its outcomes at its end, and Beam's own runner hangs when a worker dies. So workers put each
outcome into a directory, and a pipeline from which nothing comes any more is abandoned. Options are Beam's,
and `results` (the directory or URL, where workers do not see our files; nothing stays there) and `stall` (s).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from os import urandom

from exporter.errors import ExportError, UsageError
from exporter.jobs.engines.beam_pipeline import OUTCOMES, Pipeline, outcomes_of, put_works
from exporter.jobs.engines.engine_options import place, seconds
from exporter.jobs.engines.process import Asked
from exporter.storage.output_directory import open_directory

LIBRARY = "apache_beam"

_LOOK_S = 0.2
_ELSEWHERE = {"DataflowRunner", "FlinkRunner", "SparkRunner", "PortableRunner"}


def run(works: Iterator[bytes], asked: Asked) -> Generator[bytes, None, None]:
    """See `ProcessEngine`."""
    options = dict(asked.options)
    stall_s = seconds("stall", options.pop("stall", "900"))
    results = place("results", options.pop("results", ""))
    if not results and (asked.address or options.get("runner") in _ELSEWHERE):
        raise UsageError(
            "workers elsewhere have to be told where to put what they did",
            hint="name a directory that they and this command see: --engine-option results=DIR|URL",
        )
    directory = open_directory(f"{results or asked.files}/{urandom(8).hex()}")
    pipeline = Pipeline(directory.place, asked, options)
    left, seen, came = set(range(put_works(directory, works))), set[str](), time.monotonic()
    try:
        pipeline.begin()
        while left:
            is_over = pipeline.is_over  # before the look: what came before the end is seen
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
        with suppress(ExportError):  # what stays does no harm: its name is used once
            directory.remove()
