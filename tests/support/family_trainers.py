"""Trainers' habits beyond the plain ones: reduced precision, averages, late variables, sessions with scopes.

    python -m tests.support.family_trainers DIRECTORY

As in `object_trainers` every job leaves directories with `expected.npz` beside what it saved, and the
functions that make models serve as `--model` too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.object_trainers import IDS, LABELS, chain2, scorer

FEATURES = np.random.default_rng(9).normal(size=(64, 6)).astype(np.float32)
POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16", "float16")


# --- models -------------------------------------------------------------------------------------------------


def precise(keras: Any, policy: str) -> Any:
    """Dense layers and statistics under a dtype policy that the whole program has; float32 answers."""
    with _policy(keras, policy):
        features = keras.Input([6], name="features")
        hidden = keras.layers.Dense(8, activation="relu", name="hidden")(features)
        hidden = keras.layers.BatchNormalization(name="norm")(hidden)
        return keras.Model(features, keras.layers.Dense(2, name="out", dtype="float32")(hidden))


def precise3(policy: str) -> Any:
    import keras

    return precise(keras, policy)


def precise2(policy: str) -> Any:
    import tf_keras

    return precise(tf_keras, policy)


@contextmanager
def _policy(keras: Any, policy: str) -> Iterator[None]:
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


def averaged3() -> Any:
    import keras

    features = keras.Input([6], name="features")
    hidden = keras.layers.Dense(6, activation="tanh", name="a")(features)
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(6, name="b")(hidden))
    return keras.Model(features, keras.layers.Dense(2, name="out")(hidden))


BLOCKS = ("stem", "tower/block1", "tower/block2", "tower/block2/inner")


def nested(*blocks: str) -> Any:
    """A TF1 graph with the names of layers inside layers, some of one shape, and with batch statistics."""
    import tensorflow as tf

    v1 = tf.compat.v1
    hidden = features = v1.placeholder(tf.float32, [None, 6], "features")
    for block in blocks or BLOCKS:
        with v1.variable_scope(block):
            weight = v1.get_variable("dense/W", [6, 6])
            bias = v1.get_variable("dense/b", [6])
            mean = v1.get_variable("norm/moving_mean", [6], trainable=False)
            hidden = tf.tanh(hidden @ weight + bias - mean)
    with v1.variable_scope("output"):
        weight, bias = v1.get_variable("W", [6, 2]), v1.get_variable("b", [2])
    return {"features": features}, {"scores": tf.identity(hidden @ weight + bias, "scores")}


def deeper() -> Any:
    """A layer more than was trained."""
    return nested(*BLOCKS, "tower/block3")


def moved() -> Any:
    """The layers of another program: some have other names."""
    return nested("stem", "towers/block1", "towers/block2", "towers/block2/inner")


# --- jobs ---------------------------------------------------------------------------------------------------


def keep(directory: Path, inputs: Mapping[str, Any], answers: Any) -> None:
    """What a framework's own model answers, beside what it saved."""
    directory.mkdir(parents=True, exist_ok=True)
    outputs = answers if isinstance(answers, Mapping) else {"answers": answers}
    arrays = {f"out/{name}": np.asarray(value, np.float32) for name, value in outputs.items()}
    np.savez(directory / "expected.npz", **{f"in/{name}": value for name, value in inputs.items()}, **arrays)


def precision(root: Path) -> None:
    """Every policy, in every form that a model is saved in."""
    import keras
    import tensorflow as tf
    import tf_keras

    for number, policy in enumerate(POLICIES):
        for library, name in ((keras, f"{policy}-3"), (tf_keras, f"{policy}-2")):
            library.utils.set_random_seed(number)
            model = precise(library, policy)
            model.compile(library.optimizers.SGD(0.05), "mse")
            model.fit(FEATURES, LABELS, batch_size=16, epochs=2, verbose=0)
            # As a graph: run one operation at a time, sums are rounded to half precision more often.
            answers = tf.function(model)(FEATURES, training=False)
            keep(root / name, {"features": FEATURES}, answers)
            model.save(root / name / "model.keras")
            model.save_weights(root / name / "model.weights.h5")
            tf.train.Checkpoint(model=model).write(root / name / "ckpt")


