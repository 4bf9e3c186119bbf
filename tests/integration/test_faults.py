"""The short form of `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.faults import play


@pytest.mark.landing
def test_every_replica_ends_as_the_trainer(tmp_path: Path) -> None:
    play(tmp_path, 1, 12, replicas=2)
