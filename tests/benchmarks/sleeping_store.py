"""`python -m tests.benchmarks.sleeping_store`: a store that gives each connection so many bytes a second.

It prints its address and serves one object of zeros until it is ended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.http_proxy import ThreadedServer

_BYTES_S = 20e6
"""What a connection gets."""
_OBJECT = memoryview(bytes(8 << 20))
_PIECE = 512 << 10  # what comes at a time: a network does not hold everything back until the end


class _Sleeping(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        size = last + 1 - first
        self.send_response_only(206)
        told = {
            "Content-Length": str(size),
            "Content-Range": f"bytes {first}-{last}/{len(_OBJECT)}",
            "ETag": '"tag"',
            "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT",
        }
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        began = time.perf_counter()
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            time.sleep(max(0.0, began + stop / _BYTES_S - time.perf_counter()))
            self.wfile.write(_OBJECT[start:stop])

    def log_message(self, *rest: Any) -> None:
        """Say nothing."""


@contextmanager
def sleeping_store() -> Iterator[str]:
    """Its address; a process of its own, as a store is, whose work does not hold up the client's threads."""
    command = [sys.executable, "-m", "tests.benchmarks.sleeping_store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


if __name__ == "__main__":
    server = ThreadedServer(("127.0.0.1", 0), _Sleeping)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
