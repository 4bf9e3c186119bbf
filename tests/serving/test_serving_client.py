"""The client edge against the embedded server, and against servers that do not answer."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CallFailed, Exit
from exporter.wire.protos import message_class
from serving.client import ModelClient
from serving.server import ModelServer
from serving.status import Code, VersionState, VersionStatus
from tests.support.serving_models import write_saved_model

ROOT = Path(__file__).parents[2]
X = np.float32([[1, 2], [3, 4]])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    base = tmp_path_factory.mktemp("models") / "ranker"
    write_saved_model(base / "7", scale=2.0)
    with ModelServer(base) as server:
        server.wait_available(60)
        yield server


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[ModelClient]:
    with ModelClient(server.address, "ranker", deadline_s=60) as client:
        yield client


def examples(*rows: list[float]) -> Any:
    message = message_class("serving.Input")()
    for row in rows:
        added = message.example_list.examples.add()
        added.features.feature["x"].float_list.value.extend(row)
    return message


def test_predict(client: ModelClient) -> None:
    prediction = client.predict({"x": X})
    assert prediction.version == 7
    np.testing.assert_array_equal(prediction.outputs["y"], X * 2)
    assert prediction.outputs["y"].dtype == np.float32


def test_predict_by_signature_version_and_output(client: ModelClient) -> None:
    inputs = {"x": X, "text": [b"a\x00", b"\xff"]}
    prediction = client.predict(inputs, signature="two", version=7, outputs=["loud"])
    assert {name: array.tolist() for name, array in prediction.outputs.items()} == {
        "loud": [b"a\x00!", b"\xff!"]
    }


def test_classify_and_regress(client: ModelClient) -> None:
    classified = client.classify(examples([1, 2], [3, 4]), signature="classify")
    assert classified.examples == [[("-", 2.0), ("-", 4.0)], [("-", 6.0), ("-", 8.0)]]
    regressed = client.regress(examples([1, 2]), signature="regress", version=7)
    assert (regressed.values, regressed.version) == ([6.0], 7)


def test_status(client: ModelClient) -> None:
    assert client.status() == client.status(version=7) == [VersionStatus(7, VersionState.AVAILABLE, Code.OK)]


@pytest.mark.parametrize("deadline_s", [1e10, 1e12, math.inf])
def test_a_deadline_that_is_further_than_gRPC_counts_is_never(server: ModelServer, deadline_s: float) -> None:
    with ModelClient(server.address, "ranker", deadline_s=deadline_s) as client:
        assert client.predict({"x": X}).version == 7
        assert len(client.status()) == 1


def test_metadata(client: ModelClient) -> None:
    metadata = client.metadata()
    assert metadata.version == 7
    assert metadata.signatures["regress"].method_name == "tensorflow/serving/regress"
    assert metadata.signatures["serving_default"].inputs["x"].name == "x:0"


@pytest.mark.parametrize(
    ("ask", "code", "hint"),
    [
        (lambda c: c.predict({"x": X}, version=3), "NOT_FOUND", "serve-model status"),
        (lambda c: c.predict({"z": X}), "INVALID_ARGUMENT", "export-model inspect"),
        (lambda c: c.predict({"x": X}, signature="none"), "FAILED_PRECONDITION", "serve-model status"),
        (lambda c: c.status(version=3), "NOT_FOUND", "--model-name"),
        (lambda c: c.classify(examples()), "INVALID_ARGUMENT", "export-model inspect"),
    ],
)
def test_refusals_are_errors(client: ModelClient, ask: Any, code: str, hint: str) -> None:
    with pytest.raises(CallFailed) as caught:
        ask(client)
    assert caught.value.code == code
    assert caught.value.cause.startswith(f"{code}: ")
    assert hint in caught.value.hint
    assert caught.value.exit_code is Exit.SERVER


@pytest.mark.parametrize("version", [1 << 63, -(1 << 63) - 1])
def test_a_version_beyond_int64_is_a_value_error(version: int) -> None:
    with ModelClient("127.0.0.1:1", "ranker") as client:
        for ask in (client.status, client.metadata, lambda v: client.predict({"x": X}, version=v)):
            with pytest.raises(ValueError, match="out of range"):
                ask(version)


ASKED = pytest.mark.parametrize("ask", [ModelClient.status, lambda client: client.labelled("stable")])


@ASKED
def test_nobody_listens(ask: Callable[[ModelClient], object]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with ModelClient(address, "ranker") as client, pytest.raises(CallFailed) as caught:
            ask(client)
    assert caught.value.message == f"no model server answers at {address}"
    assert caught.value.code == "UNAVAILABLE"


@ASKED
def test_a_server_that_never_answers_meets_the_deadline(ask: Callable[[ModelClient], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with ModelClient(address, "ranker", deadline_s=0.2) as client, pytest.raises(CallFailed) as caught:
            ask(client)
    assert caught.value.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE")


def test_a_step_that_never_ends_meets_the_deadline(server: ModelServer) -> None:
    with ModelClient(server.address, "ranker", deadline_s=0.2) as client, pytest.raises(CallFailed) as caught:
        client.predict({"turns": [1 << 60]}, signature="slow")
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert caught.value.message == f"{server.address} did not answer Predict in 0.2 s"
    assert "--deadline" in caught.value.hint


def test_a_port_that_speaks_something_else() -> None:
    def answer() -> None:
        connection, _ = web.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as web:
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{web.getsockname()[1]}"
        with ModelClient(address, "ranker", deadline_s=5) as client, pytest.raises(CallFailed) as caught:
            client.status()
    assert caught.value.exit_code is Exit.SERVER


def test_threads_may_share_a_client(client: ModelClient) -> None:
    answers: list[float] = []

    def ask(value: float) -> None:
        for _ in range(20):
            y = client.predict({"x": np.float32([[value, 0]])}).outputs["y"]
            answers.append(float(y[0, 0]) / value)

    threads = [threading.Thread(target=ask, args=(float(n),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [2.0] * 80


def test_tensorflow_is_not_needed(server: ModelServer) -> None:
    code = f"""
import sys
from serving.client import ModelClient
with ModelClient({server.address!r}, "ranker") as client:
    print(client.status()[0].version)
print(sorted({{"tensorflow", "tensorflow_serving", "keras"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["7", "[]"], done.stderr
