"""Base and deltas equal a full export of the newest state, bit for bit, whatever happened in between."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.errors import CorruptFile, ExportError, ManifestError
from exporter.increments.history import identify, read_history
from exporter.increments.increment import CheckpointId
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import export_incremental, plan_incremental
from exporter.publish.delta_log import read_log
from tests.support.budget import times
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    publish_base,
    request,
    served_now,
    values_at,
)
from tests.support.publishing import delta_of
from tests.support.setting import followed

servings = st.builds(
    Serving,
    parts=st.integers(1, 4),
    average=st.booleans(),
    cast=st.booleans(),
    dense=st.sampled_from([frozenset(), frozenset({"items"})]),
)
HAPPENINGS = [
    "train",
    "save",
    "increment",
    "export",
    "watch",
    "named",
    "merge",
    "tidy",
    "rollback",
    "resume",
    "back",
    "repartition",
]
happenings = st.lists(st.sampled_from([*HAPPENINGS, "train", "export"]), min_size=4, max_size=25)


class World:
    """A trainer, a log, and what every position of the log should hold."""

    def __init__(self, directory: Path, serving: Serving, parts: int, seed: int) -> None:
        self.serving, self.model = serving, directory / "model"
        self.trainer = Trainer(directory / "train", parts=parts, seed=seed)
        self.visible: dict[str, np.ndarray] = {}
        self.told: dict[str, np.ndarray] = {}
        self.saved = [self.trainer.save()]
        self.see()
        self.full = {self.saved[-1]: self.visible}
        publish_base(self.trainer, serving, self.model)
        self.history = {read_log(self.model).at.position: self.visible}

    def see(self) -> None:
        """What a restart would find now: the newest full checkpoint and its increments."""
        self.visible = served_now(self.trainer, self.serving)

    def do(self, what: str, rng: np.random.Generator) -> None:
        trainer, log = self.trainer, read_log(self.model)
        match what:
            case "train":
                trainer.train()
            case "save":
                self.saved.append(trainer.save(is_equal=not trainer.touched))
                self.see()
                self.full[self.saved[-1]] = self.visible
            case "increment":
                before = trainer.parent
                trainer.increment()
                if trainer.parent != before:
                    self.see()
                    self.told = self.visible
            case "export":
                self.export()
            case "watch":
                self.watch()
            case "named":
                self.name(self.saved[int(rng.integers(len(self.saved)))], is_watching=bool(rng.integers(2)))
            case "merge":
                log_maintenance.merge(self.model)
            case "tidy":
                log_maintenance.tidy(self.model, clock=lambda: 1e12)
            case "rollback":
                older = [position for position in self.history if position < log.at.position]
                if older:
                    self.take_back(int(rng.choice(older)))
            case "resume" if log.hold.read() is not None:
                done = log_maintenance.resume(self.model)
                after = read_log(self.model)
                if done.published is not None:
                    assert after.at != log.at
                    self.history[after.at.position] = self.history[done.values_of.position]
                assert_same_bits(values_at(after), self.history[after.at.position])
            case "back":
                trainer.go_back(self.saved[int(rng.integers(len(self.saved)))])
                trainer.train()
                self.do(str(rng.choice(["save", "increment"])), rng)
            case "repartition":
                for cache in self.model.glob("deltas/*/.state/*"):
                    cache.unlink()
                trainer.repartition(int(rng.integers(1, 5)))
                self.saved = [identify(trainer.directory / f"model.ckpt-{trainer.step}", trainer.step)]
                self.see()
                self.full = {self.saved[-1]: self.visible}

    def export(self) -> None:
        delta_of(request(self.trainer, self.model))
        log = read_log(self.model)
        assert_same_bits(values_at(log), self.visible)
        self.history.setdefault(log.at.position, self.visible)

    def name(self, full: CheckpointId, *, is_watching: bool) -> None:
        """A prefix is published as it is, whatever increments follow it; twice is once."""
        prefix = self.trainer.directory / full.name
        if not Path(f"{prefix}.index").exists() or identify(prefix, full.step) != full:
            return
        named = replace(request(self.trainer, self.model), ckpt_dir=prefix)
        for _ in range(2):
            done = delta_of(named, is_watching=is_watching)
            log = read_log(self.model)
            assert_same_bits(values_at(log), self.full[full])
            self.history.setdefault(log.at.position, self.full[full])
        assert done.published is None
        self.export()

    def watch(self) -> None:
        """The newest state is published, or that of the last increment if the next one is awaited."""
        before = read_log(self.model)
        known = values_at(before)
        done = delta_of(request(self.trainer, self.model), is_watching=True)
        log = read_log(self.model)
        found = values_at(log)
        if done.published is None:
            assert_same_bits(found, known)
        awaits = self.is_ahead() and done.compared_bytes == 0
        assert_same_bits(found, self.told if awaits else self.visible)
        self.history[log.at.position] = found

    def is_ahead(self) -> bool:
        """True if the newest full checkpoint is newer than the last increment, and not equal to it."""
        history = read_history(self.trainer.directory)
        full = identify(self.trainer.directory / f"model.ckpt-{self.saved[-1].step}", self.saved[-1].step)
        if history.after(full) or len(history.same(full)) > 1:
            return False
        return any(marker.after for marker in history.markers_of(full))

    def take_back(self, to: int) -> None:
        log = read_log(self.model)
        try:
            values_at(log, to)
        except ExportError:
            return
        done = log_maintenance.rollback(self.model, to)
        assert done.published is not None
        log = read_log(self.model)
        assert log.hold.read() == log.at.position == done.published.manifest.position
        assert_same_bits(values_at(log), self.history[to])
        self.history[log.at.position] = self.history[to]

    def check(self) -> None:
        """Every position that can be reached holds what it held when it was published, from every base."""
        log = read_log(self.model)
        reached = 0
        for position, values in self.history.items():
            try:
                found = values_at(log, position)
            except ExportError:
                continue
            assert_same_bits(found, values)
            reached += 1
        assert reached >= min(16, len(self.history))


@settings(max_examples=times(40))
@given(servings, st.integers(1, 4), happenings, st.integers(0, 1000))
def test_every_position_holds_what_a_full_export_of_its_moment_holds(
    serving: Serving, parts: int, what: list[str], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), serving, parts, seed)
        rng = np.random.default_rng(seed)
        for each in what:
            world.do(each, rng)
        world.trainer.train()
        world.do("save", rng)
        world.export()
        world.check()


@pytest.mark.landing
@settings(max_examples=times(40))
@given(st.lists(st.sampled_from(["train", "save", "increment", "watch"]), min_size=8, max_size=40), servings)
def test_who_watches_has_the_state_of_an_increment_and_compares_nothing_while_the_next_is_awaited(
    what: list[str], serving: Serving
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), serving, parts=2, seed=1)
        for each in ["train", "increment", "train", "save", "watch", *what]:
            world.do(each, np.random.default_rng(1))
        world.export()
        world.check()


def test_a_prefix_is_one_checkpoint_whatever_follows_it(tmp_path: Path) -> None:
    world = World(tmp_path, Serving(), parts=2, seed=3)
    for what in ("train", "increment", "train", "save", "train", "increment", "train", "increment"):
        world.do(what, np.random.default_rng(0))
    world.name(world.saved[-1], is_watching=False)
    world.export()
    world.name(world.saved[0], is_watching=True)
    planned = plan_incremental(
        replace(request(world.trainer, world.model), ckpt_dir=world.trainer.directory / world.saved[-1].name)
    )
    assert planned.trainer.plan.step == world.saved[-1].step
    assert planned.trainer.plan.reason.endswith("is named, and not what came after it")
    world.export()
    world.check()


@pytest.mark.parametrize("what", ["base", "delta", "increment"])
def test_a_manifest_that_omits_a_tensor_is_not_believed(tmp_path: Path, what: str) -> None:
    """Else the value would be lost without a word."""
    trainer, model = followed(tmp_path), tmp_path / "model"
    trainer.train()
    trainer.increment()
    if what == "delta":
        export_incremental(request(trainer, model))
    directory = {
        "base": read_log(model).base.path,
        "delta": next(iter(read_log(model).deltas), read_log(model).base).path,
        "increment": read_history(trainer.directory).increments[-1].path,
    }[what]
    manifest = json.loads((directory / "manifest.json").read_text())
    listed = manifest["variables" if what == "increment" else "tensors"]
    omitted = listed.pop(next(i for i, entry in enumerate(listed) if "users" in entry["name"]))
    if what != "increment":
        entries = [[each["name"], each["dtype"], each["shape"]] for each in listed]
        text = json.dumps(entries, separators=(",", ":"))
        manifest["schema_digest"] = hashlib.sha256(text.encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((CorruptFile, ManifestError)) as caught:
        if what == "increment":
            export_incremental(request(trainer, model))
        else:
            read_log(model).state()
    assert omitted["name"] in f"{caught.value.message} {caught.value.cause}"
