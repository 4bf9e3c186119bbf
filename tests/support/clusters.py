"""Real parameter-server clusters on loopback: any training script, or the digits example once a test run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from examples import cluster
from examples.cluster import ClusterError
from tests.support.once import once_a_run

__all__ = ["ClusterError", "DigitsTraining", "run_cluster", "train_digits"]

DIGITS = Path(cluster.__file__).parent / "digits"


def run_cluster(
    script: Path,
    arguments: Sequence[str | Path] = (),
    *,
    cwd: Path,
    ps: int = 2,
    workers: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    start: cluster.Start | None = None,
) -> dict[str, str]:
    """Run `script` as every node in the directory `cwd`; the finished logs by node: `ps-0`, `chief-0`, ..."""
    logs = cluster.run_cluster(
        [script, *arguments],
        logs=cwd / "logs",
        ps=ps,
        workers=workers,
        env=env,
        cwd=cwd,
        timeout_s=timeout_s,
        start=start,
    )
    return {name: log.read_text(errors="replace") for name, log in logs.items()}


@dataclass(frozen=True)
class DigitsTraining:
    """What examples/digits/demo.py left in `directory`. Shared by all tests: copy before changing."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        """The chief's checkpoint directory."""
        return self.directory / "checkpoints"

    @property
    def printed(self) -> str:
        """What the demo said on stdout."""
        return (self.directory / "printed").read_text()

    @property
    def model(self) -> str:
        """What `--model` names: the builder of the inference graph."""
        return f"{DIGITS / 'model.py'}:serving"

    @cached_property
    def expected(self) -> Mapping[str, NDArray]:
        """The training graph's own answers: `images`, `labels`, `scores`, `scores_ema`, `step`."""
        with np.load(self.directory / "expected.npz") as arrays:
            return dict(arrays)


def train_digits(factory: pytest.TempPathFactory) -> DigitsTraining:
    """Run the demo of the digits cluster, or take what another process of this test run has."""

    def demonstrate(directory: Path) -> None:
        command = [sys.executable, DIGITS / "demo.py", "--keep", directory, "--steps", "300"]
        done = subprocess.run(command, cwd=DIGITS.parents[1], capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        (directory / "printed").write_text(done.stdout)

    return DigitsTraining(once_a_run(factory, "digits", demonstrate))
