"""From a trainer's increment to an answer of every replica, all as real processes on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exporter.errors import CallFailed
from exporter.publish.delta_log import list_deltas, read_log
from exporter.publish.versions import read_head
from serving.client import ModelClient
from tests.benchmarks.job import Timer
from tests.support.agents import ROOT, Published, Server, agent, wait

_REQUEST_EVERY_S = 0.02
"""Each replica is asked this often, by a clock: an open loop, which does not slow down with the server."""


@dataclass
class Client:
    """Asks one replica for predictions, and notes when each position was first answered."""

    address: str
    model: str
    first_seen: list[tuple[int, float]] = field(default_factory=list)
    answers: int = 0

    def follow(self, stop: threading.Event) -> None:
        """Ask until told to stop; an answer that goes back is a failure."""
        inputs = {"user": np.array([1]), "item": np.array([1])}
        last, due = -1, time.monotonic()
        with ModelClient(self.address, self.model, deadline_s=30) as client:
            while not stop.is_set():
                due += _REQUEST_EVERY_S
                time.sleep(max(0.0, due - time.monotonic()))
                position = int(client.predict(inputs).outputs["model_position"][0])
                assert position >= last, f"{self.address} went back from {last} to {position}"
                if position > last:
                    self.first_seen.append((position, time.time()))
                    last = position
                self.answers += 1

    def seconds_until(self, position: int, since: float) -> float:
        """From `since` until it answered from `position` or beyond."""
        return next(at for seen, at in self.first_seen if seen >= position) - since


def commit_to_served(timer: Timer, deltas: str, pace_s: str, replicas: str) -> dict[str, list[float]]:
    """Seconds from each commit to the first answer of each replica; and the same for a full version.

    A trainer in numpy writes an increment every `pace_s`, `export-model --watch --incr` publishes, the agent
    applies, a client asks each replica all the time.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        published = Published(Path(directory), ("--stamp",))
        servers = [Server(published.model, stack=stack).start() for _ in range(int(replicas))]
        stop = threading.Event()
        stack.callback(stop.set)
        clients = [Client(server.address, published.model.name) for server in servers]
        stack.enter_context(agent(published.model, *(server.address for server in servers)))
        threads = [threading.Thread(target=client.follow, args=(stop,)) for client in clients]
        for thread in threads:
            thread.start()
        warm = published.publish()  # a version's first update prepares it
        wait(lambda: all(client.first_seen and client.first_seen[-1][0] >= warm for client in clients))
        watching = subprocess.Popen(
            [sys.executable, "-m", "exporter", *published.arguments(), "--watch", "--interval", "0.05", "-q"],
            cwd=ROOT,
        )
        stack.callback(watching.kill)
        with timer:
            for _ in range(int(deltas)):
                time.sleep(float(pace_s))
                published.train()
            wait(lambda: published.is_current)
        newest = published.position
        wait(lambda: all(client.first_seen[-1][0] == newest for client in clients))
        stop.set()
        for thread in threads:
            thread.join()
        commits = {
            delta.end: delta.manifest.created.timestamp()
            for delta in list_deltas(read_log(published.model).path)
            if delta.start >= warm
        }
        assert len(commits) >= int(deltas) // 2, "the exporter did not keep up with the trainer"
        return {
            "served": [client.seconds_until(end, at) for end, at in commits.items() for client in clients],
            "answers": [client.answers for client in clients],
            "deltas": [len(commits)],
        }


def full_version(timer: Timer, versions: str) -> list[float]:
    """Seconds from the commit of a plain version to its first answer; the server polls each second."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        published = Published(Path(directory), plain=True)
        server = Server(published.model, stack=stack, poll_s=1.0).start()
        client = stack.enter_context(ModelClient(server.address, published.model.name, deadline_s=30))
        taken = []
        with timer:
            for _ in range(int(versions)):
                version = published.publish()
                committed = read_head(published.model / str(version)).created.timestamp()
                wait(lambda version=version: _answers(client, version))
                taken.append(time.time() - committed)
        return taken


def _answers(client: ModelClient, version: int) -> bool:
    inputs = {"user": np.array([1]), "item": np.array([1])}
    try:
        return client.predict(inputs).version == version
    except CallFailed:
        return False
