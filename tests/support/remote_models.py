"""A trainer whose increments go to a model, at a path or in a store."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import Ran, export_model
from tests.support.logs import Serving, Trainer
from tests.support.setting import followed


def went_on(trainer: Trainer, step: int) -> None:
    """Train to a step, and leave an increment."""
    trainer.train()
    trainer.step = step
    trainer.increment()


def incr(trainer: Trainer, url: str, *options: object) -> Ran:
    """Export what is new to the model at a URL."""
    return export_model("--ckpt-dir", trainer.directory, "--out", url, "--incr", "--json", *options)


def published_log(directory: Path, *steps: int) -> Path:
    """A model with a base at 10, in two parts whose tables are cast, and deltas to these steps."""
    trainer, model = followed(directory, serving=Serving(parts=2, cast=True)), directory / "model"
    for step in steps:
        went_on(trainer, step)
        assert incr(trainer, str(model)).code == 0
    return model
