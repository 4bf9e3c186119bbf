"""What is served is what the trainer would restore now, whatever a trainer and its operator do.

Every sequence is checked against `NumpyTrainer`, which knows what happened.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.increments.increment import CheckpointId
from exporter.pipeline import log_maintenance
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.delta_log import read_log
from exporter.storage.layout import INCREMENTS_DIRECTORY, SESSION_FILE
from tests.support.budget import times
from tests.support.logs import Serving, publish_base, request, values_at
from tests.support.numpy_trainer import TABLES, NumpyTrainer, Values, as_any
from tests.support.publishing import delta_of

BOUND = 2.0
HAPPENINGS = [
    *("increment", "increment", "save", "end", "kill", "killed before the milestone", "increment of nothing"),
    *("restore", "restore, saver first", "restore beside live workers", "begin without increments"),
    *("set back, later ones kept", "set back, later ones deleted", "set back, later ones lost"),
    *("set back and restored", "set back and restored", "set back while it runs", "shards lost"),
    *("export", "export", "export", "export", "watch", "export within a bound", "merge", "roll back"),
]


class World:
    """A trainer and a log."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.trainer = NumpyTrainer(directory / "train", seed)
        self.model = directory / "model"
        self.request = request(as_any(self.trainer), self.model)
        publish_base(as_any(self.trainer), Serving(), self.model)

    def do(self, what: str) -> None:
        trainer = self.trainer
        match what:
            case "train":
                trainer.train()
            case "increment":
                trainer.train()
                trainer.increment()
            case "increment of nothing":
                trainer.increment()
            case "save":
                trainer.train()
                trainer.save()
            case "end":
                trainer.end()
            case "kill":
                trainer.kill()
            case "killed before the milestone":
                trainer.train()
                trainer.save(notices=False)
            case "restore":
                trainer.begin(restores=True, saver_first=False, is_live=False)
            case "restore, saver first":
                trainer.begin(restores=True, saver_first=True, is_live=False)
            case "restore beside live workers":
                trainer.begin(restores=True, saver_first=True, is_live=True)
            case "begin without increments":
                trainer.begin(restores=False, saver_first=True, is_live=False)
            case "set back, later ones kept":
                trainer.kill()
                trainer.set_back("kept")
            case "set back and restored":
                self.do(str(trainer.rng.choice([what for what in HAPPENINGS if "later ones" in what])))
                trainer.begin(restores=True, saver_first=True, is_live=False)
                self.do("increment")
            case "set back while it runs":
                trainer.set_back("kept")
            case "set back, later ones deleted":
                trainer.kill()
                trainer.set_back("deleted")
            case "set back, later ones lost":
                trainer.kill()
                trainer.set_back("lost")
            case "shards lost":
                trainer.set_back("lost by itself")
            case "export":
                self.export()
            case "export within a bound":
                self.export_within()
            case "watch":
                self.watch()
            case "merge":
                log_maintenance.merge(self.model)
            case "roll back":
                positions = [delta.start for delta in read_log(self.model).deltas]
                if positions:
                    log_maintenance.rollback(self.model, int(trainer.rng.choice(positions)))
            case _:
                raise AssertionError(what)

    def expected(self) -> Values:
        return self.served(self.trainer.states[self.trainer.newest_state()])

    @staticmethod
    def served(values: Values) -> Values:
        return {f"s/{name.removeprefix('net/')}": value for name, value in values.items() if "net/" in name}

    def export(self) -> ExportedDelta:
        done = delta_of(self.request)
        self.trainer.assert_same(values_at(read_log(self.model)), self.expected())
        return done

    def export_within(self) -> None:
        export_incremental(replace(self.request, min_change=BOUND))
        found, expected = values_at(read_log(self.model)), self.expected()
        for name in expected:
            if name.replace("s/", "net/") in TABLES:
                assert (np.linalg.norm(found[name] - expected[name], axis=1) < BOUND).all()
            else:
                assert found[name].tobytes() == expected[name].tobytes()

    def watch(self) -> None:
        """Who watches may wait for an increment: then what is served stays, or is that of one before."""
        before = values_at(read_log(self.model))
        done = delta_of(self.request, is_watching=True)
        found, target = values_at(read_log(self.model)), done.plan.trainer.plan.target
        if all(found[name].tobytes() == value.tobytes() for name, value in self.expected().items()):
            return
        assert done.compared_bytes == 0
        assert isinstance(self.trainer.newest_state(), CheckpointId)  # that no increment leads on from yet
        if done.published is None:
            self.trainer.assert_same(found, before)
        else:
            assert target.increment is not None
            self.trainer.assert_same(found, self.served(self.trainer.states[target.increment]))


@pytest.mark.landing
@settings(max_examples=times(60))
@given(st.lists(st.sampled_from(HAPPENINGS), min_size=5, max_size=30), st.integers(0, 1000))
def test_what_is_served_is_what_the_trainer_would_restore(what: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), seed)
        for each in ["restore", "increment", *what]:
            world.do(each)
        world.export()


SET_BACK = {
    "the state file edited": lambda train: None,
    "its shard lost": lambda train: [path.unlink() for path in train.glob("model.ckpt-2*.data-*")],
    "deleted": lambda train: [path.unlink() for path in train.glob("model.ckpt-2*")],
}


