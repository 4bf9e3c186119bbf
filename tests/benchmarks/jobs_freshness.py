"""From a trainer's increment to an answer of every replica, all as real processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.cluster import started_cluster
from exporter.delta.chunk_digest import chunks, served_digests
from exporter.errors import CallFailed
from exporter.publish.delta_log import list_deltas, read_log
from exporter.publish.versions import read_head, version_dirs
from serving.client import ModelClient
from tests.benchmarks.job import Timer
from tests.support.agents import ROOT, Server, agent, wait
from tests.support.cpu_time import CpuTimes
from tests.support.trainer_replay import Recording

_REQUEST_EVERY_S = 0.02
"""Each replica is asked this often, by a clock: an open loop, which does not slow down with the server."""
_BATCH = 64
_SIZE = {"users": 200_000, "items": 20_000}
_MODEL = ROOT / "examples" / "ranker" / "model.py"
_WARM_UP = 2
"""Increments before those that count: a version's first update prepares it."""
_IDLE_S = 5.0
_STEP_SECS, _INCREMENT_SECS, _SAVE_EVERY = 0.01, 0.02, 240
"""The cluster writes as fast as it can while it is recorded; when it is played, it takes its time."""


def record(timer: Timer, directory: str, increments: str) -> None:
    """Let a cluster of 4 processes train, and record what it leaves: so many increments."""
    place, wanted = Path(directory), int(increments) + _WARM_UP
    train, until, kept = place / "train", place / "until", place / "kept"
    kept.mkdir(parents=True)
    recording, stop = Recording(kept), threading.Event()
    node = [ROOT / "examples" / "ranker" / "online.py", "--ckpt-dir", train, "--until", until]
    size = [part for name, rows in _SIZE.items() for part in (f"--{name}", str(rows))]
    pace = {"step-secs": _STEP_SECS, "increment-secs": _INCREMENT_SECS, "save-every": _SAVE_EVERY}
    size += [part for name, value in pace.items() for part in (f"--{name}", str(value))]
    options = ["--expected", place / "expected.npz", *size]
    with timer, started_cluster([*node, *options], logs=place / "logs", workers=1, timeout_s=550) as cluster:
        follower = threading.Thread(target=recording.follow, args=(train, stop))
        follower.start()
        while len(recording.increments) < wanted and cluster.is_training():
            time.sleep(0.1)
        until.touch()
        while cluster.is_training():
            time.sleep(0.1)
        stop.set()
        follower.join()


@dataclass
class Client:
    """Asks one replica for predictions, and notes when each position was first answered, and how fast."""

    address: str
    model: str
    first_seen: list[tuple[int, float]] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    wrong: str = ""

    def follow(self, stop: threading.Event) -> None:
        """Ask until told to stop."""
        inputs = {"user": np.arange(_BATCH), "item": np.arange(_BATCH)}
        due = time.monotonic()
        with ModelClient(self.address, self.model, deadline_s=30) as client:
            while not stop.is_set():
                due += _REQUEST_EVERY_S
                time.sleep(max(0.0, due - time.monotonic()))
                found = set(client.predict(inputs).outputs["model_position"].tolist())
                self.latencies.append((time.time(), time.monotonic() - due))
                self._see(found)

    def _see(self, positions: set[int]) -> None:
        (position, *others), last = sorted(positions), self.first_seen[-1][0] if self.first_seen else -1
        if others or position < last:
            self.wrong = f"{self.address} answered from {sorted(positions)} after {last}"
        if position > last:
            self.first_seen.append((position, time.time()))

    def at(self, position: int) -> float:
        """When it first answered from `position` or beyond."""
        return next(at for seen, at in self.first_seen if seen >= position)


