"""`StopAfterHook`, `StopAfterCallback`: end a training in order after a wall-clock time.

The session's saver, and callbacks that save when training ends, work as after any last step. So a job with a
time limit stops by itself, shortly before it would be killed.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from exporter.errors import UsageError
from exporter.options import given
from exporter.training.chief import is_multi_worker
from exporter.training.session_hook import SessionHook
from exporter.training.trainer_side import callback_base

log = logging.getLogger(__name__)


class StopAfterHook(SessionHook):
    """A `SessionRunHook` that asks its session to stop once `seconds` have passed since the hook was made.

    Give it to every worker of an asynchronous training: each stops after its own step.

    Raises:
        UsageError: `seconds` is not positive.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = _deadline(seconds)

    def begin(self) -> None:
        """Do nothing: the graph is not changed."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Do nothing: the time of a recovered session does not start again."""

    def before_run(self, run_context: Any) -> None:
        """Do nothing: a step that has begun is finished."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Ask the session to stop, and log it, once the time has passed."""
        if time.monotonic() >= self._deadline:
            log.info("stopping: the time is up")
            run_context.request_stop()

    def end(self, session: Any) -> None:
        """Do nothing."""


def StopAfterCallback(seconds: float) -> Any:
    """Return a Keras callback (Keras 3 or tf-keras) that stops `fit` `seconds` after the callback was made.

    It looks at the clock after every batch. The workers of a MultiWorkerMirroredStrategy must run the same
    steps: they look at the end of each epoch, and all stop as soon as the time of one has passed.

    Raises:
        UsageError: `seconds` is not positive.
    """
    deadline = _deadline(seconds)

    class Callback(callback_base()):  # type: ignore[misc]  # Keras is untyped
        """Stops `fit` after a batch, or after an epoch with several workers."""

        _supports_tf_logs = True  # tf-keras: do not fetch the batch's results for this callback

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
    if not given.number("seconds", seconds, "StopAfterHook(3600)") > 0:
        raise UsageError(f"training cannot stop after {seconds} s", hint="StopAfterHook(3600)")
    return time.monotonic() + seconds


def _any_worker(strategy: Any, is_due: bool) -> bool:
    """Return True in all workers if `is_due` is true in at least one of them; waits for all workers."""
    import tensorflow as tf

    votes = strategy.run(lambda: tf.constant(float(is_due)))
    return float(strategy.reduce(tf.distribute.ReduceOp.SUM, votes, axis=None)) > 0
