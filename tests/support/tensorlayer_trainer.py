"""TensorLayer trains its own layers in its own session: `python tensorlayer_trainer.py JOB`, a JSON object.

Importable are TensorFlow 1.15, TensorLayer 1.11.1 and `export_model_trainer`.
"""

import json
import logging
import os
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROWS = 300


def main(text):
    import tensorflow as tf
    import tensorlayer as tl
    from export_model_trainer import IncrementHook

    logging.basicConfig(level=logging.INFO)
    job = json.loads(text)
    train = job["directory"] + "/train"
    tf.logging.set_verbosity(tf.logging.ERROR)
    step = tf.train.get_or_create_global_step()
    ids = tf.cast(tf.random_uniform([8, 3]) ** 3 * ROWS, tf.int64)
    network = tl.layers.EmbeddingInputlayer(ids, ROWS, 4, name="words")
    network = tl.layers.FlattenLayer(network, name="flat")
    network = tl.layers.DenseLayer(network, 1, name="out")
    loss = tl.cost.mean_squared_error(network.outputs, tf.ones([8, 1]))
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, step, var_list=network.all_params)
    hook = IncrementHook(train, save_increment_steps=5)
    stop = tf.train.StopAtStepHook(last_step=job["steps"])
    summaries = {"save_summaries_steps": None, "save_summaries_secs": None}  # its defaults fail on 1.15
    with tl.distributed.DistributedSession(checkpoint_dir=train, hooks=[hook, stop], **summaries) as session:
        while not session.should_stop():
            session.run(train_op)


def serving():
    """The same model, by rows."""
    import tensorflow as tf

    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None, 3], name="ids")
    rows = tf.gather(v1.get_variable("words/embeddings", [ROWS, 4]), ids)
    flat = tf.reshape(rows, [-1, 12])
    out = tf.matmul(flat, v1.get_variable("out/W", [12, 1])) + v1.get_variable("out/b", [1])
    return {"ids": ids}, {"out": out, "rows": flat}


if __name__ == "__main__":
    main(sys.argv[1])
