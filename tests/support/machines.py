"""Machines with a trainer and a model, which push, pull, are killed and race."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import (
    ForeignLineage,
    PositionMoved,
)
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.publish.staging import Staging
from exporter.storage.layout import HEAD_FILE
from exporter.storage.objects import ObjectWriter
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.support.commands import export_model
from tests.support.logs import Trainer, request
from tests.support.object_stores import Bucket
from tests.support.publishers import Killed, killed_at
from tests.support.setting import Setting, followed

OURS = {".lock", ".turn", ".pull", ".pushed", ".identity", HEAD_FILE}


class Machine(Setting):
    """A base at 10 and deltas to 20 and 30, as one machine has published them."""

    trainer: Trainer

    def go_on(self, step: int) -> None:
        self.trainer.train()
        self.trainer.step = step
        self.trainer.increment()
        export_incremental(request(self.trainer, self.model))


def machine_in(directory: Path) -> Machine:
    found = Machine(directory)
    object.__setattr__(found, "trainer", followed(found.directory, (20, 30), published=30))
    return found


def pushed(model: Path, url: str, **options: Any) -> None:
    push(plan_push(model, url, **options))


def files(root: Path) -> dict[str, bytes]:
    """All that readers may see of a local model."""
    found = (path for path in root.rglob("*") if path.is_file())
    names = {path.relative_to(root).as_posix(): path.read_bytes() for path in found}
    return {name: content for name, content in names.items() if not {*name.split("/")} & {*OURS, ".state"}}


def stored(bucket: Bucket) -> dict[str, bytes]:
    base = "models/ranker/"
    names = {key.removeprefix(base): content for key, content in bucket.keys(base).items()}
    return {name: content for name, content in names.items() if name != HEAD_FILE}


def take_back(copy: Path, to: int) -> None:
    """A canary that approved this position of a copy rejects what follows."""
    with Staging(copy) as staging:
        read_log(copy).hold.put(to, staging, canary=True)
    assert export_model("rollback", copy, "--to", to, "--if-canary", "--reason", "canary: NaN").code == 0


def grow_old(copy: Path) -> None:
    """What is in a copy came an hour ago."""
    for manifest in copy.rglob("manifest.json"):
        os.utime(manifest, (time.time() - 3600,) * 2)


def survives_kills(machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push is killed before its first request, its second, ..., until none is left."""
    pushed(machine.model, url)
    machine.go_on(40)
    rounds = 0
    while True:
        with killed_at(monkeypatch, ObjectWriter, ("upload", "create", "replace", "put"), rounds) as calls:
            try:
                pushed(machine.model, url)
                break
            except Killed:
                pass
        done = pull(url, tmp_path / f"after-{rounds}")
        assert done.position == 30 or any("manifest.json" in call for call in calls)
        rounds += 1
    assert rounds > 4
    assert pull(url, tmp_path / "last").position == 40
    assert files(tmp_path / "last") == files(machine.model)


def race(machine: Machine, url: str, tmp_path: Path, steps: Iterable[int]) -> None:
    """Each of two publishes its own next delta; in every round exactly one of them is in the store."""
    pushed(machine.model, url)
    models = [machine.model, tmp_path / "other"]
    pull(url, models[1])
    for step in steps:
        machine.trainer.train()
        machine.trainer.step = step
        machine.trainer.increment()
        for model in models:
            export_incremental(request(machine.trainer, model))
        outcomes = _at_once(lambda model: pushed(model, url), models)
        winners = [model for model, error in zip(models, outcomes, strict=True) if error is None]
        assert len(winners) == 1, outcomes
        assert all(isinstance(error, PositionMoved | ForeignLineage) for error in outcomes if error)
        loser = models[1 - models.index(winners[0])]
        shutil.rmtree(loser)
        assert pull(url, loser).position == step
        assert files(loser) == files(winners[0])


def _at_once(work: Callable[[Path], None], models: list[Path]) -> list[BaseException | None]:
    outcomes: list[BaseException | None] = [None] * len(models)

    def run(number: int) -> None:
        try:
            work(models[number])
        except Exception as error:  # noqa: BLE001  to be looked at by the test
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
