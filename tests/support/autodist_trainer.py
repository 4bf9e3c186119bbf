"""What AutoDist leaves, made with stock TensorFlow: AutoDist itself runs on TensorFlow 2.0 to 2.2 alone.

It takes a program for one machine, cuts its variables (biases too, and unevenly), copies its graph for each
replica under `AutoDist-Replica-<n>/`, and trains that. Its Saver writes the program's own names, with the
cuts as slices; the `.meta` beside them is the transformed graph. Its SavedModelBuilder writes the *program's*
training graph under the user's tag, the variables again from the transformed session, and no directory of a
version.
Source: autodist/checkpoint/{saver,saved_model_builder}.py, autodist/kernel/ in github.com/petuum/autodist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS, CLASSES, STEPS = 11, 3, 12
TAG, REPLICA = "train", "AutoDist-Replica-0/"
WORDS = ["a", "b", "c", "d", "e"]
CUTS = {"table": 3, "hidden/kernel": 2, "hidden/bias": 2, "steepness": 1}
"""Parts of each variable; neither 11 rows nor 3 values divide evenly."""

BATCH = np.random.default_rng(1).integers(0, ROWS, 40)
TEXTS = np.array([WORDS[number % 5] for number in range(40)], object)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 40)


@dataclass(frozen=True)
class Program:
    """The tensors of the user's program, in whichever graph it was built."""

    ids: Any
    words: Any
    labels: Any
    scores: Any
    loss: Any
    train_op: Any
    optimizer: Any
    variables: dict[str, Any]
    step: Any


def program(vocabulary: Path, replica: str = "") -> Program:
    """A classifier with a table, a vocabulary and Adam; for a `replica` as AutoDist cuts and names it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    words = v1.placeholder(tf.string, [None], "words")
    labels = v1.placeholder(tf.int64, [None], "labels")
    shapes = {"table": [ROWS, 4], "hidden/kernel": [8, CLASSES], "hidden/bias": [CLASSES], "steepness": []}
    variables = {
        name: v1.get_variable(
            f"{replica}{name}",
            shape,
            partitioner=v1.fixed_size_partitioner(CUTS[name]) if replica and CUTS[name] > 1 else None,
            initializer=v1.ones_initializer() if not shape else None,
        )
        for name, shape in shapes.items()
    }
    found = v1.nn.embedding_lookup(variables["table"], ids, partition_strategy="div")
    initializer = tf.lookup.TextFileInitializer(
        str(vocabulary),
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    numbers = tf.lookup.StaticHashTable(initializer, -1).lookup(words)
    inputs = tf.concat([found, tf.one_hot(numbers, 4)], axis=1)
    logits = tf.matmul(inputs, tf.convert_to_tensor(variables["hidden/kernel"]))
    logits = (logits + tf.convert_to_tensor(variables["hidden/bias"])) * variables["steepness"]
    scores = tf.nn.softmax(logits, name="scores")
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.AdamOptimizer(0.05)
    train_op = optimizer.minimize(loss, step, name="train")
    return Program(ids, words, labels, scores, loss, train_op, optimizer, variables, step)


def train(directory: Path) -> None:
    """Leave `checkpoints/`, `saved_model/` and `expected.npz` in `directory`."""
    import tensorflow as tf

    v1 = tf.compat.v1
    vocabulary = directory / "words.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n")
    original, transformed = tf.Graph(), tf.Graph()
    with original.as_default():
        own = program(vocabulary)
        own_saver = v1.train.Saver()  # before the graph is transformed, as AutoDist asks
    with transformed.as_default(), v1.Session() as session:
        v1.set_random_seed(4)
        with tf.name_scope(REPLICA):
            first = program(vocabulary, REPLICA)
        saver = v1.train.Saver(dict(_by_own_names(first)))
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        feeds = {first.ids: BATCH, first.words: TEXTS, first.labels: LABELS}
        for _ in range(STEPS):
            session.run(first.train_op, feeds)
        saver.save(session, str(directory / "checkpoints/model.ckpt"), first.step)
        scores, loss = session.run([first.scores, first.loss], feeds)
        _write_saved_model(directory / "saved_model", session, saver, original, own, own_saver)
    np.savez(directory / "expected.npz", scores=scores, loss=loss)


def _by_own_names(cut: Program) -> Iterator[tuple[str, Any]]:
    """What the Saver saves: the program's names, a list of cuts where there are several."""
    import tensorflow as tf

    for name, variable in cut.variables.items():
        parts = [*variable] if CUTS[name] > 1 else [variable]
        yield name, parts if len(parts) > 1 else variable
        for slot, suffix in (("m", "Adam"), ("v", "Adam_1")):
            slots = [cut.optimizer.get_slot(part, slot) for part in parts]
            yield f"{name}/{suffix}", slots if len(slots) > 1 else slots[0]
    for power in tf.compat.v1.global_variables():
        if power.op.name.endswith("_power"):
            yield power.op.name.rpartition("/")[2], power
    yield "global_step", cut.step


def _write_saved_model(
    target: Path, session: Any, saver: Any, original: Any, own: Program, own_saver: Any
) -> None:
    """As AutoDist's builder: values of the one graph, the other graph as it is, train op and loss in it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(target))
    saver.save(session, str(target / "variables/variables"), write_meta_graph=False, write_state=False)
    (target / "variables").mkdir(exist_ok=True)
    with original.as_default():
        asked = {"ids": own.ids, "words": own.words}
        with tf.control_dependencies([own.train_op]):
            trained = tf.identity(own.loss, "trained_loss")
        signatures = {
            "serving_default": v1.saved_model.predict_signature_def(asked, {"scores": own.scores}),
            "evaluate": v1.saved_model.predict_signature_def(
                {**asked, "labels": own.labels}, {"loss": own.loss}
            ),
            "train": v1.saved_model.predict_signature_def({**asked, "labels": own.labels}, {"loss": trained}),
            "forgotten": v1.saved_model.predict_signature_def(asked, {"loss": own.loss}),
        }
        builder._add_collections(
            v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS), v1.tables_initializer(), own.train_op
        )
        meta_graph = own_saver.export_meta_graph(clear_devices=False, strip_default_attrs=False)
        builder._tag_and_add_meta_graph(meta_graph, [TAG], signatures)
        builder._has_saved_variables = True
    builder.save()


def serving(directory: str) -> Any:
    """A builder for the same model: its variables whole, and nothing of training."""
    import tensorflow as tf

    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    words = v1.placeholder(tf.string, [None], "words")
    table = v1.get_variable("table", [ROWS, 4])
    kernel, bias = v1.get_variable("hidden/kernel", [8, CLASSES]), v1.get_variable("hidden/bias", [CLASSES])
    initializer = tf.lookup.TextFileInitializer(
        f"{directory}/words.txt",
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    numbers = tf.lookup.StaticHashTable(initializer, -1).lookup(words)
    inputs = tf.concat([tf.gather(table, ids), tf.one_hot(numbers, 4)], axis=1)
    logits = (tf.matmul(inputs, kernel) + bias) * v1.get_variable("steepness", [])
    return {"ids": ids, "words": words}, {"scores": tf.nn.softmax(logits)}
