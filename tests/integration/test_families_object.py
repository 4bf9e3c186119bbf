"""What trainers of TensorFlow 2 leave: exported, served, equal to the trainer's own answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint import open_checkpoint
from exporter.errors import AmbiguousRename, MappingError
from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import Exported, export, plan
from tests.support.clusters import run_cluster
from tests.support.family_server import FamilyServer
from tests.support.forks import WarmNode, run_warm
from tests.support.object_trainers import JOBS
from tests.support.once import once_a_run

TRAINERS = Path(__file__).parents[1] / "support/object_trainers.py"
NUMBERS = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of all jobs, each made in a process of its own; never change them."""

    def train(directory: Path) -> None:
        for job in JOBS:
            run_warm("tests.support.object_trainers", job, directory)

    return once_a_run(tmp_path_factory, "object-trainers", train)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the chief of a real ParameterServerStrategy cluster left."""

    def train(directory: Path) -> None:
        script = Path(__file__).with_name("sharded_node.py")
        run_cluster(script, [directory], cwd=directory, workers=1, timeout_s=400, start=WarmNode)

    return once_a_run(tmp_path_factory, "sharded-tower", train)


def request_for(checkpoint: Path, model: str | Path, out: Path, **options: object) -> ExportRequest:
    builder = f"{TRAINERS}:{model}" if isinstance(model, str) else str(model)
    return ExportRequest(checkpoint, out, model=builder, verify=Verify.OUTPUTS, **options)  # type: ignore[arg-type]


def check(server: FamilyServer, done: Exported, expected: Path) -> None:
    """The numbers are the trainer's, and no byte of a value was copied."""
    with np.load(expected) as arrays:
        answers = {name: arrays[name] for name in arrays.files if name != "ids"}
        found = server.answers(done.published.path, {"ids": arrays["ids"]})
    if len(found) == 1:
        found = {"answers": next(iter(found.values()))}
    assert found.keys() == answers.keys()
    for name, value in answers.items():
        np.testing.assert_allclose(found[name], value, **NUMBERS)
    assert done.variables.bytes_copied == done.variables.bytes_rewritten == 0
    assert any(path.stat().st_nlink > 1 for path in done.published.path.glob("variables/*.data-*"))


@pytest.mark.landing
@pytest.mark.parametrize(
    ("checkpoint", "model", "family", "step"),
    [
        ("tower3", "tower3", "Keras 3 model in tf.train.Checkpoint", 8),
        ("bare3", "tower3", "Keras 3 weights", 8),
        ("chain3", "chain3", "Keras 3 model in tf.train.Checkpoint", 8),
        ("tower2", "tower2", "Keras 2 weights", 8),
        ("tower2", "tower3", "Keras 2 weights", 8),
        ("chain2", "chain2", "Keras 2 weights", 8),
        ("backup2", "tower2", "Keras 2 BackupAndRestore", 8),
        ("mirrored2", "tower2", "Keras 2 model in tf.train.Checkpoint", 4),
        ("manager", "scorer", "tf.train.CheckpointManager", 300),
    ],
)
def test_family(
    trained: Path,
    tmp_path: Path,
    server: FamilyServer,
    checkpoint: str,
    model: str,
    family: str,
    step: int,
) -> None:
    done = export(request_for(trained / checkpoint, model, tmp_path, data=DataMode.LINK))
    check(server, done, trained / checkpoint / "expected.npz")
    assert done.plan.catalog.family == f"{family}, object-based"
    assert done.plan.catalog.step == done.published.position == step


def test_the_variables_of_a_saved_model(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    """A training model's SavedModel is a checkpoint, too; its graph serves newer ones."""
    saved = trained / "saved2" / "model"
    done = export(request_for(saved, "tower2", tmp_path / "weights", data=DataMode.LINK))
    check(server, done, trained / "saved2" / "expected.npz")
    assert done.plan.catalog.family == "Keras 2 SavedModel's variables, object-based"
    newer = export(request_for(trained / "backup2", saved, tmp_path / "graph", data=DataMode.LINK))
    check(server, newer, trained / "backup2" / "expected.npz")
    assert {source.via for source in newer.plan.mapping.sources} == {"object"}


def test_temporary_directories_of_workers_are_left_alone(trained: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(trained / "backup2", backup)
    shutil.copytree(trained / "mirrored2", backup / "workertemp_1", dirs_exist_ok=True)
    assert open_checkpoint(backup).prefix.parent.name == "chief"


def test_two_models_that_fit_are_told_apart_by_their_path(
    trained: Path, tmp_path: Path, server: FamilyServer
) -> None:
    with pytest.raises(AmbiguousRename, match="2 objects") as caught:
        plan(request_for(trained / "twins3", "tower3", tmp_path))
    assert "'model'" in caught.value.cause
    assert "'average'" in caught.value.cause
    done = export(request_for(trained / "twins3", "tower3", tmp_path, object_path="average"))
    check(server, done, trained / "twins3" / "expected.npz")


@pytest.mark.parametrize(
    ("checkpoint", "model"), [("chain3", "tower3"), ("tower2", "scorer"), ("manager", "tower2")]
)
def test_a_checkpoint_of_another_model_is_refused(
    trained: Path, tmp_path: Path, checkpoint: str, model: str
) -> None:
    with pytest.raises(MappingError):
        plan(request_for(trained / checkpoint, model, tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.landing
def test_sharded_variables_of_a_parameter_server_strategy(
    sharded: Path, tmp_path: Path, server: FamilyServer
) -> None:
    """Every variable lies in two parts on two servers' shards; served, each is one, its rows in order."""
    done = export(request_for(sharded / "ckpt", "tower2", tmp_path, data=DataMode.LINK))
    check(server, done, sharded / "expected.npz")
    assert all(len(source.tensor.slices) == 2 for source in done.plan.mapping.sources)
    assert done.plan.catalog.family == (
        "Keras 2 model in tf.train.CheckpointManager, sharded variables, object-based"
    )
