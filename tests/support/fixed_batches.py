"""Models whose input pipeline has one batch size, and stock TensorFlow's answers to each row alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from exporter.graph.load import GraphRequest, load_graph
from tests.support.graph_runs import train

BATCH = 8
v1 = tf.compat.v1
WORDS = ["red", "green", "blue", "black"]


def batches(sparse: bool) -> Any:
    """A batch of ids, numbers and words; with sparse ones of any length beside them."""
    dense = {
        "ids": np.arange(64, dtype=np.int64) % 7,
        "price": np.linspace(0, 3, 64, dtype=np.float32),
        "word": np.array(([*WORDS, "other"]) * 13)[:64].astype(object),
        "vector": np.ones((64, 3), np.float32),
        "steps": np.ones((64, 5, 2), np.float32),
    }
    data = tf.data.Dataset.from_tensor_slices(dense)
    if sparse:

        def lists(row: Any) -> Any:
            few = tf.range(row["ids"] % 4, dtype=tf.int64)
            bag = tf.sparse.from_dense(few + 1)
            return row | {"bag": bag, "weight": bag.with_values(tf.cast(bag.values, tf.float32) / 2.0)}

        data = data.map(lists)
    iterator = v1.data.make_initializable_iterator(data.repeat().batch(BATCH, drop_remainder=True))
    v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator.get_next()


def table(rows: int, parts: int, name: str = "table", width: int = 4) -> Any:
    partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
    start = v1.random_uniform_initializer(-1, 1, seed=5)
    return v1.get_variable(name, [rows, width], initializer=start, partitioner=partitioner)


def loaded(tmp_path: Path, build: Callable[[Any], Any], *, sparse: bool = False, of_tf2: bool = False) -> Any:
    def graph(_: Any) -> None:
        row = batches(sparse)
        graph.names = dict(row)  # type: ignore[attr-defined]
        v1.get_variable("unused", [1])
        tf.identity(build(row), name="scores")

    trained = train(tmp_path, graph, control_flow_v2=of_tf2)
    inputs: dict[str, str] = {}
    for name, tensor in graph.names.items():  # type: ignore[attr-defined]
        if isinstance(tensor, tf.SparseTensor):
            for at, part in enumerate(("indices", "values", "dense_shape")):
                inputs[f"{name}_{part}"] = f"{tensor.indices.op.name}:{at}"
        else:
            inputs[name] = tensor.name
    used = inputs_used(trained.graph, inputs)
    request = GraphRequest(model=trained.meta, inputs=used, outputs={"scores": "scores"})
    return trained, load_graph(request), used


def inputs_used(graph: Any, inputs: Mapping[str, str]) -> dict[str, str]:
    """The inputs that the scores are computed from."""
    pending, seen = [graph.get_operation_by_name("scores")], set()
    tensors = set[str]()
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        for tensor in op.inputs:
            tensors.add(tensor.name)
            if tensor.name not in inputs.values():
                pending.append(tensor.op)
    return {name: tensor for name, tensor in inputs.items() if tensor in tensors}


def rows_of(count: int, sparse: bool, fewest: int = 0) -> list[dict[str, Any]]:
    """Rows of which sparse ones have `fewest` values and more."""
    random = np.random.default_rng(count)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        row = {
            "ids": np.int64(random.integers(0, 7)),
            "price": np.float32(random.uniform(0, 3)),
            "word": [*WORDS, "unknown"][at % 5].encode(),
            "vector": random.normal(size=3).astype(np.float32),
            "steps": random.normal(size=(5, 2)).astype(np.float32),
        }
        if sparse:
            row["bag"] = random.integers(0, 7, max(at % 4, fewest)).astype(np.int64)
            row["weight"] = random.uniform(0.5, 2, len(row["bag"])).astype(np.float32)
        rows.append(row)
    return rows


def request_of(rows: list[dict[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        if name in rows[0]:
            values = [row[name] for row in rows]
            found[name] = np.array(values, object) if name == "word" else np.array(values)
    for name in ("bag", "weight"):
        if f"{name}_values" in names:
            places = [(at, step) for at, row in enumerate(rows) for step in range(len(row[name]))]
            found[f"{name}_indices"] = np.array(places, np.int64).reshape(-1, 2)
            found[f"{name}_values"] = np.concatenate([row[name] for row in rows])
            found[f"{name}_dense_shape"] = np.array([len(rows), 4], np.int64)
    return {name: value for name, value in found.items() if name in names}


def own_answer(trained: Any, names: Mapping[str, str], row: dict[str, Any]) -> Any:
    feeds = {names[name]: value for name, value in request_of([row] * BATCH, names).items()}
    return trained.run("scores:0", feeds)[0]
