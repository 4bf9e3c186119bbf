"""One node of a cluster that keeps training the click model, and writes an increment every second.

`TF_CONFIG` says which node. Parameter servers hold the partitioned tables; the chief and the workers train
asynchronously on impressions that keep coming. The chief alone writes: full checkpoints now and then,
increments in between and, once the workers have left, what the trained tables themselves answer
(`--expected`): the yardstick for whatever is served then.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.node import AwaitWorkers, Leave, RollCall, Task, await_chief, run
from exporter.training import IncrementHook

v1 = tf.compat.v1

_BATCH = 64
_LEARNING_RATE = 0.1
_QUESTIONS = 4_096


@dataclass(frozen=True)
class Size:
    """Rows of the tables."""

    users: int
    items: int


def main() -> None:
    """Be one node of the cluster until the end."""
    options = _parse()
    run(lambda task, target: train(task, target, options))


def train(task: Task, target: str, options: argparse.Namespace) -> None:
    """Train as the chief or a worker until the file `--until` is there."""
    with v1.device(v1.train.replica_device_setter(worker_device=task.device, cluster=task.cluster)):
        step = v1.train.create_global_step()
        size = Size(options.users, options.items)
        train_op = _training(size, step, seed=1 + task.index + 100 * task.is_chief)
        roll_call = RollCall(task.workers)
        # Every node has the increment hook: whoever writes rows records them. The chief's collects.
        every = options.increment_secs
        increments = IncrementHook(options.ckpt_dir, save_increment_secs=every, is_chief=task.is_chief)
        hooks: list[Any] = [TrainUntil(options.until), increments]
        if task.is_chief:
            hooks.append(Answer(size, step, options.expected))
        else:
            hooks.append(Leave(roll_call))
            await_chief(target, task)
        saver = v1.train.Saver(sharded=True, save_relative_paths=True)
        scaffold = v1.train.Scaffold(saver=saver)
    with v1.train.MonitoredTrainingSession(
        target,
        is_chief=task.is_chief,
        checkpoint_dir=str(options.ckpt_dir),
        scaffold=scaffold,
        hooks=hooks,
        # These end before the saver does: the last checkpoint is of a cluster at rest.
        chief_only_hooks=[AwaitWorkers(roll_call)],
        save_checkpoint_steps=options.save_every,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        config=task.session_config(),
    ) as session:
        while not session.should_stop():
            session.run(train_op)
            time.sleep(options.step_secs)


def _training(size: Size, step: Any, *, seed: int) -> Any:
    """One step of Adagrad, which moves the rows that were looked up and no others; then the count."""
    batch, clicked = _impressions(size, seed)
    logit = model.click_logit(batch, users=size.users, items=size.items)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logit))
    learn = v1.train.AdagradOptimizer(_LEARNING_RATE).minimize(loss)
    with tf.control_dependencies([learn]):
        return v1.assign_add(step, 1)


def _impressions(size: Size, seed: int) -> tuple[model.Batch, Any]:
    """Endless traffic: few users and items see most of it, and users click on items of their group."""

    def draw(number: Any) -> tuple[Any, Any, Any]:
        popularity = tf.random.stateless_uniform([2, _BATCH], [seed, number]) ** 4
        user = tf.cast(popularity[0] * size.users, tf.int64)
        item = tf.cast(popularity[1] * size.items, tf.int64)
        return user, item, tf.cast(tf.equal(user % 5, item % 5), tf.float32)

    numbers = tf.data.Dataset.counter(dtype=tf.int64)
    user, item, clicked = v1.data.make_one_shot_iterator(numbers.map(draw)).get_next()
    return model.Batch(user, item), clicked


class TrainUntil(v1.train.SessionRunHook):
    """Ends training when somebody makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Look for it."""
        if self._file.exists():
            run_context.request_stop()


class Answer(v1.train.SessionRunHook):
    """Writes what the trained tables answer at the end: `click` for `user` and `item`, and the `step`."""

    def __init__(self, size: Size, step: Any, path: Path) -> None:
        self._size, self._step, self._path = size, step, path
        with tf.name_scope("answer"):
            self._batch = model.Batch(v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None]))
            self._click = tf.sigmoid(model.click_logit(self._batch, users=size.users, items=size.items))

    def end(self, session: Any) -> None:
        """Ask about popular rows and others."""
        some = np.arange(_QUESTIONS)
        user, item = some**2 % self._size.users, some * 5 % self._size.items
        feeds = {self._batch.user: user, self._batch.item: item}
        step, click = session.run((self._step, self._click), feeds)
        unfinished = self._path.with_suffix(".part.npz")
        np.savez(unfinished, step=step, user=user, item=item, click=click)
        unfinished.rename(self._path)  # who waits for the file finds all of it


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt-dir", type=Path, required=True, help="where checkpoints and increments go")
    parser.add_argument("--expected", type=Path, required=True, help="the chief's answers, an .npz file")
    parser.add_argument("--until", type=Path, required=True, help="train until this file is there")
    parser.add_argument("--users", type=int, default=model.USERS, help="rows of the table of users")
    parser.add_argument("--items", type=int, default=model.ITEMS, help="rows of the table of items")
    parser.add_argument("--increment-secs", type=float, default=1.0, help="seconds between increments")
    parser.add_argument("--step-secs", type=float, default=0.1, help="seconds to rest after each step")
    parser.add_argument("--save-every", type=int, default=80, help="steps between full checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
