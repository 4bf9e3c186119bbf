"""AutoDist's checkpoints and training SavedModels: served clean, and kept for training beside that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import MissingTensors, NotServable, ShapeMismatch, UnsupportedFormat, UsageError
from exporter.graph.graph_files import read_saved_model
from exporter.options import DataMode, ExportFormat, ExportRequest, Updates, Verify
from exporter.pipeline.full import Exported, export, plan
from exporter.pipeline.inspected import BundleView
from exporter.pipeline.inspection import inspect
from exporter.wire import protos
from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import ServerOptions
from tests.support import autodist_trainer
from tests.support.autodist_trainer import BATCH, LABELS, TAG, TEXTS
from tests.support.commands import export_model
from tests.support.family_server import FamilyServer
from tests.support.once import once_a_run

NUMBERS = {"atol": 1e-5, "rtol": 0}
WAIT_SECONDS = 120.0
SLOTS = {"table/Adam", "hidden/bias/Adam_1", "beta1_power", "global_step"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`checkpoints`, `saved_model` and `expected.npz`; never change them."""
    return once_a_run(tmp_path_factory, "autodist", autodist_trainer.train)


@pytest.fixture(scope="module")
def both(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The training SavedModel, published with a serving graph and its own."""
    out = tmp_path_factory.mktemp("models") / "both"
    return export(ExportRequest(trained / "saved_model", out, train_tag=TAG, data=DataMode.LINK))


def expected(trained: Path, name: str) -> Any:
    with np.load(trained / "expected.npz") as arrays:
        return arrays[name]


def check_served(done: Exported, trained: Path) -> None:
    """A server's answers are the trainer's own."""
    base = done.published.path.parent
    with ModelServer(base, options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(WAIT_SECONDS)
        with ModelClient(server.address, base.name, deadline_s=WAIT_SECONDS) as client:
            found = client.predict({"ids": BATCH, "words": TEXTS}).outputs["scores"]
    np.testing.assert_allclose(found, expected(trained, "scores"), **NUMBERS)


def bundle_names(done: Exported) -> set[str]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(done.published.path / "variables/variables"))
    return {*reader.get_variable_to_shape_map()}


@contextmanager
def loaded(path: Path, tag: str) -> Iterator[tuple[Any, Any]]:
    """A session with the graph under a tag, as one who trains on loads it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        yield session, v1.saved_model.load(session, [tag], str(path))


def feeds(signature: Any) -> dict[str, Any]:
    values = {"ids": BATCH, "words": TEXTS, "labels": LABELS}
    return {info.name: values[alias] for alias, info in signature.inputs.items()}


# --- both are sources ---------------------------------------------------------------------------------------


def test_a_checkpoint_and_a_builder(trained: Path, tmp_path: Path) -> None:
    """Cut tables are put together by ranges of rows, which is how AutoDist looks them up."""
    model = f"{autodist_trainer.__file__}:serving"
    request = ExportRequest(
        trained / "checkpoints",
        tmp_path / "builder",
        model=model,
        model_args={"directory": str(trained)},
        verify=Verify.OUTPUTS,
        data=DataMode.LINK,
    )
    done = export(request)
    assert done.plan.catalog.family == "AutoDist, name-based"
    assert done.published.version == autodist_trainer.STEPS
    assert {len(item.tensor.slices) for item in done.plan.mapping.sources} == {0, 2, 3}
    check_served(done, trained)


def test_a_checkpoint_and_the_saved_model_s_graph(trained: Path, tmp_path: Path) -> None:
    request = ExportRequest(
        trained / "checkpoints", tmp_path / "graph", model=str(trained / "saved_model"), data=DataMode.LINK
    )
    check_served(export(request), trained)


def test_the_training_saved_model_alone(trained: Path, tmp_path: Path) -> None:
    done = export(ExportRequest(trained / "saved_model", tmp_path / "clean", data=DataMode.LINK))
    assert done.plan.catalog.family == "SavedModel's variables, name-based"
    assert done.published.version == autodist_trainer.STEPS
    assert sorted(done.plan.graph.meta_graph.signature_def) == ["evaluate", "serving_default"]
    notes = "\n".join(done.plan.notes)
    assert "signature 'train' is left out" in notes
    assert "signature 'forgotten' is left out: placeholder 'labels'" in notes
    assert not bundle_names(done) & SLOTS
    assert not [node for node in done.plan.graph.meta_graph.graph_def.node if "Apply" in node.op]
    assert [path.name for path in (done.published.path / "assets").iterdir()] == ["words.txt"]
    check_served(done, trained)


def test_an_object_based_saved_model_alone(tmp_path: Path) -> None:
    """Any SavedModel brings its graph along."""
    import tensorflow as tf

    model = tf.Module()
    model.scale = tf.Variable([2.0, 3.0], name="scale")
    call = tf.function(
        lambda x: {"y": x * model.scale}, input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")]
    )
    tf.saved_model.save(model, str(tmp_path / "saved"), signatures=call)
    done = export(ExportRequest(tmp_path / "saved", tmp_path / "out", verify=Verify.OUTPUTS))
    assert [(source.key, source.via) for source in done.plan.mapping.sources] == [("scale", "object")]
    assert done.plan.graph.source == str(tmp_path / "saved")


@pytest.mark.parametrize("outputs", [{}, {"scores": "scores"}])
def test_the_transformed_graph_is_refused(trained: Path, tmp_path: Path, outputs: dict[str, str]) -> None:
    with pytest.raises(NotServable, match="AutoDist") as caught:
        plan(ExportRequest(trained / "checkpoints", tmp_path, outputs=outputs))
    assert "--model" in caught.value.hint


def test_no_signature_is_left(trained: Path, tmp_path: Path) -> None:
    model = read_saved_model(trained / "saved_model")
    for name in ("serving_default", "evaluate"):
        del model.meta_graphs[0].signature_def[name]
    with pytest.raises(UsageError, match="no signature of") as caught:
        plan(ExportRequest(trained / "checkpoints", tmp_path, model=rewritten(trained, tmp_path, model)))
    assert "'train' is left out" in caught.value.cause
    assert "--output" in caught.value.hint
    tensors = {"inputs": {"ids": "ids", "words": "words"}, "outputs": {"scores": "scores"}}
    request = ExportRequest(
        trained / "checkpoints", tmp_path / "out", model=str(tmp_path / "rewritten"), **tensors
    )
    assert [*plan(request).graph.meta_graph.signature_def] == ["serving_default"]


def rewritten(trained: Path, directory: Path, model: Any) -> str:
    """A SavedModel of another graph with the variables and assets of AutoDist's."""
    target = directory / "rewritten"
    target.mkdir()
    for name in ("variables", "assets"):
        (target / name).symlink_to(trained / "saved_model" / name)
    (target / "saved_model.pb").write_bytes(model.SerializeToString())
    return str(target)


# --- the training graph beside the serving one --------------------------------------------------------------


def test_both_graphs_share_the_variables(both: Exported, trained: Path) -> None:
    assert bundle_names(both) >= SLOTS
    assert both.variables.bytes_linked > 0
    assert both.variables.bytes_copied == both.variables.bytes_rewritten == 0
    tags = [[*graph.meta_info_def.tags] for graph in read_saved_model(both.published.path).meta_graphs]
    assert tags == [["serve"], [TAG]]
    assert [path.name for path in (both.published.path / "assets").iterdir()] == ["words.txt"]
    view = inspect(both.published.path)
    assert isinstance(view, BundleView)
    assert [*view.signatures] == ["evaluate", "serving_default"]


def test_a_server_sees_the_serving_graph_alone(both: Exported, trained: Path, server: FamilyServer) -> None:
    import tensorflow as tf

    found = server.answers(both.published.path, {"ids": BATCH, "words": TEXTS})
    np.testing.assert_allclose(found["scores"], expected(trained, "scores"), **NUMBERS)
    eager = tf.saved_model.load(str(both.published.path), tags=["serve"])
    assert sorted(eager.signatures) == ["evaluate", "serving_default"]


def test_training_goes_on_where_it_stopped(both: Exported, trained: Path) -> None:
    import tensorflow as tf

    with loaded(both.published.path, TAG) as (session, meta_graph):
        graph = session.graph
        signature = meta_graph.signature_def["evaluate"]
        loss = signature.outputs["loss"].name
        given = feeds(signature)
        first = session.run(loss, given)
        np.testing.assert_allclose(first, expected(trained, "loss"), **NUMBERS)
        served = meta_graph.signature_def["serving_default"]
        scores = session.run(served.outputs["scores"].name, feeds(served))
        np.testing.assert_allclose(scores, expected(trained, "scores"), **NUMBERS)
        reader = tf.train.load_checkpoint(str(trained / "checkpoints/model.ckpt-12"))
        for variable in graph.get_collection("variables"):
            value = reader.get_tensor(variable.op.name)
            np.testing.assert_array_equal(session.run(variable), value, err_msg=variable.op.name)
        (train_op,) = graph.get_collection("saved_model_train_op")
        for _ in range(20):
            session.run(train_op, given)
        assert session.run(loss, given) < first - 0.01
        assert session.run(graph.get_collection("global_step")[0]) == autodist_trainer.STEPS + 20


def test_a_serving_graph_of_other_values(trained: Path, tmp_path: Path) -> None:
    """Averages and casts are served under names of their own; training finds its own values."""
    request = ExportRequest(
        trained / "saved_model", tmp_path / "small", train_tag=TAG, casts=("table=bfloat16",)
    )
    done = export(request)
    assert {item.key for item in done.plan.mapping.sources if item.cast} == {"serve/table"}
    with loaded(done.published.path, TAG) as (session, meta_graph):
        signature = meta_graph.signature_def["evaluate"]
        loss = session.run(signature.outputs["loss"].name, feeds(signature))
    np.testing.assert_allclose(loss, expected(trained, "loss"), **NUMBERS)
    with loaded(done.published.path, "serve") as (session, meta_graph):
        signature = meta_graph.signature_def["serving_default"]
        scores = session.run(signature.outputs["scores"].name, feeds(signature))
    assert 0 < np.abs(scores - expected(trained, "scores")).max() < 0.02


def test_an_archive_serves_a_cast_and_keeps_the_value_for_training(trained: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(trained / "checkpoints/model.ckpt-12"))
    np.savez(
        tmp_path / "w.npz", **{name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    )
    model = str(trained / "saved_model")
    request = ExportRequest(
        tmp_path / "w.npz", tmp_path / "small", model=model, tag=TAG, train_tag=TAG, casts=("table=bfloat16",)
    )
    done = export(request)
    assert {item.key for item in done.plan.mapping.sources if item.tensor.name == "table"} == {
        "table",
        "serve/table",
    }
    with loaded(done.published.path, TAG) as (session, meta_graph):
        signature = meta_graph.signature_def["evaluate"]
        loss = session.run(signature.outputs["loss"].name, feeds(signature))
    np.testing.assert_allclose(loss, expected(trained, "loss"), **NUMBERS)


def test_other_vocabularies_of_one_name_stay_apart(trained: Path, tmp_path: Path) -> None:
    """The builder's file has the same name as the training graph's, and other words."""
    (tmp_path / "words.txt").write_text("e\nd\nc\nb\na\n")
    request = ExportRequest(
        trained / "saved_model",
        tmp_path / "out",
        model=f"{autodist_trainer.__file__}:serving",
        model_args={"directory": str(tmp_path)},
        train_tag=TAG,
    )
    done = export(request)
    assert len([*(done.published.path / "assets").iterdir()]) == 2
    with loaded(done.published.path, TAG) as (session, meta_graph):
        signature = meta_graph.signature_def["serving_default"]
        scores = session.run(signature.outputs["scores"].name, feeds(signature))
    np.testing.assert_allclose(scores, expected(trained, "scores"), **NUMBERS)
    with loaded(done.published.path, "serve") as (session, meta_graph):
        signature = meta_graph.signature_def["serving_default"]
        scores = session.run(signature.outputs["scores"].name, feeds(signature))
    assert np.abs(scores - expected(trained, "scores")).max() > 0.01


def test_what_the_command_says(trained: Path, tmp_path: Path) -> None:
    arguments = ("--ckpt-dir", trained / "saved_model", "--out", tmp_path / "m", "--train-tag", TAG)
    done = export_model(*map(str, arguments))
    assert done.code == 0, done.err
    assert "SavedModel's variables" in done.out
    assert f"graph 'train' of {trained / 'saved_model'}: 15 tensors" in done.out
    assert "4 by name" in done.out
    assert "signature 'train' is left out" in done.err


# --- what cannot be kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"train_tag": "serve"}, "serving graph's own"),
        ({"train_tag": "tune"}, "no graph of .* has the tag 'tune'"),
        ({"train_tag": TAG, "updates": Updates()}, "does not change"),
        ({"train_tag": TAG, "format": ExportFormat.METAGRAPH}, "does not change"),
    ],
)
def test_training_graphs_that_cannot_be_kept(
    trained: Path, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        plan(ExportRequest(trained / "saved_model", tmp_path, **options))


def test_no_saved_model_to_take_it_from(trained: Path, tmp_path: Path) -> None:
    request = ExportRequest(
        trained / "checkpoints",
        tmp_path,
        model=f"{autodist_trainer.__file__}:serving",
        model_args={"directory": str(trained)},
        train_tag=TAG,
    )
    with pytest.raises(UsageError, match="neither the model nor the checkpoint"):
        plan(request)


def test_a_checkpoint_without_slots(trained: Path, both: Exported, tmp_path: Path) -> None:
    clean = export(ExportRequest(trained / "saved_model", tmp_path / "clean"))
    request = ExportRequest(
        clean.published.path, tmp_path / "out", model=str(trained / "saved_model"), train_tag=TAG
    )
    with pytest.raises(MissingTensors, match="restores 11 tensors that variables lacks") as caught:
        plan(request)
    assert "table/Adam" in caught.value.cause


def test_a_training_graph_of_other_sizes(trained: Path, tmp_path: Path) -> None:
    model = read_saved_model(trained / "saved_model")
    model.meta_graphs.add().CopyFrom(model.meta_graphs[0])
    model.meta_graphs[1].meta_info_def.tags[:] = ["other"]
    for node in model.meta_graphs[1].graph_def.node:
        if node.name == "table/Adam":
            node.attr["shape"].shape.dim[0].size = 12
    source = rewritten(trained, tmp_path, model)
    request = ExportRequest(
        trained / "checkpoints", tmp_path / "out", model=source, tag=TAG, train_tag="other"
    )
    with pytest.raises(ShapeMismatch, match=r"table/Adam of the training graph"):
        plan(request)


def test_an_object_based_training_graph(trained: Path, tmp_path: Path) -> None:
    model = read_saved_model(trained / "saved_model")
    model.meta_graphs.add().CopyFrom(model.meta_graphs[0])
    model.meta_graphs[1].meta_info_def.tags[:] = ["other"]
    model.meta_graphs[1].object_graph_def.CopyFrom(protos.SavedObjectGraph())
    source = rewritten(trained, tmp_path, model)
    request = ExportRequest(
        trained / "checkpoints", tmp_path / "out", model=source, tag=TAG, train_tag="other"
    )
    with pytest.raises(UnsupportedFormat, match="object-based"):
        plan(request)
