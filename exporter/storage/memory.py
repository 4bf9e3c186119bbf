"""The machine's memory, as the kernel reports it."""

from __future__ import annotations

import re
from pathlib import Path


def available_bytes() -> int | None:
    """The memory that a program can use without swapping, in bytes; None if the system does not report it."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) << 10
