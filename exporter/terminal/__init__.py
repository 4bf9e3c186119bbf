"""The terminal, for both commands: parameters, what is printed, errors and exit codes, completion."""

from __future__ import annotations

import signal


def interrupt_at_once() -> None:
    """Until a command begins there is nothing to unwind: Ctrl-C ends the process, and prints no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a script's `command &` ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_by_exception() -> None:
    """From now on Ctrl-C and SIGTERM are a KeyboardInterrupt, so that what was begun is unwound."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
