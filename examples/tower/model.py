"""The Keras model that is trained and served: it returns nothing but the model."""

from __future__ import annotations

from typing import Any


def tower(dim: int = 8) -> Any:
    """A score for each of three numbered things, as a Keras 3 model."""
    import keras

    things = keras.Input([3], dtype="int64", name="things")
    rows = keras.layers.Embedding(1000, dim, name="table")(things)
    hidden = keras.layers.Dense(dim, activation="relu", name="hidden")(keras.layers.Flatten()(rows))
    return keras.Model(things, keras.layers.Dense(3, activation="softmax", name="scores")(hidden))
