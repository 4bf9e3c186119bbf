"""One node of the training cluster; `TF_CONFIG` says which, as on a real one.

Parameter servers hold the variables; the chief and the workers train asynchronously. The chief alone writes
sharded checkpoints and summaries and, once every worker has left, what the trained network itself says of the
held-out digits (`--expected`): the yardstick for whatever is served later.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import data
import model
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.node import AwaitWorkers, Leave, RollCall, StopAfter, Task, await_chief, run

v1 = tf.compat.v1

_BATCH = 64
_LEARNING_RATE = 1e-3
_AVERAGE_DECAY = 0.98
_REPORT_EVERY = 300


def main() -> None:
    """Be one node of the cluster until the end."""
    options = _parse()
    run(lambda task, target: train(task, target, options))


def train(task: Task, target: str, options: argparse.Namespace) -> None:
    """Train as the chief or a worker: until `--steps` steps of all nodes together, or for `--seconds`."""
    training, held_out = data.load()
    v1.set_random_seed(task.index)
    with v1.device(v1.train.replica_device_setter(worker_device=task.device, cluster=task.cluster)):
        step = v1.train.create_global_step()
        averages = tf.train.ExponentialMovingAverage(_AVERAGE_DECAY)
        loss, train_op = _training(training, step, averages, seed=task.index)
        roll_call = RollCall(task.workers)
        hooks = [v1.train.StopAtStepHook(last_step=options.steps), StopAfter(options.seconds)]
        if task.is_chief:
            hooks.append(Report(held_out, step, loss, averages, options.expected))
        else:
            hooks.append(Leave(roll_call))
            await_chief(target, task)
        # Sharded: every parameter server writes its own variables; `max_to_keep` unlinks old checkpoints.
        saver = v1.train.Saver(sharded=True, max_to_keep=3, save_relative_paths=True)
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
        save_summaries_steps=50,
        config=task.session_config(),
    ) as session:
        while not session.should_stop():
            session.run(train_op)


def _training(digits: data.Digits, step: Any, averages: Any, *, seed: int) -> tuple[Any, Any]:
    """The loss, and one training step: gradients, then averages, then the count, which is never ahead."""
    batches = tf.data.Dataset.from_tensor_slices((digits.images, digits.labels))
    batches = batches.shuffle(len(digits.labels), seed=seed).repeat().batch(_BATCH)
    images, labels = v1.data.make_one_shot_iterator(batches).get_next()
    network = model.inference(images, training=True)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network.logits))
    v1.summary.scalar("loss", loss)
    v1.summary.histogram("features", network.features)
    weights = v1.trainable_variables()
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        learn = v1.train.AdamOptimizer(_LEARNING_RATE).minimize(loss, var_list=weights)
    with tf.control_dependencies([learn]):
        average = averages.apply(weights)
    with tf.control_dependencies([average]):
        return loss, v1.assign_add(step, 1)


class Report(v1.train.SessionRunHook):
    """Says how training goes and, at its end, what the network makes of the held-out digits."""

    def __init__(self, held_out: data.Digits, step: Any, loss: Any, averages: Any, path: Path) -> None:
        self._held_out = held_out
        self._step, self._loss = step, loss
        self._printed = 0
        self._path = path
        with tf.name_scope("held_out"):
            self._images = v1.placeholder(tf.float32, [None, 8, 8], name="images")
            self._raw = model.inference(self._images, training=False).scores
        with tf.name_scope("held_out_averaged"):
            getter = _average_of(averages)
            self._averaged = model.inference(self._images, training=False, getter=getter).scores

    def before_run(self, run_context: Any) -> Any:
        """Ask for the step and the loss beside the training step."""
        return v1.train.SessionRunArgs((self._step, self._loss))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Print a line now and then."""
        step, loss = run_values.results
        if step // _REPORT_EVERY > self._printed // _REPORT_EVERY:
            self._printed = step
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)

    def end(self, session: Any) -> None:
        """Write the yardstick: scores of raw and of averaged weights, and the step they are from."""
        fetches = (self._step, self._raw, self._averaged)
        step, scores, averaged = session.run(fetches, {self._images: self._held_out.images})
        labels = self._held_out.labels
        np.savez(
            self._path,
            step=step,
            images=self._held_out.images,
            labels=labels,
            scores=scores,
            scores_ema=averaged,
        )
        raw, ema = ((rows.argmax(axis=1) == labels).mean() for rows in (scores, averaged))
        print(f"step {step:4d}  held-out accuracy {raw:.3f}, with moving averages {ema:.3f}", flush=True)


def _average_of(averages: Any) -> model.Getter:
    """A variable getter that gives the moving average in place of each weight that has one."""

    def average(getter: Any, *args: Any, **kwargs: Any) -> Any:
        variable = getter(*args, **kwargs)
        # Slices are averaged each by itself; a partitioned variable has no average of its own.
        if hasattr(variable, "as_tensor"):
            return tf.concat([averages.average(part) for part in variable], axis=0)
        found = averages.average(variable)
        return variable if found is None else found

    return average


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ckpt-dir", type=Path, required=True, help="where the chief writes checkpoints")
    parser.add_argument("--expected", type=Path, required=True, help="the chief's scores, an .npz file")
    parser.add_argument("--steps", type=int, default=600, help="steps of all nodes together")
    parser.add_argument("--seconds", type=float, default=60, help="longest time to train")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
