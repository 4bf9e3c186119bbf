"""`serve-model run` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEADLINE_SECONDS = 60.0


@contextmanager
def running(base: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [
        sys.executable,
        "-m",
        "serving.cli",
        "run",
        str(base),
        "--port",
        "0",
        "--poll-seconds",
        "0.05",
    ]
    process = subprocess.Popen(
        [*arguments, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """What it still said on stdout, and all it said on stderr."""
    process.send_signal(number)
    out, talk = process.communicate(timeout=DEADLINE_SECONDS)
    assert "Traceback" not in talk
    return out, talk
