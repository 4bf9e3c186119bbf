"""The trainer's side on TensorFlows and Pythons that people train on, each in an environment of its own.

`make test-all` does some of this, `make matrix` all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter import ExportRequest, export, export_incremental
from exporter.increments.history import read_history
from tests.support.environments import BY_NAME, ROOT, clean_environ, python_of
from tests.support.guide_pages import Page
from tests.support.increments import differing, full, starts
from tests.support.trainer_environments import TrainerCluster, Trainings, wait_for_increments
from tests.support.updatable import loaded

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]

in_matrix = pytest.mark.skipif("OLD_TRAINERS" not in os.environ, reason="a combination of `make matrix`")


def some(names: Iterable[str], always: Collection[str]) -> list[Any]:
    """All names, of which `make test-all` takes `always`."""
    return [pytest.param(name, marks=() if name in always else in_matrix) for name in names]


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


@pytest.mark.parametrize("tensorflow", some(["1.12.3", "1.15.5", "2.8.4"], ["1.15.5"]))
@pytest.mark.parametrize("loop", some(LOOPS, ["loop", "estimator, another hook saves last"]))
def test_every_kind_of_loop(tmp_path: Path, tensorflow: str, loop: str) -> None:
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad", "sgd"], **LOOPS[loop])
    trainings.run(20)
    with trainings.served() as server:
        trainings.run(47)
        trainings.assert_exact()
        trainings.assert_followed(server)


@pytest.mark.parametrize("kind", some(["reference", "resource"], ["reference"]))
@pytest.mark.parametrize("tensorflow", some(["1.12.3", "1.15.5", "2.8.4"], ["1.15.5"]))
def test_every_optimizer_that_names_its_rows(tmp_path: Path, tensorflow: str, kind: str) -> None:
    optimizers = (*LAZY, *_contrib(tensorflow))
    trainings = Trainings(python_of(tensorflow), tmp_path, optimizers, resource=kind == "resource")
    trainings.run(20)
    trainings.run(47)
    assert trainings.assert_exact() > 1
    assert " may change any row " not in trainings.log.read_text()


def _contrib(tensorflow: str) -> tuple[str, ...]:
    return ("lazy_adam",) if tensorflow.startswith("1.") else ()


@pytest.mark.parametrize("tensorflow", some(BY_NAME, ["1.12.3", "1.15.5"]))
def test_a_cluster(tmp_path: Path, tensorflow: str) -> None:
    """Two parameter servers, a chief and a worker; the model that follows them compares nothing."""
    number = list(BY_NAME).index(tensorflow)
    optimizers = ("adagrad", *LAZY[2 + number : 3 + number], *_contrib(tensorflow))
    partitioner = ("fixed", "min_max", "axis_size")[number % 3]
    # What a worker writes before the chief's own first checkpoint would begin a new run there.
    job = {"partitioner": partitioner, "filters": True, "workers_wait": True}
    trainings = Trainings(python_of(tensorflow), tmp_path, optimizers, **job)
    with TrainerCluster(trainings, steps=20) as cluster:
        cluster.wait()
    with trainings.served() as server:
        with TrainerCluster(trainings, steps=60) as cluster:
            cluster.wait()
        assert trainings.assert_exact() > 1
        trainings.assert_followed(server)
    assert " may change any row " not in trainings.log.read_text()


JOBS: dict[str, dict[str, Any]] = {
    "adam": {"optimizers": ["adam"]},
    "averages": {"averages": True},
    "sync": {"sync": True},
}


@pytest.mark.parametrize("kind", some(JOBS, ["adam", "sync"]))
@pytest.mark.parametrize("tensorflow", some(["1.15.5", "2.8.4"], ["1.15.5"]))
def test_what_touches_every_row_and_synchronous_workers(tmp_path: Path, tensorflow: str, kind: str) -> None:
    """Tables are compared if every row may change, and that is said, with the reason."""
    asked = {"optimizers": ["adagrad"], "workers_wait": True, **JOBS[kind]}
    trainings = Trainings(python_of(tensorflow), tmp_path, **asked)
    with TrainerCluster(trainings, steps=20) as cluster:
        cluster.wait()
    with trainings.served() as server:
        with TrainerCluster(trainings, steps=50) as cluster:
            cluster.wait()
        assert trainings.assert_exact() > 1
        trainings.assert_followed(server)
    said = trainings.log.read_text()
    assert (" may change any row " in said) == (kind != "sync")


@pytest.mark.parametrize("tensorflow", some(["1.12.3", "1.15.5", "2.8.4"], ["1.15.5"]))
def test_averages_are_followed(tmp_path: Path, tensorflow: str) -> None:
    """What `--average` serves comes with the increments, too."""
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad"], averages=True)
    trainings.run(20)
    request = replace(trainings.request, average="ema")
    with loaded(export(request).published.path) as server:
        trainings.run(47)
        trainings.assert_exact()
        delta = export_incremental(request)
        assert delta.published is not None
        assert delta.compared_bytes == 0, delta.reason
        server.update()
        trainings.assert_answers(server, "/ExponentialMovingAverage")


@pytest.mark.parametrize("tensorflow", some(["1.12.3", "1.15.5", "2.8.4"], ["1.15.5"]))
def test_a_trainer_that_is_set_back(tmp_path: Path, tensorflow: str) -> None:
    """It trains other values from an older full checkpoint on; the model goes to those."""
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad"])
    trainings.run(30)
    with trainings.served() as server:
        trainings.set_back(20)
        trainings.run(27)
        assert trainings.newest.name == "model.ckpt-27"
        trainings.assert_exact()
        delta = export_incremental(trainings.request)
        assert delta.published is not None
        server.update()
        trainings.assert_answers(server)
        trainings.run(33)  # on: past the steps of before, by increments alone
        trainings.assert_followed(server)


@pytest.mark.parametrize("tensorflow", some(["1.12.3", "1.15.5", "2.8.4"], ["1.15.5"]))
@pytest.mark.parametrize("victims", some(["chief-0", "ps-1", "worker-1"], ["chief-0"]))
def test_a_cluster_loses_a_process(tmp_path: Path, tensorflow: str, victims: str) -> None:
    """Two workers; whoever is lost comes back, and what increments lead to is what was trained."""
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad"], pause_s=0.02, steps=10**9)
    end = trainings.train / "end"
    with TrainerCluster(trainings, workers=2) as cluster:
        wait_for_increments(trainings, 3)
        with trainings.served(is_quiet=False) as server:
            cluster.kill(victims)
            wait_for_increments(trainings, 0)
            cluster.start(victims)
            wait_for_increments(trainings, 3)
            end.touch()
            cluster.wait()
            trainings.assert_exact()
            export_incremental(trainings.request)
            server.update()
            trainings.assert_answers(server)


LOADS = """
import sys
import numpy as np, tensorflow as tf
v1 = getattr(tf.compat, "v1", tf)
if hasattr(v1, "disable_eager_execution"):
    v1.disable_eager_execution()
