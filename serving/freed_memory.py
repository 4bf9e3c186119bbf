"""Settings by which a server's C library keeps memory that TensorFlow has freed."""

from __future__ import annotations

import ctypes
import os

# Both are set: setting one stops glibc from adapting the other. Before 2.35 glibc accepts 32 MiB at most.
THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": 64 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}
"""Bytes, by the environment variables that set them; `deploy/` sets the same for other servers."""

_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # M_..._THRESHOLD of <malloc.h>


def keep_freed_memory() -> None:
    """Let each arena of glibc keep 64 MiB of free memory, unless the environment sets a limit of its own.

    Blocks of less than 32 MiB then come from arenas. Changes the whole process; without glibc nothing
    happens. An update reads its delta into new memory. If the kernel has to clear that each time, 100,000
    rows of 64 floats take 40 ms instead of 24 (TensorFlow 2.21, tables in memory), on cores that predictions
    need.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    is_set = any(name in os.environ for name in THRESHOLDS)
    if set_option is not None and not is_set and "_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        for name, size in THRESHOLDS.items():
            set_option(_OPTIONS[name], size)
