"""Rows of embedding variables, and what a converted graph answers with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.lookup_tables import with_table_shapes
from tests.support.dynamic_values import Rows, table_values
from tests.support.graph_runs import serve

DIM = 4


INT64 = np.iinfo(np.int64)


KEYS = np.array([0, 1, -1, -2, 7, 1000, 1_000_007, -1_000_003, INT64.max, INT64.min, 3, 5, 11])


def rows(seed: int = 0, keys: Any = KEYS, dtype: Any = np.float32) -> Rows:
    random = np.random.default_rng(seed)
    return Rows(np.asarray(keys), random.standard_normal((len(keys), DIM)).astype(dtype))


def answers(
    graph: InferenceGraph, tables: dict[str, Rows], feeds: dict[str, Any], dense: dict[str, Any] | None = None
) -> dict[str, Any]:
    values = dict(dense or {})
    for table in graph.dynamic_tables:
        values |= table_values(table, tables[table.name])
    shaped = with_table_shapes(graph, {name: value.shape for name, value in values.items()})
    return serve(shaped, values.__getitem__, feeds)
