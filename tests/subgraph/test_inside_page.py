"""The page on what runs inside a server names every operation of a real base."""

from __future__ import annotations

import re
from pathlib import Path

from exporter.wire.protos import message_class
from tests.support.project import ROOT
from tests.support.updatable import updatable_model


def test_the_page_names_every_operation(tmp_path: Path) -> None:
    model = updatable_model(tmp_path, digest=True, stamp=True)
    saved = message_class("SavedModel")()
    saved.ParseFromString((model.version / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    functions = [node for function in graph.library.function for node in function.node_def]
    own = [node for node in graph.node if node.name.startswith("incremental")]
    page = (ROOT / "docs/servers.md").read_text().partition("### Its operations")[2]
    named = set(re.findall(r"`(\w+)`", page))
    assert len(functions) > 1_000
    assert sorted({node.op for node in [*own, *functions]} - named) == []
