"""A trainer to follow: y = x * weight, where the weight is the step; it saves every five steps, keeps three.

At every 60th step it waits for a file `go-<step>` beside its checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def main(directory: str, last_step: int) -> None:
    import tensorflow as tf

    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    x = tf1.placeholder(tf.float32, [None], "x")
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    tf.multiply(x, weight, "y")
    step = tf1.train.get_or_create_global_step()
    with tf.control_dependencies([tf1.assign_add(weight, 1.0)]):
        train = tf1.assign_add(step, 1)
    saving = tf1.train.CheckpointSaverHook(directory, save_steps=5, saver=tf1.train.Saver(max_to_keep=3))
    hooks = [saving, tf1.train.StopAtStepHook(last_step=last_step)]
    with tf1.train.SingularMonitoredSession(hooks=hooks, checkpoint_dir=directory) as session:
        done = 0
        while not session.should_stop():
            while done % 60 == 0 and not Path(directory, f"go-{done}").exists():
                time.sleep(0.01)
            done = int(session.run(train))
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
