"""Where parts of the agent meet: canary, TLS, notifications and restarts; servers that half answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from exporter.publish.delta_log import read_log
from exporter.terminal.server_access import ServerAccess
from serving.client import ModelClient
from serving.updates import read_incremental_status
from tests.support.agents import Published, Server, agent, wait
from tests.support.budget import thorough
from tests.support.certificates import Certified

USERS = list(range(23))
GOLDEN = {"requests": [{"inputs": {"user": USERS, "item": [0]}, "expect": {"user_rows": {"max": 1000}}}]}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "world", ("--add=stamp",))


def train(published: Published, number: float) -> None:
    """A step that gives every user's row this value."""
    published.change(lambda rows: np.full_like(rows, number))


@thorough
def test_a_canary_behind_certificates_that_is_told_by_others_and_restarted(
    published: Published, stack: ExitStack, tmp_path: Path
) -> None:
    """`--notify` goes no further than the canary approved; whoever is killed, it ends in the rollback."""
    certified = Certified(tmp_path / "tls")
    config = certified.config(tmp_path / "ssl.config", verify=True)
    own = certified.client
    access = ServerAccess(str(certified.ca), str(own.cert), str(own.key))
    options = tuple(f"--grpc={each}" for each in (f"ca={certified.ca}", f"cert={own.cert}", f"key={own.key}"))
    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps(GOLDEN))
    more = ("--canary", str(golden), *options)
    servers = [
        Server(published.model, stack=stack, more=(f"--ssl_config_file={config}",)).start() for _ in range(2)
    ]
    servers.sort(key=lambda server: server.address)
    notify = [part for server in servers for part in ("--notify", server.address)]

    def positions() -> list[int]:
        version, found = int(read_log(published.model).base.path.name), []
        for server in servers:
            with ModelClient(server.address, "ranker", access=access) as client:
                standing = read_incremental_status(client, version)
            assert standing is not None
            found.append(standing.position)
        return found

    running = stack.enter_context(agent(published.model, *(one.address for one in servers), more=more))
    train(published, 0.5)
    good = published.publish(*notify, *options)
    wait(lambda: positions() == [good, good])
    wait(lambda: read_log(published.model).approved == good)
    train(published, float("nan"))
    bad = published.publish(*notify, *options)
    assert positions().count(bad) <= 1
    running.process.kill()
    servers[0].kill()
    servers[0].start()
    stack.enter_context(agent(published.model, *(one.address for one in servers), more=more))
    wait(lambda: read_log(published.model).hold.binds)
    wait(lambda: positions() == [published.position] * 2)
    newest = read_log(published.model).newest
    assert newest.entry.back_to == good
    with ModelClient(servers[1].address, "ranker", access=access) as client:
        rows = client.predict({"user": USERS, "item": [0]}).outputs["user_rows"]
    assert np.isfinite(rows).all()


def test_a_port_that_speaks_http_and_one_that_says_nothing_hold_back_nobody(
    published: Published, stack: ExitStack, tmp_path: Path
) -> None:
    """REST that is up says nothing of gRPC, which updates: the replica does not answer, and is not ready."""
    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps(GOLDEN))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rest = free.getsockname()[1]
    good = Server(published.model, stack=stack, more=("--rest-api-port", str(rest))).start()
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    others = [f"127.0.0.1:{rest}", f"127.0.0.1:{silent.getsockname()[1]}"]
    more = ("--canary", str(golden), "--canary-seconds", "2", "--deadline", "1")
    with agent(published.model, good.address, *others, more=more) as running:
        version = int(read_log(published.model).base.path.name)
        for _ in range(2):
            newest = published.publish()
            wait(lambda: good.position(version) == newest)  # noqa: B023
        wait(lambda: read_log(published.model).approved == newest)
        failed = wait(lambda: {e["replica"] for e in running.of("failed")} == set(others))
        assert failed
        code, why = running.get("/readyz")
        assert code == 503
        assert all(f"ranker on {address} does not answer" in why for address in others)
        assert good.address not in why
