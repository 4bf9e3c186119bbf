"""Find this node's role in a training cluster from the environment that its launcher sets.

    TF_CONFIG='{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    JOB_NAME=worker TASK_INDEX=1 PS_HOSTS=a:1 WORKER_HOSTS=b:1,c:1        (TensorLayer, TensorPort)
    AUTODIST_WORKER=10.0.0.2                                              (AutoDist: the chief has none)
    HOROVOD_RANK=1, OMPI_COMM_WORLD_RANK=1                                (Horovod, Open MPI)

The first of these that is set decides. If none is, the node is alone, and its own chief. A cluster has one
chief: its `chief` or `master`; without those its worker 0, as in
tensorflow/python/distribute/multi_worker_util.py. An evaluator is never the chief here: it saves nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import RoleUnknown
from exporter.newer_python import StrEnum
from exporter.options import given

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_HOSTS = ("JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST")

VARIABLES = ("TF_CONFIG", *_HOSTS, "AUTODIST_WORKER", *_RANKS)
"""All environment variables that a role is read from; a process without them is alone."""

_INDEX = re.compile(r"[0-9]{1,9}", re.ASCII)


class NodeType(StrEnum):
    """The work of a node in training; the values are TensorFlow's job names."""

    SINGLE = "single"
    CHIEF = "chief"
    MASTER = "master"
    WORKER = "worker"
    PARAMETER_SERVER = "ps"
    EVALUATOR = "evaluator"


_CHIEFS = frozenset({NodeType.CHIEF, NodeType.MASTER})
_ALONE_IN_THEIR_JOB = _CHIEFS | {NodeType.EVALUATOR}

TRAINERS = _CHIEFS | {NodeType.WORKER}
"""The jobs whose tasks compute; a MultiWorkerMirroredStrategy runs in all of them."""


class Role(Struct, frozen=True):
    """The type of a node, its number among the nodes of that type, and whether it saves for all.

    `index` is None if the launcher does not number its nodes. `source` is the environment variable that the
    role was read from, empty for a node that no launcher started.
    """

    type: NodeType
    index: int | None
    is_chief: bool
    source: str = ""

    def __str__(self) -> str:
        name = "parameter server" if self.type is NodeType.PARAMETER_SERVER else self.type.value
        return name if self.index is None or self.type in _ALONE_IN_THEIR_JOB else f"{name} {self.index}"


SINGLE = Role(NodeType.SINGLE, None, is_chief=True)
"""A node outside of any cluster."""


class NodeTask(Struct, frozen=True):
    """A node's type and index in its cluster; `jobs` has the indices in use for each job that is listed.

    `source` is the environment variable that it comes from, empty for a strategy.
    """

    type: NodeType
    index: int
    jobs: Mapping[str, frozenset[int]]
    source: str = ""

    def role(self) -> Role:
        """Return the node's role; the chief is the cluster's `chief` or `master`, else its worker 0."""
        has_chief = bool(_CHIEFS & self.jobs.keys())
        is_first_worker = self.type is NodeType.WORKER and self.index == 0
        is_chief = self.type in _CHIEFS or (is_first_worker and not has_chief)
        return Role(self.type, self.index, is_chief, self.source)

    def last_worker_evaluates(self) -> Role:
        """Return the node's role in a cluster whose last worker is the evaluator, number 0.

        Only the role of the last worker differs from `role`.

        Raises:
            RoleUnknown: no node would be left to train, or there is no worker.
        """
        workers = self.jobs.get(NodeType.WORKER, frozenset())
        training = self.jobs.keys() & _CHIEFS
        if len(workers) + len(training) < 2 or not workers:
            raise RoleUnknown(
                f"the last worker cannot evaluate: {self.source} lists {len(workers)} workers",
                hint="give the cluster another worker, or a chief",
            )
        role = self.role()
        is_last = self.type is NodeType.WORKER and self.index == max(workers)
        return replace(role, type=NodeType.EVALUATOR, index=0, is_chief=False) if is_last else role


def node_role(environ: Mapping[str, str] | None = None, *, last_worker_evaluates: bool = False) -> Role:
    """Return the role of this node.

    Args:
        environ: the environment variables to read it from; None: this process's.
        last_worker_evaluates: the cluster's last worker is the evaluator instead. A node alone has no
            cluster, and its role does not change.

    Raises:
        RoleUnknown: the environment is malformed or contradicts itself; or the last worker shall evaluate,
            and there is none to spare, or the launcher (AutoDist, Horovod, Open MPI) lists none.
        UsageError: `environ` is not a mapping.
    """
    environ = os.environ if environ is None else environ
    if not isinstance(environ, Mapping):
        hint = "is_chief() reads this process's own"
        raise given.wrong("environ", environ, "environment variables by name, as os.environ", hint)
    task = _task(environ)
    if task is not None:
        return task.last_worker_evaluates() if last_worker_evaluates else task.role()
    role = _without_list(environ)
    if last_worker_evaluates and role.source:
        raise RoleUnknown(
            f"the last worker cannot evaluate: {role.source} does not tell which one that is",
            hint="list the workers in TF_CONFIG, or in WORKER_HOSTS",
        )
    return role


def _without_list(environ: Mapping[str, str]) -> Role:
    """Return the role from launchers that do not list the cluster's nodes; `SINGLE` without one.

    AutoDist's chief appears to be alone. RoleUnknown if a rank is not a number.
    """
    if environ.get("AUTODIST_WORKER", "").strip():
        return Role(NodeType.WORKER, None, is_chief=False, source="AUTODIST_WORKER")
    for name in _RANKS:
        if environ.get(name, "").strip():
            rank = _index(environ[name], name)
            return Role(NodeType.WORKER, rank, is_chief=rank == 0, source=name)
    return SINGLE


