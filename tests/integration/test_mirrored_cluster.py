"""Two real workers of a MultiWorkerMirroredStrategy: one saves, all take part; what it saved is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import export
from tests.support.clusters import run_cluster
from tests.support.forks import WarmNode
from tests.support.once import once_a_run

SCRIPT = Path(__file__).with_name("mirrored_node.py")
BUILDER = f"{SCRIPT.parents[1] / 'support/object_trainers.py'}:tower2"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cluster left; each node's report in a file of its name."""

    def train(directory: Path) -> None:
        (directory / "ckpt" / "workertemp_7").mkdir(parents=True)  # of a worker that a larger cluster had
        logs = run_cluster(SCRIPT, [directory], cwd=directory, ps=0, workers=1, timeout_s=500, start=WarmNode)
        for name, log in logs.items():
            (line,) = [line for line in log.splitlines() if line.startswith('{"task"')]
            (directory / f"{name}.json").write_text(line)

    return once_a_run(tmp_path_factory, "mirrored-cluster", train)


def report(trained: Path, node: str) -> Any:
    return json.loads((trained / f"{node}.json").read_text())


def answers(version: Path, ids: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(version))
        signature = loaded.signature_def["serving_default"]
        (given,), (wanted,) = signature.inputs.values(), signature.outputs.values()
        return np.asarray(session.run(wanted.name, {given.name: ids}))


@pytest.mark.landing
def test_one_worker_saves_and_nobody_else_leaves_anything(trained: Path) -> None:
    chief, worker = report(trained, "chief-0"), report(trained, "worker-0")
    assert (chief["chief"], worker["chief"]) == (True, False)
    assert Path(chief["place"]).name == "ckpt"
    assert Path(worker["place"]).parts[-2:] == ("ckpt", "workertemp_0")
    assert chief["saved"] == worker["saved"] == ["ckpt-1", "ckpt-2"]
    assert set(worker["written"]) == set(chief["written"])  # it wrote all of it, somewhere else
    names = {path.name for path in (trained / "ckpt").iterdir()}
    assert names == {"checkpoint", "ckpt-2.index", "ckpt-2.data-00000-of-00001", "weights.weights.h5"}


def test_workers_agree_when_to_stop(trained: Path) -> None:
    assert report(trained, "chief-0")["epochs"] == report(trained, "worker-0")["epochs"] == 1


def test_the_chief_alone_exports(trained: Path) -> None:
    assert report(trained, "chief-0")["exports"] == [0]
    assert report(trained, "worker-0")["exports"] == []
    (version,) = [path for path in (trained / "models").iterdir() if path.name.isdecimal()]
    with np.load(trained / "expected.npz") as expected:
        np.testing.assert_allclose(answers(version, expected["ids"]), expected["answers"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("source", ["ckpt", "ckpt/weights.weights.h5"])
def test_what_was_saved_is_what_the_trainer_computes(trained: Path, tmp_path: Path, source: str) -> None:
    data = DataMode.LINK if source == "ckpt" else DataMode.AUTO
    request = ExportRequest(trained / source, tmp_path, model=BUILDER, data=data, verify=Verify.OUTPUTS)
    done = export(request)
    with np.load(trained / "expected.npz") as expected:
        found = answers(done.published.path, expected["ids"])
        np.testing.assert_allclose(found, expected["answers"], atol=1e-5, rtol=0)
