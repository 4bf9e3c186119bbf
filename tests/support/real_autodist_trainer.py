"""AutoDist trains by one of its strategies: `python /path/of/real_autodist_trainer.py JOB`, a JSON object.

Importable are TensorFlow 1.15, AutoDist 0.7.0rc2 and `export_model_trainer`. `loop` is the page's program.
"""

import json
import logging
import os
import socket
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["AUTODIST_MIN_LOG_LEVEL"] = "WARNING"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROWS = 300


def main(text):
    import autodist.cluster
    import autodist.strategy
    import tensorflow as tf
    from autodist import AutoDist
    from autodist.checkpoint.saver import Saver

    job = json.loads(text)
    tf.logging.set_verbosity(tf.logging.ERROR)
    logging.getLogger("exporter").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("exporter").setLevel(logging.INFO)
    with socket.socket() as found:  # its own choice is 15000
        found.bind(("127.0.0.1", 0))
        autodist.cluster.DEFAULT_PORT_RANGE = iter([found.getsockname()[1]])
    machine = Path(job["directory"], "machine.yml")
    node = {"address": "localhost", "cpus": job["cpus"], "chief": True}
    machine.write_text(json.dumps({"nodes": [node]}))
    strategy = getattr(autodist.strategy, job["strategy"])(**job.get("options", {}))
    distributed = AutoDist(str(machine), strategy)
    with tf.Graph().as_default(), distributed.scope():
        ids = tf.cast(tf.random_uniform([8, 3]) ** 3 * ROWS, tf.int64)
        loss = tf.reduce_mean((scored(ids)[1] - 1.0) ** 2)
        optimizer = getattr(tf.train, job.get("optimizer", "AdagradOptimizer"))(0.1)
        given = {"distributed": distributed, "optimizer": optimizer, "loss": loss, "steps": job["steps"]}
        exec(job["loop"], {"tf": tf, "Saver": Saver, **given})


def scored(ids):
    """Rows of a table, and what a layer makes of them."""
    import tensorflow as tf

    v1 = tf.compat.v1
    rows = tf.nn.embedding_lookup(v1.get_variable("table", [ROWS, 4], use_resource=False), ids)
    flat = tf.reshape(rows, [-1, 12])
    kernel = v1.get_variable("out/kernel", [12, 1], use_resource=False)
    return flat, tf.matmul(flat, kernel) + v1.get_variable("out/bias", [1], use_resource=False)


def serving():
    """The same model."""
    import tensorflow as tf

    ids = tf.compat.v1.placeholder(tf.int64, [None, 3], name="ids")
    flat, out = scored(ids)
    return {"ids": ids}, {"out": out, "rows": flat}


if __name__ == "__main__":
    main(sys.argv[1])
