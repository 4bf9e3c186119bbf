"""An HTTP or HTTPS port in this process, which calls a function for each request until `stop`.

The agent's port and the model server's REST interface use it. One thread runs an event loop that reads from
all clients, and h11 parses. A worker thread gets a request only when it is complete, so a slow client
occupies a buffer and does not delay other clients.

Each of seven server libraries that were measured loses a promise of this port: docs/architecture.md has the
table.

With `client_ca`, TLS requests a client certificate but does not require one, because an orchestrator's probes
present none; the application decides by `HttpRequest.is_certified`. The handshake fails for a certificate of
another authority.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import re
import resource
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
from msgspec import Struct

from exporter.errors import ServerError, UsageError
from exporter.newer_python import timeout
from exporter.storage.local_paths import local_path
from serving.credentials import require_key_pair
from serving.http_names import OwnNames, listed_names

_log = logging.getLogger(__name__)
_IDLE_S = 60.0
"""An open connection without a request is closed after this time."""
_LINGER_S = 2.0
_MOST_CONNECTIONS = 1000
_QUICK_THREADS = 2  # for what `is_quick` names, while all other threads are busy
_LARGEST_HEAD_BYTES = 64 << 10
# What one read takes: sent as chunks of one byte, h11 makes 43,000 events of it (2.5 s, see `_TURN_S`).
_STEP_BYTES = 256 << 10
_TURN_S = 0.002  # h11 takes 60 us for each chunk of a body, however short: others get a turn in between
_PAUSE_S = 0.0001  # `select` frees the interpreter's lock too briefly: waiting workers would starve
_SLOWEST_BYTES_PER_S = 256 << 10
"""A body that moves at this rate or faster is not cut off, however long it is."""


class HttpTls(Struct, frozen=True):
    """Files of a port's certificate and key, and of the authority that signs clients' certificates.

    With `client_ca` clients are asked for a certificate, and may connect without one; see `HttpRequest`.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, certificate: str | None, key: str | None, client_ca: str | None) -> HttpTls | None:
        """Return the files that `--tls-cert`, `--tls-key` and `--client-ca` name; None if none is given.

        The files are read once, to report errors early. UsageError if a name is missing, a file cannot be
        read, or the certificate, its key and the authority cannot be used.
        """
        if certificate is None and key is None and client_ca is None:
            return None
        if certificate is None or key is None:
            raise UsageError(
                "--tls-cert and --tls-key go together, and --client-ca needs them",
                hint="name the certificate and its key, both in PEM",
            )
        ca = None if client_ca is None else local_path("--client-ca", client_ca)
        found = cls(local_path("--tls-cert", certificate), local_path("--tls-key", key), ca)
        try:
            require_key_pair(found.certificate, found.key)
            found.context()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise UsageError(
                "the agent's certificate, its key or the authority of its clients cannot be used",
                cause=str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error),
                hint="name PEM files that this user can read, and the key of the certificate",
            ) from None
        return found

    def context(self) -> ssl.SSLContext:
        """Return a context for the server's side of connections, with the present content of the files.

        It speaks TLS 1.2 and later. With `client_ca`, a client certificate is requested, but not required;
        one of another authority fails the handshake. OSError (SSLError included) if a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


class HttpRequest(Struct):
    """A complete request."""

    method: str
    target: str
    """Path and query as the client sent them; the application decodes names after it has split the path."""
    headers: dict[str, str]
    """Values by lower-case name; of a repeated header, the last."""
    body: bytes | bytearray = b""
    """As unpacked, if it came as gzip."""
    is_certified: bool = False
    """The client presented a certificate that the authority of `HttpTls` signed."""

    @property
    def path(self) -> str:
        """Return the target without its query."""
        return self.target.partition("?")[0]


class HttpResponse(Struct):
    """A response; the port adds its length and the date."""

    status: str
    """Code and phrase, as `200 OK`."""
    headers: Sequence[tuple[str, str]]
    body: Sequence[bytes] = ()
    """In parts, so that a long body is not in memory twice."""


Application = Callable[[HttpRequest], HttpResponse]


class HttpPort:
    """A listening port. Connections are kept alive; each of `threads` handles one request at a time."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        *,
        option: str,
        threads: int,
        max_body_bytes: int,
        request_seconds: float,
        is_quick: Callable[[HttpRequest], bool],
        tls: HttpTls | None = None,
        allow_host: str | None = None,
    ) -> None:
        """Listen, and begin to answer requests, in threads of its own.

        Args: application: called in a worker thread for each request; if it raises, the response has status
        500. host: the address to listen on. port:
        the TCP port; 0 takes a free one, and `self.port` holds its number. option: the command line's option
        for the port, for the hint of an error. threads: how many requests are handled at the same time.
        max_body_bytes: longer requests are refused with 413. While the bodies and responses of all clients
        hold twice as much, further bodies are refused with 503. request_seconds: a client that takes longer
        to send a request, or to receive its response, is disconnected; long bodies get more time. is_quick:
        True for requests that two reserved threads handle, even when all others are busy. tls: files for TLS;
        without them the port speaks plain HTTP, and requests for names that are not its own are refused.
        (With TLS, a browser has compared the name with the certificate.) allow_host: further names of the
        port: see `OwnNames`.

        Raises:
            OSError: the files of `tls` cannot be used (SSLError included).
            ServerError: the port cannot listen on the address.
            UsageError: `allow_host` is not a list of names.
        """
        names = (host, *listed_names(allow_host))
        self._tls = None if tls is None else tls.context()  # before the port is taken
        self._listening = _listen(host, port, option)
        address = str(self._listening.getsockname()[0])
        self.names = None if tls is not None else OwnNames.of(names, address)
        self.port = int(self._listening.getsockname()[1])
        self.max_body_bytes, self.request_seconds = max_body_bytes, request_seconds
        self.held_bytes = 0
        self.is_ending = False
        self.long_bodies = asyncio.Lock()
        """Of bodies in several parts, one goes on at a time: others wait for one turn, not for all."""
        self._is_quick = is_quick
        self._workers, self._quick = _Workers(application, threads), _Workers(application, _QUICK_THREADS)
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._most_connections = _most_connections()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Refuse new requests, and wait until those in progress have ended, for `grace_seconds` at most.

        Then they are cut off, which takes up to another second. May be called repeatedly.
        """
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._begin_to_end, grace_seconds)
        self._thread.join(grace_seconds + 1.0)

    async def work(self, request: HttpRequest) -> HttpResponse:
        """Return the application's response, computed in a worker thread; status 500 if it raises.

        Quick requests have reserved threads.
        """
        return await (self._quick if self._is_quick(request) else self._workers).work(request)

    def _run(self) -> None:
        self._accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._listening)
            except OSError:  # no free file descriptor, or the client has already disconnected
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self._most_connections:
                self._drop_one()
            connection = _Connection(self)
            task = self._loop.create_task(connection.serve(accepted, self._tls))
            self._connections[connection] = task
            task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: _Connection, _: object) -> None:
        del self._connections[connection]

    def _drop_one(self) -> None:
        """Close the oldest connection that has not sent a complete request, if there is one."""
        # A dict keeps the order of insertion: the oldest is first. A cancelled task is in it until it ends.
        for connection, task in self._connections.items():
            if not connection.is_busy and not connection.is_dropped:
                connection.is_dropped = True
                task.cancel()
                return

    def _begin_to_end(self, grace_seconds: float) -> None:
        if not self.is_ending:
            self.is_ending = True
            # Kept, as `_accepting` is: a loop refers to its tasks weakly, and drops one that nobody keeps.
            self._ending = self._loop.create_task(self._end(grace_seconds))

    async def _end(self, grace_seconds: float) -> None:
        self._accepting.cancel()
        # The selector must forget the socket before its descriptor is closed: the number may be used again.
        await asyncio.wait([self._accepting])
        self._listening.close()
        for connection, task in self._connections.items():
            if not connection.is_busy:
                task.cancel()
        # Twice: what is cancelled after the grace has half a second to close, before `stop` gives up at 1 s.
        for seconds in (grace_seconds, 0.5):
            if self._connections:
                await asyncio.wait([*self._connections.values()], timeout=seconds)
            for task in self._connections.values():
                task.cancel()
        self._workers.end()
        self._quick.end()
        self._loop.stop()


class _Workers:
    """Worker threads. They are daemons, so that a request that never ends does not keep the process alive."""

    def __init__(self, application: Application, threads: int) -> None:
        self._application, self._threads = application, threads
        self._queue: queue.SimpleQueue[tuple[HttpRequest, asyncio.Future[HttpResponse]] | None] = (
            queue.SimpleQueue()
        )
        for number in range(threads):
            threading.Thread(target=self._run, name=f"http {number}", daemon=True).start()

    async def work(self, request: HttpRequest) -> HttpResponse:
        """Return the application's response, computed in one of the threads; status 500 if it fails."""
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._queue.put((request, answer))
        return await answer

    def end(self) -> None:
        """Let the threads end after the requests that are queued or in progress; does not wait."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            request, answer = item
            if not answer.cancelled():
                with suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
                    answer.get_loop().call_soon_threadsafe(_settle, answer, self._answer(request))
            del item, request, answer  # else this frame keeps the body until the next request

    def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return self._application(request)
        except Exception:  # noqa: BLE001 - the edge of the server: the thread has to go on
            _log.exception("a request failed")
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed")


def _settle(answer: asyncio.Future[HttpResponse], done: HttpResponse) -> None:
    if not answer.done():
        answer.set_result(done)


class _Refused(Exception):
    """A request that is not read to its end; the connection is closed after the response."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Connection:
    """One client, from its first byte to its last."""

    def __init__(self, port: HttpPort) -> None:
        self._port = port
        self._held_bytes = 0
        self._received = b""
        self._is_refused = False
        self.is_busy = False
        """A complete request is being handled."""
        self.is_dropped = False
        """It was cancelled to make room for another connection."""

    async def serve(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Handle the requests of the connection `accepted`, one after another, and close it.

        `tls` is None for plain HTTP. Errors of the client or of TLS end the connection; none is raised.
        """
        transport: asyncio.Transport | None = None
        try:
            transport = await self._open(accepted, tls)
            while await self._has_begun() and await self._answer_one():
                pass
            transport.close()
        except (OSError, TimeoutError):
            pass  # a client disconnected, or TLS failed: not an error of this server
        except Exception:  # noqa: BLE001 - the edge of the server: there are other clients
            _log.exception("a connection ended")
        finally:
            # Whatever ended the connection, its bytes stop counting against the bodies of others.
            self._hold(-self._held_bytes)
            if transport is None:
                accepted.close()
            elif not transport.is_closing():
                transport.abort()

    async def _open(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> asyncio.Transport:
        # asyncio sets it only if the socket's `proto` is IPPROTO_TCP; `create_server` leaves that 0.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # At twice the limit the transport stops reading: what a client sends on waits in the kernel.
        self._reader = asyncio.StreamReader(limit=_STEP_BYTES)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            accepted,
            ssl=tls,
            # Without `ssl` asyncio takes none.
            ssl_handshake_timeout=None if tls is None else self._port.request_seconds,
        )
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(0)  # `drain` then waits until the kernel has all bytes
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        self._is_certified = bool(transport.get_extra_info("peercert"))  # empty unless it was verified
        return transport

    async def _has_begun(self) -> bool:
        """Wait for a request, skipping empty lines; return False if the client closes the connection.

        TimeoutError after 60 s, OSError if the connection breaks.
        """
        async with timeout(_IDLE_S):
            while not self._received:
                data = await self._reader.read(_STEP_BYTES)
                if not data:
                    return False
                self._received = data.lstrip(b"\r\n")
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_LARGEST_HEAD_BYTES)
        self._http.receive_data(self._received)
        return True

    async def _answer_one(self) -> bool:
        """Read one request, and send the response or refusal; return False if the connection ends with it.

        TimeoutError if the client does not receive the response in time, OSError if the connection breaks.
        """
        self._has_body = True
        try:
            async with timeout(self._port.request_seconds) as deadline:
                request = await self._request(deadline)
        except (_Refused, h11.RemoteProtocolError, TimeoutError) as error:
            self._is_refused = True
            await self._in_time(self._refusal(error))
            await self._linger()
            return False
        self.is_busy = True
        response = await self._port.work(request)
        del request  # frees the body before the client has received the response
        self._hold(-self._held_bytes)
        await self._in_time(response)
        self.is_busy = False
        self._received = self._http.trailing_data[0].lstrip(b"\r\n")  # the next request may have arrived, too
        return self._http.our_state is h11.DONE and not self._port.is_ending

    async def _head(self) -> Any:
        seen = bytearray(self._received)
        while (head := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(_STEP_BYTES)
            seen += data
            self._http.receive_data(data)
        _require_plain(head, seen)
        return head

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_STEP_BYTES))
        return event

    async def _request(self, deadline: Any) -> HttpRequest:
        head = await self._head()
        request = HttpRequest(
            head.method.decode("ascii"),
            _path_and_query(head.target.decode("ascii")),
            {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
            body := bytearray(),
            self._is_certified,
        )
        self._has_body = request.method != "HEAD"
        self._require_name(request.headers.get("host"))
        self._require_length(int(request.headers.get("content-length", 0)))
        # After the checks of name and length: a client that waits does not send a body that is refused.
        if self._http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, reason="Continue", headers=[])
            self._writer.write(self._http.send(go_on) or b"")
        first, received, clock = deadline.when() or 0.0, 0, asyncio.get_running_loop().time
        turn_end = 0.0
        packing = _Gzip() if "gzip" in request.headers.get("content-encoding", "") else None
        while isinstance(event := await self._event(), h11.Data):
            received += len(event.data)
            for part in (event.data,) if packing is None else packing.unpack(event.data):
                if body and clock() > turn_end:
                    async with self._port.long_bodies:
                        time.sleep(_PAUSE_S)  # the loop stops too: workers get the interpreter's lock
                        await asyncio.sleep(0)
                    turn_end = clock() + _TURN_S
                self._require_length(len(body) + len(part))
                self._hold(len(part))
                body += part
            deadline.reschedule(first + received / _SLOWEST_BYTES_PER_S)
        if packing is not None:
            packing.require_end()
        return request

    def _require_name(self, host: str | None) -> None:
        names = self._port.names
        if host is not None and names is not None and not names.has(host):  # HTTP/1.0 need not name a host
            why = f"the host {host!r:.99} is not a name of this port: --allow-host NAME allows another one"
            raise _Refused(HTTPStatus.FORBIDDEN, why)

    def _require_length(self, length: int) -> None:
        if length > (most := self._port.max_body_bytes):
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {most} bytes")
        if length and self._port.held_bytes - self._held_bytes + length > 2 * most:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the bodies of other requests use all memory")

    def _hold(self, bytes_: int) -> None:
        self._held_bytes += bytes_
        self._port.held_bytes += bytes_

    async def _in_time(self, response: HttpResponse) -> None:
        """Send a response; TimeoutError if the client does not receive it in time, OSError if it disconnects.

        The time is `request_seconds` of the port, and more for a long body at 256 KiB/s or faster.
        """
        self._hold(length := sum(map(len, response.body)))
        async with timeout(self._port.request_seconds) as deadline:
            first, sent = deadline.when() or 0.0, 0
            for part in self._parts(response, length):
                self._writer.write(part)
                await self._writer.drain()
                sent += len(part)
                deadline.reschedule(first + sent / _SLOWEST_BYTES_PER_S)
        self._hold(-length)

    def _parts(self, response: HttpResponse, length: int) -> Iterator[bytes]:
        """Yield the bytes of a response in parts of at most about 512 KiB; a small one is one part.

        `length` is the body's, in bytes.
        """
        code, _, reason = response.status.partition(" ")
        headers = [*response.headers, ("Content-Length", str(length)), ("Date", formatdate(usegmt=True))]
        if self._port.is_ending or self._is_refused or self._http.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        head = h11.Response(status_code=int(code), reason=reason, headers=headers)
        begun = self._http.send(head) or b""
        for part in response.body if self._has_body else ():
            self._http.send(h11.Data(data=part))  # h11 counts the bytes against Content-Length
            for start in range(0, len(part), _STEP_BYTES):
                begun += part[start : start + _STEP_BYTES]
                if len(begun) >= _STEP_BYTES:
                    yield begun
                    begun = b""
        self._http.send(h11.EndOfMessage())
        yield begun

    def _refusal(self, error: Exception) -> HttpResponse:
        if isinstance(error, _Refused):
            return _error(error.status, str(error))
        if isinstance(error, h11.RemoteProtocolError):
            is_long = error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return _error(HTTPStatus(431 if is_long else 400), str(error))
        return _error(HTTPStatus.REQUEST_TIMEOUT, f"no complete request in {self._port.request_seconds:g} s")

    async def _linger(self) -> None:
        """Close the sending side, and discard further bytes until the client closes its own, for at most 2 s.

        Closing a socket with unread bytes sends RST, and the client would lose the response. OSError if the
        connection breaks.
        """
        with suppress(TimeoutError):
            async with timeout(_LINGER_S):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                while await self._reader.read(_STEP_BYTES):
                    pass


class _Gzip:
    """A decompressor of a body as it arrives, so that limits count its bytes in memory."""

    def __init__(self) -> None:
        self._unzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def unpack(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Yield the unpacked content of the next bytes, in parts of at most `_STEP_BYTES`.

        Iterating raises _Refused if they are not gzip. Bytes after the end of the gzip data are ignored.
        """
        while data and not self._unzip.eof:
            try:
                yield self._unzip.decompress(data, _STEP_BYTES)
            except zlib.error as error:
                why = f"Content-Encoding is gzip, but the body is not: {error}"
                raise _Refused(HTTPStatus.BAD_REQUEST, why) from None
            data = self._unzip.unconsumed_tail

    def require_end(self) -> None:
        """Raise _Refused if the gzip data have not ended."""
        if not self._unzip.eof:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the gzip body is truncated")


def _require_plain(head: Any, seen: bytearray) -> None:
    """Raise _Refused for a request's head that is too long, or that a proxy could read in another way.

    It has more than 64 KiB, another HTTP version than 1.x, a header continued in the next line, or
    Transfer-Encoding with Content-Length or in HTTP/1.0. `head` is h11's event, `seen` all bytes read for it.
    A client could otherwise smuggle a second request into the connection of another client behind the proxy
    (RFC 9112, sections 5.2, 6.3 and 11.2). h11 accepts all of this, as the RFC allows.
    """
    raw, names = re.split(rb"\n\r?\n", seen, maxsplit=1)[0], {name for name, _ in head.headers}
    if len(raw) > _LARGEST_HEAD_BYTES:
        raise _Refused(HTTPStatus(431), f"the head is longer than {_LARGEST_HEAD_BYTES} bytes")
    if not head.http_version.startswith(b"1."):
        raise _Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this port speaks HTTP/1.1")
    if re.search(rb"\n[ \t]", raw):
        raise _Refused(HTTPStatus.BAD_REQUEST, "a header goes on in the next line")
    if b"transfer-encoding" in names and (b"content-length" in names or head.http_version < b"1.1"):
        why = "Transfer-Encoding together with Content-Length, or in HTTP/1.0"
        raise _Refused(HTTPStatus.BAD_REQUEST, why)


def _path_and_query(target: str) -> str:
    if target.startswith("/"):
        return target
    try:
        parts = urlsplit(target)  # a proxy's absolute form
    except ValueError as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the request's target is not a URL: {error}") from None
    return parts.path + (f"?{parts.query}" if parts.query else "")


def _error(status: HTTPStatus, why: str) -> HttpResponse:
    body = json.dumps({"error": why}).encode()
    return HttpResponse(f"{int(status)} {status.phrase}", [("Content-Type", "application/json")], [body])


def _most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each holds a descriptor. The other half is for the rest of the process: models' files, calls to servers.
    return _MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, files // 2)


def _listen(host: str, port: int, option: str) -> socket.socket:
    problem: OSError | None = None
    try:
        for family, *_, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
            try:
                # `[:2]`: an address of IPv6 has four items, and `create_server` takes host and port alone.
                listening = socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
            except OSError as error:
                problem = error
                continue
            listening.setblocking(False)
            return listening
    except OSError as error:  # the host name does not resolve
        problem = error
    raise ServerError(
        f"cannot listen on {host}:{port}",
        cause=str(problem),
        hint=f"choose another {option}, or {option} 0 for a free port",
    ) from problem
