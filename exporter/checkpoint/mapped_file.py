"""Maps of files that keep no descriptor.

Each map of Python's `mmap` keeps one open, and a process may have 1,024 of them, where a checkpoint has more
tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_FAILED = ctypes.c_void_p(-1).value


def map_range(fd: int, offset: int, size: int) -> Array:
    """A range of an open file's bytes as a read-only map, which lives as long as an array of it.

    Raises:
        ValueError: the file is shorter.
        OSError: the system has no memory for another map.
    """
    if size == 0:  # nothing to map, and the system refuses
        return np.empty(0, np.uint8)
    if offset + size > os.fstat(fd).st_size:
        raise ValueError("the range ends behind the file")
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    pages = _Pages(fd, start, offset + size - start)
    return np.asarray(pages)[offset - start :]


class _Pages:
    """Mapped pages, which numpy keeps for as long as it has a view of them."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._unmap, self._address, self._size = _libc().munmap, address, size
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),  # to be read only
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._unmap(self._address, self._size)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    pages, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [pages, size, number, number, number, ctypes.c_int64]
    library.mmap.restype = pages
    library.munmap.argtypes = [pages, size]
    return library
