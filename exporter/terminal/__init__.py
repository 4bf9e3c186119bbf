"""The terminal, for both programs: parameters, printing, errors and exit codes, signals."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType


class Leave(SystemExit):
    """The end of a command that has printed everything; any other SystemExit comes from a library."""


def interrupt_at_once() -> None:
    """Let Ctrl-C (SIGINT) end the process at once and without a traceback, from now on.

    Before a command nothing needs unwinding.

    A process that ignores SIGINT goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a script's `command &` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


ONE_STOP_SECONDS = 5.0
"""A SIGTERM within this time of another is the same request: systemd sends it to all processes of a unit, and
the process of `--config` to those that it started."""


def interrupt_by_exception() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread, so that work in progress is unwound.

    A second SIGTERM within `ONE_STOP_SECONDS` is ignored. A process that ignores SIGINT goes on ignoring it.
    ValueError if this is called outside the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    last: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_same = bool(last) and now - last[0] < ONE_STOP_SECONDS
        if not is_same:
            last[:] = [now]
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, interrupt)


def stop_on_sigterm() -> None:
    """Let SIGTERM, which stops a container, raise `Leave` in the main thread, with exit code 0.

    So the command is unwound. A second SIGTERM ends the process at once. ValueError if this is called outside
    the main thread.
    """
    signal.signal(signal.SIGTERM, _stop)


def sleep_until_a_signal() -> None:
    """Sleep until a signal arrives, and return once its handler does; an error of the handler propagates.

    Call it in the main thread only: ValueError elsewhere. Meanwhile it replaces the interpreter's wakeup
    descriptor.

    The interpreter writes to the pipe for each signal, in any thread: so no signal is lost between a check
    and the sleep, and the main thread wakes up to run the handler.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as `set_wakeup_fd` requires
    try:
        before = signal.set_wakeup_fd(writer)
        try:
            os.read(reader, 1)
        finally:
            signal.set_wakeup_fd(before)  # before the pipe closes: its number may soon be another file's
    finally:
        os.close(reader)
        os.close(writer)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from exporter.errors import Exit  # late: Ctrl-C is set before anything else is imported

    raise Leave(int(Exit.DONE))
