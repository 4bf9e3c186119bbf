"""SIGKILL at every step of publishing, merging, taking back: whole deltas, and a next run that goes on."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from exporter.delta.format import ChangeKind
from exporter.delta.layered_state import LayeredState
from exporter.errors import UsageError
from exporter.options import ExportRequest
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import export_incremental
from exporter.publish.commit import Staging
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.verify.log import verify_model
from tests.support.budget import thorough
from tests.support.kills import count_steps, killed_at, points
from tests.support.logs import Serving, assert_same_bits, values_at
from tests.support.publishing import hidden
from tests.support.setting import followed

Values = dict[str, np.ndarray]
SERVING = Serving(parts=2)


def export(model: Path) -> None:
    export_incremental(ExportRequest(ckpt_dir=model.parent / "train", out=model))


def merge(model: Path) -> None:
    log_maintenance.merge(model)


def tidy(model: Path) -> None:
    log_maintenance.tidy(model, clock=lambda: 1e12)


def rollback(model: Path) -> None:
    log_maintenance.rollback(model, 10)


def rollback_to_20(model: Path) -> None:
    log_maintenance.rollback(model, 20)


def roll_back_twice(model: Path) -> None:
    log_maintenance.rollback(model, 20)
    rollback(model)


def resume(model: Path) -> None:
    log_maintenance.resume(model)


ROLLBACKS = {rollback: 10, rollback_to_20: 20}


def is_about_to_appear(model: Path) -> bool:
    """True in the instant before a rollback's delta is there: the hold leads into it, and nobody moves."""
    hold = read_log(model).hold.path
    return hold.is_symlink() and not hold.exists()


def route(log: DeltaLog, position: int) -> list[int]:
    """Where a server at `position` goes by itself."""
    content = log.hold.content()
    limit = math.inf if content is None else int(content) if content.strip().isdigit() else -1
    found = []
    while fitting := [d for d in log.deltas if d.end <= limit and d.accepts(position) and d.end > position]:
        position = max(delta.end for delta in fitting)
        found.append(position)
    return found


def check_what_servers_do(model: Path, to: int, *, is_published: bool) -> None:
    """At this instant of a rollback from 30 to `to`, wherever they are."""
    log = read_log(model)
    good = values_at(log, to)
    for position in (10, 20, 30):
        way = route(log, position)
        if is_published:
            before = [] if position >= to else [stop for stop in way if stop <= to]
            assert way == [*before, 31], "at once, past no bad position, and no further"
            layers = [log.open(delta).changes for delta in log.chain(10, position)]
            last = [log.open(delta).changes for delta in log.deltas if delta.end == 31]
            jumped = LayeredState(log.base.stored(), (*layers, *last[-1:]))
            if position >= to:
                for variable in log.schema.variables:
                    whole = variable.kind is ChangeKind.DENSE
                    found = (
                        jumped.whole(variable.name)
                        if whole
                        else jumped.rows(variable.name, 0, variable.shape[0])
                    )
                    assert found.tobytes() == good[variable.name].tobytes()
        elif log.hold.is_set:
            assert all(stop <= to for stop in way), "nobody moves towards the bad position"


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


def log_with_two_deltas(directory: Path) -> None:
    """Published 10, 20 and 30; the trainer is at 40."""
    followed(directory, (20, 30, 40), published=30, serving=SERVING, by_saving=True)


CASES = [
    Case("export", export, None, {30, 40}),
    Case("merge", merge, None, {30}),
    Case("tidy", tidy, merge, {30}),
    Case("rollback past a merged delta", rollback_to_20, merge, {30, 31}),
    Case("resume", resume, rollback, {31, 32}),
    Case("rollback", rollback, None, {30, 31}),
    Case("resume after two", resume, roll_back_twice, {32, 33}),
]


@pytest.mark.landing
@pytest.mark.parametrize(
    "case",
    [*CASES[:5], *(pytest.param(case, marks=thorough) for case in CASES[5:])],
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
    assert steps > 10, "the steps are seen"  # a log that is read once takes fewer of them
    model, instants = work / "model", 0
    outcomes: dict[int, int] = {}
    for point in points(steps, CASES.index(case), outcomes):
        shutil.rmtree(work)
        shutil.copytree(origin, work)
        assert killed_at(point, case.action, model) == -signal.SIGKILL
        found = verify_model(model)
        instants += is_about_to_appear(model)
        if not is_about_to_appear(model):
            assert found.problems == (), f"killed at step {point}"
        assert found.at is not None
        outcomes[point] = found.at.position
        for position, values in known.items():
            assert_same_bits(values_at(read_log(model), position), values)
        if case.action in ROLLBACKS:
            check_what_servers_do(model, ROLLBACKS[case.action], is_published=found.at.position == 31)
        try:
            case.action(model)
        except UsageError:
            assert case.action is resume
            assert not read_log(model).hold.is_set
        assert verify_model(model).problems == ()
        with Staging(model):  # a next run that had nothing to do has staged nothing
            pass
        assert hidden(model) == [], f"killed at step {point}: the next publication cleans up"
        assert list(model.glob("deltas/*/.hold*")) == []
    assert (instants > 0) == (case.action in ROLLBACKS), "a kill hits the instant before a rollback is there"
    assert {*outcomes.values()} == case.positions, "kills hit before and after the change that readers see"


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
