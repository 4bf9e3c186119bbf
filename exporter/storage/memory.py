"""The machine's memory, as the kernel tells of it."""

from __future__ import annotations

import re
from pathlib import Path


def available_bytes() -> int | None:
    """The memory that a program can take without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) << 10
