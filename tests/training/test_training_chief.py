from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from exporter import training
from exporter.checkpoint import open_checkpoint
from exporter.errors import CheckpointNotFound, RoleUnknown, TargetNotWritable
from exporter.training import checkpoint_dir, is_chief
from exporter.training.chief import is_multi_worker

WORKERS = {"worker": ["a:1", "b:1", "c:1"]}


def be(monkeypatch: pytest.MonkeyPatch, type_: str, index: int, cluster: Any = WORKERS) -> None:
    config = {"cluster": cluster, "task": {"type": type_, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def save(directory: Path, value: float = 1.0) -> None:
    checkpoint = tf.train.Checkpoint(v=tf.Variable(value))
    tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2).save()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# --- who is chief ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "index", "cluster", "expected"),
    [
        ("worker", 0, WORKERS, True),
        ("worker", 1, WORKERS, False),
        ("chief", 0, {"chief": ["z:1"], **WORKERS}, True),
        ("worker", 0, {"chief": ["z:1"], **WORKERS}, False),
        ("ps", 0, {"ps": ["z:1"], **WORKERS}, False),
        ("evaluator", 0, WORKERS, False),
    ],
)
def test_the_environment_tells(
    monkeypatch: pytest.MonkeyPatch, type_: str, index: int, cluster: Any, expected: bool
) -> None:
    be(monkeypatch, type_, index, cluster)
    assert is_chief() is expected


def test_a_contradiction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "worker", 7)
    with pytest.raises(RoleUnknown):
        is_chief()


def test_a_strategy_in_one_process_is_its_own_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "worker", 1)
    for strategy in (tf.distribute.MirroredStrategy(["/cpu:0"]), tf.distribute.get_strategy()):
        assert is_chief(strategy)
        assert not is_multi_worker(strategy)


def test_what_a_strategy_tells_is_not_asked_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, "worker", 7)  # contradicts itself
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    assert is_chief(strategy)
    with checkpoint_dir(tmp_path / "train", strategy) as directory:
        assert directory == tmp_path / "train"


def test_importing_a_name_imports_no_tensorflow() -> None:
    code = "import sys; from exporter.training import checkpoint_dir; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


# --- where it saves ----------------------------------------------------------------------------------------


def test_the_chief_saves_into_the_directory_itself(tmp_path: Path) -> None:
    with checkpoint_dir(tmp_path / "deep" / "train") as directory:
        assert directory == tmp_path / "deep" / "train"
        save(directory)
    assert files(directory) >= {"checkpoint", "ckpt-1.index"}


def test_a_worker_saves_beside_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    before = files(tmp_path)
    be(monkeypatch, "worker", 2)
    with checkpoint_dir(tmp_path) as directory:
        assert directory == tmp_path / "workertemp_2"
        save(directory, 5.0)
        assert (directory / "ckpt-1.index").exists()
        assert open_checkpoint(tmp_path).prefix == tmp_path / "ckpt-1"
    assert files(tmp_path) == before


def test_nothing_stays_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "evaluator", 0)
    with pytest.raises(ZeroDivisionError), checkpoint_dir(tmp_path) as directory:
        save(directory)
        raise ZeroDivisionError
    assert directory.name == "workertemp_evaluator_0"
    assert files(tmp_path) == set()


@pytest.mark.landing
def test_what_a_killed_worker_left_is_removed_by_its_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys, tensorflow as tf\n"
        "from exporter.training import checkpoint_dir\n"
        "with checkpoint_dir(sys.argv[1]) as directory:\n"
        "    tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(directory / 'ckpt'))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    be(monkeypatch, "worker", 1)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, timeout=300)
    assert done.returncode == -9
    assert (tmp_path / "workertemp_1" / "ckpt-1.index").exists()
    with pytest.raises(CheckpointNotFound) as caught:
        open_checkpoint(tmp_path)
    assert "workertemp" not in f"{caught.value.hint}"
    with checkpoint_dir(tmp_path) as directory:
        assert files(directory) == set()
    assert files(tmp_path) == set()


def test_a_link_in_the_place_of_a_temporary_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "workertemp_1").symlink_to(tmp_path / "other")
    be(monkeypatch, "worker", 1)
    with checkpoint_dir(tmp_path / "train"):
        pass
    assert files(tmp_path / "other") == {"precious"}


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TargetNotWritable), checkpoint_dir(tmp_path / "file" / "train"):
        pass


def test_autodist_workers_are_told_apart_by_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTODIST_WORKER", "10.0.0.2")
    with checkpoint_dir(tmp_path) as directory:
        assert re.fullmatch(r"workertemp_[\w-]+", directory.name)


# --- the package -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", training.__all__)
def test_each_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(training, name).__doc__


def test_type_checkers_see_the_same_names() -> None:
    source = Path(training.__file__).read_text()
    assert sorted(re.findall(r"^    from \S+ import (\w+) as \1$", source, re.MULTILINE)) == training.__all__