version, prefix = sys.argv[1:]
ids = np.random.RandomState(1).randint(0, 300, [3, 8])
with v1.Session(graph=tf.Graph()) as session:
    saver = v1.train.import_meta_graph(prefix + ".meta", clear_devices=True)
    saver.restore(session, prefix)
    trained = session.run("adagrad/rows:0", {"ids:0": ids})
with v1.Session(graph=tf.Graph()) as session:
    signature = v1.saved_model.loader.load(session, ["serve"], version).signature_def["serving_default"]
    served = session.run(signature.outputs["rows"].name, {signature.inputs["ids"].name: ids})
assert trained.any() and served.tobytes() == trained.tobytes()
"""


@pytest.mark.parametrize("tensorflow", ["1.15.5", "2.8.4"])
@pytest.mark.parametrize("kind", some(["reference", "resource"], ["reference"]))
def test_the_trainers_own_tensorflow_loads_its_graph(tmp_path: Path, tensorflow: str, kind: str) -> None:
    """Published from the `.meta`, it answers there as the training's graph does, bit for bit."""
    trainings = Trainings(python_of(tensorflow), tmp_path, ["adagrad"], resource=kind == "resource")
    trainings.run(20)
    tensors = {"inputs": {"ids": "ids:0"}, "outputs": {"rows": "adagrad/rows:0"}}
    done = export(ExportRequest(trainings.train, tmp_path / "meta", **tensors))
    command = [trainings.python, "-W", "ignore", "-c", LOADS, done.published.path, trainings.newest]
    found = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


