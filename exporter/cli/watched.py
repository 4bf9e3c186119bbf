"""Monitoring of a watch: metrics on a port of its own, and a heartbeat file, written while it works.

A watch that hangs neither looks nor reports progress, so its file becomes old: this is for a liveness probe.
A watch that looks and fails is alive; its metrics say what fails, and since when nothing was published.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct

from exporter.errors import CheckpointNotFound, ExportError, UsageError
from exporter.publish.manifest import DeltaEntry, Manifest
from exporter.publish.model import Model
from exporter.storage.local_paths import local_path
from exporter.terminal.output import Output
from exporter.terminal.process_metrics import Described, build_info, register_process
from exporter.terminal.progress import Progress, ProgressFactory

PREFIX = "export_model_exporter"
_BEAT_S = 1.0
_THREADS = 2
_LARGEST_BODY_BYTES = 4096
_REQUEST_S = 10.0
_MODEL, _KIND = ("model",), ("model", "kind")
_LATEST = "last_publication_timestamp_seconds"
_METRICS = (
    Described(
        _LATEST, "gauge", _MODEL, "When the model was published last, as a Unix time; absent if never."
    ),
    Described("published_step", "gauge", _MODEL, "The training step that was published last."),
    Described(
        "lag_seconds",
        "gauge",
        _MODEL,
        "Upper bound of how long finished training output has waited to be published; "
        "a few seconds when idle.",
    ),
    Described("failing", "gauge", _KIND, "1 if the last look failed, by the name of the error."),
    Described("publications_total", "counter", _KIND, "Publications: `version`, `base` or `delta`."),
    Described("failures_total", "counter", _KIND, "Looks that failed, by the name of the error."),
    Described("rows_total", "counter", _MODEL, "Rows of tables in published deltas."),
    Described("bytes_total", "counter", _MODEL, "Bytes of published files, those that are linked, too."),
    Described("held_back_rows", "gauge", _MODEL, "Rows that the newest delta leaves out."),
    Described(
        "held_back_since_timestamp_seconds",
        "gauge",
        _MODEL,
        "Since when the oldest of these rows waits, as a Unix time; absent if none does, or it is not known.",
    ),
    Described("wild_rows", "gauge", _MODEL, "Rows of the newest delta that are beyond --max-norm."),
    Described("change_bytes", "gauge", _MODEL, "With a budget: what all changes would have taken."),
    Described("change_sent_ratio", "gauge", _MODEL, "With a budget: the part of the change that was sent."),
    Described("budget_bytes", "gauge", _MODEL, "Size limit of the newest delta."),
    Described("budget_excess_bytes", "gauge", _MODEL, "Bytes by which the newest delta exceeded its budget."),
)


def described() -> Iterator[Described]:
    """Yield every metric of the exporter, with its full name."""
    yield build_info(PREFIX)
    for one in _METRICS:
        yield Described(f"{PREFIX}_{one.name}", one.kind, one.labels, one.text)


class Watched:
    """The state of a watch, recorded for metrics and the heartbeat. Other threads can read it safely."""

    def __init__(self, model: Path, heartbeat: Path | None = None) -> None:
        self._model = model
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._beaten = 0.0
        self._complete = self._looked = time.monotonic()
        self._failing = ""
        self._step: int | None = None
        self._latest: datetime | None = None
        self._published: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._rows = self._bytes = 0
        self._divided: dict[str, float] = {}

    def look_back(self) -> None:
        """Read from the model when it was last published, and record that time; none if it is unknown."""
        times = [event.created for event in Model.look(self._model).publications if event.created]
        self._latest = max(times, default=None)

    def looked(self, error: ExportError | None) -> None:
        """Record the end of a look for the metrics, and write the heartbeat.

        `error` is the reason why the look failed; None if it published all that the trainer has finished. An
        error that may pass does not count as a failure.
        """
        with self._lock:
            self._failing = "" if error is None or error.may_pass else type(error).__name__
            if self._failing:
                self._failures[self._failing] += 1
            if error is None or isinstance(
                error, CheckpointNotFound
            ):  # what was there when the look before it ended; the trainer may have written since
                self._complete = self._looked
            self._looked = time.monotonic()
        self.beat(force=True)  # outside the lock: metrics do not wait for the file's disk

    def published(self, manifest: Manifest) -> None:
        """Count a publication, given its manifest, with its rows and bytes, and record its time and step.

        Of a delta, also the rows that it leaves out and the use of its budget are recorded.
        """
        entry = manifest.incremental
        kind = "version" if entry is None else "delta" if isinstance(entry, DeltaEntry) else "base"
        with self._lock:
            self._published[kind] += 1
            self._rows += entry.rows if isinstance(entry, DeltaEntry) else 0
            self._bytes += manifest.bytes_
            self._latest, self._step = manifest.created, manifest.step
            self._divided = dict(_divided(entry)) if isinstance(entry, DeltaEntry) else {}

    def beat(self, *, force: bool = False) -> None:
        """Write the heartbeat file, if there is one: at most once a second unless `force`.

        Errors of writing are ignored.
        """
        now = time.monotonic()
        if self._heartbeat is None or not (force or now - self._beaten >= _BEAT_S):
            return
        self._beaten = now
        with suppress(OSError):
            _write(self._heartbeat)

    def progress(self, show: ProgressFactory) -> ProgressFactory:
        """Return a factory of the progress bars of `show` that also write the heartbeat as they advance."""

        @contextmanager
        def beating(label: str, total: int) -> Iterator[Progress]:
            self.beat()
            with show(label, total) as bar:
                yield _Beating(bar, self)

        return beating

    def collect(self) -> Iterator[Any]:
        """Yield the watch's metrics, as families of prometheus_client, which calls this for each page."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values: dict[str, dict[str, float]] = {
                _LATEST: {} if self._latest is None else {"": self._latest.timestamp()},
                "published_step": {} if self._step is None else {"": self._step},
                "lag_seconds": {"": time.monotonic() - self._complete},
                "failing": {self._failing: 1.0} if self._failing else {},
                "publications_total": dict(self._published),
                "failures_total": dict(self._failures),
                "rows_total": {"": self._rows},
                "bytes_total": {"": self._bytes},
                **{name: {"": value} for name, value in self._divided.items()},
            }
        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for one in _METRICS:
            family = families[one.kind](f"{PREFIX}_{one.name}", one.text, labels=one.labels)
            for kind, value in values.get(one.name, {}).items():
                family.add_metric([self._model.name, kind][: len(one.labels)], value)
            yield family


