"""Train the click model in one process and leave a sharded checkpoint, as the guide's starting point.

python examples/ranker/train.py --out train

Once more, it goes on from that checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
from model import ITEMS, USERS, Batch, click_logit

BATCH = 256


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    with tf.Graph().as_default():
        prefix = train(arguments.out, arguments.steps)
    print(f"trained {arguments.steps} steps: {prefix}")


def train(out: Path, steps: int) -> str:
    """Train for some more steps and save; returns the checkpoint's prefix."""
    user, item, clicked = batches()
    logit = click_logit(Batch(user, item))
    step = tf.compat.v1.train.get_or_create_global_step()
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logit))
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.3)
    minimize = optimizer.minimize(loss, global_step=step)
    with tf.control_dependencies([minimize]):
        average = tf.compat.v1.train.ExponentialMovingAverage(0.9, step)
        train_op = average.apply(tf.compat.v1.trainable_variables())
    saver = tf.compat.v1.train.Saver(sharded=True, save_relative_paths=True)
    with tf.compat.v1.Session() as session:
        out.mkdir(parents=True, exist_ok=True)
        if newest := tf.train.latest_checkpoint(out):
            saver.restore(session, newest)
        else:
            session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(steps):
            session.run(train_op)
        return str(saver.save(session, str(out / "model.ckpt"), global_step=step))


def batches() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Endless impressions from a hidden taste: users of a group click on items of their group."""

    def draw(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        ids = tf.random.stateless_uniform([2, BATCH], [seed, 7], maxval=1 << 40, dtype=tf.int64)
        user, item = ids[0] % USERS, ids[1] % ITEMS
        return user, item, tf.cast(tf.equal(user % 5, item % 5), tf.float32)

    dataset = tf.data.Dataset.counter(dtype=tf.int64).map(draw)
    return tuple(tf.compat.v1.data.make_one_shot_iterator(dataset).get_next())


if __name__ == "__main__":
    main()
