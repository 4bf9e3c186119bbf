"""A store that is a directory, and a copy of a model whose store has merged a base since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.options import Jobs
from exporter.pipeline.rebase import rebase
from exporter.transfer.pull import pull
from tests.support.copy_lives import URL
from tests.support.directory_store import reached
from tests.support.http_proxy import Traffic
from tests.support.machines import Machine, pushed


@pytest.fixture
def traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """The requests to `URL`, whose store is a directory."""
    with reached(tmp_path / "store", monkeypatch) as found:
        yield found


@pytest.fixture
def jobs() -> Jobs:
    """How the store's base is merged: in one process; a file that wants tasks has its own."""
    return Jobs()


@pytest.fixture
def copy(machine: Machine, tmp_path: Path, traffic: Traffic, jobs: Jobs) -> Path:
    """A copy at 30; the store has a base that `jobs` merged there."""
    pushed(machine.model, URL)
    pull(URL, tmp_path / "copy")
    assert rebase(machine.model, jobs=jobs) is not None
    pushed(machine.model, URL)
    return tmp_path / "copy"
