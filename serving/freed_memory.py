"""How the C library of a server keeps memory that TensorFlow has freed."""

from __future__ import annotations

import ctypes
import os

_SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

# Of <malloc.h>, with its numbers. Both are given: to set one turns off that glibc adapts the other.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (
    (-1, 64 << 20),
    (-3, 32 << 20),
)  # 32 MiB is the most that glibc < 2.35 takes


def keep_freed_memory() -> None:
    """Let each arena of glibc keep 64 MiB that are free, unless the environment says how much.

    An update reads its delta into new memory. If the kernel has to clear that anew each time, 100,000 rows of
    64 floats take 40 ms instead of 24 (TensorFlow 2.21, tables in memory), on cores that predictions need.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    is_set = any(name in os.environ for name in _SET_BY_USERS)
    if set_option is not None and not is_set and "_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            set_option(*parameter)
