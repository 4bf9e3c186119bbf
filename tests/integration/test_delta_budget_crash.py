"""SIGKILL while an exporter publishes under a budget: what is served is what is told, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaEntry
from exporter.verify.log import verify_model
from tests.support.budgets import differing, export, remembered
from tests.support.drifting import drift
from tests.support.kills import count_steps, killed_at
from tests.support.logs import Serving, Trainer, assert_same_bits, publish_base, served_now, values_at

KILLS = 30


def export_some(model: Path, trainer: Trainer, room: int) -> None:
    export(trainer, model, f"{room}B", max_row_age=1e6)


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
    room, kills, forgotten, steps, positions = used.due + 60, 0, 0, 0, {read_log(model).at.position}
    while kills < KILLS:
        drift(trainer, 0.5, rows=6)
        trainer.save(is_equal=False) if rng.random() < 0.2 else trainer.increment()
        trained, before = served_now(trainer, serving), values_at(read_log(model))
        if not steps:
            steps = count_steps(export_some, model, trainer, room)
        elif killed_at(int(rng.integers(1, steps + 1)), export_some, model, trainer, room) == -signal.SIGKILL:
            kills += 1
        log = read_log(model)
        served = values_at(log)
        if log.at.position in positions or not isinstance(log.newest.entry, DeltaEntry):
            assert_same_bits(served, before)
            continue
        positions.add(log.at.position)
        held = {name: ids.tolist() for name, ids in differing(served, trained).items() if len(ids)}
        for name, ids in held.items():
            assert served[name][ids].tobytes() == before[name][ids].tobytes()
        left_out = log.trained.left_out
        assert (0 if left_out is None else left_out.rows) == sum(map(len, held.values()))
        known = {name: ids.tolist() for name, ids in remembered(log).items()}
        assert known in (held, {}), "what is remembered is what is held back, or is compared again"
        forgotten += bool(held) and not known
    drift(trainer, 0.5, rows=6)
    trainer.increment()
    export_some(model, trainer, room)
    log = read_log(model)
    held_rows = sum(map(len, differing(values_at(log), served_now(trainer, serving)).values()))
    assert log.trained.left_out is not None and log.trained.left_out.rows == held_rows
    done = export(trainer, model)
    assert done.left_out is None and verify_model(model)
    assert_same_bits(values_at(read_log(model)), served_now(trainer, serving))
    assert len(positions) > 5 and forgotten, "it is killed before a delta is there, and just after"
