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
from tests.support.deeprec_group import ABSENT, IDS, TABLES, combined, feeds, graph_with_group
from tests.support.deeprec_rows import DIM, INT64, answers, rows
from tests.support.graph_runs import ops


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