def is_chief(environ: Mapping[str, str] | None = None) -> bool:
    """True if this node saves and exports: the chief of its cluster, or a node alone.

    `environ` has the environment variables to read; None: this process's.

    Raises:
        RoleUnknown: the environment is malformed or contradicts itself.
        UsageError: `environ` is not a mapping.
    """
    return node_role(environ).is_chief


def _task(environ: Mapping[str, str]) -> NodeTask | None:
    text = environ.get("TF_CONFIG", "").strip()
    if text and (task := _in_tf_config(_config(text))) is not None:
        return task
    # JOB_NAME alone proves nothing: build servers set it, too.
    beside = ("TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS")
    if environ.get("JOB_NAME", "").strip() and any(environ.get(name, "").strip() for name in beside):
        return _in_hosts(environ)
    return None


def _in_tf_config(config: Mapping[str, Any]) -> NodeTask | None:
    cluster = _object(config.get("cluster"), "cluster")
    jobs = {name: _indices(addresses, name) for name, addresses in cluster.items()}
    jobs = {name: indices for name, indices in jobs.items() if indices}
    task = _object(config.get("task"), "task")
    if "type" not in task and not jobs:
        return None
    if not isinstance(task.get("type"), str):
        found = f".type is {task.get('type')!r}, expected a string" if task else " is missing"
        raise _unclear(f"TF_CONFIG.task{found}")
    type_ = _type(task["type"], "TF_CONFIG")
    given = task.get("index")
    index = 0 if given is None and type_ in _ALONE_IN_THEIR_JOB else _index(given, "TF_CONFIG.task.index")
    return _checked(NodeTask(type_, index, jobs, "TF_CONFIG"))


def _config(text: str) -> Mapping[str, Any]:
    from exporter.wire.json_documents import unique_keys  # late: it imports numpy, and --help needs none

    try:
        return _object(json.loads(text, object_pairs_hook=unique_keys), "")
    except (ValueError, RecursionError) as error:
        raise _unclear(f"TF_CONFIG is not valid JSON: {error}") from error


def _object(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value`, the object `name` of TF_CONFIG ("": all of it); empty for None.

    RoleUnknown for anything but an object.
    """
    if value is not None and not isinstance(value, dict):
        raise _unclear(f"TF_CONFIG{name and '.'}{name} is {value!r:.60}, expected an object")
    return value or {}


def _unclear(cause: str) -> RoleUnknown:
    return RoleUnknown("TF_CONFIG does not tell what this node is", cause=cause)


def _indices(addresses: Any, job: str) -> frozenset[int]:
    """Return the task numbers of a job, which lists addresses, or maps some of its numbers to addresses.

    None, or an empty list, has no tasks; RoleUnknown for anything else. `job` is its name, for the error.
    """
    match addresses:
        case list():
            return frozenset(range(len(addresses)))
        case dict():
            return frozenset(_index(index, f"TF_CONFIG.cluster.{job}") for index in addresses)
        case None:
            return frozenset()
    raise _unclear(f"TF_CONFIG.cluster.{job} is {addresses!r:.60}, expected a list of addresses")


def _in_hosts(environ: Mapping[str, str]) -> NodeTask:
    def hosts(name: str) -> frozenset[int]:
        return frozenset(range(len([host for host in environ.get(name, "").split(",") if host.strip()])))

    listed = {
        NodeType.PARAMETER_SERVER: hosts("PS_HOSTS"),
        NodeType.WORKER: hosts("WORKER_HOSTS"),
        NodeType.MASTER: hosts("MASTER_HOST"),
    }
    jobs = {job.value: indices for job, indices in listed.items() if indices}
    type_ = _type(environ["JOB_NAME"].strip(), "JOB_NAME")
    given = environ.get("TASK_INDEX", "").strip() or None
    index = 0 if given is None and type_ in _ALONE_IN_THEIR_JOB else _index(given, "TASK_INDEX")
    return _checked(NodeTask(type_, index, jobs, "JOB_NAME"))


def _checked(task: NodeTask) -> NodeTask:
    """Return the task if its cluster has it; RoleUnknown otherwise.

    Evaluators need not be listed, and a launcher may list nothing.
    """
    is_listed = not task.jobs or task.index in task.jobs.get(task.type, ())
    if is_listed or (task.type is NodeType.EVALUATOR and NodeType.EVALUATOR not in task.jobs):
        return task
    lists = ", ".join(f"{len(indices)} {job}" for job, indices in sorted(task.jobs.items()))
    raise RoleUnknown(f"this node is {task.type} {task.index}, and {task.source}'s cluster has {lists}")


def _type(text: str, where: str) -> NodeType:
    known = {kind.value: kind for kind in NodeType if kind is not NodeType.SINGLE}
    if text not in known:
        raise RoleUnknown(f"{where} calls this node {text!r}, expected {', '.join(known)}")
    return known[text]


def _index(value: Any, where: str) -> int:
    """Return a task's index, which some launchers write as text.

    RoleUnknown, whose message names `where`, if `value` is not an integer from 0, or a text of one.
    """
    if type(value) is int and value >= 0:  # bool is an int to isinstance
        return value
    if isinstance(value, str) and _INDEX.fullmatch(value.strip()):
        return int(value)
    raise RoleUnknown(f"{where} is {value!r}, expected an index from 0")
