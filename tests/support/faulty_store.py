"""A proxy before an object store, which answers as stores do on bad days."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from enum import Enum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

SLOW_SECONDS = 3.0


class Fault(Enum):
    """What happens to a request."""

    STATUS_500 = "500"
    STATUS_503 = "503"
    STATUS_429 = "429"
    STATUS_403 = "403"
    DONE_AND_500 = "it is done, and the answer is 500"
    DONE_AND_CLOSED = "it is done, and the connection closed"
    CLOSED = "the connection is closed"
    SLOW = "the answer comes too late"
    HALF = "half of the body comes, then the connection is closed"
    SHORTER = "half of the body comes, as if it were all"
    LONGER = "more comes than was asked for"
    WHOLE = "the whole object comes where a range was asked for"
    REDIRECT = "another place is named"


class Weather:
    """Which requests have a fault: all, or the first `times` of each method and path."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.times = 0
        self.only = ""
        """If not empty, requests of other methods are as they should be."""
        self.seen: Counter[tuple[str, str]] = Counter()
        self.followed: list[Mapping[str, str]] = []
        """The headers of who went where a redirect led."""

    def be(self, fault: Fault | None, times: int = 1 << 30) -> None:
        """From now on it is like this."""
        self.fault, self.times = fault, times
        self.seen.clear()

    def fault_of(self, method: str, path: str) -> Fault | None:
        if self.only not in ("", method):
            return None
        self.seen[method, path] += 1
        return self.fault if self.seen[method, path] <= self.times else None


@contextmanager
def faulty(address: str, weather: Weather | None = None) -> Iterator[tuple[str, Weather]]:
    """The address of a proxy before a store, and its weather, which is good at first."""
    weather = weather or Weather()

    class Elsewhere(BaseHTTPRequestHandler):
        def take(self) -> None:
            weather.followed.append(dict(self.headers))
            self.send_error(404)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = take

        def log_message(self, *rest: Any) -> None:
            pass

    with _server(Elsewhere) as elsewhere, _server(_proxy(address, weather, elsewhere)) as port:
        yield f"http://127.0.0.1:{port}", weather


@contextmanager
def _server(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _proxy(address: str, weather: Weather, elsewhere: int) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = weather.fault_of(self.command, self.path)
            match fault:
                case Fault.STATUS_500 | Fault.STATUS_503 | Fault.STATUS_429 | Fault.STATUS_403:
                    return self.answer(int(fault.value), b"<Error><Code>Bad</Code></Error>")
                case Fault.CLOSED:
                    return self.hang_up()
                case Fault.REDIRECT:
                    place = f"http://localhost:{elsewhere}{self.path}"
                    return self.answer(307, b"", {"Location": place})
                case Fault.SLOW:
                    time.sleep(SLOW_SECONDS)
            headers = dict(self.headers)
            if fault is Fault.WHOLE:
                headers = {name: value for name, value in headers.items() if name.lower() != "range"}
            with closing(HTTPConnection(urlsplit(address).netloc, timeout=30)) as store:
                store.request(self.command, self.path, body, headers)
                found = store.getresponse()
                content = found.read()
            if fault is Fault.DONE_AND_500:
                return self.answer(500, b"")
            if fault is Fault.DONE_AND_CLOSED:
                return self.hang_up()
            told = {name: value for name, value in found.headers.items() if name.lower() not in _OWN}
            length = found.headers.get("Content-Length") if self.command == "HEAD" else None
            if self.command == "GET" and fault is Fault.SHORTER:
                content = content[: len(content) // 2]
            if self.command == "GET" and fault is Fault.LONGER:
                content += b"more"
            half = fault is Fault.HALF and self.command == "GET"
            return self.answer(found.status, content, told, length, half=half)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

        def answer(
            self,
            status: int,
            content: bytes,
            headers: Mapping[str, str] | None = None,
            length: str | None = None,
            *,
            half: bool = False,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = self.close_connection or half

        def hang_up(self) -> None:
            self.close_connection = True

        def log_message(self, *rest: Any) -> None:
            pass

    return Proxy


_OWN = {"transfer-encoding", "content-length", "connection"}
