"""The common base of this package's hooks and callbacks: TensorFlow's own base, and errors by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from exporter.errors import UsageError
from exporter.terminal.tensorflow_import import said_by_name
from exporter.training import trainer_side


class SessionHook(trainer_side.SessionHook):
    """A base of classes whose instances are also `tf.train.SessionRunHook`s; importing it stays cheap.

    Raises:
        TensorFlowNeeded: there is no TensorFlow, or an unsuitable one.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make TensorFlow's class the base, then an instance."""
        with said_by_name():
            return super().__new__(cls)


@contextmanager
def named() -> Iterator[None]:
    """Convert `Refused` errors of the trainer's side to `UsageError`."""
    try:
        yield
    except trainer_side.Refused as error:
        raise UsageError(error.message, cause=error.cause, hint=error.hint) from error


def naming(*methods: str) -> Callable[[type], type]:
    """Decorate a class so that its `methods` raise UsageError instead of the trainer side's `Refused`."""

    def decorate(kind: type) -> type:
        for name in methods:
            setattr(kind, name, named()(getattr(kind, name)))
        return kind

    return decorate
