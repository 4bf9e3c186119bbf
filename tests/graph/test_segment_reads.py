"""Sums over segments of a table read rows, not the table: the same bits, in graphs and in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exporter.graph.variable_uses import Use, read_rows_only, uses
from exporter.wire import protos

ROWS = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
SEGMENTS = np.array([0, 0, 0, 1, 3, 3], np.int32)
INDICES = np.array([4, 49, 4, 0, 17, 3])


def segments(kind: str, table: Any, indices: Any) -> Any:
    import tensorflow as tf

    if kind == "embedding_lookup_sparse":
        places = np.stack([SEGMENTS, [0, 1, 2, 0, 0, 1]], 1).astype(np.int64)
        ids = tf.SparseTensor(places, tf.cast(indices, tf.int64), [4, 3])
        return tf.nn.embedding_lookup_sparse(table.read_value(), ids, None, combiner="mean")
    if kind == "cast":
        return tf.sparse.segment_mean(tf.cast(table, tf.float64), indices, SEGMENTS)
    if kind == "numbered":
        return tf.sparse.segment_sum(table, indices, SEGMENTS, num_segments=6)
    return getattr(tf.sparse, f"segment_{kind}")(table, indices, SEGMENTS)


@pytest.mark.parametrize("where", ["graph", "function"])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["sum", "mean", "sqrt_n", "numbered", "cast", "embedding_lookup_sparse"])
def test_rows_are_gathered_and_added_up_as_before(kind: str, index: str, where: str) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        table = v1.get_variable("table", initializer=ROWS, use_resource=True)
        indices = v1.placeholder(index, [None], name="indices")

        def compute(given: Any) -> Any:
            return segments(kind, table, given)

        call: Callable[[Any], Any] = tf.function(compute) if where == "function" else compute
        out = tf.identity(call(indices), name="out")
        session.run(table.initializer)
        drawn = protos.GraphDef.FromString(graph.as_graph_def().SerializeToString())
        before = session.run(out, {indices: INDICES})
        _drop_writes(drawn)
        assert Use.WHOLE in uses(drawn)["table"]
        read_rows_only(drawn, {"out"})
        assert uses(drawn)["table"] is Use.ROWS
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        rewritten = v1.GraphDef.FromString(drawn.SerializeToString())
        fed, handle, again = v1.import_graph_def(rewritten, {}, ["indices:0", "table:0", "out:0"])
        session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(ROWS)))
        after = session.run(again, {fed: INDICES})
    assert after.tobytes() == before.tobytes()


def _drop_writes(graph_def: Any) -> None:
    """What initialises the table reads it whole, and is not served."""
    kept = [node for node in graph_def.node if not node.name.startswith("table/")]
    del graph_def.node[:]
    graph_def.node.extend(kept)
