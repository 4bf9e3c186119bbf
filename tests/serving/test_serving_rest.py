"""The REST interface of the model server, asked by an HTTP client, beside what gRPC answers."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.errors import ServerError, UsageError
from exporter.wire.rest_json import examples_input
from serving import rest
from serving import server as server_module
from serving.client import ModelClient
from serving.http_port import HttpRequest
from serving.model_config import ModelConfig
from serving.server import ModelServer
from serving.server_options import NetworkOptions, ServerOptions
from tests.support.budget import times
from tests.support.serving_models import write_saved_model
from tests.support.updatable import random_changes, updatable_model
from tools.reference.rest import HTTP_OUTCOMES, HttpOutcome

WAIT_SECONDS = 60
X = [[1.0, 2.0], [3.0, 4.0]]
MODEL = "/v1/models/ranker"
PREDICT = b"POST /v1/models/ranker:predict HTTP/1.1\r\nHost: localhost\r\n"
DEEP = b"[" * 100_000 + b"]" * 100_000
CHUNKED = PREDICT + b"Transfer-Encoding: chunked\r\n\r\n"


class Answer:
    """A response that was read whole."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.code, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Raw(http.client.HTTPResponse):
    """A response on a connection that goes on to the next one."""

    def _close_conn(self) -> None:
        pass


def answers(link: socket.socket) -> Iterator[Answer]:
    """All that the server says until it closes the connection."""
    link.settimeout(WAIT_SECONDS)
    stream = link.makefile("rb")
    while stream.peek(1):
        response = Raw(link, method="POST")
        response.fp = stream
        response.begin()
        yield Answer(response)


