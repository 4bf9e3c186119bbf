"""The agent's own port: /metrics, /healthz, /readyz, /freshz, /livez, /status.json, the status page at /.

The status page is one HTML document without external resources. Its script fetches the page again and puts
in what changed; without JavaScript the browser reloads it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins

from exporter.errors import ExportError, printable
from exporter.publish.delta_log import read_log
from exporter.publish.variable_change import VariableChange
from exporter.publish.what_changed import what_changed
from exporter.terminal.output import FORMAT_VERSION, plain
from exporter.terminal.progress import human_bytes
from serving.agent import standing
from serving.agent.chart import Chart, chart, line
from serving.agent.journal import EventKind, Journal, lines
from serving.agent.metrics import Metrics
from serving.agent.standing import assess
from serving.agent.view import PERIOD_S, FleetView, ModelView, Recorder
from serving.http_port import HttpPort, HttpRequest, HttpResponse, HttpTls

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


_EVENTS = 30
_MOST_BYTES = 16 << 20
"""Of a larger delta the page does not tell what it changed: `history --changes` does."""
_WIDTH, _HEIGHT = 600, 48  # a pixel for each sample that `view.Recorder` keeps
_HERE = Path(__file__).parent
_OPEN = frozenset({"/freshz", "/healthz", "/livez", "/readyz"})
"""Paths for an orchestrator's probes: they need no token, and their responses reveal nothing of the model."""
_THREADS = 8
_LARGEST_BODY_BYTES = 64 << 10
"""Bodies are not used, but the port has to read past them to the next request of the connection."""
_REQUEST_S = 10.0


def page(view: Callable[[], FleetView], recorder: Recorder, journal: Journal, fresh_within_s: float) -> str:
    """Return the status page as HTML, of a new view and the last events.

    A replica that lacks a publication for more than `fresh_within_s` seconds is late. `recorder` has the
    samples for plots and charts, `journal` the events. UsageError if trusted keys cannot be read.
    """
    now = view()
    return _template().render(
        view=now,
        standing=assess(now, fresh_within_s),
        lines=lines(journal.last(), _EVENTS, seconds),
        plot=lambda replica: plot(recorder.series(replica.model, replica.address)),
        chart=lambda model: charted(now, model, recorder, journal),
        changed=lambda model: changed(model.path, model.published),
        span=seconds(_WIDTH * PERIOD_S),
        serving=standing.serving,
        ages=partial(standing.ages, seconds=seconds),
        seconds=seconds,
        script=_script(),
    )


@lru_cache(maxsize=16)
def changed(path: str, position: int | None) -> tuple[int, tuple[VariableChange, ...]] | None:
    """Return the newest delta's position and its changes by variable; memoised for each path and position.

    `path` is the model's directory, `position` the newest published one. None, which is memoised, too, if
    that publication is not a delta, is larger than 16 MiB, or cannot be read.
    """
    with suppress(ExportError, OSError):
        log = read_log(Path(path))
        newest = [delta for delta in log.deltas if delta.end == position]
        if newest and newest[-1].manifest.bytes_ <= _MOST_BYTES:
            return newest[-1].end, what_changed(log, newest[-1])
    return None


def charted(view: FleetView, model: ModelView, recorder: Recorder, journal: Journal) -> Chart | None:
    """Return the chart of a model's last hour; None if nothing is known of it.

    It shows the hour before `view`, with the recorder's samples, and the journal's versions that became
    available.
    """
    available = re.compile(r"version [0-9]+ is AVAILABLE")
    swaps = [
        (event.at, f"{event.replica}: {event.message}")
        for event in journal.last()
        if event.what is EventKind.VERSION and event.model == model.name and available.match(event.message)
    ]
    return chart(view.at, model.recent, recorder.hour(model.name), swaps, seconds, human_bytes)


def seconds(value: float | None) -> str:
    """Return a duration of `value` seconds as text: `120 ms`, `4.2 s`, `3 min`, `2 h`; "" for None."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def plot(series: Sequence[float | None]) -> dict[str, object]:
    """Return an SVG path for the values, as a dictionary of `path`, `width`, `height` and `most`.

    `most` is the largest value, None without any; the sizes are in pixels. The newest value is last and at
    the right; None leaves a gap.
    """
    most = max((value for value in series if value is not None), default=None)
    points = [(_WIDTH - len(series) + number, value) for number, value in enumerate(series, 1)]
    path = line(points, 0.0, max(1.0, most or 0.0), height=_HEIGHT)
    return {"path": path, "most": most, "width": _WIDTH, "height": _HEIGHT}


@cache
def _script() -> Markup:
    """Return the page's script, marked so that the template does not escape it; read once."""
    from markupsafe import Markup

    return Markup((_HERE / "page.js").read_text())


