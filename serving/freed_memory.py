"""How the C library of a server keeps memory that TensorFlow has freed."""

from __future__ import annotations

import ctypes
import os

# Both are given: to set one turns off that glibc adapts the other. Glibc before 2.35 takes 32 MiB at most.
THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": 64 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}
"""Bytes, by the environment variables that set them; `deploy/` gives the same to other servers."""

_OPTIONS = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # M_..._THRESHOLD of <malloc.h>


def keep_freed_memory() -> None:
    """Let each arena of glibc keep 64 MiB that are free, unless the environment says how much.

    An update reads its delta into new memory. If the kernel has to clear that anew each time, 100,000 rows of
    64 floats take 40 ms instead of 24 (TensorFlow 2.21, tables in memory), on cores that predictions need.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    is_set = any(name in os.environ for name in THRESHOLDS)
    if set_option is not None and not is_set and "_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        for name, size in THRESHOLDS.items():
            set_option(_OPTIONS[name], size)
