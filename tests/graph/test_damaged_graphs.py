"""Graphs that no trainer writes end in this project's errors, and in a time that grows with their size."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from exporter.errors import NotServable
from exporter.graph.batch.laboratory import Ends, InputKind, NoLaboratory, laboratory, populations
from exporter.graph.clean import _narrow_read
from exporter.graph.deeprec_conversion import _evaluated
from exporter.graph.nodes import Endpoint, GraphIndex, constant, new_node
from exporter.wire import protos
from exporter.wire.dtypes import DType


def text(name: str, value: bytes) -> Any:
    return constant(name, np.array([value], object), DType.STRING)


def test_a_chain_of_sums_of_a_tensor_with_itself_is_computed_once_a_node() -> None:
    graph = protos.message_class("GraphDef")()
    graph.node.append(constant("x0", np.ones(2, np.float32), DType.FLOAT))
    for n in range(60):
        graph.node.append(new_node(f"x{n + 1}", "AddV2", [f"x{n}", f"x{n}"], T=DType.FLOAT))
    began = time.process_time()
    value, why = _evaluated(GraphIndex(graph), Endpoint("x60", 0))
    assert why == ""
    assert value is not None
    assert value.tolist() == [2.0**60] * 2
    assert time.process_time() - began < 20, "2^60 sums would take for ever"


def test_an_output_that_a_restore_lacks_is_refused() -> None:
    made = [
        text("names", b"a"),
        text("slices", b""),
        new_node("prefix", "Placeholder", dtype=DType.STRING, shape=()),
        new_node("restore", "RestoreV2", ["prefix", "names", "slices"], dtypes=(DType.FLOAT,)),
        new_node("import", "LookupTableImportV2", ["handle", "restore:3"]),
    ]
    with pytest.raises(NotServable, match="which tensors RestoreV2 'restore' restores"):
        _narrow_read({node.name: node for node in made}, "restore", ["import"])


def test_a_gather_by_texts_leaves_its_table_whole() -> None:
    made = [
        new_node("table", "VarHandleOp", dtype=DType.FLOAT, shape=(9, 2)),
        new_node("ids", "Placeholder", dtype=DType.INT64, shape=(-1,)),
        new_node("rows", "ResourceGather", ["table", "ids"], dtype=DType.FLOAT, Tindices=DType.STRING),
    ]
    assert laboratory({node.name: node for node in made}, []).heights == ()


@pytest.mark.parametrize("dtype", [DType.VARIANT, DType.RESOURCE])
def test_no_requests_are_made_up_for_an_input_without_numbers(dtype: DType) -> None:
    given = Endpoint("x", 0)
    nodes = {"x": new_node("x", "Placeholder", dtype=dtype, shape=(-1,))}
    with pytest.raises(NoLaboratory, match=f"no random values of {dtype.label}"):
        list(populations(nodes, Ends({given: InputKind((-1,), dtype)}, [given]), (), 2, []))
