"""Choose the context of `tf.init_scope()` while a builder runs: its graph, or eager execution if asked for.

The scope leaves functions, but not a plain graph, in which builders run: TensorFlow and Keras make variables
in it, which are symbols there. Some libraries refuse to work unless `tf.executing_eagerly()` is True in it
(Sonnet 2, `assert_tf2`). Their builders run once more, with eager execution in the scopes that other code
than TensorFlow and Keras opens.

TensorFlow keeps the context that the scope enters on a stack, one for each thread. (Source: `init_scope` in
tensorflow/python/framework/ops.py, `_ContextSwitchStack` in tensorflow/python/eager/context.py.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from msgspec import Struct

_FRAMEWORKS = {"tensorflow", "keras", "tf_keras"}
# Modules whose frames are between the scope and the code that opens it.
_ON_THE_WAY = (
    __name__,
    "contextlib",
    "tensorflow.python.framework.ops",
    "tensorflow.python.util",
    "tensorflow.python.autograph",
)


class InitScopes(Struct):
    """The init scopes opened in a graph; `are_asked_for` if other code than a framework opened one."""

    graph: Any
    are_eager: bool = False
    are_asked_for: bool = False

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Make the graph this thread's default inside the block, and choose the context of init scopes there.

        A scope that other code than TensorFlow or Keras opens sets `are_asked_for`, and is eager if
        `are_eager`. Every other scope is the graph's.
        """
        from tensorflow.python.eager import context

        with self.graph.as_default():
            switches = context.context().context_switches
            switches.push(False, self._enter, self.graph._device_function_stack)
            try:
                yield
            finally:
                switches.pop()

    def _enter(self) -> AbstractContextManager[Any]:
        from tensorflow.python.eager import context

        if _opened_by() in _FRAMEWORKS:
            return self.in_graph()
        self.are_asked_for = True
        return context.eager_mode() if self.are_eager else self.in_graph()


def _opened_by() -> str:
    """Return the top-level package, such as "sonnet", of the code that opens the current init scope.

    It is the first caller outside of `_ON_THE_WAY`; "" if its module has no name.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_of(frame).startswith(_ON_THE_WAY):
        frame = frame.f_back
    return _module_of(frame).partition(".")[0]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
