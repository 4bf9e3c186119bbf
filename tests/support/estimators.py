"""What real Estimators left (see tests/fixtures/estimator/make.py), signatures and builders for it."""

from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures/estimator"
ANSWERS: dict[str, Any] = json.loads((FIXTURES / "answers.json").read_text())
EXAMPLES = [base64.b64decode(text) for text in ANSWERS["examples"]]
"""Serialized; the Estimators' answers to them are in `ANSWERS` by model, signature and output."""

WIDE_DEEP = {
    "serving_default": {
        "examples": {
            "age": {"tensor": "IteratorGetNext:0", "default": 30},
            "clicks": "IteratorGetNext:1",
            "country": "IteratorGetNext:2",
            "device": "IteratorGetNext:3",
            "words": {"sparse": "DeserializeSparse"},
        },
        "outputs": {"classes": "head/predictions/Tile_1", "scores": "head/predictions/probabilities"},
        "method": "classify",
    },
    "predict": {
        "examples": "serving_default",
        "outputs": {
            "all_class_ids": "head/predictions/Tile",
            "all_classes": "head/predictions/Tile_1",
            "class_ids": "head/predictions/ExpandDims_2",
            "classes": "head/predictions/str_classes",
            "logits": "add",
            "probabilities": "head/predictions/probabilities",
        },
    },
}
"""What `--signatures` says of the graph of `wide_deep`."""

REGRESSOR = {
    "serving_default": {
        "inputs": {"inputs": "IteratorGetNext:0"},
        "outputs": {"outputs": "dnn/logits/BiasAdd"},
        "method": "regress",
    },
    "predict": {
        "inputs": {"examples": "IteratorGetNext:0"},
        "outputs": {"predictions": "dnn/logits/BiasAdd"},
    },
}
"""The same for `regressor`, whose graph parses Examples itself."""


def unpack(directory: Path) -> None:
    """Lay the model directories out, as they were on the trainer's disk."""
    with tarfile.open(FIXTURES / "model_dirs.tar.xz") as archive:
        archive.extractall(directory, filter="data")


def custom() -> Any:
    """The serving graph of the `custom` model_fn, without its dropout."""
    import tensorflow as tf

    v1 = tf.compat.v1
    examples = v1.placeholder(tf.string, [None], name="examples")
    spec = {"ids": tf.io.VarLenFeature(tf.int64), "clicks": tf.io.FixedLenFeature([2], tf.float32)}
    features = tf.io.parse_example(examples, spec)
    table = v1.get_variable("table", [20, 4], partitioner=v1.fixed_size_partitioner(3))
    pooled = v1.nn.embedding_lookup_sparse(table, features["ids"], None, combiner="mean")
    hidden = tf.concat([pooled, features["clicks"]], axis=1)
    logits = tf.matmul(hidden, v1.get_variable("kernel", [6, 3])) + v1.get_variable("bias", [3])
    scores = tf.nn.softmax(logits)
    classes = tf.tile(tf.constant([["zero", "one", "two"]]), [tf.shape(scores)[0], 1])
    value = tf.reduce_max(scores, axis=1)
    return {
        "serving_default": ({"inputs": examples}, {"classes": classes, "scores": scores}, "classify"),
        "value": ({"inputs": examples}, {"outputs": value}, "regress"),
        "raw": ({"examples": examples}, {"scores": scores, "logits": logits}),
    }


def regressor() -> Any:
    """The serving graph of `regressor`, which Keras' layers made."""
    import tensorflow as tf

    v1 = tf.compat.v1
    examples = v1.placeholder(tf.string, [None], name="examples")
    spec = {
        "clicks": tf.io.FixedLenFeature([2], tf.float32),
        "age": tf.io.FixedLenFeature([1], tf.float32, [30.0]),
    }
    features = tf.io.parse_example(examples, spec)
    hidden = tf.concat([features["age"], features["clicks"]], axis=1)
    for name, width in (("hiddenlayer_0", 8), ("logits", 1)):
        with v1.variable_scope(f"dnn/{name}"):
            kernel = v1.get_variable("kernel", [hidden.shape[1], width])
            hidden = tf.matmul(hidden, kernel) + v1.get_variable("bias", [width])
        hidden = tf.nn.relu(hidden) if name != "logits" else hidden
    return {"serving_default": ({"inputs": examples}, {"outputs": hidden}, "regress")}


def answer(model: str, signature: str) -> dict[str, np.ndarray[Any, Any]]:
    """What the Estimator itself answered."""
    return {name: np.array(value) for name, value in ANSWERS[model][signature].items()}
