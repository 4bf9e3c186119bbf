"""What a server frees in one update serves the next; what the environment says goes first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Four tensors of 6 MiB, as the rows of a delta: page faults of the third round.
PROGRAM = """
import ctypes, resource
from serving.run_command import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
keep_freed_memory()
for _ in range(3):
    before = faults()
    taken = [libc.malloc(6 << 20) for _ in range(4)]
    for each in taken:
        ctypes.memset(each, 1, 6 << 20)
    for each in taken:
        libc.free(each)
print(faults() - before)
"""


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
    ids=["default", "other tunables", "given", "given as a tunable"],
)
def test_an_update_takes_the_memory_that_the_last_one_freed(given: dict[str, str], is_ours: bool) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | given, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 1000) is is_ours
