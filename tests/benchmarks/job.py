"""`python -m tests.benchmarks.job MODULE:FUNCTION ARGUMENTS`: one measured piece of work, reported as JSON.

The function gets a `Timer` and the arguments as text; what is to be measured happens inside `with timer:`,
so that imports and preparations do not count.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from exporter.cli import collect_rarely
from exporter.terminal.tensorflow_import import on_import_of_tensorflow

if TYPE_CHECKING:
    from typing_extensions import Self


_BLOCK = 512  # the unit of ru_oublock: bytes of pages dirtied, as in /proc/self/io


@dataclass
class Timer:
    """Measures what happens in its block; memory is the process's peak up to the block's end."""

    seconds: float = 0.0
    peak_bytes: int = 0
    written_bytes: int = 0

    def __enter__(self) -> Self:
        self.written_bytes = -_written()
        self.seconds = -time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter()
        self.written_bytes += _written()
        self.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _written() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_oublock * _BLOCK


def main(name: str, *arguments: str) -> None:
    """Run the job and print its measurements as the last line of stdout."""
    on_import_of_tensorflow()
    collect_rarely()  # as the command does, whose pieces jobs measure
    module, _, function = name.partition(":")
    timer = Timer()
    result: Any = getattr(import_module(f"tests.benchmarks.{module}"), function)(timer, *arguments)
    print(json.dumps({**asdict(timer), "result": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
