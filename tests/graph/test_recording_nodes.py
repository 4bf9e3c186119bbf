"""What `IncrementHook` adds to a trainer's graph is no part of the model that its `.meta` shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.keys import trained_strategies
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.metagraph import load_metagraph, read_metagraph
from exporter.pipeline.inspected import GraphView
from exporter.pipeline.inspection import inspect
from exporter.wire.protos import Proto
from tests.support.graph_runs import v1_graph


def by_mod(v1: Any) -> None:
    """Partitioned tables and a whole one, of which one is looked up by `mod`, and dense weights."""
    import tensorflow as tf

    ids = v1.placeholder(tf.int64, [None], name="ids")
    label = v1.placeholder(tf.float32, [None], name="label")
    parts = v1.fixed_size_partitioner(3)
    mod = v1.nn.embedding_lookup(v1.get_variable("mod", [21, 4], partitioner=parts), ids)
    div = v1.nn.embedding_lookup(v1.get_variable("div", [21, 4], partitioner=parts), ids, "div")
    rows = tf.concat([mod, div, tf.gather(v1.get_variable("whole", [21, 4]), ids)], 1)
    scores = tf.matmul(rows, v1.get_variable("kernel", [12, 1]), name="scores")
    loss = tf.reduce_mean(tf.square(scores[:, 0] - label))
    step = v1.train.get_or_create_global_step()
    v1.train.AdagradOptimizer(0.1).minimize(loss, global_step=step)


def by_keys(v1: Any) -> None:
    """A table by keys, of which the hook reads and writes more than of any other variable."""
    import tensorflow as tf

    from exporter.tables import TrainableTable

    ids = v1.placeholder(tf.int64, [None], name="ids")
    table = TrainableTable("items", 4, 300)
    scores = tf.reduce_sum(table.lookup(ids), 1, name="scores")
    step = v1.train.get_or_create_global_step()
    v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_mean(tf.square(scores)), global_step=step)


def own_scope(v1: Any) -> None:
    """A program that calls a part of its model as the hook calls its own."""
    import tensorflow as tf

    ids = v1.placeholder(tf.int64, [None], name="ids")
    with v1.variable_scope("increments/table"):
        rows = tf.gather(v1.get_variable("kernel", [21, 4]), ids, name="rows")
    tf.reduce_sum(rows, 1, name="scores")
    v1.train.get_or_create_global_step()


@pytest.mark.parametrize("control_flow_v2", [False, True])
@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("build", [by_mod, by_keys, own_scope])
def test_a_graph_is_read_as_if_no_hook_had_extended_it(
    tmp_path: Path, build: Callable[[Any], None], resource: bool, control_flow_v2: bool
) -> None:
    before, after = tmp_path / "before.meta", tmp_path / "after.meta"
    with v1_graph(resource=resource, control_flow_v2=control_flow_v2) as graph:
        import tensorflow as tf

        from exporter.training import IncrementHook

        v1 = tf.compat.v1
        build(v1)
        v1.train.export_meta_graph(str(before), graph=graph)
        for _ in range(2):
            IncrementHook(tmp_path, save_increment_steps=1).begin()
        v1.train.export_meta_graph(str(after), graph=graph)

    assert after.stat().st_size > before.stat().st_size
    assert nodes_of(read_metagraph(after)) == nodes_of(read_metagraph(before))


def nodes_of(meta_graph: Proto) -> list[tuple[str, str, list[str]]]:
    return [(node.name, node.op, [*node.input]) for node in meta_graph.graph_def.node]


def test_the_strategy_and_the_names_to_type_are_the_models(tmp_path: Path) -> None:
    meta = trained_with_hook(tmp_path)

    strategies = trained_strategies(read_metagraph(meta))
    assert strategies["mod"] is PartitionStrategy.MOD
    assert strategies["div"] is PartitionStrategy.DIV
    view = inspect(meta)
    assert isinstance(view, GraphView)
    assert [spec.name for spec in view.placeholders] == ["ids", "label"]
    assert [spec.tensor for spec in view.likely_outputs] == ["scores:0"]
    with pytest.raises(UsageError) as caught:
        load_metagraph(meta, GraphRequest(model=str(meta)))
    assert "placeholders are ids, label;" in caught.value.cause


def trained_with_hook(directory: Path) -> Path:
    """The newest `.meta` of a monitored session with the hook."""
    with v1_graph():
        import tensorflow as tf

        from exporter.training import IncrementHook

        v1 = tf.compat.v1
        by_mod(v1)
        train_op = v1.get_collection(v1.GraphKeys.TRAIN_OP)[0]
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(directory),
            save_checkpoint_steps=2,
            hooks=[IncrementHook(directory, save_increment_steps=1)],
        ) as session:
            session.run(train_op, {"ids:0": [1, 2], "label:0": [0.0, 1.0]})
    return max(directory.glob("*.meta"))


def test_a_saved_model_of_a_training_session_is_read_so_too(tmp_path: Path) -> None:
    with v1_graph() as graph:
        import tensorflow as tf

        from exporter.training import IncrementHook

        v1 = tf.compat.v1
        by_mod(v1)
        plain = graph.as_graph_def()
        IncrementHook(tmp_path, save_increment_steps=1).begin()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            builder = v1.saved_model.Builder(str(tmp_path / "saved"))
            builder.add_meta_graph_and_variables(session, ["train"])
            builder.save()

    (read,) = read_saved_model(tmp_path / "saved").meta_graphs
    assert {node.name for node in plain.node} <= {node.name for node in read.graph_def.node}
    assert not [node.name for node in read.graph_def.node if node.name.startswith("increments/")]


def test_a_tensor_that_a_signature_names_is_the_models_whatever_its_name(tmp_path: Path) -> None:
    with v1_graph():
        import tensorflow as tf

        v1 = tf.compat.v1
        x = v1.placeholder(tf.float32, [None], name="x")
        total = tf.reduce_sum(x, name="increments/count/total")
        with v1.Session() as session:
            v1.saved_model.simple_save(session, str(tmp_path / "saved"), {"x": x}, {"total": total})

    graph = load_graph(GraphRequest(model=str(tmp_path / "saved")))
    assert total.op.name in {node.name for node in graph.meta_graph.graph_def.node}
