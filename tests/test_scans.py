"""A command reads a log once: how often each lists the model's directory, its logs and the log itself.

A log may have thousands of deltas, and the directory may be on a network file system or stand for a store.
The directory of all logs is listed once more for each position that is chosen: no other log may have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.pipeline import incremental
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.log_maintenance import merge, resume, rollback
from exporter.publish.delta_log import read_log
from exporter.publish.model import Model
from exporter.storage.layout import DELTAS_DIRECTORY
from tests.support.logs import Trainer, request
from tests.support.scans import counted_scans
from tests.support.setting import followed


@pytest.fixture(autouse=True)
def _no_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports look for what can be removed every ten seconds; here none does."""
    monkeypatch.setattr(incremental, "_REMOVE_EVERY_S", 1 << 60)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer, and a log of two deltas of its states at `tmp_path / "model"`."""
    trainer = followed(tmp_path)
    for _ in range(2):
        publish_next(trainer, tmp_path / "model")
    return trainer


def publish_next(trainer: Trainer, model: Path) -> None:
    trainer.train()
    trainer.increment()
    export_incremental(request(trainer, model))


def scans(model: Path, command: Callable[[], object]) -> tuple[int, int, int]:
    """How often a command lists the model's directory, that of its logs, and the log's own."""
    log = read_log(model).path
    with counted_scans() as count:
        command()
    return count[model], count[model / DELTAS_DIRECTORY], count[log]


def test_a_delta_lists_its_log_before_the_work_and_under_the_lock(trainer: Trainer, tmp_path: Path) -> None:
    """Once more the model's directory is listed for what killed processes left there."""
    model = tmp_path / "model"
    assert scans(model, lambda: publish_next(trainer, model)) == (3, 2, 2)
    assert scans(model, lambda: export_incremental(request(trainer, model))) == (1, 0, 1), "nothing to do"


def test_merging_while_tidying_lists_nothing_twice(trainer: Trainer, tmp_path: Path) -> None:
    """A delta after which neighbours are merged: the merger is published under the lock, too."""
    model = tmp_path / "model"
    while len(read_log(model).deltas) < 7:
        publish_next(trainer, model)
    before = len(read_log(model).deltas)
    assert scans(model, lambda: publish_next(trainer, model)) == (5, 2, 3)
    assert len(read_log(model).deltas) == before + 2, "it and a merger"


def test_a_merge_lists_its_log_before_the_work_and_under_the_lock(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert scans(model, lambda: merge(model)) == (3, 0, 2)


def test_a_rollback_lists_its_log_under_the_lock_alone(trainer: Trainer, tmp_path: Path) -> None:
    """The log, and the directory of all logs, are listed once more for what killed rollbacks left in them."""
    model = tmp_path / "model"
    before = read_log(model).deltas[-1].start
    assert scans(model, lambda: rollback(model, before, dry_run=True)) == (1, 1, 1)
    assert scans(model, lambda: rollback(model, before)) == (3, 2, 2)
    assert scans(model, lambda: resume(model)) == (3, 3, 2), "and of logs that have ended, for their holds"


def test_a_history_lists_each_directory_once(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert scans(model, lambda: Model.history(model)) == (1, 1, 1)
