"""What a URL means: a directory, one checkpoint, one of its files; and what else lies there."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.checkpoint import open_checkpoint
from exporter.errors import CheckpointNotFound
from exporter.storage.mirror import refresh
from tests.support.commands import export_model
from tests.support.logs import Trainer
from tests.support.object_stores import Bucket
from tests.support.remote_models import published_log


@pytest.fixture
def trainer(bucket: Bucket, tmp_path: Path) -> Trainer:
    """Its checkpoint of step 10 is at `train`."""
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    bucket.upload(trainer.directory, "train")
    return trainer


@pytest.mark.parametrize(
    "name",
    ["", "/", "/checkpoint", "/model.ckpt-10", "/model.ckpt-10.index", "/model.ckpt-10.data-00000-of-00001"],
)
def test_a_checkpoint_by_each_of_its_names(bucket: Bucket, trainer: Trainer, name: str) -> None:
    assert open_checkpoint(Path(bucket.url(f"train{name}"))).step == 10


def test_what_is_like_it_is_named(bucket: Bucket, trainer: Trainer) -> None:
    ran = export_model("inspect", bucket.url("train/model.ckpt-11"), "--json")
    assert (ran.code, ran.error["hint"]) == (3, f"name what is there: {bucket.url('train/model.ckpt-10')}")


def test_a_trainer_that_has_not_begun(bucket: Bucket, tmp_path: Path) -> None:
    """As a watch meets it: it looks again."""
    url = Path(bucket.url("later"))
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(url)
    trainer = Trainer(tmp_path / "train")
    trainer.save()
    bucket.put("later/", b"")  # as TensorFlow does first
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(url)
    bucket.upload(trainer.directory, "later")
    assert open_checkpoint(url).step == 10


def test_what_marks_a_directory_is_no_file(bucket: Bucket, trainer: Trainer) -> None:
    """Consoles, and TensorFlow's own file systems, put an empty object where a directory is to be."""
    for key in ("train/", "train/eval/", "train/eval/events", "train/a", "train/a/b/c", f"train/{'x' * 300}"):
        bucket.put(key, b"")
    found = open_checkpoint(Path(bucket.url("train")))
    assert found.step == 10
    bucket.delete("train/eval/events")
    refresh(found.prefix)
    names = {path.relative_to(found.prefix.parent).as_posix() for path in found.prefix.parent.rglob("*")}
    assert names >= {"eval", "a/b/c", "checkpoint"}
    assert open_checkpoint(Path(bucket.url("train"))).step == 10


def test_a_state_file_means_no_file_of_this_machine(bucket: Bucket, trainer: Trainer) -> None:
    """The trainer's path may be there, too, with another checkpoint, or not be meant for who asks."""
    bucket.put("copy/checkpoint", f'model_checkpoint_path: "{trainer.directory}/model.ckpt-10"'.encode())
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint"):
        open_checkpoint(Path(bucket.url("copy")))


def test_a_state_file_means_what_is_below_it(bucket: Bucket, trainer: Trainer) -> None:
    """As with `CheckpointManager(checkpoint_name="sub/model.ckpt")`, but nothing above it."""
    bucket.upload(trainer.directory, "copy/sub")
    bucket.put("copy/checkpoint", b'model_checkpoint_path: "sub/model.ckpt-10"')
    assert open_checkpoint(Path(bucket.url("copy"))).prefix.parent.name == "sub"
    up = "/".join([".."] * 30)
    bucket.put("up/checkpoint", f'model_checkpoint_path: "{up}{trainer.directory}/model.ckpt-10"'.encode())
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(Path(bucket.url("up")))


def test_commands_that_are_named_can_be_pasted(bucket: Bucket, tmp_path: Path) -> None:
    model = published_log(tmp_path, 20)
    url = bucket.url("our models/ranker")
    pushed = export_model("push", model, url)
    assert f"export-model pull '{url}' MODEL" in pushed.out
    ran = export_model("pull", bucket.url("a b"), tmp_path / "copy", "--json")
    assert ran.error["hint"] == f"publish one: export-model push {tmp_path / 'copy'} '{bucket.url('a b')}'"
    for whole in (bucket.url(), bucket.url().rstrip("/")):
        ran = export_model("history", whole, "--json")
        assert (ran.code, ran.error["hint"]) == (2, f"name one: {bucket.url()}MODEL")


def test_a_version_is_no_place_for_a_model(bucket: Bucket, tmp_path: Path) -> None:
    model, url = published_log(tmp_path, 20), bucket.url("ranker")
    assert export_model("push", model, url).code == 0
    before = bucket.names()
    for command in (("pull", url, model / "10"), ("push", model, f"{url}/10"), ("history", f"{url}/10")):
        ran = export_model(*command, "--json")
        assert (ran.code, "is itself a version" in ran.error["message"]) == (2, True), ran.err
    for inside in ("10/a", "deltas", "deltas/a/b", "77"):
        for command in (("pull", url, model / inside), ("push", model, f"{url}/{inside}")):
            ran = export_model(*command, "--json")
            assert (ran.code, "lies in the published model" in ran.error["message"]) == (2, True), ran.err
    assert not list((model / "10").glob(".*"))
    assert bucket.names() == before


def test_what_is_not_copied_from_store_to_store(bucket: Bucket, tmp_path: Path) -> None:
    for command in (("push", bucket.url("a"), bucket.url("b")), ("pull", bucket.url("a"), bucket.url("b"))):
        ran = export_model(*command, "--json")
        assert (ran.code, "export-model pull" in ran.error["hint"]) == (2, True), ran.err
