"""A wrapper of a user's own that keeps the kernel of the layer inside, as weight norms do."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="tests")
class WeightNorm(keras.layers.Wrapper):  # type: ignore[misc]
    """Divides the kernel of a layer by its norm, and multiplies by a weight."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.kernel = self.layer.kernel
        self.gain = self.add_weight(shape=(self.kernel.shape[-1],), initializer="ones", name="gain")

    def call(self, inputs: Any) -> Any:
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(self.kernel), axis=0))
        return keras.ops.matmul(inputs, self.kernel / norm * self.gain) + self.layer.bias
