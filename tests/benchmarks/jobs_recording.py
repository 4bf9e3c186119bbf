"""What recording touched rows costs a trainer's step: the same training with and without, in one process."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from exporter.training.trainer_side import Recording, plan_tracking, record
from tests.benchmarks.job import Timer

TABLE_ROWS, WIDTH = 1 << 18, 64
_WARM_UP = 20


def steps(timer: Timer, batch: str, count: str) -> dict[str, float]:
    """Seconds of the median step that looks `batch` rows up, both ways, in turns."""
    trainings = {"plain": _Training(is_recorded=False), "recorded": _Training(is_recorded=True)}
    rng = np.random.default_rng(1)
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    touched: set[int] = set()
    with timer:
        for _ in range(_WARM_UP + int(count)):
            ids = rng.integers(0, TABLE_ROWS, int(batch))
            touched.update(ids.tolist())
            for name, training in trainings.items():
                started = time.perf_counter()
                training.step(ids)
                taken[name].append(time.perf_counter() - started)
    plain, recorded = (training.table() for training in trainings.values())
    assert plain.tobytes() == recorded.tobytes()
    assert trainings["recorded"].collect() == sorted(touched)
    return {name: statistics.median(seconds[_WARM_UP:]) for name, seconds in taken.items()}


class _Training:
    """A table trained by Adagrad, whose slot is written with it."""

    def __init__(self, *, is_recorded: bool) -> None:
        import tensorflow as tf

        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            step = v1.train.get_or_create_global_step()
            ids = v1.placeholder(tf.int64, [None])
            zeros = v1.zeros_initializer()
            table = v1.get_variable("table", [TABLE_ROWS, WIDTH], initializer=zeros, use_resource=True)
            loss = tf.reduce_sum((tf.gather(table, ids) - 1.0) ** 2)
            train_op = v1.train.AdagradOptimizer(0.1).minimize(loss, step)
            initialize = [v1.global_variables_initializer()]
            self._recording: Recording | None = None
            if is_recorded:
                self._recording = record(plan_tracking(v1.global_variables()), step)
                initialize += [variable.initializer for variable in self._recording.variables]
            self._table = table.read_value()
            self._session = v1.Session(graph=graph)
            self._session.run(initialize)
            self.step = self._session.make_callable(train_op, [ids])

    def table(self) -> Any:
        return self._session.run(self._table)

    def collect(self) -> list[int]:
        """The rows that are flagged."""
        assert self._recording is not None
        (group,) = self._recording.groups
        return [int(row) for row in self._session.run(group.collect)]