GRAPH = """
import os, sys
import tensorflow as tf
tf.compat.v1.logging.set_verbosity("ERROR")
step = tf.train.get_or_create_global_step()
table = tf.get_variable("table", [50, 4])
rows = tf.gather(table, tf.random_uniform([4], 0, 40, tf.int64))
train_op = tf.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows ** 2), global_step=step)
"""
MODEL = """
import tensorflow as tf

def model_fn(features, labels, mode):
    rows = tf.gather(tf.get_variable("table", [50, 4]), tf.random_uniform([4], 0, 40, tf.int64))
    loss = tf.reduce_sum(rows ** 2)
    step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
    return tf.data.Dataset.from_tensor_slices(([1.0] * 8, [1.0] * 8)).repeat().batch(2)

estimator = tf.estimator.Estimator(model_fn, "train")
"""
LAYERS = """
import numpy as np
import tensorflow as tf

model = tf.keras.Sequential([tf.keras.layers.Embedding(50, 4, input_length=3), tf.keras.layers.Flatten(),
                             tf.keras.layers.Dense(1)])
model.build((None, 3))
model.compile("adagrad", "mse")
inputs, labels = np.random.randint(0, 40, (64, 3)), np.ones((64, 1))
"""
NEEDED = {  # by what only that block has: TensorFlow, and the names that it needs
    "MonitoredTrainingSession": ("1.15.5", f"{GRAPH}\nmaster, is_chief = '', True\n"),
    "Estimator": ("1.15.5", MODEL),
    "Supervisor": ("1.15.5", GRAPH),
    "CheckpointManager": ("2.8.4", LAYERS),
}


@pytest.mark.parametrize("kind", NEEDED)
def test_the_guide(tmp_path: Path, kind: str) -> None:
    blocks = Page("docs/from/tensorflow-1.md").tested_by("test_the_guide")
    assert len(blocks) == len(NEEDED)
    (text,) = [block.text for block in blocks if kind in block.text or f"{kind.lower()}.train" in block.text]
    tensorflow, needed = NEEDED[kind]
    text = text.replace("hooks=[hook]\n", "hooks=[hook, tf.train.StopAtStepHook(30)]\n").replace("2000", "40")
    text = text.replace("1000", "20")
    shutil.copy(ROOT / "exporter/training/trainer_side.py", tmp_path / "export_model_trainer.py")
    (tmp_path / "program.py").write_text(needed + text)
    python = python_of(tensorflow)
    environment = {**clean_environ(), "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [python, "-W", "ignore", "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    train = tmp_path / "train"
    history = read_history(train)
    assert history.increments
    known = starts(history, train)
    newest = Path(json.loads((train / "checkpoint").read_text().partition(": ")[2].partition("\n")[0])).name
    last = full(train, newest)
    assert last in known
    for start in known:
        if (chain := history.after(start)) and chain[-1] == history.increments[-1]:
            found = set(differing(train, start, train / newest, chain))
            assert found <= {"save_counter/.ATTRIBUTES/VARIABLE_VALUE"}
