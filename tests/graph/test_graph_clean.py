"""Cleaned graphs answer bit for bit as the training graphs they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import NotServable, UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.load import GraphRequest, load_graph
from tests.support.graph_runs import Trained, names, ops, serve, train

TRAINING_ONLY = {
    "Assign",
    "AssignVariableOp",
    "ApplyAdam",
    "ResourceApplyAdam",
    "SaveV2",
    "RestoreV2",
    "NoOp",
}
TRAINING_ONLY |= {"MergeSummary", "ScalarSummary", "HistogramSummary", "QueueDequeueManyV2", "Assert"}


def batch_norm(v1: Any, x: Any, is_training: Any) -> Any:
    """Batch normalisation as TF1 layers built it: fused, with moving statistics updated beside it."""
    import tensorflow as tf

    channels = int(x.shape[-1])
    zeros, ones = v1.zeros_initializer(), v1.ones_initializer()
    with v1.variable_scope("bn"):
        gamma = v1.get_variable("gamma", [channels], initializer=ones)
        beta = v1.get_variable("beta", [channels], initializer=zeros)
        mean = v1.get_variable("moving_mean", [channels], initializer=zeros, trainable=False)
        variance = v1.get_variable("moving_variance", [channels], initializer=ones, trainable=False)

    def by_batch() -> Any:
        return list(tf.nn.moments(x, [0, 1, 2]))

    used = v1.cond(is_training, by_batch, lambda: [tf.identity(mean), tf.identity(variance)])
    for moving, batch in ((mean, used[0]), (variance, used[1])):
        update = v1.assign(moving, moving * 0.9 + batch * 0.1)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, used[0], used[1], beta, gamma, 1e-3)


def classifier(v1: Any) -> Any:
    """Everything a TF1 trainer has: devices, batch norm, dropout, EMA, Adam, summaries, assertions, steps."""
    import tensorflow as tf

    with v1.device("/job:localhost/task:0"):
        step = v1.train.get_or_create_global_step()
    image = v1.placeholder(tf.float32, [None, 8, 8, 1], name="image")
    label = v1.placeholder(tf.int64, [None], name="label")
    keep_prob = v1.placeholder(tf.float32, [], name="keep_prob")
    is_training = v1.placeholder(tf.bool, [], name="is_training")
    with v1.device("/job:localhost/task:0"):
        kernel = v1.get_variable("conv/kernel", [3, 3, 1, 4])
        weights = v1.get_variable("dense/weights", [256, 10], partitioner=v1.fixed_size_partitioner(3))
    with v1.device("/job:localhost/task:0/cpu:0"), v1.control_dependencies([v1.assert_non_negative(label)]):
        hidden = tf.nn.relu(batch_norm(v1, tf.nn.conv2d(image, kernel, 1, "SAME"), is_training))
        hidden = v1.nn.dropout(tf.reshape(hidden, [-1, 256]), keep_prob=keep_prob)
        logits = tf.matmul(hidden, tf.convert_to_tensor(weights))
    tf.nn.softmax(logits, name="scores")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    v1.summary.scalar("loss", loss)
    v1.summary.histogram("kernel", kernel)
    ema = tf.train.ExponentialMovingAverage(0.9, step)
    with v1.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        update = v1.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
    with v1.control_dependencies([update]):
        train_op = ema.apply([kernel, *list(weights)])

    def steps(session: Any) -> None:
        rng = np.random.default_rng(0)
        for _ in range(5):
            feeds = {image: rng.normal(size=(16, 8, 8, 1)), label: rng.integers(10, size=16)}
            session.run(train_op, feeds | {keep_prob: 0.5, is_training: True})

    return steps


@pytest.fixture(scope="module", params=["reference", "resource"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp(request.param)
    return train(directory, classifier, resource=request.param == "resource")


REQUEST = {
    "inputs": {"image": "image:0"},
    "outputs": {"scores": "scores"},
    "feeds": {"keep_prob": "1.0", "is_training": "false"},
}


def test_a_training_graph_is_served_bit_for_bit(trained: Trained) -> None:
    images = np.random.default_rng(1).normal(size=(5, 8, 8, 1)).astype(np.float32)
    feeds = {"image:0": images, "keep_prob:0": 1.0, "is_training:0": False, "label:0": np.zeros(5)}
    expected = trained.run("scores:0", feeds)

    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    served = serve(graph, trained.value, {"image": images})
    assert np.array_equal(served["scores"], expected)
    assert not ops(graph) & TRAINING_ONLY
    assert not [node.name for node in graph.meta_graph.graph_def.node if node.device or "_class" in node.attr]
    assert not graph.meta_graph.collection_def
    assert not graph.meta_graph.HasField("saver_def")


def test_variables_are_resources_with_the_checkpoints_keys(trained: Trained) -> None:
    graph = load_graph(GraphRequest(model=trained.meta, **REQUEST))

    by_node = {variable.node: variable for variable in graph.variables}
    assert {v.key for v in graph.variables} == {
        "conv/kernel", "dense/weights", "bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance",
    }  # fmt: skip
    part = by_node["dense/weights/part_1"].part
    assert part is not None
    assert (part.full_shape, part.starts, part.lengths) == ((256, 10), (86, 0), (85, 10))
    assert set(graph.lookups.values()) == {PartitionStrategy.NONE}
    assert graph.lookups.keys() == {v.key for v in graph.variables}
    handles = [node for node in graph.meta_graph.graph_def.node if node.op == "VarHandleOp"]
    assert {node.name for node in handles} == set(by_node)
    assert all(node.attr["shared_name"].s.decode() == node.name for node in handles)


def test_the_signature_is_complete(trained: Trained) -> None:
    signature = load_graph(GraphRequest(model=trained.meta, **REQUEST)).meta_graph.signature_def[
        "serving_default"
    ]

    image, scores = signature.inputs["image"], signature.outputs["scores"]
    assert (image.name, image.dtype, [d.size for d in image.tensor_shape.dim]) == (
        "image:0",
        1,
        [-1, 8, 8, 1],
    )
    assert (scores.name, scores.dtype, [d.size for d in scores.tensor_shape.dim]) == ("scores:0", 1, [-1, 10])
    assert signature.method_name == "tensorflow/serving/predict"


def test_an_unfed_placeholder_is_named_with_the_ways_out(trained: Trained) -> None:
    request = GraphRequest(model=trained.meta, inputs=REQUEST["inputs"], outputs=REQUEST["outputs"])

    with pytest.raises(NotServable, match=r"'(keep_prob|is_training)'.*so do") as caught:
        load_graph(request)

    assert "scores <- " in caught.value.cause
    assert "--feed" in caught.value.hint
    assert "--input" in caught.value.hint


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"keep_prob": "lots"}, "not a value"),
        ({"is_training": "0.5"}, "not a value"),
        ({"keep_prob": "[1, 2]"}, "does not fit"),
        ({"keep_prob": "true"}, "not a value"),
        ({"label": "[1, 2.5]"}, "not a value"),
    ],
)
def test_feeds_that_do_not_fit(trained: Trained, feed: dict[str, str], message: str) -> None:
    request = GraphRequest(model=trained.meta, **(REQUEST | {"feeds": REQUEST["feeds"] | feed}))

    with pytest.raises(UsageError, match=message):
        load_graph(request)


@pytest.mark.parametrize(
    ("dtype", "shape", "typed", "wanted"),
    [
        ("float32", [None], "1.0", "'p=[1.0]'"),
        ("float32", [None], ".5", "'p=[0.5]'"),
        ("int64", [None, None], "3", "'p=[[3]]'"),
        ("bool", [None], "yes", "'p=[true]'"),
        ("string", [None], "a b", """'p=["a b"]'"""),
    ],
)
def test_the_hint_for_a_number_where_a_list_is_expected_works(
    tmp_path: Path, dtype: str, shape: list[int | None], typed: str, wanted: str
) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        factor = tf.compat.v1.placeholder(dtype, shape, "p")
        tf.identity(x + tf.cast(tf.size(factor), tf.float32), "y")
        tf.compat.v1.train.export_meta_graph(str(tmp_path / "m.meta"))
    ends = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}

    with pytest.raises(UsageError, match="does not fit") as caught:
        load_graph(GraphRequest(model=str(tmp_path / "m.meta"), feeds={"p": typed}, **ends))

    assert f"--feed {wanted}" in caught.value.hint
    load_graph(
        GraphRequest(model=str(tmp_path / "m.meta"), feeds={"p": wanted.strip("'").partition("=")[2]}, **ends)
    )


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32", "string"])
def test_an_empty_list_is_fed_to_any_type(tmp_path: Path, dtype: str) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        words = tf.compat.v1.placeholder(dtype, [None], "p")
        tf.identity(x + tf.cast(tf.size(words), tf.float32), "y")
        tf.compat.v1.train.export_meta_graph(str(tmp_path / "m.meta"))
    ends = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}
    load_graph(GraphRequest(model=str(tmp_path / "m.meta"), feeds={"p": "[]"}, **ends))


def test_types_that_rest_has_no_json_for_are_told(tmp_path: Path) -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        for dtype in ("float16", "bfloat16", "uint16", "int32"):
            tf.cast(x, dtype, name=dtype)
        tf.compat.v1.train.export_meta_graph(str(tmp_path / "m.meta"))

    def notes(output: str) -> str:
        asked = GraphRequest(model=str(tmp_path / "m.meta"), inputs={"x": "x"}, outputs={"y": output})
        return " ".join(load_graph(asked).notes)

    for output in ("float16", "bfloat16", "uint16"):
        assert f"REST cannot carry signature 'serving_default', gRPC can: y is {output}" in notes(output)
    assert "REST" not in notes("int32")


def test_a_tensor_is_fed_or_fixed_and_not_both(trained: Trained) -> None:
    request = GraphRequest(
        model=trained.meta, **(REQUEST | {"inputs": {"image": "image", "keep": "keep_prob"}})
    )

    with pytest.raises(UsageError, match="fixed by --feed"):
        load_graph(request)


def test_a_variable_itself_can_be_an_output(trained: Trained) -> None:
    request = GraphRequest(model=trained.meta, outputs={"step": "global_step:0"})

    if trained.graph.get_operation_by_name("global_step").type == "VarHandleOp":
        with pytest.raises(UsageError, match="a resource") as caught:
            load_graph(request)
        value = caught.value.hint.removeprefix("its value is the tensor ")
        request = GraphRequest(model=trained.meta, outputs={"step": value})
    assert serve(load_graph(request), trained.value, {})["step"] == 5


def queued(v1: Any) -> Any:
    import tensorflow as tf

    queue = tf.queue.FIFOQueue(100, [tf.float32, tf.int64], shapes=[[4], []], name="batch")
    enqueue = queue.enqueue_many([tf.random.normal([32, 4]), tf.zeros([32], tf.int64)])
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, [enqueue]))
    features, labels = queue.dequeue_many(8)
    weights = v1.get_variable("w", [4, 3])
    logits = tf.identity(tf.matmul(features, weights), name="logits")
    tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), name="loss")


def _product(rows: Any, weights: Any) -> Any:
    """By TensorFlow's kernel: numpy's sums in another order on some processors."""
    import tensorflow as tf

    return tf.linalg.matmul(rows, weights).numpy()


def test_a_queue_is_cut_at_the_tensor_named_as_input(tmp_path: Path) -> None:
    trained = train(tmp_path, queued)
    dequeued = "batch_DequeueMany:0"
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)

    with pytest.raises(NotServable, match="QueueDequeueManyV2 'batch_DequeueMany'") as caught:
        load_graph(GraphRequest(model=trained.meta, outputs={"logits": "logits"}))
    assert "--input NAME=batch_DequeueMany:0" in caught.value.hint
    graph = load_graph(
        GraphRequest(model=trained.meta, inputs={"rows": dequeued}, outputs={"logits": "logits"})
    )

    answer = serve(graph, trained.value, {"rows": rows})["logits"]
    assert np.array_equal(answer, _product(rows, trained.value("w")))
    signature = graph.meta_graph.signature_def["serving_default"]
    assert [dim.size for dim in signature.inputs["rows"].tensor_shape.dim] == [-1, 4]
    assert [dim.size for dim in signature.outputs["logits"].tensor_shape.dim] == [-1, 3]
    assert "rows" in names(graph)


def iterated(v1: Any) -> Any:
    import tensorflow as tf

    data = (
        tf.data.Dataset.from_tensor_slices(np.ones((8, 4), np.float32)).repeat().batch(2, drop_remainder=True)
    )
    iterator = v1.data.make_initializable_iterator(data)
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    features = iterator.get_next()
    tf.matmul(features, v1.get_variable("w", [4, 3]), name="logits")


def test_an_iterator_is_cut_at_the_tensor_named_as_input(tmp_path: Path) -> None:
    trained = train(tmp_path, iterated)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)

    with pytest.raises(NotServable, match="IteratorGetNext"):
        load_graph(GraphRequest(model=trained.meta, outputs={"logits": "logits"}))
    graph = load_graph(
        GraphRequest(model=trained.meta, inputs={"rows": "IteratorGetNext"}, outputs={"y": "logits"})
    )

    answer = serve(graph, trained.value, {"rows": rows})["y"]
    assert np.array_equal(answer, _product(rows, trained.value("w")))
    assert not graph.meta_graph.graph_def.library.function


def looping(v1: Any) -> Any:
    """A loop and a conditional with constants inside, which only control edges bind to their place."""
    import tensorflow as tf

    x = v1.placeholder(tf.float32, [None, 3], name="x")
    weights = v1.get_variable("w", [3, 3])
    table = v1.get_variable("table", [7, 3])

    def body(i: Any, state: Any) -> Any:
        scale = tf.constant(0.5)
        looked_up = v1.nn.embedding_lookup(table, tf.fill([1], i % 7))
        return i + tf.constant(1), tf.tanh(tf.matmul(state, weights) * scale + looked_up)

    _, state = v1.while_loop(lambda i, _: i < tf.constant(5), body, [tf.constant(0), x])
    nested = v1.cond(
        tf.reduce_sum(state) > 0,
        lambda: v1.cond(
            tf.reduce_sum(x) > 0, lambda: state + tf.constant(1.0), lambda: state * tf.constant(2.0)
        ),
        lambda: state - tf.constant(3.0) + v1.nn.embedding_lookup(table, tf.constant([2])),
    )
    tf.identity(nested, name="y")
    loss = tf.reduce_mean(nested)
    train_op = v1.train.AdamOptimizer(0.1).minimize(loss)
    return lambda session: session.run(train_op, {x: np.ones((2, 3))})


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("resource", [False, True])
def test_loops_and_conditionals_survive(tmp_path: Path, control_flow_v2: bool, resource: bool) -> None:
    trained = train(tmp_path, looping, control_flow_v2=control_flow_v2, resource=resource)

    graph = load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))

    for seed in range(6):
        x = np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32) * (1 if seed % 2 else 5)
        assert np.array_equal(serve(graph, trained.value, {"x": x})["y"], trained.run("y:0", {"x:0": x}))
    assert {variable.key for variable in graph.variables} == {"w", "table"}
    assert not ops(graph) & TRAINING_ONLY
    bodies = {function.signature.name for function in graph.meta_graph.graph_def.library.function}
    assert len(bodies) == (6 if control_flow_v2 else 0)
    if not control_flow_v2:
        assert "ResourceGather" in ops(graph)
        assert not ops(graph) & {"GatherV2", "RefSwitch", "RefEnter"}


def test_rows_are_gathered_without_reading_the_table(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        ids = v1.placeholder(tf.int64, [None], name="ids")
        table = v1.get_variable("table", [50, 4])
        by_axis = tf.gather(tf.identity(table), ids, axis=1, batch_dims=0)
        tf.add(v1.nn.embedding_lookup(table, ids % 50), tf.reduce_sum(by_axis), name="y")

    trained = train(tmp_path, build, resource=False)

    graph = load_graph(GraphRequest(model=trained.meta, inputs={"ids": "ids"}, outputs={"y": "y"}))

    ids = np.array([0, 3, 2, 3])
    assert np.array_equal(serve(graph, trained.value, {"ids": ids})["y"], trained.run("y:0", {"ids:0": ids}))
    kinds = [node.op for node in graph.meta_graph.graph_def.node]
    assert (kinds.count("ResourceGather"), kinds.count("GatherV2"), kinds.count("ReadVariableOp")) == (
        1,
        1,
        1,
    )


@pytest.mark.parametrize("resource", [False, True])
def test_a_change_as_an_output_is_refused(tmp_path: Path, resource: bool) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        counter = v1.get_variable("counter", [], initializer=v1.zeros_initializer())
        tf.multiply(v1.assign_add(counter, 1.0), 2.0, name="y")

    trained = train(tmp_path, build, resource=resource)

    with pytest.raises(NotServable, match="Assign"):
        load_graph(GraphRequest(model=trained.meta, outputs={"y": "y"}))


def test_python_in_the_graph_is_refused(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None], name="x")
        v1.get_variable("w", [1])
        tf.identity(v1.py_func(lambda value: value, [x], tf.float32), name="y")

    trained = train(tmp_path, build)

    with pytest.raises(NotServable, match="calls Python") as caught:
        load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))
    assert caught.value.cause == "y <- PyFunc"


def test_training_left_on_is_noted(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 4], name="x")
        keep = v1.placeholder_with_default(0.5, [], name="keep")
        v1.get_variable("w", [1])
        tf.identity(v1.nn.dropout(x, keep_prob=keep), name="y")

    trained = train(tmp_path, build)

    graph = load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))

    assert any("RandomUniform" in note for note in graph.notes)
    assert any("'keep' keeps its default" in note for note in graph.notes)
    fixed = load_graph(
        GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}, feeds={"keep": "1"})
    )
    assert not any("'keep'" in note for note in fixed.notes)


def test_the_savers_names_win_over_the_graphs(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.matmul(x, v1.get_variable("w", [4, 2]), name="y")

    def renaming() -> Any:
        import tensorflow as tf

        return tf.compat.v1.train.Saver({"old/w": tf.compat.v1.global_variables()[0]})

    for resource in (False, True):
        directory = tmp_path / str(resource)
        directory.mkdir()
        trained = train(directory, build, resource=resource, saver=renaming)
        graph = load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))
        assert [(variable.node, variable.key) for variable in graph.variables] == [("w", "old/w")]


def test_deep_graphs_need_no_deep_stack(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None], name="x")
        y = x + v1.get_variable("w", [], initializer=v1.ones_initializer())
        for _ in range(2500):
            y = tf.nn.relu(y + 0.5)
        tf.identity(y, name="y")

    trained = train(tmp_path, build)

    graph = load_graph(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))

    assert len(graph.meta_graph.graph_def.node) > 7500
