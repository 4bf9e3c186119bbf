"""Libraries that people train with, for real, each in an environment of its own, with increments.

EasyRec is in no package index: EASYREC names a checkout of it, without which its test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import ExportRequest, Updates, export, export_incremental
from exporter.checkpoint.locate import candidates
from exporter.increments.history import read_history
from tests.support.environments import ROOT, clean_environ, python_of
from tests.support.guide_pages import Page
from tests.support.increments import differing, full, starts, values_of
from tests.support.updatable import loaded

pytestmark = [pytest.mark.landing, pytest.mark.timeout(1800)]


class Library:
    """Runs of a trainer of `tests/support` in a library's environment, with the trainer's side beside it."""

    def __init__(self, name: str, trainer: str, directory: Path) -> None:
        self._python, self._trainer = python_of(name), Path(__file__).parents[1] / "support" / trainer
        self.directory, self.train = directory, directory / "train"
        shutil.copy(ROOT / "exporter/training/trainer_side.py", directory / "export_model_trainer.py")
        self.environment = {**clean_environ(), "PYTHONPATH": str(directory)}

    def run(self, **job: Any) -> str:
        """What a run of the trainer prints."""
        text = json.dumps({"directory": str(self.directory), **job})
        return self.python(str(self._trainer), text)

    def python(self, *words: str) -> str:
        """What the environment's Python prints.

        Raises:
            AssertionError: it failed, with the end of that.
        """
        done = subprocess.run(
            [self._python, "-W", "ignore", *words],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def assert_exact(self) -> None:
        """Each full checkpoint is, with the increments after it, the newest one, bit for bit."""
        newest, history = candidates(self.train)[0], read_history(self.train)
        equal = history.same(full(self.train, newest.name))
        known = starts(history, self.train)
        assert {start.name for start in known} == {path.stem for path in self.train.glob("*.index")}
        for start in known:
            chain = history.after(start)
            assert start in equal or chain[-1].increment.id in equal, start
            assert differing(self.train, start, newest, chain) == [], start


@pytest.fixture
def easyrec(tmp_path: Path) -> Library:
    """EasyRec, from a copy of the checkout in which its protos are compiled."""
    checkout = os.environ.get("EASYREC")
    if not checkout:
        pytest.skip("EASYREC names no checkout of EasyRec")
    library = Library("EasyRec", "easyrec_trainer.py", tmp_path)
    for name in ("easy_rec", "samples"):
        shutil.copytree(Path(checkout) / name, tmp_path / name)
    protos = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("easy_rec/python/protos/*.proto")]
    library.python("-m", "grpc_tools.protoc", "-I.", "--python_out=.", *protos)
    (block,) = Page("docs/from/easyrec.md").tested_by("test_easyrec")
    text = block.text.replace("save_increment_secs=10", "save_increment_steps=5")
    (tmp_path / "train.py").write_text(text)
    return library


def test_easyrec(easyrec: Library) -> None:
    """Its own `train_and_evaluate`, whose saver is a hook that comes after; its own SavedModel's graph."""
    train, job = easyrec.train, {"optimizer": "adagrad_optimizer", "batch_norm": True}
    easyrec.run(steps=30, save_checkpoint_steps=20, **job)
    easyrec.python("train.py")
    (graph,) = (train / "export/final").iterdir()
    request = ExportRequest(train, easyrec.directory / "model", model=str(graph), updates=Updates())
    base = export(request)
    with loaded(base.published.path) as server:
        (train / "ESTIMATOR_TRAIN_DONE").unlink()
        easyrec.run(steps=70, save_checkpoint_steps=20, **job)
        said = easyrec.python("train.py")
        assert "0 variables by compared rows" in said
        easyrec.assert_exact()
        delta = export_incremental(request)
        assert delta.published is not None
        assert delta.compared_bytes == 0, delta.reason
        server.update()
        newest = max((train / "export/final").iterdir())
        assert newest != graph
        plain = export(ExportRequest(train, easyrec.directory / "plain", model=str(newest)))
        beside = easyrec.directory / "with pipeline.config"
        # EasyRec's predictor takes any JSON that it finds for the features of its own format.
        shutil.copytree(plain.published.path, beside, ignore=shutil.ignore_patterns("manifest.json"))
        shutil.copytree(newest / "assets", beside / "assets")
        easyrec.run(predict=[str(newest), str(beside)])
        answers = json.loads((easyrec.directory / "answers.json").read_text())
        own = answers[str(newest)]
        assert len({*own}) > 10
        assert answers[str(beside)] == own  # in EasyRec's own TensorFlow, bit for bit
        assert plain.published.version == 70
        lines = (easyrec.directory / "data.csv.requests").read_text().splitlines()
        found = server.predict(features=np.array(lines, object))
        np.testing.assert_allclose(found["probs"], own, atol=1e-6)


