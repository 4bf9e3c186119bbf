"""Partition strategies are read from training graphs and from inference graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.keys import trained_strategies
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.metagraph import read_metagraph
from tests.support.graph_runs import train

MOD, DIV, NONE = PartitionStrategy.MOD, PartitionStrategy.DIV, PartitionStrategy.NONE


def ranker(v1: Any) -> Any:
    """Tables looked up in every way that trainers do, with Adagrad beside them."""
    import tensorflow as tf

    ids = v1.placeholder(tf.int64, [None], name="ids")
    label = v1.placeholder(tf.float32, [None], name="label")
    bags = tf.sparse.from_dense(tf.reshape(ids, [-1, 1]))

    def table(name: str, parts: int = 3) -> Any:
        return v1.get_variable(name, [21, 4], partitioner=v1.fixed_size_partitioner(parts))

    by_mod = v1.nn.embedding_lookup(table("by_mod"), ids)
    by_div = v1.nn.embedding_lookup(table("by_div"), ids, partition_strategy="div")
    pooled = v1.nn.embedding_lookup_sparse(
        table("pooled"), bags, None, partition_strategy="div", combiner="sum"
    )
    safe = v1.nn.safe_embedding_lookup_sparse(table("safe"), bags, combiner="sum")
    whole = tf.gather(tf.convert_to_tensor(table("whole")), ids)
    mixed_table = table("mixed")
    mixed = v1.nn.embedding_lookup(mixed_table, ids) + v1.nn.embedding_lookup(mixed_table, ids, "div")
    first_part = tf.gather(next(iter(table("odd"))), ids % 7)
    rows = tf.concat([by_mod, by_div, pooled, safe, whole, mixed, first_part], 1)
    dense = v1.get_variable("dense", [28, 2], partitioner=v1.fixed_size_partitioner(2))
    scores = tf.reduce_sum(tf.matmul(rows, tf.convert_to_tensor(dense)), 1, name="scores")
    v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_mean(tf.square(scores - label)))


EXPECTED = {
    "by_mod": MOD,
    "by_div": DIV,
    "pooled": DIV,
    "safe": DIV,
    "whole": NONE,
    "dense": NONE,
}


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("control_flow_v2", [False, True])
def test_training_and_inference_graphs_tell_the_same(
    tmp_path: Path, resource: bool, control_flow_v2: bool
) -> None:
    trained = train(tmp_path, ranker, resource=resource, control_flow_v2=control_flow_v2)
    meta_graph = read_metagraph(Path(trained.meta))

    of_trainer = trained_strategies(meta_graph)
    graph = load_graph(GraphRequest(model=trained.meta, inputs={"ids": "ids"}, outputs={"scores": "scores"}))

    assert {key: value for key, value in of_trainer.items() if "Adagrad" not in key} == EXPECTED
    partitioned = {variable.key for variable in graph.variables if variable.part}
    served = {key: value for key, value in graph.lookups.items() if key in partitioned}
    assert served == EXPECTED  # neither `mixed` nor `odd`: nobody can tell
    assert graph.lookups.items() >= EXPECTED.items()


def test_a_whole_table_has_one_part(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        import tensorflow as tf

        ids = v1.placeholder(tf.int64, [None], name="ids")
        rows = tf.nn.embedding_lookup(v1.get_variable("table", [5, 2]), ids)
        tf.matmul(rows, v1.get_variable("dense", [2, 2]), name="y")

    trained = train(tmp_path, build)

    assert trained_strategies(read_metagraph(Path(trained.meta))) == {}
    graph = load_graph(GraphRequest(model=trained.meta, inputs={"ids": "ids"}, outputs={"y": "y"}))
    assert graph.lookups == {"table": DIV, "dense": NONE}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_table_that_a_function_looks_up_is_of_unknown_order(direct: bool, parts: int) -> None:
    """A function's gathers are not followed, whether a call names it in an attribute or is named as it is."""
    import tensorflow as tf

    from exporter.graph.keys import _is_passed_on
    from exporter.graph.nodes import GraphIndex

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        ids = v1.placeholder(tf.int64, [None], name="ids")

        looked_up = tf.function(tf.gather, autograph=False)
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        with v1.variable_scope("", use_resource=True, partitioner=partitioner):
            table = v1.get_variable("table", [6, 2])
        for each in table if parts > 1 else [table]:
            looked_up(each.read_value(), ids)
        meta_graph = v1.train.export_meta_graph(graph=graph, clear_extraneous_savers=True)
    for node in meta_graph.graph_def.node:
        if direct and node.op.endswith("PartitionedCall"):
            node.op = node.attr["f"].func.name
            for name in list(node.attr):
                del node.attr[name]

    assert trained_strategies(meta_graph) == {}
    handles = [node.name for node in meta_graph.graph_def.node if node.op == "VarHandleOp"]
    assert len(handles) == parts
    index = GraphIndex.of(meta_graph)
    assert all(_is_passed_on(index, handle) for handle in handles)
