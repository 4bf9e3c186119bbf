"""What a command has published, or a trainer has written, survives a power cut from the moment it is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.storage.files import sync
from tests.support.durability import Disk, watched_disk
from tests.support.logs import Serving, Trainer, publish_base, request
from tests.support.publishing import publish

STEPS: list[Callable[[Trainer, Path], object]] = [
    lambda trainer, model: publish_base(trainer, Serving(), model),
    lambda trainer, model: (trainer.train(), trainer.increment()),
    lambda trainer, model: export_incremental(request(trainer, model)),
    lambda trainer, model: log_maintenance.rollback(model, 10),
    lambda trainer, model: log_maintenance.resume(model),
    lambda trainer, model: log_maintenance.merge(model),
    lambda trainer, model: rebase(model),
]


def assert_survives(disk: Disk, what: object) -> None:
    assert disk.synced, what
    assert disk.early == [], what
    assert [*disk.pending.values()] == [], what


def test_each_step_of_a_log_is_on_disk_when_it_is_seen_and_when_it_ends(tmp_path: Path) -> None:
    trainer, model = Trainer(tmp_path / "train"), tmp_path / "models" / "m"
    trainer.save()
    for number, step in enumerate(STEPS):
        with watched_disk() as disk:
            step(trainer, model)
        assert_survives(disk, f"step {number}")
    assert read_log(model).deltas


def test_a_version_is_on_disk_when_it_is_seen(tmp_path: Path) -> None:
    with watched_disk() as disk:
        publish(tmp_path / "models" / "m", step=3)
        publish(tmp_path / "models" / "m", step=4, keep=1)
    assert_survives(disk, "versions")


@pytest.mark.parametrize("lost", ["fsync", "directory"])
def test_what_is_not_on_disk_is_noticed(tmp_path: Path, lost: str) -> None:
    """A rename of what nobody synced, and one that is not synced itself."""
    with watched_disk() as disk:
        (tmp_path / "a").write_bytes(b"a")
        if lost == "directory":
            sync(tmp_path / "a")
        (tmp_path / "a").rename(tmp_path / "b")
    assert len(disk.early) == (lost == "fsync")
    assert len(disk.pending) == 1
