"""What a node of a training cluster knows and does: its task, when it may begin, how it leaves."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

_LEAVE_TIMEOUT_MS = 180_000


@dataclass(frozen=True)
class Task:
    """The place of one process in the cluster."""

    cluster: tf.train.ClusterSpec
    role: str
    index: int

    @classmethod
    def from_environment(cls) -> Task:
        """The task that `TF_CONFIG` describes."""
        config = json.loads(os.environ["TF_CONFIG"])
        return cls(tf.train.ClusterSpec(config["cluster"]), config["task"]["type"], config["task"]["index"])

    @property
    def is_chief(self) -> bool:
        """True for the one node that initialises and saves."""
        return self.role == "chief"

    @property
    def device(self) -> str:
        """Where this node computes."""
        return f"/job:{self.role}/task:{self.index}"

    @property
    def workers(self) -> int:
        """Nodes that train beside the chief."""
        return self.cluster.num_tasks("worker") if "worker" in self.cluster.jobs else 0

    def session_config(self) -> Any:
        """One thread a pool; a node sees only the parameter servers and itself, and waits for no other."""
        return v1.ConfigProto(
            device_filters=["/job:ps", self.device],
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=1,
        )


def run(train: Callable[[Task, str], None]) -> None:
    """Be a parameter server for ever; or call `train` with the task and its server's address, then exit."""
    task = Task.from_environment()
    server = tf.distribute.Server(task.cluster, task.role, task.index, config=task.session_config())
    if task.role == "ps":
        server.join()
    with tf.Graph().as_default():
        train(task, server.target)
    sys.stdout.flush()
    os._exit(0)  # a server of TensorFlow's cannot be shut down; taking it apart took up to half a minute


def await_chief(target: str, task: Task) -> None:
    """Wait for the chief to initialise: MonitoredTrainingSession itself would look once in 30 s only."""
    uninitialised = v1.report_uninitialized_variables()
    with v1.Session(target, config=task.session_config()) as session:
        while session.run(uninitialised).size:
            time.sleep(0.05)


class RollCall:
    """A queue on the first parameter server that every worker signs when it leaves."""

    def __init__(self, workers: int) -> None:
        with v1.device("/job:ps/task:0"):
            queue = tf.queue.FIFOQueue(max(workers, 1), [tf.bool], [()], shared_name="roll_call")
            self.sign = queue.enqueue(True)
            self.all_signed = queue.dequeue_many(workers)


class Leave(v1.train.SessionRunHook):
    """Signs the roll call after a worker's last step."""

    def __init__(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call

    def end(self, session: Any) -> None:
        """Sign."""
        session.run(self._roll_call.sign)


class AwaitWorkers(v1.train.SessionRunHook):
    """Keeps the chief from its last checkpoint until every worker has left."""

    def __init__(self, roll_call: RollCall) -> None:
        self._roll_call = roll_call

    def end(self, session: Any) -> None:
        """Wait for every signature, with a deadline."""
        session.run(self._roll_call.all_signed, options=v1.RunOptions(timeout_in_ms=_LEAVE_TIMEOUT_MS))


class StopAfter(v1.train.SessionRunHook):
    """Ends training after so many seconds of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = float("inf")

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Start the clock."""
        self._deadline = time.monotonic() + self._seconds

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Stop at the deadline."""
        if time.monotonic() > self._deadline:
            run_context.request_stop()
