"""`export(..., model=model)`: a Keras model says what is served, the checkpoint with which values."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter import Exported, export
from exporter.errors import BuilderError, NotServable, UsageError

IDS = np.arange(12, dtype=np.int64).reshape(4, 3)


def ranker(kind: ModuleType) -> Any:
    """A model with a layer that only this function knows."""

    class Scaled(kind.layers.Layer):  # type: ignore[misc,name-defined]
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return inputs * self.scale

    ids = kind.Input((3,), dtype="int64", name="ids")
    hidden = kind.layers.Flatten()(kind.layers.Embedding(20, 4)(ids))
    made = kind.Model(ids, kind.layers.Dense(1, name="score")(Scaled()(hidden)))
    made.compile("adam", "mse")
    made.fit(IDS, np.ones((4, 1)), verbose=0)
    return made


def served(done: Exported, **inputs: Any) -> Any:
    signature = tf.saved_model.load(str(done.published.path)).signatures["serving_default"]
    (answer,) = signature(**{name: tf.constant(value) for name, value in inputs.items()}).values()
    return answer.numpy()


@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
def test_a_builder_may_compile_its_model_and_be_called_often(kind: ModuleType, tmp_path: Path) -> None:
    def made() -> Any:
        x = kind.Input((2,), name="x")
        model = kind.Model(x, kind.layers.Dense(2, name="last")(kind.layers.Dense(2)(x)))
        model.compile("adam", "mse")
        return model

    trained = made()
    trained.save_weights(tmp_path / "m.weights.h5")  # layer names are counted on from here: dense_1, dense_2
    expected = np.asarray(trained(np.ones((1, 2), np.float32)))
    done = export(tmp_path / "m.weights.h5", tmp_path / "m", made, allow="code")
    np.testing.assert_allclose(served(done, x=np.ones((1, 2), np.float32)), expected, rtol=1e-6)


@pytest.mark.landing
@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
@pytest.mark.parametrize("saved", ["archive", "weights", "checkpoint"])
def test_the_values_are_the_checkpoints(kind: ModuleType, saved: str, tmp_path: Path) -> None:
    made = ranker(kind)
    expected = np.asarray(made(IDS))
    path = {"archive": tmp_path / "m.keras", "weights": tmp_path / "m.weights.h5"}.get(
        saved, tmp_path / "train"
    )
    match saved:
        case "archive":
            made.save(path)
        case "weights":
            made.save_weights(path)
        case _:
            tf.train.CheckpointManager(tf.train.Checkpoint(model=made), str(path), 3).save(7)
    made.fit(IDS, np.zeros((4, 1)), verbose=0)
    done = export(path, tmp_path / "served", made, verify="outputs")
    np.testing.assert_allclose(served(done, ids=IDS), expected, rtol=1e-5)  # a graph may sum in another order
    assert not export(path, tmp_path / "served", made, verify="outputs").is_new
    assert np.abs(np.asarray(made(IDS)) - expected).max() > 0, "the program's own model is as it was"


@pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
def test_a_vocabulary_that_the_model_learned_is_taken_along(kind: ModuleType, tmp_path: Path) -> None:
    words = kind.layers.StringLookup()
    words.adapt(["b", "a", "b"])
    text = kind.Input((1,), dtype="string", name="text")
    made = kind.Model(text, kind.layers.Embedding(words.vocabulary_size(), 2)(words(text)))
    made.save_weights(tmp_path / "m.weights.h5")
    done = export(tmp_path / "m.weights.h5", tmp_path / "served", made)
    asked = np.array([["a"], ["b"], ["c"]])
    np.testing.assert_array_equal(served(done, text=asked), np.asarray(made(tf.constant(asked))))


def test_a_layer_without_its_vocabulary_is_named(tmp_path: Path) -> None:
    def words(**options: Any) -> Any:
        text = keras.Input((1,), dtype="string", name="text")
        ids = keras.layers.StringLookup(name="words", **options)(text)
        return keras.Model(text, keras.layers.Embedding(3, 2, name="rows")(ids))

    words(vocabulary=["a", "b"]).save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(NotServable, match=r"fills table 'hash_table_\S+', which '\S*words") as caught:
        export(tmp_path / "m.weights.h5", tmp_path / "served", words)
    assert "vocabulary=[...]" in caught.value.hint


def test_a_model_that_keras_cannot_describe_is_refused(tmp_path: Path) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self, size: object) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    made = Own(object())
    made(np.ones((2, 3), np.float32))
    made.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(BuilderError, match="Keras model") as caught:
        export(tmp_path / "m.weights.h5", tmp_path / "served", made)
    assert "model=make_model" in caught.value.hint
    assert not (tmp_path / "served").exists()


def test_a_model_takes_no_arguments(tmp_path: Path) -> None:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(UsageError, match="model_args are for builders"):
        export(tmp_path / "m.weights.h5", tmp_path / "served", made, model_args={"depth": 3})
