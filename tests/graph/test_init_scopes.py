"""Builders of libraries that insist on TensorFlow 2: in a graph, and eager where they ask for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from exporter import export
from exporter.errors import BuilderError
from exporter.graph.load import GraphRequest, load_graph
from exporter.options import ExportRequest
from exporter.pipeline.full import plan
from tests.support.graph_runs import serve
from tests.support.threads import at_once
from tests.support.trained import answers_in_session

tf1 = tf.compat.v1
X = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)


def in_the_scope() -> None:
    """As Sonnet 2 does in each constructor."""
    with tf.init_scope():
        assert tf.executing_eagerly(), "this library requires TensorFlow 2"


def outside_of_functions() -> None:
    if not tf1.executing_eagerly_outside_functions():
        raise RuntimeError("this library requires TensorFlow 2")


def by_a_value() -> None:
    """Whoever computes in the scope gets what eager execution computes."""
    with tf.init_scope():
        assert float(tf.constant(2.0) * 3) == 6


INSISTING = [in_the_scope, outside_of_functions, by_a_value]


class Linear(tf.Module):
    """A layer of such a library: it makes its variable when it is called first, as Sonnet's do."""

    def __init__(self, size: int, insist: Callable[[], None], name: str) -> None:
        insist()
        super().__init__(name=name)
        self.size, self.insist = size, insist

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        self.insist()  # while the function is traced, too
        if not hasattr(self, "w"):
            self.w = tf.Variable(tf.random.normal([x.shape[-1], self.size]), name="w")
        return tf.matmul(x, self.w)


class Net(tf.Module):
    def __init__(self, insist: Callable[[], None]) -> None:
        super().__init__(name="net")
        self.hidden, self.out = Linear(4, insist, "hidden"), Linear(2, insist, "out")
        self.signatures = {"serving_default": self.serve}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def serve(self, x: Any) -> Any:
        return {"y": self.out(tf.nn.relu(self.hidden(x)))}


@pytest.mark.parametrize("insist", INSISTING)
def test_its_modules_are_served_with_their_values(insist: Callable[[], None], tmp_path: Path) -> None:
    trained = Net(insist)
    expected = trained.serve(X)["y"]
    prefix = tf.train.Checkpoint(model=trained).save(str(tmp_path / "ck"))

    planned = plan(ExportRequest(Path(prefix), tmp_path / "out", model=lambda: Net(insist)))
    by_shape = {(3, 4): trained.hidden.w.numpy(), (4, 2): trained.out.w.numpy()}
    shapes = {each.key: each.shape for each in planned.graph.variables}
    found = serve(planned.graph, lambda key: by_shape[tuple(shapes[key])], {"x": X})
    np.testing.assert_array_equal(found["y"], expected)
    assert len(planned.mapping.sources) == 2


def test_variables_are_symbols_there() -> None:
    """A table of terabytes is not allocated, and collections and partitioners work as in any graph."""

    def build() -> Any:
        in_the_scope()
        x = tf1.placeholder(tf.int64, [None], name="x")
        with tf1.variable_scope("part", partitioner=tf1.fixed_size_partitioner(2)):
            table = tf1.get_variable("table", [1 << 40, 8], initializer=tf1.zeros_initializer())
        own = tf.Variable(lambda: tf.zeros([1 << 38, 8]), name="own")
        assert own.name in [variable.name for variable in tf1.global_variables()]
        rows = tf1.nn.embedding_lookup(table, x, "div") + tf.gather(own, x)
        return {"x": x}, {"rows": rows}

    graph = load_graph(GraphRequest(model=build))
    assert sorted(each.key for each in graph.variables) == ["own", "part/table", "part/table"]


