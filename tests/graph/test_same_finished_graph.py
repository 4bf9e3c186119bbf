"""Deltas of a base whose graph is a SavedModel or a `.meta` file: another file may hold the same graph."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exporter.graph.graph_files import read_saved_model
from exporter.wire.protos import Proto
from tests.support.commands import Ran, export_model
from tests.support.edited_jobs import Job, begun, refused

__all__ = ["begun"]


@pytest.fixture(scope="module")
def finished(begun: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel of the job's graph, as a trainer may have left it."""
    directory = tmp_path_factory.mktemp("finished")
    job = begun.copy(directory / "job")
    ran = job.program("--out", "plain")
    assert ran.returncode == 0, ran.stderr
    return job.directory


class Finished:
    """A directory with a trainer's checkpoints and SavedModel, `model/` to be published."""

    def __init__(self, directory: Path) -> None:
        self.job = Job(directory)
        self.saved_model = directory / "plain/10"

    def export(self, model: Path | None, *options: object) -> Ran:
        named = () if model is None else ("--model", model)
        where = ("--ckpt-dir", self.job.directory / "train", "--out", self.job.directory / "served")
        return export_model(*where, *named, "--incr", "--json", *options)

    def copy(self, name: str) -> Path:
        copied = self.job.directory / name
        shutil.copytree(self.saved_model, copied)
        return copied


@pytest.fixture
def source(finished: Path, tmp_path: Path) -> Finished:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    source = Finished(tmp_path)
    done = source.export(source.saved_model)
    assert done.code == 0, done.err
    source.job.save(20)
    return source


def edit(directory: Path, change: str) -> None:
    """Another program's file: of another TensorFlow, with its nodes in another order; or of another graph."""
    message = read_saved_model(directory)
    (graph,) = message.meta_graphs
    graph.meta_info_def.tensorflow_version = "1.2.3"
    nodes = [*reversed(graph.graph_def.node)]
    del graph.graph_def.node[:]
    graph.graph_def.node.extend(nodes)
    for node in graph.graph_def.node:
        if node.op == change:
            node.op = "Tanh"
    (directory / "saved_model.pb").write_bytes(message.SerializeToString())


@pytest.mark.landing
def test_the_same_saved_model_elsewhere(source: Finished) -> None:
    moved = source.copy("moved")
    shutil.rmtree(source.saved_model)
    assert source.export(moved).document["position"] == 20
    (moved / "assets/words.txt").write_text("c\nb\na\n")
    source.job.save(30)
    refused(source.export(moved), "words.txt has changed")
    assert source.export(source.saved_model).code == 2


def test_another_file_of_the_same_graph(source: Finished) -> None:
    other = source.copy("other")
    edit(other, "")
    assert source.export(other).code == 0
    source.job.save(30)
    assert source.export(other).document["position"] == 30
    (other / "assets/words.txt").write_text("c\nb\na\n")
    source.job.save(40)
    refused(source.export(other), "words.txt has changed")


def test_another_graph(source: Finished) -> None:
    other = source.copy("other")
    edit(other, "Sigmoid")
    refused(source.export(other), "holds another inference graph")
    assert source.export(other, "--new-base=if-needed").document["position"] == 20
    source.job.save(30)
    assert source.export(other).document["position"] == 30
    refused(source.export(source.saved_model), "holds another inference graph")


def test_signatures_need_not_be_given_again(source: Finished) -> None:
    signatures = source.job.directory / "signatures.json"
    graph: Proto = read_saved_model(source.saved_model).meta_graphs[0]
    named = graph.signature_def["serving_default"]
    inputs = {name: info.name for name, info in named.inputs.items()}
    outputs = {name: info.name for name, info in named.outputs.items()}
    signature = {"inputs": inputs, "outputs": outputs}
    text = {"serving_default": signature, "more": signature}
    signatures.write_text(json.dumps(text))
    other = source.copy("other")
    edit(other, "")
    given = ("--signatures", signatures)
    begun = source.export(other, *given, "--new-base=if-needed")
    assert begun.code == 0, begun.err
    source.job.save(30)
    refused(
        source.export(source.saved_model, "--signatures", write_other(signatures, text)), "--signatures was"
    )
    assert source.export(source.saved_model).document["position"] == 30


def write_other(path: Path, text: dict[str, object]) -> Path:
    other = path.with_name("other.json")
    other.write_text(json.dumps({"serving_default": text["serving_default"]}))
    return other


def test_a_meta_file_beside_the_checkpoint(source: Finished) -> None:
    train = source.job.directory / "train"
    (graph,) = read_saved_model(source.saved_model).meta_graphs
    shutil.copy(source.job.vocabulary, train)
    (train / "model.ckpt-20.meta").write_bytes(graph.SerializeToString())
    begun = source.export(None, "--new-base=if-needed", "--out", source.job.directory / "fresh")
    assert begun.code == 0, begun.err
    source.job.save(30)  # its .meta is not written yet
    export = ("--out", source.job.directory / "fresh")
    assert source.export(None, *export).document["position"] == 30
    source.job.save(40)
    for node in graph.graph_def.node:
        node.op = "Tanh" if node.op == "Sigmoid" else node.op
    (train / "model.ckpt-40.meta").write_bytes(graph.SerializeToString())
    refused(source.export(None, *export), "holds another inference graph")
