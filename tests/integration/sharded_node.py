"""A node of a ParameterServerStrategy cluster whose chief trains a tf-keras model with sharded variables.

    python sharded_node.py DIRECTORY        (in TF_CONFIG: who this node is)

The chief leaves a checkpoint and `expected.npz` in the directory; the other nodes serve until they are ended.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.object_trainers import IDS, LABELS, expect, tower2


def train(cluster: Any, directory: Path) -> None:
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = tf.distribute.ParameterServerStrategy(cluster, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = tower2()
        optimizer = tf_keras.optimizers.legacy.Adagrad(0.1)

    @tf.function
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(tf.constant(IDS), training=True) - LABELS) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica)

    for _ in range(4):
        coordinator.schedule(step)
    coordinator.join()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(directory / "ckpt"), max_to_keep=2)
    manager.save()
    expect(directory, model)


def main() -> None:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type == "chief":
        train(cluster, Path(sys.argv[1]))
        return
    server = tf.distribute.Server(
        cluster.cluster_spec(),
        job_name=cluster.task_type,
        task_index=cluster.task_id,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4),
    )
    if cluster.task_type == "ps":
        server.join()
    while not (Path(sys.argv[1]) / "expected.npz").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
