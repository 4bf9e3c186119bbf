"""Increments of tables that stock TensorFlow trains: recorded, restored, exported, served."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.increments.history import read_history
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import Exported, export
from exporter.pipeline.incremental import ExportedDelta, export_incremental
from exporter.publish.manifest import DeltaEntry, DeltaOrigin
from tests.support.increments import full
from tests.support.keyed_training import (
    SEEN,
    KeyedSession,
    KeyedTraining,
    Served,
    come_and_go,
    newest,
    overlaid,
    serving,
    stored_rows,
)


def request(training: KeyedTraining) -> ExportRequest:
    model = training.directory.with_name("model")
    return ExportRequest(training.directory, model, model=serving, updates=Updates())


def made_by(done: Any) -> DeltaOrigin | None:
    """How a delta was made; None if nothing was published."""
    assert isinstance(done, ExportedDelta)
    if done.published is None:
        return None
    entry = done.published.manifest.incremental
    assert isinstance(entry, DeltaEntry)
    return entry.made


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl", "sgd"])
def test_full_checkpoint_and_increments_are_the_last_state(tmp_path: Path, optimizer: str) -> None:
    training = KeyedTraining(tmp_path, optimizer)
    with training.session() as session:
        come_and_go(session, 1, 25)
        last = session.rows()
    assert stored_rows(newest(tmp_path)) == last
    history = read_history(tmp_path)
    starts = {marker.checkpoint.name for marker in history.markers} - {newest(tmp_path).name}
    assert len(starts) > 1
    for name in starts:
        chain = history.after(full(tmp_path, name))
        assert overlaid(stored_rows(tmp_path / name), chain) == last
    removed = [table.removed for stored in history.increments for table in stored.increment.tables]
    assert max(removed) > 0


@pytest.mark.landing
def test_a_served_model_answers_as_the_trainer_does_after_each_delta(tmp_path: Path) -> None:
    training = KeyedTraining(tmp_path / "train", save_increment_steps=1, save_checkpoint_steps=1000)
    with training.session() as session:
        session.train(SEEN[:50])
        base = export(request(training))
        served = Served(base.published.path)
        assert served.rows() == stored_rows(newest(training.directory))
        for turn in range(6):
            come_and_go(session, turn, 2)
            last = session.rows()
            assert made_by(export_incremental(request(training))) is DeltaOrigin.INCREMENTS
            served.update()
            assert served.rows() == last
        assert made_by(export_incremental(request(training))) is None


@pytest.mark.landing
def test_a_watch_begins_a_new_log_where_a_table_grew_too_large(tmp_path: Path) -> None:
    """Increment by increment, each of which alone would have had room; keys that went stay away."""
    training = KeyedTraining(
        tmp_path / "train", capacity=5000, save_increment_steps=1, save_checkpoint_steps=1000
    )
    made = []
    with training.session() as session:
        session.train(SEEN[:50])
        export(request(training))
        for turn in range(4):
            session.train(np.arange(500 * turn, 500 * turn + 500))
            session.remove(SEEN[10 * turn : 10 * turn + 10])
            made.append(export_incremental(request(training), is_watching=True))
        last = session.rows()
    assert [isinstance(done, ExportedDelta) for done in made] == [True, True, False, True]
    based = made[2]
    assert isinstance(based, Exported)
    assert (
        based.published.manifest.step == read_history(training.directory).increments[-1].increment.to_step - 2
    )
    served = Served(based.published.path)
    served.update()
    assert served.rows(np.fromiter(last, np.int64)) == last
    assert not served.rows(SEEN[:40])


@pytest.mark.landing
def test_a_training_goes_on_where_its_last_increment_ended(tmp_path: Path) -> None:
    """Rows, free rows and slots: it is trained on as if it had never ended."""
    rows = []
    for options in ({}, {"incremental_save_restore": True}):
        directory = tmp_path / f"restores-{len(options)}"
        training = KeyedTraining(directory, "adagrad", 240, 1, 1000, options)
        with pytest.raises(KeyboardInterrupt), training.session() as session:
            come_and_go(session, 1, 12)
            if options:
                raise KeyboardInterrupt
            come_and_go(session, 2, 12)
            rows.append(session.rows())
            raise KeyboardInterrupt
    with training.session() as session:
        assert session.rows().keys() == stored_keys_after(training.directory)
        come_and_go(session, 2, 12)
        rows.append(session.rows())
    assert rows[0] == rows[1]


def stored_keys_after(directory: Path) -> set[int]:
    (first,) = directory.glob("model.ckpt-0.index")
    chain = read_history(directory).after(full(directory, first.stem))
    return set(overlaid(stored_rows(first.with_suffix("")), chain))


@pytest.mark.landing
def test_a_trainer_that_is_killed_forks_and_the_next_delta_is_compared(tmp_path: Path) -> None:
    training = KeyedTraining(tmp_path / "train", save_checkpoint_steps=1000)
    with pytest.raises(KeyboardInterrupt), training.session() as session:
        session.train(SEEN[:50])
        base = export(request(training))
        come_and_go(session, 1, 10)
        raise KeyboardInterrupt
    served = Served(base.published.path)
    assert made_by(export_incremental(request(training))) is DeltaOrigin.INCREMENTS
    abandoned = served.rows()
    with training.session() as session:  # the first checkpoint again
        come_and_go(session, 2, 5)
        last = session.rows()
    assert made_by(export_incremental(request(training))) is DeltaOrigin.COMPARISON
    served.update()
    assert served.rows() == last != abandoned
    assert last == stored_rows(newest(training.directory))


@pytest.mark.landing
def test_a_training_that_is_set_back_takes_its_keys_back(tmp_path: Path) -> None:
    training = KeyedTraining(tmp_path / "train")
    with training.session() as session:
        session.train(SEEN[:50], 13)
        base = export(request(training))
        come_and_go(session, 1, 10)
    served = Served(base.published.path)
    export_incremental(request(training))
    older = newest(training.directory).with_name("model.ckpt-12")
    (training.directory / "checkpoint").write_text(f'model_checkpoint_path: "{older.name}"\n')
    with training.session() as session:
        session.train(SEEN[100:110], 3)
        session.remove(SEEN[:10])
        last = session.rows()
    export_incremental(request(training))
    served.update()
    assert served.rows() == last
    assert last.keys() == set(SEEN[10:50].tolist() + SEEN[100:110].tolist())


@pytest.mark.landing
def test_a_removed_key_begins_anew(tmp_path: Path) -> None:
    training = KeyedTraining(tmp_path, capacity=10)
    with training.session() as session:
        session.train(SEEN[:10], 20)
        before = session.rows()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"emb.* is full"):
            session.train(SEEN[10:12])
    with training.session() as session:
        assert session.remove([*SEEN[:2], SEEN[0], SEEN[399]]) == 2
        accumulator = next(each for each in v1_globals(session) if each.op.name == "emb/rows/Adagrad")
        session.train(SEEN[2:10])
        session.train([SEEN[1], SEEN[11]])
        after = session.rows()
        assert len(after) == 10
        values = session.session.run(accumulator)
        assert (np.sort(values.min(axis=1))[:2] < 3).all(), "slots of rows that begin anew do so, too"
        assert after[int(SEEN[1])] != before[int(SEEN[1])]
        assert after.keys() == {int(key) for key in [*SEEN[1:10], SEEN[11]]}


def test_rows_that_a_dying_worker_lost_are_found_again(tmp_path: Path) -> None:
    with KeyedTraining(tmp_path, capacity=10).session() as session:
        session.train(SEEN[:10])
        removed = session.table.index.index.remove  # and no more: the rows are not given back
        with session.session.graph.as_default():
            session.session.graph._unsafe_unfinalize()
            op = removed(tf.constant(SEEN[:4]))
        session.session.run(op)
        session.train(SEEN[10:14])
        assert session.rows().keys() == set(SEEN[4:14].tolist())
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"emb.* is full"):
            session.train(SEEN[14:15])


def v1_globals(session: KeyedSession) -> list[Any]:
    with session.session.graph.as_default():
        return list(tf.compat.v1.global_variables())


def test_threads_that_add_and_remove_the_same_keys_lose_nothing(tmp_path: Path) -> None:
    training = KeyedTraining(tmp_path, save_increment_steps=2, save_checkpoint_steps=60)
    with training.session() as session:
        few = SEEN[:60]
        raw = session.session._tf_sess()

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(60):
                fed = {session.nodes["ids"]: random.choice(few, 15)}
                raw.run(session.nodes["train" if random.random() < 0.6 else "remove"], fed)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            session.train(few[:2])
        for worker in workers:
            worker.join()
        session.train(few[:2], 3)
        last = session.rows()
    assert stored_rows(newest(tmp_path)) == last
    history = read_history(tmp_path)
    for marker in history.markers:
        if (tmp_path / f"{marker.checkpoint.name}.index").exists():
            chain = history.after(full(tmp_path, marker.checkpoint.name))
            assert overlaid(stored_rows(tmp_path / marker.checkpoint.name), chain) == last
