"""The source graph answers again, without running what belongs to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exporter.graph.load import GraphRequest, SourceGraph, load_source
from exporter.graph.outside import runnable_graph
from tests.support.graph_runs import train


def run(source: SourceGraph, feeds: dict[str, Any], tensor: str, *, twice: bool = False) -> Any:
    """Import the runnable graph, initialise it, run a tensor."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph_def = v1.GraphDef.FromString(runnable_graph(source).SerializeToString())
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.import_graph_def(graph_def, name="")
        files = {f"{node}:0": str(path) for node, path in source.assets.items()}
        session.run([op for op in graph.get_operations() if op.name.endswith("/Assign")], files)
        if source.init_op is not None:
            session.run(graph.get_operation_by_name(source.init_op), files)
        answers = [session.run(tensor, feeds) for _ in range(2 if twice else 1)]
        return answers if twice else answers[0]


def test_what_only_training_can_do_is_not_done(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        x = v1.placeholder(tf.float32, [None], name="x")
        label = v1.placeholder(tf.int64, [None], name="label")
        queue = tf.queue.FIFOQueue(3, [tf.float32], shapes=[[]], name="queue")
        mean = v1.get_variable("mean", [], initializer=v1.zeros_initializer())
        moved = v1.assign(mean, mean * 0.5 + 1.0)
        with v1.control_dependencies([v1.assert_non_negative(label), queue.dequeue(), tf.group(moved)]):
            tf.add(x, mean.read_value(), name="y")

    trained = train(tmp_path, build)
    source = load_source(GraphRequest(model=trained.meta, inputs={"x": "x"}, outputs={"y": "y"}))

    first, second = run(source, {"x:0": [2.0]}, "y:0", twice=True)

    assert first.tolist() == second.tolist() == [2.0]


def test_a_fed_tensor_needs_nothing_behind_it(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        queue = tf.queue.FIFOQueue(3, [tf.float32], shapes=[[2]], name="queue")
        rows = queue.dequeue_many(2)
        v1.get_variable("w", [1])
        with v1.control_dependencies([tf.identity(rows)]):
            scale = v1.cond(tf.reduce_sum(rows) > 0, lambda: tf.constant(3.0), lambda: tf.constant(-1.0))
            tf.multiply(rows, scale, name="y")

    trained = train(tmp_path, build)
    source = load_source(
        GraphRequest(model=trained.meta, inputs={"rows": "queue_DequeueMany"}, outputs={"y": "y"})
    )

    assert np.array_equal(run(source, {"queue_DequeueMany:0": [[1, 2], [3, 4]]}, "y:0"), [[3, 6], [9, 12]])


def test_an_object_based_model_initialises_its_tables(tmp_path: Path) -> None:
    import tensorflow as tf

    words = tmp_path / "words.txt"
    words.write_text("a\nb\n")

    class Words(tf.Module):
        def __init__(self) -> None:
            index = tf.lookup.TextFileIndex
            lines = tf.lookup.TextFileInitializer(
                str(words), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
            )
            self.table = tf.lookup.StaticHashTable(lines, -1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
        def __call__(self, words: Any) -> Any:
            return {"ids": self.table.lookup(words)}

    model = Words()
    tf.saved_model.save(model, str(tmp_path / "1"), signatures=model.__call__.get_concrete_function())
    source = load_source(GraphRequest(model=str(tmp_path / "1")))

    signature = source.meta_graph.signature_def["serving_default"]
    ids = run(source, {signature.inputs["words"].name: [b"b", b"?"]}, signature.outputs["ids"].name)

    assert ids.tolist() == [1, -1]
