"""The machine's memory, as the kernel reports it."""

from __future__ import annotations

import re
from pathlib import Path


def available_bytes() -> int | None:
    """Return the memory in bytes that a program can use without swapping; None if it is not reported."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) << 10  # what the kernel calls kB has 1,024 bytes
