"""Estimators' model directories: exported, served, equal to what the Estimators' own exports answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import MissingAsset, NotServable, TrainingModeServed
from exporter.options import DataMode, ExportRequest, Verify
from exporter.pipeline.full import Exported, export, plan
from exporter.wire.protos import message_class
from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import ServerOptions
from tests.support import estimators
from tests.support.commands import export_model
from tests.support.estimators import EXAMPLES, answer
from tests.support.guide_pages import Page
from tests.support.once import once_a_run

NUMBERS = {"atol": 1e-5, "rtol": 0}
WAIT_SECONDS = 120.0


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wide_deep`, `regressor` and `custom`; never change them."""
    return once_a_run(tmp_path_factory, "estimator-model-dirs", estimators.unpack)


def signatures_file(directory: Path, signatures: dict[str, Any]) -> Path:
    path = directory / "signatures.json"
    path.write_text(json.dumps(signatures))
    return path


@contextmanager
def served(done: Exported) -> Iterator[ModelClient]:
    with ModelServer(done.published.path.parent, options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(WAIT_SECONDS)
        name = done.published.path.parent.name
        with ModelClient(server.address, name, deadline_s=WAIT_SECONDS) as client:
            yield client


def examples() -> Any:
    """What a Classify or Regress request carries."""
    given = message_class("serving.Input")()
    for serialized in EXAMPLES:
        given.example_list.examples.add().ParseFromString(serialized)
    return given


def check_classify(client: ModelClient, model: str, signature: str) -> None:
    expected = answer(model, signature)
    rows = client.classify(examples(), signature=signature).examples
    assert [[label for label, _ in row] for row in rows] == expected["classes"].tolist()
    np.testing.assert_allclose([[score for _, score in row] for row in rows], expected["scores"], **NUMBERS)


def check_regress(client: ModelClient, model: str, signature: str) -> None:
    values = client.regress(examples(), signature=signature).values
    np.testing.assert_allclose(values, answer(model, signature)["outputs"].ravel(), **NUMBERS)


def check_predict(client: ModelClient, model: str, signature: str) -> None:
    """Every output is there, also strings and integers, which are equal."""
    expected = answer(model, signature)
    found = client.predict({"examples": np.array(EXAMPLES, object)}, signature=signature).outputs
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(found[name], value, **NUMBERS)
        else:
            np.testing.assert_array_equal(found[name].astype(value.dtype), value)


def test_features_that_a_dataset_parsed(model_dirs: Path, tmp_path: Path) -> None:
    """Columns of every usual kind, tables in parts; a parser takes the place of the input_fn."""
    source = model_dirs / "wide_deep"
    file = signatures_file(tmp_path, estimators.WIDE_DEEP)
    done = export(ExportRequest(source, tmp_path / "wide", signatures=file, data=DataMode.LINK))
    assert done.plan.catalog.family == "Estimator, name-based"
    assert done.published.version == 40
    assert [path.name for path in (done.published.path / "assets").iterdir()] == ["words.txt"]
    nodes = done.plan.graph.meta_graph.graph_def.node
    assert not [node.name for node in nodes if "Iterator" in node.op or "Apply" in node.op]
    with served(done) as client:
        check_classify(client, "wide_deep", "serving_default")
        check_predict(client, "wide_deep", "predict")


def test_the_signatures_of_the_guide(model_dirs: Path, tmp_path: Path) -> None:
    """What the guide shows is said of this very graph."""
    (text,) = [block.text for block in Page("docs/from/estimator.md").blocks if block.language == "json"]
    file = signatures_file(tmp_path, json.loads(text))
    planned = plan(ExportRequest(model_dirs / "wide_deep", tmp_path, signatures=file))
    signatures = planned.graph.meta_graph.signature_def
    assert {name: [*signatures[name].inputs] for name in signatures} == {
        "serving_default": ["inputs"],
        "predict": ["examples"],
    }
    assert json.loads(text)["serving_default"] == estimators.WIDE_DEEP["serving_default"]


def test_examples_that_the_graph_parses_itself(model_dirs: Path, tmp_path: Path) -> None:
    file = signatures_file(tmp_path, estimators.REGRESSOR)
    done = export(ExportRequest(model_dirs / "regressor", tmp_path / "regressor", signatures=file))
    assert done.plan.catalog.family == "Estimator, name-based"
    with served(done) as client:
        check_regress(client, "regressor", "serving_default")
        check_predict(client, "regressor", "predict")


def test_a_builder_for_a_model_fn(model_dirs: Path, tmp_path: Path) -> None:
    model = f"{estimators.__file__}:custom"
    done = export(ExportRequest(model_dirs / "custom", tmp_path / "custom", model=model))
    with served(done) as client:
        check_classify(client, "custom", "serving_default")
        check_regress(client, "custom", "value")
        check_predict(client, "custom", "raw")


def test_a_builder_for_a_canned_estimator(model_dirs: Path, tmp_path: Path) -> None:
    model = f"{estimators.__file__}:regressor"
    done = export(ExportRequest(model_dirs / "regressor", tmp_path / "regressor", model=model))
    with served(done) as client:
        check_regress(client, "regressor", "serving_default")


def test_answers_are_compared_before_publishing(model_dirs: Path, tmp_path: Path) -> None:
    """The source graph is the training graph itself, with the parser in it."""
    file = signatures_file(tmp_path, estimators.WIDE_DEEP)
    probes = tmp_path / "probes.jsonl"
    features = {"clicks": [0.5, -1.0], "country": "de", "device": "watch", "words": ["red", "unknown"]}
    requests = [
        {"examples": [features]},
        {"signature_name": "predict", "instances": [{"b64": estimators.ANSWERS["examples"][0]}]},
    ]
    probes.write_text("\n".join(map(json.dumps, requests)))
    done = export(
        ExportRequest(
            model_dirs / "wide_deep",
            tmp_path / "out",
            signatures=file,
            verify=Verify.OUTPUTS,
            verify_inputs=probes,
        )
    )
    assert {found.max_error for found in done.differences} == {0.0}
    assert len(done.differences) == 8


def test_what_a_signatures_file_can_name(model_dirs: Path) -> None:
    """The tensors that training is given are shown, and all others if asked for."""
    meta = model_dirs / "wide_deep/model.ckpt-40.meta"
    shown = export_model("inspect", meta).out.splitlines()
    batches = [line.split(maxsplit=1)[1].partition(" ->")[0] for line in shown if line.startswith("batch")]
    assert batches[1:5] == [
        "IteratorGetNext:1 float32[?,2]",
        "IteratorGetNext:2 string[?,1]",
        "IteratorGetNext:3 string[?,1]",
        "IteratorGetNext:4 variant[...]",
    ]
    assert batches[-2:] == ["DeserializeSparse:1 string[?]", "DeserializeSparse:2 int64[2]"]
    likely = [line.split()[1] for line in shown if line.startswith("output?")]
    assert likely[:2] == ["head/predictions/probabilities:0", "head/predictions/class_ids:0"]
    assert len(likely) <= 10, "and no others"
    listed = export_model("inspect", meta, "--tensors").out
    assert re.search(r"^ head/predictions/probabilities:0 +float32 +\[\?,3\]", listed, re.MULTILINE)
    document = export_model("inspect", meta, "--tensors", "--json").document
    assert document["batches"][1]["shape"] == [-1, 2]
    assert {tensor["tensor"] for tensor in document["tensors"]} >= {"add:0", "DeserializeSparse:2"}


def test_a_feature_that_is_left_out(model_dirs: Path, tmp_path: Path) -> None:
    signatures = json.loads(json.dumps(estimators.WIDE_DEEP))
    del signatures["serving_default"]["examples"]["country"]
    with pytest.raises(NotServable, match="IteratorGetNext"):
        plan(
            ExportRequest(
                model_dirs / "wide_deep", tmp_path, signatures=signatures_file(tmp_path, signatures)
            )
        )


def test_dropout_in_a_training_graph_is_refused(model_dirs: Path, tmp_path: Path) -> None:
    signatures = {
        "serving_default": {
            "examples": {"clicks": "IteratorGetNext:0", "ids": {"sparse": "DeserializeSparse"}},
            "outputs": {"scores": "scores"},
        }
    }
    request = ExportRequest(model_dirs / "custom", tmp_path, signatures=signatures_file(tmp_path, signatures))
    with pytest.raises(TrainingModeServed, match="dropout"):
        plan(request)


def test_a_vocabulary_that_is_gone(model_dirs: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (model_dirs / "wide_deep").glob("model.ckpt-40*"):
        (moved / path.name).symlink_to(path)
    file = signatures_file(tmp_path, estimators.WIDE_DEEP)
    with pytest.raises(MissingAsset, match=r"words\.txt"):
        plan(ExportRequest(moved, tmp_path / "out", signatures=file))
