"""Trainers whose tables move a little, and how far what is served lies behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.delta.format import ChangeKind
from exporter.errors import ExportError
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import ExportedDelta
from exporter.publish.delta_log import LogDelta, read_log
from tests.support.logs import (
    TABLES,
    Serving,
    Trainer,
    Values,
    assert_same_bits,
    publish_base,
    request,
    served_now,
    values_at,
)
from tests.support.publishing import delta_of


def drift(trainer: Trainer, size: float, rows: int = 4) -> None:
    """Move some rows of every table a little."""
    trainer.step += 1
    for name, value in trainer.values.items():
        if name.split("/")[1] in TABLES:
            ids = trainer.rng.choice(len(value), rows, replace=False)
            value = value.copy()
            value[ids] += trainer.rng.normal(size=(rows, value.shape[1])).astype(np.float32) * size
            trainer.values[name] = value
            trainer.touched.setdefault(name, set()).update(ids.tolist())


def export(trainer: Trainer, model: Path, bound: float = 0.0) -> ExportedDelta:
    return delta_of(replace(request(trainer, model), min_change=bound))


def behind(served: Values, trained: Values) -> dict[str, np.ndarray]:
    """The distance of each row that is not the same bit for bit; 0 of the others."""
    found = {}
    for name, value in trained.items():
        rows = value.reshape(len(value) if value.ndim else 1, -1)
        old = served[name].reshape(rows.shape)
        same = np.array([a.tobytes() == b.tobytes() for a, b in zip(old, rows, strict=True)])
        moved = np.linalg.norm(rows.astype(np.float64) - old.astype(np.float64), axis=1)
        found[name] = np.where(same, 0.0, moved)
    return found


@dataclass
class World:
    directory: Path
    serving: Serving
    seed: int
    visible: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.directory / "model"
        self.trainer = Trainer(self.directory / "train", parts=2, seed=self.seed)
        self.trainer.save()
        self.visible = served_now(self.trainer, self.serving)
        publish_base(self.trainer, self.serving, self.model)

    def do(self, what: str, rng: np.random.Generator) -> None:
        log = read_log(self.model)
        match what:
            case "train":
                self.trainer.train()
            case "drift":
                drift(self.trainer, float(rng.choice([0.001, 0.01, 0.05])))
            case "save":
                self.trainer.save(is_equal=not self.trainer.touched)
                self.visible = served_now(self.trainer, self.serving)
            case "increment":
                before = self.trainer.parent
                self.trainer.increment()
                if self.trainer.parent != before:
                    self.visible = served_now(self.trainer, self.serving)
            case "export":
                self.export(float(rng.choice([0.0, 0.02, 0.1])))
            case "merge":
                log_maintenance.merge(self.model)
            case "tidy":
                log_maintenance.tidy(self.model, clock=lambda: 1e12)
            case "rollback" if log.deltas:
                before_ = values_at(log, log.newest.start) if isinstance(log.newest, LogDelta) else None
                if before_ is not None:
                    assert isinstance(log.newest, LogDelta)
                    log_maintenance.rollback(self.model, log.newest.start)
                    assert_same_bits(values_at(read_log(self.model)), before_)
            case "resume" if log.hold.read() is not None:
                log_maintenance.resume(self.model)

    def export(self, bound: float) -> None:
        done = export(self.trainer, self.model, bound)
        log = read_log(self.model)
        dense = {v.name for v in log.schema.variables if v.kind is ChangeKind.DENSE}
        distances = behind(values_at(log), self.visible)
        for name, found in distances.items():
            assert not found.any() if bound == 0 or name in dense else (found < bound).all(), name
        if bound == 0:
            assert_same_bits(values_at(log), self.visible)
            assert done.left_out is None
        elif done.left_out is not None:
            assert done.left_out.bound <= bound
            assert done.left_out.largest == pytest.approx(max(map(np.max, distances.values())))
            assert done.left_out.rows >= sum(np.count_nonzero(found) for found in distances.values())
        else:
            assert_same_bits(values_at(log), self.visible)
        assert export(self.trainer, self.model, bound).published is None, "nothing to do"


@dataclass
class RememberingWorld(World):
    """A trainer, a log, and what every position of the log served when it was published."""

    history: dict[int, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.note()

    def note(self) -> None:
        log = read_log(self.model)
        self.history.setdefault(log.at.position, values_at(log))

    def do(self, what: str, rng: np.random.Generator) -> None:
        if what != "rollback":
            super().do(what, rng)
            return
        newest = read_log(self.model).at.position
        older = [position for position in self.history if position < newest]
        if older:
            self.take_back(int(rng.choice(older)))

    def take_back(self, to: int) -> None:
        try:
            values_at(read_log(self.model), to)
        except ExportError:
            return
        log_maintenance.rollback(self.model, to)
        assert_same_bits(values_at(read_log(self.model)), self.history[to])

    def check(self) -> None:
        """Every position that can be reached serves what it served when it was published."""
        log = read_log(self.model)
        for position, values in self.history.items():
            try:
                found = values_at(log, position)
            except ExportError:
                continue  # retention
            assert_same_bits(found, values)


servings = st.builds(
    Serving,
    parts=st.integers(1, 3),
    cast=st.booleans(),
    dense=st.sampled_from([frozenset(), frozenset({"items"})]),
)