def test_tensorlayer(tmp_path: Path) -> None:
    """Its layers in its session; what is served is what was trained."""
    library = Library("TensorLayer", "tensorlayer_trainer.py", tmp_path)
    library.run(steps=20)
    model = f"{ROOT}/tests/support/tensorlayer_trainer.py:serving"
    said, values, ids, answer = _trained_on(library, model)
    assert "0 variables by compared rows" in said
    rows = values["words/embeddings"][ids].reshape(-1, 12)
    assert answer["rows"].tobytes() == rows.tobytes()
    np.testing.assert_allclose(answer["out"], rows @ values["out/W"] + values["out/b"], 1e-5, 1e-6)


def _trained_on(
    library: Library, model: str, **job: Any
) -> tuple[str, Mapping[str, np.ndarray], np.ndarray, Mapping[str, np.ndarray]]:
    """Export, train on, update: what the trainer said, its values, ids, and what is answered for them."""
    request = ExportRequest(library.train, library.directory / "model", model=model, updates=Updates())
    with loaded(export(request).published.path) as server:
        said = library.run(steps=47, **job)
        library.assert_exact()
        delta = export_incremental(request)
        assert delta.published is not None
        assert delta.compared_bytes == 0, delta.reason
        server.update()
        ids = np.arange(300).reshape(-1, 3)
        return said, values_of(candidates(library.train)[0]), ids, server.predict(ids=ids)


def test_autodist(tmp_path: Path) -> None:
    """Its strategies on one machine: rows are recorded in the graph that it trains, parts and all."""
    _train_by_autodist(tmp_path / "whole", "PS", cpus=[0])
    _train_by_autodist(tmp_path / "replicas", "PS", cpus=[0, 1])
    _train_by_autodist(tmp_path / "asynchronous", "PS", cpus=[0], options={"sync": False})
    _train_by_autodist(tmp_path / "parts", "PartitionedPS", cpus=[0, 1])
    _train_by_autodist(tmp_path / "uneven", "UnevenPartitionedPS", cpus=[0, 1])
    said = _train_by_autodist(tmp_path / "compared", "PartitionedPS", cpus=[0], optimizer="AdamOptimizer")
    assert "may change any row of table, table/Adam, table/Adam_1" in said
    by_optimizer = (
        _loop().replace("(loss)", "(loss, step)").replace('tf.assign_add(step, 1, name="count")', "step")
    )
    with pytest.raises(AssertionError, match="does not count steps"):
        _autodist(tmp_path / "no step").run(strategy="PartitionedPS", cpus=[0], steps=9, loop=by_optimizer)


def _autodist(directory: Path) -> Library:
    """AutoDist, without its way of ending all that looks like a server of its own."""
    (directory / "bin").mkdir(parents=True)
    (directory / "bin/ps").write_text("#!/bin/sh\n")
    (directory / "bin/ps").chmod(0o755)
    library = Library("AutoDist", "real_autodist_trainer.py", directory)
    library.environment["PATH"] = f"{directory}/bin:{os.environ['PATH']}"
    return library


def _loop() -> str:
    """The page's program."""
    (block,) = Page("docs/from/others.md").tested_by("test_autodist")
    return block.text.replace("save_increment_secs=10", "save_increment_steps=5").replace("1000", "20")


def _train_by_autodist(directory: Path, strategy: str, **job: Any) -> str:
    """Train, export, train on, update; what the trainer said."""
    library = _autodist(directory)
    job = {"strategy": strategy, "loop": _loop(), **job}
    library.run(steps=20, **job)
    model = f"{ROOT}/tests/support/real_autodist_trainer.py:serving"
    said, values, ids, answer = _trained_on(library, model, **job)
    assert int(values["global_step"]) == 47
    rows = values["table"][ids].reshape(-1, 12)
    assert answer["rows"].tobytes() == rows.tobytes()
    np.testing.assert_allclose(answer["out"], rows @ values["out/kernel"] + values["out/bias"], 1e-5, 1e-6)
    return said
