"""Bad exchanges on both ports: each ends in an error or a closed connection, and nobody else notices.

What follows a bad message on its connection is never answered: a proxy may see the message's end elsewhere.
"""

from __future__ import annotations

import bz2
import gzip
import http.client
import logging
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from msgspec import Struct

from serving import http_port, rest
from serving import server as server_module
from serving.agent import http as agent_http
from serving.server import ModelServer
from serving.server_options import NetworkOptions, ServerOptions
from tests.support.status_pages import shown, usual

WAIT_S = 60
SLOWEST_S = 2.0
HOST = b"Host: localhost\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"x" * (70 << 10)

REQUEST_LINES = [
    *(
        b"GET",
        b"GET /",
        b"GET HTTP/1.1",
        b"/ HTTP/1.1",
        b"* HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET /  HTTP/1.1",
    ),
    *(b" GET / HTTP/1.1", b"\tGET / HTTP/1.1", b"GET\t/\tHTTP/1.1", b"GET / HTTP/1.1 ", b"GET / HTTP/1.1 x"),
    *(b"GET / " + version for version in (b"HTTP/1", b"HTTP/1.", b"HTTP/11", b"HTTP/1.10", b"HTTP/2.0")),
    *(b"GET / " + version for version in (b"HTTP/0.9", b"HTTP/3.0", b"http/1.1", b"HTTP/-1.1", b"HTTP/1,1")),
    *(b"GET / " + version for version in (b"HTP/1.1", b"/1.1", b"1.1", b"HTTP/1.1\0", b"HTTP/\xb9.1")),
    *(method + b" / HTTP/1.1" for method in (b"G(T", b"G{T", b"GET:", b"G\0T", b"G\xffT", b'G"T', b"G@T")),
    *(b"GET " + target + b" HTTP/1.1" for target in (b"/\0", b"/\x7f", b"/\xff", b"/\x01", b"/\t", b"/a b")),
    *(b"GET " + target + b" HTTP/1.1" for target in (b"http://[", b"http://[::1", b"http://]/", b"//[\xc3")),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", b"\x80\x2e\x01\0\x02"),
    *(b"SSH-2.0-OpenSSH_9.6", b"\x05\x01\0", b"HTTP/1.1 200 OK", b"\xef\xbb\xbfGET / HTTP/1.1", b"\0" * 9),
    *(LONG, LONG + b" / HTTP/1.1", b"GET /" + LONG + b" HTTP/1.1", b"GET / HTTP/1.1" + LONG),
]
HEADS = [
    *(b"", HOST * 2, b"Host: localhost\r\nhost: evil.example\r\n", b"Host\r\n", b"Host localhost\r\n"),
    *(b": localhost\r\n", b"Host : localhost\r\n", b"Host\t: localhost\r\n", b" Host: localhost\r\n"),
    *(
        b"Host: " + host + b"\r\n"
        for host in (b"evil.example", b"a@localhost", b"a b", b"[::1", b"::1", b"*")
    ),
    *(
        b"Host: " + host + b"\r\n"
        for host in (b"localhost, evil.example", b"http://localhost", b"a\0b", b"a\rb")
    ),
    *(HOST + name + b": a\r\n" for name in (b"", b"X\xf6", b"X(", b"X{", b"X@", b'X"', b"X/", b"X[", b"X Y")),
    *(
        HOST + line + b"\r\n"
        for line in (b"X", b"X: a\0", b"X: a\rb", b"X: \0", b"\0: a", b"X\0: a", b"\rX: a")
    ),
    *(
        HOST + b"X: a\r\n" + fold
        for fold in (b" b\r\n", b"\tb\r\n", b" \r\n", b" b\r\n" * 1000, b" Y: b\r\n")
    ),
    *(
        b"Host:\r\n localhost\r\n",
        HOST + b"Transfer-Encoding:\r\n chunked\r\n",
        HOST + b"Content-Length:\r\n 5\r\n",
    ),
    *(HOST + b"X: " + LONG + b"\r\n", HOST + LONG + b": a\r\n", HOST + b"X: " + b"a " * len(LONG) + b"\r\n"),
    HOST + b"".join(b"X%d: %s\r\n" % (number, b"a" * 999) for number in range(999)),
]
LENGTHS = [
    *(b"Content-Length: " + length for length in (b"-1", b"+2", b"0x2", b"2.0", b"2e0", b"", b"2 2", b"2,3")),
    *(b"Content-Length: " + length for length in (b"2;2", b"two", b"\xef\xbc\x92", b"\xb2", b"1_0", b"2\0")),
    *(b"Content-Length: " + length for length in (b"9" * 20, b"1" * 5000, b"%d" % (1 << 40), b"-0", b"NaN")),
    *(b"Content-Length: 2\r\nContent-Length: " + length for length in (b"3", b"30", b"-2", b"2\r\nX", b"")),
    *(b"Transfer-Encoding: " + coding for coding in (b"gzip", b"identity", b"chunked, chunked", b"xchunked")),
    *(
        b"Transfer-Encoding: " + coding
        for coding in (b"gzip, chunked", b"chunk", b"", b'"chunked"', b"chunked\0")
    ),
    *(b"Transfer-Encoding: " + coding for coding in (b"chunked, identity", b"chunked;q=1", b"\x0bchunked")),
    *(b"Content-Length: %d\r\nTransfer-Encoding: chunked" % length for length in (0, 2, 5)),
    *(b"Transfer-Encoding: chunked\r\nContent-Length: 2", b"Transfer-Encoding: chunked\r\n" * 2 + b"X: a"),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding\0: chunked", b"Transfer-Encoding: chunked\r\nX"),
]
CHUNKINGS = [
    *(
        size + b"\r\n{}\r\n0\r\n\r\n"
        for size in (b"zz", b"g", b"-1", b"-2", b"+2", b"0x2", b" 2", b"", b"2,", b"2.0")
    ),
    *(
        size + b"\r\n{}\r\n0\r\n\r\n"
        for size in (b"\xef\xbc\x92", b"\0", b"2\0", b"1", b"3", b"02_", b"2 2", b"2\t2")
    ),
    *(b"2\n{}\n0\n\n", b"2\r{}\r0\r\r", b"2\r\n{}}\r\n0\r\n\r\n", b"2\r\n{}0\r\n\r\n", b"2\r\n{}\n0\r\n\r\n"),
    *(b"2\r\n{}\rX0\r\n\r\n", b"f" * 16 + b"\r\n{}", b"f" * 20 + b"\r\n{}", b"f" * 21 + b"\r\n", b"2" * 5000),
    *(b"2;" + LONG, b"2" + b" " * len(LONG), b"\r\n" * 99, b"0\r\nX\r\n\r\n"),
    *(
        b"0\r\nX\n\r\n",
        b"0\r\n X: a\r\n\r\n",
        b"0\r\nX : a\r\n\r\n",
        b"0\r\n: a\r\n\r\n",
        b"0\r\nX: a\0\r\n\r\n",
    ),
    *(b"0\r\nX: " + LONG * 5, b"0\r\nGET / HTTP/1.1\r\n\r\n", b"0\n\r\n", b"0\r\n\rX", b"0"),
    *(b"%x\r\n%s\r\n" % (len(LONG), LONG) * 40, b"200000\r\n" + b"x" * (2 << 20)),
]
PACKED = gzip.compress(b'{"instances": [[1.0, 2.0]]}' * 99)
BODIES = [
    *(b"", b"{}", b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x08", b"\x1f\x8b\x07" + PACKED[3:], b"PK\3\4", b"\0" * 99),
    *(PACKED[:9], PACKED[:10], PACKED[:11], PACKED[:30], PACKED[:-8], PACKED[:-4], PACKED[:-1], PACKED[1:]),
    *(PACKED[:at] + b"\xff" * 4 + PACKED[at + 4 :] for at in (0, 10, 20, len(PACKED) - 8, len(PACKED) - 4)),
    *(zlib.compress(b"{}"), zlib.compress(b"{}")[2:-4], bz2.compress(b"{}"), b" " + PACKED),
    *(
        gzip.compress(b"x" * (64 << 20)),
        gzip.compress(b"x" * (4 << 20)),
        gzip.compress(gzip.compress(LONG * 99))[:-9],
    ),
]
GZIP = POST + b"Content-Encoding: gzip\r\n"
WHOLE = [
    POST + b"Content-Length: 40\r\n\r\n" + b" " * 40,
    CHUNKED + b"5\r\n12345\r\n2;a=b\r\n12\r\n0\r\nX: a\r\n\r\n",
]
QUICK: dict[str, list[bytes]] = {
    "request lines": [line + b"\r\n" + HOST + b"\r\n" for line in REQUEST_LINES],
    "heads": [b"GET / HTTP/1.1\r\n" + head + b"\r\n" for head in HEADS],
    "lengths": [POST + length + b"\r\n\r\n0\r\n\r\n" for length in LENGTHS]
    + [POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "chunks": [CHUNKED + body for body in CHUNKINGS],
    "gzip": [GZIP + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in BODIES]
    + [GZIP + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(b), b) for b in BODIES[-2:]],
}
CUT = [whole[:at] for whole in WHOLE for at in range(1, len(whole), 7)]
DRIPPING = [
    b"",
    *(whole[:at] for whole in WHOLE for at in (1, 10, 30, 50, len(whole) - 30)),
    CHUNKED + b"5\r\n1",
]


class Port(Struct):
    number: int
    probe: str

    def link(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), WAIT_S)

    def is_well(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self.number, timeout=WAIT_S)) as connection:
            connection.request("GET", self.probe)
            return connection.getresponse().status == 200


