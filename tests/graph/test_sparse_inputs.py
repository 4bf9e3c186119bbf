"""Inputs that are the parts of one sparse tensor, and those that only look like it."""

from __future__ import annotations

from typing import Any

import pytest

from exporter.graph.batch.laboratory import InputKind, sparse_inputs
from exporter.graph.load import GraphRequest, load_graph
from exporter.graph.nodes import Endpoint
from exporter.wire.dtypes import DType


@pytest.mark.parametrize("second", ["float32", "int64"])
def test_a_matrix_of_ids_and_two_vectors_are_no_sparse_tensor(second: str) -> None:
    """A sparse tensor, too, has three such inputs in one scope."""
    import tensorflow as tf

    def build() -> Any:
        v1 = tf.compat.v1
        ids = v1.placeholder(tf.int64, [None, 10], name="ids")
        price = v1.placeholder(tf.float32, [None], name="price")
        other = v1.placeholder(second, [None], name="other")
        rows = tf.gather(v1.get_variable("table", [9, 2]), ids)
        score = tf.reduce_sum(rows, [1, 2]) + price + tf.cast(other, tf.float32)
        return {"ids": ids, "price": price, "other": other}, {"score": score}

    graph = load_graph(GraphRequest(model=build))
    assert {*graph.meta_graph.signature_def["serving_default"].inputs} == {"ids", "price", "other"}

    kinds = {"ids": ((-1, 10), "int64"), "price": ((-1,), "float32"), "other": ((-1,), second)}
    inputs = {Endpoint(name, 0): InputKind(shape, DType.of(dtype)) for name, (shape, dtype) in kinds.items()}
    assert sparse_inputs(inputs, {tensor: tensor.node for tensor in inputs}) == []


def test_parts_of_a_sparse_tensor_are_known_by_alias_scope_or_length() -> None:
    def parts(indices: str, values: str, shape: str, columns: int, length: int) -> dict[Endpoint, InputKind]:
        return {
            Endpoint(indices, 0): InputKind((-1, columns), DType.INT64),
            Endpoint(values, 0): InputKind((-1,), DType.INT64),
            Endpoint(shape, 0): InputKind((length,), DType.INT64),
        }

    for given, alias in (
        (parts("Placeholder_1", "Placeholder", "Placeholder_2", -1, -1), "x"),
        (parts("x/indices", "x/values", "x/shape", -1, -1), None),
        (parts("indices", "values", "dense", 2, 2), None),
    ):
        assert sparse_inputs(given, {tensor: alias or tensor.node for tensor in given}) == [tuple(given)]
