"""A graph that computes as in training is refused, or told of: batch statistics and dropout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import TrainingModeServed
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import ExportRequest
from exporter.pipeline.full import export, plan
from tests.support.graph_runs import built, keep_prob, train
from tests.support.trained import answers_in_session

ENDS = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}
X = np.array([[1.0, 2.0], [3.0, 5.0], [9.0, 4.0]], np.float32)


def normalising(how: str, mode: Any, *, with_statistics: bool = True) -> Callable[[Any], Any]:
    """x -> y, batch normalisation as trainers write it by hand; `mode(v1)` says whether it is training."""

    def build(v1: Any) -> Any:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 2], name="x")
        training = mode(v1)
        with v1.variable_scope("bn"):
            gamma = v1.get_variable("gamma", [2], initializer=v1.constant_initializer([2.0, 3.0]))
            beta = v1.get_variable("beta", [2], initializer=v1.constant_initializer([0.5, -1.0]))
        moving = []
        if with_statistics:
            with v1.variable_scope("bn"):
                moving = [
                    v1.get_variable("moving_mean", [2], initializer=v1.constant_initializer([2.0, 1.0])),
                    v1.get_variable("moving_variance", [2], initializer=v1.constant_initializer([4.0, 9.0])),
                ]
        image = tf.reshape(x, [-1, 1, 1, 2])

        def by_batch() -> Any:
            if how == "fused":
                return v1.nn.fused_batch_norm(image, gamma, beta, epsilon=1e-3, is_training=True)[0]
            mean, variance = tf.nn.moments(image, [0, 1, 2])
            return tf.nn.batch_normalization(image, mean, variance, beta, gamma, 1e-3)

        def by_moving() -> Any:
            if how == "fused":
                return v1.nn.fused_batch_norm(image, gamma, beta, *moving, epsilon=1e-3, is_training=False)[0]
            return tf.nn.batch_normalization(image, *moving, beta, gamma, 1e-3)

        if isinstance(training, bool):
            y = by_batch() if training else by_moving()
        else:
            y = v1.cond(training, by_batch, by_moving)
        tf.reshape(y, [-1, 2], name="y")

    return build


def always(_: Any) -> bool:
    return True


def placeholder(v1: Any) -> Any:
    import tensorflow as tf

    return v1.placeholder(tf.bool, [], name="is_training")


def by_default(v1: Any) -> Any:
    import tensorflow as tf

    return tf.identity(tf.logical_not(tf.logical_not(v1.placeholder_with_default(True, [], "is_training"))))


def inference() -> np.ndarray:
    return np.array([2.0, 3.0]) * (X - [2.0, 1.0]) / np.sqrt(np.array([4.0, 9.0]) + 1e-3) + [0.5, -1.0]


@pytest.mark.parametrize("how", ["fused", "moments"])
@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize(
    ("mode", "feeds"), [(always, {}), (placeholder, {"is_training": "true"}), (by_default, {})]
)
def test_batch_statistics_are_refused_where_moving_ones_are_in_the_checkpoint(
    how: str,
    mode: Callable[[Any], Any],
    feeds: dict[str, str],
    control_flow_v2: bool,
    resource: bool,
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, normalising(how, mode), resource=resource, control_flow_v2=control_flow_v2)

    with pytest.raises(TrainingModeServed, match=r"without the moving statistic 'bn/moving_\w+'") as found:
        plan(ExportRequest(tmp_path, tmp_path / "model", feeds=feeds, **ENDS))

    assert ("FusedBatchNorm" if how == "fused" else "SquaredDifference") in found.value.cause
    if mode is always:
        assert "training=False" in found.value.hint
        return
    assert "--feed is_training=false" in found.value.hint
    done = export(ExportRequest(tmp_path, tmp_path / "model", feeds={"is_training": "false"}, **ENDS))
    assert not done.plan.notes
    np.testing.assert_allclose(
        answers_in_session(done.published.path, {"x": X})["y"], inference(), atol=1e-6, rtol=1e-5
    )
    assert trained.prefix.name == done.plan.catalog.prefix.name


def test_who_means_it_may_normalise_by_the_batch(tmp_path: Path) -> None:
    trained = train(tmp_path, normalising("fused", always))

    done = export(ExportRequest(tmp_path, tmp_path / "model", allow="batch-statistics", **ENDS))

    assert any("request's own batch" in note for note in done.plan.notes)
    found = answers_in_session(done.published.path, {"x": X})["y"]
    np.testing.assert_array_equal(found, trained.run("y:0", {"x:0": X}))


@pytest.mark.parametrize("how", ["fused", "moments"])
def test_normalisation_without_moving_statistics_is_told_and_not_refused(how: str, tmp_path: Path) -> None:
    train(tmp_path, normalising(how, always, with_statistics=False))

    planned = plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS))

    assert any("request's own batch" in note for note in planned.notes)


def test_a_mode_that_a_request_chooses_is_neither(tmp_path: Path) -> None:
    train(tmp_path, normalising("fused", placeholder))
    ends = {"inputs": {"x": "x", "is_training": "is_training"}, "outputs": {"y": "y"}}

    plan(ExportRequest(tmp_path, tmp_path / "model", **ends))


def test_layer_normalisation_is_neither(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 2], name="x")
        gamma = v1.get_variable("ln/gamma", [2], initializer=v1.ones_initializer())
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        tf.identity(tf.nn.batch_normalization(x, mean, variance, 0.0, gamma, 1e-3), name="y")

    train(tmp_path, build)
    assert not plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS)).notes


@pytest.mark.parametrize("size", [None, 6])
def test_fused_normalisation_of_each_example_alone_is_neither(size: int | None, tmp_path: Path) -> None:
    """Keras writes layer normalisation so: the examples are the channels of one image."""

    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [size, 4], name="x")
        gamma = v1.get_variable("ln/gamma", [4], initializer=v1.ones_initializer())
        rows = size or tf.shape(x)[0]
        image = tf.reshape(x, [1, rows, 4, 1])
        normal = tf.raw_ops.FusedBatchNormV3(
            x=image, scale=tf.ones([rows]), offset=tf.zeros([rows]), mean=[], variance=[], data_format="NCHW"
        )
        tf.multiply(tf.reshape(normal.y, tf.shape(x)), gamma, name="y")

    train(tmp_path, build)
    assert not plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS)).notes


def test_averages_that_old_graphs_take_of_moments(tmp_path: Path) -> None:
    """`ema.apply([mean, variance])`: the averages are called after nodes, not after variables."""

    def build(v1: Any) -> Any:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 2], name="x")
        beta = v1.get_variable("bn/beta", [2], initializer=v1.ones_initializer())
        mean, variance = tf.nn.moments(x, [0], name="bn/moments")
        ema = tf.train.ExponentialMovingAverage(0.9)
        update = ema.apply([mean, variance])
        tf.identity(tf.nn.batch_normalization(x, mean, variance, beta, None, 1e-3), name="y")
        tf.identity(
            tf.nn.batch_normalization(x, ema.average(mean), ema.average(variance), beta, None, 1e-3), name="z"
        )
        return lambda session: session.run(update, {x: X})

    train(tmp_path, build)
    with pytest.raises(TrainingModeServed, match="moments/Squeeze"):
        plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS))
    served = ExportRequest(tmp_path, tmp_path / "model", inputs={"x": "x"}, outputs={"z": "z"})
    assert not plan(served).notes


LAYERS = """
import sys, json
import numpy as np
import tensorflow as tf
v1 = tf.compat.v1
v1.disable_v2_behavior()
directory, rank, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
x = v1.placeholder(tf.float32, [None, 2], name="x")
training = True if mode == "always" else v1.placeholder_with_default(True, [], "is_training")
given = x if rank == 2 else tf.reshape(x, [-1, 1, 1, 2])
y = v1.layers.batch_normalization(given, training=training)
y = v1.layers.dropout(tf.reshape(y, [-1, 2]), 0.25, training=training if mode != "always" else False)
y = tf.identity(y, name="y")
X = np.array([[1.0, 2.0], [3.0, 5.0], [9.0, 4.0]], np.float32)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    for _ in range(3):
        session.run(v1.get_collection(v1.GraphKeys.UPDATE_OPS), {x: X})
    v1.train.Saver(sharded=True).save(session, directory + "/model.ckpt")
    feeds = {x: X} if mode == "always" else {x: X, training: False}
    print(json.dumps(session.run(y, feeds).tolist()))
