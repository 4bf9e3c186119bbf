"""A trainer in numpy whose checkpoints are `.keras` archives of a model that it makes again for each."""

from __future__ import annotations

from pathlib import Path

import keras

from tests.support.archive_numpy_trainer import ArchiveNumpyTrainer
from tests.support.numpy_trainer import DENSE, STEP, TABLES, Values

NAMES = {shape: name for name, shape in {**TABLES, **DENSE}.items()}
"""The trainer's names by shape, as Keras names layers by how many it has made."""


class KerasNumpyTrainer(ArchiveNumpyTrainer):
    """As `ArchiveNumpyTrainer`, by archives in which nothing but names that Keras counted differs."""

    suffix = ".keras"

    def write(self, path: Path, values: Values) -> Values:
        """Save the values in a new model, among others that a sweep makes; it has no layer for a scalar."""
        for kind in (keras.layers.Embedding, keras.layers.Dense):
            for _ in range(self.rng.integers(3)):
                kind(1, 1) if kind is keras.layers.Embedding else kind(1)
        model = made()
        model.compile("sgd")
        model.optimizer.iterations.assign(values[STEP])
        for variable in model.weights:
            variable.assign(values[NAMES[variable.shape]])
        model.save(path)
        return {name: value for name, value in values.items() if value.shape or name == STEP}


def made() -> keras.Model:
    """A model of both tables, whose layers the program does not name."""
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    users, items = (
        keras.layers.Embedding(*shape)(x) for shape, x in zip(TABLES.values(), (user, item), strict=True)
    )
    dense = keras.layers.Dense(DENSE["net/kernel"][1], use_bias=False)(users)
    return keras.Model([user, item], {"user_rows": users, "item_rows": items, "dense": dense})