@pytest.fixture(scope="module", params=["agent", "server"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_port, "_IDLE_S", SLOWEST_S)
        patch.setattr(agent_http, "_REQUEST_S", SLOWEST_S)
        patch.setattr(server_module, "_REQUEST_S", SLOWEST_S)
        patch.setattr(rest, "MAX_BODY_BYTES", 1 << 20)
        if request.param == "agent":
            with shown(usual()) as address:
                yield Port(int(address.rpartition(":")[2].strip("/")), "/healthz")
            return
        directory = tmp_path_factory.mktemp("bad")
        models, monitoring = directory / "models.config", directory / "monitoring.config"
        models.write_text("model_config_list { }")
        monitoring.write_text("prometheus_config { enable: true }")
        network = NetworkOptions(rest_api_port=0, monitoring_config_file=monitoring)
        with ModelServer(options=ServerOptions(model_config_file=models, network=network)) as server:
            yield Port(server.rest_port or 0, rest.PROMETHEUS_PATH)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a client sends, it is no error of the server."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def ended(port: Port, sent: bytes) -> list[int]:
    """The codes of all that is answered to these bytes, after which the client closes its side."""
    with port.link() as link:
        receiving = ThreadPoolExecutor(1).submit(codes, link)
        try:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server closed the connection in the middle
        return receiving.result()


def codes(link: socket.socket) -> list[int]:
    """The codes of all answers until the connection ends; TimeoutError if it does not."""
    said = b""
    try:
        while part := link.recv(1 << 16):
            said += part
    except ConnectionError:
        pass
    return [int(code) for code in re.findall(rb"(?:^|[\n}])HTTP/1\.1 ([0-9]{3}) ", said)]


def wrong(
    port: Port, exchanges: list[bytes], ask: Callable[[Port, bytes], list[int]], good: int = 0
) -> list[object]:
    """The exchanges that do not end as they should, while the port answers others.

    They should after `good` answers have one of an error, or none.
    """
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, port, sent) for sent in exchanges]
        while not all(each.done() for each in running):
            assert port.is_well()
            time.sleep(0.01)
    found = [(sent, each.result()) for sent, each in zip(exchanges, running, strict=True)]
    return [
        (sent[:200], answers)
        for sent, answers in found
        if not all(code >= 400 for code in answers[good:]) or len(answers) > good + 1
    ]


