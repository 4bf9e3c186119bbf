"""Graphs for servers of older TensorFlows: what is left out, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from exporter.errors import NotServable
from exporter.graph.nodes import new_node
from exporter.graph.old_servers import make_for, oldest_server, require_had
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.stock_ops import OLDEST, is_stock, late_ops, stock_attributes


def graph_of(*nodes: Proto, inside: bool = False) -> Any:
    graph_def = protos.GraphDef()
    (graph_def.library.function.add().node_def if inside else graph_def.node).extend(nodes)
    return graph_def


def product(**attrs: Any) -> Proto:
    return new_node("product", "MatMul", ["a", "b"], T=DType.FLOAT, transpose_a=False, **attrs)


@pytest.mark.parametrize("inside", [False, True], ids=["graph", "function"])
def test_attributes_at_their_default_are_left_out_where_they_are_not_known(inside: bool) -> None:
    graph_def = graph_of(product(grad_a=False, grad_b=False), inside=inside)
    assert oldest_server(graph_def) == (2, 8)  # which passes over them
    make_for(graph_def, (2, 18))
    (node,) = protos.all_nodes(graph_def)
    assert {*node.attr} == {"T", "transpose_a", "grad_a", "grad_b"}
    make_for(graph_def, (2, 17))
    assert {*node.attr} == {"T", "transpose_a"}
    assert oldest_server(graph_def) == OLDEST


@pytest.mark.parametrize("inside", [False, True], ids=["graph", "function"])
@pytest.mark.parametrize(
    ("node", "server", "lacking"),
    [
        (product(grad_a=True), (2, 4), r"lack MatMul\.grad_a \(from 2\.18 on\)"),
        (new_node("program", "XlaCallModule"), (2, 8), r"lack XlaCallModule \(from 2\.11 on\)"),
        (new_node("sum", "AddV2", T=DType.UINT64), (2, 4), r"lack AddV2 of uint64 \(from 2\.8 on\)"),
    ],
    ids=["attribute", "operation", "type"],
)
def test_what_a_server_lacks_is_refused_by_name(
    node: Proto, server: tuple[int, int], lacking: str, inside: bool
) -> None:
    graph_def = graph_of(node, product(grad_b=False), inside=inside)
    before = graph_def.SerializeToString()
    with pytest.raises(NotServable, match=lacking) as caught:
        make_for(graph_def, server)
    assert f"'{node.name}'" in (caught.value.cause or "")
    assert graph_def.SerializeToString() == before
    oldest = oldest_server(graph_def)
    assert f"--for-server {oldest[0]}.{oldest[1]}," in (caught.value.hint or "")
    require_had(graph_def, oldest)


def test_the_hint_is_of_what_came_last() -> None:
    nodes = [new_node("program", "XlaCallModule"), product(grad_a=True)]
    nodes += [new_node(f"sum_{number}", "AddV2", T=DType.UINT64) for number in range(9)]
    with pytest.raises(NotServable) as caught:
        require_had(graph_of(*nodes), OLDEST)
    said = "AddV2 of uint64 (from 2.8 on), XlaCallModule (from 2.11 on), MatMul.grad_a (from 2.18 on)"
    assert caught.value.message == f"servers of TensorFlow 1.15 lack {said}"
    assert "--for-server 2.18" in (caught.value.hint or "")


def test_what_changes_the_log_alone_is_left_out() -> None:
    graph_def = graph_of(new_node("tried", "IgnoreErrorsDataset", log_warning=True))
    make_for(graph_def, OLDEST)
    assert "log_warning" not in graph_def.node[0].attr


def test_an_attribute_that_a_function_is_given_is_not_judged() -> None:
    node = new_node("sum", "AddV2")
    node.attr["T"].placeholder = "T"
    require_had(graph_of(node, inside=True), OLDEST)


def test_the_list_is_of_stock_operations_and_their_attributes() -> None:
    late = late_ops()
    assert late.ops and late.attributes
    for op, attributes in late.attributes.items():
        known = stock_attributes(op)
        assert is_stock(op), op
        assert known is None or {*attributes} <= known, op
        for grown in attributes.values():
            assert all(late.ops.get(op, OLDEST) < each.since for each in grown), op
