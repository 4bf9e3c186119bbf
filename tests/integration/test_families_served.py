"""More of what trainers leave: each exported, served, equal to the framework's own answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoint import open_checkpoint
from exporter.errors import MissingTensors, NoCertainMatch, ShapeMismatch
from exporter.options import ExportFormat, ExportRequest, Verify
from exporter.pipeline.full import Exported, export, plan
from tests.support.clusters import run_cluster
from tests.support.family_server import Arrays, FamilyServer
from tests.support.family_trainers import POLICIES
from tests.support.forks import WarmNode, run_warm
from tests.support.once import once_a_run

TRAINERS = Path(__file__).parent.parent / "support"
NUMBERS = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all jobs of `tests.support.family_trainers` left; never change it."""

    def train(directory: Path) -> None:
        run_warm("tests.support.family_trainers", directory)

    return once_a_run(tmp_path_factory, "family-trainers", train)


@pytest.fixture(scope="session")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two workers of MultiWorkerMirroredStrategy left, the first of them the chief."""

    def train(directory: Path) -> None:
        script = Path(__file__).with_name("backup_node.py")
        run_cluster(script, [directory], cwd=directory, ps=0, workers=1, timeout_s=400, start=WarmNode)

    return once_a_run(tmp_path_factory, "backup-workers", train)


def ask(source: Path, out: Path, model: str | None = None, **options: Any) -> ExportRequest:
    """A request; `model` is a builder of the family's trainers, or `file/builder`; `:policy` behind it."""
    arguments = {}
    if model is not None:
        file, _, name = model.rpartition("/")
        name, _, policy = name.partition(":")
        arguments = {"policy": policy} if policy else {}
        model = f"{TRAINERS / (file or 'family_trainers.py')}:{name}"
    options = {"verify": Verify.OUTPUTS, "model_args": arguments, **options}
    return ExportRequest(source, out, model=model, **options)


def expected(directory: Path) -> tuple[Arrays, Arrays]:
    """Inputs and answers by name, as the trainer left them."""
    with np.load(directory / "expected.npz") as arrays:
        sides = ("in/", "out/")
        inputs, outputs = (
            {n.removeprefix(side): arrays[n] for n in arrays.files if n.startswith(side)} for side in sides
        )
    return inputs, outputs


def check(server: FamilyServer, done: Exported, directory: Path) -> None:
    """The server answers what the framework answered when training ended."""
    inputs, answers = expected(directory)
    compare(server.answers(done.published.path, inputs), answers)


def compare(found: Arrays, answers: Arrays) -> None:
    if len(found) == len(answers) == 1:
        found = dict(zip(answers, found.values(), strict=True))
    assert found.keys() == answers.keys()
    for name, value in answers.items():
        np.testing.assert_allclose(found[name].astype(np.float32), value, **NUMBERS)


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.landing
@pytest.mark.parametrize(
    ("source", "policy"),
    [
        *(("model.keras", policy) for policy in POLICIES),
        ("model.weights.h5", "mixed_float16"),
        ("model.weights.h5", "bfloat16"),
        ("ckpt", "mixed_bfloat16"),
        ("ckpt", "float16"),
    ],
)
@pytest.mark.parametrize("keras", ["3", "2"])
def test_reduced_precision(
    trained: Path, tmp_path: Path, server: FamilyServer, keras: str, source: str, policy: str
) -> None:
    directory = trained / f"{policy}-{keras}"
    model = None if source == "model.keras" else f"precise{keras}:{policy}"
    done = export(ask(directory / source, tmp_path / "m", model))
    check(server, done, directory)
    kernel = next(s for s in done.plan.mapping.sources if s.key.endswith("hidden/kernel"))
    assert kernel.dtype.label == ("float32" if policy.startswith("mixed") else policy)


@pytest.mark.parametrize("source", ["model.weights.h5", "ckpt"])
@pytest.mark.parametrize(
    ("trainer", "model"),
    [("bfloat16", "mixed_bfloat16"), ("mixed_float16", "float16"), ("float16", "bfloat16")],
)
def test_weights_of_another_precision_are_refused(
    trained: Path, tmp_path: Path, trainer: str, model: str, source: str
) -> None:
    with pytest.raises((ShapeMismatch, NoCertainMatch)) as caught:
        plan(ask(trained / f"{trainer}-3" / source, tmp_path / "m", f"precise3:{model}"))
    assert "float" in f"{caught.value.message} {caught.value.cause}"
    assert not (tmp_path / "m").exists()


# --- averages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["ckpt", "model.weights.h5"])
@pytest.mark.parametrize("moment", ["training", "trained"])
def test_an_optimizer_s_averages_are_not_mixed_up_with_weights(
    trained: Path, tmp_path: Path, server: FamilyServer, moment: str, source: str
) -> None:
    """Keras puts the averages in when `fit` ends: what is served is what the model was when it was saved."""
    done = export(ask(trained / moment / source, tmp_path / "m", "averaged3"))
    check(server, done, trained / moment)


