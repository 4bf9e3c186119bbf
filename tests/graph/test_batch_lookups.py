"""Lookups, feature columns, functions and loops whose input pipeline has one batch size: opened, and right.

Each row's served answer is compared with stock TensorFlow's, which runs the training graph row by row: a row
is repeated to fill a batch. Graphs that mix rows keep their size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.load import GraphRequest, load_graph
from tests.support.fixed_batches import BATCH, WORDS, batches, loaded, own_answer, request_of, rows_of, table
from tests.support.graph_runs import serve, train

v1 = tf.compat.v1


def lookup(strategy: str, parts: int) -> Callable[[Any], Any]:
    def build(row: Any) -> Any:
        found = tf.compat.v1.nn.embedding_lookup(table(11, parts), row["ids"], partition_strategy=strategy)
        return tf.concat([found, row["vector"]], 1)

    build.__name__ = f"lookup_{strategy}_{parts}"
    return build


def in_parts_twice(row: Any) -> Any:
    """Ids of two dimensions, in two tables of parts."""
    ids = tf.stack([row["ids"], row["ids"] + 1], 1)
    left = tf.nn.embedding_lookup(table(11, 2), ids)
    right = v1.nn.embedding_lookup(table(13, 3, "other"), ids, partition_strategy="div")
    return tf.reshape(left * right, [BATCH, 8])


def columns(row: Any) -> Any:
    """All kinds of dense columns, as `input_layer` joins them."""
    fc = tf.feature_column
    price = fc.numeric_column("price")
    word = fc.categorical_column_with_vocabulary_list("word", WORDS, num_oov_buckets=2)
    hashed = fc.categorical_column_with_hash_bucket("word", 10)
    ids = fc.categorical_column_with_identity("ids", 8)
    bucketized = fc.bucketized_column(price, [0.5, 1.0, 2.0])
    crossed = fc.crossed_column([bucketized, "word"], 16)
    found = [
        *(price, fc.numeric_column("vector", 3), bucketized),
        *(fc.indicator_column(word), fc.indicator_column(crossed)),
        *(fc.embedding_column(hashed, 3), fc.embedding_column(ids, 4), fc.embedding_column(crossed, 2)),
    ]
    return v1.feature_column.input_layer(row, found)


def linear(row: Any) -> Any:
    """A linear model, as `LinearClassifier` builds it, with weights for each category."""
    fc = tf.feature_column
    word = fc.categorical_column_with_vocabulary_list("word", WORDS, num_oov_buckets=2)
    crossed = fc.crossed_column(["word", fc.bucketized_column(fc.numeric_column("price"), [1.0])], 16)
    return v1.feature_column.linear_model(row, [fc.numeric_column("price"), word, crossed])


def sequence(row: Any) -> Any:
    """A dense sequence through a cell, step by step, with a state as long as a batch."""
    kernel = v1.get_variable("kernel", [6, 4], initializer=v1.random_uniform_initializer(-1, 1, seed=3))
    state = tf.zeros([BATCH, 4])
    for step in tf.unstack(row["steps"], axis=1):
        state = tf.tanh(tf.matmul(tf.concat([step, state], 1), kernel))
    return state


def in_a_function(row: Any) -> Any:
    """A function with the size in it, that calls another one with it."""
    kernel = v1.get_variable("kernel", [10, 4], initializer=v1.random_uniform_initializer(-1, 1, seed=3))

    @tf.function
    def inner(x: Any) -> Any:
        return tf.reshape(x, [BATCH, 10])

    @tf.function
    def outer(x: Any) -> Any:
        return tf.concat([tf.matmul(inner(x), kernel), tf.ones([BATCH, 2])], 1)

    return outer(row["steps"])


def while_of_functions(row: Any) -> Any:
    """A loop of functions (control flow of TensorFlow 2), whose state and bodies have the size."""
    kernel = v1.get_variable("kernel", [6, 4], initializer=v1.random_uniform_initializer(-1, 1, seed=3))
    steps = tf.transpose(row["steps"], [1, 0, 2])

    def step(at: Any, state: Any) -> Any:
        both = tf.concat([steps[at], tf.reshape(state, [BATCH, 4])], 1)
        return at + 1, tf.tanh(tf.matmul(both, kernel))

    return tf.while_loop(lambda at, _: at < 5, step, (0, tf.zeros([BATCH, 4])))[1]


def branches(row: Any) -> Any:
    """Branches of which one has the size."""
    kernel = v1.get_variable("kernel", [4, 2], initializer=v1.random_uniform_initializer(-1, 1, seed=3))
    wide = tf.cond(
        tf.size(row["vector"]) > 0,
        lambda: tf.concat([row["vector"], tf.ones([BATCH, 1])], 1),
        lambda: tf.concat([row["vector"], row["price"][:, None]], 1),
    )
    return tf.matmul(wide, kernel)


def _bag(row: Any) -> Any:
    bag = row["bag"]
    return tf.sparse.reshape(bag, [BATCH, -1])


def bags(combiner: str) -> Callable[[Any], Any]:
    def build(row: Any) -> Any:
        return v1.nn.safe_embedding_lookup_sparse([table(11, 1)], _bag(row), combiner=combiner)

    build.__name__ = f"bag_{combiner}"
    return build


def bags_in_parts(row: Any) -> Any:
    parts = [*table(11, 2)]
    return v1.nn.safe_embedding_lookup_sparse(parts, _bag(row), combiner="mean", partition_strategy="mod")


def bare_bags(row: Any) -> Any:
    """The lookup that takes no empty rows: a last one without values gets no answer."""
    found = v1.nn.embedding_lookup_sparse(table(11, 1), _bag(row), None, combiner="mean")
    return tf.concat([found, tf.ones([BATCH, 1])], 1)


def weighted_bags(row: Any) -> Any:
    bag, weights = _bag(row), tf.sparse.reshape(row["weight"], [BATCH, -1])
    return v1.nn.safe_embedding_lookup_sparse([table(11, 1)], bag, weights, combiner="sqrtn")


def sparse_columns(row: Any) -> Any:
    """Columns of many categories a row: weighted, shared, crossed, counted."""
    import tf_keras

    fc = tf.feature_column
    ids = fc.categorical_column_with_identity("bag", 8)
    alone = fc.categorical_column_with_identity("ids", 8)
    weighted = fc.weighted_categorical_column(ids, "weight")
    shared = fc.shared_embeddings([ids, alone], 3)
    crossed = fc.crossed_column([ids, "word"], 16)
    found = [fc.embedding_column(weighted, 2), fc.indicator_column(weighted), fc.indicator_column(crossed)]
    return tf_keras.layers.DenseFeatures([*found, *shared])(row)


def weighted_dense(row: Any) -> Any:
    """Ids and weights in dense matrices, of which zeros are left out."""
    fc = tf.feature_column
    ids = tf.stack([row["ids"], row["ids"] + 1], 1)
    weights = tf.stack([row["price"] + 0.5, row["vector"][:, 0]], 1)
    weighted = fc.weighted_categorical_column(fc.categorical_column_with_identity("pair", 9), "weights")
    column = fc.embedding_column(weighted, 3, combiner="sum")
    return v1.feature_column.input_layer({"pair": ids, "weights": weights}, [column])


def sequence_columns(row: Any) -> Any:
    """Sequences of categories and their lengths, through a recurrent layer that masks what is behind them."""
    import tf_keras

    fc = tf.feature_column
    ids = fc.sequence_categorical_column_with_identity("bag", 8)
    columns = [fc.embedding_column(ids, 3), fc.sequence_numeric_column("weight")]
    layer = tf_keras.experimental.SequenceFeatures(columns)
    steps, lengths = layer({"bag": row["bag"], "weight": row["weight"]})
    mask = tf.sequence_mask(lengths, tf.shape(steps)[1])
    return tf_keras.layers.GRU(4)(tf.reshape(steps, [BATCH, -1, 4]), mask=mask)


def both_ways(row: Any) -> Any:
    """A recurrent layer in both directions, over as many steps as a row has."""
    import tf_keras

    lengths = row["ids"] % 5 + 1
    layer = tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(3, return_sequences=True))
    found = layer(row["steps"], mask=tf.sequence_mask(lengths, 5))
    return tf.reshape(found, [BATCH, 30])


def attended(row: Any) -> Any:
    """Heads of attention over the steps of a row, with the places behind its length masked."""
    wide = tf.reshape(
        tf.matmul(tf.reshape(row["steps"], [BATCH * 5, 2]), table(2, 1, "q", 8)), [BATCH, 5, 2, 4]
    )
    heads = tf.transpose(wide, [0, 2, 1, 3])
    scores = tf.matmul(heads, heads, transpose_b=True)
    mask = tf.tile(tf.sequence_mask(row["ids"] % 5 + 1, 5)[:, None, None], [1, 2, 5, 1])
    scores = tf.where(mask, scores, tf.fill([BATCH, 2, 5, 5], -1e9))
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), heads), [0, 2, 1, 3])
    return tf.reshape(mixed, [BATCH, 40])


def widened(row: Any) -> Any:
    """Convolutions and their transposes, which name the size of what they give."""
    images = tf.reshape(row["steps"], [BATCH, 5, 2, 1])
    kernel = tf.reshape(table(9, 1, "w", 4), [3, 3, 4, 1])
    found = tf.nn.conv2d_transpose(images, kernel, [BATCH, 10, 4, 4], 2)
    found = tf.nn.depthwise_conv2d(found, tf.reshape(table(4, 1, "d", 9), [3, 3, 4, 1]), [1, 2, 2, 1], "SAME")
    found = tf.image.resize(found, [3, 3])
    return tf.reshape(tf.nn.avg_pool2d(found, 2, 1, "VALID"), [BATCH, 16])


def row_by_row(row: Any) -> Any:
    """A loop over the rows of a batch."""
    kernel = table(3, 1, "w", 4)
    return tf.map_fn(lambda one: tf.linalg.matvec(kernel, one, transpose_a=True), row["vector"])


def normalised_by_averages(row: Any) -> Any:
    """Batch normalisation that takes its moving averages, unless a request says that it trains."""
    training = v1.placeholder_with_default(False, [], name="training")
    images = tf.reshape(row["vector"], [BATCH, 1, 1, 3])
    mean, variance = tf.nn.moments(images, [0, 1, 2])
    scale = v1.get_variable("variance", [3], initializer=v1.ones_initializer())
    mean = tf.cond(training, lambda: mean, lambda: table(1, 1, "mean", 3)[0])
    variance = tf.cond(training, lambda: variance, lambda: scale + 0.0)
    found = tf.nn.batch_normalization(images, mean, variance, None, None, 1e-3)
    return tf.reshape(tf.nn.dropout(found, tf.where(training, 0.5, 0.0)), [BATCH, 3])


DENSE = [
    *(lookup(strategy, parts) for strategy in ("mod", "div") for parts in (2, 5)),
    in_parts_twice, columns, linear, sequence, in_a_function, while_of_functions, branches, weighted_dense,
    both_ways, attended, widened, row_by_row, normalised_by_averages,
]  # fmt: skip
SPARSE = [
    bags("sum"), bags("mean"), bags("sqrtn"), bags_in_parts, bare_bags, weighted_bags, sparse_columns,
    sequence_columns,
]  # fmt: skip
NEVER_EMPTY = {bare_bags}
OF_TF2 = {while_of_functions, branches, sequence_columns}


@pytest.mark.parametrize("build", DENSE + SPARSE, ids=lambda build: build.__name__)
def test_rows_that_keep_apart_are_opened(build: Any, tmp_path: Path) -> None:
    sparse = build in SPARSE
    trained, graph, names = loaded(tmp_path, build, sparse=sparse, of_tf2=build in OF_TF2)
    assert any("as an experiment found" in note for note in graph.notes), graph.notes
    for count in (1, 3, BATCH, 2 * BATCH + 1):
        rows = rows_of(count, sparse, fewest=1 if build in NEVER_EMPTY else 0)
        served = serve(graph, trained.value, request_of(rows, names))["scores"]
        expected = [own_answer(trained, names, row) for row in rows]
        np.testing.assert_allclose(served, expected, atol=1e-5)


def test_an_input_that_is_not_by_rows_stays_as_it_is(tmp_path: Path) -> None:
    def graph(_: Any) -> None:
        row = batches(sparse=False)
        weights = v1.placeholder(tf.float32, [3], name="weights")
        scores = tf.reshape(row["vector"], [BATCH, 3]) * weights * table(1, 1, "w", 3)[0]
        tf.identity(scores, name="scores")
        graph.vector = row["vector"].name  # type: ignore[attr-defined]

    trained = train(tmp_path, graph)
    names = {"vector": graph.vector, "weights": "weights:0"}  # type: ignore[attr-defined]
    served = load_graph(GraphRequest(model=trained.meta, inputs=names, outputs={"scores": "scores"}))
    infos = served.meta_graph.signature_def["serving_default"].inputs
    assert [infos[name].tensor_shape.dim[0].size for name in ("vector", "weights")] == [-1, 3]
    x, weights = np.ones((5, 3), np.float32), np.array([1, 2, 3], np.float32)
    found = serve(served, trained.value, {"vector": x, "weights": weights})["scores"]
    expected = trained.run("scores:0", {graph.vector: np.ones((BATCH, 3)), "weights:0": weights})  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, expected[:5], atol=1e-6)


def fed(x: Any) -> Any:
    return tf.matmul(x, table(3, 1, "w", 4))


UNSAID: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: tf.reshape(fed(x), [BATCH, 2, 2]),
    "zeros": lambda x: tf.concat([fed(x), tf.zeros([BATCH, 2])], 1),
    "state": lambda x: tf.tanh(fed(x) + tf.zeros([BATCH, 4])),
    "constant": lambda x: fed(x) * tf.constant(2.0, shape=[BATCH, 4]),
    "slice": lambda x: tf.slice(fed(x), [0, 0], [BATCH, 2]),
    "tile": lambda x: tf.concat([fed(x), tf.tile(tf.constant([[1.0, 2.0]]), [BATCH, 1])], 1),
    "places": lambda x: tf.gather_nd(fed(x), tf.stack([tf.range(BATCH), tf.fill([BATCH], 1)], 1)),
}


def of_any(tmp_path: Path, build: Callable[[Any], Any]) -> Any:
    """A graph whose input says that any number of rows may come, though the graph has one."""

    def graph(_: Any) -> None:
        tf.identity(build(v1.placeholder(tf.float32, [None, 3], name="x")), name="scores")

    trained = train(tmp_path, graph)
    request = GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"scores": "scores"})
    return trained, load_graph(request)


@pytest.mark.parametrize("name", UNSAID)
def test_a_size_that_the_input_does_not_say_is_opened(name: str, tmp_path: Path) -> None:
    trained, graph = of_any(tmp_path, UNSAID[name])
    for count in (1, 3, BATCH, 2 * BATCH + 1):
        x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
        served = serve(graph, trained.value, {"x": x})["scores"]
        expected = [trained.run("scores:0", {"x:0": np.tile(row, (BATCH, 1))}) for row in x]
        of_row = [answer[0] for answer in expected]
        np.testing.assert_allclose(served, of_row, atol=1e-5)


def test_a_constant_that_is_no_batch_size_changes_nothing(tmp_path: Path) -> None:
    """Eight equal rows that are summed up, and eight places: the graph takes any number of rows."""

    def build(x: Any) -> Any:
        wide = tf.matmul(fed(x), tf.fill([4, BATCH], 0.5))
        return tf.matmul(wide, tf.constant(2.0, shape=[BATCH, 4]))

    _, graph = of_any(tmp_path, build)
    assert not any("rows" in note for note in graph.notes), graph.notes
    (info,) = graph.meta_graph.signature_def["serving_default"].inputs.values()
    assert info.tensor_shape.dim[0].size == -1
