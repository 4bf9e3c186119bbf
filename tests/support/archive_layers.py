"""A layer of a user's own, in a module that an archive names."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="tests")
class Scale(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight for each column."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor
