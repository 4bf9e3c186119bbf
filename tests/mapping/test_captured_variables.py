"""Models of Keras 3 by `tf.saved_model.save`: variables share names, and functions capture other handles than
the ones that are saved. Stock TensorFlow Serving cannot serve these files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from exporter import export
from exporter.options import ExportRequest, Updates

layers = keras.layers
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Two(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(4, activation="tanh"), layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


class Weights(layers.Layer):  # type: ignore[misc]
    """A layer whose own variables have one name."""

    def build(self, shape: Any) -> None:
        self.one, self.other = self.add_weight(shape=(4, 4)), self.add_weight(shape=(4, 4))

    def call(self, x: Any) -> Any:
        return tf.tanh(x @ self.one) @ self.other


class Nested(keras.Model):  # type: ignore[misc]
    """A shared layer, normalisation, and models inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.own = Two(), Two(), Weights()
        self.shared, self.norm = layers.Dense(4), layers.BatchNormalization()
        self.same = self.shared

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.norm(self.shared(self.same(self.left(x))), training=training)
        return self.right(self.own(y))


class Listed(keras.Model):  # type: ignore[misc]
    """Layers in a list and a dict: `tf.train.Checkpoint` does not store these for Keras 3, `save` does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = [layers.Dense(4, activation="tanh") for _ in range(2)]
        self.heads = {"a": layers.Dense(4), "b": layers.Dense(4)}

    def call(self, x: Any) -> Any:
        for layer in self.tower:
            x = layer(x)
        return self.heads["a"](x) - 2.0 * self.heads["b"](x)


def fill(model: Any, seed: int) -> np.ndarray:
    """Give every variable values of its own; returns what the model answers then."""
    for number, variable in enumerate(model.weights):
        variable.assign(np.random.default_rng((seed, number)).uniform(0.1, 1.0, variable.shape))
    return np.asarray(model(X))


def saved(model: Any, directory: Path) -> Path:
    model(X)
    serve = tf.function(
        lambda x: {"y": model(x)}, input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")]
    )
    tf.saved_model.save(model, str(directory), signatures={"serving_default": serve})
    return directory


def answer(loaded: Any) -> Any:
    return loaded.signatures["serving_default"](x=tf.constant(X))["y"]


@pytest.mark.parametrize("make", [Two, Nested, Listed])
def test_what_is_served_is_what_was_trained(make: Any, tmp_path: Path) -> None:
    model = make()
    model(X)
    expected = fill(model, 1)
    source = saved(model, tmp_path / "source")
    done = export(ExportRequest(source, tmp_path / "m"))
    np.testing.assert_allclose(answer(tf.saved_model.load(str(done.published.path))), expected, atol=1e-5)


@pytest.mark.parametrize("make", [Two, Nested])
def test_checkpoints_and_deltas_reach_the_variables_of_such_a_graph(make: Any, tmp_path: Path) -> None:
    model = make()
    source = saved(model, tmp_path / "source")
    checkpoint, prefix = tf.train.Checkpoint(model=model), str(tmp_path / "train" / "ckpt")
    expected = fill(model, 2)
    checkpoint.save(prefix)
    request = ExportRequest(tmp_path / "train", tmp_path / "m", model=str(source), updates=Updates())
    loaded = tf.saved_model.load(str(export(request).published.path))
    np.testing.assert_allclose(answer(loaded), expected, atol=1e-5)
    expected = fill(model, 3)
    checkpoint.save(prefix)
    export(tmp_path / "train", tmp_path / "m", str(source), save_incr_model=True)
    loaded.signatures["incremental_update"](up_to=tf.constant([-1], tf.int64))
    np.testing.assert_allclose(answer(loaded), expected, atol=1e-5)
