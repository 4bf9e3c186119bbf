"""A trainer that writes into a file that a version links to is noticed, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exporter.bundle import link
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.publish.versions import read_manifest
from serving.agent.journal import Journal
from serving.agent.publications import FollowedModel, Publications
from tests.support.commands import Ran, export_model

BUILDER = """
import tensorflow as tf

def serving():
    row = tf.compat.v1.placeholder(tf.int64, [None], name="row")
    table = tf.compat.v1.get_variable("table", [64, 8], use_resource=True)
    return {"row": row}, {"y": tf.gather(table, row)}
"""


def save(directory: Path, value: float, name: str = "model.ckpt") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with BundleWriter(directory / name) as writer:
        writer.add("table", np.full([64, 8], value, np.float32))
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')


class Best:
    """A trainer that keeps its best checkpoint in one place, by copying another one over it."""

    def __init__(self, directory: Path) -> None:
        self.live, self.other, self.model = directory / "live", directory / "other", directory / "m"
        self.builder = directory / "serving.py"

    @property
    def shard(self) -> Path:
        return self.live / "model.ckpt.data-00000-of-00001"

    @property
    def linked(self) -> Path:
        return self.version / "variables/variables.data-00000-of-00001"

    @property
    def version(self) -> Path:
        return max(self.model.glob("[0-9]*"), key=lambda path: int(path.name))

    def export(self, *options: object) -> Ran:
        named = ("--model", f"{self.builder}:serving", "--out", self.model)
        return export_model("--ckpt-dir", self.live, *named, *options)

    def verify(self, *options: object) -> Ran:
        return export_model("verify", self.model, "--json", *options)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    best = Best(tmp_path_factory.mktemp("best"))
    save(best.live, 1.0)
    save(best.other, 2.0)
    os.utime(best.other / best.shard.name, ns=(10**18, 10**18 + 7))
    best.builder.write_text(BUILDER)
    ran = best.export("--new-base=always")
    assert ran.code == 0, ran.err
    return best.model.parent


@pytest.fixture
def best(exported: Path, tmp_path: Path) -> Best:
    """The same files elsewhere, with their links, and the record of what these are there."""
    target = tmp_path / "best"
    subprocess.run(["cp", "-a", exported, target], check=True)
    found = Best(target)
    assert found.linked.samefile(found.shard)
    record(found)
    return found


def record(best: Best) -> None:
    """Let the manifest describe the links that are there now, as it does right after an export."""
    path, found = best.version / "manifest.json", best.linked.stat()
    document = json.loads(path.read_text())
    (entry,) = (file for file in document["files"] if "linked" in file)
    entry["linked"] = {
        "inode": found.st_ino,
        "links": found.st_nlink,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }
    path.write_text(json.dumps(document))


def copied_over(best: Best) -> None:
    shutil.copyfile(best.other / best.shard.name, best.shard)


def copied_with_its_time(best: Best) -> None:
    subprocess.run(["cp", "-p", best.other / best.shard.name, best.shard], check=True)


def copied_and_set_back(best: Best) -> None:
    before = best.shard.stat()
    copied_over(best)
    os.utime(best.shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def copied_and_pruned(best: Best) -> None:
    copied_over(best)
    best.shard.unlink()


def grown(best: Best) -> None:
    with best.shard.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "write", [copied_over, copied_with_its_time, copied_and_set_back, copied_and_pruned, grown]
)
def test_a_file_that_was_written_to_is_named_with_the_way_out(
    best: Best, write: Callable[[Best], None]
) -> None:
    assert best.verify().code == 0
    write(best)
    ran = best.verify()
    (problem,) = ran.document["problems"]
    assert (ran.code, best.linked.name in str(problem)) == (6, True)
    assert "hard link to a file of the trainer" in str(problem) and "--data compact" in ran.err
    ran = export_model("doctor", best.model)
    assert ran.code == 6 and "--data compact" in ran.out + ran.err


def touched(best: Best) -> None:
    best.shard.touch()


def pruned(best: Best) -> None:
    best.shard.unlink()


def linked_again(best: Best) -> None:
    os.link(best.shard, best.live / "backup")


def its_mode_changed(best: Best) -> None:
    best.shard.chmod(0o444)


def replaced(best: Best) -> None:
    """As a Saver does, and `rsync`."""
    new = best.live / "new"
    shutil.copyfile(best.other / best.shard.name, new)
    new.replace(best.shard)


def moved_to_another_disk(best: Best) -> None:
    shutil.copytree(best.model, elsewhere := best.model.with_name("elsewhere"))  # new inodes, old times
    shutil.rmtree(best.model)
    elsewhere.rename(best.model)
    copied_over(best)


def restored_without_times(best: Best) -> None:
    subprocess.run(["cp", "-r", best.model, best.model.with_name("restored")], check=True)
    shutil.rmtree(best.model)
    best.model.with_name("restored").rename(best.model)


def read_with_coarse_times(best: Best) -> None:
    """A file server that keeps seconds alone, since it was mounted anew."""
    seconds = best.shard.stat().st_mtime_ns // 10**9 * 10**9
    os.utime(best.shard, ns=(seconds, seconds))


@pytest.mark.parametrize(
    "happens",
    [
        touched,
        pruned,
        linked_again,
        its_mode_changed,
        replaced,
        moved_to_another_disk,
        restored_without_times,
        read_with_coarse_times,
    ],
)
def test_nothing_else_is_taken_for_it(best: Best, happens: Callable[[Best], None]) -> None:
    happens(best)
    assert best.verify().code == 0


def test_it_is_seen_without_reading_a_byte(best: Best) -> None:
    version = best.version
    assert read_manifest(version).overwritten(version) == []
    followed = Publications(FollowedModel("m", best.model), Journal(), 1.0)
    assert followed.overwritten() == ""
    copied_over(best)
    assert read_manifest(version).overwritten(version) == [best.linked]
    assert str(best.linked) in followed.overwritten()
    assert Publications(FollowedModel("m", best.model, is_copy=True), Journal(), 1.0).overwritten() == ""


def test_a_version_without_the_record_is_as_before(best: Best) -> None:
    path = best.version / "manifest.json"
    document = json.loads(path.read_text())
    for file in document["files"]:
        file.pop("linked", None)
    path.write_text(json.dumps(document))
    copied_over(best)
    assert best.verify().code == 0
    assert best.verify("--bytes").code == 6


def test_a_trainer_that_overwrites_is_told_and_gets_copies(best: Best) -> None:
    assert "OVERWRITTEN" not in export_model("doctor", best.model, "--ckpt-dir", best.live).out
    for file in best.other.iterdir():
        with (best.live / file.name).open("wb") as there:
            there.write(file.read_bytes())
    ran = export_model("doctor", best.model, "--ckpt-dir", best.live)
    assert "writes new checkpoints into the files of earlier ones" in ran.out + ran.err
    ran = best.export("--new-base=always")
    assert ran.code == 0, ran.err
    assert "was written to after it was published" in ran.err
    assert "1 shard compacted" in ran.out
    assert not best.linked.samefile(best.shard)
    copied_over(best)
    assert "linked" not in (best.version / "manifest.json").read_text()


def test_a_delta_over_it_says_so(best: Best) -> None:
    copied_over(best)
    os.utime(best.shard)  # its index is the old one: only the version's shard is of interest here
    (best.live / "increments").mkdir()
    ran = best.export("--incr", "--dry-run")
    assert "was written to after it was published" in ran.err


def test_an_export_says_that_it_links(best: Best) -> None:
    ran = best.export("--again", "--new-base=always", "--dry-run")
    assert "the trainer may remove these files, and must not write into them" in ran.out
    ran = best.export("--again", "--new-base=always", "--dry-run", "--data", "compact")
    assert "the trainer may remove" not in ran.out


def test_a_file_system_without_clones_gets_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"bytes" * 1000)
    if link.clone_shard(source, target, size=5000):
        assert target.read_bytes() == source.read_bytes() and not target.samefile(source)
    else:
        assert not target.exists()
