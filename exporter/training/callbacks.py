"""The base class that a callback needs for the Keras that trains."""

from __future__ import annotations

import sys
from typing import Any


def callback_base() -> Any:
    """tf-keras' `Callback` if the program uses tf-keras: Keras 3 takes it, too. Otherwise Keras 3's."""
    if "tf_keras" in sys.modules:
        import tf_keras

        return tf_keras.callbacks.Callback
    import tensorflow as tf

    return tf.keras.callbacks.Callback
