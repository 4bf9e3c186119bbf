"""Small SavedModels for the model server's tests, written by TensorFlow's own builder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter.wire.tfrecord import encode_records

PREDICT, CLASSIFY, REGRESS = (f"tensorflow/serving/{method}" for method in ("predict", "classify", "regress"))


def write_saved_model(directory: Path, scale: float = 1.0, *, width: int = 2) -> Path:
    """A version whose predictions tell it apart: `serving_default` gives x * scale.

    Other signatures: `two` (two inputs and outputs), `text`, `classify` and `regress` over tf.Example with
    features `x` float [width] and `label` string, `own` (regress, with an input tensor of its own),
    `native` (a classify signature as TensorFlow 2 names it),
    `odd` (an unknown method), `check` (an assertion that all x > 0), `quantised`, `quantised scores` and
    `quantised value` (predict, classify and regress with an output of qint8), `slow` (takes `turns` rounds of
    a loop), `count` (stateful: how often it was called).
    """
    import tensorflow as tf

    def quantised(values: Any) -> Any:
        return tf.bitcast(tf.cast(values, tf.int8), tf.qint8)

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        factor = v1.get_variable("factor", initializer=tf.constant(scale, tf.float32), use_resource=True)
        calls = v1.get_variable("calls", initializer=tf.constant(0, tf.int64), use_resource=True)
        x = v1.placeholder(tf.float32, [None, width], "x")
        y = tf.multiply(x, factor, "y")
        text = v1.placeholder(tf.string, [None], "text")
        loud = tf.strings.join([text, "!"], name="loud")
        examples = v1.placeholder(tf.string, [None], "examples")
        features = tf.io.parse_example(
            examples,
            {
                "x": tf.io.FixedLenFeature([width], tf.float32),
                "label": tf.io.FixedLenFeature([], tf.string, "-"),
            },
        )
        scores = tf.multiply(features["x"], factor, "scores")
        classes = tf.tile(features["label"][:, None], [1, width], "classes")
        value = tf.reduce_sum(scores, axis=1, name="value")
        others = v1.placeholder(tf.string, [None], "others")
        of_others = tf.io.parse_example(others, {"x": tf.io.FixedLenFeature([width], tf.float32)})["x"]
        largest = tf.reduce_max(of_others * factor, axis=1, name="largest")
        with tf.control_dependencies([v1.assert_positive(x, message="x must be positive")]):
            checked = tf.identity(y, "checked")
        turns = v1.placeholder(tf.int64, [None], "turns")
        rounds = tf.while_loop(lambda i: i < tf.reduce_max(turns), lambda i: i + 1, [tf.zeros([], tf.int64)])[
            0
        ]
        called = tf.identity(calls.assign_add(tf.reduce_max(turns)), "called")
        signatures = {
            "serving_default": _signature({"x": x}, {"y": y}, PREDICT),
            "two": _signature({"x": x, "text": text}, {"y": y, "loud": loud}, PREDICT),
            "text": _signature({"text": text}, {"loud": loud}, PREDICT),
            "classify": _signature({"inputs": examples}, {"classes": classes, "scores": scores}, CLASSIFY),
            "scores": _signature({"inputs": examples}, {"scores": scores}, CLASSIFY),
            "regress": _signature({"inputs": examples}, {"outputs": value}, REGRESS),
            "own": _signature({"inputs": others}, {"outputs": largest}, REGRESS),
            "flat": _signature({"inputs": examples}, {"scores": value}, CLASSIFY),
            "wide": _signature({"inputs": examples}, {"outputs": scores}, REGRESS),
            "native": _signature({"inputs": examples}, {"scores": scores}, PREDICT),
            "odd": _signature({"x": x}, {"y": y}, "tensorflow/serving/odd"),
            "check": _signature({"x": x}, {"y": checked}, PREDICT),
            "quantised": _signature({"x": x}, {"y": quantised(y)}, PREDICT),
            "quantised scores": _signature({"inputs": examples}, {"scores": quantised(scores)}, CLASSIFY),
            "quantised value": _signature({"inputs": examples}, {"outputs": quantised(value)}, REGRESS),
            "slow": _signature({"turns": turns}, {"rounds": rounds}, PREDICT),
            "count": _signature({"turns": turns}, {"calls": called}, PREDICT),
        }
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            builder = v1.saved_model.Builder(str(directory))
            builder.add_meta_graph_and_variables(session, ["serve"], signatures)
            builder.save()
    return directory


def write_models(root: Path) -> None:
    """Models `a` (versions 1 and 2) and `b` (version 5) under `root`; version n multiplies by n."""
    for name, version in (("a", 1), ("a", 2), ("b", 5)):
        write_saved_model(root / name / str(version), scale=version)


def _signature(inputs: dict[str, Any], outputs: dict[str, Any], method: str) -> Any:
    import tensorflow as tf

    saved_model = tf.compat.v1.saved_model
    return saved_model.build_signature_def(
        {name: saved_model.build_tensor_info(tensor) for name, tensor in inputs.items()},
        {name: saved_model.build_tensor_info(tensor) for name, tensor in outputs.items()},
        method,
    )


def write_warmup(directory: Path, records: Iterable[bytes]) -> Path:
    """The warm-up file of a version, with these serialised PredictionLogs."""
    path = directory / "assets.extra" / "tf_serving_warmup_requests"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_records(records))
    return path
