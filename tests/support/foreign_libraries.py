"""SavedModels of libraries with operations of their own (see tests/fixtures/foreign_ops/make.py)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures/foreign_ops"
ANSWERS: dict[str, Any] = json.loads((FIXTURES / "answers.json").read_text())
"""What each library answered, with its inputs and versions."""


def unpack(name: str, directory: Path) -> Path:
    """Lay a SavedModel out as its library left it."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / name