class Web:
    """A client with one connection, which the server has to keep alive."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, data, fields)
        return Answer(self.connection.getresponse())

    def ask(self, verb: str, body: Any, where: str = "") -> Answer:
        return self("POST", f"/v1/models/ranker{where}:{verb}", body)


def with_metrics(directory: Path, path: str = "") -> NetworkOptions:
    file = directory / "monitoring.config"
    file.write_text(f"prometheus_config {{ enable: true, path: '{path}' }}")
    return NetworkOptions(rest_api_port=0, monitoring_config_file=file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    base = tmp_path_factory.mktemp("models") / "ranker"
    write_saved_model(base / "7", scale=0.1)
    with ModelServer(
        base, options=ServerOptions(poll_seconds=0.05, network=with_metrics(base.parent))
    ) as server:
        server.wait_available(WAIT_SECONDS)
        yield server


@pytest.fixture
def web(server: ModelServer) -> Iterator[Web]:
    assert server.rest_port is not None
    web = Web(server.rest_port)
    yield web
    web.connection.close()


@pytest.fixture
def client(server: ModelServer) -> Iterator[ModelClient]:
    with ModelClient(server.address, "ranker", deadline_s=WAIT_SECONDS) as client:
        yield client


class TestPredict:
    def test_rows_and_columns_give_what_grpc_gives(self, web: Web, client: ModelClient) -> None:
        y = client.predict({"x": np.float32(X)}).outputs["y"]
        rows = web.ask("predict", {"instances": X})
        columns = web.ask("predict", {"inputs": X})
        assert (rows.code, rows.headers["Content-Type"]) == (200, "application/json")
        assert np.array_equal(np.float32(rows.json["predictions"]), y)
        assert np.array_equal(np.float32(columns.json["outputs"]), y)
        assert b"0.1," in rows.body  # a float32's digits, not a float64's

    def test_an_only_input_may_be_named(self, web: Web) -> None:
        assert web.ask("predict", {"instances": [{"x": row} for row in X]}).json == {
            "predictions": [[0.1, 0.2], [0.3, 0.4]]
        }
        assert web.ask("predict", {"inputs": {"x": X, "unused": 1}}).json == {
            "outputs": [[0.1, 0.2], [0.3, 0.4]]
        }

    def test_several_inputs_and_outputs(self, web: Web, client: ModelClient) -> None:
        rows = [{"x": X[0], "text": "a"}, {"x": X[1], "text": {"b64": "YmM="}}]
        expected = client.predict({"x": np.float32(X), "text": [b"a", b"bc"]}, signature="two").outputs
        found = web.ask("predict", {"signature_name": "two", "instances": rows}).json["predictions"]
        assert [row["loud"] for row in found] == [text.decode() for text in expected["loud"]]
        assert np.array_equal(np.float32([row["y"] for row in found]), expected["y"])
        inputs = {"x": X, "text": ["a", "bc"]}
        columns = web.ask("predict", {"signature_name": "two", "inputs": inputs}).json["outputs"]
        assert columns == {"loud": ["a!", "bc!"], "y": [row["y"] for row in found]}

    def test_numbers_that_are_none(self, web: Web) -> None:
        answer = web.ask("predict", b'{"instances": [[NaN, Infinity], [-Infinity, 1e3]]}')
        assert json.loads(answer.body)["predictions"][1][1] == 100.0
        assert b"NaN" in answer.body and b"-Infinity" in answer.body

    @pytest.mark.parametrize("where", ["/versions/7", "/versions/0007"])
    def test_a_version(self, web: Web, where: str) -> None:
        assert web.ask("predict", {"instances": X}, where).code == 200

    def test_shapes_are_the_models_affair(self, web: Web) -> None:
        """The placeholder says two columns; the multiplication takes any, as TF Serving's session does."""
        assert web.ask("predict", {"instances": [[1.0, 2.0, 3.0]]}).json == {"predictions": [[0.1, 0.2, 0.3]]}

    @pytest.mark.parametrize(
        ("body", "code", "text"),
        [
            (b"", 400, "JSON Parse error: The document is empty"),
            (b'{"instances": [', 400, "at offset: 15"),
            (b"[1]", 400, "Is not object"),
            (b"\xff{}", 400, "not UTF-8"),
            (b"[" * 100_000, 400, "at offset: 100000"),
            (b'{"signature_name": ' + DEEP + b"}", 400, "'signature_name', found a list that is nested"),
            (b'{"instances": ' + DEEP + b"}", 400, "dimensions"),
            (b'{"inputs": 1' + b"0" * 5000 + b"}", 400, "JSON Parse error"),
            (b'{"instances": [[1e999, 0]]}', 400, "too big"),
            ({}, 400, "'instances'"),
            ({"instances": X, "inputs": X}, 400, "either"),
            ({"instances": []}, 400, "at least one row"),
            ({"instances": {"x": X}}, 400, "expected a list"),
            ({"instances": [[1, 2], [3]]}, 400, "expected a list of 2"),
            ({"instances": [["a", "b"]]}, 400, "expected float32"),
            ({"signature_name": "slow", "inputs": [2**63]}, 400, "out of range"),
            ({"instances": [{"x": [1, 2]}, [1, 2]]}, 400, "row 1"),
            ({"inputs": {"z": X}}, 400, "expected the inputs x"),
            ({"signature_name": 3, "instances": X}, 400, "signature_name"),
            ({"signature_name": "none", "instances": X}, 400, '"none" not found in signature def'),
            ({"signature_name": "check", "instances": [[-1, 1]]}, 400, "x must be positive"),
            ({"signature_name": "text", "instances": [{"b64": "*"}]}, 400, "not base64"),
        ],
    )
    def test_refused(self, web: Web, body: Any, code: int, text: str) -> None:
        answer = web.ask("predict", body)
        assert (answer.code, list(answer.json)) == (code, ["error"])
        assert text in answer.json["error"]
        assert answer.headers["Content-Type"] == "application/json"

    def test_numbers_are_rounded_as_they_are_there(self, web: Web) -> None:
        """`json_tensor_test.cc`: FloatTensorWithPrecisionLoss, FloatTensorThatExceedsMaxReturnsInf."""
        most = np.finfo(np.float64).max
        rows = [[1435774380, 1435774380.0], [most, -most], [2**64, 16777217]]
        found = web.ask("predict", {"instances": rows}).json["predictions"]
        rounded = np.float32([[1435774336, 1435774336], [np.inf, -np.inf], [2**64, 16777216]])
        np.testing.assert_array_equal(np.float32(found), rounded * np.float32(0.1))

    def test_what_nobody_reads_may_be_nested_deeply(self, web: Web) -> None:
        """`json_tensor_test.cc`: DeeplyNestedWellFormed."""
        answer = web.ask("predict", b'{"instances": [[1, 2]], "nested": ' + DEEP + b"}")
        assert answer.json == {"predictions": [[0.1, 0.2]]}


