"""The liveness probe of deploy/, run beside a real server and a real agent: each may be away or hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.agents import Agent, Published, Server, agent, give_other_values, wait
from tests.support.deployed import pods

pytestmark = pytest.mark.landing

PROBES = [
    container["livenessProbe"]["exec"]["command"]
    for pod in pods()
    for container in pod["containers"]
    if container["command"] == ["tensorflow_model_server"]
]
NOBODY = 1
"""A port on which nothing listens."""


def is_alive(rest_port: int | None, agent_port: int) -> bool:
    """What the probe says of a server, asking these ports instead of a pod's."""
    *shell, script = PROBES[0]
    script = script.replace("ask 8501", f"ask {rest_port}").replace("ask 8600", f"ask {agent_port}")
    return subprocess.run([*shell, script], capture_output=True, timeout=30).returncode == 0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs, for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def served(published: Published, base: Path, *more: str) -> Iterator[tuple[Server, Agent]]:
    with ExitStack() as stack:
        server = Server(base, stack=stack, more=("--rest-api-port", "0")).start()
        running = stack.enter_context(agent(published.model, server.address, more=more))
        yield server, running


def test_every_layout_has_the_same_probe() -> None:
    texts = {script.replace("8080", "8501").replace("{{.Name}}", "ranker") for *_, script in PROBES}
    assert len(PROBES) == 3
    assert len(texts) == 1


def test_a_server_lives_if_it_answers_whatever_its_agent_does(tmp_path: Path) -> None:
    published = Published(tmp_path)
    with served(published, published.model) as (server, running):
        wait(lambda: running.get("/readyz")[0] == 200)
        assert is_alive(server.rest_port, running.port)
        assert is_alive(server.rest_port, NOBODY), "an agent that cannot start ends no server"
        with stopped(running.process.pid):
            assert is_alive(server.rest_port, running.port), "nor does one that hangs"
        with stopped(server.process.pid):
            assert not is_alive(server.rest_port, running.port)
        assert is_alive(server.rest_port, running.port)
        server.kill()
        assert not is_alive(server.rest_port, running.port)


def test_a_server_that_holds_other_values_is_started_anew(tmp_path: Path) -> None:
    published = Published(tmp_path, options=("--add=digest",))
    copy = shutil.copytree(published.model, tmp_path / "copy" / published.model.name)
    give_other_values(copy / str(published.position))
    with served(published, copy, "--every", "audit=0.2") as (server, running):
        wait(lambda: running.of("differs"))
        assert not is_alive(server.rest_port, running.port)
        assert is_alive(server.rest_port, NOBODY)
