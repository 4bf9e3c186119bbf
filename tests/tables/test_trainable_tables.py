"""Train dynamic tables with stock TensorFlow, save and restore them, and export what was trained."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import UsageError
from exporter.options import ExportRequest, Updates
from exporter.pipeline.full import export
from exporter.tables import DynamicTable, TrainableTable

DIM = 3


class Trainer:
    """A graph with a table that learns to give each key's row the sum that is asked for."""

    def __init__(self, capacity: int = 5000, device: Any = None, target: str = "") -> None:
        import tensorflow as tf

        v1 = tf.compat.v1
        self.graph, self.target = tf.Graph(), target
        with self.graph.as_default(), v1.device(device):
            tf.random.set_seed(1)
            self.ids, self.wanted = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None])
            self.table = TrainableTable("emb", DIM, capacity)
            self.rows = self.table.lookup(self.ids)
            loss = tf.reduce_sum((tf.reduce_sum(self.rows, -1) - self.wanted) ** 2)
            self.step = v1.train.get_or_create_global_step()
            self.train = v1.train.AdagradOptimizer(0.1).minimize(loss, global_step=self.step)
            self.loss, self.saver = loss, v1.train.Saver()
            self.init = [v1.global_variables_initializer(), v1.tables_initializer()]

    def session(self) -> Any:
        import tensorflow as tf

        session = tf.compat.v1.Session(self.target, graph=self.graph)
        session.run(self.init)
        return session

    def fit(self, session: Any, keys: Any, steps: int = 1) -> None:
        for _ in range(steps):
            session.run(self.train, {self.ids: keys, self.wanted: np.arange(len(keys)) / len(keys)})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def build() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"rows": DynamicTable("emb", DIM, default=-1.0).lookup(ids)}


def served(path: Path, keys: Any) -> Any:
    import tensorflow as tf

    return tf.saved_model.load(str(path)).signatures["serving_default"](ids=keys)["rows"].numpy()


@pytest.mark.landing
def test_what_was_trained_is_saved_restored_and_served(tmp_path: Path) -> None:
    trainer = Trainer()
    keys = np.unique(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 700))
    with trainer.session() as session:
        before = session.run(trainer.loss, {trainer.ids: keys, trainer.wanted: np.zeros(len(keys))})
        trainer.fit(session, keys, 30)
        after = session.run(
            trainer.loss, {trainer.ids: keys, trainer.wanted: np.arange(len(keys)) / len(keys)}
        )
        assert after < 0.05 * len(keys), before
        rows = session.run(trainer.rows, {trainer.ids: keys})
        trainer.saver.save(session, str(tmp_path / "ckpt" / "model.ckpt"), global_step=trainer.step)
    done = export(ExportRequest(tmp_path / "ckpt", tmp_path / "model", model=build, updates=Updates()))
    assert served(done.published.path, keys).tobytes() == rows.tobytes()
    assert (served(done.published.path, np.arange(5)) == -1.0).all()
    restored = Trainer()
    with restored.session() as session:
        session.run(restored.rows, {restored.ids: np.arange(50)})  # other keys, which the restore forgets
        restored.saver.restore(session, str(tmp_path / "ckpt" / "model.ckpt-30"))
        assert session.run(restored.rows, {restored.ids: keys}).tobytes() == rows.tobytes()
        restored.fit(session, np.append(keys, 5), 2)
        assert session.run(restored.table.index.cursors)[0] == len(keys) + 1


def test_rows_are_given_once_whoever_asks_first() -> None:
    trainer = Trainer()
    keys = np.arange(2000, dtype=np.int64) * 7919
    with trainer.session() as session:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(20):
                trainer.fit(session, random.choice(keys, 200, replace=False))

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        count = session.run(trainer.table.index.cursors)[0]
        seen = session.run(trainer.table.index.row_keys)[:count]
        assert len(np.unique(seen)) == count, "no key has two rows"


def test_new_rows_begin_near_zero() -> None:
    trainer = Trainer()
    with trainer.session() as session:
        rows = session.run(trainer.table.values)
    assert 0.03 < rows.std() < 0.06
    assert np.abs(rows).max() <= 0.1


def test_a_full_table_is_an_error_that_names_it() -> None:
    import tensorflow as tf

    trainer = Trainer(capacity=10)
    with trainer.session() as session:
        trainer.fit(session, np.arange(10))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"emb.* is full"):
            trainer.fit(session, np.arange(11))
        trainer.fit(session, np.arange(10))


