"""Increments of a trainer that is none of TensorFlow's: numpy here, PyTorch or a feature store elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter import ExportRequest, Updates, export, export_incremental
from exporter.errors import ExportError, MissingTensors, ShapeMismatch, UsageError
from exporter.increments.history import read_history
from exporter.training import IncrementWriter
from tests.support.increments import differing, full
from tests.support.updatable import loaded
from tests.support.users import as_user, needs_root

ROWS, DIM = 50, 4
KEYS = np.array([7, -1, 10**12, 3], np.int64)


def serving() -> tuple[dict[str, Any], dict[str, Any]]:
    import tensorflow as tf

    from exporter.tables import DynamicTable

    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], name="ids")
    table = v1.get_variable("bag/weight", [ROWS, DIM])
    scale = v1.get_variable("scale", [DIM])
    rows = DynamicTable("users", DIM, default=-1.0).lookup(ids)
    return {"ids": ids}, {"item": tf.gather(table, ids % ROWS) * scale, "user": rows}


class Training:
    """Arrays, and what a server of them should answer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rng = np.random.default_rng(4)
        self.table = self.rng.normal(size=(ROWS, DIM)).astype(np.float32)
        self.scale = np.ones(DIM, np.float32)
        self.users = {int(key): self.rng.normal(size=DIM).astype(np.float32) for key in KEYS}

    def save(self, writer: IncrementWriter, step: int) -> Path:
        users = np.fromiter(self.users, np.int64), np.stack(list(self.users.values()))
        return writer.save(step, {"bag/weight": self.table, "scale": self.scale}, {"users": users})

    def train(self, writer: IncrementWriter, step: int, **more: Any) -> Path | None:
        ids = self.rng.choice(ROWS, 5, replace=False)  # in no order
        self.table[ids] = self.rng.normal(size=(5, DIM))
        self.scale = self.scale * np.float32(1.5)
        gone, new = next(iter(self.users)), step + 10**6
        del self.users[gone]
        self.users[new] = self.rng.normal(size=DIM).astype(np.float32)
        changes = {
            "bag/weight": (ids, self.table[ids]),
            "scale": self.scale,
            "users": (np.array([new]), self.users[new][np.newaxis]),
        }
        return writer.write(step, changes, removed={"users": np.array([gone])}, **more)

    def assert_answers(self, server: Any) -> None:
        ids = np.array([*self.users, *KEYS, *range(ROWS)], np.int64)
        answer = server.predict(ids=ids)
        missing = np.full(DIM, -1, np.float32)
        expected = np.stack([self.users.get(int(key), missing) for key in ids])
        assert answer["user"].tobytes() == expected.tobytes()
        assert answer["item"].tobytes() == (self.table[ids % ROWS] * self.scale).tobytes()


def test_a_model_follows_arrays(tmp_path: Path) -> None:
    """Rows, a whole variable, keys that come and go; over a restart, and without one comparison."""
    training = Training(tmp_path / "train")
    writer = IncrementWriter(training.directory)
    training.save(writer, 10)
    request = ExportRequest(training.directory, tmp_path / "model", model=serving, updates=Updates())
    base = export(request)
    happened = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    with loaded(base.published.path) as server:
        for step in (20, 30, 40):
            if step == 30:
                writer = IncrementWriter(training.directory)  # another process goes on
            assert training.train(writer, step, event_time=happened) is not None
            delta = export_incremental(request)
            assert delta.published is not None
            assert delta.compared_bytes == 0
            server.update()
            training.assert_answers(server)
        history = read_history(training.directory)
        assert {stored.increment.event_time for stored in history.increments} == {happened}
        assert len({stored.increment.run for stored in history.increments}) == 1
        training.train(writer, 50)
        training.save(writer, 50)
        export_incremental(request)
        server.update()
        training.assert_answers(server)


