"""One node saves for all: who that is, and where the others write what they must save, too.

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with checkpoint_dir("checkpoints", strategy) as directory:
        manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
        ...
        manager.save()

A variable that is kept in pieces by all replicas (SyncOnRead) is read by all of them together, so every
worker has to save. Only the chief's files are kept: a worker writes into `workertemp_<i>/` of the same
directory, as tf-keras' callbacks do, which readers of checkpoints leave alone.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exporter import roles
from exporter.checkpoint.locate import WORKER_PREFIX
from exporter.filesystem import make_directories, remove_tree, writing

Strategy = Any

_CHIEFS = ("chief", "master")


def is_chief(strategy: Strategy | None = None) -> bool:
    """True for the process that saves and exports: the chief of its cluster, or a process alone.

    With a MultiWorkerMirroredStrategy its cluster resolver tells. Any other strategy runs in one process that
    directs all others, as a ParameterServerStrategy's coordinator does. Without a strategy the environment
    tells: `TF_CONFIG`, or what other launchers set (`exporter.roles`). An evaluator is no chief.

    Raises:
        RoleUnknown: the environment contradicts itself.
    """
    return roles.is_chief() if strategy is None else _is_chief_of(strategy)


@contextmanager
def checkpoint_dir(directory: Path | str, strategy: Strategy | None = None) -> Iterator[Path]:
    """The directory that this process shall save into: the chief `directory` itself, others a temporary one.

    The temporary directory lies in `directory` and is removed when the block ends, whatever a killed worker
    left there when it begins. Use it around one save or around the whole training; restore from `directory`
    in all processes.

    Raises:
        RoleUnknown: as `is_chief`.
        TargetNotWritable, DiskFull, PublishError: the directory cannot be made.
    """
    shared = Path(directory)
    is_saver, worker = is_chief(strategy), _worker(strategy)
    with writing(shared):
        make_directories(shared)
    if is_saver:
        _remove_of_former_workers(shared, strategy)
        yield shared
        return
    own = shared / f"{WORKER_PREFIX}{worker}"
    remove_tree(own)
    with writing(own):
        make_directories(own)
    try:
        yield own
    finally:
        remove_tree(own)


def is_multi_worker(strategy: Strategy | None) -> bool:
    """True if several processes run the same strategy, each of them a part of the training."""
    import tensorflow as tf

    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and len(_tasks(strategy)) > 1


def _is_chief_of(strategy: Strategy) -> bool:
    if not is_multi_worker(strategy):
        return True
    task, tasks = _task(strategy), _tasks(strategy)
    has_chief = any(job in _CHIEFS for job, _ in tasks)
    return task[0] in _CHIEFS or (task == ("worker", 0) and not has_chief)


def _worker(strategy: Strategy | None) -> str:
    """What tells this worker from the others: its number, with its job if that is not `worker`."""
    if is_multi_worker(strategy):
        return _numbered(*_task(strategy))
    role = roles.node_role()
    if role.index is None:  # AutoDist does not number its workers
        return re.sub(r"\W", "-", socket.gethostname())
    return _numbered(role.type.value, role.index)


def _numbered(job: str, index: int) -> str:
    return str(index) if job == "worker" else f"{job}_{index}"


def _task(strategy: Strategy) -> tuple[str, int]:
    resolver = strategy.cluster_resolver
    return resolver.task_type, resolver.task_id


def _tasks(strategy: Strategy) -> list[tuple[str, int]]:
    """The tasks that run a MultiWorkerMirroredStrategy; none if it has no cluster."""
    spec = strategy.cluster_resolver.cluster_spec()
    jobs = [job for job in (*_CHIEFS, "worker") if job in spec.jobs]
    return [(job, index) for job in jobs for index in spec.task_indices(job)]


def _remove_of_former_workers(shared: Path, strategy: Strategy | None) -> None:
    """Chief: what was left by workers that a smaller cluster has no longer. Others remove their own."""
    if not is_multi_worker(strategy):
        return
    known = {str(index) for job, index in _tasks(strategy) if job == "worker"}
    for left in shared.glob(f"{WORKER_PREFIX}[0-9]*"):
        if left.name.removeprefix(WORKER_PREFIX) not in known:
            remove_tree(left)
