"""Work that several test processes share: done by the first that needs it, once a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once_a_run(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of this test run, filled by `make` in whichever process comes first."""
    own = factory.getbasetemp()
    # pytest-xdist gives each worker a directory of its own inside that of the run.
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with directory.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not directory.exists():
            attempt = factory.mktemp(f"{name}-attempt")
            make(attempt)
            attempt.rename(directory)
    return directory
