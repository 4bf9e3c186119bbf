"""The common base of this package's hooks and callbacks: TensorFlow's own base, and errors by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from exporter.errors import UsageError
from exporter.options import given
from exporter.terminal.tensorflow_import import said_by_name
from exporter.training import trainer_side


class SessionHook(trainer_side.SessionHook):
    """A base of classes whose instances are also `tf.train.SessionRunHook`s; importing it stays cheap.

    Raises:
        TensorFlowNeeded: there is no TensorFlow, or an unsuitable one.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make TensorFlow's class the base of all hooks, then return a new instance.

        Imports TensorFlow; TensorFlowNeeded if there is none, or an unsuitable one.
        """
        with said_by_name():
            return super().__new__(cls)


@contextmanager
def named() -> Iterator[None]:
    """Raise UsageError for a `Refused` of the trainer's side in the block, with the same texts."""
    try:
        yield
    except trainer_side.Refused as error:
        raise UsageError(error.message, cause=error.cause, hint=error.hint) from error


def require_session(session: Any) -> None:
    """Raise UsageError if the argument `session` is not a session of TensorFlow."""
    if not hasattr(session, "graph") or not hasattr(session, "run"):
        raise given.wrong(
            "session", session, "a session of TensorFlow", "with tf.compat.v1.Session() as session:"
        )


def naming(*methods: str) -> Callable[[type], type]:
    """Return a decorator that makes these methods of a class raise UsageError instead of `Refused`.

    The class itself is changed and returned.
    """

    def decorate(kind: type) -> type:
        for name in methods:
            setattr(kind, name, named()(getattr(kind, name)))
        return kind

    return decorate
