"""Real parameter-server clusters on loopback: any training script, or the digits example once a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from examples import cluster
from examples.cluster import ClusterError

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
    )
    return {name: log.read_text(errors="replace") for name, log in logs.items()}


@dataclass(frozen=True)
class DigitsTraining:
    """What a short run of examples/digits left in `directory`. Shared by all tests: copy before changing."""

    directory: Path

    @property
    def checkpoints(self) -> Path:
        """The chief's checkpoint directory."""
        return self.directory / "checkpoints"

    @property
    def model(self) -> str:
        """What `--model` names: the builder of the inference graph."""
        return f"{DIGITS / 'model.py'}:serving"

    @cached_property
    def expected(self) -> Mapping[str, NDArray]:
        """The training graph's own answers: `images`, `labels`, `scores`, `scores_ema`, `step`."""
        with np.load(self.directory / "expected.npz") as arrays:
            return dict(arrays)


def train_digits(factory: pytest.TempPathFactory, *, steps: int = 300) -> DigitsTraining:
    """Train the digits cluster, or take what another process of this test run has trained."""
    directory = _directory_of_the_run(factory) / "digits"
    with _lock(directory.with_suffix(".lock")):
        if not directory.exists():
            attempt = factory.mktemp("digits-attempt")
            options = ["--ckpt-dir", attempt / "checkpoints", "--expected", attempt / "expected.npz"]
            run_cluster(DIGITS / "train.py", [*options, "--steps", str(steps)], cwd=attempt, timeout_s=400)
            attempt.rename(directory)
    return DigitsTraining(directory)


def _directory_of_the_run(factory: pytest.TempPathFactory) -> Path:
    """pytest-xdist gives each worker a directory of its own inside that of the run."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
