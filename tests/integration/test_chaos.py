"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chaos import play


@pytest.mark.landing
@pytest.mark.parametrize("seed", [1, 2, 13])
def test_a_world_of_many_happenings(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed, 70)
