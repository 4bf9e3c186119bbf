"""What hooks and callbacks of this package share: TensorFlow's own base, and errors by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from exporter.errors import UsageError
from exporter.terminal.tensorflow_import import said_by_name
from exporter.training import trainer_side


class SessionHook(trainer_side.SessionHook):
    """A base of classes whose instances are `tf.train.SessionRunHook`s, too; importing it stays cheap.

    Raises:
        TensorFlowNeeded: there is no TensorFlow, or one that does not fit.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """An instance, after TensorFlow's class was made the base."""
        with said_by_name():
            return super().__new__(cls)


@contextmanager
def named() -> Iterator[None]:
    """Raise what the trainer's side refuses as a `UsageError`."""
    try:
        yield
    except trainer_side.Refused as error:
        raise UsageError(error.message, cause=error.cause, hint=error.hint) from error


def naming(*methods: str) -> Callable[[type], type]:
    """A decorator of a class, in whose `methods` the trainer's side refuses by `UsageError`."""

    def decorate(kind: type) -> type:
        for name in methods:
            setattr(kind, name, named()(getattr(kind, name)))
        return kind

    return decorate
