"""DeepRec's lookups of groups of tables become lookups of each; the reference is its CPU kernels' loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import ForeignOperations
from exporter.graph.load import GraphRequest, load_graph
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.stock_ops import is_stock
from tests.graph.test_graph_deeprec import DIM, INT64, answers, rows
from tests.support.deeprec_graphs import deeprec_graph
from tests.support.dynamic_values import Rows
from tests.support.graph_runs import ops

Array = np.ndarray[Any, Any]
TABLES = ("user", "item")
ABSENT = {"user": 0.25, "item": -1.0}
BATCH = 5
IDS = {  # rows 1 and 4 of the batch have none, and most ids are absent
    "user": (np.array([7, 7, INT64.max, 424_242, -1, INT64.min]), np.array([0, 0, 0, 2, 3, 3])),
    "item": (np.array([0, 1_000_007, 5]), np.array([0, 2, 2])),
}

GIVES: dict[str, dict[str, Any]] = {
    "output": {"type_attr": "dtype"},
    "unique_keys": {"type_attr": "Tkeys"},
    "unique_idx": {"type": int(DType.INT32)},
    "batch_nums": {"type": int(DType.INT32)},
}
"""What a group lookup gives for each table (core/ops/group_embedding_ops.cc)."""


def feeds(*, weighted: bool = False) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, (ids, owners) in IDS.items():
        columns = np.arange(len(ids)) - np.searchsorted(owners, owners)
        found[f"{name}_ids"] = ids
        found[f"{name}_indices"] = np.stack([owners, columns], 1)
        found[f"{name}_shape"] = np.array([BATCH, 4])
        if weighted:
            found[f"{name}_weights"] = np.linspace(0.5, 3, len(ids)).astype(np.float32)
    return found


def combined(name: str, table: Rows, combiner: str, given: Mapping[str, Array]) -> Array:
    """What DeepRec's kernel adds up, row by row."""
    ids, owners = IDS[name]
    read = table.read(ids, np.full((1, DIM), ABSENT[name], np.float32)).astype(np.float64)
    weights = given.get(f"{name}_weights", np.ones(len(ids)))
    result = np.zeros((BATCH, DIM))
    for row, owner, weight in zip(read, owners, weights, strict=True):
        count = np.count_nonzero(owners == owner)
        result[owner] += row * weight / {"sum": 1, "mean": count, "sqrtn": np.sqrt(count)}[combiner]
    return result