class TestExamples:
    ROWS = ({"x": [1.0, 2.0], "label": "a"}, {"x": [3.0, 4.0], "label": {"b64": "YmM="}})

    def test_classify(self, web: Web, client: ModelClient) -> None:
        document = {"signature_name": "classify", "examples": list(self.ROWS)}
        expected = client.classify(examples_input(document), signature="classify").examples
        found = web.ask("classify", document).json["results"]
        assert [[(label, np.float32(score)) for label, score in row] for row in found] == [
            [(label, np.float32(score)) for label, score in row] for row in expected
        ]
        assert found[0] == [["a", 0.1], ["a", 0.2]]

    def test_regress_with_a_context(self, web: Web, client: ModelClient) -> None:
        document = {
            "signature_name": "regress",
            "context": {"x": [1.0, 1.0]},
            "examples": [{"label": "c"}, {"x": [3.0, 4.0]}],
        }
        expected = client.regress(examples_input(document), signature="regress").values
        assert np.array_equal(np.float32(web.ask("regress", document).json["results"]), np.float32(expected))

    @pytest.mark.parametrize(
        ("verb", "document", "text"),
        [
            ("classify", {"examples": []}, "'examples'"),
            ("classify", {"instances": X}, "'examples'"),
            ("regress", {"examples": [3]}, "expected an object"),
            ("regress", {"examples": [{"x": [1.0, "a"]}]}, "one type of values"),
            ("regress", {"signature_name": "none", "examples": [{"x": [1.0]}]}, "No signature was found"),
        ],
    )
    def test_refused(self, web: Web, verb: str, document: Any, text: str) -> None:
        answer = web.ask(verb, document)
        assert answer.code == 400
        assert text in answer.json["error"]


