"""Canned Estimators of TensorFlow 1.15 and 2.15 with input functions of one batch size: any is served."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from exporter.graph.load import GraphRequest, load_graph
from tests.support.environments import clean_environ, python_of
from tests.support.graph_runs import serve

pytestmark = pytest.mark.landing
MODELS = ("linear", "dnn", "both", "regressor")


@pytest.fixture(scope="session", params=["1.15.5", "2.15.1"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = python_of(request.param)
    directory = tmp_path_factory.mktemp("estimators")
    program = Path(__file__).parents[1] / "support/fixed_batch_estimators.py"
    subprocess.run([python, program, directory], check=True, env=clean_environ(), capture_output=True)
    return directory


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pipeline", ["dataset", "numpy"])
def test_a_canned_estimator_answers_any_number_of_rows(trained: Path, pipeline: str, model: str) -> None:
    check(trained / pipeline / model)


def check(directory: Path) -> None:
    said = json.loads((directory / "answers.json").read_text())
    (meta,) = directory.glob("model.ckpt-20.meta")
    graph_def = tf.compat.v1.MetaGraphDef.FromString(meta.read_bytes()).graph_def
    ending = {"probabilities": "predictions/probabilities", "predictions": "dnn/logits/BiasAdd"}[
        said["output"]
    ]
    (output,) = (node.name for node in graph_def.node if node.name.endswith(ending))
    reached = inputs_of(graph_def, output, set(said["names"].values()))
    inputs = {name: tensor for name, tensor in said["names"].items() if tensor in reached}
    graph = load_graph(GraphRequest(model=str(meta), inputs=inputs, outputs={"found": output}))
    assert any("as an experiment found" in note for note in graph.notes), graph.notes
    rows = {name: np.array(values) for name, values in said["rows"].items()}
    kinds = {"age": np.float32, "word": object, "ids": np.int64, "other": np.int64}
    reader = tf.train.load_checkpoint(str(meta).removesuffix(".meta"))
    for count in (1, 3, 16, 33):
        feeds = {name: rows[name][:count].astype(kinds[name]) for name in inputs}
        served = serve(graph, reader.get_tensor, feeds)["found"]
        np.testing.assert_allclose(served, np.array(said["answers"][:count]), atol=1e-5)


def inputs_of(graph_def: tf.compat.v1.GraphDef, output: str, given: set[str]) -> set[str]:
    nodes = {node.name: node for node in graph_def.node}
    pending, seen, found = [output], set[str](), set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in nodes[name].input:
            tensor = text if ":" in text else f"{text}:0"
            if tensor in given:
                found.add(tensor)
            elif not text.startswith("^"):
                pending.append(tensor.partition(":")[0])
    return found
