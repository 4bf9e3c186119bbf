from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.training import trainer_side
from exporter.training.trainer_side import Collector, SessionSource, plan_tracking, reader_of, record

v1 = tf.compat.v1


def test_a_row_that_is_written_once_is_never_missed() -> None:
    """Every row is written a single time, by threads that race the collector: a lost row stays lost."""
    rows, batch, width = 120_000, 12, 64
    with tf.Graph().as_default():
        table = v1.get_variable("t", [rows, width], initializer=v1.zeros_initializer(), use_resource=True)
        ids = v1.placeholder(tf.int64, [batch])
        values = tf.tile(tf.cast(ids + 1, tf.float32)[:, tf.newaxis], [1, width])
        train_op = tf.group(v1.scatter_update(table, ids, values))
        step = v1.train.get_or_create_global_step()
        (tracked,) = [entry for entry in plan_tracking(v1.global_variables()) if entry.name == "t"]
        recording = record((tracked,), step)
        readers = {id(tracked.parts[0]): reader_of(tracked.parts[0])}
        (group,) = recording.groups
        with v1.Session() as session:
            session.run([table.initializer, *(variable.initializer for variable in recording.variables)])
            copy = np.zeros((rows, width), np.float32)

            def collect() -> int:
                found = session.run(group.collect)
                pieces = list(SessionSource(session, readers).rows(tracked, found))
                if pieces:
                    copy[found] = np.concatenate(pieces)
                return len(found)

            batches = iter(np.random.default_rng(3).permutation(rows).reshape(-1, batch))
            lock = threading.Lock()

            def train() -> None:
                while True:
                    with lock:
                        chosen = next(batches, None)
                    if chosen is None:
                        return
                    session.run(train_op, {ids: chosen})

            threads = [threading.Thread(target=train) for _ in range(3)]
            collections = collect()  # the first call of each operation is slow
            session.run(train_op, {ids: np.zeros(batch, np.int64)})
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                collections += collect() > 0
            collect()
    assert collections > 20
    missed = np.flatnonzero(copy[:, 0] != np.arange(1, rows + 1))
    assert len(missed) == 0


@pytest.mark.parametrize("chunk", [1 << 20, 200], ids=["all at once", "the larger ones alone"])
def test_small_variables_are_read_in_two_calls_of_the_same_tensors(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A session makes the graph ready for each set of tensors that it has not been asked for."""
    monkeypatch.setattr(trainer_side, "CHUNK_BYTES", chunk)
    with tf.Graph().as_default():
        tables = [v1.get_variable(f"t{n}", [30, n + 1], use_resource=n > 1) for n in range(4)]
        ids = v1.placeholder(tf.int64, [None])
        loss = tf.add_n([tf.reduce_sum(tf.gather(table, ids) ** 2) for table in tables])
        step = v1.train.get_or_create_global_step()
        weights = [v1.get_variable(f"w{n}", [n + 2]) for n in range(3)]
        updates = [weight.assign_add(weight * 2.0) for weight in weights]
        train_op = [v1.train.AdagradOptimizer(0.1).minimize(loss, step), *updates]
        tracked = plan_tracking(v1.global_variables())
        recording = record(tracked, step)
        collector = Collector(tracked, recording.groups)
        with Counting() as session:
            session.run([v1.global_variables_initializer(), *(v.initializer for v in recording.variables)])
            asked = []
            for rows in ([3, 4], [5, 6, 7, 8], [3]):
                session.run(train_op, {ids: rows})
                expected = session.run({v.op.name: v for v in v1.global_variables()})
                collector.collect(session)
                session.asked.clear()
                writer = Written()
                collector.write(writer, collector.source(session))
                collector.commit()
                asked.append(list(session.asked))
                for table in (f"t{n}{slot}" for n in range(4) for slot in ("", "/Adagrad")):
                    assert writer.found[f"{table}/ids"].tolist() == rows
                    assert writer.found[f"{table}/values"].tobytes() == expected[table][rows].tobytes()
                for weight in ("w0", "w1", "w2"):
                    assert writer.found[f"{weight}/value"].tobytes() == expected[weight].tobytes()
    assert asked[0][0] == asked[1][0] == asked[2][0]
    if chunk > 200:
        assert [len(each) for each in asked] == [2, 2, 2]
        assert asked[0] == asked[1] == asked[2]
    else:
        assert max(len(each) for each in asked) > 2


class Counting(v1.Session):  # type: ignore[misc]  # TensorFlow is untyped
    """A session that notes which tensors it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def run(self, fetches: Any, *others: Any, **named: Any) -> Any:
        self.asked.append(sorted(fetch.name for fetch in tf.nest.flatten(fetches)))
        return super().run(fetches, *others, **named)


class Written:
    """A bundle in memory."""

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray] = {}

    def add(self, key: str, value: np.ndarray) -> None:
        self.found[key] = value

    def add_rows(self, key: str, dtype: str, shape: Any, pieces: Iterable[np.ndarray]) -> None:
        self.found[key] = np.concatenate(list(pieces)).reshape(shape)


