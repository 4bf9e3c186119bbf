"""Training jobs that leave archives: both Kerases, TensorLayer's writers after its sources, V1 savers.

    python -m tests.support.archive_trainers DIRECTORY

Every job has a directory of its own. Beside its archives it leaves `expected.npz`: inputs, and what the
framework's own model answers. The functions that make models serve as `--model` too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IDS = np.random.default_rng(7).integers(0, 11, (64, 3))
FEATURES = np.random.default_rng(9).random((64, 4)).astype(np.float32)
LABELS = np.random.default_rng(8).random((64, 2)).astype(np.float32)


def branches(keras: Any, hidden: tuple[str, ...] = ("first", "second", "third")) -> Any:
    """Layers of one shape, an inner model, a recurrent layer, normalisation; some names are Keras' own."""
    layers = keras.layers
    ids, features = keras.Input([3], dtype="int64", name="ids"), keras.Input([4], name="features")
    inner = keras.Input([4], name="inner")
    tower = keras.Model(inner, layers.Dense(4, name="dense_in_tower")(inner), name="tower")
    table = layers.LSTM(4, name="recurrent")(layers.Embedding(11, 4, name="table")(ids))
    deep = layers.BatchNormalization()(tower(features))
    for name in hidden:
        deep = layers.Dropout(0.2)(layers.Dense(4, activation="tanh", name=name)(deep))
    deep = layers.Dense(4)(layers.LayerNormalization()(deep))
    out = layers.Dense(2, name="out")(layers.Concatenate()([table, deep]))
    return keras.Model([ids, features], out, name="branches")


def branches3() -> Any:
    import keras

    return branches(keras)


def branches2() -> Any:
    import tf_keras

    return branches(tf_keras)


def permuted3() -> Any:
    """The layers of one shape in another order: every shape still fits."""
    import keras

    return branches(keras, ("second", "first", "third"))


def renamed3() -> Any:
    import keras

    return branches(keras, ("one", "two", "three"))


def fewer3() -> Any:
    import keras

    return branches(keras, ("first", "second"))


def more3() -> Any:
    import keras

    return branches(keras, ("first", "second", "third", "fourth"))


def mlp() -> Any:
    """A graph with the names that TensorLayer's DenseLayer gives, layers in the order of their making."""
    import tensorflow as tf

    v1 = tf.compat.v1
    hidden = features = v1.placeholder(tf.float32, [None, 4], "features")
    for name, width in (("dense1", 6), ("dense2", 6), ("output", 2)):
        with v1.variable_scope(name):
            weight = v1.get_variable("W", [hidden.shape[1], width], use_resource=True)
            bias = v1.get_variable("b", [width], use_resource=True)
            hidden = tf.tanh(hidden @ weight + bias)
    return {"features": features}, {"scores": tf.identity(hidden, "scores")}


def keras3(directory: Path) -> None:
    import keras

    _train_branches(keras, directory, lambda model: _save_keras3(keras, model, directory))
    keras.config.enable_unsafe_deserialization()
    inputs = keras.Input([4], name="features")
    doubled = keras.layers.Dense(2)(keras.layers.Lambda(lambda x: x * 2)(inputs))
    keras.Model(inputs, doubled).save(directory / "lambda.keras")
    from tests.support.archive_layers import Scale

    scaled = keras.Model(inputs, keras.layers.Dense(2, name="out")(Scale(name="scale")(inputs)))
    scaled.compile("sgd", "mse")
    scaled.fit(FEATURES, LABELS, verbose=0)
    scaled.save(directory / "custom.keras")
    np.savez(directory / "custom.npz", features=FEATURES, scores=scaled.predict(FEATURES, verbose=0))


def keras2(directory: Path) -> None:
    import tf_keras

    def save(model: Any) -> None:
        model.save(directory / "model.keras")
        model.save_weights(directory / "model.weights.h5")
        model.save(directory / "model.h5")
        model.save_weights(directory / "legacy_weights.h5")

    _train_branches(tf_keras, directory, save)


def tensorlayer(directory: Path) -> None:
    """npz and hdf5 files as `tl.files` writes them, by its own calls of numpy and h5py."""
    import h5py

    def save(session: Any, variables: Any) -> None:
        values = session.run(variables)
        names = [variable.name for variable in variables]
        np.savez(directory / "dict.npz", **dict(zip(names, values, strict=True)))
        np.savez(directory / "list.npz", *values)
        ragged = np.empty(len(values), object)
        ragged[:] = values
        np.savez(directory / "pickled.npz", params=ragged)
        with h5py.File(directory / "model.hdf5", "w") as file:
            layers = [*dict.fromkeys(name.partition("/")[0] for name in names)]
            file.attrs["layer_names"] = [layer.encode("utf8") for layer in layers]
            for layer in layers:
                group = file.create_group(layer)
                own = [name for name in names if name.startswith(f"{layer}/")]
                group.attrs["weight_names"] = [name.encode("utf8") for name in own]
                for name in own:
                    group.create_dataset(name, data=values[names.index(name)])

    _train_mlp(directory, save)


def v1_saver(directory: Path) -> None:
    import tensorflow as tf

    saver_def = tf.compat.v1.train.SaverDef

    def save(session: Any, variables: Any) -> None:
        for name, sharded in (("single", False), ("sharded", True)):
            saver = tf.compat.v1.train.Saver(write_version=saver_def.V1, sharded=sharded)
            (directory / name).mkdir()
            saver.save(session, str(directory / name / "model.ckpt"), global_step=40)

    _train_mlp(directory, save)


def _train_branches(keras: Any, directory: Path, save: Callable[[Any], None]) -> None:
    keras.utils.set_random_seed(3)
    keras.layers.Dense(1)  # a layer that is not in the model: numbers in names do not begin at 0
    model = branches(keras)
    model.compile("adam", "mse", metrics=["mae"])
    model.fit([IDS, FEATURES], LABELS, batch_size=8, epochs=2, verbose=0)
    answers = model.predict([IDS, FEATURES], verbose=0)
    np.savez(directory / "expected.npz", ids=IDS, features=FEATURES, scores=answers)
    save(model)


def _save_keras3(keras: Any, model: Any, directory: Path) -> None:
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    model.save_weights(directory / "sharded.weights.json", max_shard_size=5e-7)
    model.save(directory / "model.h5")
    backup = keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=False)
    model.optimizer.learning_rate = 0.0
    model.fit([IDS, FEATURES], LABELS, batch_size=8, epochs=1, verbose=0, callbacks=[backup])
    answers = model.predict([IDS, FEATURES], verbose=0)
    np.savez(directory / "backup.npz", ids=IDS, features=FEATURES, scores=answers)


def _train_mlp(directory: Path, save: Callable[[Any, Any], None]) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(5)
        inputs, outputs = mlp()
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_mean((outputs["scores"] - LABELS) ** 2)
        trained = v1.trainable_variables()
        train = v1.train.AdamOptimizer(0.05).minimize(loss, step)
        session.run(v1.global_variables_initializer())
        for _ in range(40):
            session.run(train, {inputs["features"]: FEATURES})
        save(session, trained)
        scores = session.run(outputs["scores"], {inputs["features"]: FEATURES})
    np.savez(directory / "expected.npz", features=FEATURES, scores=scores)


if __name__ == "__main__":
    for name, job in {"keras3": keras3, "keras2": keras2, "tensorlayer": tensorlayer, "v1": v1_saver}.items():
        target = Path(sys.argv[1], name)
        target.mkdir(parents=True)
        job(target)
