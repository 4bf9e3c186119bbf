"""Floods of the gRPC port of `serve-model run`: probes, REST and other clients are answered beside them."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from serving.client import ModelClient
from serving.server import ModelServer
from serving.server_options import NetworkOptions, ServerOptions
from tests.support.lying_server import PREDICTION
from tests.support.serving_models import write_saved_model

THREADS = 4
SECONDS = 60.0
X = np.array([[1.0, 2.0]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    model = tmp_path_factory.mktemp("model") / "ranker"
    write_saved_model(model / "1")
    options = ServerOptions(threads=THREADS, network=NetworkOptions(rest_api_port=0))
    with ModelServer(model, options=options) as server:
        server.wait_available(60)
        yield server


@pytest.fixture
def request_bytes() -> bytes:
    from tensorflow_serving.apis import predict_pb2

    return bytes(predict_pb2.PredictRequest(model_spec={"name": "ranker"}).SerializeToString())


def assert_answers(server: ModelServer) -> None:
    """A client that was there before, a new one, a probe over each protocol."""
    with ModelClient(server.address, "ranker", deadline_s=SECONDS) as client:
        assert client.predict({"x": X}).outputs["y"].tolist() == X.tolist()
        assert [version.version for version in client.status()] == [1]
    with closing(grpc.insecure_channel(server.address)) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=SECONDS) == b"\x08\x01"
    with urllib.request.urlopen(f"{server.rest_url}/ranker", timeout=SECONDS) as answer:
        assert answer.status == 200


def opened(server: ModelServer, stack: ExitStack, **options: int) -> grpc.Channel:
    own = [("grpc.use_local_subchannel_pool", 1), *((f"grpc.{name}", n) for name, n in options.items())]
    channel = grpc.insecure_channel(server.address, options=own)
    return stack.enter_context(closing(channel))


def never(released: threading.Event) -> Iterator[bytes]:
    released.wait()
    yield from ()


def test_calls_whose_request_never_comes(server: ModelServer) -> None:
    """More than there are worker threads, of every method; a client that was there before goes on, too."""
    released = threading.Event()
    with ExitStack() as stack, ModelClient(server.address, "ranker", deadline_s=SECONDS) as before:
        stack.callback(released.set)
        assert before.predict({"x": X}).outputs["y"].tolist() == X.tolist()
        for _ in range(4):
            channel = opened(server, stack)
            for path in (f"{PREDICTION}/Predict", f"{PREDICTION}/Classify", "/grpc.health.v1.Health/Check"):
                for _ in range(4 * THREADS):
                    stack.callback(channel.stream_unary(path).future(never(released)).cancel)
        assert_answers(server)
        assert before.predict({"x": X}).outputs["y"].tolist() == X.tolist()


@pytest.mark.landing
def test_streams_without_end(server: ModelServer, request_bytes: bytes) -> None:
    released = threading.Event()

    def endless() -> Iterator[bytes]:
        while not released.is_set():
            yield request_bytes

    with ExitStack() as stack:
        stack.callback(released.set)
        channel = opened(server, stack)
        calls = [channel.stream_unary(f"{PREDICTION}/Predict").future(endless()) for _ in range(2 * THREADS)]
        assert_answers(server)
        for call in calls:
            call.cancel()


@pytest.mark.landing
def test_calls_that_are_cancelled(server: ModelServer, request_bytes: bytes) -> None:
    with ExitStack() as stack:
        channel = opened(server, stack)
        predict = channel.unary_unary(f"{PREDICTION}/Predict")
        for _ in range(10):
            calls = [predict.future(request_bytes) for _ in range(5 * THREADS)]
            for call in calls:
                call.cancel()
        assert_answers(server)


@pytest.mark.landing
@pytest.mark.parametrize(
    "metadata",
    [(), (("x", "a" * 60_000),), tuple((f"x{n}", "a" * 900) for n in range(1000))],
    ids=["none", "long", "many"],
)
def test_metadata_has_a_limit(server: ModelServer, request_bytes: bytes, metadata: Any) -> None:
    with ExitStack() as stack:
        channel = opened(server, stack, max_metadata_size=8 << 20)
        predict = channel.unary_unary(f"{PREDICTION}/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            predict(request_bytes, timeout=SECONDS, metadata=metadata)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED if metadata else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code() is code, caught.value.details()
        assert_answers(server)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


HEADERS = (
    b"\x83\x86\x44" + bytes([len(f"{PREDICTION}/Predict")]) + f"{PREDICTION}/Predict".encode()
) + b"\x41\x09localhost\x5f\x10application/grpc\x40\x02te\x08trailers"
LONG_MESSAGE = b"\0" + (0x7FFFFFFF).to_bytes(4, "big") + b"\x0a" * 1000
RAW = {
    "silence": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "zeros": b"\0" * 10_000,
    "a preface alone": PREFACE,
    "settings": PREFACE + frame(4, 0, 0, b"") * 5_000,
    "pings": PREFACE + frame(4, 0, 0, b"") + frame(6, 0, 0, bytes(8)) * 5_000,
    "headers without end": PREFACE
    + frame(4, 0, 0, b"")
    + frame(1, 0, 1, HEADERS)
    + frame(9, 0, 1, b"\x40\x01a\x01b" * 1000) * 20,
    "a message that is announced": PREFACE
    + frame(4, 0, 0, b"")
    + frame(1, 4, 1, HEADERS)
    + frame(0, 0, 1, LONG_MESSAGE),
    "calls that are reset": PREFACE
    + frame(4, 0, 0, b"")
    + b"".join(frame(1, 4, n, HEADERS) + frame(3, 0, n, bytes(4)) for n in range(1, 101, 2)),
    "a window of no size": PREFACE + frame(4, 0, 0, b"\0\x04\0\0\0\0") + frame(1, 4, 1, HEADERS),
}


@pytest.mark.landing
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_connections_that_speak_otherwise(server: ModelServer, content: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS))
            with suppress(OSError):  # it was closed
                connection.sendall(content)
        assert_answers(server)


def test_a_message_takes_no_more_than_what_came(server: ModelServer) -> None:
    """Packed, a request of 64 MiB would come as 64 KiB."""
    with ExitStack() as stack:
        channel = opened(server, stack, max_send_message_length=-1)
        predict = channel.unary_unary(f"{PREDICTION}/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            predict(bytes(64 << 20), timeout=SECONDS, compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value.details()
        assert_answers(server)


@pytest.mark.parametrize("content", [b"\xff" * 9, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" * 999])
def test_requests_that_are_no_messages(server: ModelServer, content: bytes) -> None:
    with ExitStack() as stack:
        predict = opened(server, stack).unary_unary(f"{PREDICTION}/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            predict(content, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert_answers(server)
