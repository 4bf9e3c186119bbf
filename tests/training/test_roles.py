"""What a node is, from each launcher's environment, and each way that can be malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exporter.errors import RoleUnknown
from exporter.training.roles import SINGLE, NodeType, Role, is_chief, node_role

CHIEF, MASTER, WORKER, PS, EVALUATOR = (
    NodeType.CHIEF,
    NodeType.MASTER,
    NodeType.WORKER,
    NodeType.PARAMETER_SERVER,
    NodeType.EVALUATOR,
)
TWO = ["a:1", "b:1"]


def tf_config(cluster: Any = None, task: Any = None, **more: Any) -> dict[str, str]:
    parts = {"cluster": cluster, "task": task, **more}
    return {"TF_CONFIG": json.dumps({name: part for name, part in parts.items() if part is not None})}


def task(type_: str, index: Any = 0) -> dict[str, Any]:
    return {"type": type_, "index": index}


def hosts(job: str, index: int | str, ps: str = "a:1,b:1", workers: str = "c:1,d:1,e:1") -> dict[str, str]:
    return {"JOB_NAME": job, "TASK_INDEX": str(index), "PS_HOSTS": ps, "WORKER_HOSTS": workers}


WITH_CHIEF = {"chief": ["c:1"], "worker": TWO, "ps": TWO}
WITH_MASTER = {"master": ["c:1"], "worker": TWO, "ps": TWO}
WORKERS = {"worker": TWO}


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        (tf_config(WITH_CHIEF, task("chief")), Role(CHIEF, 0, True, "TF_CONFIG")),
        (tf_config(WITH_CHIEF, {"type": "chief"}), Role(CHIEF, 0, True, "TF_CONFIG")),
        (tf_config(WITH_CHIEF, task("worker")), Role(WORKER, 0, False, "TF_CONFIG")),
        (tf_config(WITH_CHIEF, task("ps", 1)), Role(PS, 1, False, "TF_CONFIG")),
        (tf_config(WITH_CHIEF, task("evaluator")), Role(EVALUATOR, 0, False, "TF_CONFIG")),
        (tf_config(WITH_MASTER, task("master")), Role(MASTER, 0, True, "TF_CONFIG")),
        (tf_config(WITH_MASTER, task("worker")), Role(WORKER, 0, False, "TF_CONFIG")),
        (tf_config(WORKERS, task("worker", 0)), Role(WORKER, 0, True, "TF_CONFIG")),
        (tf_config(WORKERS, task("worker", "1")), Role(WORKER, 1, False, "TF_CONFIG")),
        (tf_config({**WORKERS, "chief": []}, task("worker")), Role(WORKER, 0, True, "TF_CONFIG")),
        (tf_config({**WORKERS, "master": None}, task("worker")), Role(WORKER, 0, True, "TF_CONFIG")),
        (tf_config({"worker": {"3": "a:1"}}, task("worker", 3)), Role(WORKER, 3, False, "TF_CONFIG")),
        (tf_config(None, task("worker", 2)), Role(WORKER, 2, False, "TF_CONFIG")),
        (tf_config(None, task("master")), Role(MASTER, 0, True, "TF_CONFIG")),
        (tf_config(None, None), SINGLE),
        (tf_config({}, {}), SINGLE),
        (tf_config(None, {"trial": "1"}, environment="cloud"), SINGLE),
        ({"TF_CONFIG": " "}, SINGLE),
        (hosts("worker", 0), Role(WORKER, 0, True, "JOB_NAME")),
        (hosts("worker", 2), Role(WORKER, 2, False, "JOB_NAME")),
        (hosts("ps", 1), Role(PS, 1, False, "JOB_NAME")),
        ({**hosts("worker", 0), "MASTER_HOST": "m:1"}, Role(WORKER, 0, False, "JOB_NAME")),
        ({**hosts("master", ""), "MASTER_HOST": "m:1"}, Role(MASTER, 0, True, "JOB_NAME")),
        ({"JOB_NAME": "worker", "TASK_INDEX": "1"}, Role(WORKER, 1, False, "JOB_NAME")),
        ({"JOB_NAME": "deploy/main"}, SINGLE),
        ({"TASK_INDEX": "7", "PS_HOSTS": "a:1"}, SINGLE),
        ({"AUTODIST_WORKER": "10.0.0.2"}, Role(WORKER, None, False, "AUTODIST_WORKER")),
        ({"AUTODIST_WORKER": ""}, SINGLE),
        ({"HOROVOD_RANK": "0"}, Role(WORKER, 0, True, "HOROVOD_RANK")),
        ({"OMPI_COMM_WORLD_RANK": "3"}, Role(WORKER, 3, False, "OMPI_COMM_WORLD_RANK")),
        ({}, SINGLE),
    ],
)
def test_roles(environ: dict[str, str], role: Role) -> None:
    assert node_role(environ) == role
    assert is_chief(environ) == role.is_chief


def test_tf_config_goes_before_other_launchers() -> None:
    others = hosts("ps", 0) | {"AUTODIST_WORKER": "10.0.0.2", "HOROVOD_RANK": "1"}
    assert node_role(tf_config(WITH_CHIEF, task("chief")) | others).source == "TF_CONFIG"
    assert node_role(others).source == "JOB_NAME"
    assert node_role(tf_config() | others).source == "JOB_NAME", "a TF_CONFIG that says nothing"


@pytest.mark.parametrize("cluster", [WORKERS, WITH_CHIEF, WITH_MASTER, {"worker": TWO, "ps": TWO}])
def test_every_cluster_has_one_chief(cluster: dict[str, list[str]]) -> None:
    tasks = [task(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    assert sum(is_chief(tf_config(cluster, one)) for one in tasks) == 1


def test_the_last_worker_evaluates_on_request() -> None:
    roles = [node_role(hosts("worker", index), last_worker_evaluates=True) for index in range(3)]
    assert [str(role) for role in roles] == ["worker 0", "worker 1", "evaluator"]
    assert [role.is_chief for role in roles] == [True, False, False]
    assert node_role(hosts("ps", 1), last_worker_evaluates=True).type is PS
    only = {"chief": ["c:1"], "worker": ["a:1"]}
    assert node_role(tf_config(only, task("worker")), last_worker_evaluates=True).type is EVALUATOR
    assert node_role({}, last_worker_evaluates=True) is SINGLE
    with pytest.raises(RoleUnknown, match="lists 1 workers"):
        node_role(hosts("worker", 0, workers="c:1"), last_worker_evaluates=True)


@pytest.mark.parametrize("name", ["AUTODIST_WORKER", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"])
def test_the_last_worker_of_a_cluster_without_a_list_is_not_guessed(name: str) -> None:
    with pytest.raises(RoleUnknown, match=f"{name} does not tell which one that is"):
        node_role({name: "1"}, last_worker_evaluates=True)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TF_CONFIG": "{"}, "not valid JSON"),
        ({"TF_CONFIG": "[1]"}, "expected an object"),
        ({"TF_CONFIG": '{"cluster": ["a:1"], "task": {}}'}, "expected an object"),
        (tf_config({"worker": "a:1"}, task("worker")), "expected a list of addresses"),
        (tf_config({"worker": {"x": "a:1"}}, task("worker")), "expected an index from 0"),
        (tf_config(WORKERS), "TF_CONFIG.task is missing"),
        (tf_config(WORKERS, {"index": 0}), "TF_CONFIG.task.type is None, expected a string"),
        (tf_config(WORKERS, {"type": 3, "index": 0}), "expected a string"),
        (tf_config(WORKERS, {"type": "worker"}), "index is None"),
        (tf_config(WORKERS, task("worker", -1)), "index is -1"),
        (tf_config(WORKERS, task("worker", True)), "index is True"),
        (tf_config(WORKERS, task("worker", 1.0)), "index is 1.0"),
        (
            tf_config(WORKERS, task("worker", 2)),
            "this node is worker 2, and TF_CONFIG's cluster has 2 worker",
        ),
        (tf_config(WORKERS, task("chief")), "this node is chief 0"),
        (tf_config(WORKERS, task("Worker")), "calls this node 'Worker'"),
        (tf_config(WORKERS, task("single")), "calls this node 'single'"),
        (hosts("trainer", 0), "JOB_NAME calls this node 'trainer'"),
        (hosts("worker", ""), "TASK_INDEX is None"),
        (hosts("worker", "one"), "TASK_INDEX is 'one'"),
        (hosts("worker", 3), "this node is worker 3"),
        ({"HOROVOD_RANK": "first"}, "HOROVOD_RANK is 'first'"),
    ],
)
def test_what_is_malformed_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(RoleUnknown) as caught:
        node_role(environ)
    assert words in f"{caught.value.message} {caught.value.cause}"
    assert "--despite role" in caught.value.hint
