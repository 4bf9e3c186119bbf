from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import once_a_run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint directory that examples/ranker/train.py leaves. Shared by all tests: copy before changing."""

    def train(directory: Path) -> None:
        command = [sys.executable, ROOT / "examples/ranker/train.py", "--out", directory, "--steps", "20"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    return once_a_run(tmp_path_factory, "ranker", train)
