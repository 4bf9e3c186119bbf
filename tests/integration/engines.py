"""`make engines`, which takes longer: a killed node of Ray, and jobs that wander over all engines."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support import engine_job
from tests.support.engine_runs import ENGINES, TABLES, EngineRuns, python_of, wait_until

STEP = 4
HEAD, NODE = "127.0.0.2", "127.0.0.3"  # two machines, as far as Ray knows


@pytest.mark.parametrize("order", [*permutations(ENGINES)][::3], ids="-".join)
def test_a_job_wanders_over_the_engines(
    order: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each does a quarter and is interrupted; the last one has little to do."""
    for number, engine in enumerate(order):
        (tmp_path / engine).mkdir()
        runs = EngineRuns(engine, python_of(engine, tmp_path_factory), tmp_path / engine)
        runs.prefix, runs.kept = tmp_path / order[0] / "model.ckpt", tmp_path / "jobs"
        already = len(runs.receipts())
        if number == len(order) - 1:
            done = runs.run()
            assert done["works"] == TABLES - already
            assert done["digest"] == engine_job.main(runs.asked(engine="local", kept=""))["digest"]
            return
        until = STEP * (number + 1)
        held = [runs.at("before", task, "wait") for task in range(until, TABLES)]
        process = runs.start()
        wait_until(partial(_has_receipts, runs, until), f"{engine} did a quarter")
        process.send_signal(signal.SIGINT)
        if engine == "local":
            for path in held:
                path.unlink()
        process.communicate(timeout=120)
        runs.await_no_process()


def _has_receipts(runs: EngineRuns, count: int) -> bool:
    return len(runs.receipts()) >= count


def test_a_node_of_ray_is_killed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_raylet_start_wait_time_s", "120"),
    ):
        monkeypatch.setenv(name, value)
    runs = EngineRuns("ray", python_of("ray", tmp_path_factory), tmp_path)
    held = [runs.at("before", task, "wait") for task in range(4, TABLES)]
    with two_nodes(runs) as (address, node):
        process = runs.start(address=address)
        wait_until(lambda: len(runs.receipts()) == 4, "four tasks are done")
        os.killpg(node.pid, signal.SIGKILL)
        for path in held:
            path.unlink()
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["digest"] == engine_job.main(runs.asked(engine="local", kept=""))["digest"]


@contextmanager
def two_nodes(runs: EngineRuns) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a cluster, and the node that is not its head."""
    with socket.socket() as probe, ExitStack() as stack:
        probe.bind((HEAD, 0))
        address = f"{HEAD}:{probe.getsockname()[1]}"
        probe.close()
        files = stack.enter_context(TemporaryDirectory(prefix="ray-"))  # a short path: Ray has sockets there
        head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
        stack.enter_context(_node(runs, HEAD, *head, f"--temp-dir={files}"))
        yield address, stack.enter_context(_node(runs, NODE, f"--address={address}"))


@contextmanager
def _node(runs: EngineRuns, host: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [runs.python, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    log = runs.directory / f"{host}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, f"--node-ip-address={host}", *arguments],
            env=runs.environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    with process:
        try:
            wait_until(lambda: b"block forever" in log.read_bytes(), f"a node runs: {log.read_text()}")
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
