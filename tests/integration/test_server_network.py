"""`serve-model run` as a process: REST and TLS by TF Serving's own flags, and how it ends under load."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import grpc
import numpy as np
import pytest

from exporter.errors import CallFailed
from exporter.terminal.server_access import ServerAccess
from serving.client import ModelClient
from serving.server import NOT_SERVING, SERVING, messages
from tests.support.certificates import Certified, Pair
from tests.support.server_processes import DEADLINE_SECONDS, end, running
from tests.support.serving_models import write_saved_model

X = [[1.0, 2.0]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("network")
    write_saved_model(root / "ranker" / "1")
    return root / "ranker"


@contextmanager
def serving(base: Path, *options: str) -> Iterator[tuple[Popen[str], dict[str, Any]]]:
    """The process, and its first document."""
    with running(base, "--json", *options) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while "\n}" not in "".join(lines):
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            lines.append(line)
        yield process, json.loads("".join(lines))


def post(port: int, verb: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
    connection.request("POST", f"/v1/models/ranker:{verb}", json.dumps(body))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


@pytest.mark.landing
def test_a_start_script_of_tf_serving(base: Path, tmp_path: Path) -> None:
    (tmp_path / "monitoring.config").write_text("prometheus_config { enable: true }")
    flags = (
        "--rest_api_port=0",
        "--rest_api_num_threads=3",
        "--rest_api_timeout_in_ms=5000",
        "--rest_api_enable_cors_support=true",
        f"--monitoring_config_file={tmp_path / 'monitoring.config'}",
    )
    with serving(base, *flags) as (process, document):
        rest_port = document["rest_port"]
        with ModelClient(f"127.0.0.1:{document['port']}", "ranker") as client:
            expected = client.predict({"x": np.float32(X)}).outputs["y"].tolist()
        assert post(rest_port, "predict", {"instances": X}) == (200, {"predictions": expected})
        connection = http.client.HTTPConnection("127.0.0.1", rest_port, timeout=DEADLINE_SECONDS)
        connection.request("GET", "/monitoring/prometheus/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        assert ':tensorflow:serving:request_count{model_name="ranker",status="OK"} 2.0' in page
        _, talk = end(process, signal.SIGTERM)
    own = [line for line in talk.splitlines() if "cuInit" not in line]  # TensorFlow's, which looks for a GPU
    assert (process.returncode, own) == (0, [])


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("tls"))


def version(address: str, ca: Path, pair: Pair | None = None) -> int:
    own = {} if pair is None else {"grpc_cert": str(pair.cert), "grpc_key": str(pair.key)}
    access = ServerAccess(grpc_ca=str(ca), **own)
    with ModelClient(address, "ranker", deadline_s=DEADLINE_SECONDS, access=access) as client:
        return client.predict({"x": np.float32(X)}).version


@pytest.mark.landing
def test_tls_with_client_certificates(base: Path, certified: Certified, tmp_path: Path) -> None:
    config = certified.config(tmp_path / "ssl.config", verify=True)
    socket_path = tmp_path / "grpc.sock"
    flags = (f"--ssl_config_file={config}", f"--grpc_socket_path={socket_path}")
    with serving(base, *flags) as (process, document):
        address = f"127.0.0.1:{document['port']}"
        assert version(address, certified.ca, certified.client) == 1
        for pair in (None, certified.stranger):
            with pytest.raises(CallFailed, match=r"no model server answers|do not agree on TLS"):
                version(address, certified.ca, pair)
        with pytest.raises(CallFailed), ModelClient(address, "ranker") as plain:
            plain.status()
        access = ServerAccess(
            grpc_ca=str(certified.ca),
            grpc_cert=str(certified.client.cert),
            grpc_key=str(certified.client.key),
            grpc_name=certified.name,
        )
        with ModelClient(f"unix:{socket_path}", "ranker", access=access) as client:
            assert client.predict({"x": np.float32(X)}).version == 1
        _, talk = end(process, signal.SIGTERM)
    assert "PRIVATE" not in talk


@pytest.mark.landing
def test_tls_without_them(base: Path, certified: Certified, tmp_path: Path) -> None:
    config = certified.config(tmp_path / "ssl.config", verify=False)
    with serving(base, "--ssl-config-file", str(config)) as (_, document):
        assert version(f"127.0.0.1:{document['port']}", certified.ca) == 1
        context = ssl.create_default_context(cafile=str(certified.ca))
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", document["port"]), DEADLINE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=certified.name) as secure,
        ):
            assert secure.selected_alpn_protocol() == "h2"


def health(address: str) -> int:
    request, response = messages()
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return int(check(request(), timeout=DEADLINE_SECONDS).status)


@pytest.mark.landing
def test_it_drains_before_it_ends(base: Path) -> None:
    """Health checks fail first, requests go on, calls under way end; then the process does."""
    options = ("--rest-api-port", "0", "--rest_api_timeout_in_ms=0")
    options += ("--drain-seconds", "3", "--grace-seconds", "60")
    with serving(base, *options) as (process, document):
        address, rest_port = f"127.0.0.1:{document['port']}", document["rest_port"]
        assert health(address) == SERVING
        assert post(rest_port, "predict", {"signature_name": "slow", "inputs": [1]})[0] == 200
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while health(address) != NOT_SERVING:
            assert time.monotonic() < deadline
        with ModelClient(address, "ranker", deadline_s=DEADLINE_SECONDS) as client:
            assert client.predict({"x": np.float32(X)}).version == 1
        answers: list[Any] = []
        under_way = {"signature_name": "slow", "inputs": [30_000]}
        threads = [
            threading.Thread(target=lambda: answers.append(post(rest_port, "predict", under_way)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert answers == [(200, {"outputs": 30_000})] * 2
        assert process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.landing
def test_a_second_signal_ends_it_at_once(base: Path) -> None:
    with serving(base, "--drain-seconds", "3600") as (process, document):
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while health(f"127.0.0.1:{document['port']}") != NOT_SERVING:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGTERM


@pytest.mark.landing
def test_a_call_that_does_not_end_is_cut_off(base: Path) -> None:
    options = ("--rest-api-port", "0", "--rest_api_timeout_in_ms=0", "--grace-seconds", "1")
    with serving(base, *options) as (process, document):
        failures: list[str] = []

        def ask_for_ever() -> None:
            address = f"127.0.0.1:{document['port']}"
            with ModelClient(address, "ranker", deadline_s=10 * DEADLINE_SECONDS) as client:
                try:
                    client.predict({"turns": [10**12]}, signature="slow")
                except CallFailed as error:
                    failures.append(error.code)

        def ask_rest_for_ever() -> None:
            try:
                body = {"signature_name": "slow", "inputs": [10**12]}
                failures.append(str(post(document["rest_port"], "predict", body)[0]))
            except (OSError, http.client.HTTPException):
                failures.append("cut off")

        threads = [threading.Thread(target=ask) for ask in (ask_for_ever, ask_rest_for_ever)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
    assert len(failures) == 2
