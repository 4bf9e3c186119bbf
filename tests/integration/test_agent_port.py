"""The agent's own port: TLS, certificates, tokens, clients that dawdle; and volumes that go away."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from exporter.publish.delta_log import read_log
from tests.support.agents import DEADLINE_S, Published, Server, agent, process, wait
from tests.support.budget import thorough
from tests.support.certificates import Certified, Pair

NOBODY = "127.0.0.1:9"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("port"))


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    return Certified(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(published: Published) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(published.model, stack=stack).start()


def get(port: int, path: str, ca: Path, own: Pair | None = None, **headers: str) -> tuple[int, str]:
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def tls_options(certified: Certified) -> tuple[str, ...]:
    return ("--tls-cert", str(certified.server.cert), "--tls-key", str(certified.server.key))


def test_the_port_speaks_tls_and_asks_for_certificates_and_a_token(
    published: Published, certified: Certified, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-w0rd\n")
    options = (*tls_options(certified), "--client-ca", str(certified.ca), "--token-file", str(token))
    bearer = {"Authorization": "Bearer s3cret-w0rd"}
    with agent(published.model, NOBODY, more=options) as running:

        def ask(path: str, own: Pair | None = None, **headers: str) -> tuple[int, str]:
            return get(running.port, path, certified.ca, own, **headers)

        assert ask("/healthz") == (200, "ok\n"), "a probe shows no certificate"
        assert ask("/healthz", Host="ml.example.com") == (200, "ok\n"), "the certificate has the names"
        status, text = ask("/readyz")
        assert (status, NOBODY in text) == (503, False), "and learns no address"
        for path in ("/", "/metrics", "/status.json"):
            assert ask(path, **bearer)[0] == 403, "a token without a certificate"
            assert ask(path, certified.client)[0] == 401, "a certificate without a token"
            assert ask(path, certified.client, **bearer)[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask("/healthz", certified.stranger)
        with pytest.raises(ssl.SSLCertVerificationError):
            get(running.port, "/healthz", certified.other_ca)
        with pytest.raises(OSError):  # plain HTTP on a port that speaks TLS
            running.get("/healthz")
        assert ask("/healthz") == (200, "ok\n")
        running.process.terminate()
        running.process.wait(DEADLINE_S)
        assert running.process.stderr is not None
        said = running.process.stderr.read() + str(running.events)
        key = certified.server.key.read_text().splitlines()[1]
        assert "Traceback" not in said
        for secret in ("s3cret-w0rd", key):
            assert secret not in said


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics", "/readyz"])
def test_a_page_whose_name_leads_here_reads_nothing(published: Published, path: str) -> None:
    """Of DNS rebinding: the browser takes the page for one of the site's own."""
    with agent(
        published.model, NOBODY, more=("--allow-host", "ml.example.com,*.svc.cluster.local")
    ) as running:

        def named(host: str, method: str = "GET") -> int:
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            connection.request(method, path, headers={"Host": host})
            return connection.getresponse().status

        own = {
            named(host) for host in ("10.0.0.7:8600", "localhost", "ml.example.com", "a.b.svc.cluster.local")
        }
        assert named("evil.example") == 403
        assert 403 not in own
        changing = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS")
        assert {named("localhost", method) for method in changing} == {405}, "nobody changes anything here"


@pytest.mark.landing
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("cert",), "go together"),
        (("key",), "go together"),
        (("ca",), "go together"),
        (("cert", "other key"), "cannot be used"),
        (("cert", "key", "no ca"), "cannot be used"),
    ],
)
def test_files_that_do_not_fit_are_a_usage_error(
    certified: Certified, given: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    files = {
        "cert": ("--tls-cert", certified.server.cert),
        "key": ("--tls-key", certified.server.key),
        "other key": ("--tls-key", certified.stranger.key),
        "ca": ("--client-ca", certified.ca),
        "no ca": ("--client-ca", tmp_path / "missing"),
    }
    options = [part for name in given for part in files[name]]
    with process(
        "agent", "--model-base-path", tmp_path, "--target", NOBODY, "--port", "0", *options
    ) as started:
        _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 2
    assert message in err
    assert "PRIVATE" not in err


@pytest.mark.landing
@pytest.mark.parametrize("is_tls", [pytest.param(False, marks=thorough), True], ids=["http", "https"])
def test_clients_that_dawdle_hold_back_neither_rollout_nor_probes(
    published: Published, server: Server, certified: Certified, is_tls: bool
) -> None:
    """More of them than the port has threads: some say half a request, some nothing at all."""
    version = int(read_log(published.model).base.path.name)
    options = tls_options(certified) if is_tls else ()
    with agent(published.model, server.address, more=options) as running, ExitStack() as stack:

        def healthz() -> tuple[int, str]:
            return get(running.port, "/healthz", certified.ca) if is_tls else running.get("/healthz")

        dawdling = [
            _half_a_request(running.port, is_tls and number % 2 == 0, certified) for number in range(24)
        ]
        for each in dawdling:
            stack.callback(each.close)
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
        assert wait(healthz) == (200, "ok\n")
        for each in dawdling:
            each.settimeout(DEADLINE_S)
        spoke = dawdling[0]
        while spoke.recv(1000):  # it is told so, perhaps, and cut off
            pass


def _half_a_request(port: int, with_handshake: bool, certified: Certified) -> Any:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    if with_handshake:
        context = ssl.create_default_context(cafile=certified.ca)
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
    connection.sendall(b"GET / HTTP/1.1\r\nHost: a")
    return connection


def test_deltas_that_vanish_are_not_taken_for_none(published: Published, server: Server) -> None:
    """They may lie on a volume of their own."""
    published.publish()
    deltas, away = published.model / "deltas", published.model / "away"
    with agent(published.model, server.address) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        deltas.rename(away)
        try:
            wait(lambda: "has vanished: is its volume mounted?" in running.get("/freshz")[1])
            assert running.get("/readyz")[0] == 200, running.get("/readyz")[1]
        finally:
            away.rename(deltas)
        wait(lambda: running.of("seen"))
        wait(lambda: running.get("/freshz")[0] == 200)


@pytest.mark.landing
def test_an_empty_directory_where_a_model_was_is_an_unmounted_volume(
    published: Published, server: Server
) -> None:
    """The mount point stays when its volume goes; and comes back with everything."""
    away = published.model.with_name("away")
    with agent(published.model, server.address) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        published.model.rename(away)
        published.model.mkdir()
        try:
            wait(lambda: "is its volume mounted?" in running.get("/freshz")[1])
            assert f'published_visible{{model="{published.model.name}"}} 0.0' in running.get("/metrics")[1]
            (published.model / "deltas").mkdir()
            assert running.get("/freshz")[0] == 503
            assert running.get("/readyz")[0] == 200, running.get("/readyz")[1]
        finally:
            shutil.rmtree(published.model)
            away.rename(published.model)
        wait(lambda: running.of("seen"))
        version = int(read_log(published.model).base.path.name)
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
