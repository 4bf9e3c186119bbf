"""Whose requests a port answers: by the name in `Host`, and by the page that asks."""

from __future__ import annotations

import http.client
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import UsageError
from serving.http_names import OwnNames, listed_names
from serving.http_port import HttpPort, HttpResponse
from serving.server import ModelServer
from serving.server_options import NetworkOptions, ServerOptions
from tests.support.serving_models import write_saved_model

WAIT_SECONDS = 60
ADDRESSES = ["127.0.0.1", "127.0.0.1:8600", "10.42.0.17:8600", "[::1]", "[::1]:8600", "[fe80::1]:8600"]
LOCAL = ["localhost", "localhost:8600", "LOCALHOST", "localhost.", "app.localhost:3000"]
SHORT = ["agent", "agent:8600", "ranker-7f9"]
FOREIGN = [
    "evil.example",
    "evil.example:8600",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1.nip.io",
    "ranker.ml.svc.cluster.local",
    "notlocalhost.example",
    "",
    ":8600",
    "[evil.example]",
    "127.0.0.1@evil.example",
    "a b",
    "[::1",
    "evil.example:80:90",
    "a" * 255,
]


@pytest.mark.parametrize("host", [*ADDRESSES, *LOCAL])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::", "10.42.0.17"])
def test_addresses_and_localhost_are_nobodys_sites(host: str, address: str) -> None:
    assert OwnNames.of([address], address).has(host)


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_names_of_sites_are_refused(host: str, address: str) -> None:
    assert not OwnNames.of([address], address).has(host)


