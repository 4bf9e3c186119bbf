"""Directories of numbered directories with one checkpoint each: the newest is taken, as of Orbax's steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from exporter import export_incremental
from exporter.checkpoint import candidates, open_checkpoint
from exporter.errors import CheckpointError, CheckpointNotFound
from tests.support.bundles import write
from tests.support.commands import export_model


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three archives of one model, of other values each."""
    x = keras.Input([3], name="x")
    model = keras.Model(x, keras.layers.Dense(2, name="y")(x))
    directory = tmp_path_factory.mktemp("archives")
    for number in range(3):
        model.set_weights([np.full_like(value, number) for value in model.get_weights()])
        model.save(directory / f"{number}.keras")
    return [directory / f"{number}.keras" for number in range(3)]


def lay(archive: Path, directory: Path, name: str = "model.keras") -> Path:
    directory.mkdir(parents=True)
    return Path(shutil.copy(archive, directory / name))


RUNS = {
    "dates": ("2026-11-29_10-00-59", "2026-11-29_10-01-03", "model.keras"),
    "Ray Train": ("checkpoint_000009", "checkpoint_000010", "model.keras"),
    "MLflow": ("global_step_9", "global_step_10", "checkpoint.keras"),
    "Lightning": ("version_9/checkpoints", "version_10/checkpoints", "last.keras"),
    "Transformers": ("checkpoint-9", "checkpoint-10", "model.keras"),
    "plain": ("9", "10", "model.keras"),
    "two numbers": ("epoch=9-step=90", "epoch=10-step=100", "model.keras"),
    "padded later": ("step_09", "step_100", "model.keras"),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_highest_number_is_the_newest(tmp_path: Path, archives: list[Path], run: str) -> None:
    older, newer, name = RUNS[run]
    lay(archives[1], tmp_path / newer, name)
    lay(archives[0], tmp_path / older, name)  # written later
    assert candidates(tmp_path) == [tmp_path / newer / name, tmp_path / older / name]
    assert open_checkpoint(tmp_path).prefix == tmp_path / newer / name


def test_neighbours_without_a_number_are_not_met(tmp_path: Path, archives: list[Path]) -> None:
    for number in range(2):
        lay(archives[number], tmp_path / f"checkpoint_{number}")
    lay(archives[2], tmp_path / "best")
    (tmp_path / "last").symlink_to("checkpoint_0")
    (tmp_path / "logs_3").mkdir()
    (tmp_path / "checkpoint_manager_snapshot.json").write_text("{}")
    (tmp_path / ".checkpoint_7").mkdir()
    assert open_checkpoint(tmp_path).prefix.parent.name == "checkpoint_1"
    assert open_checkpoint(tmp_path / "last").prefix.parent.resolve().name in ("last", "checkpoint_0")


def test_one_that_is_being_written_is_passed_over(tmp_path: Path, archives: list[Path]) -> None:
    lay(archives[0], tmp_path / "checkpoint_1")
    (tmp_path / "checkpoint_2").mkdir()
    (tmp_path / "checkpoint_2/metadata.json").write_text("{}")
    found = open_checkpoint(tmp_path)
    assert found.prefix.parent.name == "checkpoint_1"
    assert any("checkpoint_2" in note for note in found.notes)


def test_damage_of_the_newest_is_no_reason_to_take_another(tmp_path: Path, archives: list[Path]) -> None:
    lay(archives[0], tmp_path / "checkpoint_1")
    newest = lay(archives[1], tmp_path / "checkpoint_2")
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="checkpoint_2"):
        open_checkpoint(tmp_path)


def test_tensor_bundles_and_their_state_files(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"checkpoint_{number:06}").mkdir()
        write(tmp_path / f"checkpoint_{number:06}/ckpt")
    assert open_checkpoint(tmp_path).prefix == tmp_path / "checkpoint_000010/ckpt"


def several(tmp_path: Path, archives: list[Path]) -> None:
    lay(archives[0], tmp_path / "checkpoint_1")
    lay(archives[1], tmp_path / "epoch_1")


def folds(tmp_path: Path, archives: list[Path]) -> None:
    for number in range(2):
        lay(archives[number], tmp_path / f"fold_{number}")


def full(tmp_path: Path, archives: list[Path]) -> None:
    lay(archives[0], tmp_path / "run_1", "a.keras")
    shutil.copy(archives[1], tmp_path / "run_1/b.keras")


def trainings(tmp_path: Path, archives: list[Path]) -> None:
    for number in range(2):
        lay(archives[number], tmp_path / f"run_{number}", "m-1.keras")
        shutil.copy(archives[1], tmp_path / f"run_{number}/m-2.keras")


@pytest.mark.parametrize("make", [several, folds, full, trainings])
def test_what_is_no_series_in_time_is_not_followed(
    tmp_path: Path, archives: list[Path], make: Callable[..., Any]
) -> None:
    make(tmp_path, archives)
    with pytest.raises(CheckpointNotFound) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint


def test_a_run_is_followed_by_deltas_and_named(tmp_path: Path, archives: list[Path]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    lay(archives[0], run / "checkpoint_000000")
    ran = export_model("--ckpt-dir", run, "--out", out, "--incr")
    assert ran.code == 0, ran.err
    assert "checkpoint_000000/model.keras" in ran.out + ran.err
    lay(archives[2], run / "checkpoint_000001")
    ran = export_model("--ckpt-dir", run, "--out", out, "--incr")
    assert ran.code == 0, ran.err
    assert "checkpoint_000001/model.keras" in ran.out + ran.err
    assert not export_incremental(run, out).published


@pytest.mark.parametrize("typed", ["", "artifacts"])
def test_a_directory_above_is_answered_with_the_one_below(
    tmp_path: Path, archives: list[Path], typed: str
) -> None:
    """As of MLflow, whose `artifacts/` has a model beside `checkpoints/`."""
    for number in (1, 2):
        lay(archives[number], tmp_path / f"artifacts/checkpoints/epoch_{number}", "checkpoint.keras")
    (tmp_path / "artifacts/model").mkdir()
    (tmp_path / "artifacts/model/MLmodel").touch()
    ran = export_model("inspect", tmp_path / typed, "--json")
    place = tmp_path / "artifacts/checkpoints"
    assert (ran.code, ran.error["hint"]) == (3, f"there are checkpoints in {place}")
    assert export_model("inspect", place).code == 0
    with pytest.raises(CheckpointNotFound):  # nor is a tree walked through
        (tmp_path / "a/b/c/d").mkdir(parents=True)
        open_checkpoint(tmp_path / "a")
