"""Base and deltas beside a full export of the same checkpoint: the same bits, served by TensorFlow itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.commands import export_model
from tests.conftest import ROOT
from tests.updatable import loaded

MODEL = f"{ROOT / 'examples/ranker/model.py'}:serving"
FEEDS = {"user": np.arange(0, 5000, 7), "item": np.arange(0, 5000, 7) % 2000}


def train(directory: Path, steps: int) -> None:
    command: list[str | Path] = [
        sys.executable,
        ROOT / "examples/ranker/train.py",
        "--out",
        directory,
        "--steps",
        str(steps),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--average", "ema", "--cast", ".*embedding.*=bfloat16"),
        ("--model-arg", "parts=1"),
        ("--model-arg", "parts=2"),
    ],
    ids=["plain", "averages and casts", "one part", "other parts"],
)
def test_a_delta_from_a_full_checkpoint_serves_what_a_full_export_serves(
    ranker: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    checkpoints, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(ranker, checkpoints)
    common = ["--ckpt-dir", checkpoints, "--model", MODEL, *options]
    first = export_model(*common, "--out", model, "--incr", "--stamp", "--json")
    assert first.code == 0, first.err
    assert first.document["position"] == 20
    train(checkpoints, 10)
    second = export_model(*common, "--out", model, "--incr", "--json")
    assert second.code == 0, second.err
    assert (second.document["from_position"], second.document["position"]) == (20, 30)
    assert export_model(*common, "--out", tmp_path / "full").code == 0
    with loaded(model / "20") as server, loaded(tmp_path / "full/30") as expected:
        before = server.predict(**FEEDS)
        assert server.update()["position"] == 30
        after, wanted = server.predict(**FEEDS), expected.predict(**FEEDS)
    assert not np.array_equal(before["click"], after["click"])
    np.testing.assert_array_equal(after["click"], wanted["click"])
    assert set(after["model_position"]) == {30}