class TestModels:
    def test_status(self, web: Web) -> None:
        entry = {"version": "7", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        for path in ("/v1/models/ranker", "/v1/models/ranker/versions/7", "/V1/MODELS/ranker"):
            answer = web("GET", path)
            assert (answer.code, answer.json) == (200, {"model_version_status": [entry]})

    def test_metadata(self, web: Web, client: ModelClient) -> None:
        answer = web("GET", "/v1/models/ranker/metadata").json
        assert answer["model_spec"] == {"name": "ranker", "signature_name": "", "version": "7"}
        signatures = answer["metadata"]["signature_def"]["signature_def"]
        assert signatures.keys() == client.metadata().signatures.keys()
        default = signatures["serving_default"]
        assert default["method_name"] == "tensorflow/serving/predict"
        assert default["inputs"]["x"]["dtype"] == "DT_FLOAT"
        sizes = [dim["size"] for dim in default["inputs"]["x"]["tensor_shape"]["dim"]]
        assert (sizes, default["inputs"]["x"]["tensor_shape"]["unknown_rank"]) == (["-1", "2"], False)
        assert web("GET", "/v1/models/ranker/versions/7/metadata").json == answer

    @pytest.mark.parametrize(
        ("method", "path", "code", "text"),
        [
            ("GET", "/v1/models/nobody", 404, "Could not find any versions of model nobody"),
            ("GET", "/v1/models/n%C3%B6body", 404, "nöbody"),
            ("GET", "/v1/models/%ff", 400, "Failed to decode model name"),
            ("GET", "/v1/models/ranker/versions/8", 404, "version 8"),
            (
                "GET",
                "/v1/models/ranker/versions/x",
                400,
                "Malformed request: GET /v1/models/ranker/versions/x",
            ),
            ("GET", f"/v1/models/ranker/versions/{2**63}", 400, "Failed to convert version"),
            ("GET", "/v1/models/ranker/versions/" + "1" * 5000, 400, "Failed to convert version"),
            ("GET", "/v1/models/ranker/labels/none", 400, "Unrecognized servable version label: none"),
            ("GET", "/v1/models/ranker?verbose=1", 404, "model ranker?verbose=1"),
            ("GET", "/v1/models", 400, "Missing model name in request."),
            ("GET", "/v1/models/ranker:predict", 400, "Malformed request"),
            ("POST", "/v1/models/ranker", 400, "Malformed request: POST /v1/models/ranker"),
            ("POST", "/v1/models/ranker:train", 400, "Malformed request"),
            ("POST", "/v1/models/ranker:PREDICT", 400, "Malformed request"),
            ("POST", "/v1/models/nobody:predict", 404, "Servable not found for request: Latest(nobody)"),
            ("POST", "/v1/models/ranker/labels/a%20b:predict", 400, "version label: a b"),
            ("PUT", "/v1/models/ranker:predict", 400, "Malformed request: PUT"),
            ("GET", "/", 404, "Not Found"),
            ("GET", "/v2/models/ranker", 404, "Not Found"),
        ],
    )
    def test_refused(self, web: Web, method: str, path: str, code: int, text: str) -> None:
        answer = web(method, path, {"instances": X} if method != "GET" else None)
        assert answer.code == code
        assert text in answer.json["error"]

    def test_a_label(self, server: ModelServer, web: Web) -> None:
        ranker = ModelConfig("ranker", server.models.served()["ranker"].base_path)
        server.models.configure([replace(ranker, labels={"stable one": 7})])
        assert web.ask("predict", {"instances": X}, "/labels/stable%20one").code == 200
        assert web("GET", "/v1/models/ranker/labels/stable%20one/metadata").code == 200
        server.models.configure([ranker])
        answer = web.ask("predict", {"instances": X}, "/labels/stable%20one")
        assert "Unrecognized servable version label: stable one" in answer.json["error"]


BAD_NUMBERS = [
    {"instances": [["a", 1]]},
    {"signature_name": "slow", "inputs": [1.5]},
    {"signature_name": "slow", "inputs": [2**63]},
]
PROVOKED: dict[str, list[tuple[str, str, Any]]] = {
    "the body is empty, no JSON, or no object": [
        ("POST", ":predict", body) for body in (b"", b"{", b"[1]", b"3")
    ],
    "neither `instances` nor `inputs`, or both": [
        ("POST", ":predict", {}),
        ("POST", ":predict", {"instances": X, "inputs": X}),
    ],
    "a row lacks an input, or has one that the signature lacks": [
        ("POST", ":predict", {"instances": [{"z": [1, 2]}]}),
        ("POST", ":predict", {"instances": [{"x": [1, 2], "z": 1}]}),
        ("POST", ":predict", {"signature_name": "two", "instances": [{"x": [1, 2]}]}),
    ],
    "`inputs` has more than the signature wants": [("POST", ":predict", {"inputs": {"x": X, "z": 1}})],
    "`inputs` lacks one": [("POST", ":predict", {"signature_name": "two", "inputs": {"x": X}})],
    "lists of unequal length": [("POST", ":predict", {"instances": [[1, 2], [3]]})],
    "a value of another type, or an integer that its type cannot hold": [
        ("POST", ":predict", body) for body in BAD_NUMBERS
    ],
    "a number that float32 rounds, or that is too large for it: infinity": [
        ("POST", ":predict", {"instances": [[1435774380, 1e300]]})
    ],
    "what nobody reads is nested deeply": [
        ("POST", ":predict", b'{"instances": [[1, 2]], "nested": ' + b"[" * 20_000 + b"]" * 20_000 + b"}")
    ],
    "text behind the object": [("POST", ":predict", b'{"instances": [[1, 2]]} and more')],
    "`signature_name` is not known, or no string": [
        ("POST", ":predict", {"signature_name": name, "instances": X}) for name in ("none", 3)
    ],
    "the model's own check fails": [
        ("POST", ":predict", {"signature_name": "check", "instances": [[-1, 1]]})
    ],
    "computing takes longer than `--rest_api_timeout_in_ms`": [
        ("POST", ":predict", {"signature_name": "slow", "inputs": [10**12]})
    ],
    "the body has more than 512 MiB, as sent or unpacked": [
        ("POST", ":predict", gzip.compress(b" " * (1 << 21)))
    ],
    "no `examples`, or none in it": [
        ("POST", ":classify", {"instances": X}),
        ("POST", ":regress", {"examples": []}),
    ],
    "a feature with values of several types": [("POST", ":regress", {"examples": [{"x": [1.0, "a"]}]})],
    "the signature is not known": [
        ("POST", ":classify", {"signature_name": "none", "examples": [{"x": [1.0]}]})
    ],
    "the model, or the version, is not served": [("GET", "x", None), ("GET", "/versions/8", None)],
    "the label is not known": [("GET", "/labels/none", None)],
    "no model is named": [("GET", "/v1/models", None)],
    "another path, method or verb below `/v1/`": [
        ("GET", "/v1/other", None),
        ("PUT", ":predict", {}),
        ("POST", ":train", {}),
        ("HEAD", "", None),
    ],
    "a path elsewhere": [("GET", "/", None), ("GET", "/v2", None)],
    "OPTIONS without `Origin`": [("OPTIONS", ":predict", None)],
}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A server that computes for a moment, and takes small bodies."""
    base = tmp_path_factory.mktemp("hasty") / "ranker"
    write_saved_model(base / "7")
    network = NetworkOptions(rest_api_port=0, rest_api_timeout_in_ms=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest, "MAX_BODY_BYTES", 1 << 20)
        with ModelServer(base, options=ServerOptions(network=network)) as server:
            server.wait_available(WAIT_SECONDS)
            yield server


@pytest.mark.parametrize("outcome", HTTP_OUTCOMES, ids=lambda outcome: outcome.when)
def test_every_status_that_the_reference_tells(hasty: ModelServer, outcome: HttpOutcome) -> None:
    for method, path, body in PROVOKED[outcome.when]:
        web = Web(hasty.rest_port or 0)
        is_whole = path == "/" or path.startswith(("/v1", "/v2"))
        is_packed = isinstance(body, bytes) and body.startswith(b"\x1f\x8b")
        packed = {"Content_Encoding": "gzip"} if is_packed else {}
        answer = web(method, path if is_whole else f"{MODEL}{path}", body, **packed)
        assert answer.code == outcome.here, (method, path, body, answer.body)
        web.connection.close()


def test_the_reference_tells_every_status_that_is_provoked() -> None:
    assert PROVOKED.keys() == {outcome.when for outcome in HTTP_OUTCOMES}


class TestHttp:
    def test_the_connection_is_kept(self, web: Web) -> None:
        web("GET", "/v1/models/ranker")
        first = web.connection.sock
        for code, body in ((200, {"instances": X}), (400, b"{"), (400, {"instances": []})):
            assert web.ask("predict", body).code == code
        assert web.connection.sock is first

    def test_gzip_bodies(self, web: Web) -> None:
        packed = gzip.compress(json.dumps({"instances": X}).encode())
        path = "/v1/models/ranker:predict"
        assert web("POST", path, packed, Content_Encoding="gzip").json["predictions"][0] == [0.1, 0.2]
        broken = web("POST", path, packed[:-9], Content_Encoding="gzip")
        assert (broken.code, "is truncated" in broken.json["error"]) == (400, True)
        other = web("POST", path, b"{}", Content_Encoding="gzip")
        assert (other.code, "the body is not" in other.json["error"]) == (400, True)

    def test_bodies_in_chunks(self, server: ModelServer) -> None:
        body = json.dumps({"instances": X}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", server.rest_port or 0, timeout=WAIT_SECONDS)
        parts = (body[n : n + 7] for n in range(0, len(body), 7))
        connection.request("POST", "/v1/models/ranker:predict", parts, encode_chunked=True)
        assert Answer(connection.getresponse()).json == {"predictions": [[0.1, 0.2], [0.3, 0.4]]}

    def test_a_long_body_of_short_chunks(self, server: ModelServer) -> None:
        body = json.dumps({"instances": X}).encode() + b" " * (2 << 20)
        chunk = 1 << 10
        parts = (body[n : n + chunk] for n in range(0, len(body), chunk))
        connection = http.client.HTTPConnection("127.0.0.1", server.rest_port or 0, timeout=WAIT_SECONDS)
        connection.request("POST", "/v1/models/ranker:predict", parts, encode_chunked=True)
        answer = Answer(connection.getresponse())
        assert answer.code == 200, answer.json

    def test_trailers_and_extensions_of_chunks(self, server: ModelServer) -> None:
        body = json.dumps({"instances": X}).encode()
        chunks = b"%x;a=b\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(body), body)
        with socket.create_connection(("127.0.0.1", server.rest_port or 0), WAIT_SECONDS) as link:
            link.sendall((CHUNKED + chunks) * 2 + b"\r\n")
            link.shutdown(socket.SHUT_WR)
            assert [answer.code for answer in answers(link)] == [200, 200]

    @pytest.mark.parametrize(
        "request_",
        [
            PREDICT + b"Content-Length: -1\r\n\r\n{}",
            PREDICT + b"Content-Length: +2\r\n\r\n{}",
            PREDICT + b"Content-Length: 2\r\nContent-Length: 30\r\n\r\n{}",
            PREDICT + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            PREDICT + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            PREDICT.replace(b"1.1", b"1.0") + b"Connection: Keep-Alive\r\nTransfer-Encoding: chunked\r\n\r\n",
            CHUNKED + b"zz\r\n",
            CHUNKED + b"-1\r\n",
            CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
            CHUNKED + b"2\r\n{}}",
            CHUNKED + b"0\r\nX\n\r\n",
            CHUNKED + b"2" * 5000,
        ],
    )
    def test_a_request_without_a_certain_end_ends_its_connection(
        self, server: ModelServer, request_: bytes
    ) -> None:
        with socket.create_connection(("127.0.0.1", server.rest_port or 0), WAIT_SECONDS) as link:
            link.sendall(request_ + b"GET /v1/models/ranker HTTP/1.1\r\n\r\n" * 2)
            (answer,) = answers(link)
        assert answer.code == 400

    def test_chunks_that_are_too_many(self, hasty: ModelServer) -> None:
        with socket.create_connection(("127.0.0.1", hasty.rest_port or 0), WAIT_SECONDS) as link:
            link.sendall(CHUNKED + (b"%x\r\n%s\r\n" % (1 << 18, b" " * (1 << 18))) * 5)
            (answer,) = answers(link)
        assert answer.code == 413

    def test_a_body_that_is_announced_too_long(self, server: ModelServer) -> None:
        with socket.create_connection(("127.0.0.1", server.rest_port or 0), WAIT_SECONDS) as link:
            length = (512 << 20) + 1
            link.sendall(
                b"POST /v1/models/ranker:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                % length
            )
            assert link.recv(1000).startswith(b"HTTP/1.1 413 ")

    def test_headers_without_an_end(self, server: ModelServer, web: Web) -> None:
        with socket.create_connection(("127.0.0.1", server.rest_port or 0), WAIT_SECONDS) as link:
            link.sendall(b"GET /v1/models/ranker HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (65 << 10))
            assert link.recv(1000).startswith(b"HTTP/1.1 431 ")
        assert web("GET", MODEL).code == 200

    def test_a_client_that_leaves_in_the_middle(self, server: ModelServer, web: Web) -> None:
        for sent in (b'{"inst', b""):
            with socket.create_connection(("127.0.0.1", server.rest_port or 0), WAIT_SECONDS) as link:
                link.sendall(PREDICT + b"Content-Length: 90\r\n\r\n" + sent)
        assert web.ask("predict", {"instances": X}).code == 200

    def test_many_at_once(self, server: ModelServer) -> None:
        codes: list[int] = []

        def ask() -> None:
            web = Web(server.rest_port or 0)
            codes.extend(web.ask("predict", {"instances": X}).code for _ in range(20))
            web.connection.close()

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert codes == [200] * 240


def test_a_limit_of_time_and_other_origins(tmp_path: Path) -> None:
    write_saved_model(tmp_path / "m" / "1")
    network = NetworkOptions(rest_api_port=0, rest_api_timeout_in_ms=200, rest_api_enable_cors_support=True)
    with ModelServer(tmp_path / "m", options=ServerOptions(network=network)) as server:
        server.wait_available(WAIT_SECONDS)
        web = Web(server.rest_port or 0)
        late = web("POST", "/v1/models/m:predict", {"signature_name": "slow", "inputs": [10**9]})
        assert late.code == 504
        assert late.headers["Access-Control-Allow-Origin"] == "*"
        before = web("OPTIONS", "/v1/models/m:predict", Origin="https://page.example")
        assert (before.code, before.body) == (200, b"")
        assert before.headers["Access-Control-Allow-Methods"] == "POST, GET"
        assert before.headers["Access-Control-Allow-Headers"] == "Content-Type"
        assert web("OPTIONS", "/v1/models/m:predict").code == 400
        assert web("GET", rest.PROMETHEUS_PATH).code == 404
        web.connection.close()


def test_answers_while_versions_are_swapped(tmp_path: Path) -> None:
    """No request fails, and each answer is one version's."""
    sources = [write_saved_model(tmp_path / f"made-{n}", scale=n) for n in (1, 2, 3)]
    base = tmp_path / "ranker"
    shutil.copytree(sources[0], base / "1")
    options = ServerOptions(poll_seconds=0.02, network=NetworkOptions(rest_api_port=0))
    with ModelServer(base, options=options) as server:
        server.wait_available(WAIT_SECONDS)
        stop = threading.Event()
        seen: list[tuple[int, float]] = []

        def ask() -> None:
            web = Web(server.rest_port or 0)
            while not stop.is_set():
                answer = web.ask("predict", {"instances": [[1.0, 1.0]]})
                seen.append((answer.code, answer.json.get("predictions", [[0, 0]])[0][0]))
            web.connection.close()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in (2, 3):
            shutil.copytree(sources[number - 1], base / f".staging-{number}")
            (base / f".staging-{number}").rename(base / str(number))
            while server.statuses()[0].version != number or server.wait_available(WAIT_SECONDS) != number:
                time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert {code for code, _ in seen} == {200}
    assert {value for _, value in seen} >= {1.0, 2.0}
    assert {value for _, value in seen} <= {1.0, 2.0, 3.0}


def test_a_socket_of_another_server_is_not_taken_away(tmp_path: Path) -> None:
    write_saved_model(tmp_path / "m" / "1")
    path = tmp_path / "grpc.sock"
    options = ServerOptions(grpc_socket_path=path)
    with ModelServer(tmp_path / "m", options=options) as first:
        first.wait_available(WAIT_SECONDS)
        with pytest.raises(ServerError, match="cannot listen on unix:"):
            ModelServer(tmp_path / "m", options=options)
        with ModelClient(f"unix:{path}", "m", deadline_s=WAIT_SECONDS) as client:
            assert client.predict({"x": np.float32(X)}).version == 1
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # as a server leaves it that was killed
    left.close()
    with ModelServer(tmp_path / "m", options=options) as second:
        second.wait_available(WAIT_SECONDS)
        with ModelClient(f"unix:{path}", "m", deadline_s=WAIT_SECONDS) as client:
            assert client.predict({"x": np.float32(X)}).version == 1


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    write_saved_model(tmp_path / "m" / "1")
    with ModelServer(tmp_path / "m", options=ServerOptions(network=NetworkOptions(rest_api_port=0))) as first:
        for port in (first.rest_port, first.port):
            with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
                ModelServer(tmp_path / "m", options=ServerOptions(network=NetworkOptions(rest_api_port=port)))
            assert "--rest-api-port" in str(caught.value.hint)
    for thread in threading.enumerate():
        if thread.name.startswith("versions of m"):
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def test_libraries_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_saved_model(tmp_path / "m" / "1")
    monkeypatch.setitem(sys.modules, "h11", None)  # what an import finds where it is not installed
    with pytest.raises(UsageError, match="--rest-api-port needs h11") as caught:
        ModelServer(tmp_path / "m", options=ServerOptions(network=NetworkOptions(rest_api_port=0)))
    assert "pip install '.[server]'" in str(caught.value.hint)


def test_a_file_of_metrics_that_cannot_be_used(tmp_path: Path) -> None:
    write_saved_model(tmp_path / "m" / "1")
    file = tmp_path / "monitoring.config"
    for content in ("prometheus_config {", "prometheus: true", None):
        file.unlink(missing_ok=True) if content is None else file.write_text(content)
        network = NetworkOptions(rest_api_port=0, monitoring_config_file=file)
        with pytest.raises(UsageError, match="--monitoring-config-file"):
            ModelServer(tmp_path / "m", options=ServerOptions(network=network))


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1:1"), ("::1", "[::1]:1"), ("[::1]", "[::1]:1"), ("localhost", "localhost:1")],
)
def test_addresses(host: str, shown: str) -> None:
    assert server_module._host_and_port(host, 1) == shown