@pytest.mark.parametrize("how", SET_BACK)
@pytest.mark.parametrize("is_watching", [False, True], ids=["", "watching"])
def test_a_trainer_that_is_set_back_and_restores_increments(
    tmp_path: Path, how: str, is_watching: bool
) -> None:
    """F1, increment A, rows trained, F2 published; back to F1 and A, other rows trained, increment B."""
    world = World(tmp_path)
    trainer = world.trainer
    (first,) = trainer.fulls()
    trainer.begin(restores=True, saver_first=True, is_live=False)
    trainer.train()
    trainer.increment()
    a = trainer.newest_state()
    trainer.session.variables.values["global_step"] = np.array(20, np.int64)  # type: ignore[union-attr]
    trainer.train()
    trainer.save()
    world.export()
    trainer.kill()
    trainer.point_to(first)
    SET_BACK[how](trainer.directory)
    assert trainer.newest_state() == a
    done = delta_of(world.request, is_watching=is_watching)
    assert done.published is not None  # the trainer has F1 and A: F2 must not stay served
    world.trainer.assert_same(values_at(read_log(world.model)), world.expected())
    trainer.begin(restores=True, saver_first=True, is_live=False)
    for _ in range(3):
        trainer.train(rows=1)
        trainer.increment()
        done = delta_of(world.request, is_watching=is_watching)
        assert done.compared_bytes == 0
        world.trainer.assert_same(values_at(read_log(world.model)), world.expected())


@pytest.mark.parametrize("how", SET_BACK)
def test_nothing_abandoned_stays_served_if_nobody_exported_until_the_next_increment(
    tmp_path: Path, how: str
) -> None:
    world = World(tmp_path)
    trainer = world.trainer
    (first,) = trainer.fulls()
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    trainer.session.variables.values["global_step"] = np.array(20, np.int64)  # type: ignore[union-attr]
    for each in ["save", "export", "kill"]:
        world.do(each)
    trainer.point_to(first)
    SET_BACK[how](trainer.directory)
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    assert world.export().compared_bytes > 0
    world.do("increment")
    assert world.export().compared_bytes == 0


def test_of_two_trainings_in_one_directory_the_one_that_began_first_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    trainer = world.trainer
    for each in ["restore, saver first", "increment", "save"]:
        world.do(each)
    first = trainer.session
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    second, trainer.session = trainer.session, first
    for each in ["increment", "end"]:
        with pytest.raises(UsageError, match="another training writes increments"):
            world.do(each)
    assert second is not None
    trainer.session = second
    world.do("increment")
    world.export()


def test_a_session_file_that_no_training_wrote_is_not_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.do("restore, saver first")
    world.do("increment")
    os.truncate(world.trainer.directory / INCREMENTS_DIRECTORY / SESSION_FILE, 1 << 40)
    world.do("increment")


def test_a_full_checkpoint_that_was_there_before_the_session_is_not_its_own(tmp_path: Path) -> None:
    """The trainer died before it could note it; later somebody points the state file there."""
    world = World(tmp_path)
    trainer = world.trainer
    (first,) = trainer.fulls()
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    trainer.session.variables.values["global_step"] = np.array(20, np.int64)  # type: ignore[union-attr]
    world.do("killed before the milestone")
    unknown = trainer.named
    trainer.point_to(first)
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    trainer.point_to(unknown)
    trainer.session.variables.values["global_step"] = np.array(30, np.int64)  # type: ignore[union-attr]
    for each in ["increment", "export", "increment", "export"]:
        world.do(each)


def forget_sessions(directory: Path) -> None:
    """As releases wrote these files that noted no session."""
    for path in (*directory.glob("increments/*/manifest.json"), *directory.glob("increments/*.json")):
        fields = json.loads(path.read_text())
        fields.pop("session", None)
        path.write_text(json.dumps(fields))


def test_files_that_name_no_session_are_read_and_compared_where_that_is_not_certain(tmp_path: Path) -> None:
    world = World(tmp_path)
    for each in ["restore, saver first", "increment", "save", "export", "increment"]:
        world.do(each)
    forget_sessions(world.trainer.directory)
    assert world.export().compared_bytes > 0
    world.do("increment")
    forget_sessions(world.trainer.directory)
    assert world.export().compared_bytes == 0


def test_files_that_name_no_session_of_a_trainer_that_was_set_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    trainer = world.trainer
    (first,) = trainer.fulls()
    for each in ["restore, saver first", "increment", "save", "export", "kill"]:
        world.do(each)
    trainer.point_to(first)
    for each in ["restore, saver first", "increment"]:
        world.do(each)
    forget_sessions(trainer.directory)
    assert world.export().compared_bytes > 0


def test_no_increment_has_the_step_of_a_full_checkpoint_that_was_read_before_it(tmp_path: Path) -> None:
    """Who has the checkpoint would pass over it, though it may hold rows that came later."""
    trainer = NumpyTrainer(tmp_path / "train", seed=1)
    trainer.begin(restores=False, saver_first=False, is_live=False)
    trainer.train()
    trainer.save()
    before = trainer.ids()
    trainer.increment()
    assert trainer.ids() == before
    trainer.train()
    trainer.increment()
    assert len(trainer.ids() - before) == 1
