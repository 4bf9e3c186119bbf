from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.training.trainer_side import SessionSource, plan_tracking, reader_of, record

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
