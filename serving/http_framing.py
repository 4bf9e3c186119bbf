"""Where an HTTP request ends: what leaves that open is refused, and its connection closed.

A request whose end two readers see in two places lets one client put words into the mouth of the next one
behind a proxy (RFC 9112, sections 6.3 and 11.2). cheroot takes the last of two `Content-Length`s, reads on
for ever at a negative one, and goes on with what is left of a chunked body that it could not read.
"""

from __future__ import annotations

import re
from typing import Any

from cheroot.errors import MaxSizeExceeded
from cheroot.server import HTTPRequest, KnownLengthRFile

_LENGTH, _ENCODING = b"Content-Length", b"Transfer-Encoding"
_DIGITS = re.compile(rb"[0-9]+")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r\n", re.S)
_LONGEST_LINE = 4096
_MOST_TRAILERS = 64


class Fields(dict[bytes, bytes]):
    """Headers of a request. Those that say where it ends come once."""

    def __setitem__(self, name: bytes, value: bytes) -> None:
        """Set a header, as they are read.

        Raises:
            ValueError: it says again where the request ends.
        """
        if name in (_LENGTH, _ENCODING) and name in self:
            raise ValueError(f"{name.decode()} is given twice.")
        super().__setitem__(name, value)


class ChunkedBody:
    """A body in chunks, read as a whole, with extensions and trailers left out."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        self.is_over = False

    def read(self, _size: int = -1) -> bytes:
        """All of it; nothing when it is over.

        Raises:
            ValueError: it is no chunked body, or ends too early.
            MaxSizeExceeded: it is longer than allowed.
        """
        parts, length = [], 0
        while not self.is_over:
            if found := self._chunk_length():
                length += found
                if 0 < self._max_bytes < length:
                    raise MaxSizeExceeded
                parts.append(self._chunk(found))
            else:
                self._skip_trailers()
                self.is_over = True
        return b"".join(parts)

    def _chunk_length(self) -> int:
        line = self._stream.readline(_LONGEST_LINE)
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise ValueError(f"expected the length of a chunk, found {line[:40]!r}")
        return int(match[1], 16)

    def _chunk(self, length: int) -> bytes:
        data = bytes(self._stream.read(length))
        if len(data) < length or self._stream.read(2) != b"\r\n":
            raise ValueError(f"expected a chunk of {length} bytes and the end of its line")
        return data

    def _skip_trailers(self) -> None:
        for _ in range(_MOST_TRAILERS):
            line = self._stream.readline(_LONGEST_LINE)
            if line == b"\r\n":
                return
            if not line.endswith(b"\r\n"):
                break
        raise ValueError("expected an empty line after the last chunk")


class Request(HTTPRequest):
    """A request with one end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.inheaders = Fields()

    def read_request_headers(self) -> bool:
        """Read the headers; False after an answer that refuses them."""
        if not super().read_request_headers():  # type: ignore[no-untyped-call]  # cheroot has no types here
            return False
        length, encoding = self.inheaders.get(_LENGTH), self.inheaders.get(_ENCODING)
        if length is not None and not _DIGITS.fullmatch(length):
            return self._refused("Malformed Content-Length Header.")
        if encoding is not None and (length is not None or not self.chunked_read):
            return self._refused("Transfer-Encoding with Content-Length, or where it has no meaning.")
        return True

    def respond(self) -> None:
        """Have the application answer."""
        limit = self.server.max_request_body_size
        length = int(self.inheaders.get(_LENGTH, 0))
        stream = self.conn.rfile
        self.rfile: Any = (
            ChunkedBody(stream, limit) if self.chunked_read else KnownLengthRFile(stream, length)
        )
        self.server.gateway(self).respond()
        if self.ready:
            self.ensure_headers_sent()
        if self.chunked_write:
            self.conn.wfile.write(b"0\r\n\r\n")

    def send_headers(self) -> None:
        """Begin the answer; the connection ends with it if a part of a chunked request is left."""
        if self.chunked_read and not self.rfile.is_over:
            self.close_connection = True
        super().send_headers()

    def _refused(self, why: str) -> bool:
        self.close_connection = True
        self.simple_response("400 Bad Request", why)
        return False
