"""The index of a trained table, stopped where two callers, or a caller and a reader, meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.increments.changed_tables import TableRows
from exporter.tables import TrainableTable
from exporter.training.keyed import TableAccess, table_access

v1 = tf.compat.v1

_WAIT_S = 20


class Stop:
    """A point in a graph that is left when it is told to."""

    def __init__(self) -> None:
        self.is_reached, self.may_go = threading.Event(), threading.Event()

    def after(self, *operations: Any) -> Any:
        """The context of what lies behind the point, which lies behind these operations."""
        with tf.control_dependencies(operations):
            passed = tf.numpy_function(self._wait, [], tf.int64, stateful=True)
        return tf.control_dependencies([passed])

    def _wait(self) -> int:
        self.is_reached.set()
        self.may_go.wait(_WAIT_S)
        return 0


@contextmanager
def running(work: Callable[[], Any]) -> Iterator[None]:
    """What runs beside the body, and has ended well after it."""
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(work)
        yield
        done.result()


@pytest.fixture
def table() -> Iterator[TrainableTable]:
    with tf.Graph().as_default():
        yield TrainableTable("t", 2, 20)


@contextmanager
def started(table: TrainableTable) -> Iterator[tuple[Any, TableAccess]]:
    reader = table_access(table)
    with v1.Session() as session:
        session.run([v1.tables_initializer(), v1.global_variables_initializer()])
        reader.begin(session)
        yield session, reader


def given(session: Any, reader: TableAccess) -> dict[int, int]:
    """The keys that were given rows, by these."""
    rows, keys = reader.find(session, reader.take_given(session))
    return dict(zip(rows.tolist(), keys.tolist(), strict=True))


def test_a_key_that_is_being_added_is_told_of_later(table: TrainableTable) -> None:
    stop, insert = Stop(), table.index.index.insert

    def slow_insert(keys: Any, rows: Any) -> Any:
        with stop.after():
            return insert(keys, rows)

    table.index.index.insert = slow_insert
    rows = table.rows(tf.constant([5, 7], tf.int64))
    with started(table) as (session, reader):
        with running(lambda: session.run(rows)):
            assert stop.is_reached.wait(_WAIT_S)
            early = given(session, reader)
            stop.may_go.set()
        assert (early, given(session, reader)) == ({}, {0: 5, 1: 7})


def test_a_removal_that_was_begun_is_told_of_whatever_becomes_of_the_worker(table: TrainableTable) -> None:
    stop, remove = Stop(), table.index.index.remove

    def slow_remove(keys: Any) -> Any:
        removed = remove(keys)
        with stop.after(removed):
            return tf.no_op()

    rows = table.rows(tf.constant([5, 7], tf.int64))
    table.index.index.remove = slow_remove
    gone = table.remove(tf.constant([7], tf.int64))

    def give_up(session: Any) -> None:
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(gone, options=v1.RunOptions(timeout_in_ms=200))

    with started(table) as (session, reader):
        session.run(rows)
        timer = threading.Timer(1, stop.may_go.set)
        timer.start()
        give_up(session)
        timer.join()
        assert stop.is_reached.is_set()
        assert reader.take_removed(session).tolist() == [7]
        assert given(session, reader) == {0: 5}
        assert session.run(table.index.cursors).tolist() == [2, 0, 1], "the row is free again"


def test_a_key_whose_row_is_given_to_another_is_told_of_as_removed(table: TrainableTable) -> None:
    """The lock of `CriticalSection` does not hold when a caller that waits for it is cancelled."""
    ids = v1.placeholder(tf.int64, [None])
    rows, cursors = table.rows(ids), table.index.cursors
    back = cursors.assign(tf.constant([1, 0, 0], tf.int64)).op  # as one saw them who began before 7 came
    with started(table) as (session, reader):
        session.run(rows, {ids: [5, 7]})
        assert given(session, reader) == {0: 5, 1: 7}
        session.run(back)
        assert session.run(rows, {ids: [9]}).tolist() == [1]
        assert reader.take_removed(session).tolist() == [7]
        assert given(session, reader) == {1: 9}
        assert session.run(rows, {ids: [7, 9]}).tolist() == [2, 1]
        assert given(session, reader) == {2: 7}


def test_increments_that_are_laid_over_displace_what_workers_met_meanwhile(table: TrainableTable) -> None:
    ids = v1.placeholder(tf.int64, [None])
    rows = table.rows(ids)
    with started(table) as (session, reader):
        session.run(rows, {ids: [5, 7, 8]})
        change = TableRows(np.array([1, 4]), np.array([8, 6]), np.ones((2, 2), np.float32), np.array([5]))
        reader.write(session, change)
        assert reader.take_removed(session).tolist() == [7]
        assert session.run(table.index.in_use()[0]).tolist() == [1, 4]
        assert reader.rows_of(session, np.array([8, 6, 5, 7])).tolist() == [1, 4]
        free = session.run(rows, {ids: np.arange(20, 38)})
        assert sorted(free.tolist()) == sorted(set(range(20)) - {1, 4}), "no row is lost"
