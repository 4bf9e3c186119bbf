"""End commands that go on until they are told to stop."""

from __future__ import annotations

import os
import signal
from types import FrameType

from exporter.errors import Exit


def stop_on_sigterm() -> None:
    """Let SIGTERM unwind the command and end it with exit code 0: that is how a container is stopped.

    A second one does not wait until everything has ended in good order.
    """
    signal.signal(signal.SIGTERM, _stop)


def sleep_until_a_signal() -> None:
    """Sleep until a signal's handler raises, even if the signal came just before or to another thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    os.read(reader, 1)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(int(Exit.DONE))
