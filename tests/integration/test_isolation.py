"""The short form of `make isolation`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.isolation import play


@pytest.mark.landing
def test_no_response_of_a_mapped_base_mixes_positions(tmp_path: Path) -> None:
    seen = play(tmp_path, 4_000)
    assert seen.mixed == seen.unknown == 0
    assert seen.positions > 5
