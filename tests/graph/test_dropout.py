"""Dropout and noise that are on, or may be, are refused; what is off, or the model's own business, is not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import TrainingModeServed
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.training_mode import check_dropout
from exporter.options import ExportRequest
from exporter.pipeline.full import export, plan
from exporter.wire import protos
from tests.support.graph_runs import built, keep_prob, train
from tests.support.trained import answers_in_session

ENDS = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}
X = np.array([[1.0, 2.0], [3.0, 5.0], [9.0, 4.0]], np.float32)


def is_refused(graph: InferenceGraph) -> bool:
    try:
        check_dropout(graph, {})
    except TrainingModeServed:
        return True
    return False


def floats(v1: Any, shape: Any = None, name: str = "keep") -> Any:
    import tensorflow as tf

    return v1.placeholder(tf.float32, shape, name=name)


def kept(v1: Any, x: Any, keep_prob: Any) -> Any:
    return v1.nn.dropout(x, keep_prob=keep_prob)


def rated(v1: Any, x: Any, rate: Any) -> Any:
    return v1.nn.dropout(x, rate=rate)


def one_by_one(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    first, second = tf.unstack(floats(v1, [2]))
    return kept(v1, kept(v1, x, first), second)


def by_split(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    first, second = tf.split(floats(v1, [2]), 2)
    return kept(v1, kept(v1, x, tf.squeeze(first)), tf.reshape(second, []))


def in_percent(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    percent = v1.placeholder(tf.int32, [], name="percent")
    return rated(v1, x, tf.cast(percent, tf.float32) / 100.0)


def by_a_flag(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    training = v1.placeholder(tf.bool, [], name="training")
    return rated(v1, x, tf.where(training, 0.25, 0.0))


def by_a_cond(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    training = v1.placeholder(tf.bool, [], name="training")
    return rated(v1, x, v1.cond(training, lambda: tf.constant(0.25), lambda: tf.constant(0.0)))


def by_a_schedule(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    keep = floats(v1, [])
    return rated(v1, x, tf.clip_by_value(tf.pow(1.0 - keep, 2.0) * tf.sqrt(4.0), 0.0, 0.9))


def by_a_function(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    rate = tf.function(lambda keep: 1.0 - keep)
    return rated(v1, x, rate(floats(v1, [])))


def of_each_column(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    keep = floats(v1, [])
    mask = tf.floor(tf.fill(tf.shape(x), keep) + tf.random.uniform(tf.shape(x)))
    return tf.math.divide(x, keep) * mask


def in_a_loop(v1: Any, x: Any) -> Any:
    keep = floats(v1, [])
    return v1.while_loop(lambda at, _: at < 3, lambda at, y: (at + 1, kept(v1, y, keep)), [0, x])[1]


def handed_on_by_a_loop(v1: Any, x: Any) -> Any:
    def step(at: Any, y: Any, rate: Any) -> Any:
        return at + 1, kept(v1, y, rate), rate

    return v1.while_loop(lambda at, *_: at < 3, step, [0, x, floats(v1, [])])[1]


def in_a_function(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    return tf.function(lambda y, keep: kept(v1, y, keep))(x, floats(v1, []))


FED: dict[str, tuple[Callable[[Any, Any], Any], dict[str, str], dict[str, str]]] = {
    "slice": (
        lambda v1, x: kept(v1, kept(v1, x, (k := floats(v1, [None]))[0]), k[1]),
        {"keep": "[1, 1]"},
        {"keep": "[1, 0.5]"},
    ),
    "unstack": (one_by_one, {"keep": "1"}, {"keep": "[0.5, 1]"}),
    "split": (by_split, {"keep": "[1, 1]"}, {"keep": "[1, 0.75]"}),
    "percent": (in_percent, {"percent": "0"}, {"percent": "25"}),
    "flag": (by_a_flag, {"training": "false"}, {"training": "true"}),
    "cond": (by_a_cond, {"training": "false"}, {"training": "true"}),
    "schedule": (by_a_schedule, {"keep": "1"}, {"keep": "0.5"}),
    "function": (by_a_function, {"keep": "1"}, {"keep": "0.5"}),
    "columns": (of_each_column, {"keep": "1"}, {"keep": "0.5"}),
    "loop": (in_a_loop, {"keep": "1"}, {"keep": "0.5"}),
    "loop variable": (handed_on_by_a_loop, {"keep": "1"}, {"keep": "0.5"}),
    "within a function": (in_a_function, {"keep": "1"}, {"keep": "0.5"}),
}


@pytest.mark.landing
@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("kind", FED)
def test_a_rate_that_is_fixed_is_followed_to_where_it_is_used(
    kind: str, control_flow_v2: bool, tmp_path: Path
) -> None:
    make, off, on = FED[kind]
    trained = train(tmp_path, built(make), control_flow_v2=control_flow_v2)

    for feeds in (off, on):
        graph = load_graph(GraphRequest(model=trained.meta, feeds=feeds, **ENDS))
        answers = [trained.run("y:0", {"x:0": X} | fed_values(trained, feeds)) for _ in range(5)]
        is_random = any((answer != answers[0]).any() for answer in answers)
        assert is_random == (feeds is on), "the test's own graph does not do what it should"
        assert is_refused(graph) == is_random, graph.notes
        assert bool(graph.notes) == is_random


def fed_values(trained: Any, feeds: dict[str, str]) -> dict[str, Any]:
    from exporter.graph.feeds import parse_feeds
    from exporter.graph.metagraph import read_metagraph
    from exporter.graph.nodes import GraphIndex

    values = parse_feeds(GraphIndex.of(read_metagraph(Path(trained.meta))), feeds)
    return {f"{name}:0": value for name, value in values.items()}


def by_a_variable(v1: Any, x: Any) -> Any:
    return rated(v1, x, v1.get_variable("rate", [], initializer=v1.zeros_initializer()))


def as_often_as_asked(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    turns = tf.cast(tf.reduce_max(x), tf.int32)
    return v1.while_loop(lambda at, _: at < turns, lambda at, y: (at + 1, rated(v1, y, 0.25)), [0, x])[1]


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("make", [by_a_variable, as_often_as_asked])
def test_a_rate_that_nobody_knows_or_chooses_counts_as_one_that_is_on(
    make: Callable[[Any, Any], Any], control_flow_v2: bool, tmp_path: Path
) -> None:
    trained = train(tmp_path, built(make), control_flow_v2=control_flow_v2)
    assert is_refused(load_graph(GraphRequest(model=trained.meta, **ENDS)))


# --- what is refused ---------------------------------------------------------------------------------------


def two_and_a_temperature(v1: Any, x: Any) -> Any:
    """Another placeholder has a default value, which is not for dropout."""
    import tensorflow as tf

    training = v1.placeholder_with_default(True, [], name="training")
    temperature = v1.placeholder_with_default(2.0, [], name="temperature")
    second = v1.cond(training, lambda: rated(v1, x, 0.25), lambda: x)
    return tf.nn.softmax(kept(v1, second, keep_prob(v1)) / temperature)


ON: dict[str, tuple[Callable[[Any, Any], Any], dict[str, str], set[str]]] = {
    "always": (lambda v1, x: rated(v1, x, 0.25), {}, set()),
    "by default": (lambda v1, x: kept(v1, x, keep_prob(v1)), {}, {"keep_prob=1.0"}),
    "fed": (lambda v1, x: kept(v1, x, floats(v1, [])), {"keep": "0.5"}, {"keep=1.0"}),
    "fed to a vector": (one_by_one, {"keep": "[0.5, 0.5]"}, {"keep=[1.0, 1.0]"}),
    "a rate": (lambda v1, x: rated(v1, x, floats(v1, [], "rate")), {"rate": "0.5"}, {"rate=0.0"}),
    "several": (two_and_a_temperature, {}, {"keep_prob=1.0", "training=false"}),
}


@pytest.mark.parametrize("kind", ON)
def test_dropout_that_is_on_is_refused_and_the_hint_turns_it_off(kind: str, tmp_path: Path) -> None:
    make, feeds, off = ON[kind]
    train(tmp_path, built(make))
    request = ExportRequest(tmp_path, tmp_path / "model", feeds=feeds, **ENDS)

    with pytest.raises(TrainingModeServed, match="drops a random 0") as found:
        plan(request)

    typed = shlex.split(found.value.hint.partition(";")[0])
    assert "--allow dropout" in found.value.hint
    assert {text for text in typed if "=" in text and off} == off
    if off:
        fixed = dict(text.split("=", 1) for text in typed if "=" in text)
        done = export(ExportRequest(tmp_path, tmp_path / "model", feeds=fixed, **ENDS))
        assert not any("random" in note for note in done.plan.notes)
        first, second = (answers_in_session(done.published.path, {"x": X})["y"] for _ in range(2))
        np.testing.assert_array_equal(first, second)


def test_who_means_it_may_serve_dropout(tmp_path: Path) -> None:
    train(tmp_path, built(ON["always"][0]))

    done = export(ExportRequest(tmp_path, tmp_path / "model", allow="dropout", **ENDS))

    assert any("drops a random 0.25" in note for note in done.plan.notes)
    answers = answers_in_session(done.published.path, {"x": np.ones([1000, 2], np.float32)})["y"]
    assert 0.15 < np.mean(answers == 0) < 0.35


def layers_of(kind: str) -> dict[str, Callable[[], Any]]:
    layers = import_module(kind).layers

    return {
        "Dropout": lambda: layers.Dropout(0.5),
        "SpatialDropout1D": lambda: layers.SpatialDropout1D(0.5),
        "AlphaDropout": lambda: layers.AlphaDropout(0.5),
        "GaussianDropout": lambda: layers.GaussianDropout(0.5),
        "GaussianNoise": lambda: layers.GaussianNoise(0.5),
        "LSTM, dropout": lambda: layers.LSTM(3, dropout=0.5),
        "LSTM, recurrent dropout": lambda: layers.LSTM(3, recurrent_dropout=0.5),
        "GRU, recurrent dropout": lambda: layers.GRU(3, dropout=0.5, recurrent_dropout=0.25, unroll=False),
    }


# Keras 3 draws two seeds for a recurrent dropout, and a graph that changes a variable twice is not servable.
LAYERS = [(kind, name) for kind in ("keras", "tf_keras") for name in layers_of(kind)]
LAYERS = [(kind, name) for kind, name in LAYERS if kind == "tf_keras" or "recurrent" not in name]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "name"), LAYERS)
def test_layers_that_are_called_in_training_mode(kind: str, name: str, training: bool) -> None:
    def module() -> Any:
        import tensorflow as tf

        made = tf.Module()
        made.layer = layers_of(kind)[name]()
        made.layer.build(tf.TensorShape([None, 4, 2]) if kind == "tf_keras" else [None, 4, 2])

        @tf.function(input_signature=[tf.TensorSpec([None, 4, 2], tf.float32, name="x")])
        def serve(x: Any) -> Any:
            return {"y": made.layer(x, training=training)}

        made.signatures = {"serving_default": serve}
        return made

    graph = load_graph(GraphRequest(model=module))
    assert is_refused(graph) == training, graph.notes
    assert bool(graph.notes) == training


# --- what is not -------------------------------------------------------------------------------------------


def variational(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    mean, deviation = x * 2.0, tf.exp(0.5 * x)
    return mean + deviation * tf.random.normal(tf.shape(x))


def sampled(v1: Any, x: Any) -> Any:
    """A policy that draws an action by its probability."""
    import tensorflow as tf

    return tf.cast(tf.random.uniform(tf.shape(x)) < tf.sigmoid(x), tf.float32)


def explored(v1: Any, x: Any) -> Any:
    """A policy that takes another action with a small probability."""
    import tensorflow as tf

    rows = tf.shape(x)[:1]
    other = tf.random.uniform(rows, 0, 2, tf.int64)
    return tf.where(tf.random.uniform(rows) < 0.1, other, tf.argmax(x, 1))


def flipped(v1: Any, x: Any) -> Any:
    import tensorflow as tf

    return v1.cond(tf.random.uniform([]) < 0.5, lambda: tf.reverse(x, [1]), lambda: x)


def rejected(v1: Any, x: Any) -> Any:
    """Numbers are drawn until one lies below another random number."""
    import tensorflow as tf

    def draw(_: Any, number: Any) -> Any:
        number = tf.random.uniform([])
        return tf.random.uniform([]) < number * number, number

    return x + v1.while_loop(lambda found, _: tf.logical_not(found), draw, [False, 0.0])[1]


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("make", [variational, sampled, explored, flipped, rejected])
def test_what_a_model_draws_for_itself_is_told_and_not_refused(
    make: Callable[[Any, Any], Any], control_flow_v2: bool, tmp_path: Path
) -> None:
    trained = train(tmp_path, built(make), control_flow_v2=control_flow_v2)
    graph = load_graph(GraphRequest(model=trained.meta, **ENDS))
    assert not is_refused(graph)
    assert any("draws random numbers" in note for note in graph.notes)


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("kind", ["slice", "flag", "cond", "loop", "within a function", "layer"])
def test_what_a_request_decides_is_not_refused(kind: str, control_flow_v2: bool, tmp_path: Path) -> None:
    def layer(v1: Any, x: Any) -> Any:
        import tensorflow as tf

        training = v1.placeholder(tf.bool, [], name="training")
        return v1.cond(training, lambda: rated(v1, x, 0.25), lambda: x)

    make, off, _ = (layer, {"training": ""}, {}) if kind == "layer" else FED[kind]
    trained = train(tmp_path, built(make), control_flow_v2=control_flow_v2)
    inputs = {"x": "x", **{name: name for name in off}}
    graph = load_graph(GraphRequest(model=trained.meta, inputs=inputs, outputs={"y": "y"}))
    assert not is_refused(graph)
    assert any("draws random numbers" in note for note in graph.notes)


@pytest.mark.parametrize("op", ["Mul", "RealDiv", "AddV2"])
def test_numbers_in_a_damaged_graph_are_followed_as_far_as_it_makes_sense(op: str, tmp_path: Path) -> None:
    def build(v1: Any, x: Any) -> Any:
        import tensorflow as tf

        tf.constant(2.0, name="two")
        drawn = tf.random.uniform([3], name="drawn")
        return x + tf.reduce_sum(
            tf.floor({"Mul": drawn * 4.0, "RealDiv": drawn / 0.3, "AddV2": drawn + 0.7}[op])
        )

    trained = train(tmp_path, built(build))
    meta_graph = protos.MetaGraphDef.FromString(Path(trained.meta).read_bytes())
    (node,) = (n for n in meta_graph.graph_def.node if n.op == op and n.input[0].startswith("drawn"))
    node.input.append("two")  # the operation takes two inputs
    Path(trained.meta).write_bytes(meta_graph.SerializeToString())
    graph = load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))
    assert is_refused(graph)


def test_each_signature_counts_for_itself(tmp_path: Path) -> None:
    """What one signature takes as an input, another computes with dropout."""

    def build(v1: Any, x: Any) -> Any:
        import tensorflow as tf

        return tf.identity(rated(v1, x, 0.25), name="hidden") * 2.0

    trained = train(tmp_path, built(build))
    signatures = {
        "serving_default": {"inputs": {"x": "x"}, "outputs": {"y": "y"}},
        "upper": {"inputs": {"hidden": "hidden"}, "outputs": {"y": "y"}},
    }
    (tmp_path / "signatures.json").write_text(json.dumps(signatures))
    request = GraphRequest(model=trained.meta, signatures=tmp_path / "signatures.json")
    assert is_refused(load_graph(request))