def test_a_row_is_flagged_after_it_was_written_however_long_that_takes() -> None:
    is_running, may_finish = threading.Event(), threading.Event()

    def slow_value() -> Any:
        is_running.set()
        may_finish.wait(20)
        return np.float32(5.0)

    with tf.Graph().as_default():
        table = v1.get_variable("t", [4, 2], initializer=v1.zeros_initializer(), use_resource=True)
        value = tf.reshape(tf.numpy_function(slow_value, [], tf.float32), [])
        train_op = tf.group(v1.scatter_update(table, [2], tf.fill([1, 2], value)))
        recording = record(plan_tracking([table]), v1.train.get_or_create_global_step())
        with v1.Session() as session:
            session.run([table.initializer, *(variable.initializer for variable in recording.variables)])
            worker = threading.Thread(target=session.run, args=(train_op,))
            worker.start()
            is_running.wait(20)
            (early,) = session.run([group.collect for group in recording.groups])
            may_finish.set()
            worker.join()
            (late,) = session.run([group.collect for group in recording.groups])
            (again,) = session.run([group.collect for group in recording.groups])
    assert (early.tolist(), late.tolist(), again.tolist()) == ([], [2], [])


@pytest.mark.parametrize("optimizer", ["AdagradOptimizer", "FtrlOptimizer"])
@pytest.mark.parametrize("use_resource", [True, False])
def test_a_table_and_its_slots_share_their_flags(optimizer: str, use_resource: bool) -> None:
    with tf.Graph().as_default():
        table = v1.get_variable("t", [10, 2], use_resource=use_resource)
        loss = tf.reduce_sum(tf.gather(table, [1, 2]))
        getattr(v1.train, optimizer)(0.1).minimize(loss)
        recording = record(plan_tracking(v1.global_variables()), v1.train.get_or_create_global_step())
        known = {variable.name for variable in (*v1.global_variables(), *v1.local_variables())}
    assert len(recording.groups) == 1
    assert len(recording.groups[0].parts) == 1 + {"AdagradOptimizer": 1, "FtrlOptimizer": 2}[optimizer]
    assert not {variable.name for variable in recording.variables} & known


def test_the_recording_lies_where_the_variable_lies() -> None:
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:1"):
            table = v1.get_variable("t", [10, 2], use_resource=False)
        v1.scatter_add(table, [1], [[1.0, 1.0]])
        step = v1.train.get_or_create_global_step()
        (group,) = record(plan_tracking(v1.global_variables()), step).groups
        assert group.touched.device == "/job:ps/task:1"
        marks = [op for op in tf.compat.v1.get_default_graph().get_operations() if "/mark/" in op.name]
        assert {op.device for op in marks} == {"/job:ps/task:1"}
