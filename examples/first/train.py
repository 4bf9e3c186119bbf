"""Write the checkpoints beside this file: a small click model, after 300 and after 320 steps of one trainer.

python examples/first/train.py

`first.py` exports them without TensorFlow, so that they are shipped: see examples/README.md.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
USERS, ITEMS, WIDTH = 800, 200, 8


def main() -> None:
    """Train, and save at both steps."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(1)
        user = v1.placeholder(tf.int64, [None], name="user")
        item = v1.placeholder(tf.int64, [None], name="item")
        clicked = v1.placeholder(tf.float32, [None], name="clicked")
        rows = [_lookup("users", USERS, user), _lookup("items", ITEMS, item)]
        logit = tf.reduce_sum(rows[0] * rows[1], axis=1) + v1.get_variable("bias", [])
        tf.sigmoid(logit, name="click")
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logit))
        train = v1.train.AdagradOptimizer(0.5).minimize(loss, global_step=step)
        saver = v1.train.Saver(max_to_keep=None)
        session.run(v1.global_variables_initializer())
        random = np.random.default_rng(1)
        for until, users in [(300, USERS), (320, 40)]:
            while session.run(step) < until:
                ids = random.integers(0, [users, ITEMS], (64, 2))
                taste = ids[:, 0] % 5 == ids[:, 1] % 5
                session.run(train, {user: ids[:, 0], item: ids[:, 1], clicked: taste})
            prefix = str(HERE / "checkpoints" / "model.ckpt")
            saver.save(session, prefix, step, write_meta_graph=until == 300, write_state=False)


def _lookup(name: str, rows: int, ids: tf.Tensor) -> tf.Tensor:
    table = tf.compat.v1.get_variable(
        name, [rows, WIDTH], initializer=tf.compat.v1.random_normal_initializer(stddev=0.1)
    )
    return tf.nn.embedding_lookup(table, ids)


if __name__ == "__main__":
    main()
