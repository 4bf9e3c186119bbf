"""Variables in fewer bits, in graphs of every make: gathers, functions, loops; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from exporter.bundle.saved_model_writer import write_saved_model
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.errors import MappingError
from exporter.graph.cast_variables import cast_variables
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.mapping.served_graph import as_served
from exporter.wire import protos
from exporter.wire.dtypes import DType
from tests.support.trained import (
    answers_eagerly,
    answers_in_session,
    assert_same,
    export,
    inference_graph,
    train,
)

tf1 = tf.compat.v1

FEEDS = {"ids": np.array([3, 0, 3, 1], np.int64)}
BFLOAT16 = MappingRules(casts=(CastRule.parse("table=bfloat16"),))


def gathered(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, ids)


def read_whole(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather(table.read_value() * 1.0, ids)


def gathered_nd(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(table, tf.expand_dims(ids, 1))


def with_its_shape(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, ids % tf.cast(tf.shape(table)[0], tf.int64))


def in_a_function(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda i: tf.gather(table, i) + 0.0 * tf.reduce_sum(table))(ids)


def in_nested_functions(table: Any, ids: tf.Tensor) -> tf.Tensor:
    inner = tf.function(lambda i: tf.gather(table, i))
    return tf.function(lambda i: inner(i) + inner(i))(ids)


def in_a_branch(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.size(ids) > 2, lambda: tf.gather(table, ids), lambda: tf.gather(table, ids) * 2)


def in_a_switch(table: Any, ids: tf.Tensor) -> tf.Tensor:
    branches = [lambda: tf.gather(table, ids), lambda: tf.gather(table, ids) * 2]
    return tf.switch_case(tf.size(ids) % 2, branches)


def in_a_loop(table: Any, ids: tf.Tensor) -> tf.Tensor:
    start = (tf.constant(0), tf.zeros([4, 2]))
    return tf.while_loop(lambda n, _: n < 3, lambda n, rows: (n + 1, rows + tf.gather(table, ids)), start)[1]


def in_a_loop_inside_a_function(table: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda i: in_a_loop(table, i))(ids)


FORWARDS = (
    gathered,
    read_whole,
    gathered_nd,
    with_its_shape,
    in_a_function,
    in_nested_functions,
    in_a_branch,
    in_a_switch,
    in_a_loop,
    in_a_loop_inside_a_function,
)


def model(forward: Callable[[Any, tf.Tensor], tf.Tensor]) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = tf1.get_variable("table", [4, 2], use_resource=True)
        return {"ids": ids}, {"y": tf.identity(forward(table, ids))}

    return build


@pytest.fixture(params=["v1", "v2"])
def control_flow(request: pytest.FixtureRequest) -> Any:
    """Switch, Merge and Enter, or If and While."""
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if request.param == "v2" else tf1.disable_control_flow_v2)()
    yield request.param
    (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("forward", FORWARDS)
def test_answers_are_those_of_the_rounded_table(tmp_path: Path, forward: Any) -> None:
    trained = train(model(forward), FEEDS, tmp_path / "model.ckpt")
    rounded = train(model(forward), FEEDS, tmp_path / "rounded.ckpt", round_to=ml_dtypes.bfloat16)
    export(inference_graph(model(forward)), trained.prefix, tmp_path / "1", rules=BFLOAT16)
    assert_same(answers_in_session(tmp_path / "1", FEEDS), rounded.answers)
    assert_same(answers_eagerly(tmp_path / "1", FEEDS), rounded.answers)
    assert not np.array_equal(trained.answers["y"], rounded.answers["y"])


def test_a_function_also_called_with_another_table_keeps_its_own_form(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        tables = [tf1.get_variable(name, [4, 2], use_resource=True) for name in ("table", "other")]
        lookup = tf.function(
            lambda handle, i: tf.raw_ops.ResourceGather(resource=handle, indices=i, dtype=tf.float32)
        )
        both = [lookup(table.handle, ids) for table in tables]
        return {"ids": ids}, {"table": tf.identity(both[0]), "other": tf.identity(both[1])}

    trained = train(build, FEEDS, tmp_path / "model.ckpt")
    export(inference_graph(build), trained.prefix, tmp_path / "1", rules=BFLOAT16)
    found = answers_in_session(tmp_path / "1", FEEDS)
    np.testing.assert_array_equal(found["other"], trained.answers["other"])
    rounded = trained.answers["table"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found["table"], rounded)


def test_a_gather_casts_only_the_rows_it_found(tmp_path: Path) -> None:
    trained = train(model(gathered), FEEDS, tmp_path / "model.ckpt")
    export(inference_graph(model(gathered)), trained.prefix, tmp_path / "1", rules=BFLOAT16)
    meta = protos.SavedModel.FromString((tmp_path / "1/saved_model.pb").read_bytes()).meta_graphs[0]
    nodes = {node.name: node for node in meta.graph_def.node}
    (cast,) = (node for node in nodes.values() if node.op == "Cast")
    assert nodes[cast.input[0]].op == "ResourceGather"


def test_signatures_may_name_a_read(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        ids = tf1.placeholder(tf.int64, [None], name="ids")
        table = tf1.get_variable("table", [4, 2], use_resource=True)
        return {"ids": ids}, {"table": table.read_value(), "ids": tf.identity(ids)}

    trained = train(build, FEEDS, tmp_path / "model.ckpt")
    export(inference_graph(build), trained.prefix, tmp_path / "1", rules=BFLOAT16)
    found = answers_in_session(tmp_path / "1", FEEDS)["table"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(
        found, trained.answers["table"].astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_graph_that_was_cast_before_is_written_as_it_is(tmp_path: Path) -> None:
    trained = train(model(gathered), FEEDS, tmp_path / "model.ckpt")
    graph = inference_graph(model(gathered))
    export(graph, trained.prefix, tmp_path / "1", rules=BFLOAT16)
    mapping = build_mapping(graph, read_catalog(trained.prefix), BFLOAT16)
    cast, mapping = as_served(graph, mapping)
    assert [variable.dtype for variable in cast.variables] == [DType.BFLOAT16]
    write_saved_model(cast, mapping, tmp_path / "2")
    once, before = ((tmp_path / name / "saved_model.pb").read_bytes() for name in ("1", "2"))
    assert once == before


class TestRefusals:
    @staticmethod
    def graph(*nodes: tuple[str, str, str]) -> protos.Proto:
        """A float variable `v`, and nodes (name, op, input)."""
        graph_def = protos.GraphDef()
        graph_def.node.add(name="v", op="VarHandleOp").attr["dtype"].type = int(DType.FLOAT)
        for name, op, source in nodes:
            graph_def.node.add(name=name, op=op, input=[source])
        return graph_def

    @pytest.mark.parametrize("op", ["AssignAddVariableOp", "ResourceScatterUpdate", "Pack", "Merge"])
    def test_a_node_that_cannot_take_another_dtype_is_named(self, op: str) -> None:
        with pytest.raises(
            MappingError, match=rf"'v' cannot be cast to bfloat16: node 'n' \({op}\)"
        ) as caught:
            cast_variables(self.graph(("n", op, "v")), {"v": DType.BFLOAT16})
        assert "--cast" in caught.value.hint

    def test_handles_are_followed_through_forwarding_nodes(self) -> None:
        graph_def = self.graph(
            ("n", "AssignVariableOp", "b:0"), ("b", "Identity", "a"), ("a", "Enter", "v:0")
        )
        with pytest.raises(MappingError, match="node 'n'"):
            cast_variables(graph_def, {"v": DType.HALF})

    def test_a_function_that_returns_a_handle_is_named(self) -> None:
        graph_def = self.graph(("call", "PartitionedCall", "v"))
        graph_def.node[1].attr["f"].func.name = "give_back"
        function = graph_def.library.function.add()
        function.signature.name = "give_back"
        function.signature.input_arg.add(name="unused")
        function.signature.input_arg.add(name="handle")
        function.signature.output_arg.add(name="out")
        function.ret["out"] = "handle"
        graph_def.node[1].input.insert(0, "other")
        with pytest.raises(MappingError, match="function 'give_back_cast_0' returns its handle"):
            cast_variables(graph_def, {"v": DType.BFLOAT16})

    def test_a_call_of_a_missing_function_is_named(self) -> None:
        graph_def = self.graph(("call", "PartitionedCall", "v"))
        graph_def.node[1].attr["f"].func.name = "gone"
        with pytest.raises(MappingError, match="node 'call'"):
            cast_variables(graph_def, {"v": DType.BFLOAT16})

    def test_nothing_to_cast_changes_nothing(self) -> None:
        graph_def = self.graph(("n", "Pack", "v"))
        before = graph_def.SerializeToString(deterministic=True)
        cast_variables(graph_def, {})
        assert graph_def.SerializeToString(deterministic=True) == before