def test_other_origins_are_not_let_in_unless_asked(web: Web) -> None:
    assert web("GET", "/v1/models/ranker").headers["Access-Control-Allow-Origin"] is None


class TestMetrics:
    def test_requests_and_states(self, server: ModelServer, web: Web, client: ModelClient) -> None:
        before = samples(web)
        client.predict({"x": np.float32(X)})
        web.ask("predict", {"instances": X})
        web.ask("predict", {"instances": []})
        web("GET", '/v1/models/a"\\b')
        found = samples(web)

        def grew(name: str) -> float:
            return found[name] - before.get(name, 0)

        count = ":tensorflow:serving:request_count"
        assert grew(f'{count}{{model_name="ranker",status="OK"}}') == 2
        assert grew(f'{count}{{model_name="ranker",status="INVALID_ARGUMENT"}}') == 1
        assert grew(f'{count}{{model_name="",status="NOT_FOUND"}}') == 1, "no series for what is not served"
        for api, entrypoint in (("Predict", "GRPC"), ("predict", "REST")):
            first, last = f'{{API="{api}",entrypoint="{entrypoint}",', 'model_name="ranker"}'
            latency = ":tensorflow:serving:request_latency"
            assert grew(f"{latency}_count{first}{last}") == 1
            assert grew(f'{latency}_bucket{first}le="+Inf",{last}') == 1
            assert 10 < grew(f"{latency}_sum{first}{last}") < WAIT_SECONDS * 1e6
        state = 'export_model_server_version_state{model_name="ranker",state="AVAILABLE",version="7"}'
        assert found[state] == 1
        assert "export_model_server_position" not in "".join(found), "it takes no deltas"

    def test_the_page(self, web: Web) -> None:
        page = web("GET", rest.PROMETHEUS_PATH)
        assert page.headers["Content-Type"].startswith("text/plain")
        wrong = web("GET", rest.PROMETHEUS_PATH + "?x=1")
        assert (wrong.code, b"Unexpected path" in wrong.body) == (400, True)

    def test_the_position_of_a_model_that_takes_deltas(self, tmp_path: Path) -> None:
        model = updatable_model(tmp_path)
        model.publish(100, 130, random_changes(model.schema, seed=1))
        options = ServerOptions(network=with_metrics(tmp_path, "/metrics"))
        with ModelServer(model.base, options=options) as server:
            version = server.wait_available(WAIT_SECONDS)
            web = Web(server.rest_port or 0)
            labels = f'{{model_name="{server.name}",version="{version}"}}'
            before = samples(web, "/metrics")
            answer = web(
                "POST",
                f"/v1/models/{server.name}:predict",
                {"signature_name": "incremental_update", "instances": [-1]},
            )
            assert answer.json["predictions"][0]["position"] == 130
            found = samples(web, "/metrics")
            web.connection.close()
        assert [page[f"export_model_server_position{labels}"] for page in (before, found)] == [100, 130]
        assert found[f"export_model_server_step{labels}"] > before[f"export_model_server_step{labels}"]


