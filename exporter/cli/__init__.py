"""The command `export-model`: what is typed, and what is printed. Nothing here knows how a model is made."""

from __future__ import annotations

import atexit
import gc
import os

from exporter.terminal import interrupt_at_once


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    interrupt_at_once()
    collect_rarely()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread for each core
    from exporter.cli import app

    app.main()


def collect_rarely() -> None:
    """Let the garbage collector run rarely: a command makes many objects and few cycles."""
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)  # it looks for cycles once more at its end: 15 to 35 ms
