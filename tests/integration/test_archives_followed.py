"""A base of the first archive and deltas of all later ones: served = trained, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CheckpointChanged, SchemaChanged
from exporter.options import ExportRequest
from exporter.pipeline import incremental, trainer_state
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.verify.log import verify_model
from serving.client import ModelClient
from serving.server import ModelServer
from serving.updates import update
from tests.support.commands import export_model
from tests.support.epochs_trainer import EPOCHS, IDS
from tests.support.forks import FORKS, run_warm
from tests.support.kills import count_steps, killed_at, points
from tests.support.logs import assert_same_bits, values_at
from tests.support.once import once_a_run
from tests.support.publishing import hidden

FIXTURES = Path(__file__).parent.parent / "fixtures"
BUILDER = f"{Path(__file__).parent.parent / 'support/epochs_trainer.py'}:tower3"
WAYS = {
    "keras3.keras": None,
    "keras3.weights.h5": BUILDER,
    "keras3.h5": None,
    "keras3.weights.json": BUILDER,
    "keras3.npz": BUILDER,
    "keras3.safetensors": BUILDER,
    "keras2.keras": None,
    "keras2.h5": None,
    "keras2.weights.h5": BUILDER,
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all trainings left; never change it."""

    def train(directory: Path) -> None:
        run_warm("tests.support.epochs_trainer", directory)

    return once_a_run(tmp_path_factory, "epochs-trainer", train)


class Runs:
    """A trainer's directory, which archives of one way arrive in, and the model that follows it."""

    def __init__(self, trained: Path, directory: Path, way: str = "keras3.keras") -> None:
        self._from, self._values = trained / way, trained / way.partition(".")[0]
        self.train, self.model = directory / "runs", directory / "model"
        self.train.mkdir(exist_ok=True)
        self.builder = WAYS[way]

    def save(self, epoch: int, name: str = "") -> Path:
        """Let an epoch's archive arrive, under a name of its own, or in the place of one that is there."""
        files = sorted(self._from.glob(f"epoch-{epoch:02}*"))
        targets = [self.train / (name or file.name) for file in files]
        for file, target in zip(files, targets, strict=True):
            shutil.copyfile(file, self.train / ".part")
            (self.train / ".part").replace(target)
        return targets[0]

    def request(self, **options: Any) -> ExportRequest:
        return ExportRequest(self.train, self.model, **{"model": self.builder, **options})

    def follow(self, **options: Any) -> incremental.Incremental:
        return export_incremental(self.request(**options))

    @property
    def log(self) -> DeltaLog:
        return read_log(self.model)

    def trained(self, epoch: int) -> dict[str, np.ndarray[Any, Any]]:
        """The values of an epoch by the names that variables are served under."""
        with np.load(f"{self._values}-{epoch}.npz") as arrays:
            return {name: arrays[name] for name in arrays.files}

    def assert_holds(self, epoch: int) -> None:
        """The log's newest state is what the trainer had, bit for bit."""
        expected = self.trained(epoch)
        del expected["answers"]
        assert_same_bits(values_at(self.log), expected)
        assert not verify_model(self.model).problems