def samples(web: Web, path: str = rest.PROMETHEUS_PATH) -> dict[str, float]:
    """Every sample of the page by its name and sorted labels, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(web("GET", path).body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


JSONS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just({"b64": "YQ"})
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["x", "text", "b64", "label", "z"]), inner, max_size=3),
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(["instances", "inputs", "examples", "context", "signature_name"])
NAMES = st.sampled_from(["two", "text", "classify", "regress", "odd", "flat", "wide", "serving_default"])
DOCUMENTS = st.one_of(
    st.dictionaries(KEYS, st.one_of(JSONS, NAMES), max_size=3).map(lambda d: json.dumps(d).encode()),
    st.tuples(NAMES, KEYS, JSONS).map(lambda t: json.dumps({"signature_name": t[0], t[1]: t[2]}).encode()),
    st.binary(max_size=20),
)
PATHS = st.one_of(
    st.sampled_from([":predict", ":classify", ":regress", "/versions/7:predict", "/metadata", ""]),
    st.text(st.sampled_from("/:%?aé7"), max_size=6).map(lambda text: quote(text, safe="/:%?")),
)


@settings(max_examples=times(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["POST", "POST", "POST", "GET", "OPTIONS", "PUT"]), PATHS, DOCUMENTS)
def test_whatever_is_sent_is_answered_in_good_order(
    server: ModelServer, method: str, path: str, body: bytes
) -> None:
    """Nothing that a client sends is the server's fault, and every error says in JSON what was wrong."""
    application = rest.RestInterface(server._calls, server._metrics)
    response = application(HttpRequest(method, f"{MODEL}{path}", {}, body))
    code, answer = int(response.status[:3]), b"".join(response.body)
    assert code in (200, 400, 404), (response.status, answer)
    if code != 200:
        assert list(json.loads(answer)) == ["error"]


