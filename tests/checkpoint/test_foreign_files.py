"""Files as they lie in other people's repositories: exported and served as stock TensorFlow answers them."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from exporter import ExportRequest, Updates, export
from exporter.errors import CheckpointError, CheckpointNotFound, MissingTensors, NotServable
from exporter.options import Verify
from exporter.pipeline.inspected import BundleView, CheckpointView
from exporter.pipeline.inspection import inspect
from tests.support import foreign_models
from tests.support.bundles import compress_index
from tests.support.commands import export_model
from tests.support.foreign_models import WORDS, Maker
from tests.support.graph_runs import train
from tests.support.trained import answers_eagerly, answers_in_session, assert_same, catalog_values

v1 = tf.compat.v1


def test_a_checkpoint_whose_index_is_compressed(tmp_path: Path) -> None:
    def build(v1: Any) -> None:
        x = v1.placeholder(tf.float32, [None, 5], name="x")
        for layer in range(30):
            kernel = v1.get_variable(f"layer_with_a_long_name_{layer}/kernel", [5, 5])
            x = tf.tanh(tf.matmul(x, kernel))
        tf.identity(x, name="y")

    rows = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    trained = train(tmp_path, build)
    expected = {"y": trained.run("y:0", {"x:0": rows})}
    plain = Path(f"{trained.prefix}.index").read_bytes()
    compress_index(trained.prefix)
    assert len(Path(f"{trained.prefix}.index").read_bytes()) < len(plain)

    view = inspect(trained.prefix)
    assert isinstance(view, CheckpointView)
    assert view.catalog.tensors.keys() == catalog_values(view.catalog).keys()  # TensorFlow reads it, too
    request = ExportRequest(trained.prefix, tmp_path / "m", inputs={"x": "x"}, outputs={"y": "y"})
    assert_same(answers_in_session(export(request).published.path, {"x": rows}), expected)


@pytest.mark.landing
@pytest.mark.parametrize("updates", [None, Updates()], ids=["plain", "updatable"])
@pytest.mark.parametrize(
    "make",
    [
        foreign_models.tables,
        foreign_models.tables_in_calls,
        foreign_models.v1_tables,
        foreign_models.v1_table_and_reads,
        foreign_models.v1_tables_in_calls,
        foreign_models.fills_in_call,
        foreign_models.reads_file,
    ],
)
def test_tables_and_assets_of_saved_models(tmp_path: Path, make: Maker, updates: Updates | None) -> None:
    """Equal answers, also once the model lies elsewhere and the vocabulary is gone."""
    source = tmp_path / "source"
    make(source)
    expected = answers_in_session(source, {"words": WORDS})
    request = ExportRequest(source, tmp_path / "m", model=str(source), verify=Verify.OUTPUTS, updates=updates)
    version = export(request).published.path.name
    (tmp_path / "words.txt").unlink(missing_ok=True)
    shutil.rmtree(source)
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    assert_same(answers_in_session(tmp_path / "elsewhere" / version, {"words": WORDS}), expected)
    assert_same(answers_eagerly(tmp_path / "elsewhere" / version, {"words": WORDS}), expected)


def test_a_table_filled_in_calls_is_filled_whoever_calls_first(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.fills_in_call(source)
    expected = answers_in_session(source, {"words": WORDS})
    published = export(ExportRequest(source, tmp_path / "m", model=str(source))).published.path
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        meta = v1.saved_model.load(session, ["serve"], str(published))
        signature = meta.signature_def["serving_default"]
        call = session.make_callable(signature.outputs["y"].name, [signature.inputs["words"].name])
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(call, [WORDS] * 200))
    assert all(np.array_equal(answer, expected["y"]) for answer in answers)


def test_what_a_served_version_reads_can_be_exported_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.reads_file(source)
    expected = answers_in_session(source, {"words": WORDS})
    first = export(ExportRequest(source, tmp_path / "m", model=str(source))).published.path
    again = export(ExportRequest(first, tmp_path / "again", model=str(first))).published.path
    shutil.rmtree(tmp_path / "m")
    assert_same(answers_in_session(again, {"words": WORDS}), expected)


def test_a_table_in_a_function_that_nothing_fills_is_refused(tmp_path: Path) -> None:
    class Empty(foreign_models.Answering):
        def answer(self, words: Any) -> Any:
            table = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.float32, shared_name="empty")
            return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=words, default_value=-1.0)

    Empty().save(tmp_path / "source")
    with pytest.raises(NotServable, match="nothing in the graph fills table 'empty'"):
        export(ExportRequest(tmp_path / "source", tmp_path / "m", model=str(tmp_path / "source")))
    assert not (tmp_path / "m").exists() or not any((tmp_path / "m").glob("[0-9]*"))


ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize("as_text", [False, True], ids=["bytes", "text"])
@pytest.mark.parametrize("has_variables", [False, True], ids=["constants", "variables"])
def test_saved_models_of_either_spelling_with_and_without_variables(
    tmp_path: Path, as_text: bool, has_variables: bool
) -> None:
    source = tmp_path / "source"
    foreign_models.v1_model(source, as_text=as_text, has_variables=has_variables)
    view = inspect(source)
    assert isinstance(view, BundleView)
    assert set(view.signatures) == {"serving_default", "lookup"}
    for ckpt_dir in (source, source / "variables"):
        done = export(ExportRequest(ckpt_dir, tmp_path / "m", verify=Verify.OUTPUTS))
        for signature, feeds in (("serving_default", {"x": ROWS}), ("lookup", {"words": WORDS})):
            expected = answers_in_session(source, feeds, signature)
            assert_same(answers_in_session(done.published.path, feeds, signature), expected)
            assert_same(answers_eagerly(done.published.path, feeds, signature), expected)
    assert export_model("verify", tmp_path / "m").code == 0


def test_a_saved_model_that_lost_its_variables_is_not_one_without(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.v1_model(source)
    shutil.rmtree(source / "variables")
    with pytest.raises(MissingTensors, match="1 of 1 graph variables have no tensor"):
        export(ExportRequest(source, tmp_path / "m"))
    (source / "variables").mkdir()
    (source / "variables" / "variables.data-00000-of-00001").touch()
    with pytest.raises(CheckpointNotFound, match=r"variables"):
        export(ExportRequest(source, tmp_path / "m"))


def test_signatures_that_train_or_count_are_left_out_and_the_others_served(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.Trainer().save(
        source, serving_default="predict", train="train", count="count", log="predict_and_count"
    )
    expected = answers_in_session(source, {"x": ROWS})
    done = export(ExportRequest(source, tmp_path / "m", verify=Verify.OUTPUTS))
    assert set(done.plan.graph.meta_graph.signature_def) == {"serving_default", "log"}
    left_out, dropped = (
        [note for note in done.plan.notes if text in note] for text in ("left out", "no longer")
    )
    assert re.findall(r"^signature '(\w+)'", "\n".join(left_out), re.MULTILINE) == ["count", "train"]
    assert "changes 'kernel'" in left_out[1]
    assert len(dropped) == 1 and "'log' no longer changes 'requests'" in dropped[0]
    for signature in ("serving_default", "log"):
        assert_same(answers_in_session(done.published.path, {"x": ROWS}, signature), expected)


def test_a_v1_signature_that_waits_for_a_step_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.v1_model(source, trains=True)
    expected = answers_in_session(source, {"x": ROWS})
    done = export(ExportRequest(source, tmp_path / "m", verify=Verify.OUTPUTS))
    assert set(done.plan.graph.meta_graph.signature_def) == {"serving_default", "lookup"}
    notes = "\n".join(done.plan.notes)
    assert "signature 'fit' is left out: it changes 'kernel'" in notes
    assert "signature 'evaluate' is left out: placeholder 'labels'" in notes
    assert_same(answers_in_session(done.published.path, {"x": ROWS}), expected)


def test_a_training_function_alone_is_no_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign_models.Trainer().save(source, train="train")
    with pytest.raises(NotServable, match="no signature") as caught:
        export(ExportRequest(source, tmp_path / "m"))
    assert "'train': it changes 'kernel'" in caught.value.cause
    assert not list((tmp_path / "m").glob("[0-9]*"))


def test_a_builders_training_function_is_left_out(tmp_path: Path) -> None:
    def build() -> Any:
        trainer = foreign_models.Trainer()
        trainer.signatures = {"serving_default": trainer.predict, "train": trainer.train}
        return trainer

    tf.train.Checkpoint(model=foreign_models.Trainer()).write(str(tmp_path / "ckpt"))
    done = export(ExportRequest(tmp_path / "ckpt", tmp_path / "m", model=build))
    assert set(done.plan.graph.meta_graph.signature_def) == {"serving_default"}
    assert "signature 'train' is left out" in "\n".join(done.plan.notes)


def test_a_keras_file_that_is_hdf5(tmp_path: Path) -> None:
    """Keras wrote HDF5 under any name until 2.12, unless it was told another format."""
    import tf_keras

    layers = [tf_keras.layers.Input([2]), tf_keras.layers.Dense(3, "relu"), tf_keras.layers.Dense(2)]
    model = tf_keras.Sequential(layers)
    model.save(tmp_path / "model.h5")
    (tmp_path / "model.h5").rename(tmp_path / "model.keras")
    done = export(ExportRequest(tmp_path / "model.keras", tmp_path / "m", verify=Verify.OUTPUTS))
    (signature,) = done.plan.graph.meta_graph.signature_def.values()
    (name,), (output,) = signature.inputs, signature.outputs
    answers = answers_in_session(done.published.path, {name: ROWS})
    np.testing.assert_allclose(answers[output], model(ROWS).numpy(), rtol=1e-6)
    (tmp_path / "cut.keras").write_bytes(b"\x89HD")
    with pytest.raises(CheckpointError):
        inspect(tmp_path / "cut.keras")


@pytest.mark.landing
@pytest.mark.parametrize(
    "renamed",
    [
        {"conv1d_1": "conv1d_1_1", "dense_1": "dense_1_1"},  # a second model of one session
        {"conv1d_1": "conv1d_2", "conv1d_2": "conv1d_1"},  # names that are those of another layer
        {"lstm_1/lstm_cell": "lstm_1"},  # Keras 2.0
        {"lstm_1/lstm_cell": "lstm_1/lstm_cell_4"},
    ],
    ids=["second", "crossed", "old", "counted"],
)
def test_the_layer_that_owns_a_legacy_files_weight_decides(tmp_path: Path, renamed: dict[str, str]) -> None:
    import tf_keras
    from tf_keras import layers

    model = tf_keras.Sequential(
        [
            layers.Input([6, 4]),
            layers.Conv1D(4, 1, name="conv1d_1"),
            layers.Conv1D(4, 1, name="conv1d_2"),
            layers.LSTM(4, name="lstm_1"),
            layers.Dense(2, name="dense_1"),
        ]
    )
    assert_goes_by_layers(model, renamed, tmp_path)


@pytest.mark.landing
@pytest.mark.parametrize(
    "renamed",
    [
        {},
        {
            "both_1/forward_rnn/lstm_cell": "both_1/forward_rnn",
            "both_1/backward_rnn/lstm_cell": "both_1/backward_rnn",
        },
        {"both_1/forward_rnn/lstm_cell": "both_1/forward_rnn/lstm_cell_7", "both_2": "both_1"},
        {"both_1": "both_2", "both_2": "both_1"},
    ],
    ids=["same", "old", "counted", "crossed"],
)
def test_each_direction_of_a_bidirectional_layer_keeps_its_weights(
    tmp_path: Path, renamed: dict[str, str]
) -> None:
    import tf_keras
    from tf_keras import layers

    model = tf_keras.Sequential(
        [
            layers.Input([6, 8]),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, name="rnn"), name="both_1"),
            layers.Bidirectional(layers.LSTM(4, name="rnn"), name="both_2"),
        ]
    )
    assert_goes_by_layers(model, renamed, tmp_path)


def assert_goes_by_layers(model: Any, renamed: dict[str, str], directory: Path) -> None:
    """What is served of the model's legacy file, whose weights are renamed, answers as the model."""
    import tf_keras

    path = directory / "model.h5"
    model.save(path)
    rename_weights(path, renamed)
    x = np.random.default_rng(1).normal(size=(3, *model.input_shape[1:])).astype(np.float32)
    expected = tf_keras.models.load_model(path)(x).numpy()  # Keras goes by layers, too
    np.testing.assert_array_equal(expected, model(x).numpy())
    done = export(ExportRequest(path, directory / "m"))
    (signature,) = done.plan.graph.meta_graph.signature_def.values()
    (name,), (output,) = signature.inputs, signature.outputs
    answers = answers_in_session(done.published.path, {name: x})
    np.testing.assert_allclose(answers[output], expected, rtol=1e-5)


def rename_weights(path: Path, renamed: dict[str, str]) -> None:
    """Call the variables of layers otherwise, as another release of Keras would have done."""
    with h5py.File(path, "a") as file:
        for layer in file["model_weights"].values():
            names = [
                name if isinstance(name, str) else name.decode()
                for name in layer.attrs.get("weight_names", [])
            ]
            values = [layer[name][()] for name in names]
            for name in names:
                del layer[name]
            for at, name in enumerate(names):
                old = next((old for old in renamed if name.startswith(f"{old}/")), None)
                names[at] = name if old is None else renamed[old] + name[len(old) :]
                layer.create_dataset(names[at], data=values[at])
            layer.attrs["weight_names"] = [name.encode() for name in names]
