"""Layers that an archive keeps in ways of their own: served from real files, they answer as Keras does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from exporter import export
from exporter.errors import CorruptFile
from tests.support.archives import keras_archive, weights_file
from tests.support.commands import export_model
from tests.support.served_weight_norm import WeightNorm

_IMPORTED = """
import sys
from pathlib import Path
sys.modules[sys.argv[2]] = None
from exporter.graph.archived_model import archive_builder
try:
    archive_builder(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""
"""An archive is opened where a module is missing."""


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("keras", "BuilderError the model was saved by Keras 3.*, and keras is not installed"),
        ("tensorflow", "ModuleNotFoundError .*tensorflow"),  # reported as TensorFlowNeeded
        ("rich", "BuilderError the model was saved by Keras 3.*, and keras cannot be imported"),
    ],
)
def test_a_keras_that_lacks_something_is_not_called_missing(tmp_path: Path, missing: str, said: str) -> None:
    keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(tmp_path / "m.keras")
    command = [sys.executable, "-c", _IMPORTED, str(tmp_path / "m.keras"), missing]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(said, found.stdout), found.stdout


KERASES = pytest.mark.parametrize("kind", [keras, tf_keras], ids=["keras", "tf-keras"])
X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def answers(version: Path, **inputs: Any) -> list[Any]:
    signature = tf.saved_model.load(str(version)).signatures["serving_default"]
    found = signature(**{name: tf.constant(value) for name, value in inputs.items()})
    return [value.numpy() for _, value in sorted(found.items())]


def assert_served(path: Path, out: Path, expected: Any, *options: object, **inputs: Any) -> None:
    ran = export_model("--ckpt-dir", path, "--out", out, "-q", *options)
    assert ran.code == 0, ran.err
    (found,) = answers(out / "1", **inputs)
    if found.dtype == object:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


# --- functions that a model of Keras 2 applies to tensors --------------------------------------------------


def arithmetic(*, has_ellipsis: bool) -> Any:
    x = tf_keras.Input([4], name="x")
    rows, cols = tf.shape(x)[0], x.shape[1]
    parts = [
        ((x * 2.0 + 1.0) / 3.0 - x) ** 2 % 0.7,
        tf.where(x > 0.5, -x, tf.zeros_like(x)),
        x[:, 1:3],
        x[:, -1:] // 0.3,
        tf.concat([x, abs(x)], axis=1),
        tf.reshape(x, [rows, cols]),
        tf.reduce_sum(tf.square(x), axis=-1, keepdims=True),
        tf.squeeze(tf.expand_dims(x, 1), 1),
        tf.matmul(x, tf.eye(4)),
        tf.cast(tf.one_hot(tf.argmax(x, axis=1), 3), tf.float32),
        tf.gather(x, [0, 2], axis=1),
        tf.math.top_k(x, 2).values,
        tf.clip_by_value(tf.nn.softmax(tf.tanh(x)), 0.1, 0.9),
        tf.unstack(x, axis=1)[0][:, None],
        tf.cast((x > 0.2) & ~(x > 0.8), tf.float32),
        tf.transpose(tf.transpose(x)),
        tf.image.resize(tf.reshape(x, [-1, 2, 2, 1]), [1, 1])[:, 0, 0],
        tf_keras.backend.mean(x, axis=1, keepdims=True),
    ]
    if has_ellipsis:
        parts.append(x[..., 0][..., None])
    hidden = tf_keras.layers.Dense(3, activation=tf.nn.relu)(tf.concat(parts, axis=1))
    model = tf_keras.Model(x, tf.identity(hidden, name="y"))
    model.add_loss(tf.reduce_mean(hidden))
    model.add_metric(tf.reduce_mean(hidden), name="mean", aggregation="mean")
    return model


@pytest.mark.parametrize("name", ["m.h5", "m.keras"])
def test_arithmetic_on_tensors_needs_no_flag(tmp_path: Path, name: str) -> None:
    model = arithmetic(has_ellipsis=name.endswith("h5"))  # of which tf-keras writes no .keras
    model.save(tmp_path / name)
    assert_served(tmp_path / name, tmp_path / "out", model(X), x=X)


@pytest.mark.parametrize("name", ["m.h5", "m.keras"])
def test_texts_and_ragged_tensors_need_no_flag(tmp_path: Path, name: str) -> None:
    text = tf_keras.Input([3], dtype="string", name="text")
    ragged = tf_keras.Input([None], ragged=True, name="ragged")
    hashes = tf.strings.to_hash_bucket_fast(tf.strings.lower(tf.strings.join([text, text])), 50)
    again = tf.RaggedTensor.from_row_splits(ragged.flat_values * 2.0, ragged.row_splits)
    sums = [
        ragged.to_tensor(shape=[None, 3]),
        tf.reduce_mean(again, axis=1)[:, None],
        again[:, :1].to_tensor(),
    ]
    rows = tf_keras.layers.Flatten()(tf_keras.layers.Embedding(50, 2)(hashes))
    model = tf_keras.Model([text, ragged], tf_keras.layers.Concatenate()([rows, *sums]))
    model.save(tmp_path / name)
    texts, values = np.array([["A", "b", "c"], ["d", "e", "ü"]]), tf.ragged.constant([[1.0], [2.0, 3.0]])
    expected = model([tf.constant(texts), values])
    parts = {"ragged": values.flat_values, "ragged_1": values.row_splits}
    assert_served(tmp_path / name, tmp_path / "out", expected, text=texts, **parts)