def test_a_long_name_costs_nothing() -> None:
    """A head has room for 65,000 dots, and what follows each of them would be a name to compare: 2 GB."""
    names = OwnNames.of(["127.0.0.1"], "127.0.0.1")
    tracemalloc.start()
    try:
        assert not names.has("." * 10_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("host", SHORT)
def test_names_of_a_network_are_own_off_the_loopback(host: str) -> None:
    """So Compose's services, containers and Kubernetes' services of one namespace go on."""
    assert OwnNames.of(["0.0.0.0"], "0.0.0.0").has(host)
    assert not OwnNames.of(["127.0.0.1"], "127.0.0.1").has(host)


def test_the_name_that_it_listens_on() -> None:
    assert OwnNames.of(["Ml.Example.com"], "127.0.0.1").has("ml.example.com:8600")


@pytest.mark.parametrize(
    ("option", "own", "foreign"),
    [
        ("ml.example.com", ["ml.example.com", "ML.example.com.:80"], ["a.ml.example.com", "example.com"]),
        ("*.svc.cluster.local", ["a.svc.cluster.local", "a.b.svc.cluster.local:1"], ["svc.cluster.local"]),
        ("a.b,c.d", ["a.b", "c.d"], ["e.f", "a.b.c.d"]),
        ("*", ["evil.example"], ["", "a b"]),
    ],
)
def test_names_that_are_allowed(option: str, own: list[str], foreign: list[str]) -> None:
    names = OwnNames.of(listed_names(option), "127.0.0.1")
    assert all(map(names.has, own))
    assert not any(map(names.has, foreign))


@pytest.mark.parametrize("option", ["", "a,", "http://a.b", "a.b:80", "*a", "a.*", "a b"])
def test_what_is_no_name(option: str) -> None:
    with pytest.raises(UsageError, match="name"):
        listed_names(option)


def codes(port: HttpPort, *hosts: str) -> list[int]:
    return [status(port.port, "GET", Host=host)[0] for host in hosts]


def status(port: int, method: str, path: str = "/", body: bytes | None = None, **headers: str) -> Any:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    link.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        link.putheader(name.replace("_", "-"), value)
    if body is not None:
        link.putheader("Content-Length", str(len(body)))
    link.endheaders(body)
    answer = link.getresponse()
    found = answer.status, answer.read().decode()
    link.close()
    return found


def opened(host: str = "127.0.0.1", **more: Any) -> HttpPort:
    return HttpPort(
        lambda request: HttpResponse("200 OK", [], [b"secret"]),
        host,
        0,
        option="--port",
        threads=1,
        max_body_bytes=100,
        request_seconds=WAIT_SECONDS,
        is_quick=lambda request: False,
        **more,
    )


def test_a_port_answers_to_its_own_names() -> None:
    port = opened()
    try:
        assert codes(port, "127.0.0.1:1", "localhost", "agent", "evil.example") == [200, 200, 403, 403]
        code, text = status(port.port, "POST", body=b"x" * 20, Host="evil.example")
        assert (code, "secret" in text, "--allow-host" in text) == (403, False, True)
        assert "x" * 200 not in status(port.port, "GET", Host="x" * 5000 + ".example")[1]
    finally:
        port.stop()


def test_a_port_of_all_addresses_and_of_allowed_names() -> None:
    port = opened("0.0.0.0", allow_host="ml.example.com")
    try:
        assert codes(port, "agent:8600", "ml.example.com", "evil.example") == [200, 200, 403]
    finally:
        port.stop()


def test_a_request_of_http_1_0_names_no_host() -> None:
    import socket

    port = opened()
    try:
        with socket.create_connection(("127.0.0.1", port.port), WAIT_SECONDS) as link:
            link.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert link.recv(1000).startswith(b"HTTP/1.1 200 ")
    finally:
        port.stop()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("names") / "ranker"
    write_saved_model(base / "1")
    return base


@pytest.fixture(scope="module", params=[False, True], ids=["no CORS", "CORS"])
def served(base: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """A port of REST, and whether pages of other sites are allowed."""
    network = NetworkOptions(rest_api_port=0, rest_api_enable_cors_support=request.param)
    with ModelServer(base, options=ServerOptions(network=network)) as server:
        server.wait_available(WAIT_SECONDS)
        assert server.rest_port is not None
        yield server.rest_port, request.param


FORM, TEXT, FILES, JSON = (
    "application/x-www-form-urlencoded",
    "text/plain;charset=UTF-8",
    "multipart/form-data; boundary=x",
    "application/json",
)
PROGRAMS: list[dict[str, str]] = [
    {},
    {"Content_Type": FORM},  # curl -d
    {"Content_Type": TEXT},
    {"Content_Type": JSON},
    {"Content_Type": f"{JSON}; charset=utf-8"},
    {"Content_Type": JSON, "Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-origin"},  # a proxy
    {"Content_Type": FORM, "Origin": "http://HOST"},
    {"Content_Type": FORM, "Origin": "http://HOST", "Sec_Fetch_Site": "same-origin"},
    {"Content_Type": TEXT, "Sec_Fetch_Site": "none"},
]
PAGES: list[dict[str, str]] = [
    *({"Content_Type": kind, "Origin": "http://evil.example"} for kind in (FORM, TEXT, FILES)),
    {"Content_Type": FORM, "Origin": "null"},
    {"Content_Type": f"{TEXT}; {JSON}", "Origin": "http://evil.example"},
    {"Origin": "http://evil.example"},  # a blob without a type
    {"Content_Type": TEXT, "Sec_Fetch_Site": "cross-site"},
    {"Content_Type": TEXT, "Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"},
    {"Content_Type": TEXT, "Origin": "http://HOST", "Sec_Fetch_Site": "cross-site"},
]


def predicted(port: int, headers: dict[str, str]) -> int:
    own = {name: value.replace("HOST", f"127.0.0.1:{port}") for name, value in headers.items()}
    body = json.dumps({"instances": [[1.0, 2.0]]}).encode()
    return int(status(port, "POST", "/v1/models/ranker:predict", body, **own)[0])


@pytest.mark.parametrize("headers", PROGRAMS, ids=str)
def test_programs_are_answered(served: tuple[int, bool], headers: dict[str, str]) -> None:
    assert predicted(served[0], headers) == 200


@pytest.mark.parametrize("headers", PAGES, ids=str)
def test_pages_of_other_sites_are_refused_unless_they_are_allowed(
    served: tuple[int, bool], headers: dict[str, str]
) -> None:
    port, allows_pages = served
    assert predicted(port, headers) == (200 if allows_pages else 403)


def test_rest_refuses_names_of_sites(served: tuple[int, bool]) -> None:
    assert status(served[0], "GET", "/v1/models/ranker", Host="evil.example")[0] == 403
    assert status(served[0], "GET", "/v1/models/ranker", Host="localhost:1")[0] == 200


def test_a_server_of_allowed_names(base: Path) -> None:
    network = NetworkOptions(rest_api_port=0, allow_host="ml.example.com")
    with ModelServer(base, options=ServerOptions(network=network)) as server:
        server.wait_available(WAIT_SECONDS)
        assert status(server.rest_port or 0, "GET", "/v1/models/ranker", Host="ml.example.com")[0] == 200
    with pytest.raises(UsageError, match="name"):
        ModelServer(base, options=ServerOptions(network=NetworkOptions(rest_api_port=0, allow_host="a:80")))
