"""The hook in a graph as AutoDist transforms it; AutoDist itself, on 1.15, is in tests/integration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from exporter.checkpoint.locate import candidates
from exporter.increments.history import read_history
from exporter.training.trainer_side import IncrementHook, Refused
from tests.support.increments import differing, starts

v1 = tf.compat.v1
REPLICA = "AutoDist-Replica-0/"
ROWS = 12


class Distributed:
    """What the hook takes of an AutoDist: a graph without collections, in whose saver alone the names are."""

    def __init__(self, use_resource: bool, counts: bool = True, has_saver: bool = True) -> None:
        self.is_transformed = False
        self._original_graph_item = SimpleNamespace(info=SimpleNamespace(savers=[()] if has_saver else []))
        with tf.Graph().as_default() as self.graph:
            step = v1.get_variable(REPLICA + "global_step", [], tf.int64, v1.zeros_initializer())
            parts = v1.get_variable(
                REPLICA + "table",
                [ROWS, 4],
                partitioner=v1.fixed_size_partitioner(3),
                use_resource=use_resource,
            )
            kernel = v1.get_variable(REPLICA + "kernel", [4, 1], use_resource=use_resource)
            ids = v1.random_uniform([2], maxval=ROWS, dtype=tf.int64)
            rows = v1.nn.embedding_lookup([*parts], ids, "div")
            optimizer = v1.train.AdagradOptimizer(0.1)
            loss = tf.reduce_mean((tf.matmul(rows, kernel) - 1.0) ** 2)
            with tf.name_scope(REPLICA):
                self.train_op = optimizer.minimize(loss)
                self.count = step.assign_add(1) if counts else step.read_value()
                slots = [optimizer.get_slot(part, "accumulator") for part in parts]
                names = {"table": [*parts], "table/Adagrad": slots, "kernel": kernel, "global_step": step}
                self.saver = v1.train.Saver(names)
            self.variables = v1.global_variables()
            self.initializer = v1.global_variables_initializer()
            for name in self.graph.get_all_collection_keys():
                self.graph.clear_collection(name)
        for variable in self.variables:
            variable._set_save_slice_info(None)

    def is_built(self) -> bool:
        return self.is_transformed

    def _build(self) -> None:
        self._transformed_graph_item = SimpleNamespace(
            graph=self.graph, info=self, get_all_variables=lambda: self.variables
        )
        self.is_transformed = True

    def update_variables(self, variables: Iterable[Any], replace: bool) -> None:
        assert not replace
        self.initializer = tf.group(self.initializer, *(each.initializer for each in variables))


@contextmanager
def program(directory: Path) -> Iterator[IncrementHook]:
    """The user's own graph, which has nothing but the step here."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        yield IncrementHook(directory, save_increment_steps=3)


@pytest.mark.parametrize("use_resource", [False, True])
def test_increments_have_the_names_of_the_checkpoints(tmp_path: Path, use_resource: bool) -> None:
    distributed = Distributed(use_resource)
    with program(tmp_path) as hook:
        hook.begin(distributed)
    with v1.Session(graph=distributed.graph) as session:
        session.run(distributed.initializer)
        hook.after_create_session(session)
        for step in range(1, 15):
            session.run([distributed.train_op, distributed.count])
            if step in (1, 8, 14):
                distributed.saver.save(session, f"{tmp_path}/model.ckpt", step, write_meta_graph=False)
            hook.save_if_due(session)
        hook.end(session)
    history = read_history(tmp_path)
    known = starts(history, tmp_path)
    assert {start.step for start in known} == {1, 8, 14}
    for start in known:
        assert differing(tmp_path, start, candidates(tmp_path)[0]) == []
    (chain,) = [history.after(start) for start in known if start.step == 8]
    changed = chain[0].increment.variables
    tables = {each.variable.name: each.rows for each in changed if each.is_table}
    assert tables.keys() == {"table", "table/Adagrad"}  # three parts are one table, and few of its rows move
    assert max(tables.values()) < ROWS


def test_a_worker_records_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTODIST_WORKER", "192.0.2.2")
    distributed = Distributed(True)
    with program(tmp_path) as hook:
        hook.begin(distributed)
    with v1.Session(graph=distributed.graph) as session:
        session.run(distributed.initializer)
        hook.after_create_session(session)  # without waiting: AutoDist's session has initialized the flags
        session.run([distributed.train_op, distributed.count])
        hook.save_if_due(session)
        hook.end(session)
        assert any(len(session.run(group.collect)) for group in hook._recording.groups)
    assert not (tmp_path / "increments").exists()


def refusal(directory: Path, distributed: Any) -> str:
    with program(directory) as hook, pytest.raises(Refused) as found:
        hook.begin(distributed)
    return str(found.value)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    distributed = Distributed(True)
    distributed.is_transformed = True
    assert "before create_distributed_session" in refusal(tmp_path, distributed)
    assert "make an autodist.checkpoint.saver.Saver()" in refusal(
        tmp_path, Distributed(True, has_saver=False)
    )
    assert "[train_op, count]" in refusal(tmp_path, Distributed(True, counts=False))