@pytest.fixture(scope="session")
def published(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the first archive and its base; never change it."""

    def publish(directory: Path) -> None:
        runs = Runs(trained, directory)
        runs.save(1)
        runs.follow()

    return once_a_run(tmp_path_factory, "archive-base", publish)


@pytest.fixture
def runs(trained: Path, published: Path, tmp_path: Path) -> Runs:
    """The base of the first archive is published."""
    shutil.copytree(published, tmp_path / "begun")
    return Runs(trained, tmp_path / "begun")


@pytest.mark.parametrize(
    "way",
    [
        way if way in ("keras3.keras", "keras3.weights.h5") else pytest.param(way, marks=pytest.mark.landing)
        for way in WAYS
    ],
)
def test_what_is_served_follows_the_archives(trained: Path, tmp_path: Path, way: str) -> None:
    """One server, which is never restarted, answers as the trainer does after each epoch."""
    runs = Runs(trained, tmp_path, way)
    runs.save(1)
    ran = runs.follow()
    assert not isinstance(ran, ExportedDelta)
    with ModelServer(runs.model) as server:
        server.wait_available(60)
        client = ModelClient(server.address, runs.model.name, deadline_s=30)
        (name,) = client.metadata().signatures["serving_default"].inputs
        for epoch in range(1, EPOCHS + 1):
            if epoch > 1:
                runs.save(epoch)
                done = runs.follow()
                assert isinstance(done, ExportedDelta)
                assert done.rows and done.compared_bytes
                update(client)
            runs.assert_holds(epoch)
            answer = client.predict({name: IDS})
            assert answer.version == ran.published.version, "the same version, never loaded again"
            (scores,) = (value for key, value in answer.outputs.items() if not key.startswith("model_"))
            np.testing.assert_allclose(scores, runs.trained(epoch)["answers"], atol=1e-6, rtol=1e-5)
    assert not hidden(runs.model), "the bundles that archives became are gone"
    again = runs.follow()
    assert isinstance(again, ExportedDelta)
    assert again.published is None


def test_one_file_that_each_epoch_replaces(runs: Runs) -> None:
    for epoch in range(2, EPOCHS + 1):
        runs.save(epoch, "epoch-01.keras")
        runs.follow()
        runs.assert_holds(epoch)
    assert [delta.end for delta in runs.log.deltas] == [3, 6], "the steps of the optimizer"


def test_the_same_archive_under_any_name_is_nothing_to_do(runs: Runs) -> None:
    os.utime(runs.train / "epoch-01.keras", ns=(1, 1))
    runs.save(1, "epoch-07.keras")
    ran = export_model("--ckpt-dir", runs.train, "--out", runs.model, "--incr", "--json")
    assert ran.document["status"] == "nothing_to_do", ran.err
    assert not runs.log.deltas


def test_a_trainer_that_is_set_back(runs: Runs) -> None:
    """Positions grow, steps go back, and values are those of the archive that is there now."""
    for at, epoch in ((2, 3), (3, 1)):
        runs.save(epoch, f"epoch-{at:02}.keras")
        done = runs.follow()
    assert "the model goes back from step 6, which is published, to step 1" in done.plan.notes
    runs.assert_holds(1)
    assert [(event.end, event.manifest.step) for event in runs.log.deltas] == [(6, 6), (7, 1)]


@pytest.mark.landing
def test_archives_without_a_step_are_numbered(trained: Path, tmp_path: Path) -> None:
    runs = Runs(trained, tmp_path, "keras3.npz")
    for epoch in (1, 2):
        runs.save(epoch)
        runs.follow()
    assert [(delta.end, delta.manifest.step) for delta in runs.log.deltas] == [(2, None)]
    ran = export_model("--ckpt-dir", runs.train, "--out", runs.model, "--model", BUILDER, "--incr")
    assert "step" not in ran.out, ran.out


@pytest.mark.landing
def test_archives_may_go_once_they_are_published(runs: Runs) -> None:
    """Comparison, and whatever is done with a log, reads the log's own files."""
    (runs.train / "epoch-01.keras").unlink()
    runs.save(2)
    runs.follow()
    (runs.train / "epoch-02.keras").unlink()
    assert export_model("rollback", runs.model, "--to", 1).code == 0
    runs.assert_holds(1)
    assert export_model("resume", runs.model).code == 0
    runs.assert_holds(2)
    runs.save(3)
    runs.follow()
    runs.assert_holds(3)
    assert export_model("merge", runs.model).code == 0
    assert export_model("diff", runs.model, runs.train, "--exit-code").code == 0
    ran = export_model("--ckpt-dir", runs.train, "--out", runs.model, "--incr", "--new-base=merged")
    assert ran.code == 0, ran.err
    runs.assert_holds(3)
    assert export_model("doctor", runs.model, "--ckpt-dir", runs.train).code == 0
    assert "found by comparison" in export_model("history", runs.model).out


@pytest.mark.parametrize(
    "way", ["keras3.weights.h5", pytest.param("keras3.keras", marks=pytest.mark.landing)]
)
def test_other_layers_are_refused_by_name(trained: Path, tmp_path: Path, way: str) -> None:
    """Files number layers: `dense_2` is another layer in them once there is one more."""
    runs = Runs(trained, tmp_path, way)
    runs.save(1)
    runs.follow()
    shutil.copyfile(trained / f"deeper.{way.partition('.')[2]}", runs.train / f"epoch-02{way[6:]}")
    with pytest.raises(SchemaChanged) as caught:
        runs.follow()
    why = f"{caught.value.message} {caught.value.cause}"
    assert "in the checkpoint alone: layers/dense_4" in why or "layers differ" in why, why
    assert "--new-base if-needed" in caught.value.hint
    runs.assert_holds(1)


@pytest.mark.landing
def test_a_vocabulary_of_an_archive_is_part_of_the_graph(tmp_path: Path) -> None:
    import keras

    words = keras.Input([1], dtype="string", name="words")
    lookup = keras.layers.StringLookup(name="ids")
    lookup.adapt(np.array(["a", "b"]))
    found = keras.layers.Flatten()(keras.layers.Embedding(9, 2, name="table")(lookup(words)))
    model = keras.Model(words, keras.layers.Dense(1, name="out")(found))
    model.compile("adam", "mse")
    model.save(tmp_path / "m.keras")
    request = ExportRequest(tmp_path / "m.keras", tmp_path / "model")
    export_incremental(request)
    model.optimizer.learning_rate = 0.5
    model.save(tmp_path / "m.keras")
    assert export_incremental(request).published is not None, "how it is trained does not count"
    lookup.adapt(np.array(["b", "a", "c"]))
    model.save(tmp_path / "m.keras")
    with pytest.raises(SchemaChanged, match="graph or its files"):
        export_incremental(request)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published as an archive is that archive: no mixture, and no older values under its digest."""
    runs.save(2)
    real, late = trainer_state.write_bundle, iter([3])

    def written(*given: Any) -> Any:
        done = real(*given)
        for epoch in late:
            runs.save(epoch, "epoch-02.keras")
        return done

    monkeypatch.setattr(trainer_state, "write_bundle", written)
    runs.follow()
    runs.assert_holds(3)
    late = iter([1])
    runs.save(2)
    with pytest.raises(CheckpointChanged, match="was replaced while it was exported"):
        export_incremental(ExportRequest(runs.train / "epoch-02.keras", runs.model))
    runs.assert_holds(3)


def test_an_archive_that_is_half_written_is_refused_by_name(runs: Runs) -> None:
    whole = runs.save(2)
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    ran = export_model("--ckpt-dir", runs.train, "--out", runs.model, "--incr", "--json")
    assert (ran.code, whole.name in ran.error["message"]) == (3, True), ran.err
    whole.write_bytes(content)
    runs.follow()
    runs.assert_holds(2)


def test_a_look_reads_no_archive_that_looks_as_it_did(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch looks each second."""
    opened: list[Path] = []
    real = trainer_state.open_checkpoint
    monkeypatch.setattr(trainer_state, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(trainer_state, "open_checkpoint", lambda path: (opened.append(path), real(path))[1])
    for epoch in (2, 3):
        runs.save(epoch, "epoch-01.keras")
        done = [export_incremental(runs.request(), is_watching=True) for _ in range(3)]
        assert [each.published is None for each in done] == [False, True, True]
    assert len(opened) == 2
    runs.assert_holds(3)


@pytest.mark.landing
def test_a_watch_publishes_what_comes(runs: Runs) -> None:
    words = ["--ckpt-dir", runs.train, "--out", runs.model, "--incr", "--watch", "--until", "count=2"]
    watch = subprocess.Popen([sys.executable, "-m", "exporter", *words], stderr=subprocess.PIPE, text=True)
    for epoch, position in ((2, 3), (3, 6)):
        runs.save(epoch, "epoch-01.keras")
        deadline = time.monotonic() + 120
        while runs.log.at.position < position:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    _, said = watch.communicate(timeout=120)
    assert watch.returncode == 0, said
    runs.assert_holds(3)


@pytest.mark.landing
def test_steps_of_orbax(tmp_path: Path) -> None:
    """A directory of many files for each step; what Keras keeps there describes its model."""
    pytest.importorskip("tensorstore")
    with tarfile.open(FIXTURES / "orbax/0.12.8.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    request = ExportRequest(tmp_path / "runs", tmp_path / "model")
    for step in ("1", "2"):
        shutil.copytree(tmp_path / "keras" / step, tmp_path / "runs" / step)
        export_incremental(request)
    assert [delta.manifest.step for delta in read_log(request.out).deltas] == [12]
    assert export_model("diff", request.out, tmp_path / "runs", "--exit-code").code == 0
    assert export_incremental(request).published is None


def export(model: Path) -> None:
    export_incremental(ExportRequest(model.parent / "runs", model))


@pytest.mark.landing
def test_killed_at_any_step_and_run_again(trained: Path, published: Path, tmp_path: Path) -> None:
    """The next run goes on from whatever a kill left."""

    def anew(name: str) -> Runs:
        shutil.copytree(published, tmp_path / name)
        found = Runs(trained, tmp_path / name)
        found.save(2)
        return found

    steps = count_steps(export, anew("counted").model)
    outcomes: dict[int, object] = {}
    for point in points(steps, 0, outcomes):
        again = anew(f"{point}")
        assert killed_at(point, export, again.model) == -signal.SIGKILL
        outcomes[point] = again.log.at.position
        assert not verify_model(again.model).problems
        again.follow()
        again.assert_holds(2)
        assert len(again.log.deltas) == 1
        shutil.rmtree(tmp_path / f"{point}")


@pytest.mark.landing
def test_two_at_once_publish_one_delta(runs: Runs) -> None:
    runs.save(2)
    both = [FORKS.Process(target=export, args=(runs.model,)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    assert [each.exitcode for each in both] == [0, 0]
    runs.assert_holds(2)
    assert len(runs.log.deltas) == 1


def test_weights_need_a_model_and_are_refused_without_one(trained: Path, tmp_path: Path) -> None:
    runs = Runs(trained, tmp_path, "keras3.weights.h5")
    runs.save(1)
    ran = export_model("--ckpt-dir", runs.train, "--out", runs.model, "--incr", "--json")
    assert ran.code == 2
    assert "what to serve" in ran.error["message"]
