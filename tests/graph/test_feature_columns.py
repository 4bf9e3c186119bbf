"""Signatures that fill static tables again in each call, as of Keras' feature columns, change nothing."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.functions import drop_refills
from exporter.graph.graph_files import read_saved_model
from exporter.options import ExportRequest, Isolation, Updates, Verify
from exporter.pipeline.full import export
from exporter.wire import protos

FIXTURES = Path(__file__).parents[1] / "fixtures/feature_columns"
ANSWERS: Any = json.loads((FIXTURES / "answers.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("columns")
    with tarfile.open(FIXTURES / "keras.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "keras"


def fills(meta_graph: Any) -> int:
    return sum(node.op == "LookupTableImportV2" for node in protos.all_nodes(meta_graph.graph_def))


@pytest.mark.landing
@pytest.mark.parametrize(
    "updates",
    [None, Updates(), Updates(isolation=Isolation.ROW)],
    ids=["plain", "takes deltas", "without the loop"],
)
def test_it_is_served_as_its_own_tensorflow_answers(
    updates: Updates | None, saved: Path, tmp_path: Path
) -> None:
    request = ExportRequest(saved, tmp_path / "model", updates=updates, verify=Verify.OUTPUTS)
    version = export(request).published.path
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        signature = v1.saved_model.load(session, ["serve"], str(version)).signature_def["serving_default"]
        feeds = {signature.inputs[name].name: value for name, value in ANSWERS["inputs"].items()}
        for _ in range(3):
            found = session.run(signature.outputs["score"].name, feeds)
            np.testing.assert_allclose(found, ANSWERS["outputs"]["score"], rtol=1e-6)


def test_tables_that_nothing_fills_at_load_are_not_forgotten(saved: Path) -> None:
    """Without an init op the calls are all that fills them: nothing is dropped."""
    (meta_graph,) = read_saved_model(saved).meta_graphs
    before = fills(meta_graph)
    drop_refills(meta_graph, None)
    assert fills(meta_graph) == before > 0


def test_a_function_that_gets_another_table_as_well_keeps_its_fills(saved: Path) -> None:
    (meta_graph,) = read_saved_model(saved).meta_graphs
    graph_def = meta_graph.graph_def
    (call,) = (n for n in graph_def.node if "signature_wrapper" in n.attr["f"].func.name)
    other = graph_def.node.add()
    other.CopyFrom(call)
    other.name = "other"
    tables = [at for at, text in enumerate(call.input) if text.startswith("hash_table")]
    mutable = graph_def.node.add(name="mutable", op="MutableHashTableV2")
    for at in tables:
        other.input[at] = mutable.name
    init_op = "NoOp"
    kept = fills(meta_graph)
    drop_refills(meta_graph, init_op)
    wrapped = call.attr["f"].func.name
    reached = reachable_fills(graph_def, wrapped)
    assert reached == len(tables) and fills(meta_graph) <= kept


def reachable_fills(graph_def: Any, name: str) -> int:
    library = {function.signature.name: function for function in graph_def.library.function}
    body = library[name].node_def
    inner = (n.attr["f"].func.name for n in body if n.op.endswith("PartitionedCall"))
    return sum(n.op == "LookupTableImportV2" for n in body) + sum(
        reachable_fills(graph_def, i) for i in inner
    )
