"""A trainer whose increments go to a model in a store."""

from __future__ import annotations

from tests.support.commands import Ran, export_model
from tests.support.logs import Trainer


def went_on(trainer: Trainer, step: int) -> None:
    """Train to a step, and leave an increment."""
    trainer.train()
    trainer.step = step
    trainer.increment()


def incr(trainer: Trainer, url: str, *options: object) -> Ran:
    """Export what is new to the model at a URL."""
    return export_model("--ckpt-dir", trainer.directory, "--out", url, "--incr", "--json", *options)
