"""A trainer that runs on every TensorFlow from 1.12 on: `python trainer_of_any_age.py JOB`, a JSON object.

It runs in environments that have TensorFlow and nothing of ours; `trainer_side.py` is loaded from its file.
Every kind trains the same towers, one for each optimizer: a partitioned table that two features share (`mod`
and `div`), a whole table, and a dense weight.
"""

import importlib.util
import json
import logging
import os
import sys
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

v1 = getattr(tf.compat, "v1", tf)
v1.logging.set_verbosity(v1.logging.ERROR)
ROWS = 600
DEFAULTS = {
    "kind": "monitored",
    "optimizers": ["adagrad"],
    "partitioner": "fixed",
    "resource": None,
    "steps": 60,
    "task": ["chief", 0],
    "cluster": {},
    "save_increment_steps": 5,
    "save_checkpoint_steps": 20,
    "filters": False,
    "saver_last": False,
    "averages": False,
    "sync": False,
    "pause_s": 0.0,
    "workers_wait": False,
}


def trainer_side():
    """The module, as a copy of the file beside a trainer would be imported."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../exporter/training/trainer_side.py")
    spec = importlib.util.spec_from_file_location("trainer_side", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lazy_adam():
    from tensorflow.contrib.opt import LazyAdamOptimizer

    return LazyAdamOptimizer(0.01)


OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.01, momentum=0.9, epsilon=0.1, centered=True),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adadelta": lambda: v1.train.AdadeltaOptimizer(0.1),
    "proximal": lambda: v1.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.001),
    "proximal_sgd": lambda: v1.train.ProximalGradientDescentOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
    "lazy_adam": lazy_adam,
}
PARTITIONERS = {
    "fixed": lambda: v1.fixed_size_partitioner(3),
    "min_max": lambda: v1.min_max_variable_partitioner(max_partitions=4, min_slice_size=2 << 10),
    "axis_size": lambda: v1.variable_axis_size_partitioner(max_shard_bytes=3 << 10),
}


def variables(job):
    with v1.variable_scope("parts", partitioner=PARTITIONERS[job["partitioner"]]()):
        shared = v1.get_variable("shared", [ROWS, 4])
    table = v1.get_variable("table", [ROWS // 2, 3])
    dense = v1.get_variable("dense", [7, 1], initializer=v1.ones_initializer())
    return shared, table, dense


def tower(job, ids):
    shared, table, dense = variables(job)
    first = tf.nn.embedding_lookup(shared, ids[0])
    second = v1.nn.embedding_lookup(shared, ids[1] * 2 + 1, partition_strategy="div")
    rows = tf.concat([first * second, tf.gather(table, ids[2])], axis=1, name="rows")
    loss = tf.reduce_mean((tf.matmul(rows, dense) - 1.0) ** 2)
    return loss, [*list(shared), table, dense]


def model(job):
    """The training's operation, and the hooks that the optimizer wants."""
    step = v1.train.get_or_create_global_step()
    updates, hooks = [], []
    ids = tf.cast(v1.random_uniform([3, 8]) ** 3 * (ROWS // 2), tf.int64, name="ids")
    for number, name in enumerate(job["optimizers"]):
        is_resource = bool(number % 2) if job["resource"] is None else job["resource"]
        with v1.variable_scope(name, use_resource=is_resource):
            loss, trained = tower(job, ids)
            optimizer = OPTIMIZERS[name]()
            if job["sync"]:
                optimizer = v1.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2)
            update = optimizer.minimize(loss, global_step=step if job["sync"] else None, var_list=trained)
            if job["sync"]:
                hooks.append(optimizer.make_session_run_hook(job["task"] == ["chief", 0], num_tokens=0))
        if job["averages"]:  # outside of the scope, whose name would stand twice before theirs
            with tf.control_dependencies([update]):
                update = tf.train.ExponentialMovingAverage(0.9).apply(trained)
        updates.append(update)
    if job["sync"]:
        return step, tf.group(*updates), hooks
    with tf.control_dependencies(updates):
        return step, v1.assign_add(step, 1, use_locking=True), hooks


def loops(job, hook):
    """Supervisor, or a session alone; full checkpoints are saved in this thread."""
    directory = job["directory"]
    step, train_op, _ = model(job)
    hook.begin()
    saver = v1.train.Saver(sharded=True)
    newest = v1.train.latest_checkpoint(directory)
    if job["kind"] == "supervisor":
        supervisor = v1.train.Supervisor(logdir=directory, saver=saver, save_model_secs=0, summary_op=None)
        with supervisor.managed_session() as session:
            train_in_loop(job, hook, session, saver, step, train_op)
    else:
        initializer = v1.global_variables_initializer()
        with v1.Session() as session:
            saver.restore(session, newest) if newest else session.run(initializer)
            train_in_loop(job, hook, session, saver, step, train_op)


def train_in_loop(job, hook, session, saver, step, train_op):
    prefix = os.path.join(job["directory"], "model.ckpt")
    begun = session.run(step)
    if begun == 0:
        saver.save(session, prefix, global_step=step)
    hook.after_create_session(session)
    for number in range(begun + 1, job["steps"] + 1):
        session.run(train_op)
        if number % job["save_checkpoint_steps"] == 0:
            saver.save(session, prefix, global_step=step)
        hook.save_if_due(session)
    saver.save(session, prefix, global_step=step)
    hook.end(session)


def estimator(job, hook):
    directory = job["directory"]

    def model_fn(features, labels, mode):
        _, train_op, _ = model(job)
        loss = tf.reduce_sum(tf.cast(features, tf.float32))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def numbers():
        return tf.data.Dataset.from_tensor_slices(([1.0] * 8, [1.0] * 8)).repeat().batch(2)

    config = tf.estimator.RunConfig(
        save_checkpoints_steps=job["save_checkpoint_steps"], log_step_count_steps=1000
    )
    trainer = tf.estimator.Estimator(model_fn, directory, config)
    hooks = [hook]
    if job["saver_last"]:  # EasyRec's own saver is a hook of the user's, after this one
        hooks.append(v1.train.CheckpointSaverHook(directory, save_steps=job["save_checkpoint_steps"]))
    if job["kind"] == "estimator":
        trainer.train(numbers, max_steps=job["steps"] // 2, hooks=hooks)
        trainer.train(numbers, max_steps=job["steps"], hooks=hooks)
    else:
        train = tf.estimator.TrainSpec(numbers, job["steps"], hooks=hooks)
        evaluate = tf.estimator.EvalSpec(numbers, steps=1, start_delay_secs=0, throttle_secs=0)
        tf.estimator.train_and_evaluate(trainer, train, evaluate)


def monitored(job, hook, server=None):
    name, index = job["task"]
    is_chief = name == "chief"
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    if job["filters"]:
        config.device_filters.extend(["/job:ps", "/job:{}/task:{}".format(name, index)])
    setter = None
    if server is not None:
        setter = v1.train.replica_device_setter(
            cluster=tf.train.ClusterSpec(job["cluster"]), worker_device="/job:{}/task:{}".format(name, index)
        )
    with v1.device(setter):
        step, train_op, hooks = model(job)
    scaffold = v1.train.Scaffold(saver=v1.train.Saver(sharded=True, save_relative_paths=True))
    saves = {"save_checkpoint_steps": job["save_checkpoint_steps"], "save_checkpoint_secs": None}
    hooks.append(hook)
    if job["saver_last"] and is_chief:
        every = job["save_checkpoint_steps"]
        hooks.append(v1.train.CheckpointSaverHook(job["directory"], save_steps=every, scaffold=scaffold))
        saves["save_checkpoint_steps"] = None
    with v1.train.MonitoredTrainingSession(
        master=server.target if server is not None else "",
        is_chief=is_chief,
        checkpoint_dir=job["directory"],
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=hooks,
        config=config,
        scaffold=scaffold,
        stop_grace_period_secs=5,  # a thread of SyncReplicasOptimizer waits for gradients that do not come
        **saves,
    ) as session:
        end, started = (os.path.join(job["directory"], name) for name in ("end", "started"))
        if is_chief:
            open(started, "w").close()
        while job["workers_wait"] and not os.path.exists(started):
            time.sleep(0.05)
        while not session.should_stop() and session.run(step) < job["steps"] and not os.path.exists(end):
            session.run(train_op)
            time.sleep(job["pause_s"])
        while is_chief and job["cluster"] and not job["sync"] and not workers_are_done(job):
            time.sleep(0.05)


def workers_are_done(job):
    workers = range(len(job["cluster"].get("worker", ())))
    return all(os.path.exists(os.path.join(job["directory"], "done-{}".format(i))) for i in workers)


def node(job, hook):
    """A process of a cluster; those that are done stay, as sessions begin when they have reached all."""
    from tensorflow.python.training import monitored_session

    manager = v1.train.SessionManager
    # A worker looks every 30 seconds whether the chief is ready.
    monitored_session.sm.SessionManager = lambda *a, **k: manager(*a, **dict(k, recovery_wait_secs=0.5))
    name, index = job["task"]
    server = v1.train.Server(tf.train.ClusterSpec(job["cluster"]), job_name=name, task_index=index)
    if name == "ps":
        server.join()
    monitored(job, hook, server)
    if name == "worker":
        with open(os.path.join(job["directory"], "done-{}".format(index)), "w"):
            pass
        server.join()


def main(text):
    job = dict(DEFAULTS, **json.loads(text))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if hasattr(v1, "disable_eager_execution"):
        v1.disable_eager_execution()
    if job["averages"] and hasattr(v1, "disable_control_flow_v2"):
        # The average of a ref variable begins with its value if it has one; the newer `cond` reads it before.
        v1.disable_control_flow_v2()
    v1.set_random_seed(job["task"][1] + 1)
    hook = trainer_side().IncrementHook(
        job["directory"],
        save_increment_steps=job["save_increment_steps"],
        is_chief=job["task"][0] == "chief",
    )
    run = {"estimator": estimator, "train_and_evaluate": estimator, "supervisor": loops, "loop": loops}
    kind = run.get(job["kind"], node if job["cluster"] else monitored)
    kind(job, hook)


if __name__ == "__main__":
    main(sys.argv[1])
