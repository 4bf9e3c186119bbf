"""Save only on the chief of a cluster: which process that is, and where the other processes write.

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with checkpoint_dir("checkpoints", strategy) as directory:
        manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
        ...
        manager.save()

All replicas together read a variable of which each holds a part (SyncOnRead), so every worker has to save.
Only the chief's files are kept: a worker writes into `workertemp_<i>/` of the same directory, like tf-keras'
callbacks, and readers of checkpoints skip that.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exporter.checkpoint.locate import WORKER_PREFIX
from exporter.options import given
from exporter.storage.files import make_directories, remove_tree, writing
from exporter.storage.local_paths import trained_path
from exporter.training import roles

Strategy = Any


def is_chief(strategy: Strategy | None = None) -> bool:
    """True for the process that saves and exports: the chief of its cluster, or a process alone.

    The cluster resolver of a MultiWorkerMirroredStrategy names the chief. Any other strategy runs in one
    process that directs all others, like a ParameterServerStrategy's coordinator. Without a strategy the
    environment decides: `TF_CONFIG`, or the variables of other launchers (`exporter.training.roles`). An
    evaluator is not a chief.

    Raises:
        RoleUnknown: the environment contradicts itself.
    """
    return _role(strategy).is_chief


@contextmanager
def checkpoint_dir(directory: Path | str, strategy: Strategy | None = None) -> Iterator[Path]:
    """Yield the directory to save into: `directory` for the chief, a temporary one for other processes.

    `directory` is made if need be. The temporary directory is inside it, and is removed when the block ends;
    one that a killed worker left is removed when the block begins, by the worker of its number or the chief.
    Use it around one save or around the whole training, and restore from `directory` in all processes.
    `strategy` is as for `is_chief`: without it the environment decides.

    Raises:
        RoleUnknown: the environment contradicts itself.
        UsageError: `directory` is not a path of this machine.
        TargetNotWritable, DiskFull, PublishError: the directory cannot be made.
    """
    shared = given.place("directory", directory, trained_path)
    role = _role(strategy)
    with writing(shared):
        make_directories(shared)
    if role.is_chief:
        _remove_of_former_workers(shared, strategy)
        yield shared
        return
    own = shared / f"{WORKER_PREFIX}{_worker(role)}"
    remove_tree(own)
    with writing(own):
        make_directories(own)
    try:
        yield own
    finally:
        remove_tree(own)


def is_multi_worker(strategy: Strategy | None) -> bool:
    """True if several processes run the same strategy, each of them a part of the training; False for None.

    Imports TensorFlow.
    """
    import tensorflow as tf

    is_for_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return is_for_several and sum(map(len, _jobs(strategy).values())) > 1


def _role(strategy: Strategy | None) -> roles.Role:
    """Return the role in the strategy if there is one, else the role in the environment.

    A strategy of one process has the role `SINGLE`. RoleUnknown if the environment contradicts itself.
    """
    if strategy is None:
        return roles.node_role()
    if not is_multi_worker(strategy):
        return roles.SINGLE
    resolver = strategy.cluster_resolver
    return roles.NodeTask(roles.NodeType(resolver.task_type), resolver.task_id, _jobs(strategy)).role()


def _worker(role: roles.Role) -> str:
    """Return a name that is unique to this worker: its number, preceded by its job if that is not `worker`.

    The machine's name if the worker has no number.
    """
    if role.index is None:  # AutoDist does not number its workers
        return re.sub(r"\W", "-", socket.gethostname())
    is_worker = role.type is roles.NodeType.WORKER
    return str(role.index) if is_worker else f"{role.type.value}_{role.index}"


def _jobs(strategy: Strategy) -> Mapping[str, frozenset[int]]:
    """Return the task numbers that run a MultiWorkerMirroredStrategy, by job; empty if it has no cluster."""
    spec = strategy.cluster_resolver.cluster_spec()
    return {job: frozenset(spec.task_indices(job)) for job in spec.jobs if job in roles.TRAINERS}


def _remove_of_former_workers(shared: Path, strategy: Strategy | None) -> None:
    """Remove, below `shared`, the directories of workers of a former, larger cluster.

    Present workers remove their own. Does nothing unless several processes run the strategy.
    """
    if not is_multi_worker(strategy):
        return
    known = {str(index) for index in _jobs(strategy).get(roles.NodeType.WORKER, ())}
    for left in shared.glob(f"{WORKER_PREFIX}[0-9]*"):
        if left.name.removeprefix(WORKER_PREFIX) not in known:
            remove_tree(left)
