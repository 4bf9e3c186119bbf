"""`--format metagraph`: what Cloud ML's users load is what was trained."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import NotServable
from exporter.graph.inference_graph import Asset, InferenceGraph
from exporter.options import DataMode, ExportFormat, ExportRequest, Updates, Verify
from exporter.pipeline.full import export, plan
from exporter.verify.version_files import verify_published
from serving.server import ModelServer
from tests.support.commands import Ran, export_model
from tests.support.copy_lives import URL
from tests.support.directory_store import reached
from tests.support.machines import pushed
from tests.support.trained import Trained, embedding, train

v1 = tf.compat.v1
IDS = np.arange(7, dtype=np.int64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(
        embedding(7, 2), {"ids": IDS}, tmp_path_factory.mktemp("trained") / "model.ckpt-12", sharded=True
    )


def request(trained: Trained, out: Path, format_: ExportFormat, **options: object) -> ExportRequest:
    model = embedding(7, 2)
    return ExportRequest(trained.prefix, out, model=model, format=format_, **options)  # type: ignore[arg-type]


def answers(version: Path) -> dict[str, np.ndarray]:
    """As a reader of Cloud ML's format goes about it: the graph, its Saver, its collections."""
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        saver = v1.train.import_meta_graph(str(version / "export.meta"))
        saver.restore(session, str(version / "export"))
        inputs, outputs = (json.loads(v1.get_collection(name)[0]) for name in ("inputs", "outputs"))
        return session.run(outputs, {inputs["ids"]: IDS})  # type: ignore[no-any-return]


@pytest.mark.parametrize("format_", [ExportFormat.METAGRAPH, ExportFormat.BOTH])
@pytest.mark.parametrize("data", [DataMode.AUTO, DataMode.COMPACT])
def test_the_pair_gives_the_trainer_s_numbers(
    trained: Trained, tmp_path: Path, format_: ExportFormat, data: DataMode
) -> None:
    version = export(request(trained, tmp_path, format_, data=data, verify=Verify.OUTPUTS)).published.path
    for name, value in answers(version).items():
        np.testing.assert_array_equal(value, trained.answers[name])
    both = format_ is ExportFormat.BOTH
    assert (version / "saved_model.pb").exists() == (version / "variables").exists() == both
    verify_published(version)


@pytest.mark.parametrize(
    ("format_", "following"),
    [("metagraph", "export-model inspect"), ("both", "serve-model run"), ("saved_model", "serve-model run")],
)
def test_what_is_printed_as_next_works(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, following: str
) -> None:
    pair = export(request(trained, tmp_path / "a", ExportFormat.METAGRAPH)).published.path
    ran = export_model("--ckpt-dir", pair / "export", "--out", tmp_path / "m", "--format", format_)
    works(ran, following)
    with reached(tmp_path / "store", monkeypatch):
        pushed(tmp_path / "m", URL)
        works(export_model("pull", URL, tmp_path / "copy"), following)


def works(ran: Ran, following: str) -> None:
    """The command that `ran` printed as the next begins with `following`, and works when typed."""
    (line,) = re.findall("(?m)^next +(.*)", ran.out)
    assert line.startswith(following)
    program, *arguments = shlex.split(line)
    if program == "export-model":
        assert export_model(*arguments).code == 0
    else:
        with ModelServer(arguments[1]) as server:
            server.wait_available(60)


def test_the_pair_shares_its_shards(trained: Trained, tmp_path: Path) -> None:
    version = export(request(trained, tmp_path, ExportFormat.BOTH)).published.path
    shards = sorted(version.glob("export.data-*"))
    assert len(shards) == 2
    for shard in shards:
        assert shard.samefile(version / "variables" / shard.name.replace("export", "variables"))


def test_the_pair_is_a_source_again(trained: Trained, tmp_path: Path) -> None:
    """Its collections tell what to serve."""
    version = export(request(trained, tmp_path / "a", ExportFormat.METAGRAPH)).published.path
    again = export_model(
        "--ckpt-dir", version / "export", "--out", tmp_path / "b", "--verify", "outputs", "--json"
    )
    assert again.code == 0, again.err
    assert again.document["max_errors"] == {"serving_default/rows": 0.0, "serving_default/scores": 0.0}


def test_the_command_line(trained: Trained, tmp_path: Path) -> None:
    graph = export(request(trained, tmp_path / "a", ExportFormat.SAVED_MODEL)).published.path
    ran = export_model(
        "--ckpt-dir", trained.prefix, "--model", graph, "--out", tmp_path / "b", "--format", "both", "--json"
    )
    assert ran.code == 0, ran.err
    assert Path(ran.document["path"], "export.meta").exists()


def test_only_a_saved_model_takes_deltas(trained: Trained, tmp_path: Path) -> None:
    from exporter.errors import UsageError

    with pytest.raises(UsageError, match="only a SavedModel takes deltas"):
        plan(request(trained, tmp_path, ExportFormat.BOTH, updates=Updates()))


def test_what_the_pair_has_no_place_for(trained: Trained, tmp_path: Path) -> None:
    from msgspec.structs import replace

    from exporter.bundle.saved_model_writer import write_pair

    planned = plan(request(trained, tmp_path, ExportFormat.METAGRAPH))
    files: InferenceGraph = replace(planned.graph, assets=(Asset("words", tmp_path / "words.txt"),))
    with pytest.raises(NotServable, match=r"words\.txt"):
        write_pair(files, planned.mapping, tmp_path)
    planned.graph.meta_graph.signature_def["other"].CopyFrom(
        planned.graph.meta_graph.signature_def["serving_default"]
    )
    del planned.graph.meta_graph.signature_def["serving_default"]
    with pytest.raises(NotServable, match="the signature 'serving_default' alone"):
        write_pair(planned.graph, planned.mapping, tmp_path)
