"""Ragged and sparse inputs and outputs are served as their components, under stock TensorFlow's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import BuilderError
from exporter.graph.load import GraphRequest, load_graph
from tests.support.commands import export_model

tf1 = tf.compat.v1

IDS = tf.ragged.constant([[1, 2, 3], [], [4]], dtype=tf.int64)
DENSE = np.array([[0, 2.0, 0], [0, 0, 0], [1.5, 0, 0]], np.float32)


class Ranker(tf.Module):
    """One variable, looked up by ragged ids and multiplied by sparse rows."""

    def __init__(self) -> None:
        super().__init__()
        values = np.arange(20 * 4).reshape(20, 4).astype(np.float32)
        self.table = tf.Variable(lambda: values, name="table", shape=[20, 4], dtype=tf.float32)

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def ragged(self, ids: Any) -> dict[str, Any]:
        rows = tf.gather(self.table, ids)
        return {"mean": tf.reduce_sum(rows, 1), "rows": rows}

    @tf.function(input_signature=[tf.SparseTensorSpec([None, 3], tf.float32)])
    def sparse(self, x: Any) -> dict[str, Any]:
        return {"y": tf.sparse.sparse_dense_matmul(x, self.table[:3]), "same": x}


def module() -> Ranker:
    made = Ranker()
    made.signatures = {"ragged": made.ragged, "sparse": made.sparse}
    return made


def tensors() -> dict[str, Any]:
    """The same from a builder of TF1's kind."""
    table = tf1.get_variable("table", [20, 4], use_resource=True)
    ids = tf1.ragged.placeholder(tf.int64, 1, name="ids")
    rows = tf.gather(table, ids)
    x = tf1.sparse_placeholder(tf.float32, [None, 3], name="x")
    return {
        "ragged": ({"ids": ids}, {"mean": tf.reduce_sum(rows, 1), "rows": rows}),
        "sparse": ({"x": x}, {"y": tf.sparse.sparse_dense_matmul(x, table[:3]), "same": x}),
    }


def name_taken() -> tuple[dict[str, Any], dict[str, Any]]:
    ids = tf1.ragged.placeholder(tf.int64, 1, name="ids")
    other = tf1.placeholder(tf.int64, [None], name="other")
    return {"ids": ids, "ids_1": other}, {"y": ids.flat_values}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("composite")
    made = Ranker()
    values = made.table.numpy()
    objects = tf.train.Checkpoint(table=made.table).save(str(directory / "objects" / "ckpt"))
    with tf.Graph().as_default(), tf1.Session() as session:
        table = tf1.get_variable("table", [20, 4], use_resource=True)
        session.run(table.initializer, {table.initializer.inputs[1]: values})
        names = tf1.train.Saver().save(session, str(directory / "names.ckpt"))
    return {"module": Path(objects), "tensors": Path(names)}


@pytest.mark.parametrize("builder", ["module", "tensors"])
def test_components_are_named_and_answer_as_stock_tensorflow(
    builder: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model, stock = tmp_path / "m", tmp_path / "stock"
    ran = export_model(
        *("--ckpt-dir", checkpoints[builder], "--model", f"{__file__}:{builder}"),
        *("--out", model, "--version", "1", "-q"),
    )
    assert ran.code == 0, ran.err
    made = Ranker()
    tf.saved_model.save(made, str(stock), signatures={"ragged": made.ragged, "sparse": made.sparse})
    found, expected = (tf.saved_model.load(str(path)).signatures for path in (model / "1", stock))
    for name in ("ragged", "sparse"):
        ours, theirs = (each[name].structured_input_signature[1] for each in (found, expected))
        assert {key: spec.dtype for key, spec in ours.items()} == {k: s.dtype for k, s in theirs.items()}
    request = {"ids": IDS.values, "ids_1": IDS.row_splits}
    answer, stocks = found["ragged"](**request), expected["ragged"](**request)
    np.testing.assert_array_equal(answer["mean"], stocks["mean"])
    np.testing.assert_array_equal(answer["rows"], stocks["rows"].flat_values)
    np.testing.assert_array_equal(answer["rows_1"], stocks["rows"].row_splits)
    x = tf.sparse.from_dense(DENSE)
    request = {"x": x.indices, "x_1": x.values, "x_2": x.dense_shape}
    answer, stocks = found["sparse"](**request), expected["sparse"](**request)
    np.testing.assert_array_equal(answer["y"], stocks["y"])
    parts = (stocks["same"].indices, stocks["same"].values, stocks["same"].dense_shape)
    for key, part in zip(("same", "same_1", "same_2"), parts, strict=True):
        np.testing.assert_array_equal(answer[key], part)


def test_a_name_that_a_component_needs_is_told() -> None:
    with pytest.raises(BuilderError, match="'ids_1' is taken"):
        load_graph(GraphRequest(model=name_taken))


def layers_of_keras_2() -> tuple[dict[str, Any], dict[str, Any]]:
    x = tf1.placeholder(tf.float32, [None, 3], name="x")
    return {"x": x}, {"y": tf1.layers.dense(x, 2)}


def test_code_for_keras_2_names_the_way_to_run_it() -> None:
    with pytest.raises(BuilderError) as error:
        load_graph(GraphRequest(model=layers_of_keras_2))
    assert "TF_USE_LEGACY_KERAS=1" in error.value.hint


def undeclared() -> Any:
    import keras

    class Undeclared(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(9, 2)

        def build(self, shape: Any) -> None:
            self.table.build(shape)

        def call(self, ids: Any) -> Any:
            return self.table(ids)

    model = Undeclared()
    model.build((None, 3))
    return model


def test_a_guessed_type_of_inputs_is_told() -> None:
    graph = load_graph(GraphRequest(model=undeclared))
    assert "they are served as float32: if it takes integers" in "; ".join(graph.notes)
