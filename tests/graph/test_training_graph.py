"""Training graphs beside serving ones: a stock SavedModel of several tags, averages, devices of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import GraphError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.saved_model import load_training_graph
from exporter.graph.training_graph import drop_training_signatures
from exporter.options import DataMode, ExportRequest
from exporter.pipeline.full import export, plan
from exporter.wire import protos

X = np.random.default_rng(5).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def build(v1: Any, *, training: bool) -> dict[str, Any]:
    """A regression; for training with momentum and moving averages."""
    import tensorflow as tf

    x = v1.placeholder(tf.float32, [None, 4], "x")
    kernel = v1.get_variable("kernel", [4, 1], use_resource=True)
    bias = v1.get_variable("bias", [1], use_resource=True, initializer=v1.zeros_initializer())
    found = {"x": x, "scores": tf.add(tf.matmul(x, kernel), bias, name="scores")}
    if training:
        v1.get_variable("seen", [], collections=[v1.GraphKeys.LOCAL_VARIABLES])  # no Saver saves it
        y = v1.placeholder(tf.float32, [None, 1], "y")
        loss = tf.reduce_mean(tf.square(found["scores"] - y), name="loss")
        v1.losses.add_loss(loss)
        step = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        averages = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([step]):
            found["train_op"] = averages.apply([kernel, bias])
        v1.add_to_collection("train_op", found["train_op"])
        found |= {"y": y, "loss": loss}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train` and `serve` over the same variables, as TensorFlow's builder writes them."""
    import tensorflow as tf

    v1 = tf.compat.v1
    path = tmp_path_factory.mktemp("saved") / "model"
    builder = v1.saved_model.Builder(str(path))
    predict = v1.saved_model.predict_signature_def
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(3)
        ends = build(v1, training=True)
        session.run(v1.global_variables_initializer())
        for _ in range(8):
            session.run(ends["train_op"], {ends["x"]: X, ends["y"]: Y})
        losing = predict({"x": ends["x"], "y": ends["y"]}, {"loss": ends["loss"]})
        builder.add_meta_graph_and_variables(session, ["train"], {"loss": losing})
    with tf.Graph().as_default():
        ends = build(v1, training=False)
        predicting = predict({"x": ends["x"]}, {"scores": ends["scores"]})
        builder.add_meta_graph(["serve"], {"serving_default": predicting})
    builder.save()
    model = read_saved_model(path)
    graph_def = model.meta_graphs[0].graph_def
    for body in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in body:
            node.device = "/job:ps/task:3"
    (path / "saved_model.pb").write_bytes(model.SerializeToString())
    return path


def values(saved: Path) -> Any:
    import tensorflow as tf

    return tf.train.load_checkpoint(str(saved / "variables/variables")).get_tensor


def run(path: Path, tag: str, steps: int = 0) -> Any:
    """Scores under a tag after so many steps of training, which need no device of the cluster's."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.saved_model.load(session, [tag], str(path))
        for _ in range(steps):
            session.run(graph.get_collection("train_op")[0], {"x:0": X, "y:0": Y})
        return session.run("scores:0", {"x:0": X})


@pytest.mark.parametrize("average", [None, "ema"])
def test_both_graphs_of_a_stock_saved_model(saved: Path, tmp_path: Path, average: str | None) -> None:
    """The names are the same, the values served are averages: each graph finds its own."""
    request = ExportRequest(saved, tmp_path, train_tag="train", average=average, data=DataMode.LINK)
    done = export(request)
    value = values(saved)
    suffix = "/ExponentialMovingAverage" if average else ""
    raw = X @ value("kernel") + value("bias")
    served = X @ value(f"kernel{suffix}") + value(f"bias{suffix}")
    np.testing.assert_allclose(run(done.published.path, "serve"), served, atol=1e-5)
    np.testing.assert_allclose(run(done.published.path, "train"), raw, atol=1e-5)
    error = np.abs(run(done.published.path, "train", 60) - Y).mean()
    assert error < 0.2 * np.abs(raw - Y).mean()
    assert not done.variables.bytes_copied
    keys = {source.key for source in done.plan.mapping.sources if source.variables}
    assert keys == ({"serve/kernel", "serve/bias"} if average else {"kernel", "bias"})


def test_the_graph_for_serving_is_chosen_unless_another_is_named(saved: Path, tmp_path: Path) -> None:
    chosen = plan(ExportRequest(saved, tmp_path)).graph.meta_graph
    assert [*chosen.signature_def] == ["serving_default"]
    named = plan(ExportRequest(saved, tmp_path, tag="train")).graph.meta_graph
    assert [*named.signature_def] == ["loss"]


def test_what_a_training_graph_restores(saved: Path) -> None:
    training = load_training_graph(saved, "train")
    parts = ("", "/Momentum", "/ExponentialMovingAverage")
    assert {*training.tensors} == {f"{name}{part}" for name in ("kernel", "bias") for part in parts}
    assert {variable.shape for variable in training.variables} == {(4, 1), (1,)}
    assert not load_training_graph(saved, "serve").assets


def test_a_graph_without_a_saver_restores_its_variables(saved: Path, tmp_path: Path) -> None:
    def forget(graph: Any) -> None:
        graph.ClearField("saver_def")

    model = changed(saved, tmp_path, forget)
    assert {*load_training_graph(model, "train").tensors} >= {"kernel", "bias/Momentum"}


def test_names_that_a_graph_computes(saved: Path, tmp_path: Path) -> None:
    def compute(graph: Any) -> None:
        for node in graph.graph_def.node:
            if node.op == "RestoreV2":
                node.input[1] = "x"

    with pytest.raises(GraphError, match="not constants"):
        load_training_graph(changed(saved, tmp_path, compute), "train")


def changed(saved: Path, directory: Path, change: Any) -> Path:
    """A SavedModel whose training graph is another."""
    model = read_saved_model(saved)
    change(model.meta_graphs[0])
    (directory / "saved_model.pb").write_bytes(model.SerializeToString())
    return directory


def test_signatures_that_train_or_give_nothing_are_dropped(saved: Path) -> None:
    meta_graph = read_saved_model(saved).meta_graphs[0]
    given = {"x": "x:0", "y": "y:0"}
    outputs = {
        "operation": {"done": "Momentum"},
        "nothing": {},
        "unknown": {"scores": "nowhere:0"},
        "changed": {"kernel": "ExponentialMovingAverage/AssignMovingAvg/AssignSubVariableOp:0"},
        "unlabelled": {"loss": "loss:0"},
    }
    for name, ends in outputs.items():
        signature = meta_graph.signature_def[name]
        for alias, tensor in ends.items():
            signature.outputs[alias].CopyFrom(protos.TensorInfo(name=tensor, dtype=1))
        for alias, tensor in given.items():
            if name != "unlabelled" or alias == "x":
                signature.inputs[alias].CopyFrom(protos.TensorInfo(name=tensor, dtype=1))
    notes = drop_training_signatures(meta_graph)
    assert [*meta_graph.signature_def] == ["loss"]
    assert [note.split("'")[1] for note in notes] == sorted(outputs)
    meta_graph = read_saved_model(saved).meta_graphs[0]
    del meta_graph.signature_def["loss"].inputs["y"]
    assert not drop_training_signatures(meta_graph, {"y"})
