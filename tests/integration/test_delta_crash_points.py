"""SIGKILL at every step of publishing, merging, taking back: whole deltas, and a next run that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter.errors import UsageError
from exporter.options import ExportRequest
from exporter.pipeline import chain
from exporter.pipeline.incremental import export_incremental
from exporter.publish.commit import Staging
from exporter.publish.published_log import read_log
from exporter.verify.log import verify_model
from tests.kills import count_steps, killed_at
from tests.logs import Serving, Trainer, assert_same_bits, publish_base, values_at
from tests.publishing import hidden

Values = dict[str, np.ndarray]
SERVING = Serving(parts=2)


def export(model: Path) -> None:
    export_incremental(ExportRequest(ckpt_dir=model.parent / "train", out=model))


def merge(model: Path) -> None:
    chain.merge(model)


def tidy(model: Path) -> None:
    chain.tidy(model, clock=lambda: 1e12)


def rollback(model: Path) -> None:
    chain.rollback(model, 10)


def resume(model: Path) -> None:
    chain.resume(model)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory where waiting for the disk costs nothing: what is tested is the order of steps."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Case:
    """A command, what goes before it, and where the log may stand after a kill."""

    name: str
    action: Callable[[Path], None]
    before: Callable[[Path], None] | None
    positions: set[int]
    every: int = 1


def log_with_two_deltas(directory: Path) -> None:
    """Published 10, 20 and 30; the trainer is at 40."""
    trainer = Trainer(directory / "train")
    trainer.save()
    publish_base(trainer, SERVING, directory / "model")
    for step in (20, 30, 40):
        trainer.train()
        trainer.step = step
        trainer.save()
        if step < 40:
            export(directory / "model")


@pytest.mark.parametrize(
    "case",
    [
        Case("export", export, None, {30, 40}),
        Case("merge", merge, None, {30}, every=2),
        Case("tidy", tidy, merge, {30}, every=2),
        Case("rollback", rollback, None, {30, 31}),
        Case("resume", resume, rollback, {31, 32}, every=2),
    ],
    ids=lambda case: case.name,
)
def test_a_kill_at_any_step_leaves_whole_deltas_and_a_next_run_that_works(
    in_memory: Path, case: Case
) -> None:
    origin = in_memory / "origin"
    log_with_two_deltas(origin)
    if case.before:
        case.before(origin / "model")
    log = read_log(origin / "model")
    known = {position: values_at(log, position) for position in (10, log.at.position)}
    work = in_memory / "work"
    shutil.copytree(origin, work)
    steps = count_steps(case.action, work / "model")
    assert steps > 20, "the steps are seen"
    model, outcomes = work / "model", set()
    for point in range(1, steps + 1, case.every):
        shutil.rmtree(work)
        shutil.copytree(origin, work)
        assert killed_at(point, case.action, model) == -signal.SIGKILL
        found = verify_model(model)
        assert found.problems == (), f"killed at step {point}"
        assert found.at is not None
        outcomes.add(found.at.position)
        for position, values in known.items():
            assert_same_bits(values_at(read_log(model), position), values)
        if case.action is rollback and found.at.position == 31:
            assert found.hold in (30, 31), "nobody overruns a rollback that was killed"
        try:
            case.action(model)
        except UsageError:
            assert case.action is resume
            assert read_log(model).hold() is None
        assert verify_model(model).problems == ()
        with Staging(model):  # a next run that had nothing to do has staged nothing
            pass
        assert hidden(model) == [], f"killed at step {point}: the next publication cleans up"
    assert outcomes == case.positions, "kills hit before and after the change that readers see"


def test_the_next_export_after_any_kill_holds_the_newest_values(in_memory: Path) -> None:
    log_with_two_deltas(in_memory / "origin")
    expected = in_memory / "expected"
    shutil.copytree(in_memory / "origin", expected)
    export(expected / "model")
    values = values_at(read_log(expected / "model"))
    steps = count_steps(export, in_memory / "expected" / "model")
    work = in_memory / "work"
    for point in range(1, steps, 9):
        shutil.copytree(in_memory / "origin", work)
        killed_at(point, export, work / "model")
        export(work / "model")
        assert_same_bits(values_at(read_log(work / "model")), values)
        shutil.rmtree(work)
