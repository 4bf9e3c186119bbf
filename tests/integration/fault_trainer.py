"""A trainer as a process of its own: it goes on where it was, until a file says that training is over.

    python -m tests.integration.fault_trainer DIRECTORY SEED PACE_SECONDS UNTIL_FILE FINAL_NPZ ILL_FILE

An increment every PACE_SECONDS, a full checkpoint now and then. At the end the values that it has are in
FINAL_NPZ, and on disk as an increment. While ILL_FILE is there, some rows are NaN.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np

from tests.support.numpy_trainer import NumpyTrainer

_FULL_EVERY = 25


def main(directory: str, seed: str, pace_s: str, until: str, final: str, ill: str) -> None:
    dice = random.Random(seed)
    trainer = NumpyTrainer(Path(directory), int(seed))
    # Some are restarted from the last full checkpoint alone: they fork.
    trainer.begin(restores=dice.random() < 0.7, saver_first=dice.random() < 0.5, is_live=False)
    while not Path(until).exists():
        time.sleep(float(pace_s))
        trainer.train(dice.randint(1, 6))
        set_health(trainer, dice, is_ill=Path(ill).exists())
        trainer.increment()
        if dice.randrange(_FULL_EVERY) == 0:
            trainer.save()
    set_health(trainer, dice, is_ill=False)
    assert trainer.session is not None
    variables = trainer.session.variables
    trainer.end()
    with Path(final).with_suffix(".tmp").open("wb") as file:
        np.savez(file, **variables.values)
    Path(file.name).replace(final)


def set_health(trainer: NumpyTrainer, dice: random.Random, *, is_ill: bool) -> None:
    """Train some rows to NaN, unless there are any; or all of those to numbers."""
    assert trainer.session is not None
    variables = trainer.session.variables
    users = variables.values["net/users"].copy()
    rows = np.flatnonzero(~np.isfinite(users).all(axis=1))
    if is_ill == bool(len(rows)):
        return
    if is_ill:
        rows = np.array(dice.sample(range(len(users)), 3))
    users[rows] = np.nan if is_ill else trainer.normal((len(rows), users.shape[1]))
    variables.values["net/users"] = users
    variables.touched["net/users"].update(rows.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
