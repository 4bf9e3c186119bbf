"""Proxies before an object store: one that passes everything on and counts, one that ignores conditions."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

_OWN = {"transfer-encoding", "content-length", "connection"}
_REFUSED = (409, 412)


@dataclass(frozen=True)
class Answer:
    """What a store said to a request."""

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Forwarding(BaseHTTPRequestHandler):
    """Asks the store at `target` in the place of who asks us."""

    target: ClassVar[str]
    protocol_version = "HTTP/1.1"

    def take(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.forward()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = take

    def forward(self) -> None:
        """What is done with a request."""
        self.answer(self.ask())

    def ask(self, leaving_out: str = "") -> Answer:
        """The store's answer to the request as it came, or without one of its headers."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != leaving_out}
        with closing(HTTPConnection(urlsplit(self.target).netloc, timeout=30)) as store:
            store.request(self.command, self.path, self.body, headers)
            found = store.getresponse()
            return Answer(found.status, found.read(), dict(found.headers))

    def answer(self, answer: Answer, sent: int | None = None) -> None:
        """Pass an answer on, or its first bytes and nothing else."""
        length = str(len(answer.content))
        if self.command == "HEAD":
            length = next((v for k, v in answer.headers.items() if k.lower() == "content-length"), length)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content[:sent])
        self.close_connection = self.close_connection or sent is not None

    def log_message(self, *rest: Any) -> None:
        pass


class ThreadedServer(ThreadingHTTPServer):
    """A server of threads that takes many connections at once."""

    request_queue_size = (
        128  # beyond the default's 5 the kernel drops connections; they are tried again after 1 s
    )
    daemon_threads = True


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server of threads."""
    handler.disable_nagle_algorithm = True  # else a body waits 40 ms for the ACK of its head
    server = ThreadedServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Traffic:
    """The requests so far: (method, path, bytes of the answer)."""

    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def of(self, is_wanted: Callable[[str], bool], method: str = "GET") -> tuple[int, int]:
        """How many requests there were for such paths, and the bytes that came."""
        found = [size for asked, path, size in self.requests if asked == method and is_wanted(path)]
        return len(found), sum(found)


@contextmanager
def counting(address: str, wait: float = 0.0) -> Iterator[tuple[str, Traffic]]:
    """The address of a proxy before a store, and what passes it; each request waits so many seconds."""
    traffic = Traffic()

    class Counting(Forwarding):
        target = address

        def forward(self) -> None:
            time.sleep(wait)
            answer = self.ask()
            traffic.requests.append((self.command, self.path, len(answer.content)))
            self.answer(answer)

    with serving(Counting) as here:
        yield here, traffic


@contextmanager
def careless(address: str) -> Iterator[str]:
    """A store that ignores conditions: a real one behind a proxy that tells refusals as if it were done.

    A condition may be part of what is signed, so it cannot be taken out of a request.
    """

    class Careless(Forwarding):
        target = address

        def forward(self) -> None:
            answer = self.ask()
            if answer.status in _REFUSED:
                answer = replace(answer, status=201, headers={**answer.headers, "ETag": '"as-if"'})
                answer = replace(answer, headers={**answer.headers, "Last-Modified": self.date_time_string()})
            self.answer(answer)

    with serving(Careless) as here:
        yield here
