"""The launcher with nodes that need no TensorFlow: what it starts, whom it ends, what it says."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from examples.cluster import free_ports
from examples.cluster import run_cluster as launch
from tests.support.clusters import ClusterError, run_cluster

_PRELUDE = """
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
role, index = config["task"]["type"], config["task"]["index"]
written = pathlib.Path(f"{role}-{index}.writing")
written.write_text(str(os.getpid()))
written.rename(f"{role}-{index}.pid")  # a node may be ended while it writes
def stay():
    time.sleep(60)
"""


def _script(directory: Path, body: str) -> Path:
    path = directory / "node.py"
    path.write_text(_PRELUDE + body)
    return path


def _running(directory: Path) -> list[str]:
    """The nodes that wrote their process id and still live."""
    pids = {path.stem: int(path.read_text()) for path in directory.glob("*.pid")}
    assert pids
    return [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]


def test_every_node_is_told_its_place_in_one_cluster(tmp_path: Path) -> None:
    body = "print(json.dumps(config), flush=True)\nif role == 'ps': stay()"
    logs = run_cluster(_script(tmp_path, body), cwd=tmp_path, ps=2, workers=3)

    tasks = {name: json.loads(log) for name, log in logs.items() if log}
    clusters = {json.dumps(task["cluster"]) for task in tasks.values()}
    assert set(logs) == {"ps-0", "ps-1", "chief-0", "worker-0", "worker-1", "worker-2"}
    assert tasks["worker-2"]["task"] == {"type": "worker", "index": 2}
    assert len(clusters) == 1
    cluster = json.loads(clusters.pop())
    addresses = [address for members in cluster.values() for address in members]
    assert {role: len(members) for role, members in cluster.items()} == {"ps": 2, "chief": 1, "worker": 3}
    assert len(set(addresses)) == 6


def test_parameter_servers_are_ended_when_the_trainers_have_left(tmp_path: Path) -> None:
    body = (
        "if role == 'ps': stay()\nwhile not all(pathlib.Path(f'ps-{i}.pid').exists() for i in (0, 1)): pass"
    )
    run_cluster(_script(tmp_path, body), cwd=tmp_path)
    assert _running(tmp_path) == []


def test_arguments_and_environment_reach_the_nodes(tmp_path: Path) -> None:
    body = "if role == 'ps': stay()\nprint(sys.argv[1:], os.environ['COLOUR'])"
    script = _script(tmp_path, body)
    logs = run_cluster(script, ["--steps", "3"], cwd=tmp_path, ps=1, workers=0, env={"COLOUR": "green"})
    assert logs["chief-0"] == "['--steps', '3'] green\n"


def test_a_failing_worker_ends_the_cluster_and_its_log_is_shown(tmp_path: Path) -> None:
    body = "if (role, index) == ('worker', 1): sys.exit('out of coffee')\nstay()"
    with pytest.raises(ClusterError, match=r"(?s)worker-1 ended with status 1:.*out of coffee"):
        run_cluster(_script(tmp_path, body), cwd=tmp_path)
    assert _running(tmp_path) == []


def test_a_parameter_server_that_leaves_early_is_a_failure(tmp_path: Path) -> None:
    body = "if role != 'ps': stay()\nprint('tired')"
    with pytest.raises(ClusterError, match=r"(?s)ps-\d ended with status 0:.*tired"):
        run_cluster(_script(tmp_path, body), cwd=tmp_path)
    assert _running(tmp_path) == []


def test_time_running_out_names_the_nodes_that_are_busy(tmp_path: Path) -> None:
    body = "print('still counting', flush=True)\nif role != 'worker': stay()"
    with pytest.raises(ClusterError, match=r"(?s)after 2 s: \['chief-0'\].*still counting"):
        run_cluster(_script(tmp_path, body), cwd=tmp_path, timeout_s=2)
    assert _running(tmp_path) == []


def test_a_node_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    body = """
import signal
if role == 'ps':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path('deaf').touch()
    stay()
while not pathlib.Path('deaf').exists(): time.sleep(0.01)
"""
    run_cluster(_script(tmp_path, body), cwd=tmp_path, ps=1, workers=0)
    assert _running(tmp_path) == []


def test_the_chiefs_lines_are_heard_whole_and_to_the_last(tmp_path: Path) -> None:
    body = """
if role == 'ps': stay()
print(role, 'one', flush=True)
print('t', end='', flush=True); time.sleep(0.5); print('wo', flush=True)
print('three', flush=True)
"""
    heard: list[str] = []
    launch([_script(tmp_path, body)], logs=tmp_path, cwd=tmp_path, ps=1, workers=1, on_line=heard.append)
    assert heard == ["chief one", "two", "three"]


def test_ports_that_are_listened_on_are_not_given_out() -> None:
    with socket.socket() as taken:
        port = free_ports(1)[0]
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert port not in free_ports(200)
    assert len(set(free_ports(200))) == 200


def test_an_alarm_ends_nodes_whose_launcher_was_killed(tmp_path: Path) -> None:
    body = "import signal\nprint(signal.alarm(0), flush=True)\nif role == 'ps': stay()"
    logs = run_cluster(_script(tmp_path, body), cwd=tmp_path, ps=1, workers=0, timeout_s=50)
    assert 50 <= int(logs["chief-0"]) <= 60