def test_workers_of_a_parameter_server_share_the_table(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    ports = [free_port() for _ in range(3)]
    cluster = tf.train.ClusterSpec(
        {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{port}" for port in ports[1:]]}
    )
    tasks = (("ps", 0), ("worker", 0), ("worker", 1))
    servers = [tf.distribute.Server(cluster, job, task) for job, task in tasks]
    trainers = []
    for task in range(2):
        setter = v1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{task}")
        trainers.append(Trainer(device=setter, target=servers[1 + task].target))
    keys = np.arange(1500, dtype=np.int64) * 7919 - 4_000_000
    first, second = (v1.Session(each.target, graph=each.graph) for each in trainers)
    first.run(trainers[0].init)

    def work(trainer: Trainer, session: Any, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(15):
            trainer.fit(session, random.choice(keys, 150, replace=False))

    pairs = ((trainers[0], first), (trainers[1], second))
    workers = [threading.Thread(target=work, args=(*pair, seed)) for seed, pair in enumerate(pairs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    index = trainers[0].table.index
    count = first.run(index.cursors)[0]
    assert len(np.unique(first.run(index.row_keys)[:count])) == count
    rows = second.run(trainers[1].rows, {trainers[1].ids: keys})
    with trainers[0].graph.as_default():
        trainers[0].saver.save(first, str(tmp_path / "ckpt" / "model.ckpt"), global_step=30)
    done = export(ExportRequest(tmp_path / "ckpt", tmp_path / "model", model=build))
    assert served(done.published.path, keys).tobytes() == rows.tobytes()
    first.close()
    second.close()


def test_a_monitored_session_goes_on_where_it_ended(tmp_path: Path) -> None:
    import tensorflow as tf

    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 100)
    found = []
    for _ in range(2):
        trainer = Trainer()
        with (
            trainer.graph.as_default(),
            tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session,
        ):
            found.append(session.run(trainer.rows, {trainer.ids: keys}))
            trainer.fit(session, keys, 3)
            found.append(session.run(trainer.rows, {trainer.ids: keys}))
    begun, trained, restored, _ = found
    assert restored.tobytes() == trained.tobytes() != begun.tobytes()


def test_keys_that_were_not_seen_for_long_are_taken_away(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        ids = v1.placeholder(tf.int64, [None])
        table = TrainableTable("emb", DIM, 8, records_steps=True)
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(table.lookup(ids) ** 2)
        train = v1.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)
        gone, (_, keys) = table.remove_unseen(3), table.index.in_use()
        saver, init = v1.train.Saver(), [v1.global_variables_initializer(), v1.tables_initializer()]
        with v1.Session() as session:
            session.run(init)

            def fit(*seen: int) -> None:
                session.run(train, {ids: seen})

            def left() -> set[int]:
                return set(session.run(keys).tolist())

            for _ in range(3):  # steps 0 to 2
                fit(1, 2, 3)
            fit(3, 4)
            assert session.run(gone) == 0  # at step 4
            fit(3, 4)
            fit(4)
            assert session.run(gone) == 2 and left() == {3, 4}  # at step 6
            for key in range(10, 16):
                fit(key, 3, 4)
            assert len(left()) == 8
            assert session.run(gone) == 3 and left() == {3, 4, 13, 14, 15}  # at step 12
            fit(20, 21)  # in rows that had other keys
            assert session.run(gone) == 1 and left() == {3, 4, 14, 15, 20, 21}  # at step 13
            prefix = saver.save(session, str(tmp_path / "model.ckpt"), global_step=13)
        with v1.Session() as session:
            session.run(init)
            saver.restore(session, prefix)
            assert session.run(gone) == 0  # ages count from now, step 13
            for _ in range(4):
                session.run(train, {ids: [3]})
            assert session.run(gone) == 5 and left() == {3}  # at step 17
    with tf.Graph().as_default(), pytest.raises(UsageError, match="does not know when"):
        TrainableTable("emb", DIM, 8).remove_unseen(3)
    with pytest.raises(UsageError, match=r"no table of .* has their versions") as caught:
        export(ExportRequest(Path(prefix), tmp_path / "model", model=build, max_age_steps=3))
    assert "remove_unseen" in caught.value.hint
