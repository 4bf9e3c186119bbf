"""The real command follows a real training process, is killed and restarted, and exports nothing twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.publish.versions import read_manifest, version_dirs
from exporter.training.roles import VARIABLES

TRAINER = Path(__file__).parent / "saving_trainer.py"
TENSORS = ("--input", "x=x:0", "--output", "y=y:0")
SECONDS = 240  # for a slow machine; nothing here is about time


@contextmanager
def follower(train: Path, model: Path, *options: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`export-model --watch`, from the .meta beside each checkpoint; killed with the block."""
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", "from exporter.cli import main; main()"]
    places = ["--ckpt-dir", str(train), "--out", str(model)]
    process = subprocess.Popen(
        [*command, *places, *TENSORS, "--watch", "--interval", "0.05", *options],
        env=plain | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.01)


def go_on(train: Path, step: int) -> None:
    train.mkdir(exist_ok=True)
    (train / f"go-{step}").touch()


def assert_each_once_and_whole(model: Path) -> list[int]:
    """The steps of all versions: each from a checkpoint of its own, holding the values of that step."""
    versions = [child.path for child in reversed(version_dirs(model))]
    manifests = [read_manifest(version) for version in versions]
    digests = [manifest.source.digest for manifest in manifests]
    assert len(set(digests)) == len(digests), "a checkpoint was exported twice"
    steps = [manifest.step or 0 for manifest in manifests]
    for version, step in zip(versions, steps, strict=True):
        catalog = read_catalog(version / "variables/variables")
        np.testing.assert_equal(read_array(catalog, catalog.tensors["weight"]), np.float32(step))
    assert [manifest.source.checkpoint for manifest in manifests] == [f"model.ckpt-{step}" for step in steps]
    assert steps == sorted(set(steps))
    return steps


@pytest.mark.landing
def test_a_trainer_is_followed_over_kills_until_its_last_step(tmp_path: Path) -> None:
    train, model, last = tmp_path / "train", tmp_path / "model", 300
    moments = random.Random(7)
    log = (tmp_path / "trainer.log").open("w")
    trainer = subprocess.Popen([sys.executable, TRAINER, train, str(last)], stdout=log, stderr=log)
    try:
        for step in (0, 60, 120, 180):
            before = len(version_dirs(model))
            with follower(train, model) as process:
                go_on(train, step)
                wait_until(lambda known=before: len(version_dirs(model)) > known, "another version")
                time.sleep(moments.uniform(0, 0.3))
                assert process.poll() is None
                process.send_signal(signal.SIGKILL)
        with follower(train, model, "--until", f"step={last}", "--json") as process:
            go_on(train, 240)
            out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert trainer.wait(timeout=SECONDS) == 0
    finally:
        trainer.kill()
        log.close()
    steps = assert_each_once_and_whole(model)
    assert (steps[-1], len(steps) >= 5) == (last, True)
    assert [json.loads(line)["position"] for line in out.splitlines()][-1] == last
    with follower(train, model, "--until", f"step={last}", "--json") as process:
        assert process.communicate(timeout=SECONDS) == ("", "")
    assert assert_each_once_and_whole(model) == steps
    assert not list(model.glob(".staging-*")), "what the killed runs left is gone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with follower(tmp_path / "train", tmp_path / "model") as process:
        assert process.stderr is not None
        assert " waiting: " in process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert not (tmp_path / "model").exists()


CLUSTER = '"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}'


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TF_CONFIG": f'{{{CLUSTER}, "task": {{"type": "ps", "index": 0}}}}'}, "parameter server 0"),
        ({"TF_CONFIG": f'{{{CLUSTER}, "task": {{"type": "evaluator", "index": 0}}}}'}, "evaluator"),
        ({"JOB_NAME": "worker", "TASK_INDEX": "1", "WORKER_HOSTS": "a:1,b:1"}, "worker 1"),
        ({"AUTODIST_WORKER": "10.0.0.2"}, "worker"),
    ],
)
def test_other_nodes_leave_at_once_and_write_nothing(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    with follower(tmp_path, tmp_path / "model", **environ) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    assert f"this node is {name} (" in out
    assert not (tmp_path / "model").exists()
