"""The agent's own port: /metrics, /healthz, /readyz, /livez, /status.json and the status page at /.

The status page: HTML made here, whole, without scripts or anything from elsewhere.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins

from serving.agent.journal import Journal
from serving.agent.metrics import Metrics
from serving.agent.recorder import PERIOD_S, Recorder
from serving.agent.view import FleetView
from serving.http_port import HttpPort, HttpRequest, HttpResponse, HttpTls

if TYPE_CHECKING:
    from jinja2 import Template


_EVENTS, _REASONS = 30, 12
_WIDTH, _HEIGHT = 600, 48


def page(view: Callable[[], FleetView], recorder: Recorder, journal: Journal, fresh_within_s: float) -> str:
    """The page as it is now."""
    now = view()
    return _template().render(
        view=now,
        reasons=now.why_not_ready(fresh_within_s),
        most_reasons=_REASONS,
        events=journal.last()[:_EVENTS],
        plot=lambda replica: plot(recorder.series(replica.model, replica.address)),
        seconds=seconds,
    )


def seconds(value: float | None) -> str:
    """A span of time for people: `120 ms`, `4.2 s`, `3 min`, `2 h`."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def plot(series: Sequence[float | None]) -> dict[str, object]:
    """An SVG path of the values, the newest at the right, `top` at its upper edge, gaps for None."""
    top = max([1.0, *(value for value in series if value is not None)])
    heights = [
        None if value is None else f"{_HEIGHT - 2 - (_HEIGHT - 4) * value / top:.1f}" for value in series
    ]
    commands, pen = [], "M"
    for index, height in enumerate(heights):
        if height is None:
            pen = "M"
            continue
        # A point on a level line says nothing: a fleet of hundreds is level most of the time.
        if not (pen == "L" and heights[index - 1 : index + 2] == [height] * 3):
            commands.append(f"{pen}{_WIDTH - (len(series) - 1 - index):.0f} {height}")
        pen = "L"
    return {
        "path": "".join(commands),
        "top": top,
        "width": _WIDTH,
        "height": _HEIGHT,
        "span": seconds(_WIDTH * PERIOD_S),
    }


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html"
    )


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

    def __call__(self, request: HttpRequest) -> HttpResponse:
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
        return HttpResponse(status, headers, [body])

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
