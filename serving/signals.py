"""Signals that end the commands which run until they are stopped."""

from __future__ import annotations

import os
import signal
from types import FrameType

from exporter.errors import Exit


def stop_on_sigterm() -> None:
    """Let SIGTERM, which stops a container, unwind the command and end it with exit code 0.

    A second SIGTERM ends the process at once.
    """
    signal.signal(signal.SIGTERM, _stop)


def sleep_until_a_signal() -> None:
    """Sleep until a signal's handler raises, even if the signal came just before or to another thread.

    The interpreter writes to the pipe for each signal, in whichever thread: so no signal is lost between a
    check and the sleep, and the main thread wakes up to run the handler.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    os.read(reader, 1)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(int(Exit.DONE))
