"""`StopAfterHook`, `StopAfterCallback`: end a training properly after a wall-clock time.

The session's saver, and callbacks that save when training ends, do so as after any other last step. That is
what a job with a time limit needs, which would be killed a little later.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from exporter.errors import UsageError
from exporter.training.chief import callback_base, is_multi_worker

log = logging.getLogger(__name__)


class StopAfterHook:
    """A `SessionRunHook` that asks its session to stop once `seconds` have passed since the hook was made.

    Give it to every worker of an asynchronous training: each stops after its own step.

    Raises:
        UsageError: `seconds` is not positive.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = _deadline(seconds)

    def begin(self) -> None:
        """Do nothing: the graph is left as it is."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Do nothing: the time does not begin anew."""

    def before_run(self, run_context: Any) -> None:
        """Do nothing: the step that has begun is done."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Stop when it is time."""
        if time.monotonic() >= self._deadline:
            log.info("stopping: the time is up")
            run_context.request_stop()

    def end(self, session: Any) -> None:
        """Do nothing."""


def StopAfterCallback(seconds: float) -> Any:
    """A Keras callback (Keras 3 or tf-keras) that stops `fit` once `seconds` have passed since it was made.

    It looks after every batch. In a MultiWorkerMirroredStrategy, whose workers must do the same steps, they
    agree at the end of each epoch to stop as soon as one of them wants to.

    Raises:
        UsageError: `seconds` is not positive.
    """
    deadline = _deadline(seconds)

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Hands the calls of `fit` over."""

        _supports_tf_logs = True  # tf-keras: the batch's results need not be fetched for this

        def on_train_begin(self, logs: Any = None) -> None:
            strategy = getattr(self.model, "distribute_strategy", None)
            self._together = strategy if is_multi_worker(strategy) else None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self._together is None and time.monotonic() >= deadline:
                self.model.stop_training = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if self._together is not None and _any_worker(self._together, time.monotonic() >= deadline):
                self.model.stop_training = True

    return Callback()


def _deadline(seconds: float) -> float:
    if not seconds > 0:
        raise UsageError(f"training cannot stop after {seconds} s", hint="StopAfterHook(3600)")
    return time.monotonic() + seconds


def _any_worker(strategy: Any, is_due: bool) -> bool:
    """True in all workers if it is due in one."""
    import tensorflow as tf

    votes = strategy.run(lambda: tf.constant(float(is_due)))
    return float(strategy.reduce(tf.distribute.ReduceOp.SUM, votes, axis=None)) > 0
