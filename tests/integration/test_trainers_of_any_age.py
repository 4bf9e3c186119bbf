"""The trainer's side on TensorFlows and Pythons that people train on, each in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_environments import Trainings, python_of

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]

LAZY = ("sgd", "adagrad", "ftrl", "rmsprop", "momentum", "adadelta", "proximal", "proximal_sgd")
"""Optimizers whose operations name the rows that they write."""

LOOPS: dict[str, dict[str, Any]] = {
    "monitored": {},
    "monitored, another hook saves last": {"saver_last": True},
    "supervisor": {"kind": "supervisor"},
    "loop": {"kind": "loop"},
    "estimator": {"kind": "estimator"},
    "train_and_evaluate": {"kind": "train_and_evaluate"},
    "estimator, another hook saves last": {"kind": "estimator", "saver_last": True},
}


@pytest.mark.parametrize("tensorflow", ["1.12.3", "1.15.5", "2.8.4"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_kind_of_loop(tmp_path: Path, tensorflow: str, loop: str) -> None:
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad", "sgd"], **LOOPS[loop])
    trainings.run(20)
    with trainings.served() as server:
        trainings.run(47)
        trainings.assert_exact()
        trainings.assert_followed(server)
