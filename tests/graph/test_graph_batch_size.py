"""A training graph with a fixed batch serves any number of rows where that is right, else it says its size.

The graphs are made the way an Estimator makes them: by an `input_fn` whose dataset drops its remainder, saved
with all shapes. Served answers are compared with the training graph's own, which takes `BATCH` rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.batch import opening
from exporter.graph.batch.slots import rows_are_equal
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.load import GraphRequest, load_graph
from tests.support.graph_runs import Trained, serve, train

BATCH = 32
STEPS = 5
WIDTH = 6
UNITS = 8
ROWS = (1, 7, BATCH, 2 * BATCH + 1)
v1 = tf.compat.v1


def features(batch: int = BATCH) -> Any:
    """What `input_fn` gives: sequences of `STEPS` vectors."""
    data = tf.data.Dataset.from_tensor_slices(np.ones((100, STEPS, WIDTH), np.float32)).repeat()
    iterator = v1.data.make_initializable_iterator(data.batch(batch, drop_remainder=True))
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def variable(name: str, shape: list[int]) -> Any:
    return v1.get_variable(name, shape, initializer=v1.random_uniform_initializer(-1, 1, seed=len(name)))


def kernel(rows: int = STEPS * WIDTH, columns: int = UNITS) -> Any:
    return variable("kernel", [rows, columns])


def forget_shapes(meta: Path) -> None:
    """As a `.meta` is that was written without the shapes of tensors."""
    meta_graph = v1.MetaGraphDef.FromString(meta.read_bytes())
    for node in meta_graph.graph_def.node:
        node.attr.pop("_output_shapes", None)
    meta.write_bytes(meta_graph.SerializeToString())


def trained_and_loaded(
    tmp_path: Path, build: Callable[[], Any], *, batch: int = BATCH, shapes: bool = True
) -> tuple[Trained, InferenceGraph]:
    def graph(_: Any) -> None:
        tf.identity(build(features(batch)), name="scores")

    trained = train(tmp_path, graph)
    if not shapes:
        forget_shapes(Path(trained.meta))
    request = GraphRequest(model=trained.meta, inputs={"x": "IteratorGetNext"}, outputs={"scores": "scores"})
    return trained, load_graph(request)


def own_answers(trained: Trained, x: Any, batch: int = BATCH) -> Any:
    """The training graph's answers, `batch` rows at a time."""
    padded = np.concatenate([x, np.zeros((-len(x) % batch, *x.shape[1:]), x.dtype)])
    chunks = [padded[at : at + batch] for at in range(0, len(padded), batch)]
    return np.concatenate([trained.run("scores:0", {"IteratorGetNext:0": chunk}) for chunk in chunks])[
        : len(x)
    ]


def signature_rows(graph: InferenceGraph) -> set[int]:
    """What the signature says of rows; of an output nothing if the `.meta` has no shapes."""
    signature = graph.meta_graph.signature_def["serving_default"]
    shapes = (info.tensor_shape for info in (signature.inputs["x"], signature.outputs["scores"]))
    return {shape.dim[0].size for shape in shapes if shape.dim}


# --- what is opened ----------------------------------------------------------------------------------------


def reshaped(x: Any) -> Any:
    flat = tf.reshape(x, [BATCH, STEPS * WIDTH])
    return tf.reshape(tf.matmul(flat, kernel()), [BATCH, 2, 4])


def flattened_by_its_shape(x: Any) -> Any:
    return tf.matmul(tf.reshape(x, [tf.shape(x)[0], -1]), kernel())


def steps_as_rows(x: Any) -> Any:
    """`[batch * time, width]` and back, as a dense layer over time does it."""
    rows = tf.reshape(x, [BATCH * STEPS, WIDTH])
    return tf.reshape(tf.nn.bias_add(tf.matmul(rows, kernel(WIDTH)), [1.0] * UNITS), [BATCH, STEPS, UNITS])


def time_major(x: Any) -> Any:
    turned = tf.transpose(x, [1, 0, 2])
    rows = tf.reshape(turned, [STEPS * BATCH, WIDTH])
    scores = tf.reshape(tf.matmul(rows, kernel(WIDTH)), [STEPS, BATCH, UNITS])
    return tf.transpose(scores, [1, 0, 2])


def concatenated_zeros(x: Any) -> Any:
    state = tf.zeros([BATCH, 3])
    return tf.matmul(tf.concat([x[:, 0], state], 1), kernel(WIDTH + 3))