"""


@pytest.mark.landing
@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("mode", ["always", "default"])
def test_layers_of_tensorflow_1(rank: int, mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAYERS, str(tmp_path), str(rank), mode]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answers = json.loads(ran.stdout.splitlines()[-1])

    with pytest.raises(TrainingModeServed, match=r"'batch_normalization/moving_mean'.*1 more like it"):
        plan(ExportRequest(tmp_path, tmp_path / "model", **ENDS))

    if mode == "default":
        request = ExportRequest(tmp_path, tmp_path / "model", feeds={"is_training": "false"}, **ENDS)
        done = export(request)
        assert not done.plan.notes, "neither batch statistics nor dropout"
        np.testing.assert_array_equal(answers_in_session(done.published.path, {"x": X})["y"], answers)


def keras_model() -> Any:
    import keras

    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input([2], name="x"), *layers, keras.layers.Dense(1)])


def called_in_training() -> Any:
    """A module whose signature runs the layers of a model in training mode."""
    import tensorflow as tf

    module = tf.Module()
    module.model = model = keras_model()

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def serve(x: Any) -> Any:
        hidden = model.layers[1](model.layers[0](x), training=True)
        return {"y": model.layers[3](hidden)}

    module.signatures = {"serving_default": serve}
    return module


@pytest.mark.parametrize("archive", [False, True])
def test_a_keras_model_called_in_training_mode(archive: bool, tmp_path: Path) -> None:
    import tensorflow as tf

    model, found = keras_model(), tmp_path / "train"
    found.mkdir()
    if archive:
        found /= "model.weights.h5"
        model.save_weights(found)
    else:
        tf.train.Checkpoint(model=model).save(str(found / "ckpt"))
    assert not plan(ExportRequest(found, tmp_path / "model", keras_model)).notes
    if not archive:
        with pytest.raises(TrainingModeServed, match="moving_mean"):
            plan(ExportRequest(found, tmp_path / "model", called_in_training))


def old_dropout(v1: Any, x: Any, keep_prob: Any) -> Any:
    """As TensorFlow 1 wrote it: the probability to keep plus a random number, rounded down."""
    import tensorflow as tf

    return tf.math.divide(x, keep_prob) * tf.floor(keep_prob + tf.random.uniform(tf.shape(x)))


DROPOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "nn": lambda v1, x: v1.nn.dropout(x, rate=0.25),
    "placeholder": lambda v1, x: v1.nn.dropout(x, keep_prob=keep_prob(v1)),
    "floor": lambda v1, x: old_dropout(v1, x, keep_prob(v1)),
    "cond": lambda v1, x: v1.cond(by_default(v1), lambda: v1.nn.dropout(x, rate=0.25), lambda: x),
}


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_that_is_on_is_told_with_its_rate_and_one_that_is_off_is_not(
    kind: str, control_flow_v2: bool, tmp_path: Path
) -> None:
    trained = train(tmp_path, built(DROPOUTS[kind]), control_flow_v2=control_flow_v2)
    off = {
        "placeholder": {"keep_prob": "1.0"},
        "floor": {"keep_prob": "1.0"},
        "cond": {"is_training": "false"},
    }

    on = load_graph(GraphRequest(model=trained.meta, **ENDS))
    assert any("drops a random 0.25 of its input" in note for note in on.notes), on.notes
    if kind in off:
        assert load_graph(GraphRequest(model=trained.meta, feeds=off[kind], **ENDS)).notes == ()


def test_dropout_inside_of_a_function_is_told(tmp_path: Path) -> None:
    import tensorflow as tf

    def module() -> Any:
        made = tf.Module()
        made.w = tf.Variable(tf.ones([2]), name="w")

        @tf.function
        def inner(x: Any, training: Any) -> Any:
            return tf.cond(training, lambda: tf.nn.experimental.stateless_dropout(x, 0.25, [1, 2]), lambda: x)

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
        def on(x: Any) -> Any:
            return {"y": inner(x * made.w, tf.constant(True))}

        @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
        def off(x: Any) -> Any:
            return {"y": inner(x * made.w, tf.constant(False))}

        made.signatures = {"serving_default": on if is_on else off}
        return made

    for is_on in (True, False):
        notes = load_graph(GraphRequest(model=module)).notes
        assert any("drops a random 0.25" in note for note in notes) == is_on, notes
