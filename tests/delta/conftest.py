"""What tests of deltas begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.logs import Trainer
from tests.support.setting import followed


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Its first checkpoint is published as a base, `tmp_path / "model"`."""
    return followed(tmp_path)
