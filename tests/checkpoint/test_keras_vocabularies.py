"""Vocabularies that layers learned with `adapt` are served from `.keras` archives as by Keras itself."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.commands import export_model

WORDS = np.array([["a"], ["ü c"], ["never seen"]])
NUMBERS = np.array([[7], [-3], [55]])
TEXTS = np.array([["The cat!"], ["dog dog the sat x"], [""]])


def saved(name: str, path: Path) -> None:
    """A model with every layer that has a vocabulary, two of one class, one of them told its words."""
    keras = importlib.import_module(name)
    layers = keras.layers
    word = keras.Input([1], dtype="string", name="word")
    number = keras.Input([1], dtype="int64", name="number")
    text = keras.Input([1], dtype="string", name="text")
    lookups = [
        layers.StringLookup(),
        layers.StringLookup(num_oov_indices=3, mask_token="a"),
        layers.StringLookup(output_mode="multi_hot", max_tokens=8),
        layers.StringLookup(vocabulary=["ü c", "told"]),
        layers.StringLookup(output_mode="tf_idf"),
        layers.StringLookup(output_mode="tf_idf", vocabulary=["ü c", "told"], idf_weights=[0.5, 0.25]),
    ]
    for lookup, words in zip(lookups[:3], (["a", "b", "b", "ü c"], ["a", "z"], ["b", "a"]), strict=True):
        lookup.adapt(np.array(words))
    lookups[4].adapt(np.array([["a", "b"], ["ü c", "a"]]))
    integers = layers.IntegerLookup()
    integers.adapt(np.array([7, 7, -3, 100]))
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorize.adapt(np.array(["the cat sat", "the dog"]))
    weighed = layers.TextVectorization(output_mode="tf_idf")
    weighed.adapt(np.array(["the cat sat", "the dog"]))
    numbers = layers.IntegerLookup(output_mode="tf_idf")
    numbers.adapt(np.array([[7, 8], [-3, 7]]))
    embedding = layers.Embedding(30, 4)
    ids = [lookups[0](word), lookups[1](word), lookups[3](word), integers(number), vectorize(text)]
    rows = layers.Flatten()(layers.Concatenate(axis=1)([embedding(each) for each in ids]))
    counts = [lookups[2](word), lookups[4](word), lookups[5](word), numbers(number), weighed(text)]
    together = layers.Concatenate()([rows, *map(layers.Flatten(), counts)])
    keras.Model([word, number, text], layers.Dense(2)(together)).save(path)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabularies") / "model.keras"
    saved("keras", path)
    return path


def assert_served(name: str, archive: Path, out: Path) -> None:
    ran = export_model("--ckpt-dir", archive, "--out", out, "--verify", "outputs", "-q")
    assert ran.code == 0, ran.err
    model: Any = importlib.import_module(name).models.load_model(archive)
    expected = model.predict([tf.constant(values) for values in (WORDS, NUMBERS, TEXTS)], verbose=0)
    served = tf.saved_model.load(str(out / "1")).signatures["serving_default"]
    found = served(word=tf.constant(WORDS), number=tf.constant(NUMBERS, tf.int64), text=tf.constant(TEXTS))
    np.testing.assert_array_equal(next(iter(found.values())), expected)


def test_it_answers_as_keras_does(archive: Path, tmp_path: Path) -> None:
    assert_served("keras", archive, tmp_path / "m")


@pytest.mark.landing
def test_archives_of_tf_keras_too(tmp_path: Path) -> None:
    saved("tf_keras", tmp_path / "model.keras")
    assert_served("tf_keras", tmp_path / "model.keras", tmp_path / "m")


def rewritten(archive: Path, path: Path, change: Any) -> Path:
    """A copy whose vocabularies of integers are changed; None leaves them out."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if "integer_lookup" in name and name.startswith("assets"):
                content = change(content)
            if content is not None:
                new.writestr(name, content)
    return path


@pytest.mark.landing
@pytest.mark.parametrize(
    "change",
    [lambda text: b"7\nno number\n", lambda text: None, lambda text: b"7\n7\n-1\n", lambda text: b"\xff"],
    ids=["no number", "missing", "twice", "no text"],
)
def test_a_damaged_vocabulary_is_a_named_error(archive: Path, tmp_path: Path, change: Any) -> None:
    damaged = rewritten(archive, tmp_path / "damaged.keras", change)
    ran = export_model("--ckpt-dir", damaged, "--out", tmp_path / "m", "--json")
    assert (ran.code, ran.error["error"]) == (1, "BuilderError"), ran.err
    assert "cannot be given its vocabulary" in ran.error["message"]
    assert not (tmp_path / "m").exists()
