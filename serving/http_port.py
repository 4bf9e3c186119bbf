"""One HTTP port in this process: a WSGI application behind cheroot, from construction until `stop`.

The agent's own port and the model server's REST interface are such ports.
"""

from __future__ import annotations

import logging
import ssl
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from exporter.errors import ServerError
from serving.http_tls import HttpTls, bound, secure

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 60
_MOST_IDLE_CONNECTIONS = 256
_LARGEST_HEADER_BYTES = 64 << 10


class HttpPort:
    """Answers until it is stopped. Connections are kept alive; each of `threads` works on one request."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        *,
        option: str,
        threads: int,
        max_body_bytes: int = 0,
        tls: HttpTls | None = None,
        request_seconds: float | None = None,
    ) -> None:
        """Listen.

        Args:
            application: the WSGI application.
            host: the address to listen on.
            port: the TCP port; 0 takes a free one, `self.port` says which.
            option: the option that chose the port, for the hint of an error.
            threads: how many requests are worked on at a time.
            max_body_bytes: longer requests are refused unread with 413; 0 is any length.
            tls: files for TLS; without them it speaks plain HTTP.
            request_seconds: a request that takes longer, as it is sent too, is cut off; None is any time.

        Raises:
            ServerError: the address cannot be listened on.
        """
        self._server = _quiet_server(
            (host, port), application, numthreads=threads, request_queue_size=128, timeout=_IDLE_SECONDS
        )
        self._server.max_request_body_size = max_body_bytes
        self._server.max_request_header_size = _LARGEST_HEADER_BYTES
        self._server.keep_alive_conn_limit = _MOST_IDLE_CONNECTIONS
        if tls is not None:
            secure(self._server, tls)
        if request_seconds is not None:
            bound(self._server, request_seconds)
        try:
            self._server.prepare()
        except OSError as error:
            raise ServerError(
                f"cannot listen on {host}:{port}",
                cause=str(error),
                hint=f"choose another {option}, or {option} 0 for a free one",
            ) from error
        self.port = int(self._server.bind_addr[1])
        self._thread = threading.Thread(target=self._server.serve, name="http", daemon=True)
        self._thread.start()

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no more requests, and give those under way so much time; harmless if repeated."""
        self._server.shutdown_timeout = grace_seconds
        # cheroot joins its threads without a limit when the time is over, so a request that never ends would.
        stopping = threading.Thread(target=self._server.stop, name="stop http", daemon=True)
        stopping.start()
        stopping.join(grace_seconds + 1.0)
        self._thread.join(1.0)


def _quiet_server(*arguments: Any, **options: Any) -> Any:
    """A server that logs what cheroot prints: clients that went away are none of the operator's business."""
    from cheroot import server, wsgi

    from serving.http_framing import Request

    class Connection(server.HTTPConnection):
        RequestHandlerClass = Request

    class Server(wsgi.Server):
        ConnectionClass = Connection

        def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
            if isinstance(sys.exception(), ssl.SSLError):  # somebody without a certificate, or a scanner
                level, traceback = logging.DEBUG, False
            _log.log(level, msg, exc_info=traceback)

    return Server(*arguments, **options)
