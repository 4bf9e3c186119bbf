"""A model server that is configured by a file: several models, read again, and what is wrong with a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from exporter.errors import CallFailed, UsageError
from exporter.wire.protos import message_class
from exporter.wire.tensor_proto import fill
from serving.client import ModelClient
from serving.server import NOT_SERVING, SERVING, ModelServer, messages
from serving.server_options import ServerOptions
from serving.status import VersionState

WAIT_SECONDS = 60.0
ONES = np.ones((1, 2), np.float32)


def entry(two_models: Path, name: str, more: str = "") -> str:
    return f"config {{ name: '{name}' base_path: '{two_models / name}' model_platform: 'tensorflow' {more} }}"


def listing(*entries: str) -> str:
    return f"model_config_list {{ {' '.join(entries)} }}\n"


def write(path: Path, text: str) -> Path:
    staged = path.with_suffix(".new")
    staged.write_text(text)
    return staged.replace(path)


BOTH = "model_version_policy { specific { versions: 1 versions: 2 } }"


@pytest.fixture
def file(two_models: Path, tmp_path: Path) -> Path:
    return write(tmp_path / "models.config", listing(entry(two_models, "a", BOTH), entry(two_models, "b")))


@pytest.fixture
def server(file: Path) -> Iterator[ModelServer]:
    options = ServerOptions(
        model_config_file=file, model_config_file_poll_wait_seconds=0.05, poll_seconds=0.05
    )
    with ModelServer(options=options) as server:
        server.wait_available(WAIT_SECONDS)
        yield server


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def available(server: ModelServer, model: str) -> set[int]:
    return {s.version for s in server.models.versions(model) if s.state is VersionState.AVAILABLE}


def test_several_models(server: ModelServer) -> None:
    soon(lambda: available(server, "a") == {1, 2})
    assert available(server, "b") == {5}
    with ModelClient(server.address, "a") as client:
        assert [client.predict({"x": ONES}, version=n).outputs["y"][0, 0] for n in (1, 2)] == [1, 2]


def test_the_file_is_read_again(server: ModelServer, file: Path, two_models: Path) -> None:
    soon(lambda: available(server, "a") == {1, 2})
    label = "version_labels { key: 'stable' value: 1 }"
    write(file, listing(entry(two_models, "a", BOTH + label)))
    soon(lambda: [s.state for s in server.models.versions("b")] == [VersionState.END])
    soon(lambda: server.models.labels("a") == {"stable": 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model_config_list { config { name: ",
        "model_config_list { config { name: 'a' base_path: 'relative' model_platform: 'tensorflow' } }",
        "custom_model_config { }",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    ],
)
def test_what_cannot_be_applied_changes_nothing(
    server: ModelServer, file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, text)
    soon(lambda: "the configuration is unchanged" in caplog.text)
    file.unlink()
    soon(lambda: caplog.text.count("the configuration is unchanged") == 2)
    time.sleep(0.2)
    assert caplog.text.count("the configuration is unchanged") == 2, "each problem is reported once"
    assert available(server, "b") == {5}


def test_labels_of_versions_that_are_not_available_yet(two_models: Path, tmp_path: Path) -> None:
    text = listing(entry(two_models, "a", "version_labels { key: 'stable' value: 2 }"))
    file = write(tmp_path / "labels.config", text)
    with pytest.raises(UsageError, match="Request to assign label to version 2 of model a") as caught:
        ModelServer(options=ServerOptions(model_config_file=file))
    assert "--allow_version_labels_for_unavailable_models" in caught.value.hint
    options = ServerOptions(model_config_file=file, allow_version_labels_for_unavailable_models=True)
    with ModelServer(options=options) as server:
        server.wait_available(WAIT_SECONDS)
        assert server.models.labels("a") == {"stable": 2}


def test_a_file_that_lists_nothing_is_a_server_that_waits_for_its_configuration(tmp_path: Path) -> None:
    file = write(tmp_path / "empty.config", "")
    with ModelServer(options=ServerOptions(model_config_file=file)) as server:
        assert server.wait_available(0.1) == 0
        assert server.statuses() == []


def health(server: ModelServer, service: str) -> int:
    request, response = messages()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return int(call(request(service=service), timeout=WAIT_SECONDS).status)


def test_health(server: ModelServer, file: Path, two_models: Path, tmp_path: Path) -> None:
    for service in ("", "tensorflow.serving.PredictionService", "a", "b"):
        assert health(server, service) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health(server, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    write(file, listing(entry(two_models, "a"), entry(tmp_path, "later")))
    soon(lambda: "later" in server.models.served())
    assert [health(server, service) for service in ("", "a", "later")] == [NOT_SERVING, SERVING, NOT_SERVING]


def test_the_health_services_messages_are_those_of_the_protocol() -> None:
    request, response = messages()
    assert request(service="a").SerializeToString() == b"\x0a\x01a"
    assert response(status=SERVING).SerializeToString() == b"\x08\x01"


def test_a_sessions_configuration(two_models: Path, tmp_path: Path) -> None:
    """Its own deadline holds for a call that has none."""
    file = tmp_path / "session.config"
    file.write_text("operation_timeout_in_ms: 2000 intra_op_parallelism_threads: 1")
    options = ServerOptions(tensorflow_session_config_file=file, tensorflow_inter_op_parallelism=3)
    assert (options.loading().intra_op_threads, options.loading().inter_op_threads) == (0, 3)
    request = message_class("serving.PredictRequest")()
    request.model_spec.name, request.model_spec.signature_name = "b", "slow"
    fill(request.inputs["turns"], np.array([1 << 60]))
    with ModelServer(two_models / "b", options=options) as server:
        server.wait_available(WAIT_SECONDS)
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            predict = channel.unary_unary(
                "/tensorflow.serving.PredictionService/Predict", request_serializer=bytes
            )
            predict(request.SerializeToString())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_arguments_of_the_channel(two_models: Path) -> None:
    """They win over the server's own."""
    options = ServerOptions(grpc_channel_arguments="grpc.max_receive_message_length=2000,grpc.x=text")
    with ModelServer(two_models / "b", options=options) as server:
        server.wait_available(WAIT_SECONDS)
        with ModelClient(server.address, "b") as client:
            assert client.predict({"x": ONES}).version == 5
            with pytest.raises(CallFailed, match="refused Predict") as caught:
                client.predict({"x": np.ones((1000, 2), np.float32)})
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_a_unix_socket(two_models: Path, tmp_path: Path) -> None:
    socket = tmp_path / "grpc.sock"
    with ModelServer(two_models / "b", options=ServerOptions(grpc_socket_path=socket)) as server:
        server.wait_available(WAIT_SECONDS)
        with ModelClient(f"unix:{socket}", "b") as client:
            assert client.predict({"x": ONES}).version == 5
