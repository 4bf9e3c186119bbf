"""The agent's own port: /metrics, /healthz, /readyz, /livez, /status.json and the status page at /."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct, to_builtins

from serving.agent.metrics import Metrics
from serving.agent.view import FleetView
from serving.http_port import HttpPort, Request, Response
from serving.http_tls import HttpTls

_OPEN = frozenset({"/healthz", "/livez", "/readyz"})
"""What an orchestrator asks for without a token; nothing of the model is told there."""


_THREADS = 8
_LARGEST_BODY_BYTES = 64 << 10
"""Nobody looks at a body; what follows on the connection has to be skipped, though."""
_REQUEST_S = 10.0


class Site(Struct, frozen=True):
    """What the port answers. `token` is asked for as `Authorization: Bearer TOKEN`, except for probes; so is,
    with `wants_certificate`, one that the clients' authority has signed.
    """

    view: Callable[[], FleetView]
    metrics: Metrics
    page: Callable[[], str]
    fresh_within_s: float
    token: str | None = None
    wants_certificate: bool = False

    def __call__(self, request: Request) -> Response:
        """Answer one request."""
        path = request.path
        if request.method not in ("GET", "HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain", b"only GET\n"
        elif path not in _OPEN and self.wants_certificate and not request.is_certified:
            status, kind, body = "403 Forbidden", "text/plain", b"a client's certificate is needed\n"
        elif path not in _OPEN and not self._may(request.headers.get("authorization", "")):
            status, kind, body = "401 Unauthorized", "text/plain", b"a token is needed\n"
        else:
            status, kind, body = self._answer(path)
        headers = [
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
        ]
        if status.startswith("401"):
            headers.append(("WWW-Authenticate", "Bearer"))
        return Response(status, headers, [body])

    def _may(self, authorization: str) -> bool:
        if self.token is None:
            return True
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def _answer(self, path: str) -> tuple[str, str, bytes]:
        match path:
            case "/":
                return "200 OK", "text/html", self.page().encode()
            case "/metrics":
                return "200 OK", "text/plain; version=0.0.4", self.metrics.text()
            case "/healthz":
                return "200 OK", "text/plain", b"ok\n"
            case "/readyz":
                return self._probe(self.view().why_not_ready(self.fresh_within_s), "replicas are not fresh")
            case "/livez":
                return self._probe(self.view().wrong(), "replicas are to be started anew")
            case "/status.json":
                document = to_builtins(self.view().document())
                body = json.dumps({"format_version": 1, **document}, indent=2)
                return "200 OK", "application/json", body.encode()
            case _:
                return (
                    "404 Not Found",
                    "text/plain",
                    b"see /, /metrics, /status.json, /healthz, /livez or /readyz\n",
                )

    def _probe(self, reasons: tuple[str, ...], summary: str) -> tuple[str, str, bytes]:
        if not reasons:
            return "200 OK", "text/plain", b"ok\n"
        # Who has no token or certificate learns the number alone: messages name paths and servers.
        is_guarded = self.token is not None or self.wants_certificate
        text = f"{len(reasons)} {summary}" if is_guarded else "\n".join(reasons)
        return "503 Service Unavailable", "text/plain", f"{text}\n".encode()


@contextmanager
def serving(site: Site, host: str, port: int, tls: HttpTls | None = None) -> Iterator[int]:
    """Answer inside the block; the port that is listened on.

    Raises:
        ServerError: the address cannot be listened on.
    """
    listening = HttpPort(
        site,
        host,
        port,
        option="--port",
        threads=_THREADS,
        max_body_bytes=_LARGEST_BODY_BYTES,
        request_seconds=_REQUEST_S,
        is_quick=lambda request: request.path in _OPEN,
        tls=tls,
    )
    try:
        yield listening.port
    finally:
        listening.stop()
