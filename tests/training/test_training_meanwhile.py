"""Other workers go on while a chief that died comes back: full checkpoints and increments stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from exporter.increments.history import read_history
from tests.support.increments import differing, starts
from tests.support.keyed_training import KeyedSession, KeyedTraining, Work, come_and_go, newest, stored_rows
from tests.support.training_graphs import Training, two_towers

RESTORES = {"incremental_save_restore": True}


@pytest.fixture
def server() -> str:
    """A server that keeps the variables of a chief that dies."""
    return str(tf.distribute.Server.create_local_server().target)


def assert_exact(directory: Path) -> None:
    known = starts(read_history(directory), directory)
    assert known
    for start in known:
        assert differing(directory, start, newest(directory)) == [], start


def coming_and_going(seed: int, turns: int) -> Work:
    def work(worker: KeyedSession) -> None:
        come_and_go(worker, seed, turns)

    return work


@pytest.mark.landing
@pytest.mark.parametrize(("increments", "before", "after"), [(8, 3, 0), (2, 3, 3), (8, 0, 3)])
def test_tables_by_keys(tmp_path: Path, server: str, increments: int, before: int, after: int) -> None:
    """Also where workers get further than the chain goes, and give its rows to other keys."""
    training = KeyedTraining(tmp_path, "adagrad", 420, 1, 1000, RESTORES, server)
    with pytest.raises(KeyboardInterrupt), training.session() as session:
        come_and_go(session, 1, increments // 2)
        raise KeyboardInterrupt
    with training.session((coming_and_going(2, before), coming_and_going(3, after))) as session:
        come_and_go(session, 4, 3)
        last = session.rows()
    assert stored_rows(newest(tmp_path)) == last
    assert_exact(tmp_path)
    history = read_history(tmp_path)
    assert len({stored.increment.run for stored in history.increments}) == 1, "the run goes on"


@pytest.mark.landing
@pytest.mark.parametrize("optimizer", ["ftrl", "adam"])
def test_tables_by_rows(tmp_path: Path, server: str, optimizer: str) -> None:
    training = Training(tmp_path, two_towers(optimizer, use_resource=True), 1000, 2, server)
    with pytest.raises(KeyboardInterrupt), training.session(**RESTORES) as (session, train_op):
        for _ in range(6):
            session.run(train_op)
        raise KeyboardInterrupt
    training.run(5, meanwhile=(4, 3), **RESTORES)
    assert_exact(tmp_path)


@pytest.mark.landing
def test_a_chief_that_dies_again_at_once_has_lost_nothing(tmp_path: Path, server: str) -> None:
    """What it restored is not in its own first full checkpoint: it is in an increment as soon as can be."""
    training = KeyedTraining(tmp_path, "adagrad", 420, 6, 1000, RESTORES, server)
    with pytest.raises(KeyboardInterrupt), training.session() as session:
        come_and_go(session, 1, 6)
        raise KeyboardInterrupt
    with (
        pytest.raises(KeyboardInterrupt),
        training.session((coming_and_going(2, 2), coming_and_going(3, 2))) as session,
    ):
        session.train([1])
        last = session.rows()
        raise KeyboardInterrupt
    with training.session() as session:
        assert session.rows() == last
    assert_exact(tmp_path)