# --- a variable that two layers hold -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5", "m.h5"])
def test_a_wrapper_that_holds_the_kernel_of_the_layer_inside(tmp_path: Path, name: str) -> None:
    x = keras.Input([4], name="x")
    inner = keras.layers.SpectralNormalization(keras.layers.Dense(3, name="inner"), name="outer")
    model = keras.Model(x, keras.layers.Dense(3, name="last")(inner(x)))
    model.compile("sgd", "mse")
    model.fit(X, np.ones((5, 3)), verbose=0)
    if name == "m.weights.h5":
        model.save_weights(tmp_path / name)
        out = export(tmp_path / name, tmp_path / "out", model).published.path
        (found,) = answers(out, x=X)
        np.testing.assert_allclose(found, model(X), rtol=0, atol=1e-6)
    else:
        model.save(tmp_path / name)
        assert_served(tmp_path / name, tmp_path / "out", model(X), x=X)


def test_a_wrapper_of_a_users_own(tmp_path: Path) -> None:
    x = keras.Input([4], name="x")
    model = keras.Model(x, WeightNorm(keras.layers.Dense(3))(x))
    model.compile("sgd", "mse")
    model.fit(X, np.ones((5, 3)), verbose=0)
    model.save(tmp_path / "m.keras")
    objects = "tests.support.served_weight_norm"
    assert_served(tmp_path / "m.keras", tmp_path / "out", model(X), "--custom-objects", objects, x=X)


# --- no variable at all ------------------------------------------------------------------------------------


def without_variables(kind: ModuleType) -> dict[str, tuple[Any, Any]]:
    """Layers with what they are called with."""
    layers = kind.layers
    texts, adapted = np.array([["a", "b"], ["c", "a"]]), layers.StringLookup()
    adapted.adapt(texts[:1])
    words = layers.TextVectorization(output_sequence_length=3)
    words.adapt(np.array(["red green", "red"]))
    return {
        "adapted": (adapted, texts),
        "told": (layers.StringLookup(vocabulary=["a", "c"]), texts),
        "words": (words, np.array([["green blue"], ["red"]])),
        "hashed": (layers.Hashing(7), texts),
        "scaled": (layers.Rescaling(0.5), X),
        "encoded": (layers.CategoryEncoding(5, output_mode="multi_hot"), np.array([[1, 2], [4, 0]])),
    }


@pytest.mark.landing
@KERASES
@pytest.mark.parametrize("name", ["adapted", "told", "words", "hashed", "scaled", "encoded"])
def test_a_model_without_variables(tmp_path: Path, kind: ModuleType, name: str) -> None:
    layer, value = without_variables(kind)[name]
    dtype = "string" if value.dtype.kind == "U" else value.dtype.name
    x = kind.Input(value.shape[1:], dtype=dtype, name="x")
    model = kind.Model(x, layer(x))
    expected = model(tf.constant(value))
    names = ["m.keras"] if name in ("adapted", "words") else ["m.keras", "m.h5"]  # which has no vocabularies
    for file in names:
        model.save(tmp_path / file)
        assert_served(tmp_path / file, tmp_path / f"{file}-out", expected, x=value)


def test_weights_without_values_are_damaged(tmp_path: Path) -> None:
    weights_file(tmp_path / "m.weights.h5", {})
    with pytest.raises(CorruptFile, match="no weights"):
        export(tmp_path / "m.weights.h5", tmp_path / "out", f"{__file__}:nothing")


def test_an_archive_that_lost_its_values_is_refused(tmp_path: Path) -> None:
    x = keras.Input([4], name="x")
    keras.Model(x, keras.layers.Dense(2)(x)).save(tmp_path / "m.keras")
    import io
    import zipfile

    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        config = archive.read("config.json").decode()
    weights_file(empty := io.BytesIO(), {})
    keras_archive(tmp_path / "m.keras", config=config, weights=empty.getvalue(), version=keras.__version__)
    ran = export_model("--ckpt-dir", tmp_path / "m.keras", "--out", tmp_path / "out", "--json")
    assert ran.code != 0
    assert ran.error["error"] != "UnexpectedError"
    assert not (tmp_path / "out").exists()
