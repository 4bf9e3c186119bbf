"""A log whose one table is large, and of which a few rows change with each delta."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from exporter.pipeline.incremental import export_incremental
from tests.support import logs
from tests.support.logs import Serving, Trainer, publish_base, request

WIDTH = 64


class _TrainerOfOneTable(Trainer):
    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.directory.mkdir(parents=True, exist_ok=True)
        some = self.rng.standard_normal((1 << 14, WIDTH), np.float32)
        for name, (rows, _) in logs.TABLES.items():
            self.values[f"net/{name}"] = np.resize(some, (rows, WIDTH))


def large_log(directory: Path, rows: int, deltas: int, changed: int) -> Path:
    """A model with a base of `rows` rows of 64 floats, and deltas of `changed` rows each."""
    before = dict(logs.TABLES), dict(logs.DENSE)
    try:
        for kind in (logs.TABLES, logs.DENSE):
            kind.clear()
        logs.TABLES["users"] = (rows, WIDTH)
        trainer, model = _TrainerOfOneTable(directory / "train"), directory / "model"
        trainer.save()
        publish_base(trainer, Serving(), model)
        for _ in range(deltas):
            trainer.step += 1
            ids = trainer.rng.choice(rows, changed, replace=False)
            trainer.values["net/users"][ids] += 1
            trainer.touched = {"net/users": {*ids.tolist()}}
            trainer.increment()
            export_incremental(request(trainer, model))
        return model
    finally:
        for kind, values in zip((logs.TABLES, logs.DENSE), before, strict=True):
            kind.clear()
            kind.update(values)
