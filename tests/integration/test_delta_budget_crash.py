"""SIGKILL while an exporter publishes under a budget: what is served is what is told, and nothing is lost."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter.publish.delta_log import read_log
from exporter.verify.log import verify_model
from tests.support.budgets import differing, export, remembered
from tests.support.drifting import drift
from tests.support.kills import count_steps, killed_at
from tests.support.logs import Serving, Trainer, Values, assert_same_bits, publish_base, served_now, values_at

KILLS = 30


def export_some(model: Path, trainer: Trainer, room: int) -> None:
    export(trainer, model, f"{room}B", max_row_age=1e6)


@dataclass
class Checked:
    """What is served after each run is what is told, wherever the run ended."""

    model: Path
    trainer: Trainer
    serving: Serving
    deltas: int = 0
    forgotten: int = 0

    def __post_init__(self) -> None:
        self.position, self.before = self.now()

    def now(self) -> tuple[int, Values]:
        log = read_log(self.model)
        return log.at.position, values_at(log)

    def check(self) -> None:
        log, (position, served) = read_log(self.model), self.now()
        if position == self.position:
            assert_same_bits(served, self.before)
            return
        trained = served_now(self.trainer, self.serving)
        held = {name: ids.tolist() for name, ids in differing(served, trained).items() if len(ids)}
        for name, ids in held.items():
            assert served[name][ids].tobytes() == self.before[name][ids].tobytes()
        left_out = log.trained.left_out
        assert (0 if left_out is None else left_out.rows) == sum(map(len, held.values()))
        known = {name: ids.tolist() for name, ids in remembered(log).items()}
        assert known in (held, {}), "what is not remembered is compared again"
        self.deltas, self.forgotten = self.deltas + 1, self.forgotten + (known != held)
        self.position, self.before = position, served


@pytest.mark.landing
@pytest.mark.parametrize("seed", range(2))
def test_an_exporter_that_is_killed_loses_nothing_that_waits(tmp_path: Path, seed: int) -> None:
    rng, serving, model = np.random.default_rng(seed), Serving(parts=1 + seed), tmp_path / "model"
    trainer = Trainer(tmp_path / "train", parts=2, seed=seed)
    trainer.save()
    publish_base(trainer, serving, model)
    drift(trainer, 0.5)
    trainer.increment()
    used = export(trainer, model, "1B").budgeted
    assert used is not None
    room, kills, checked = used.due + 60, 0, Checked(model, trainer, serving)
    while kills < KILLS:
        drift(trainer, 0.5, rows=6)
        trainer.increment()
        steps = count_steps(export_some, model, trainer, room)
        checked.check()
        for point in rng.integers(1, steps, 2).tolist():
            drift(trainer, 0.5, rows=6)
            trainer.save() if rng.random() < 0.2 else trainer.increment()
            kills += killed_at(point, export_some, model, trainer, room) == -signal.SIGKILL
            checked.check()
    drift(trainer, 0.5, rows=6)
    trainer.increment()
    for point in range(steps // 2, 2 * steps, 3):  # a delta is there, and what waits is not written yet
        killed = shutil.copytree(model, tmp_path / str(point), symlinks=True)
        assert killed_at(point, export_some, killed, trainer, room) == -signal.SIGKILL
        if read_log(killed).at.position > checked.position and not remembered(read_log(killed)):
            break
    checked.model = model = killed
    checked.check()
    assert checked.forgotten
    drift(trainer, 0.5, rows=6)
    trainer.increment()
    export_some(model, trainer, room)
    checked.check()
    assert read_log(model).trained.left_out is not None
    done = export(trainer, model)
    assert done.left_out is None and not verify_model(model).damage
    assert_same_bits(values_at(read_log(model)), served_now(trainer, serving))
