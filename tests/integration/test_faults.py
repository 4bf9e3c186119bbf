"""The short form of `make faults`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.cluster import free_ports
from tests.integration.faults import play
from tests.support.clocks import Clock


@pytest.mark.landing
def test_every_replica_ends_as_the_trainer(tmp_path: Path) -> None:
    play(tmp_path, 1, 12, replicas=2)


def test_a_clock_that_is_set_back_ends_no_call_at_once(tmp_path: Path) -> None:
    """The agent of a world calls its servers whatever its clock says."""
    clock = Clock(tmp_path / "clock")
    clock.set(-3600)
    (port,) = free_ports(1)
    asked = ["serving.cli", "status", f"127.0.0.1:{port}", "--model-name", "m"]
    command = [sys.executable, "-m", "tests.support.clocks", clock.file, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "UNAVAILABLE" in done.stderr
    assert "DEADLINE_EXCEEDED" not in done.stderr
