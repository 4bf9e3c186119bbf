"""Retention removes versions and deltas while a command reads them: at whatever step, that is no damage."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from exporter.pipeline import log_maintenance
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import list_deltas, read_log
from exporter.publish.retention import Keep, retire, retire_deltas
from exporter.publish.versions import version_dirs
from tests.support.budget import THOROUGH
from tests.support.commands import Ran, export_model
from tests.support.forks import FORKS
from tests.support.kills import ended, run
from tests.support.setting import Setting, followed

LATER = 1e12
EVERY = 1 if THOROUGH else 17
COMMANDS = {
    "verify": ("verify", "model", "--bytes", "--json"),
    "doctor": ("doctor", "model", "--json"),
    "history": ("history", "model", "--json"),
    "inspect": ("inspect", "model", "--json"),
}


@pytest.fixture(scope="module")
def origin() -> Iterator[Path]:
    """Two bases, and deltas of which most are merged into one that is beside them."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None) as directory:
        here = Path(directory)
        followed(here / "origin", range(20, 80, 10), published=70)
        model = Setting(here / "origin").model
        rebase(model)
        log_maintenance.merge(model, 10)
        yield here


def retention(model: Path) -> None:
    """Everything that nobody needs goes, long after it was published."""
    retire_deltas(read_log(model), now=LATER, rollback_positions=1)
    assert retire(version_dirs(model), keep=Keep(1), now=LATER, grace_seconds=0).removed


def reads(directory: Path, sender: Connection, point: int, arguments: tuple[str, ...]) -> None:
    """A command, and retention as it looks at something below a directory for the time `point`."""
    count, is_at_work = 0, False
    model = directory / "model"

    def look(event: str, audited: tuple[Any, ...]) -> None:
        nonlocal count, is_at_work
        if is_at_work or event not in ("open", "os.scandir", "os.listdir") or str(model) not in str(audited):
            return
        count += 1
        if count == point:
            is_at_work = True
            retention(model)
            is_at_work = False

    sys.addaudithook(look)
    ran = export_model(*(model if word == "model" else word for word in arguments))
    sender.send((count, ran))


def ran_beside(directory: Path, point: int, arguments: tuple[str, ...]) -> tuple[int, Ran]:
    receiver, sender = FORKS.Pipe(duplex=False)
    assert ended(run(reads, directory, sender, point, arguments)) == 0
    count, ran = receiver.recv()
    return int(count), ran


@pytest.mark.landing
@pytest.mark.parametrize("name", COMMANDS)
def test_what_retention_removes_meanwhile_is_no_damage(origin: Path, name: str) -> None:
    shutil.copytree(origin / "origin", here := origin / name)
    steps, ran = ran_beside(here, 0, COMMANDS[name])
    assert ran.code == 0, ran.err
    kept = list_deltas(Setting(here).log)
    for point in range(1, steps + 1, EVERY):
        shutil.rmtree(here)
        shutil.copytree(origin / "origin", here)
        _, ran = ran_beside(here, point, COMMANDS[name])
        assert ran.code == 0, f"{point} of {steps}: {ran.err}\n{ran.out}"
        assert len(list_deltas(Setting(here).log)) < len(kept), "retention came"
        if name == "doctor":
            assert not [one for one in ran.document["findings"] if one["level"] == "wrong"], ran.out
        if name == "history":
            assert not [one for one in ran.document["events"] if one["what"] == "damaged"], ran.out