def test_no_answer_mixes_positions_while_deltas_are_applied_over_rest(tmp_path: Path) -> None:
    model = updatable_model(tmp_path)
    options = ServerOptions(network=NetworkOptions(rest_api_port=0))
    with ModelServer(model.base, options=options) as server:
        server.wait_available(WAIT_SECONDS)
        path = f"/v1/models/{server.name}:predict"
        stop = threading.Event()
        seen: list[list[int]] = []
        codes: set[int] = set()

        def ask() -> None:
            web = Web(server.rest_port or 0)
            while not stop.is_set():
                answer = web("POST", path, {"inputs": {"user": [1, 2, 3], "item": [1, 2, 3]}})
                codes.add(answer.code)
                seen.append(answer.json["outputs"]["model_position"])
            web.connection.close()

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        web = Web(server.rest_port or 0)
        for position in range(100, 120):
            model.evolve(position, position + 1)
            asked = {"signature_name": "incremental_update", "instances": [{"up_to": -1}]}
            (answer,) = web("POST", path, asked).json["predictions"]
            assert (answer["position"], answer["deltas"]) == (position + 1, 1)
        stop.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        web.connection.close()
    assert codes == {200}
    assert not [positions for positions in seen if len(set(positions)) > 1]
    assert {positions[0] for positions in seen} <= set(range(100, 121))
