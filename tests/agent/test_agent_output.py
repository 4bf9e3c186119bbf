"""What the agent prints: where it cannot be written, the agent goes on; -q leaves what goes wrong."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serving.agent.view import ReplicaView
from tests.support.agents import DEADLINE_S, ROOT


def started(directory: Path, *more: str, stdout: Path, stderr: Path) -> subprocess.Popen[bytes]:
    """An agent of a model that is not there, whose only server does not answer."""
    arguments = ("--model-base-path", directory / "model", "--target", "127.0.0.1:9", "--port", "0", *more)
    command = [sys.executable, "-m", "serving.cli", "agent", *map(str, arguments), "--poll-seconds", "0.05"]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)


def wait(happened: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=DEADLINE_S):
        return True
    return False


def events(log: Path) -> list[str]:
    return [json.loads(line)["what"] for line in log.read_text().splitlines()]


def test_events_that_a_full_disk_loses_are_said_once_and_later_ones_are_written(tmp_path: Path) -> None:
    out, err, model = tmp_path / "out", tmp_path / "err", tmp_path / "model"
    agent = started(tmp_path, "--json", stdout=out, stderr=err)
    try:
        wait(lambda: "failed" in out.read_text())
        _, hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (out.stat().st_size, hard))
        model.mkdir()  # which is news: it is there, and nothing is published in it
        for _ in range(3):
            model.rmdir()
            time.sleep(0.3)
            model.mkdir()
            time.sleep(0.3)
        assert agent.poll() is None
        assert err.read_text().count("events are lost") == 1
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (hard, hard))
        before = out.read_text().count("\n")

        def more() -> bool:
            model.rmdir()
            time.sleep(0.2)
            model.mkdir()
            time.sleep(0.2)
            return out.read_text().count("\n") > before

        wait(more)
        assert set(events(out)) == {"unseen", "started", "failed"}, "each line is whole"
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(DEADLINE_S) == 0
    finally:
        agent.kill()
        agent.wait()


def test_an_agent_whose_output_cannot_be_written_starts_all_the_same(tmp_path: Path) -> None:
    err = tmp_path / "err"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent = started(tmp_path, "--json", "--port", str(port), stdout=Path("/dev/full"), stderr=err)
    try:
        wait(lambda: "events are lost" in err.read_text())
        wait(lambda: answers(f"http://127.0.0.1:{port}/healthz"))
        time.sleep(0.2)  # it would have ended by now
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(DEADLINE_S) == 0
    finally:
        agent.kill()
        agent.wait()


def test_quiet_leaves_what_an_operator_wants_to_know(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    agent = started(tmp_path, "-q", stdout=out, stderr=err)
    try:
        wait(lambda: "UNAVAILABLE" in err.read_text())
        assert "status page" not in err.read_text()
        assert out.read_text() == ""
    finally:
        agent.kill()
        agent.wait()


def test_a_server_without_the_model_is_not_said_to_be_silent() -> None:
    def trouble(error: str) -> str:
        return ReplicaView("m", "h:1", not error, error, ()).trouble

    assert trouble("NOT_FOUND: no m") == "does not serve this model: NOT_FOUND: no m"
    assert trouble("UNAVAILABLE: gone") == "does not answer: UNAVAILABLE: gone"
    assert trouble("") == ""
