"""What most tests of a log begin with: a base, deltas on it, and a trainer that may be further."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import list_deltas, log_path
from tests.support.logs import Serving, Trainer, publish_base, request

FIRST = 10
"""The position of the base, and the trainer's first step."""


@dataclass(frozen=True)
class Setting:
    """A trainer's files and the model that they are published under, in one directory."""

    directory: Path

    @property
    def train(self) -> Path:
        return self.directory / "train"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def base(self) -> Path:
        return self.model / str(FIRST)

    @property
    def log(self) -> Path:
        return log_path(self.model, FIRST)

    @property
    def deltas(self) -> list[Path]:
        return [delta.path for delta in list_deltas(self.log)]


def followed(
    directory: Path,
    steps: Iterable[int] = (),
    *,
    published: int = FIRST,
    serving: Serving = Serving(),  # noqa: B008  it is frozen
    parts: int = 1,
    seed: int = 0,
    by_saving: bool = False,
    name: str = "model",
) -> Trainer:
    """A base at `FIRST`, and the trainer at each of `steps`: of those to `published` there are deltas.

    It writes an increment at each, or a full checkpoint. The model is the directory's `name`.
    """
    trainer, model = Trainer(directory / "train", parts=parts, seed=seed), directory / name
    trainer.save()
    publish_base(trainer, serving, model)
    for step in steps:
        trainer.train()
        trainer.step = step
        trainer.save() if by_saving else trainer.increment()
        if step <= published:
            export_incremental(request(trainer, model))
    return trainer
