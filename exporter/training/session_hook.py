"""`SessionHook`: hooks that TensorFlow takes for its own, while importing them stays cheap.

`Estimator.train` refuses whatever is no instance of `tf.train.SessionRunHook`. That class is not there before
TensorFlow is imported, so it becomes a base class when the first hook of a kind is made.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from exporter.terminal.tensorflow_import import said_by_name


class SessionHook:
    """A base of classes whose instances are `tf.train.SessionRunHook`s, too.

    Raises:
        TensorFlowNeeded: there is no TensorFlow, or one that does not fit.
    """

    def __new__(cls: Any, *_: Any, **__: Any) -> Any:
        """An instance of the class with TensorFlow's among its bases."""
        return object.__new__(_session_run_hook(cls))


@cache
def _session_run_hook(cls: Any) -> Any:
    with said_by_name():
        import tensorflow as tf
    theirs = tf.compat.v1.train.SessionRunHook
    if issubclass(cls, theirs):
        return cls
    own = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, theirs), own)
