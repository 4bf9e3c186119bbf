"""Runs a script as every node of a parameter-server cluster on loopback: real processes, real gRPC.

As a command: `python cluster.py SCRIPT ARGUMENTS`, say `digits/train.py --ckpt-dir DIR --expected FILE`
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_S = 0.1
_GRACE_S = 3
_TAIL_LINES = 25
_PORTS = range(15_000, 32_000)
"""Below the range from which Linux gives ports to clients, so that none is taken before a node binds it."""


class ClusterError(RuntimeError):
    """A node failed or time ran out; the message ends with the tail of the log that tells why."""


@dataclass(frozen=True)
class NodeCommand:
    """A script and its arguments, the directory where each node runs them, and for how long at most."""

    words: Sequence[str]
    cwd: Path | None
    seconds: int


Start = Callable[[NodeCommand, Mapping[str, str], Path], Any]
"""From a command, the whole environment and a log to a process as `subprocess.Popen` has it."""


@dataclass(frozen=True)
class Node:
    """One process of the cluster."""

    role: str
    index: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        """`worker-1`, say."""
        return f"{self.role}-{self.index}"

    @property
    def has_failed(self) -> bool:
        """True after a bad exit; a parameter server has no good one before the others are done."""
        code = self.process.poll()
        return code is not None and (code != 0 or self.role == "ps")

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class Cluster:
    """A cluster that was started; see `started_cluster`."""

    def __init__(self, nodes: Sequence[Node], listen: Callable[[], None], timeout_s: float) -> None:
        self._nodes = nodes
        self._trainers = [node for node in nodes if node.role != "ps"]
        self._listen = listen
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @property
    def logs(self) -> dict[str, Path]:
        """Each node's log (stdout and stderr), by names such as `chief-0`."""
        return {node.name: node.log for node in self._nodes}

    def is_training(self) -> bool:
        """False once chief and workers have ended well.

        Raises:
            ClusterError: a node has failed, or time has run out.
        """
        busy = [node for node in self._trainers if node.process.poll() is None]
        for node in self._nodes:
            if node.has_failed:
                raise ClusterError(f"{node.name} ended with status {node.process.returncode}:\n{node.tail()}")
        if busy and time.monotonic() > self._deadline:
            tails = "\n".join(f"--- {node.name}\n{node.tail()}" for node in busy)
            names = [node.name for node in busy]
            raise ClusterError(f"still running after {self._timeout_s:g} s: {names}\n{tails}")
        self._listen()
        return bool(busy)

    def wait(self) -> None:
        """Return when chief and workers have ended well.

        Raises:
            ClusterError: a node has failed, or time has run out.
        """
        while self.is_training():
            time.sleep(_POLL_S)


@contextmanager
def started_cluster(
    command: Sequence[str | Path],
    *,
    logs: Path,
    ps: int = 2,
    workers: int = 2,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 300,
    on_line: Callable[[str], None] | None = None,
    start: Start | None = None,
) -> Iterator[Cluster]:
    """Start `command`, a Python script and its arguments, as `ps` parameter servers, a chief and `workers`.

    Logs go into the directory `logs`. `env` is added to the environment, `on_line` hears each line of the
    chief's log. `start` starts a node in another way than `start_node`. No process outlives the context.
    """
    logs.mkdir(parents=True, exist_ok=True)
    jobs = {"ps": ps, "chief": 1, "worker": workers}
    given = NodeCommand([str(word) for word in command], cwd, int(timeout_s) + 10)
    with _nodes(given, logs, jobs, env or {}, start or start_node) as nodes:
        chief = next(node for node in nodes if node.role == "chief")
        with _listening(chief.log, on_line) as listen:
            yield Cluster(nodes, listen, timeout_s)


def run_cluster(command: Sequence[str | Path], **options: Any) -> dict[str, Path]:
    """Run a cluster until chief and workers have ended well; each node's log by its name.

    Takes what `started_cluster` takes. Raises ClusterError if a node fails or if time runs out.
    """
    with started_cluster(command, **options) as cluster:
        cluster.wait()
        return cluster.logs


@contextmanager
def _nodes(
    command: NodeCommand, logs: Path, jobs: Mapping[str, int], env: Mapping[str, str], start: Start
) -> Iterator[list[Node]]:
    """Start every node; end those that still run, by their own pids, when the caller leaves."""
    addresses = iter(f"127.0.0.1:{port}" for port in free_ports(sum(jobs.values())))
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in jobs.items() if count}
    nodes: list[Node] = []
    try:
        for role, members in cluster.items():
            for index in range(len(members)):
                log = logs / f"{role}-{index}.log"
                task = {"cluster": cluster, "task": {"type": role, "index": index}}
                own = {**os.environ, **_FRUGAL, **env, "TF_CONFIG": json.dumps(task)}
                nodes.append(Node(role, index, start(command, own, log), log))
        yield nodes
    finally:
        _end(nodes)


def start_node(command: NodeCommand, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A node that says in `log` what it has to say."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, "-c", _WITH_ALARM, str(command.seconds), *command.words],
            env=env,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )


# An alarm survives exec: a node ends soon after its launcher was killed, too. It is set behind an exec of its
# own, because a launcher with gRPC threads must run no Python between fork and exec.
_WITH_ALARM = (
    "import os, signal, sys; signal.alarm(int(sys.argv[1])); "
    "os.execv(sys.executable, [sys.executable, '-u', *sys.argv[2:]])"
)
_FRUGAL = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "no_grpc_proxy": "127.0.0.1",
}
"""Many TensorFlow processes on few cores: one thread a pool, no GPU; and loopback needs no proxy."""


def _end(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if node.process.poll() is None:
            node.process.terminate()
    for node in nodes:
        try:
            node.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of loopback that nobody listens on."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = random.choice(_PORTS)
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports


@contextmanager
def _listening(log: Path, on_line: Callable[[str], None] | None) -> Iterator[Callable[[], None]]:
    """A function that hands over the log's new lines; the last ones go over when the caller leaves."""
    with log.open(errors="replace") as stream:
        pending = ""

        def listen() -> None:
            nonlocal pending
            *lines, pending = (pending + stream.read()).split("\n")
            for line in lines if on_line else ():
                on_line(line)

        yield listen
        listen()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cluster-") as directory:
        try:
            run_cluster(sys.argv[1:], logs=Path(directory), on_line=print)
        except ClusterError as error:
            sys.exit(f"error: {error}")
