"""Lookups, feature columns, functions and loops whose input pipeline has one batch size: opened, and right.

Each row's served answer is compared with stock TensorFlow's, which runs the training graph row by row: a row
is repeated to fill a batch. Graphs that mix rows keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.load import GraphRequest, load_graph
from tests.support.graph_runs import serve, train

BATCH = 8
v1 = tf.compat.v1
WORDS = ["red", "green", "blue", "black"]


def batches(sparse: bool) -> Any:
    """A batch of ids, numbers and words; with sparse ones of any length beside them."""
    dense = {
        "ids": np.arange(64, dtype=np.int64) % 7,
        "price": np.linspace(0, 3, 64, dtype=np.float32),
        "word": np.array(([*WORDS, "other"]) * 13)[:64].astype(object),
        "vector": np.ones((64, 3), np.float32),
        "steps": np.ones((64, 5, 2), np.float32),
    }
    data = tf.data.Dataset.from_tensor_slices(dense)
    if sparse:

        def lists(row: Any) -> Any:
            few = tf.range(row["ids"] % 4, dtype=tf.int64)
            return row | {"bag": tf.sparse.from_dense(few + 1)}

        data = data.map(lists)
    iterator = v1.data.make_initializable_iterator(data.repeat().batch(BATCH, drop_remainder=True))
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def table(rows: int, parts: int, name: str = "table", width: int = 4) -> Any:
    partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
    start = v1.random_uniform_initializer(-1, 1, seed=5)
    return v1.get_variable(name, [rows, width], initializer=start, partitioner=partitioner)


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


DENSE = [
    *(lookup(strategy, parts) for strategy in ("mod", "div") for parts in (2, 5)),
    in_parts_twice, columns, linear, sequence, in_a_function, while_of_functions, branches,
]  # fmt: skip
SPARSE = [bags("sum"), bags("mean"), bags("sqrtn"), bags_in_parts]
OF_TF2 = {while_of_functions, branches}


def loaded(tmp_path: Path, build: Callable[[Any], Any], *, sparse: bool = False) -> Any:
    def graph(_: Any) -> None:
        row = batches(sparse)
        graph.names = dict(row)  # type: ignore[attr-defined]
        tf.identity(build(row), name="scores")

    trained = train(tmp_path, graph, control_flow_v2=build in OF_TF2)
    inputs: dict[str, str] = {}
    for name, tensor in graph.names.items():  # type: ignore[attr-defined]
        if isinstance(tensor, tf.SparseTensor):
            for at, part in enumerate(("indices", "values", "dense_shape")):
                inputs[f"{name}_{part}"] = f"{tensor.indices.op.name}:{at}"
        else:
            inputs[name] = tensor.name
    used = inputs_used(trained.graph, inputs)
    request = GraphRequest(model=trained.meta, inputs=used, outputs={"scores": "scores"})
    return trained, load_graph(request), used


def inputs_used(graph: Any, inputs: Mapping[str, str]) -> dict[str, str]:
    """The inputs that the scores are computed from."""
    pending, seen = [graph.get_operation_by_name("scores")], set()
    tensors = set[str]()
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        for tensor in op.inputs:
            tensors.add(tensor.name)
            if tensor.name not in inputs.values():
                pending.append(tensor.op)
    return {name: tensor for name, tensor in inputs.items() if tensor in tensors}


def rows_of(count: int, sparse: bool) -> list[dict[str, Any]]:
    random = np.random.default_rng(count)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        row = {
            "ids": np.int64(random.integers(0, 7)),
            "price": np.float32(random.uniform(0, 3)),
            "word": [*WORDS, "unknown"][at % 5].encode(),
            "vector": random.normal(size=3).astype(np.float32),
            "steps": random.normal(size=(5, 2)).astype(np.float32),
        }
        if sparse:
            row["bag"] = random.integers(0, 7, at % 4).astype(np.int64)
        rows.append(row)
    return rows


def request_of(rows: list[dict[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        if not name.startswith("bag_"):
            values = [row[name] for row in rows]
            found[name] = np.array(values, object) if name == "word" else np.array(values)
    if "bag_values" in names:
        places = [(at, step) for at, row in enumerate(rows) for step in range(len(row["bag"]))]
        found["bag_indices"] = np.array(places, np.int64).reshape(-1, 2)
        found["bag_values"] = np.concatenate([row["bag"] for row in rows]).astype(np.int64)
        found["bag_dense_shape"] = np.array([len(rows), 4], np.int64)
    return {name: value for name, value in found.items() if name in names}


def own_answer(trained: Any, names: Mapping[str, str], row: dict[str, Any]) -> Any:
    feeds = {names[name]: value for name, value in request_of([row] * BATCH, names).items()}
    return trained.run("scores:0", feeds)[0]


@pytest.mark.parametrize("build", DENSE + SPARSE, ids=lambda build: build.__name__)
def test_rows_that_keep_apart_are_opened(build: Any, tmp_path: Path) -> None:
    sparse = build in SPARSE
    trained, graph, names = loaded(tmp_path, build, sparse=sparse)
    assert any("as an experiment found" in note for note in graph.notes), graph.notes
    for count in (1, 3, BATCH, 2 * BATCH + 1):
        rows = rows_of(count, sparse)
        served = serve(graph, trained.value, request_of(rows, names))["scores"]
        expected = [own_answer(trained, names, row) for row in rows]
        np.testing.assert_allclose(served, expected, atol=1e-5)


def normalised(row: Any) -> Any:
    """Batch normalisation by the statistics of the request."""
    scale, offset = tf.ones([3]), tf.zeros([3])
    images = tf.reshape(row["vector"], [BATCH, 1, 1, 3])
    found, *_ = v1.nn.fused_batch_norm(images, scale, offset, is_training=True)
    return tf.reshape(found, [BATCH, 3]) * table(1, 1, "w", 3)[0]


def in_batch_softmax(row: Any) -> Any:
    """The items of all rows as candidates of each."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return tf.reshape(tf.nn.softmax(tf.matmul(users, users, transpose_b=True)), [BATCH, BATCH])


def contrastive(row: Any) -> Any:
    """Scores less those of the row behind, as a loss of pairs has them."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return users - tf.roll(users, 1, 0)


def ranked(row: Any) -> Any:
    """Each row's place among the others."""
    scores = tf.reduce_sum(tf.nn.embedding_lookup(table(11, 1), row["ids"]), 1)
    return tf.argsort(tf.reshape(scores, [BATCH]))


def randomised(row: Any) -> Any:
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return users * tf.random.uniform([BATCH, 4])


def class_of_mixed(row: Any) -> Any:
    """A class alone is served, and hides that its scores depend on other rows."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return tf.argmax(users - tf.reduce_sum(users, 0, keepdims=True) / float(BATCH) * 1e-2, 1)


MIXING = [normalised, in_batch_softmax, contrastive, ranked, randomised, class_of_mixed]


@pytest.mark.parametrize("build", MIXING, ids=lambda build: build.__name__)
def test_rows_that_are_mixed_keep_their_size(build: Any, tmp_path: Path) -> None:
    _, graph, _ = loaded(tmp_path, build)
    (note,) = (note for note in graph.notes if "rows" in note)
    assert note.startswith("only requests of 8 rows are answered"), note
    infos = graph.meta_graph.signature_def["serving_default"].inputs.values()
    assert {info.tensor_shape.dim[0].size for info in infos} == {BATCH}


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
