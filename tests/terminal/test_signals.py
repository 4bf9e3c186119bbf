"""Sleeping until a signal."""

from __future__ import annotations

import signal
from pathlib import Path

from exporter.terminal import sleep_until_a_signal


def test_a_sleep_leaves_no_descriptors() -> None:
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(len([*Path("/proc/self/fd").iterdir()])))
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            sleep_until_a_signal()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == seen[:1] * 3
    assert signal.set_wakeup_fd(-1) == -1
