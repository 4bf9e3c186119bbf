"""Replicas that lag find their way to the newest, whatever was published, merged, taken back and removed."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.delta.format import Change, Rows
from exporter.delta.spans import plan_chain
from exporter.errors import ModelHeld
from exporter.options import DeltaDtype
from exporter.pipeline import log_maintenance
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import DeltaLog, list_deltas, read_log
from exporter.publish.retention import GRACE_SECONDS, ROLLBACK_POSITIONS, retire_deltas
from tests.support.budget import times
from tests.support.drifting import drift
from tests.support.logs import Serving, Trainer, Values, assert_same_bits, publish_base, request, values_at
from tests.support.publishing import delta_of

LATER = 1e12


@dataclass
class Replica:
    """What a server holds: a position and values, changed by published deltas alone."""

    position: int
    values: dict[str, np.ndarray]

    def apply(self, model: Path) -> None:
        """Follow the log as the served graph does, from what is published now."""
        log = read_log(model)
        for delta in plan_chain(list_deltas(log.path), self.position):
            for name, change in log.open(delta).changes.items():
                self.values[name] = _changed(self.values[name], change)
            self.position = delta.end


def _changed(value: np.ndarray, change: Change) -> np.ndarray:
    if not isinstance(change, Rows):
        return np.array(change)
    value = np.array(value)
    value[change.ids] = np.asarray(change.values[:])
    return value


@dataclass
class World:
    """A trainer, a log, what each of its positions served, and replicas that now and then follow."""

    directory: Path
    seed: int
    served: dict[int, Values] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.directory / "model"
        self.trainer = Trainer(self.directory / "train", seed=self.seed)
        self.trainer.save()
        publish_base(self.trainer, Serving(parts=2), self.model)
        self.note()

    def note(self) -> None:
        """What stands at the newest position, of which a replica is there from now on."""
        log = read_log(self.model)
        values = values_at(log)
        known = self.served.setdefault(log.at.position, values)
        assert_same_bits(values, known)
        self.replicas.append(Replica(log.at.position, dict(values)))

    def do(self, what: str, rng: np.random.Generator) -> None:
        log = read_log(self.model)
        match what:
            case "exact":
                self.export()
            case "bound":
                self.export(min_change=float(rng.choice([0.02, 1.0])))
            case "round":
                self.export(delta_dtype=DeltaDtype.INT8)
            case "burst":
                for _ in range(12):
                    self.export(min_change=0.05)
                    self.note()
            case "both":
                self.export(min_change=0.05, delta_dtype=DeltaDtype.BFLOAT16)
            case "merge" if len(log.deltas) > 1:
                start = int(rng.choice([base.at.position for base in log.bases]))
                end = int(rng.choice([delta.end for delta in log.deltas]))
                if start < end:
                    with refused_if_held(log):
                        log_maintenance.merge(self.model, start, end)
            case "tidy":
                log_maintenance.tidy(self.model, clock=lambda: LATER)
            case "rollback" if log.deltas and (former := sorted(self.known() - {log.at.position})):
                log_maintenance.rollback(self.model, int(rng.choice(former)))
            case "resume" if log.hold.read() is not None:
                log_maintenance.resume(self.model)
            case "rebase":
                with refused_if_held(log):
                    rebase(self.model)
            case "forget base" if len(log.bases) > 1:
                shutil.rmtree(log.bases[-1].path)
            case "follow":
                self.replicas[int(rng.integers(len(self.replicas)))].apply(self.model)
        self.note()

    def export(self, **how: object) -> None:
        drift(self.trainer, 0.03, rows=3)
        self.trainer.increment() if self.trainer.step % 5 else self.trainer.save()
        asked = replace(request(self.trainer, self.model), **how)  # type: ignore[arg-type]
        delta_of(asked)

    def known(self) -> set[int]:
        """The newest positions, to which a rollback can always go back while a base leads there."""
        log = read_log(self.model)
        oldest = min(base.at.position for base in log.bases)
        ends = sorted({delta.end for delta in log.deltas} | {base.at.position for base in log.bases})
        return {end for end in ends[-ROLLBACK_POSITIONS:] if end >= oldest}

    def check(self) -> None:
        log = read_log(self.model)
        newest = self.served[log.at.position]
        oldest = min(base.at.position for base in log.bases)
        horizon = sorted(self.served)[-ROLLBACK_POSITIONS:]
        for position, values in self.served.items():
            if position >= oldest or position in horizon:
                replica = Replica(position, dict(values))
                replica.apply(self.model)
                assert replica.position == log.at.position
                assert_same_bits(replica.values, newest)
        for position in self.known():
            assert_same_bits(values_at(log, position), self.served[position])


@contextmanager
def refused_if_held(log: DeltaLog) -> Iterator[None]:
    """A hold may forbid what would lead servers past it; without one nothing is refused."""
    try:
        yield
    except ModelHeld:
        assert log.hold.read() is not None


HAPPENINGS = ["exact", "bound", "bound", "round", "both", "merge", "tidy", "tidy"]
SELDOM = ["burst", "rollback", "resume", "rebase", "forget base", "follow"]


@pytest.mark.landing
@settings(max_examples=times(12))
@given(st.lists(st.sampled_from(HAPPENINGS + SELDOM), min_size=5, max_size=20), st.integers(0, 1000))
def test_every_base_and_every_position_finds_its_way_to_the_newest(what: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), seed)
        rng = np.random.default_rng(seed)
        for each in what:
            world.do(each, rng)
            if each == "tidy":
                world.check()
        world.do("tidy", rng)
        world.check()


def test_a_replica_inside_a_merger_of_inexact_deltas_goes_on(tmp_path: Path) -> None:
    """Deltas that left rows out become one and are removed, while a replica stands between two of them."""
    world = World(tmp_path, seed=3)
    for _ in range(30):
        world.export(min_change=0.05)
        world.note()
    lagging = world.replicas[3]
    world.do("tidy", np.random.default_rng(0))
    log = read_log(world.model)
    first = log.deltas[0]
    assert first.start < lagging.position < first.end and first.merged_count == 8
    assert not any(delta.start == lagging.position for delta in log.deltas)
    lagging.apply(world.model)
    assert_same_bits(lagging.values, values_at(log))


def test_what_a_merger_replaces_stays_while_the_merger_is_young(tmp_path: Path) -> None:
    """Who listed the directory before it came must find what was listed."""
    world = World(tmp_path, seed=3)
    for _ in range(3):
        world.export()
    log_maintenance.merge(world.model)
    log, now = read_log(world.model), time.time()
    assert retire_deltas(log, now=now, rollback_positions=1).removed == ()
    assert retire_deltas(log, now=now + 2 * GRACE_SECONDS, rollback_positions=1).removed != ()


def test_a_delta_of_a_clock_that_is_ahead_keeps_those_that_lead_on_from_it(tmp_path: Path) -> None:
    """It is young for long, and young deltas count for nothing yet; but servers take it."""
    world = World(tmp_path, seed=3)
    for _ in range(3):
        world.export()
    first = read_log(world.model).deltas[0].path / "manifest.json"
    manifest = json.loads(first.read_text())
    first.write_text(json.dumps(manifest | {"created": "2999-01-01T00:00:00.000000Z"}))
    soon = time.time() + 2 * GRACE_SECONDS
    log = read_log(world.model)
    assert retire_deltas(log, now=soon, rollback_positions=1).removed == ()
    assert len(log.chain(log.base.at.position)) == 3


def test_a_base_whose_manifest_is_damaged_keeps_its_way(tmp_path: Path) -> None:
    """Servers load a version without asking its manifest: for all anybody knows, one stands there."""
    world = World(tmp_path, seed=3)
    for number in range(2 * ROLLBACK_POSITIONS):
        world.export()
        world.note()
        if number == 7:  # where a merger ends, so that nobody else needs it
            rebase(world.model)
    (world.model / "10" / "manifest.json").write_text("{")
    world.do("tidy", np.random.default_rng(0))
    first = world.replicas[0]
    assert first.position == 10
    first.apply(world.model)
    assert_same_bits(first.values, values_at(read_log(world.model)))
