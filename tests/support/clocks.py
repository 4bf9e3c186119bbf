"""Run a command whose time of day can be set while it runs; its monotonic clock goes on, as in a real jump.

    python -m tests.support.clocks OFFSET_FILE MODULE ARGUMENT...

`time.time` and `datetime.now` are ahead of the machine's by the seconds in OFFSET_FILE. gRPC keeps the
machine's: it compares times of Python with its core's, whose clock cannot be set for one process alone.
"""

from __future__ import annotations

import runpy
import sys
import time
from datetime import datetime, timedelta, tzinfo
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

_WHO_ASK_DATETIME = {"serving.cli": ("serving.agent.fleet", "serving.agent.view", "serving.agent.journal")}
_WHO_ASK_FOR_GRPC = {"serving.cli": ("grpc._channel", "grpc._common", "grpc._utilities")}


class Clock:
    """The time of day of one process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0)

    def set(self, ahead_s: float) -> None:
        """Let it be ahead of the machine's by so much."""
        written = self.file.with_suffix(".new")
        written.write_text(f"{ahead_s}\n")
        written.replace(self.file)


def main(offset_file: str, module: str, *arguments: str) -> None:
    file, real = Path(offset_file), time.time

    def ahead_s() -> float:
        return float(file.read_text())

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=ahead_s())

    time.time = lambda: real() + ahead_s()
    for name in _WHO_ASK_DATETIME.get(module, ()):
        import_module(name).datetime = Datetime  # type: ignore[attr-defined]
    for name in _WHO_ASK_FOR_GRPC.get(module, ()):
        import_module(name).time = SimpleNamespace(**{**vars(time), "time": real})  # type: ignore[attr-defined]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
