"""A repository that was cloned without its large files: what is read may be a pointer of Git LFS."""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path

import pytest

from exporter.errors import Exit, ManifestError
from exporter.publish.versions import read_head, read_manifest
from exporter.transfer.items import local_item
from tests.support.commands import export_model


def point(path: Path) -> None:
    """Put a pointer in a file's place, as git does without the filter (docs/spec.md of git-lfs)."""
    content = path.read_bytes()
    path.unlink()  # it may be a link to what other tests read
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{hashlib.sha256(content).hexdigest()}\n"
        f"size {len(content)}\n"
    )


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel with variables and a vocabulary, written by TensorFlow."""
    import tensorflow as tf

    directory = tmp_path_factory.mktemp("lfs")
    words = directory / "words.txt"
    words.write_text("a\nb\n")

    class Model(tf.Module):
        def __init__(self) -> None:
            start = tf.lookup.TextFileInitializer(
                str(words),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            )
            self.table = tf.lookup.StaticHashTable(start, -1)
            self.weights = tf.Variable(tf.random.normal([300, 2]))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="word")])
        def score(self, word: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"y": tf.gather(self.weights, tf.maximum(self.table.lookup(word), 0))}

    model = Model()
    tf.saved_model.save(model, str(directory / "model"), signatures={"serving_default": model.score})
    return directory / "model"


@pytest.mark.parametrize(
    "name",
    [
        "saved_model.pb",
        "variables/variables.index",
        "variables/variables.data-00000-of-00001",
        "assets/words.txt",
    ],
)
def test_files_of_a_saved_model(saved_model: Path, tmp_path: Path, name: str) -> None:
    model = shutil.copytree(saved_model, tmp_path / "model")
    assert export_model("--ckpt-dir", model, "--out", tmp_path / "whole").code == 0
    point(model / name)
    assert_told(tmp_path, model, model / name)


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001", ".meta"])
def test_files_of_a_checkpoint(ranker: Path, tmp_path: Path, suffix: str) -> None:
    train = shutil.copytree(ranker, tmp_path / "train")
    for file in train.glob(f"*{suffix}"):
        point(file)
    assert_told(tmp_path, train, suffix)


@pytest.mark.parametrize("name", ["checkpoint", ".meta"])
def test_files_that_an_export_can_do_without(ranker: Path, tmp_path: Path, name: str) -> None:
    train = shutil.copytree(ranker, tmp_path / "train")
    for file in train.glob(f"*{name}"):
        point(file)
    found = export_model("inspect", train, "--json")
    assert (found.code, found.document["step"]) == (0, 20), found.err


@pytest.mark.parametrize(
    "name", ["m.h5", "m.keras", "m.weights.h5", "m.npz", "m.safetensors", "m.safetensors.index.json"]
)
def test_archives(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"\0" * 5000)
    point(file)
    found = export_model("inspect", file)
    assert found.code == Exit.CHECKPOINT
    assert f"{file} is a pointer of Git LFS" in found.err
    assert "git lfs pull" in found.err


def assert_told(tmp_path: Path, source: Path, what: object) -> None:
    """The export names the file and the command, and publishes nothing."""
    found = export_model("--ckpt-dir", source, "--out", tmp_path / "out", "--json")
    assert found.error["error"] == "LfsPointer"
    assert str(what) in found.error["message"]
    assert "git lfs pull" in found.error["hint"]
    assert not list((tmp_path / "out").glob("[0-9]*"))


def test_a_manifest_that_is_a_pointer_is_one_that_cannot_be_read(tmp_path: Path) -> None:
    """It was an error of checkpoints, which no reader of a published model expected."""
    model = Path(shutil.copytree(Path(__file__).parents[1] / "golden/0.2.1/models/plain", tmp_path / "m"))
    newest = max(model.glob("[0-9]*"), key=lambda path: int(path.name))
    point(newest / "manifest.json")
    for read in (read_manifest, read_head, partial(local_item, model)):
        with pytest.raises(ManifestError) as caught:
            read(newest)
        assert (caught.value.cause, "git lfs pull" in caught.value.hint) == (
            "it is a pointer of Git LFS",
            True,
        )