def test_averages_in_place_of_weights(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    done = export(ask(trained / "training/ckpt", tmp_path / "m", "averaged3", average="ema"))
    check(server, done, trained / "training-average")


def test_an_archive_does_not_tell_averages_apart(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingTensors, match="--average ema"):
        plan(ask(trained / "training/model.weights.h5", tmp_path / "m", "averaged3", average="ema"))


# --- objects ------------------------------------------------------------------------------------------------


def test_variables_that_were_restored_late(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    done = export(ask(trained / "late", tmp_path / "m", "object_trainers.py/chain2"))
    check(server, done, trained / "late")


def test_lists_and_dicts_at_the_root(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    done = export(ask(trained / "wrappers", tmp_path / "m", "object_trainers.py/scorer"))
    check(server, done, trained / "wrappers")
    assert {source.via for source in done.plan.mapping.sources} == {"object"}


# --- backups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keras", ["2", "3"])
def test_a_backup_every_few_batches(trained: Path, tmp_path: Path, server: FamilyServer, keras: str) -> None:
    done = export(ask(trained / f"backup-{keras}", tmp_path / "m", f"precise{keras}:float32"))
    check(server, done, trained / f"backup-{keras}")
    assert done.plan.catalog.step == done.published.version == 12


@pytest.mark.landing
def test_a_backup_of_several_workers(mirrored: Path, tmp_path: Path, server: FamilyServer) -> None:
    """The other worker's part of each save went to a directory of its own, which is gone."""
    assert (mirrored / "saved-chief").read_text().split() == ["chief"] * 3
    (temporary,) = set((mirrored / "saved-worker").read_text().split())
    assert temporary.startswith("workertemp")
    done = export(ask(mirrored / "backup", tmp_path / "m", "precise2:float32"))
    check(server, done, mirrored)
    assert done.plan.catalog.family == "Keras 2 BackupAndRestore, object-based"
    assert done.published.version == 12


def test_a_backup_that_was_interrupted(mirrored: Path, tmp_path: Path, server: FamilyServer) -> None:
    """A killed worker's temporary directory is complete, with a state file of its own, and newer."""
    backup = tmp_path / "backup"
    shutil.copytree(mirrored / "backup", backup)
    shutil.copytree(mirrored / "backup/chief", backup / "workertemp_0")
    (backup / "chief/workertemp_0").mkdir()
    assert open_checkpoint(backup).prefix.parent == backup / "chief"
    check(server, export(ask(backup, tmp_path / "m", "precise2:float32")), mirrored)


# --- sessions and lists -------------------------------------------------------------------------------------


NESTED = ["nested/session", "supervised", "nested/dict.npz", "nested/model.hdf5"]


@pytest.mark.parametrize("source", NESTED)
def test_layers_inside_layers(trained: Path, tmp_path: Path, server: FamilyServer, source: str) -> None:
    done = export(ask(trained / source, tmp_path / "m", "nested"))
    check(server, done, trained / source.partition("/")[0])
    assert all(source.via == "name" for source in done.plan.mapping.sources)


@pytest.mark.parametrize("source", NESTED)
@pytest.mark.parametrize(
    ("model", "lacking", "says"),
    [("deeper", "3 of 17", "tower/block3/dense/W"), ("moved", "9 of 14", "towers/block1/dense/W")],
)
def test_layers_of_another_program(
    trained: Path, tmp_path: Path, source: str, model: str, lacking: str, says: str
) -> None:
    with pytest.raises(MissingTensors, match=lacking) as caught:
        plan(ask(trained / source, tmp_path / "m", model))
    assert f"{says} float32[6, 6]: nearest 'tower/block1/dense/W'" in caught.value.cause.replace(
        "block2", "block1"
    )


def test_a_session_s_graph(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    """Without a builder, from the `.meta` that a monitored session leaves."""
    ends = {"inputs": {"features": "features"}, "outputs": {"scores": "scores"}}
    done = export(ask(trained / "nested/session", tmp_path / "m", **ends))
    check(server, done, trained / "nested")
    assert done.published.version == 20


def test_a_list_of_another_order_than_the_graph_s(trained: Path, tmp_path: Path) -> None:
    """TensorLayer's first dicts were lists; this one has the statistics last, as `all_params` may."""
    source = trained / "nested/numbered.npz"
    with pytest.raises(NoCertainMatch) as caught:
        plan(ask(source, tmp_path / "m", "nested", by_order=True))
    assert "in another order" in caught.value.cause


# --- Cloud ML's pair ----------------------------------------------------------------------------------------


@pytest.mark.landing
def test_the_pair_of_every_kind_of_source(trained: Path, tmp_path: Path, server: FamilyServer) -> None:
    """A bundle's, an archive's and an object-based checkpoint's, beside a SavedModel and alone."""
    for source, model in (
        ("nested/session", "nested"),
        ("nested/dict.npz", "nested"),
        ("trained/ckpt", "averaged3"),
        ("float16-3/model.keras", None),
    ):
        directory = (trained / source).parent
        inputs, answers = expected(directory)
        out = tmp_path / source.replace("/", "-")
        both = export(ask(trained / source, out, model, format=ExportFormat.BOTH))
        compare(server.answers(both.published.path, inputs), answers)
        alone = export(ask(trained / source, out, model, format=ExportFormat.METAGRAPH))
        for version in (both, alone):
            compare(answers_of_pair(version.published.path, inputs), answers)


def answers_of_pair(version: Path, inputs: Arrays) -> Arrays:
    """As a reader of Cloud ML's format goes about it: the graph, its Saver, its collections."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        v1.train.import_meta_graph(str(version / "export.meta")).restore(session, str(version / "export"))
        ends = [json.loads(v1.get_collection(name)[0]) for name in ("inputs", "outputs")]
        feeds = {name: inputs[key] for key, name in ends[0].items()}
        return session.run(ends[1], feeds)  # type: ignore[no-any-return]
