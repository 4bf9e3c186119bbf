"""The HTTP port beside clients that dawdle, flood it or take nothing: none waits, and memory is bounded."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import http_port
from serving.http_port import HttpPort, HttpRequest, HttpResponse, HttpTls

WAIT_S = 60


def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse("200 OK", [], [bytes(request.body) or b"ok"])


@contextmanager
def listening(
    application: Callable[[HttpRequest], HttpResponse] = echo, *, host: str = "127.0.0.1", **options: Any
) -> Iterator[HttpPort]:
    defaults = {"threads": 2, "max_body_bytes": 1 << 20, "request_seconds": WAIT_S}
    asked = defaults | {"is_quick": lambda request: request.target == "/healthz"} | options
    port = HttpPort(application, host, 0, option="--port", **asked)
    try:
        yield port
    finally:
        port.stop(0.0)


def connected(port: HttpPort, sent: bytes = b"") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port.port), WAIT_S)
    link.sendall(sent)
    return link


def ask(port: HttpPort, path: str = "/", body: bytes | None = None) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port.port, timeout=WAIT_S)) as connection:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def heard(link: socket.socket) -> bytes:
    """All that is said until the connection ends."""
    found = b""
    try:
        while part := link.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


HALVES = [
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nHost: a",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\nx",
]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_interfaces_of_ipv6_are_those_of_ipv4_too() -> None:
    with listening(host="::") as port:
        assert ask(port) == (200, b"ok")


def test_clients_that_dawdle_keep_nobody_waiting() -> None:
    """Far more of them than threads."""
    with listening() as port, ExitStack() as stack:
        for number in range(100):
            stack.enter_context(connected(port, HALVES[number % len(HALVES)]))
        for _ in range(3):
            assert ask(port, "/healthz") == (200, b"ok")
            assert ask(port, body=b"whole") == (200, b"whole")


@pytest.mark.parametrize("half", HALVES[1:])
def test_a_byte_now_and_then_buys_no_time(half: bytes) -> None:
    with listening(request_seconds=1.0) as port, connected(port, half) as link:
        link.settimeout(0.1)
        said, until = b"", time.monotonic() + WAIT_S
        while not said:
            assert time.monotonic() < until
            try:
                link.sendall(b"x" if b"\r\n" in half else b"")
                said = link.recv(1 << 16) or b"cut off"
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert said == b"" or said.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))


def test_probes_are_answered_while_all_threads_work() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def work(request: HttpRequest) -> HttpResponse:
        if request.target == "/slow":
            begun.release()
            go_on.wait(WAIT_S)
        return echo(request)

    answers: list[tuple[int, bytes]] = []
    with listening(work, threads=2) as port:
        threads = [
            threading.Thread(target=lambda: answers.append(ask(port, "/slow", b"done"))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for _ in range(2):
            assert begun.acquire(timeout=WAIT_S)
        assert ask(port, "/healthz") == (200, b"ok")
        go_on.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert answers == [(200, b"done")] * 6


def test_bodies_of_all_clients_together_have_a_limit() -> None:
    with listening() as port, ExitStack() as stack:
        length = 1 << 20
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length
        held = [stack.enter_context(connected(port, head + b"x" * (length - 1))) for _ in range(2)]
        until = time.monotonic() + WAIT_S
        while port.held_bytes < 2 * (length - 1):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert ask(port, body=b"small") == (503, b'{"error": "the bodies of other requests use all memory"}')
        assert ask(port, "/healthz") == (200, b"ok")
        for link in held:
            link.sendall(b"x")
            assert link.recv(1000).startswith(b"HTTP/1.1 200 ")
        while port.held_bytes and time.monotonic() < until:
            for link in held:
                link.close()
            time.sleep(0.01)
        assert port.held_bytes == 0
        assert ask(port, body=b"small") == (200, b"small")


def gzipped(port: HttpPort, body: bytes) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port.port, timeout=WAIT_S)) as connection:
        connection.request("POST", "/", body, {"Content-Encoding": "gzip"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_gzip_counts_as_what_it_unpacks_to() -> None:
    with listening() as port:
        assert gzipped(port, gzip.compress(b"x" * (1 << 20))) == (200, b"x" * (1 << 20))
        status, why = gzipped(port, gzip.compress(b"x" * (1 << 30)))
        assert (status, why) == (413, b'{"error": "the body is longer than 1048576 bytes"}')
        until = time.monotonic() + WAIT_S
        while port.held_bytes and time.monotonic() < until:
            time.sleep(0.01)
        assert port.held_bytes == 0


@pytest.mark.parametrize(("clients", "chunks"), [(4, 50_000), (30, 2_000)])
def test_a_body_of_chunks_of_one_byte_keeps_nobody_waiting(clients: int, chunks: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"1\r\nx\r\n" * chunks + b"0\r\n\r\n"
    answers: list[bytes] = []

    def send(link: socket.socket) -> None:
        link.sendall(body)
        answers.append(link.recv(1000))

    with listening() as port, ExitStack() as stack:
        links = [stack.enter_context(connected(port, head)) for _ in range(clients)]
        senders = [threading.Thread(target=send, args=[link]) for link in links]
        for sender in senders:
            sender.start()
        meanwhile = 0
        while any(sender.is_alive() for sender in senders):
            assert ask(port, "/healthz") == (200, b"ok")
            meanwhile += 1
        assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * clients
        assert meanwhile > 12  # over 100; 1 to 12 if workers wait for whole bodies or the interpreter's lock


def test_a_target_that_is_no_url_is_refused() -> None:
    with listening() as port:
        said = heard(connected(port, b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"not a URL" in said


def test_there_is_always_room_for_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "_MOST_CONNECTIONS", 8)
    with listening() as port, ExitStack() as stack:
        links = [stack.enter_context(connected(port, HALVES[n % 2])) for n in range(30)]
        assert ask(port) == (200, b"ok")
        assert heard(links[0]) == b"", "the first one had to go"


def test_an_answer_that_is_not_taken_is_let_go() -> None:
    long = [b"x" * (1 << 20)] * 64
    with listening(lambda _: HttpResponse("200 OK", [], long), request_seconds=1.0) as port:
        with connected(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            until = time.monotonic() + WAIT_S
            for is_over in (lambda: port.held_bytes, lambda: not port.held_bytes):
                while not is_over():
                    assert time.monotonic() < until
                    time.sleep(0.01)
            assert ask(port, "/healthz")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", port.port, timeout=WAIT_S)
        connection.request("GET", "/")
        assert len(connection.getresponse().read()) == 64 << 20, "a client that takes it gets all of it"
        connection.close()


def test_a_client_that_asks_whether_to_send_its_body() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n"
    with listening() as port:
        with connected(port, head % 2) as link:
            assert link.recv(1000).startswith(b"HTTP/1.1 100 ")
            link.sendall(b"{}")
            assert link.recv(1000).startswith(b"HTTP/1.1 200 ")
        with connected(port, head % (2 << 20)) as link:
            assert heard(link).startswith(b"HTTP/1.1 413 ")


def test_heads_have_no_body() -> None:
    with (
        listening() as port,
        connected(port, b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as link,
    ):
        head, _, body = heard(link).partition(b"\r\n\r\n")
        assert (b"Content-Length: 2" in head, body) == (True, b"")


def test_a_fault_of_ours_is_an_answer() -> None:
    with listening(lambda request: 1 // 0) as port:  # type: ignore[arg-type, return-value]
        assert ask(port)[0] == 500


def test_it_ends_with_what_is_under_way() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(request: HttpRequest) -> HttpResponse:
        begun.set()
        go_on.wait(WAIT_S)
        return echo(request)

    with (
        listening(work) as port,
        connected(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as link,
        connected(port),
    ):
        assert begun.wait(WAIT_S)
        stopping = threading.Thread(target=port.stop, args=(WAIT_S,))
        stopping.start()
        until = time.monotonic() + WAIT_S
        while not port.is_ending:
            assert time.monotonic() < until
        go_on.set()
        said = heard(link)
        assert said.startswith(b"HTTP/1.1 200 ") and b"Connection: close" in said
        stopping.join(WAIT_S)
        assert not stopping.is_alive()
        with pytest.raises(OSError):
            connected(port)


def test_files_of_tls_that_cannot_be_used_leave_the_port_free(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    missing = HttpTls(tmp_path / "cert.pem", tmp_path / "key.pem")
    options = {"threads": 1, "max_body_bytes": 1, "request_seconds": 1.0, "is_quick": bool}
    with pytest.raises(OSError) as caught:
        HttpPort(echo, "127.0.0.1", port, option="--port", tls=missing, **options)
    socket.create_server(("127.0.0.1", port)).close()
    del caught
