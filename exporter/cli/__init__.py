"""The command `export-model`: its arguments and its output. How a model is made is elsewhere."""

from __future__ import annotations

import atexit
import gc
import os

from exporter.terminal import interrupt_at_once


def main() -> None:
    """Run the command line `export-model`, and end the process with its exit code (SystemExit)."""
    interrupt_at_once()  # before the imports: Ctrl-C in one would print a traceback
    collect_rarely()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread for each core
    from exporter.cli import app

    app.main()


def collect_rarely() -> None:
    """Make garbage collections of this process rare: a command makes many objects and few cycles.

    At exit there is none at all.
    """
    gc.set_threshold(100_000, 20, 20)
    atexit.register(gc.freeze)  # without it, a last collection at exit takes 15 to 35 ms
