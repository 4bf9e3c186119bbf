"""A training that saves an archive at each epoch, in the ways that users of either Keras do.

    python -m tests.support.epochs_trainer DIRECTORY

Each way has a directory of its own. Beside them `epoch-<n>.npz` has the model's values by the names of its
variables, and what it answers. The functions that make models serve as `--model`, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

EPOCHS = 3
IDS = np.random.default_rng(7).integers(0, 400, (64, 3))
LABELS = np.random.default_rng(8).random((64, 2)).astype(np.float32)


def tower(keras: Any, hidden: tuple[str, ...] = ("hidden", "again")) -> Any:
    """A table by rows, layers of one shape, statistics that are no weights."""
    layers = keras.layers
    ids = keras.Input([3], dtype="int64", name="ids")
    found = layers.Flatten(name="flat")(layers.Embedding(400, 8, name="table")(ids))
    found = layers.Dense(8, name="first")(found)
    for name in hidden:
        found = layers.Dense(8, activation="tanh", name=name)(found)
    found = layers.BatchNormalization(name="norm")(found)
    return keras.Model(ids, layers.Dense(2, name="scores")(found), name="tower")


def tower3() -> Any:
    import keras

    return tower(keras)


def deeper3() -> Any:
    import keras

    return tower(keras, ("hidden", "between", "again"))


def train(keras: Any, directory: Path, name: str) -> None:
    """Train, and save after each epoch; the learning rate falls, as archives note."""
    keras.utils.set_random_seed(3)
    model = tower(keras)
    model.compile("adam", "mse")
    for epoch in range(1, EPOCHS + 1):
        model.fit(IDS[: 16 * epoch], LABELS[: 16 * epoch], batch_size=16, verbose=0)
        model.optimizer.learning_rate = 0.01 / epoch
        save(model, directory, name, epoch)
        values = {getattr(v, "path", v.name).partition(":")[0]: np.asarray(v) for v in model.variables}
        answers = model.predict(IDS, verbose=0)
        np.savez(directory / f"{name}-{epoch}.npz", **values, answers=answers)


def save(model: Any, directory: Path, name: str, epoch: int) -> None:
    """Save one epoch in all ways of this Keras."""
    ends = [".keras", ".weights.h5", ".h5"]
    for end in ends:
        target = directory / f"{name}{end}"
        target.mkdir(exist_ok=True)
        path = target / f"epoch-{epoch:02}{end}"
        (model.save_weights if end == ".weights.h5" else model.save)(path)
    if name == "keras3":
        for end in (".weights.json", ".npz", ".safetensors"):
            (directory / f"{name}{end}").mkdir(exist_ok=True)
        model.save_weights(
            directory / f"{name}.weights.json/epoch-{epoch:02}.weights.json", max_shard_size=2e-5
        )
        values = {variable.path: np.asarray(variable) for variable in model.variables}
        np.savez(directory / f"{name}.npz/epoch-{epoch:02}.npz", **values)
        from safetensors.numpy import save_file

        save_file(values, directory / f"{name}.safetensors/epoch-{epoch:02}.safetensors")


def main(directory: Path) -> None:
    import keras
    import tf_keras

    train(keras, directory, "keras3")
    train(tf_keras, directory, "keras2")
    keras.utils.set_random_seed(4)
    deeper = tower(keras, ("hidden", "between", "again"))
    for end in (".keras", ".weights.h5"):
        (deeper.save if end == ".keras" else deeper.save_weights)(directory / f"deeper{end}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