def averages(root: Path) -> None:
    """An optimizer that keeps averages: saved while it trains, and when it has put the averages in."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(4)
    model, twin = averaged3(), averaged3()
    model.compile(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8), "mse")

    def save(name: str) -> None:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(root / name / "ckpt")
        keep(root / name, {"features": FEATURES}, model(FEATURES, training=False))
        model.save_weights(root / name / "model.weights.h5")

    def at_batch(batch: int, logs: Any) -> None:
        if batch == 2:
            save("training")
            twin.set_weights(model.get_weights())
            model.optimizer.finalize_variable_values(trained := model.trainable_variables)
            keep(root / "training-average", {"features": FEATURES}, model(FEATURES, training=False))
            for variable, raw in zip(trained, twin.trainable_variables, strict=True):
                variable.assign(raw)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=at_batch)
    model.fit(FEATURES, LABELS, batch_size=16, verbose=0, callbacks=[callback])
    save("trained")


def late(root: Path) -> None:
    """A checkpoint restored into a model whose variables do not exist yet, trained on and saved again."""
    import tensorflow as tf
    import tf_keras

    tf_keras.utils.set_random_seed(5)
    first = chain2()
    first.compile("sgd", "mse")
    first.fit(IDS, LABELS, verbose=0)
    path = tf.train.Checkpoint(model=first).save(root / "first" / "ckpt")
    model = type(first)()
    checkpoint = tf.train.Checkpoint(model=model)
    status = checkpoint.restore(path)
    model(IDS[:1])
    status.assert_existing_objects_matched()
    model.compile("sgd", "mse")
    model.fit(IDS, LABELS, verbose=0)
    checkpoint.save(root / "late" / "ckpt")
    keep(root / "late", {"ids": IDS[:5]}, model(IDS[:5], training=False))


def wrappers(root: Path) -> None:
    """Lists and dicts of variables tracked by the checkpoint itself, without a model around them."""
    import tensorflow as tf

    net = scorer()
    net.mixers[1].assign_add(tf.ones_like(net.mixers[1]))
    tracked = {"table": net.table, "mixers": net.mixers, "heads": net.heads}
    tf.train.Checkpoint(epoch=tf.Variable(3), **tracked).save(root / "wrappers" / "ckpt")
    keep(root / "wrappers", {"ids": IDS[:5]}, net.serve(tf.constant(IDS[:5])))


def backups(root: Path) -> None:
    """Keras 3's and tf-keras' backup callbacks that save every few batches."""
    import keras
    import tf_keras

    for library, make, name in (
        (keras, keras.callbacks.BackupAndRestore, "backup-3"),
        (tf_keras, tf_keras.callbacks.BackupAndRestore, "backup-2"),
    ):
        library.utils.set_random_seed(6)
        model = precise(library, "float32")
        model.compile("adam", "mse")
        callback = make(str(root / name), save_freq=2, delete_checkpoint=False)
        model.fit(FEATURES, LABELS, batch_size=16, epochs=3, verbose=0, callbacks=[callback])
        keep(root / name, {"features": FEATURES}, model(FEATURES, training=False))


def session(root: Path) -> None:
    """A monitored session, and at its end weights in the forms of `tl.files`, by its own calls."""
    import h5py
    import tensorflow as tf

    v1 = tf.compat.v1
    target = root / "nested"
    with tf.Graph().as_default():
        v1.set_random_seed(7)
        inputs, outputs = nested()
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_mean((outputs["scores"] - LABELS) ** 2)
        statistics = [v for v in v1.global_variables() if v.op.name.endswith("moving_mean")]
        means = [
            v1.assign_add(mean, tf.fill(mean.shape, 0.01 * (n + 1))) for n, mean in enumerate(statistics)
        ]
        train = v1.group(v1.train.RMSPropOptimizer(0.01).minimize(loss, step), *means)
        layers = [*v1.trainable_variables(), *statistics]
        feeds = {inputs["features"]: FEATURES}
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(target / "session"), save_checkpoint_steps=10
        ) as running:
            for _ in range(20):
                running.run(train, feeds)
            raw = running._tf_sess()
            values = raw.run(layers)
            keep(target, {"features": FEATURES}, {"scores": raw.run(outputs["scores"], feeds)})
    names = [variable.name for variable in layers]
    np.savez(target / "dict.npz", **dict(zip(names, values, strict=True)))
    np.savez(target / "numbered.npz", **{str(n): value for n, value in enumerate(values)})
    with h5py.File(target / "model.hdf5", "w") as file:
        _write_layers(file, "", dict(zip(names, values, strict=True)))


def supervised(root: Path) -> None:
    """The class that came before monitored sessions."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.set_random_seed(8)
        inputs, outputs = nested()
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_mean((outputs["scores"] - LABELS) ** 2)
        train = v1.train.AdagradOptimizer(0.1).minimize(loss, step)
        feeds = {inputs["features"]: FEATURES}
        target, never = str(root / "supervised"), {"save_model_secs": 0, "save_summaries_secs": 0}
        supervisor = v1.train.Supervisor(logdir=target, **never)
        with supervisor.managed_session() as running:
            for _ in range(12):
                running.run(train, feeds)
            supervisor.saver.save(running, supervisor.save_path, global_step=running.run(step))
            scores = running.run(outputs["scores"], feeds)
    keep(root / "supervised", {"features": FEATURES}, {"scores": scores})


def _write_layers(group: Any, scope: str, values: Mapping[str, Any]) -> None:
    """A group for each layer, and for each layer in it: only the innermost hold weights."""
    inside = {name.removeprefix(scope).partition("/")[0] for name in values}
    group.attrs["layer_names"] = [layer.encode("utf8") for layer in sorted(inside)]
    for layer in sorted(inside):
        below = {name: value for name, value in values.items() if name.startswith(f"{scope}{layer}/")}
        own = [name for name in below if "/" not in name.removeprefix(f"{scope}{layer}/")]
        child = group.create_group(layer)
        child.attrs["weight_names"] = [name.encode("utf8") for name in own]
        for name in own:
            child.create_dataset(name, data=values[name])
        rest = {name: value for name, value in below.items() if name not in own}
        if rest:
            _write_layers(child, f"{scope}{layer}/", rest)


JOBS = (precision, averages, late, wrappers, backups, session, supervised)

if __name__ == "__main__":
    for job in JOBS:
        job(Path(sys.argv[1]))
