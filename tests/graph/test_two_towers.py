"""A builder that returns several models: one signature each, from one checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter import export, export_incremental
from exporter.errors import BuilderError
from tests.support.trained import answers_in_session
from tests.support.updatable import loaded_quickly

KERASES = pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
IDS = np.array([[1, 2], [3, 4]])


def towers(kind: ModuleType, seed: int = 0) -> dict[str, Any]:
    """Two towers of layers of the same names, that share the layer behind their tables."""
    kind.utils.set_random_seed(seed)
    shared = kind.layers.Dense(3, name="shared")

    def tower(name: str, rows: int) -> Any:
        ids = kind.Input([2], dtype="int64", name=name)
        table = kind.layers.Embedding(rows, 4, name="table")(ids)
        hidden = kind.layers.Dense(4, activation="relu", name="hidden")(
            kind.layers.Flatten(name="flat")(table)
        )
        return kind.Model(ids, shared(hidden))

    return {"user_tower": tower("user", 20), "item_tower": tower("item", 30)}


def saved(directory: Path, step: int, made: dict[str, Any]) -> None:
    model = tf.Module()
    for name, one in made.items():
        setattr(model, name, one)
    checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(step, dtype=tf.int64))
    checkpoint.write(str(directory / f"ckpt-{step}"))


@KERASES
def test_each_tower_is_a_signature_and_takes_deltas(tmp_path: Path, kind: ModuleType) -> None:
    before, after = towers(kind, 1), towers(kind, 2)
    saved(tmp_path / "train", 1, before)
    base = export_incremental(tmp_path / "train", tmp_path / "out", model=lambda: towers(kind))
    saved(tmp_path / "train", 2, after)
    export_incremental(tmp_path / "train", tmp_path / "out", model=lambda: towers(kind))
    with loaded_quickly(base.published.path) as server:
        for made in (before, after):
            for signature, name in (("user_tower", "user"), ("item_tower", "item")):
                (found,) = server.call(signature, **{name: IDS}).values()
                np.testing.assert_allclose(found, made[signature](IDS), atol=1e-6)
            server.update()


class Scorer(tf.Module):
    """A module with one function, or more."""

    def __init__(self, size: int, *more: str) -> None:
        super().__init__()
        self.weights = tf.Variable(tf.random.stateless_normal([size], [size, 1]))
        spec = [tf.TensorSpec([None, size], tf.float32, name="x")]
        self.score = tf.function(lambda x: {"score": tf.linalg.matvec(x, self.weights)}, spec)
        self.double = tf.function(lambda x: {"score": 2 * tf.linalg.matvec(x, self.weights)}, spec)
        self.signatures = {"serving_default": self.score, **(dict.fromkeys(more, self.double))}


def test_modules_and_models_beside_each_other(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        x = keras.Input([2], name="x")
        return {
            "ranker": keras.Model(x, keras.layers.Dense(1, name="y")(x)),
            "query": Scorer(2),
            "item": Scorer(3, "doubled"),
        }

    made = make()
    tf.train.Checkpoint(**made).write(str(tmp_path / "train/ckpt-1"))
    done = export(tmp_path / "train", tmp_path / "out", model=make)
    assert {*done.plan.graph.meta_graph.signature_def} == {"ranker", "query", "item", "item_doubled"}
    x = np.ones([1, 3], np.float32)
    found = answers_in_session(done.published.path, {"x": x}, "item_doubled")
    np.testing.assert_allclose(found["score"], 2 * made["item"].weights.numpy().sum(keepdims=True), rtol=1e-6)
    (ranked,) = answers_in_session(done.published.path, {"x": x[:, :2]}, "ranker").values()
    np.testing.assert_allclose(ranked, made["ranker"](x[:, :2]), rtol=1e-5)


def test_what_is_not_a_model_is_named(tmp_path: Path) -> None:
    write = tf.train.Checkpoint(a=tf.Variable(1.0)).write
    write(str(tmp_path / "train/ckpt-1"))
    with pytest.raises(BuilderError, match="signature 'item_tower'"):
        export(tmp_path / "train", tmp_path / "out", model=lambda: {**towers(keras), "item_tower": 3})
