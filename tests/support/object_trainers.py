"""Training jobs of TensorFlow 2 and both Kerases, each what its users run; a process of its own runs them.

    python -m tests.support.object_trainers keras3 DIRECTORY

Every job leaves a checkpoint in a directory of its own, and `expected.npz` beside it: inputs, and what the
framework's own model answers at the end. The functions that make models serve as `--model` too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IDS = np.random.default_rng(7).integers(0, 11, (64, 3))
LABELS = np.random.default_rng(8).random((64, 2)).astype(np.float32)


def tower(keras: Any) -> Any:
    """A functional model with two hidden layers of one shape."""
    layers = keras.layers
    ids = keras.Input([3], dtype="int64", name="ids")
    hidden = layers.Flatten()(layers.Embedding(11, 4, name="table")(ids))
    hidden = layers.BatchNormalization(name="norm")(layers.Dropout(0.5)(hidden))
    for number in (1, 2):
        hidden = layers.Dense(12, activation="tanh", name=f"hidden{number}")(hidden)
    return keras.Model(ids, layers.Dense(2, name="out")(hidden))


def chain(keras: Any) -> Any:
    """A subclassed model whose layers are in a list and have names by number."""

    class Chain(keras.Model):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(11, 4)
            self.flat = keras.layers.Flatten()
            self.steps = [keras.layers.Dense(12, activation="tanh") for _ in range(3)]
            self.out = keras.layers.Dense(2)

        def call(self, ids: Any, training: bool = False) -> Any:
            hidden = self.flat(self.table(ids))
            for step in self.steps:
                hidden = step(hidden)
            return self.out(hidden)

    model = Chain()
    model(keras.Input([3], dtype="int64", name="ids"))
    return model


def tower3() -> Any:
    import keras

    return tower(keras)


def tower2() -> Any:
    import tf_keras

    return tower(tf_keras)


def chain3() -> Any:
    import keras

    return chain(keras)


def chain2() -> Any:
    import tf_keras

    return chain(tf_keras)


def scorer() -> Any:
    """A `tf.Module` with unnamed variables in lists and dicts, and two signatures."""
    import tensorflow as tf

    class Scorer(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(tf.random.normal([11, 4], seed=1), name="table")
            self.mixers = [tf.Variable(tf.random.normal([4, 4], seed=2 + n)) for n in range(2)]
            self.heads = {name: tf.Variable(tf.random.normal([4, 2], seed=9)) for name in ("click", "buy")}
            self.signatures = {"serving_default": self.serve, "rows": self.rows}

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64, name="ids")])
        def serve(self, ids: Any) -> Any:
            hidden = tf.reduce_sum(tf.gather(self.table, ids), axis=1)
            for mixer in self.mixers:
                hidden = tf.tanh(hidden @ mixer)
            return {name: hidden @ head for name, head in self.heads.items()}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
        def rows(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, ids)

    return Scorer()


def fit(model: Any, epochs: int = 2, **options: Any) -> None:
    model.compile("adam", "mse")
    model.fit(IDS, LABELS, batch_size=16, epochs=epochs, verbose=0, **options)


def expect(directory: Path, model: Any) -> None:
    answers = np.asarray(model(IDS[:5], training=False))
    np.savez(directory / "expected.npz", ids=IDS[:5], answers=answers)


def keras3(root: Path) -> None:
    import keras
    import tensorflow as tf

    for name, make in (("tower3", tower3), ("chain3", chain3)):
        keras.utils.set_random_seed(1)
        model = make()
        fit(model)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(root / name / "ckpt")
        expect(root / name, model)
        if name == "tower3":
            tf.train.Checkpoint(model).write(root / "bare3" / "weights")
            expect(root / "bare3", model)
            twin = make()
            tf.train.Checkpoint(model=model, average=twin).write(root / "twins3" / "ckpt")
            expect(root / "twins3", twin)


def module(root: Path) -> None:
    import tensorflow as tf

    net, step = scorer(), tf.Variable(0, dtype=tf.int64)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step, net=net, mirror={"of": [net]}), root / "manager", max_to_keep=2
    )
    for number in (100, 200, 300):
        step.assign(number)
        net.table.assign_add(tf.ones_like(net.table) * 0.1)
        manager.save(number)
    answers = {name: value.numpy() for name, value in net.serve(tf.constant(IDS[:5])).items()}
    np.savez(root / "manager" / "expected.npz", ids=IDS[:5], **answers)


def keras2(root: Path) -> None:
    import tensorflow as tf
    import tf_keras

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    for name, make in (("tower2", tower2), ("chain2", chain2)):
        tf_keras.utils.set_random_seed(2)
        model = make()
        fit(model)
        model.save_weights(root / name / "weights")
        expect(root / name, model)
        if name == "tower2":
            model.save(root / "saved2" / "model")
            expect(root / "saved2", model)
    model = tower2()
    backup = tf_keras.callbacks.BackupAndRestore(str(root / "backup2"), delete_checkpoint=False)
    fit(model, callbacks=[backup])
    (root / "backup2" / "workertemp_1").mkdir()
    expect(root / "backup2", model)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tower2()
        model.compile("adam", "mse")
    model.fit(IDS, LABELS, batch_size=16, verbose=0)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(root / "mirrored2" / "ckpt")
    expect(root / "mirrored2", model)


JOBS: dict[str, Callable[[Path], None]] = {"keras3": keras3, "module": module, "keras2": keras2}

if __name__ == "__main__":
    job, target = sys.argv[1:]
    JOBS[job](Path(target))