def _divided(entry: DeltaEntry) -> Iterator[tuple[str, float]]:
    """Yield (metric, value) for the rows that a delta leaves out, and for its budget, if it had one."""
    left_out, budget = entry.trained.left_out, entry.budget
    yield "held_back_rows", 0 if left_out is None else left_out.rows
    if left_out is not None and left_out.since is not None:
        yield "held_back_since_timestamp_seconds", left_out.since.timestamp()
    yield "wild_rows", sum(found.rows for found in entry.wild)
    if budget is not None:
        yield "change_bytes", budget.changes
        yield "change_sent_ratio", budget.share
        yield "budget_bytes", budget.allowed
        yield "budget_excess_bytes", budget.excess


class _Beating(Struct, frozen=True):
    bar: Progress
    watched: Watched

    def advance(self, amount: int) -> None:
        self.bar.advance(amount)
        self.watched.beat()


def endpoint_of(text: str) -> tuple[str, int] | None:
    """Return the address and port of `[ADDRESS:]PORT`; None for an empty text.

    The address is 127.0.0.1 if none is given; brackets around an IPv6 address are left out. Port 0 is
    accepted.

    Raises:
        UsageError: the text is not of this form.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise UsageError(f"--metrics-port {text} is not a port", hint="as in 8601, or 0.0.0.0:8601")
    return host.strip("[]") or "127.0.0.1", int(port)


def _write(file: Path) -> None:
    """Write the time into a file, as text; a probe reads only the file's modification time.

    Raises OSError if it cannot be written.
    """
    file.write_text(f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}\n")


@contextmanager
def watched(model: Path, sink: Output, metrics_port: str, heartbeat_file: str) -> Iterator[Watched]:
    """Serve metrics inside the block, and yield the recorder of the watch, which writes the heartbeat.

    `metrics_port` and `heartbeat_file` are as typed; an empty one means no port, or no file. The file is
    written once at the beginning. The address of the metrics is printed. `model` is the model's path.

    Raises:
        UsageError: the port or the file cannot be used, or the libraries of a port are not installed.
        ServerError: the port cannot listen on the address.
    """
    endpoint, heartbeat = endpoint_of(metrics_port), None
    if heartbeat_file:
        heartbeat = local_path("--heartbeat", heartbeat_file)
        try:
            _write(heartbeat)
        except OSError as error:
            raise UsageError(
                f"--heartbeat {heartbeat} cannot be written",
                cause=error.strerror or str(error),
                hint="name a file in a directory that this user can write, such as /tmp/heartbeat",
            ) from error
    seen = Watched(model, heartbeat)
    if endpoint is None:
        yield seen
        return
    seen.look_back()  # for the metrics alone
    with _serving(seen, *endpoint) as port:
        shown = f"[{endpoint[0]}]" if ":" in endpoint[0] else endpoint[0]
        sink.note(f"metrics on http://{shown}:{port}/metrics")
        yield seen


@contextmanager
def _serving(seen: Watched, host: str, port: int) -> Iterator[int]:
    """Serve /metrics and /healthz inside the block; yield the number of the port, a free one for 0.

    Raises UsageError if the libraries are not installed, ServerError if the port cannot listen on the
    address.
    """
    from serving.optional_libraries import require_libraries

    require_libraries("agent", "--metrics-port", "h11", "prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest

    from serving.http_port import HttpPort, HttpRequest, HttpResponse

    registry = CollectorRegistry()
    register_process(registry, PREFIX)
    registry.register(seen)

    def respond(request: HttpRequest) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET and HEAD are allowed\n"
        elif request.path == "/metrics":
            status, body = "200 OK", bytes(generate_latest(registry))
        elif request.path == "/healthz":
            status, body = "200 OK", b"ok\n"
        else:
            status, body = "404 Not Found", b"see /metrics or /healthz\n"
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return HttpResponse(status, [("Content-Type", kind), ("Cache-Control", "no-store")], [body])

    listening = HttpPort(
        respond,
        host,
        port,
        option="--metrics-port",
        threads=_THREADS,
        max_body_bytes=_LARGEST_BODY_BYTES,
        request_seconds=_REQUEST_S,
        is_quick=lambda request: request.path == "/healthz",  # a probe waits for no page of metrics
    )
    try:
        yield listening.port
    finally:
        listening.stop(grace_seconds=0.5)
