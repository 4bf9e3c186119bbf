"""Addresses of model servers may leave the port out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from exporter.errors import CallFailed, UsageError
from serving.address import GRPC_PORT, with_port
from serving.cli import app
from serving.client import ModelClient
from tests.support.commands import run_app


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost", "localhost:8500"),
        ("10.0.0.7", "10.0.0.7:8500"),
        ("serving.prod.example", "serving.prod.example:8500"),
        ("::1", "[::1]:8500"),
        ("[::1]", "[::1]:8500"),
        ("localhost:9000", "localhost:9000"),
        ("[::1]:9000", "[::1]:9000"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("dns:///serving:8500", "dns:///serving:8500"),
    ],
)
def test_a_port_that_is_left_out_is_the_default(given: str, meant: str) -> None:
    assert with_port(given) == meant
    with ModelClient(given, "m") as client:
        assert client.address == meant


@pytest.mark.parametrize(
    "wrong",
    ["", ":8500", "host:", "host:port", "host:0", "host:99999", "[::1", "http://h:8500", "h:8500/", "a b:1"],
)
def test_what_can_be_no_address_is_refused_at_once(wrong: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a model server"):
        with_port(wrong)
    for command in (("status", wrong), ("agent", "--model-base-path", "m", "--target", wrong)):
        ran = run_app(app, *command)
        assert (ran.code, "is not the address" in ran.err) == (2, True)


@pytest.fixture
def nobody_listens() -> Iterator[None]:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", GRPC_PORT)) == 0:
            pytest.skip("something listens on the default port of this machine")
    yield


@pytest.mark.usefixtures("nobody_listens")
@pytest.mark.parametrize("command", ["update", "status", "predict"])
def test_the_commands_say_which_port_they_took(command: str, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text('{"inputs": {}}')
    options = ("--json-input", request) if command == "predict" else ()
    ran = run_app(app, command, "127.0.0.1", "--model-name", "m", "--deadline", 5, *options)
    assert ran.code == 7
    assert "no model server answers at 127.0.0.1:8500" in ran.err


def test_a_port_of_something_else_is_no_model_server() -> None:
    """As where somebody names the port of REST."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        ran = run_app(app, "status", address, "--model-name", "m", "--deadline", 30)
        server.shutdown()
    assert ran.code == 7
    assert f"the process that listens at {address} is not a model server" in ran.err
    assert "does not speak gRPC" in ran.err
    assert "name the gRPC port" in ran.err


def test_a_server_that_is_gone_for_long_is_looked_for_every_second() -> None:
    """By itself gRPC would take eight minutes for so many attempts, and two for each further one."""
    attempts, until = 0, time.monotonic() + 100
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as asking:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def ask() -> None:
            with ModelClient(address, "m", deadline_s=1) as client:
                while attempts < 12 and time.monotonic() < until:
                    with suppress(CallFailed):
                        client.status()
                    time.sleep(0.05)

        asked = asking.submit(ask)
        listener.settimeout(1)
        while not asked.done():
            with suppress(TimeoutError):
                listener.accept()[0].close()
                attempts += 1
    assert attempts >= 12