def test_a_layer_of_it_in_a_keras_model() -> None:
    def build() -> Any:
        in_the_scope()
        x = keras.Input([3], name="x")
        return keras.Model(x, keras.layers.Dense(2, name="dense")(x))

    weights = {(3, 2): np.ones([3, 2], np.float32), (2,): np.ones([2], np.float32)}
    graph = load_graph(GraphRequest(model=build))
    shapes = {each.key: tuple(each.shape) for each in graph.variables}
    (found,) = serve(graph, lambda key: weights[shapes[key]], {"x": X}).values()
    np.testing.assert_allclose(found, X @ weights[3, 2] + 1, rtol=1e-6)


def test_other_builders_run_once_and_in_their_graph() -> None:
    """Scopes of TensorFlow and Keras, and a builder's own, lead where they always did."""
    runs = []

    def build() -> Any:
        runs.append(1)
        with tf.init_scope():
            assert not tf.executing_eagerly()
            w = tf.Variable(tf.ones([3, 2]), name="w")
        x = tf1.placeholder(tf.float32, [None, 3], name="x")
        return {"x": x}, {"y": tf.matmul(x, w)}

    assert [each.key for each in load_graph(GraphRequest(model=build)).variables] == ["w"]
    assert runs == [1]


def test_what_cannot_be_served_so_is_told_with_a_way_out() -> None:
    """It insists, and makes variables with values in the scope: that is no symbol of a graph."""

    def build() -> Any:
        in_the_scope()
        with tf.init_scope():
            w = tf.Variable(tf.ones([3, 2]))
        x = tf1.placeholder(tf.float32, [None, 3], name="x")
        return {"x": x}, {"y": tf.matmul(x, w)}

    with pytest.raises(BuilderError, match="AssertionError") as caught:
        load_graph(GraphRequest(model=build))
    assert "requires TensorFlow 2" in caught.value.cause
    assert "tf.saved_model.save" in caught.value.hint
    assert isinstance(caught.value.__cause__, AssertionError)


def test_another_error_is_told_as_it_is() -> None:
    def build() -> Any:
        with tf.init_scope():
            raise ValueError("of its own")

    with pytest.raises(BuilderError, match="ValueError") as caught:
        load_graph(GraphRequest(model=build))
    assert "saved_model" not in caught.value.hint


def test_threads_have_scopes_of_their_own() -> None:
    def load(insist: Callable[[], None]) -> list[str]:
        return [each.key for each in load_graph(GraphRequest(model=lambda: Net(insist))).variables]

    found = at_once([lambda insist=insist: load(insist) for insist in [*INSISTING, lambda: None]])  # type: ignore[misc]
    assert len({*map(tuple, found)}) == 1
    assert tf.executing_eagerly()
    in_the_scope()


def test_a_class_that_reads_its_own_variables_is_served_from_a_saved_model(tmp_path: Path) -> None:
    embedding = tf.tpu.experimental.embedding

    class Tables(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            table = embedding.TableConfig(vocabulary_size=20, dim=4, name="table")
            features = {"ids": embedding.FeatureConfig(table=table)}
            self.rows = embedding.TPUEmbeddingForServing(features, embedding.SGD(0.1))
            self.rows.build()

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
        def look_up(self, ids: Any) -> Any:
            return self.rows({"ids": ids})

    def serving() -> Tables:
        tables = Tables()
        tables.signatures = {"serving_default": tables.look_up}
        return tables

    trained = Tables()
    (table,) = trained.rows.embedding_tables.values()
    table.assign(tf.reshape(tf.range(80.0), [20, 4]))
    tf.train.Checkpoint(model=trained).write(str(tmp_path / "train/ckpt-1"))
    with pytest.raises(BuilderError) as caught:
        plan(ExportRequest(tmp_path / "train", tmp_path / "out", model=serving))
    assert "tf.saved_model.save" in caught.value.hint

    fresh = Tables()
    tf.saved_model.save(fresh, str(tmp_path / "saved"), signatures=fresh.look_up)
    done = export(tmp_path / "train", tmp_path / "out", model=str(tmp_path / "saved"))
    (found,) = answers_in_session(done.published.path, {"ids": [3, 7]}).values()
    np.testing.assert_array_equal(found, table.numpy()[[3, 7]])
