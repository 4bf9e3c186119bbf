"""The graph of objects in a checkpoint: read back, and refused where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.catalog import Catalog
from exporter.checkpoint.object_graph import ROOT, ObjectGraph, parse_object_graph, read_object_graph
from exporter.errors import CorruptFile
from tests.support.object_graphs import Var, graph_of, message_of

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
TREES = st.recursive(
    st.builds(Var, st.just("w")), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_what_is_written_is_read(tree: dict[str, object]) -> None:
    graph, _ = graph_of(tree, is_trained=True)
    assert parse_object_graph(message_of(graph).SerializeToString(), "here") == graph


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4))
def test_each_path_leads_to_its_object(tree: dict[str, object]) -> None:
    """Also where names hold slashes and dots."""
    graph, _ = graph_of(tree, is_trained=True)
    assert set(graph.paths) == {*range(len(graph.objects))}
    assert all(graph.at(path) == number for number, path in graph.paths.items())


def test_paths_end_where_there_is_no_edge() -> None:
    graph, _ = graph_of({"net": {"w": Var("w")}}, is_trained=True)
    assert graph.at("net/b") is None
    assert graph.at(".") == graph.at("") == ROOT
    assert graph.at("w", start=graph.objects[ROOT].children["net"]) == graph.at("net/w")


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"\xff\xff", "not an object graph"), (b"", "holds no object")],
)
def test_what_is_no_graph_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptFile, match=reason):
        parse_object_graph(data, "here")


def test_an_edge_to_nowhere_is_refused() -> None:
    message = message_of(ObjectGraph(()))
    message.nodes.add().children.add(local_name="w", node_id=7)
    with pytest.raises(CorruptFile, match="object 0 leads to 7 of 1"):
        parse_object_graph(message.SerializeToString(), "here")


def test_a_slot_to_nowhere_is_refused() -> None:
    message = message_of(ObjectGraph(()))
    message.nodes.add().slot_variables.add(slot_variable_node_id=3)
    with pytest.raises(CorruptFile, match="leads to 3"):
        parse_object_graph(message.SerializeToString(), "here")


def test_a_checkpoint_by_names_has_none(tmp_path: Path) -> None:
    assert read_object_graph(Catalog("", tmp_path / "model.ckpt", {}, (), ())) is None