def filled(x: Any) -> Any:
    state = tf.fill([BATCH, 3], 0.5)
    return tf.matmul(tf.concat([x[:, 0], state], 1), kernel(WIDTH + 3))


def broadcast_constant(x: Any) -> Any:
    return tf.constant(2.0, shape=[BATCH, 1]) * tf.matmul(x[:, 1], kernel(WIDTH))


def large_constant(x: Any) -> Any:
    """More bytes than are filled up to read a value: one number is all that is written of it."""
    return tf.reduce_sum(tf.constant(1.0, shape=[BATCH, 70_000]), 1, True) + tf.matmul(x[:, 1], kernel(WIDTH))


def zeros_like(x: Any) -> Any:
    first = tf.matmul(x[:, 1], kernel(WIDTH))
    return tf.where(first > 0.0, first, tf.zeros_like(first))


def tiled(x: Any) -> Any:
    """As an Estimator's head repeats its class names."""
    classes = tf.tile(tf.constant([[1.0, 2.0, 3.0]]), [tf.shape(x)[0], 1])
    return tf.concat([classes, tf.matmul(x[:, 2], kernel(WIDTH))], 1)


def sliced(x: Any) -> Any:
    return tf.matmul(tf.slice(x, [0, 1, 0], [BATCH, 1, WIDTH])[:BATCH, 0], kernel(WIDTH))


def square(x: Any) -> Any:
    """A weight of [batch, batch], and a width that is the batch's number by chance."""
    wide = tf.matmul(x[:, 0], kernel(WIDTH, BATCH))
    turned = tf.reshape(tf.reshape(variable("w", [BATCH * BATCH]), [BATCH, BATCH]), [BATCH, BATCH])
    return tf.reshape(tf.matmul(tf.reshape(wide, [BATCH, BATCH]), turned), [BATCH, BATCH, 1])


def squared_by_row(x: Any) -> Any:
    """`[batch, 32 * 32]` to `[batch, 32, 32]`: one of three equal numbers is the batch."""
    wide = tf.matmul(x[:, 0], kernel(WIDTH, BATCH * BATCH))
    return tf.linalg.matmul(tf.reshape(wide, [BATCH, BATCH, BATCH]), variable("w", [BATCH, 2])[None])


def recurrent(x: Any) -> Any:
    """A loop as `dynamic_rnn` builds it: arrays of declared elements, a first state as long as a batch."""
    weights = variable("kernel", [WIDTH + UNITS, UNITS])
    inputs = tf.TensorArray(tf.float32, STEPS, element_shape=[BATCH, WIDTH])
    inputs = inputs.unstack(tf.transpose(x, [1, 0, 2]))
    outputs = tf.TensorArray(tf.float32, STEPS, element_shape=[BATCH, UNITS])

    def step(time: Any, state: Any, out: Any) -> Any:
        state = tf.tanh(tf.matmul(tf.concat([inputs.read(time), state], 1), weights))
        return time + 1, state, out.write(time, state)

    _, last, out = v1.while_loop(lambda time, *_: time < STEPS, step, (0, tf.zeros([BATCH, UNITS]), outputs))
    return tf.concat([tf.transpose(out.stack(), [1, 0, 2]), last[:, None]], 1)


def convolved(x: Any) -> Any:
    images = tf.reshape(x, [BATCH, STEPS, WIDTH, 1])
    hidden = tf.nn.relu(tf.nn.conv2d(images, variable("kernel", [3, 3, 1, 4]), 1, "SAME"))
    pooled = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
    return tf.nn.softmax(tf.reshape(pooled, [BATCH, -1]))


def keras_lstm(x: Any) -> Any:
    """Keras' own loop: states, arrays and their declared elements all have the batch in them."""
    import tf_keras

    steps = tf_keras.layers.LSTM(UNITS, return_sequences=True)(x)
    return tf_keras.layers.Dense(3)(tf_keras.layers.Flatten()(steps))


def attention(x: Any) -> Any:
    query = tf.tensordot(x, kernel(WIDTH), 1)
    mixed = tf.matmul(tf.nn.softmax(tf.matmul(query, query, transpose_b=True)), query)
    return tf.reduce_sum(tf.reshape(mixed, [BATCH, STEPS, 2, 4]), 1)


