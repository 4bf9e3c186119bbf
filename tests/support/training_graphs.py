"""Small TF1-style trainings for tests of increments, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from exporter.training import IncrementHook

v1 = tf.compat.v1

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.01, momentum=0.9, centered=True),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adadelta": lambda: v1.train.AdadeltaOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}
LAZY = sorted(OPTIMIZERS.keys() - {"adam"})
"""Those that move only the rows that were looked up."""


class Meanwhile(v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow is untyped
    """Does something while a session is being made, in a session that knows no hooks, as other workers do."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._work(session)


def monitored(
    master: str, directory: Path, save_checkpoint_steps: int, before: list[Any], after: list[Any]
) -> Any:
    """A session that saves checkpoints and nothing else, with hooks `before` its saver's, and `after` it."""
    return v1.train.MonitoredTrainingSession(
        master,
        checkpoint_dir=str(directory),
        save_checkpoint_steps=save_checkpoint_steps,
        save_checkpoint_secs=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        chief_only_hooks=before,
        hooks=after,
    )


@dataclass(frozen=True)
class Training:
    """A graph to train, made anew for each session. `build` returns what is run in every step."""

    directory: Path
    build: Callable[[], Any]
    save_checkpoint_steps: int = 10
    save_increment_steps: int = 3
    master: str = ""
    """A server that keeps the variables when a session ends."""

    def run(self, steps: int, **options: Any) -> Path:
        """Train `steps` steps in a session of its own; the last full checkpoint."""
        with self.session(**options) as (session, train_op):
            for _ in range(steps):
                session.run(train_op)
        newest = tf.train.latest_checkpoint(str(self.directory))
        assert newest is not None
        return Path(newest)

    @contextmanager
    def session(
        self, before: bool = False, meanwhile: tuple[int, int] = (0, 0), **options: Any
    ) -> Iterator[tuple[Any, Any]]:
        """A monitored session and what to run in it; `before` puts the hook before the saver's.

        `meanwhile` are steps of other workers between what the session restores and its own first full
        checkpoint, and between that and what increments restore.
        """
        with tf.Graph().as_default():
            v1.set_random_seed(1)
            step = v1.train.get_or_create_global_step()
            with tf.control_dependencies(tf.nest.flatten(self.build())):
                train_op = v1.assign_add(step, 1)
            hook = IncrementHook(self.directory, save_increment_steps=self.save_increment_steps, **options)
            first, second = (
                Meanwhile(lambda raw, steps=steps: [raw.run(train_op) for _ in range(steps)])
                for steps in meanwhile
            )
            hooks = ([first, hook], [second]) if before else ([first], [second, hook])
            with monitored(self.master, self.directory, self.save_checkpoint_steps, *hooks) as session:
                yield session, train_op


def two_towers(optimizer: str, use_resource: bool) -> Callable[[], Any]:
    """A partitioned table that two features share, a whole one, dense weights (one of them partitioned)."""

    def build() -> Any:
        with v1.variable_scope("", use_resource=use_resource):
            with v1.variable_scope("parts", partitioner=v1.fixed_size_partitioner(3)):
                shared = v1.get_variable("shared", [40, 4])
            table = v1.get_variable("table", [30, 3])
            with v1.variable_scope("columns", partitioner=v1.fixed_size_partitioner(2, axis=1)):
                kernel = v1.get_variable("kernel", [7, 4])
            bias = v1.get_variable("bias", [], initializer=v1.zeros_initializer())
            v1.get_variable("frozen", [5, 2], trainable=False)
        ids = tf.random.uniform([3, 4], 0, 20, tf.int64, seed=3)
        first = v1.nn.embedding_lookup(shared, ids[0])
        second = v1.nn.embedding_lookup(shared, ids[1] * 2, partition_strategy="div")
        rows = tf.concat([first * second, tf.gather(table, ids[2])], axis=1)
        loss = tf.reduce_mean((rows @ tf.convert_to_tensor(kernel) + bias - 1.0) ** 2)
        return OPTIMIZERS[optimizer]().minimize(loss)

    return build
