"""Values that a file of Keras never holds, as adapters that were merged: served as Keras loads the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter import export
from exporter.errors import ExportError
from tests.support.commands import export_model
from tests.support.trained import answers_eagerly

KERASES = pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
STEPS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 20, (4, 5))


def recurrent(kind: ModuleType, make: Callable[[Any], Any]) -> Any:
    x = kind.Input([5, 3], name="x", batch_size=4)
    made = make(kind.layers)
    return kind.Model(x, kind.layers.Dense(2, name="y")(made(x)))


RECURRENT: dict[str, Callable[[Any], Any]] = {
    "LSTM": lambda layers: layers.LSTM(6, stateful=True),
    "GRU": lambda layers: layers.GRU(6, stateful=True),
    "SimpleRNN": lambda layers: layers.SimpleRNN(6, stateful=True),
    "Bidirectional": lambda layers: layers.Bidirectional(layers.LSTM(6, stateful=True)),
    "stacked": lambda layers: layers.RNN([layers.LSTMCell(6), layers.GRUCell(5)], stateful=True),
}


@KERASES
@pytest.mark.parametrize(
    "layer", [name if name == "LSTM" else pytest.param(name, marks=pytest.mark.landing) for name in RECURRENT]
)
def test_a_stateful_layer_begins_each_request_anew(tmp_path: Path, kind: ModuleType, layer: str) -> None:
    model = recurrent(kind, RECURRENT[layer])
    expected = model.predict(STEPS, verbose=0)
    assert not np.allclose(model.predict(STEPS, verbose=0), expected)
    model.save(tmp_path / "m.keras")
    ran = export_model("--ckpt-dir", tmp_path / "m.keras", "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "stateful=True" in ran.err
    (found,) = answers_eagerly(tmp_path / "out/1", {"x": STEPS}).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@KERASES
@pytest.mark.parametrize("name", ["m.weights.h5", "m.h5"])
def test_a_builder_of_a_stateful_model_gets_a_files_weights(
    tmp_path: Path, kind: ModuleType, name: str
) -> None:
    model = recurrent(kind, RECURRENT["LSTM"])
    expected = model.predict(STEPS, verbose=0)
    (model.save_weights if "weights" in name else model.save)(tmp_path / name)
    done = export(tmp_path / name, tmp_path / "out", model=lambda: recurrent(kind, RECURRENT["LSTM"]))
    (found,) = answers_eagerly(done.published.path, {"x": STEPS}).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@KERASES
def test_a_state_in_an_object_checkpoint_is_training(tmp_path: Path, kind: ModuleType) -> None:
    model = recurrent(kind, RECURRENT["LSTM"])
    expected = model.predict(STEPS, verbose=0)
    tf.train.Checkpoint(model=model).save(str(tmp_path / "train/model.ckpt"))
    done = export(tmp_path / "train", tmp_path / "out", model=lambda: recurrent(kind, RECURRENT["LSTM"]))
    (found,) = answers_eagerly(done.published.path, {"x": STEPS}).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def adapted(mode: str | None, *, is_trained: bool = True) -> Any:
    """A model with an adapter in each kind of layer that takes one, also inside of another model."""
    layers = keras.layers
    ids = keras.Input([5], dtype="int64", name="ids")
    rows = layers.Embedding(20, 8, name="rows")(ids)
    inner = keras.Sequential([keras.Input([5, 8]), layers.Dense(8, name="inner_dense")], name="inner")
    mixed = layers.EinsumDense("abc,cd->abd", output_shape=(5, 6), name="mixed")(inner(rows))
    rolled = layers.Conv1D(4, 2, name="rolled")(mixed)
    model = keras.Model(ids, layers.Dense(2, name="y")(layers.Flatten()(rolled)))
    if mode:
        model.quantize(mode)
    for layer in model._flatten_layers():
        if hasattr(layer, "enable_lora") and layer.built:
            layer.enable_lora(2)
            for name in ("lora_kernel_b", "lora_embeddings_b") if is_trained else ():
                if (b := getattr(layer, name, None)) is not None:
                    b.assign(np.random.default_rng(3).normal(size=b.shape))
    return model


@pytest.mark.parametrize(
    "mode", [None, *(pytest.param(m, marks=pytest.mark.landing) for m in ("int8", "int4"))]
)
@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_adapters_are_served_as_keras_merges_them(tmp_path: Path, mode: str | None, name: str) -> None:
    model = adapted(mode)
    (model.save_weights if "weights" in name else model.save)(tmp_path / name)
    loaded = adapted(mode, is_trained=False)
    loaded.load_weights(tmp_path / name)
    config = model.get_config()  # a graph has no values from which `quantize` could compute its own
    builder = (lambda: keras.Model.from_config(config)) if "weights" in name else None
    done = export(tmp_path / name, tmp_path / "out", model=builder)
    assert any("LoRA" in note for note in done.plan.graph.notes)
    assert not [variable for variable in done.plan.graph.variables if "lora" in variable.key]
    (found,) = answers_eagerly(done.published.path, {"ids": IDS}).values()
    np.testing.assert_allclose(found, loaded(IDS), atol=1e-5)
    if mode is None:
        np.testing.assert_allclose(found, model(IDS), atol=1e-4)


def test_adapters_in_an_object_checkpoint_are_served_as_adapters(tmp_path: Path) -> None:
    model = adapted(None)
    tf.train.Checkpoint(model=model).save(str(tmp_path / "train/model.ckpt"))
    done = export(tmp_path / "train", tmp_path / "out", model=lambda: adapted(None, is_trained=False))
    assert [variable for variable in done.plan.graph.variables if "lora" in variable.key]
    (found,) = answers_eagerly(done.published.path, {"ids": IDS}).values()
    np.testing.assert_allclose(found, model(IDS), atol=1e-5)


def test_any_other_value_that_a_file_lacks_is_refused(tmp_path: Path) -> None:
    class Hiding(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.scale

        def save_own_variables(self, store: Any) -> None:
            pass

        def load_own_variables(self, store: Any) -> None:
            pass

    def make() -> Any:
        x = keras.Input([3], name="x")
        return keras.Model(x, keras.layers.Dense(2, name="y")(Hiding(name="hiding")(x)))

    make().save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(ExportError, match="hiding"):
        export(tmp_path / "m.weights.h5", tmp_path / "out", model=make)