@cache
def _allowed_content() -> str:
    """Return the Content-Security-Policy, which allows no script but the page's own, byte for byte."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"connect-src 'self'; script-src 'sha256-{digest}'"
    )


@cache
def _template(name: str = "page.html") -> Template:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(_HERE)
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_seen
    ).get_template(name)


def _seen(value: object) -> object:
    """Return a value as a page shows it: in text, characters that are not printable are escaped.

    A mark of direction in a text could make it read otherwise. Markup and other types are unchanged.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "\n".join(map(printable, value.split("\n")))


@cache
def _findings() -> str:
    """Return the page that explains each finding and gives advice, as HTML; rendered once."""
    from serving.agent.meanings import MEANINGS

    return _template("findings.html").render(meanings=MEANINGS.items(), parts=_parts)


def _parts(text: str) -> list[tuple[bool, str]]:
    """Split a text in Markdown into parts, without its links: for each, True if it is code, and its text."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return [(bool(number % 2), part) for number, part in enumerate(plain.split("`"))]


class Site(Struct, frozen=True):
    """The application of the port.

    Except for probes, a request needs `Authorization: Bearer TOKEN` if there is a `token`, and with
    `wants_certificate` a client certificate of the authority. `view` returns the fleet's present state,
    `page` the status page; a replica that lacks a publication for more than `fresh_within_s` seconds is late.
    """

    view: Callable[[], FleetView]
    metrics: Metrics
    page: Callable[[], str]
    fresh_within_s: float
    token: str | None = None
    wants_certificate: bool = False

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the response to one request: the page, metrics or state by its path, or an error.

        The status is 405 for methods other than GET and HEAD, 403 without a certificate, 401 without the
        token, 404 for an unknown path, and 503 if a probe fails; a guarded port tells probes only the number
        of reasons. Errors of `view` and `page` pass.
        """
        path = request.path
        if request.method not in ("GET", "HEAD"):
            status, kind, body = (
                "405 Method Not Allowed",
                "text/plain",
                plain("only GET and HEAD are allowed"),
            )
        elif path not in _OPEN and self.wants_certificate and not request.is_certified:
            status, kind, body = "403 Forbidden", "text/plain", plain("a client certificate is required")
        elif path not in _OPEN and not self._has_token(request.headers.get("authorization", "")):
            status, kind, body = "401 Unauthorized", "text/plain", plain("a token is required")
        else:
            status, kind, body = self._respond(path)
        headers = [
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", _allowed_content()),
        ]
        if status.startswith("401"):
            headers.append(("WWW-Authenticate", "Bearer"))
        return HttpResponse(status, headers, [body])

    def _has_token(self, authorization: str) -> bool:
        if self.token is None:
            return True
        # Bytes: it raises TypeError for texts that are not ASCII. Its time does not tell how much is right.
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def _respond(self, path: str) -> tuple[str, str, bytes]:
        match path:
            case "/":
                return "200 OK", "text/html", self.page().encode()
            case "/findings":
                return "200 OK", "text/html", _findings().encode()
            case "/metrics":
                return "200 OK", "text/plain; version=0.0.4", self.metrics.text()
            case "/healthz":
                return "200 OK", "text/plain", plain("ok")
            case "/readyz":
                return self._probe(self.view().why_not_ready(), "replicas are not ready")
            case "/freshz":
                return self._probe(self.view().why_not_fresh(self.fresh_within_s), "replicas are not fresh")
            case "/livez":
                return self._probe(self.view().wrong(), "replicas have to be restarted")
            case "/status.json":
                now = self.view()
                findings = [standing.document(each) for each in assess(now, self.fresh_within_s).findings]
                document = {"format_version": FORMAT_VERSION, **now.document(), "findings": findings}
                body = json.dumps(to_builtins(document), indent=2)
                return "200 OK", "application/json", body.encode()
            case _:
                return (
                    "404 Not Found",
                    "text/plain",
                    plain("see /, /findings, /metrics, /status.json, /healthz, /livez, /readyz or /freshz"),
                )

    def _probe(self, reasons: tuple[str, ...], summary: str) -> tuple[str, str, bytes]:
        if not reasons:
            return "200 OK", "text/plain", plain("ok")
        # Probes need no token, so a guarded port reports only the number: messages name paths and servers.
        is_guarded = self.token is not None or self.wants_certificate
        lines = (f"{len(reasons)} {summary}",) if is_guarded else reasons
        return "503 Service Unavailable", "text/plain", plain(*lines)


@contextmanager
def serving(
    site: Site, host: str, port: int, tls: HttpTls | None = None, allow_host: str | None = None
) -> Iterator[int]:
    """Serve `site` inside the block; the block gets the number of the port, a free one if `port` is 0.

    `allow_host` lists names, separated by commas, by which requests may ask the port beside its own; without
    `tls`, requests for other names are refused (see `OwnNames`).

    Raises:
        OSError: the files of `tls` cannot be used (SSLError included).
        ServerError: the port cannot listen on the address.
        UsageError: `allow_host` is not a list of names.
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
        allow_host=allow_host,
    )
    try:
        yield listening.port
    finally:
        listening.stop()