def commit_to_served(timer: Timer, directory: str, replicas: str, every_s: str) -> dict[str, list[float]]:
    """Play a recording; seconds from each increment to the first answer of each replica that has it.

    `export-model --watch --incr` publishes, the agent applies, a client asks each replica all the time.
    Fails if an increment is lost, a position goes back, or a replica ends with something else than was
    trained.
    """
    place = Path(directory)
    recording = Recording.read(place / "kept")
    with ExitStack() as stack:
        train, model = place / "replayed", place / "served" / "ranker"
        stack.callback(_remove, place / "served", train)
        recording.do(train, 0, recording.begin)
        export = [*_export(train, model), "--incr", "--add=stamp", "--add=digest"]
        subprocess.run([*export, "-q"], cwd=ROOT, check=True)
        servers = [Server(model, stack=stack, poll_s=1.0).start() for _ in range(int(replicas))]
        stop = threading.Event()
        stack.callback(stop.set)
        clients = [Client(server.address, model.name) for server in servers]
        watcher = stack.enter_context(agent(model, *(server.address for server in servers)))
        threads = [threading.Thread(target=client.follow, args=(stop,)) for client in clients]
        for thread in threads:
            thread.start()
        wait(lambda: all(len(client.latencies) > 100 for client in clients))
        pids = {"agent": watcher.process.pid, "client": os.getpid()}
        pids |= {f"server {number}": server.process.pid for number, server in enumerate(servers)}
        before = CpuTimes.of(pids)
        time.sleep(_IDLE_S)
        resting = {**before.since(), "exporter": 0.0}
        idle = [seconds for client in clients for _, seconds in client.latencies[50:]]
        watching = subprocess.Popen(
            [*export, "--watch", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        stack.callback(watching.kill)
        published: list[dict[str, Any]] = []
        reader = threading.Thread(target=_read, args=(watching, published), daemon=True)
        reader.start()
        warm = recording.after_increments(_WARM_UP)
        recording.do(train, recording.begin, warm)
        wait(
            lambda: len(published) and all(c.first_seen[-1][0] == published[-1]["position"] for c in clients)
        )
        committed: dict[str, float] = {}
        began = CpuTimes.of({**pids, "exporter": watching.pid})
        with timer:
            for event, at in recording.play(train, warm, every_s=float(every_s)):
                if event.is_increment:
                    committed[Path(event.name).name] = at
                    _require_right(clients)
        working = began.since()
        with np.load(place / "expected.npz") as arrays:
            expected = dict(arrays)
        wait(lambda: bool(published) and published[-1]["step"] == int(expected["step"]))
        time.sleep(1.0)  # the last increment may come after a checkpoint of the same step
        watching.terminate()
        reader.join()
        newest = published[-1]["position"]
        wait(lambda: all(client.first_seen[-1][0] == newest for client in clients))
        stop.set()
        for thread in threads:
            thread.join()
        _require_right(clients)
        _require_nothing_lost(recording.increments, published, clients)
        _require_as_trained(servers, model, expected)
        times = {f"cpu of {name}": [resting[name], working[name]] for name in working}
        return {**_figures(model, clients, published, committed, idle), **times}


def _figures(
    model: Path,
    clients: list[Client],
    published: list[dict[str, Any]],
    committed: dict[str, float],
    idle: list[float],
) -> dict[str, list[float]]:
    commits = {delta.end: delta.manifest.created.timestamp() for delta in list_deltas(read_log(model).path)}
    served, until_published, until_applied = [], [], []
    counted = committed.keys()
    for delta in published:
        position = delta["position"]
        for name in delta["increments"]:
            if name in counted:
                served += [client.at(position) - committed[name] for client in clients]
                if position in commits:
                    until_published.append(commits[position] - committed[name])
                    until_applied += [client.at(position) - commits[position] for client in clients]
    began = min(committed.values())
    busy = [seconds for client in clients for at, seconds in client.latencies if at >= began]
    return {
        "served": served,
        "published": until_published,
        "applied": until_applied,
        "deltas": [len(published)],
        "increments": [len(counted)],
        "idle": idle,
        "busy": busy,
    }


def _require_right(clients: list[Client]) -> None:
    assert not any(client.wrong for client in clients), [client.wrong for client in clients]


def _require_nothing_lost(wanted: list[str], published: list[dict[str, Any]], clients: list[Client]) -> None:
    """Each increment is in one delta, in order; clients saw what was published.

    Where a delta was made of a full checkpoint, increments up to it have nothing new any more.
    """
    found = [name for delta in published for name in delta["increments"]]
    assert found == sorted(set(found))
    spans = [(d["from_position"], d["position"]) for d in published if not d["increments"]]
    skipped = {name: int(name.partition("-")[2]) for name in wanted if name not in found}
    lost = [name for name, to in skipped.items() if not any(begin < to <= end for begin, end in spans)]
    assert not lost, lost
    positions = [delta["position"] for delta in published]
    assert positions == sorted(set(positions))
    for client in clients:
        assert {seen for seen, _ in client.first_seen[1:]} <= set(positions)


def _require_as_trained(servers: list[Server], model: Path, expected: dict[str, Any]) -> None:
    """Each replica answers as the cluster did, and holds what was published, chunk by chunk."""
    log = read_log(model)
    every = list(chunks(log.schema))
    digests = served_digests(log.schema, log.state(), every)
    rows = {"rows": np.arange(len(every))}
    for server in servers:
        with ModelClient(server.address, model.name, deadline_s=60) as client:
            answer = client.predict({"user": expected["user"], "item": expected["item"]})
            assert answer.outputs["click"].tobytes() == expected["click"].tobytes()
            told = client.predict(rows, signature="incremental_digest").outputs["digest"]
            assert [int(bytes(text)) for text in told] == digests


def _read(watching: subprocess.Popen[str], published: list[dict[str, Any]]) -> None:
    assert watching.stdout is not None
    published.extend(json.loads(line) for line in watching.stdout)  # one by one, as they come


def _export(train: Path, model: Path) -> list[str]:
    size = [part for name, rows in _SIZE.items() for part in ("--model-arg", f"{name}={rows}")]
    what = ("--ckpt-dir", train, "--model", f"{_MODEL}:serving", *size, "--out", model)
    return [sys.executable, "-m", "exporter", *map(str, what)]


def _remove(*directories: Path) -> None:
    import shutil

    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def full_version(timer: Timer, directory: str, versions: str) -> list[float]:
    """Seconds from the commit of a plain version to its first answer; the server polls each second."""
    place = Path(directory)
    recording = Recording.read(place / "kept")
    with ExitStack() as stack:
        train, model = place / "replayed", place / "plain" / "ranker"
        stack.callback(_remove, place / "plain", train)
        recording.do(train, 0, recording.begin)
        export = [*_export(train, model), "--again", "-q"]
        subprocess.run(export, cwd=ROOT, check=True)
        server = Server(model, stack=stack, poll_s=1.0).start()
        client = stack.enter_context(ModelClient(server.address, model.name, deadline_s=30))
        taken = []
        with timer:
            for _ in range(int(versions)):
                subprocess.run(export, cwd=ROOT, check=True)
                version = version_dirs(model)[0].version
                committed = read_head(model / str(version)).created.timestamp()
                wait(lambda version=version: _answers(client, version))
                taken.append(time.time() - committed)
        return taken


def _answers(client: ModelClient, version: int) -> bool:
    inputs = {"user": np.arange(_BATCH), "item": np.arange(_BATCH)}
    try:
        return client.predict(inputs).version == version
    except CallFailed:
        return False