def graph_with_group(op: str = "GroupEmbeddingVarLookup", **attributes: Any) -> Proto:
    """A program with two tables, whose `group` looks both up; `user_rows` and `item_rows` read it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    sparse = not op.endswith("Dense")
    keyed = "EmbeddingVar" in op
    with deeprec_graph() as program:
        for name in TABLES:
            program.embedding_variable(name, DIM, initializer=ABSENT[name])
            if not keyed:
                program.variables.clear()
                v1.get_variable(f"{name}_table", [8, DIM], tf.float32)
            v1.placeholder(tf.int64, [None] if sparse else [None, None], name=f"{name}_ids")
            v1.placeholder(tf.int64, [None, 2], name=f"{name}_indices")
            v1.placeholder(tf.int64, [2], name=f"{name}_shape")
            v1.placeholder(tf.float32, [None], name=f"{name}_weights")
        tf.constant(1.0, name="default")
        meta_graph = program.meta_graph()
    kinds = ("", "_ids", "_indices", "_weights", "_shape") if sparse else ("", "_ids")
    if not keyed:
        kinds = ("_table/read", *kinds[1:])
    inputs = [f"{name}{kind}" for kind in kinds for name in TABLES]
    group = meta_graph.graph_def.node.add(name="group", op=op, input=[*inputs, "default", "^user_ids"])
    group.attr["num_lookups"].i = len(TABLES)
    group.attr["dimension"].i = DIM
    group.attr["dtype"].type, group.attr["Tkeys"].type = int(DType.FLOAT), int(DType.INT64)
    group.attr["max_norm"].f = -1.0
    group.attr["combiner"].s = b"mean"
    for key, value in attributes.items():
        field = {bool: "b", float: "f", bytes: "s"}[type(value)]
        setattr(group.attr[key], field, value)
    described = meta_graph.meta_info_def.stripped_op_list.op.add(name=op)
    for argument, kind in GIVES.items():
        if sparse or argument != "batch_nums":
            described.output_arg.add(name=argument, number_attr="num_lookups", **kind)
    for number, name in enumerate(TABLES):
        node = meta_graph.graph_def.node.add(name=f"{name}_rows", op="Identity", input=[f"group:{number}"])
        node.attr["T"].type = int(DType.FLOAT)
    # What trains reads more of the group; no output needs it.
    grad = meta_graph.graph_def.node.add(name="grad", op="GroupEmbeddingVariableLookupGrad")
    grad.input.extend(["user_rows", "group:2", "group:7"])
    return meta_graph


def request(tmp_path: Path, meta_graph: Proto, inputs: Any, outputs: Any = None) -> GraphRequest:
    meta = tmp_path / "m.meta"
    meta.write_bytes(meta_graph.SerializeToString())
    return GraphRequest(
        model=str(meta),
        inputs={name: name for name in inputs},
        outputs=outputs or {n: f"{n}_rows" for n in TABLES},
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sparse_groups(tmp_path: Path, combiner: str, weighted: bool) -> None:
    meta_graph = graph_with_group(combiner=combiner.encode(), ignore_weights=not weighted)
    given = feeds(weighted=weighted)
    graph = load_graph(request(tmp_path, meta_graph, given))

    assert all(is_stock(op) for op in ops(graph))
    assert {table.name for table in graph.dynamic_tables} == {*TABLES}
    tables = {name: rows(seed) for seed, name in enumerate(TABLES)}
    found = answers(graph, tables, given)
    for name in TABLES:
        expected = combined(name, tables[name], combiner, given)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
        assert not found[name][[1, 4]].any(), "rows without ids are zero"


def test_dense_groups(tmp_path: Path) -> None:
    meta_graph = graph_with_group("GroupEmbeddingVarLookupDense", ignore_weights=True)
    given = {f"{name}_ids": np.array([[7, 0, 2], [INT64.min, -1, 424_242]]) for name in TABLES}
    # The group itself is served, under its own names.
    graph = load_graph(request(tmp_path, meta_graph, given, {"user": "group", "item": "group:1"}))
    tables = {name: rows(seed) for seed, name in enumerate(TABLES)}
    found = answers(graph, tables, given)
    for name in TABLES:
        expected = tables[name].read(
            given[f"{name}_ids"].ravel(), np.full((1, DIM), ABSENT[name], np.float32)
        )
        assert np.array_equal(found[name], expected.reshape(2, 3, DIM))


def test_groups_of_ordinary_variables(tmp_path: Path) -> None:
    given = feeds()
    given["user_ids"], given["item_ids"] = np.array([7, 7, 1, 0, 2, 3]), np.array([0, 4, 5])
    graph = load_graph(request(tmp_path, graph_with_group("GroupVariableLookup", ignore_weights=True), given))
    assert not graph.dynamic_tables and all(is_stock(op) for op in ops(graph))
    tables = {f"{name}_table": rows(seed, np.arange(8)).values for seed, name in enumerate(TABLES)}
    found = answers(graph, {}, given, tables)
    for name in TABLES:
        owners = IDS[name][1]
        read = tables[f"{name}_table"][given[f"{name}_ids"]]
        expected = [read[owners == row].mean(0) if (owners == row).any() else [0] * DIM for row in range(5)]
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "attributes",
    [{"max_norm": 1.0}, {"is_sequence": True}, {"is_use_default_value_tensor": True}, {"combiner": b"max"}],
)
def test_groups_of_other_kinds_are_refused_by_name(tmp_path: Path, attributes: Mapping[str, Any]) -> None:
    meta_graph = graph_with_group(**{"ignore_weights": True, **attributes})
    with pytest.raises(ForeignOperations, match="GroupEmbeddingVarLookup 'group'") as caught:
        load_graph(request(tmp_path, meta_graph, feeds()))
    assert "with groups that neither" in caught.value.hint


def test_more_than_rows_and_the_old_form_are_refused_by_name(tmp_path: Path) -> None:
    meta_graph = graph_with_group(ignore_weights=True)
    asked = request(tmp_path, meta_graph, feeds(), {"user": "user_rows", "keys": "group:2"})
    with pytest.raises(ForeignOperations, match="GroupEmbeddingVarLookup 'group'"):
        load_graph(asked)
    described = next(
        op for op in meta_graph.meta_info_def.stripped_op_list.op if op.name == "GroupEmbeddingVarLookup"
    )
    described.input_arg.add(name="dense_shape", type=int(DType.INT32))
    with pytest.raises(ForeignOperations, match="GroupEmbeddingVarLookup 'group'"):
        load_graph(request(tmp_path, meta_graph, feeds()))