def test_a_full_checkpoint_and_what_was_written_are_the_next(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    table = rng.normal(size=(9, 2)).astype(np.float32)
    writer = IncrementWriter(tmp_path)
    writer.save(1, {"t": table})
    start = full(tmp_path, "model.ckpt-1")
    for step in (2, 3):
        table[[step, 8]] = step
        writer.write(step, {"t": (np.array([8, step]), table[[8, step]])})
    writer.write(4, {"t": (np.array([], np.int64), table[:0])})
    chain = read_history(tmp_path).after(start)
    assert [stored.increment.to_step for stored in chain] == [2, 3]
    writer.save(3, {"t": table})
    assert differing(tmp_path, start, tmp_path / "model.ckpt-3", chain) == ["global_step"]


WRONG: dict[str, tuple[type[ExportError], dict[str, Any]]] = {
    "unknown": (MissingTensors, {"changes": {"other": np.zeros(2, np.float32)}}),
    "unknown table": (MissingTensors, {"changes": {}, "removed": {"other": np.array([1])}}),
    "twice": (ShapeMismatch, {"changes": {"t": (np.array([1, 1]), np.zeros((2, 2), np.float32))}}),
    "outside": (ShapeMismatch, {"changes": {"t": (np.array([9]), np.zeros((1, 2), np.float32))}}),
    "negative": (ShapeMismatch, {"changes": {"t": (np.array([-1]), np.zeros((1, 2), np.float32))}}),
    "width": (ShapeMismatch, {"changes": {"t": (np.array([1]), np.zeros((1, 3), np.float32))}}),
    "dtype": (ShapeMismatch, {"changes": {"t": np.zeros((9, 2))}}),
    "ids alone": (ShapeMismatch, {"changes": {"t": (np.array([1]),)}}),
    "ids in two dimensions": (ShapeMismatch, {"changes": {"t": (np.array([[1], [2]]), np.zeros((2, 2)))}}),
    "one id": (ShapeMismatch, {"changes": {"t": (1, np.zeros((1, 2), np.float32))}}),
    "fractions": (ShapeMismatch, {"changes": {"t": (np.array([1.5]), np.zeros((1, 2), np.float32))}}),
    "ragged": (ShapeMismatch, {"changes": {"t": [[1.0], [1.0, 2.0]]}}),
    "rows of a single value": (ShapeMismatch, {"changes": {"s": (np.array([0]), np.zeros(1, np.float32))}}),
    "keys alone": (ShapeMismatch, {"changes": {"u": np.array([1])}}),
    "keys in two dimensions": (ShapeMismatch, {"changes": {"u": ([[1], [2]], np.zeros((2, 3), np.float32))}}),
    "removed key": (ShapeMismatch, {"changes": {}, "removed": {"u": 7}}),
    "removed fractions": (ShapeMismatch, {"changes": {}, "removed": {"u": [1.5]}}),
    "removed without names": (UsageError, {"changes": {}, "removed": np.array([1, 2])}),
    "changes without names": (UsageError, {"changes": [("t", np.zeros((9, 2), np.float32))]}),
    "half a step": (UsageError, {"step": 6.5, "changes": {}}),
    "step": (UsageError, {"step": 5, "changes": {"t": np.zeros((9, 2), np.float32)}}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    error, arguments = WRONG[case]
    writer = IncrementWriter(tmp_path)
    with pytest.raises(UsageError, match="no full checkpoint"):
        writer.write(1, {})
    values = {"t": np.zeros((9, 2), np.float32), "s": np.float32(1)}
    writer.save(5, values, {"u": ([7], np.zeros((1, 3), np.float32))})
    with pytest.raises(error):
        writer.write(**{"step": 6, **arguments})
    assert read_history(tmp_path).increments == ()
    assert writer.write(6, {"t": np.ones((9, 2), np.float32)}) is not None


UNSAVED: dict[str, tuple[type[ExportError], dict[str, Any]]] = {
    "step": (UsageError, {"step": 1.5, "values": {}}),
    "no names": (UsageError, {"values": [np.zeros(2)]}),
    "ragged": (ShapeMismatch, {"values": {"t": [[1.0], [1.0, 2.0]]}}),
    "dtype": (UsageError, {"values": {"t": np.zeros(2, "datetime64[s]")}}),
    "objects": (UsageError, {"values": {"t": np.array([{}])}}),
    "step twice": (UsageError, {"values": {"global_step": np.int64(1)}}),
    "no rows": (ShapeMismatch, {"values": {}, "tables": {"u": np.array([1])}}),
    "fewer rows": (ShapeMismatch, {"values": {}, "tables": {"u": ([1, 2], np.zeros((1, 3), np.float32))}}),
    "flat rows": (ShapeMismatch, {"values": {}, "tables": {"u": ([1, 2], np.zeros(2, np.float32))}}),
    "twice": (UsageError, {"values": {"u-keys": [1]}, "tables": {"u": ([1], np.zeros((1, 3), np.float32))}}),
}


@pytest.mark.parametrize("case", UNSAVED)
def test_what_cannot_be_saved_is_refused_and_leaves_no_checkpoint(tmp_path: Path, case: str) -> None:
    error, arguments = UNSAVED[case]
    with pytest.raises(error):
        IncrementWriter(tmp_path).save(**{"step": 1, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_first_ends(tmp_path: Path) -> None:
    first = IncrementWriter(tmp_path)
    first.save(1, {"t": np.zeros(3, np.float32)})
    IncrementWriter(tmp_path)
    with pytest.raises(UsageError, match="another training"):
        first.write(2, {"t": np.ones(3, np.float32)})


@needs_root
def test_what_cannot_be_pruned_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """As in a directory that two users share: its sticky bit lets each remove only what is theirs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own keeps other users out
        directory = Path(name)
        training, writer = Training(directory), IncrementWriter(directory)
        first = training.save(writer, 10)
        old = [training.train(writer, step) for step in (20, 30)]
        training.save(writer, 40)
        for path in first.parent.glob(f"{first.name}.*"):
            path.unlink()
        for path in directory.rglob("*"):
            os.chown(path, *((0, 0) if path in old else (65534, 65534)))
        directory.chmod(0o777)
        os.chown(directory / "increments", 0, 0)
        (directory / "increments").chmod(0o1777)

        def train_on() -> object:
            again = IncrementWriter(directory)
            written = [training.train(again, step) for step in (50, 60)]
            return [str(path) for path in written], [each.message for each in caplog.records]

        written, messages = as_user(65534, train_on)  # type: ignore[misc]  a pair, as `train_on` makes it
        assert all(Path(path).is_dir() for path in [*written, *old])
        (message,) = messages
        assert f"{old[0]} is not needed, and cannot be removed" in message


def test_it_needs_no_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["tensorflow"] = None
import numpy as np
from exporter.training import IncrementWriter
writer = IncrementWriter({str(tmp_path)!r})
writer.save(1, {{"t": np.zeros(3, np.float32)}})
writer.write(2, {{"t": np.ones(3, np.float32)}})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(read_history(tmp_path).increments) == 1
