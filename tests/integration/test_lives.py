"""The short form of `python -m tests.integration.lives`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lives import play


@pytest.mark.landing
@pytest.mark.parametrize("seed", [1, 2])
def test_a_life_ends_at_the_trainers_values(seed: int, tmp_path: Path, s3: str) -> None:
    play(tmp_path, s3, seed, 25)
