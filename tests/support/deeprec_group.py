"""A DeepRec graph that looks up a group of tables, and what its kernel answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from tests.support.deeprec_graphs import deeprec_graph
from tests.support.deeprec_rows import DIM, INT64
from tests.support.dynamic_values import Rows

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
