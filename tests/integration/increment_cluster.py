"""A parameter-server cluster that trains tables of every kind; its nodes are killed and started at will."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from examples.cluster import free_ports
from tests.support.forks import FORKS


@dataclass(frozen=True)
class Job:
    """What every node is told. The chief ends at `steps`, when all of `workers` have ended, too.

    All end sooner, and as well, once there is a file `end`.
    """

    directory: Path
    steps: int
    ps: int = 2
    workers: int = 2
    optimizers: tuple[str, ...] = ("sgd", "adagrad")
    save_increment_steps: int = 10
    save_checkpoint_steps: int = 100
    restores: bool = False
    pause_s: float = 0.0
    with_hook: tuple[str, ...] = ("chief", "worker")
    keys: int = 0
    """How many keys a table by keys meets; 0: there is none."""

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def end(self) -> Path:
        return self.directory / "end"

    @property
    def names(self) -> list[str]:
        return [
            *(f"ps-{i}" for i in range(self.ps)),
            "chief-0",
            *(f"worker-{i}" for i in range(self.workers)),
        ]


@dataclass
class Cluster:
    """Processes by name. As a context manager it ends those that still run, by their own pids."""

    job: Job
    nodes: dict[str, BaseProcess] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Cluster:
        names = self.job.names
        ports = free_ports(len(names))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
        for name in names:
            self.start(name)
        return self

    def __exit__(self, *_: Any) -> None:
        for node in self.nodes.values():
            node.kill()
            node.join()

    def start(self, name: str, **changes: Any) -> None:
        from tests.integration.increment_nodes import run

        if name in self.nodes:
            self.kill(name)  # a worker that is done keeps its server, and its port, until it is told
        job = replace(self.job, **changes)
        (job.directory / "done" / name).unlink(missing_ok=True)
        node = FORKS.Process(target=_logged, args=(run, job, name, self.tf_config(name)), daemon=True)
        node.start()
        self.nodes[name] = node

    def kill(self, name: str) -> None:
        self.nodes[name].kill()
        self.nodes[name].join()

    def tf_config(self, name: str) -> str:
        role, _, index = name.partition("-")
        cluster: dict[str, list[str]] = {}
        for node, address in self.addresses.items():
            cluster.setdefault(node.partition("-")[0], []).append(address)
        return json.dumps({"cluster": cluster, "task": {"type": role, "index": int(index)}})

    def wait(self, timeout_s: float = 240.0) -> None:
        """Wait until the chief has ended well.

        Raises:
            RuntimeError: it failed, or time ran out; with the ends of the logs.
        """
        chief = self.nodes["chief-0"]
        chief.join(timeout_s)
        if chief.exitcode != 0:
            raise RuntimeError(f"chief: {chief.exitcode}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n" + log(self.job.directory, name)[-3000:] for name in self.nodes)

    def wait_for(self, what: str, condition: Any, timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not happen\n{self.logs()}")
            time.sleep(0.02)


def log(directory: Path, name: str) -> str:
    return (directory / f"{name}.log").read_text(errors="replace")


def _logged(run: Any, job: Job, name: str, tf_config: str) -> None:
    sink = os.open(job.directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ["TF_CONFIG"] = tf_config
    run(job, name)


def newest(directory: Path) -> Path:
    return max(directory.glob("model.ckpt-*.index"), key=step_of).with_suffix("")


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])