@pytest.mark.parametrize("kind", QUICK)
def test_it_is_refused_and_what_follows_is_not_answered(port: Port, kind: str) -> None:
    assert wrong(port, [sent + NEXT for sent in QUICK[kind]], ended) == []


@pytest.mark.parametrize("kind", QUICK)
def test_it_is_refused_after_a_good_request(port: Port, kind: str) -> None:
    assert wrong(port, [NEXT + sent + NEXT for sent in QUICK[kind][::4]], ended, good=1) == []


def test_a_request_that_is_cut_off(port: Port) -> None:
    assert wrong(port, CUT, ended) == []


def test_a_client_that_is_gone(port: Port) -> None:
    def torn(port: Port, sent: bytes) -> list[int]:
        with port.link() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(sent)
        return []

    assert wrong(port, CUT, torn) == []


def test_a_byte_now_and_then(port: Port) -> None:
    def dripped(port: Port, sent: bytes) -> list[int]:
        with port.link() as link:
            over = threading.Event()

            def drip() -> None:
                try:
                    link.sendall(sent)
                    while not over.wait(0.1):
                        link.sendall(b"\r\n" if not sent else b"a")
                except OSError:
                    pass  # cut off

            thread = threading.Thread(target=drip)
            thread.start()
            try:
                return codes(link)
            finally:
                over.set()
                thread.join(WAIT_S)

    assert wrong(port, DRIPPING, dripped) == []


def test_there_are_enough() -> None:
    assert sum(map(len, QUICK.values())) + len(CUT) + len(DRIPPING) >= 200
