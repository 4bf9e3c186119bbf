"""`SessionHook`: hooks that TensorFlow takes for its own, while importing them stays cheap.

`Estimator.train` refuses whatever is no instance of `tf.train.SessionRunHook`. That class is not there before
TensorFlow is imported, so it becomes the base class when the first hook is made.
"""

from __future__ import annotations

from typing import Any

from exporter.terminal.tensorflow_import import said_by_name


class _Placeholder:
    """Holds the base's place: Python does not let a class that has none but `object` get another."""


class SessionHook(_Placeholder):
    """A base of classes whose instances are `tf.train.SessionRunHook`s, too.

    Raises:
        TensorFlowNeeded: there is no TensorFlow, or one that does not fit.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """An instance, after TensorFlow's class was made the base."""
        with said_by_name():
            import tensorflow as tf
        SessionHook.__bases__ = (tf.compat.v1.train.SessionRunHook,)
        return object.__new__(cls)
