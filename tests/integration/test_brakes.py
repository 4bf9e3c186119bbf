"""The short form of `python -m tests.integration.brakes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.brakes import PLACES, brakes


@pytest.mark.landing
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", PLACES)
def test_a_person_goes_before_watches(place: str, tmp_path: Path) -> None:
    times = brakes(tmp_path, place, 6)
    print(f"{place}: {times}")
    assert len(times.effects) == 6
