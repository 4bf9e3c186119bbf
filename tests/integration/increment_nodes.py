"""What the nodes of `increment_cluster` run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tensorflow.python.training import monitored_session

from exporter.tables import DynamicTable, TrainableTable
from exporter.training import IncrementHook
from tests.integration.increment_cluster import Job

v1 = tf.compat.v1
# A worker looks every 30 seconds whether the chief is ready; the tests start and kill many.
monitored_session.sm.SessionManager = partial(v1.train.SessionManager, recovery_wait_secs=0.5)

OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.01, momentum=0.9, epsilon=0.1, centered=True),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}
ROWS = 600


def run(job: Job, name: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    proto = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(config["cluster"]),
        job_name=task["type"],
        task_index=task["index"],
        config=proto,
    )
    if task["type"] == "ps":
        server.join()
    with tf.Graph().as_default():
        train(job, name, server, config)
    (job.directory / "done").mkdir(exist_ok=True)
    (job.directory / "done" / name).touch()
    if task["type"] == "worker":
        server.join()  # a session begins when it has reached every server, also of those that are done


def train(job: Job, name: str, server: Any, config: dict[str, Any]) -> None:
    role, is_chief = name.partition("-")[0], name == "chief-0"
    setter = v1.train.replica_device_setter(
        cluster=tf.train.ClusterSpec(config["cluster"]),
        worker_device=f"/job:{role}/task:{config['task']['index']}",
    )
    with v1.device(setter):
        step, train_op = model(job, seed=hash(name) & 0xFFFF)
    hooks = []
    if role in job.with_hook:
        hooks.append(
            IncrementHook(
                job.checkpoints,
                save_increment_steps=job.save_increment_steps,
                is_chief=is_chief,
                incremental_save_restore=job.restores,
            )
        )
    with v1.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=is_chief,
        checkpoint_dir=str(job.checkpoints),
        save_checkpoint_steps=job.save_checkpoint_steps,
        save_checkpoint_secs=None,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=hooks,
        max_wait_secs=60,
    ) as session:
        while session.run(step) < job.steps and not job.end.exists():
            session.run(train_op)
            time.sleep(job.pause_s)
        while is_chief and not all_done(job):
            time.sleep(0.05)


def all_done(job: Job) -> bool:
    return all((job.directory / "done" / f"worker-{i}").exists() for i in range(job.workers))


def model(job: Job, seed: int) -> tuple[Any, Any]:
    """For each optimizer a partitioned table that two features share, a whole table, and a dense weight."""
    step = v1.train.get_or_create_global_step()
    updates = []
    for index, optimizer in enumerate(job.optimizers):
        with v1.variable_scope(optimizer, use_resource=bool(index % 2)):
            loss, variables = tower(seed + index)
            updates.append(OPTIMIZERS[optimizer]().minimize(loss, var_list=variables))
    if job.keys:
        updates += keyed_tower(job, seed)
    with tf.control_dependencies(updates):
        train_op = v1.assign_add(step, 1)
    return step, train_op


def variables() -> tuple[Any, Any, Any]:
    with v1.variable_scope("parts", partitioner=v1.fixed_size_partitioner(3)):
        shared = v1.get_variable("shared", [ROWS, 4])
    table = v1.get_variable("table", [ROWS // 2, 3])
    dense = v1.get_variable("dense", [7, 1], initializer=v1.ones_initializer())
    return shared, table, dense


def tower(seed: int) -> tuple[Any, list[Any]]:
    shared, table, dense = variables()
    ids = tf.cast(tf.random.uniform([3, 8], seed=seed) ** 3 * (ROWS // 2), tf.int64)
    first = tf.nn.embedding_lookup(shared, ids[0])
    second = tf.nn.embedding_lookup(shared, ids[1] * 2 + 1)
    rows = tf.concat([first * second, tf.gather(table, ids[2])], axis=1)
    loss = tf.reduce_mean((rows @ dense - 1.0) ** 2)
    return loss, [*shared, table, dense]


def keyed_tower(job: Job, seed: int) -> list[Any]:
    """A table whose keys come and go: all workers meet the same few, and take some of them away."""
    table = TrainableTable("emb", 3, job.keys)
    ids = tf.random.uniform([12], 0, job.keys, tf.int64, seed=seed) * 7919 - 10**12
    loss = tf.reduce_sum((table.lookup(ids) - 1.0) ** 2)
    trained = OPTIMIZERS["adagrad"]().minimize(loss, var_list=[table.values])
    return [trained, table.remove(tf.random.shuffle(ids, seed=seed)[:4])]


def keyed_serving() -> tuple[dict[str, Any], dict[str, Any]]:
    """The table by keys."""
    ids = v1.placeholder(tf.int64, [None], name="ids")
    return {"ids": ids}, {"rows": DynamicTable("emb", 3, default=-1.0).lookup(ids)}


def serving(optimizers: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything that is trained, by rows; `optimizers` are those of the job, with commas between."""
    rows = v1.placeholder(tf.int64, [None], name="rows")
    outputs = {}
    for optimizer in optimizers.split(","):
        with v1.variable_scope(optimizer):
            shared, table, dense = variables()
        outputs[f"{optimizer}_shared"] = tf.nn.embedding_lookup(shared, rows)
        outputs[f"{optimizer}_table"] = tf.gather(table, rows // 2)
        outputs[f"{optimizer}_dense"] = tf.tile(tf.transpose(dense), [tf.size(rows), 1])
    return {"rows": rows}, outputs


def served(optimizers: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    """What `serving` answers for all rows, from a checkpoint's values by name."""
    answer = {}
    for optimizer in optimizers:
        answer[f"{optimizer}_shared"] = values[f"{optimizer}/parts/shared"]
        answer[f"{optimizer}_table"] = values[f"{optimizer}/table"][np.arange(ROWS) // 2]
        answer[f"{optimizer}_dense"] = np.tile(values[f"{optimizer}/dense"].T, (ROWS, 1))
    return answer
