"""The trainer's side on TensorFlows and Pythons that people train on, each in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_environments import BY_NAME, TrainerCluster, Trainings, python_of

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


@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("tensorflow", ["1.12.3", "1.15.5", "2.8.4"])
def test_every_optimizer_that_names_its_rows(tmp_path: Path, tensorflow: str, resource: bool) -> None:
    optimizers = (*LAZY, *_contrib(tensorflow))
    trainings = Trainings(python_of(tensorflow), tmp_path, optimizers, resource=resource)
    trainings.run(20)
    trainings.run(47)
    assert trainings.assert_exact() > 1
    assert " may change any row " not in trainings.log.read_text()


def _contrib(tensorflow: str) -> tuple[str, ...]:
    return ("lazy_adam",) if tensorflow.startswith("1.") else ()


@pytest.mark.parametrize("tensorflow", BY_NAME)
def test_a_cluster(tmp_path: Path, tensorflow: str) -> None:
    """Two parameter servers, a chief and a worker; the model that follows them compares nothing."""
    number = list(BY_NAME).index(tensorflow)
    optimizers = ("adagrad", *LAZY[2 + number : 3 + number], *_contrib(tensorflow))
    partitioner = ("fixed", "min_max", "axis_size")[number % 3]
    trainings = Trainings(python_of(tensorflow), tmp_path, optimizers, partitioner=partitioner)
    with TrainerCluster(trainings, steps=20, filters=True) as cluster:
        cluster.wait()
    with trainings.served() as server:
        with TrainerCluster(trainings, steps=60, filters=True) as cluster:
            cluster.wait()
        assert trainings.assert_exact() > 1
        trainings.assert_followed(server)
    assert " may change any row " not in trainings.log.read_text()


@pytest.mark.parametrize("job", [{"optimizers": ["adam"]}, {"averages": True}, {"sync": True}], ids=str)
@pytest.mark.parametrize("tensorflow", ["1.15.5", "2.8.4"])
def test_what_touches_every_row_and_synchronous_workers(
    tmp_path: Path, tensorflow: str, job: dict[str, Any]
) -> None:
    """Tables are compared then, and that is said, with the reason."""
    trainings = Trainings(python_of(tensorflow), tmp_path, **{"optimizers": ["adagrad"], **job})
    with TrainerCluster(trainings, steps=20) as cluster:
        cluster.wait()
    with trainings.served() as server:
        with TrainerCluster(trainings, steps=50) as cluster:
            cluster.wait()
        assert trainings.assert_exact() > 1
        trainings.assert_followed(server)
    said = trainings.log.read_text()
    assert (" may change any row " in said) == ("sync" not in job)