def picked_and_summed(x: Any) -> Any:
    """Rows by places that are made of the features, and sums that name their axes."""
    picked = tf.gather_nd(variable("table", [2, STEPS * WIDTH]), tf.cast(x[:, 0, :1] > 0.0, tf.int64))
    return tf.einsum("btw,wu->bu", x + tf.reshape(picked, [BATCH, STEPS, WIDTH]), kernel(WIDTH))


def picked_by_number(x: Any) -> Any:
    places = tf.stack([tf.range(BATCH), tf.fill([BATCH], STEPS - 1)], 1)
    return tf.matmul(tf.gather_nd(x, places), kernel(WIDTH))


OPENED = [
    reshaped, flattened_by_its_shape, steps_as_rows, time_major, concatenated_zeros, filled, zeros_like,
    tiled, broadcast_constant, large_constant, sliced, square, squared_by_row, recurrent, convolved,
    keras_lstm, attention, picked_and_summed, picked_by_number,
]  # fmt: skip


@pytest.mark.parametrize("build", OPENED, ids=lambda build: build.__name__)
@pytest.mark.parametrize("shapes", [True, False], ids=["recorded", "bare"])
def test_a_baked_batch_is_opened(build: Any, shapes: bool, tmp_path: Path) -> None:
    trained, graph = trained_and_loaded(tmp_path, build, shapes=shapes)
    assert signature_rows(graph) == {-1}, graph.notes
    assert any("training's batch of 32 was made dynamic in" in note for note in graph.notes), graph.notes
    for rows in ROWS:
        x = np.random.default_rng(rows).normal(size=(rows, STEPS, WIDTH)).astype(np.float32)
        served = serve(graph, trained.value, {"x": x})["scores"]
        np.testing.assert_allclose(served, own_answers(trained, x), atol=1e-5)


# --- what says its size ------------------------------------------------------------------------------------


def state_variable(x: Any) -> Any:
    """A stateful RNN's state: a variable as long as a batch."""
    return tf.concat([x[:, 0], variable("kernel", [BATCH, 3])], 1)


def stateful_lstm(x: Any) -> Any:
    import tf_keras

    return tf_keras.layers.Dense(3)(tf_keras.layers.LSTM(UNITS, stateful=True, unroll=True)(x))


def differing_constant(x: Any) -> Any:
    return tf.matmul(x[:, 0], kernel(WIDTH)) * np.arange(BATCH, dtype=np.float32)[:, None]


def unstacked(x: Any) -> Any:
    return tf.stack([tf.matmul(row, kernel_once(WIDTH)) for row in tf.unstack(x)])


def kernel_once(rows: int) -> Any:
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        return kernel(rows)


def averaged_by_hand(x: Any) -> Any:
    """A sum over the batch, divided by its size: no shape tells that this 32 is the batch."""
    return tf.matmul(x[:, 0] - tf.reduce_sum(x[:, 0], 0) / float(BATCH), kernel(WIDTH))


def scrambled(x: Any) -> Any:
    """Rows that are mixed: as many elements, in another order."""
    return tf.reshape(tf.matmul(x[:, 0], kernel(WIDTH)), [4, UNITS, UNITS])


def centred(x: Any) -> Any:
    """Rows that are compared with the mean of the request: each answer depends on all rows."""
    return tf.matmul(x[:, 0] - tf.reduce_mean(x[:, 0], 0), kernel(WIDTH))


def scores_of(x: Any) -> Any:
    return tf.reshape(tf.matmul(tf.reshape(x, [BATCH, STEPS * WIDTH]), kernel()), [BATCH, UNITS])


def centred_if_one_is_far(x: Any) -> Any:
    """Rows are mixed only if a value is great."""
    scores = scores_of(x)
    return tf.cond(tf.reduce_max(x) > 20.0, lambda: scores - tf.reduce_mean(scores, 0, True), lambda: scores)


def clipped_together(x: Any) -> Any:
    return scores_of(tf.clip_by_norm(x, 100.0))


def missing_as_the_mean(x: Any) -> Any:
    """A value of zero gets the mean of the request."""
    return scores_of(tf.where(tf.equal(x, 0.0), tf.reduce_mean(x, 0, True) + tf.zeros_like(x), x))


def capped_together(x: Any) -> Any:
    scores = scores_of(x)
    return scores / tf.maximum(tf.reduce_max(tf.abs(scores)), 50.0)


