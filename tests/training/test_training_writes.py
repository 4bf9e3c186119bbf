from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from exporter.training.trainer_side import (
    Refused,
    TrackingMode,
    is_resource,
    plan_tracking,
    tracking_digest,
    variable_use,
)
from tests.support.training_graphs import LAZY, OPTIMIZERS, v1

KINDS = pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])


def table(use_resource: bool = True) -> Any:
    return v1.get_variable("t", [10, 2], use_resource=use_resource)


def modes() -> dict[str, TrackingMode]:
    return {entry.name: entry.mode for entry in plan_tracking(v1.global_variables())}


@KINDS
@pytest.mark.parametrize("optimizer", LAZY)
def test_sparse_gradients_touch_rows(optimizer: str, use_resource: bool) -> None:
    with tf.Graph().as_default():
        OPTIMIZERS[optimizer]().minimize(tf.reduce_sum(tf.gather(table(use_resource), [1, 2]) ** 2))
        assert set(modes().values()) == {TrackingMode.TOUCHED}


@KINDS
def test_a_dense_decay_may_move_any_row(use_resource: bool) -> None:
    with tf.Graph().as_default():
        OPTIMIZERS["adam"]().minimize(tf.reduce_sum(tf.gather(table(use_resource), [1, 2]) ** 2))
        found = modes()
    assert {found.pop("beta1_power"), found.pop("beta2_power")} == {TrackingMode.WHOLE}
    assert set(found.values()) == {TrackingMode.COMPARED}


@KINDS
def test_a_dense_gradient_moves_all_of_a_table(use_resource: bool) -> None:
    with tf.Graph().as_default():
        t = table(use_resource)
        OPTIMIZERS["adagrad"]().minimize(tf.reduce_sum(tf.gather(t, [1])) + tf.reduce_sum(t**2))
        assert set(modes().values()) == {TrackingMode.COMPARED}


def _assigned_in_a_loop(t: Any) -> Any:
    def body(i: Any) -> Any:
        with tf.control_dependencies([v1.scatter_add(t, [1], [[1.0, 1.0]])]):
            return i + 1

    return tf.while_loop(lambda i: i < 3, body, [0])


WHOLE: dict[str, Callable[[Any], Any]] = {
    "assign": lambda t: t.assign(t * 2.0),
    "assign_add": lambda t: t.assign_add(tf.ones([10, 2])),
    "slice": lambda t: t[2:4].assign(tf.ones([2, 2])),
    "loop": _assigned_in_a_loop,
    "function": lambda t: tf.function(lambda: t.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [1])))(),
    "condition": lambda t: tf.cond(
        v1.placeholder(tf.bool, []),
        lambda: tf.identity(v1.scatter_add(t, [1], [[1.0, 1.0]])),
        lambda: t + 0.0,
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("control_flow_v2", [True, False], ids=["v2", "v1"])
def test_what_does_not_name_its_rows_counts_as_a_whole_write(kind: str, control_flow_v2: bool) -> None:
    with control_flow(control_flow_v2), tf.Graph().as_default():
        WHOLE[kind](table())
        (entry,) = plan_tracking(v1.global_variables())
        assert entry.mode in (TrackingMode.COMPARED, TrackingMode.WHOLE)
        assert entry.whole_writes


READS: dict[str, Callable[[Any], Any]] = {
    "gather": lambda t: tf.gather(t, [1]),
    "whole": lambda t: t * 2.0,
    "function": lambda t: tf.function(lambda: tf.gather(t, [1]) * 2.0)(),
    "condition": lambda t: tf.cond(v1.placeholder(tf.bool, []), lambda: t[0], lambda: tf.gather(t, 1)),
    "loop": lambda t: tf.while_loop(lambda x: x < 3.0, lambda x: x + tf.gather(t, 1)[0], [0.0]),
    "initial value": lambda t: t if is_resource(t) else t.initialized_value(),
    "saver": lambda t: v1.train.Saver(),
}


@KINDS
@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("control_flow_v2", [True, False], ids=["v2", "v1"])
def test_reads_initializers_and_restores_are_no_writes(
    kind: str, control_flow_v2: bool, use_resource: bool
) -> None:
    with control_flow(control_flow_v2), tf.Graph().as_default():
        READS[kind](table(use_resource))
        assert modes() == {"t": TrackingMode.FIXED}


class control_flow:
    def __init__(self, v2: bool) -> None:
        self._v2 = v2

    def __enter__(self) -> None:
        self._was_v2 = v1.control_flow_v2_enabled()
        self._set(self._v2)

    def __exit__(self, *_: Any) -> None:
        self._set(self._was_v2)

    def _set(self, v2: bool) -> None:
        (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()


@KINDS
def test_indices_of_several_dimensions_are_row_writes(use_resource: bool) -> None:
    with tf.Graph().as_default():
        t = table(use_resource)
        v1.scatter_nd_add(t, [[1, 0], [2, 1]], [1.0, 2.0])
        (write,) = variable_use(t).row_writes
        assert write.is_nd
        assert write.indices.shape.as_list() == [2, 2]


def test_parts_of_a_table_know_their_rows() -> None:
    with tf.Graph().as_default():
        with v1.variable_scope("", partitioner=v1.fixed_size_partitioner(3)):
            parts = v1.get_variable("t", [10, 2])
        OPTIMIZERS["sgd"]().minimize(tf.reduce_sum(v1.nn.embedding_lookup(parts, [1, 2])))
        (entry,) = plan_tracking(v1.global_variables())
    assert (entry.name, entry.shape, entry.mode) == ("t", (10, 2), TrackingMode.TOUCHED)
    assert [(part.offset, part.rows) for part in entry.parts] == [(0, 4), (4, 3), (7, 3)]


def test_columns_of_a_variable_are_written_as_a_whole() -> None:
    with tf.Graph().as_default():
        with v1.variable_scope("", partitioner=v1.fixed_size_partitioner(2, axis=1)):
            parts = v1.get_variable("t", [10, 4])
        for part in parts:
            v1.scatter_add(part, [1], [[1.0, 1.0]])
        assert modes() == {"t": TrackingMode.WHOLE}


def test_a_variable_without_a_fixed_shape_is_refused() -> None:
    with tf.Graph().as_default():
        v1.Variable(v1.placeholder(tf.float32, [None]), validate_shape=False, use_resource=True)
        with pytest.raises(Refused, match="its shape is"):
            plan_tracking(v1.global_variables())


def test_plans_of_equal_graphs_are_equal() -> None:
    digests = []
    for rows in (10, 10, 11):
        with tf.Graph().as_default():
            v1.scatter_add(v1.get_variable("t", [rows, 2]), [1], [[1.0, 1.0]])
            digests.append(tracking_digest(plan_tracking(v1.global_variables())))
    assert digests[0] == digests[1] != digests[2]
