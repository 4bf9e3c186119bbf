"""What a training graph is asked for where nobody says: its inputs and its likely answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import NotServable, UsageError
from exporter.graph.clean import clean
from exporter.graph.load import GraphRequest, load_source
from exporter.pipeline.inspected import GraphView
from exporter.pipeline.inspection import inspect
from tests.support.commands import export_model
from tests.support.graph_runs import v1_graph


def dense(v1: Any, x: Any, units: int, name: str, **options: Any) -> Any:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [int(x.shape[-1]), units], **options)
        bias = v1.get_variable("bias", [units])
        return v1.nn.bias_add(v1.matmul(x, kernel), bias, name=f"{name}_out")


def softmax_classifier(v1: Any, x: Any, labels: Any) -> list[str]:
    hidden = v1.nn.sigmoid(dense(v1, x, 5, "hidden"))
    mean, variance = v1.nn.moments(hidden, [0])
    moving = v1.get_variable("moving_mean", [5], trainable=False)
    update = v1.assign_sub(moving, 0.1 * (moving - mean))
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    logits = dense(v1, (hidden - mean) * v1.rsqrt(variance + 1e-3), 3, "logits")
    answers = v1.nn.softmax(logits, name="scores")
    classes = v1.argmax(answers, 1, name="classes")
    v1.metrics.accuracy(v1.argmax(labels, 1), classes)
    loss = v1.reduce_mean(v1.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits))
    v1.summary.scalar("loss", loss)
    v1.train.AdamOptimizer().minimize(loss)
    return ["scores", "classes", "logits/logits_out"]


def binary_without_activation(v1: Any, x: Any, labels: Any) -> list[str]:
    logits = dense(v1, v1.nn.relu(dense(v1, x, 4, "hidden")), 3, "top")
    loss = v1.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    v1.train.GradientDescentOptimizer(0.1).minimize(v1.reduce_mean(loss))
    return ["top/top_out"]


def regression_of_parts(v1: Any, x: Any, labels: Any) -> list[str]:
    partitioner = v1.fixed_size_partitioner(2)
    hidden = v1.tanh(dense(v1, x, 4, "hidden", partitioner=partitioner))
    kernel = v1.get_variable("kernel", [4, 3], partitioner=partitioner)
    answers = v1.matmul(hidden, kernel, name="answers")
    loss = v1.losses.mean_squared_error(labels, answers) + v1.nn.l2_loss(kernel)
    v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    return ["answers"]


def recurrent(v1: Any, x: Any, labels: Any) -> list[str]:
    kernel = v1.get_variable("kernel", [5, 2])

    def step(at: Any, state: Any) -> Any:
        return at + 1, v1.sigmoid(v1.matmul(v1.concat([x, state], 1), kernel))

    _, state = v1.while_loop(lambda at, _: at < 3, step, [0, v1.zeros_like(x[:, :2])])
    answers = v1.nn.sigmoid(dense(v1, state, 3, "top"), name="answers")
    v1.losses.log_loss(labels, answers)
    return ["answers", "top/top_out"]


@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize(
    "build", [softmax_classifier, binary_without_activation, regression_of_parts, recurrent]
)
def test_inputs_and_likely_outputs(
    tmp_path: Path, build: Callable[[Any, Any, Any], list[str]], resource: bool
) -> None:
    with v1_graph(resource=resource) as graph:
        import tensorflow as tf

        v1 = tf.compat.v1
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        labels = v1.placeholder(tf.float32, [None, 3], name="labels")
        expected = build(v1, x, labels)
        saver = v1.train.Saver(sharded=True)
        v1.train.Saver()  # a program may have several
        meta = tmp_path / "model.ckpt-1.meta"
        v1.train.export_meta_graph(str(meta), graph=graph, saver_def=saver.saver_def)

    view = inspect(meta)
    assert isinstance(view, GraphView)
    assert [spec.name for spec in view.placeholders] == ["x", "labels"]
    assert [spec.tensor for spec in view.likely_outputs] == [f"{name}:0" for name in expected]
    assert f"output?     {expected[0]}:0" in export_model("inspect", meta).out
    assert len(export_model("inspect", meta, "--json").document["likely_outputs"]) == len(expected)
    with pytest.raises(UsageError) as caught:
        load_source(GraphRequest(model=str(meta)))
    assert f"placeholders are x, labels; likely outputs are {', '.join(expected)}" in caught.value.cause


def test_all_that_a_training_graph_reads_is_told_at_once(tmp_path: Path) -> None:
    with v1_graph(resource=True) as graph:
        import tensorflow as tf

        v1 = tf.compat.v1
        batch = {"user": tf.zeros([4, 2]), "item": tf.zeros([4, 1]), "label": tf.zeros([4, 1])}
        fed = v1.data.make_one_shot_iterator(v1.data.Dataset.from_tensors(batch)).get_next()
        rate = v1.placeholder(tf.float32, [], name="rate")
        answers = rate * dense(v1, v1.concat([fed["user"], fed["item"]], 1), 1, "top")
        v1.identity(answers, name="answers")
        meta = tmp_path / "model.ckpt-1.meta"
        v1.train.export_meta_graph(str(meta), graph=graph)

    with pytest.raises(UsageError) as nothing:
        load_source(GraphRequest(model=str(meta)))
    assert "is trained with IteratorGetNext:0, IteratorGetNext:1, IteratorGetNext:2" in nothing.value.cause
    for inputs in ({}, {"rate": "rate"}):
        with pytest.raises(NotServable) as lacking:
            clean(load_source(GraphRequest(model=str(meta), inputs=inputs, outputs={"y": "answers"})))
        told = {*re.findall(r"--input NAME=(\S+?),?(?= |$)", lacking.value.hint)}
        assert told == {"rate", "IteratorGetNext:0", "IteratorGetNext:2"} - {*inputs}