TRUE_SIZE = [
    state_variable,
    stateful_lstm,
    differing_constant,
    unstacked,
    averaged_by_hand,
    scrambled,
    centred,
    centred_if_one_is_far,
    clipped_together,
    missing_as_the_mean,
    capped_together,
]


@pytest.mark.parametrize("build", TRUE_SIZE, ids=lambda build: build.__name__)
@pytest.mark.parametrize("shapes", [True, False], ids=["recorded", "bare"])
def test_what_cannot_be_proven_says_its_size(build: Any, shapes: bool, tmp_path: Path) -> None:
    trained, graph = trained_and_loaded(tmp_path, build, shapes=shapes)
    assert BATCH in signature_rows(graph) and -1 not in signature_rows(graph), graph.notes
    (note,) = (note for note in graph.notes if "rows" in note)
    assert note.startswith("only requests of 32 rows are answered"), note
    x = np.random.default_rng(1).normal(size=(BATCH, STEPS, WIDTH)).astype(np.float32)
    served = serve(graph, trained.value, {"x": x})["scores"]
    np.testing.assert_allclose(served, trained.run("scores:0", {"IteratorGetNext:0": x}), atol=1e-5)


# --- what stays as it is -----------------------------------------------------------------------------------


def any_batch(x: Any) -> Any:
    return tf.nn.softmax(tf.matmul(tf.reshape(x, [-1, STEPS * WIDTH]), kernel(STEPS * WIDTH, BATCH)))


def test_a_graph_of_any_batch_stays_as_it_is(tmp_path: Path) -> None:
    _, graph = trained_and_loaded(tmp_path, any_batch)
    assert signature_rows(graph) == {-1}
    assert not any("rows" in note for note in graph.notes)
    assert not any("any_rows" in node.name for node in graph.meta_graph.graph_def.node)


def test_a_graph_that_was_traced_with_any_batch_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: Any) -> None:
        x = v1.placeholder(tf.float32, [None, WIDTH], name="x")
        tf.identity(tf.matmul(x, kernel(WIDTH)), name="scores")

    trained = train(tmp_path, build)
    monkeypatch.delattr(opening, "graph_session")
    request = GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"scores": "scores"})
    assert signature_rows(load_graph(request)) == {-1}


@pytest.mark.parametrize("build", [flattened_by_its_shape, zeros_like], ids=lambda build: build.__name__)
def test_a_batch_of_one(build: Any, tmp_path: Path) -> None:
    """1 may be any number in a graph: what is opened is right, and what is not says so."""
    trained, graph = trained_and_loaded(tmp_path, build, batch=1)
    (rows,) = signature_rows(graph)
    if rows == 1:
        assert any(note.startswith("only requests of 1 row are answered") for note in graph.notes)
    for count in (1,) if rows == 1 else ROWS:
        x = np.random.default_rng(1).normal(size=(count, STEPS, WIDTH)).astype(np.float32)
        served = serve(graph, trained.value, {"x": x})["scores"]
        np.testing.assert_allclose(served, own_answers(trained, x, 1), atol=1e-5)


def test_rows_of_every_type_are_compared() -> None:
    values = tf.make_tensor_proto(np.array([[1], [2]], np.uint32))
    values.tensor_content = b""
    for numbers, are_equal in (([1, 2], False), ([2], True)):
        values.uint32_val[:] = numbers
        node = v1.NodeDef(name="c", op="Const", attr={"value": v1.AttrValue(tensor=values)})
        assert rows_are_equal(node, 0) is are_equal


def test_a_damaged_constant_is_no_reason_to_fall_over(tmp_path: Path) -> None:
    """Contents that do not fit the shape that they say: whatever reads them would say so by name."""
    trained, _ = trained_and_loaded(tmp_path, averaged_by_hand)
    meta_graph = v1.MetaGraphDef.FromString(Path(trained.meta).read_bytes())
    for node in meta_graph.graph_def.node:
        if node.op == "Const" and node.name.startswith("truediv"):
            node.attr["value"].tensor.tensor_content = b"abc"
        if node.op == "Const" and node.name.startswith("strided_slice"):
            node.attr["value"].tensor.tensor_shape.dim.add(size=2**62)
    Path(trained.meta).write_bytes(meta_graph.SerializeToString())
    request = GraphRequest(model=trained.meta, inputs={"x": "IteratorGetNext"}, outputs={"scores": "scores"})
    assert load_graph(request).notes is not None
