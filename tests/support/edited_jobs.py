"""A model whose builder, vocabulary and imports are edited between its base and a delta."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter
from tests.support.commands import Ran, export_model

BUILDER = '''
import os
import tensorflow as tf
from layers import activate

def serving(scale: float = 1.0):
    """Scores."""
    word = tf.compat.v1.placeholder(tf.string, [None], name="word")
    table = tf.lookup.StaticVocabularyTable(tf.lookup.TextFileInitializer(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "words.txt"),
        tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER), 1)
    weights = tf.compat.v1.get_variable("weights", [4, 2], use_resource=True)
    return {"word": word}, {"y": activate(tf.gather(weights, table.lookup(word))) * scale}
'''


LAYERS = "import tensorflow as tf\n\ndef activate(x):\n    return tf.sigmoid(x)\n"


class Job:
    """A builder with a neighbour and a vocabulary, and the checkpoints of a trainer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.vocabulary = directory / "words.txt"
        self.code = directory / "model.py"
        self.layers = directory / "layers.py"

    @classmethod
    def begin(cls, directory: Path) -> Job:
        """Files of a user, a first checkpoint, and a base published from it."""
        job = cls(directory)
        job.vocabulary.write_text("a\nb\nc\n")
        job.code.write_text(BUILDER)
        job.layers.write_text(LAYERS)
        (directory / "train").mkdir()
        job.save(10)
        ran = job.program("--incr")
        assert ran.returncode == 0, ran.stderr
        return job

    def copy(self, directory: Path) -> Job:
        """The same job elsewhere, as if it had begun there."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True)
        (kept,) = directory.glob("model/deltas/*/.state/sources.json")
        kept.write_text(kept.read_text().replace(str(self.directory), str(directory)))
        return Job(directory)

    def save(self, step: int) -> None:
        with BundleWriter(self.directory / f"train/model.ckpt-{step}") as writer:
            writer.add("global_step", np.array(step, np.int64))
            writer.add("weights", np.full((4, 2), step / 7, np.float32))
        (self.directory / "train/checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')

    def export(self, *options: object, model: str | None = "model.py:serving") -> Ran:
        named = () if model is None else ("--model", self.directory / model)
        where = ("--ckpt-dir", self.directory / "train", "--out", self.directory / "model")
        return export_model(*where, *named, "--incr", "--json", *options)

    def program(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The export as a process of its own, which may import TensorFlow and the builder."""
        command = ["--ckpt-dir", "train", "--out", "model", "--model", "model.py:serving", *options]
        program = [sys.executable, "-m", "exporter", *command]
        return subprocess.run(program, cwd=self.directory, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job.begin(tmp_path_factory.mktemp("begun"))


def refused(ran: Ran, what: str) -> None:
    assert ran.code == 5, ran.err
    assert ran.error["error"] == "SchemaChanged"
    assert what in ran.error["cause"]
    assert "--new-base if-needed" in ran.error["hint"]
