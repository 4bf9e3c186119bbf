"""Probes: predictions at a steady rate that measure the cost of applying deltas for a replica's clients.

A probe is the first prediction in the version's own warm-up file: the exporter got it with `--requests` or
generated it from the signature, and each server has already computed it once. It changes nothing. A version
without one is not probed, and deltas are applied to it without pauses.

If a probe takes longer than the period, the probes that were not sent meanwhile count as if they had been
sent on time and had waited. Otherwise a stall of a second would be one slow probe among many.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.errors import CallFailed, LfsPointer
from exporter.storage.files import regular_file
from exporter.storage.layout import WARMUP_FILE
from exporter.terminal.server_access import ServerAccess
from exporter.wire.protos import Proto, message_class
from exporter.wire.tfrecord import DamagedRecord, read_records
from serving.agent.pacing import LEAST_PROBES, Latencies
from serving.client import ModelClient

_KEPT = 512  # ten seconds of probes, one each 20 ms
_IDLE_SHARE = 10
"""The factor by which the period grows once there are enough probes of the idle replica."""
_AFTER_S = 1.0
"""Time after a call that applied deltas which still counts as applying: the next call usually follows at
once."""
_DEADLINE_S = 2.0  # a slower probe is recorded as taking this long
_UNPROBED_S = 0.5
_OWN_SIGNATURES = "incremental_"


def probe_request(version: Path) -> Proto | None:
    """Return the first recorded prediction of a version, for probes; None if its warm-up file has none.

    It is a Predict, Classify or Regress request. `version` is the version's directory. Requests for
    signatures that updates add are left out. None, too, if the file cannot be read or is damaged.
    """
    try:
        with regular_file(version / WARMUP_FILE) as file:
            for record in read_records(file):
                log = message_class("serving.PredictionLog").FromString(record)
                kind = log.WhichOneof("log_type")
                if kind not in ("predict_log", "classify_log", "regress_log"):
                    continue
                request = getattr(log, kind).request
                if not request.model_spec.signature_name.startswith(_OWN_SIGNATURES):
                    return request
    except (OSError, ValueError, DamagedRecord, LfsPointer):
        return None  # the server reports damage when it loads the version
    return None


class Prober:
    """A prober of one model of one server; `version` returns the version to probe now, None for none.

    `path` is the model's directory; `probe_s` is the time between two probes in seconds.
    """

    def __init__(
        self, address: str, model: str, path: Path, probe_s: float, version: Callable[[], int | None]
    ) -> None:
        self.address = address
        self.model = model
        self._path = path
        self._probe_s = probe_s
        self._version = version
        self._lock = threading.Lock()
        self._idle: deque[float] = deque(maxlen=_KEPT)
        self._applying: deque[float] = deque(maxlen=_KEPT)
        self._requests: dict[int, Proto] = {}
        self._is_answered = True
        self._calls = 0
        self._applied_at = -_AFTER_S

    def latencies(self) -> Latencies:
        """Return the latencies in seconds of the last probes, at most 512 of each kind, the oldest first."""
        with self._lock:
            return Latencies(tuple(self._idle), tuple(self._applying))

    def restart(self) -> None:
        """Forget the probes taken while deltas were applied, because a new pause was chosen."""
        with self._lock:
            self._applying.clear()

    @property
    def is_measuring(self) -> bool:
        """Return True while the replica responds to probes, but fewer than 50 of the idle one are known."""
        return self._is_answered and len(self._idle) < LEAST_PROBES

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Count the block, and a second after it, as time in which deltas are applied."""
        self._calls += 1
        try:
            yield
        finally:
            self._applied_at = time.monotonic()
            self._calls -= 1

    def run(self, access: ServerAccess, stop: threading.Event) -> None:
        """Send probes until `stop` is set; errors are ignored, and it tries again after half a second."""
        while not stop.is_set():
            try:
                with ModelClient(self.address, self.model, deadline_s=_DEADLINE_S, access=access) as client:
                    while not stop.is_set():
                        stop.wait(self._probe(client))
            except Exception:  # noqa: BLE001 - the rollout must not wait for a measurement that never ends
                self._is_answered = False
                stop.wait(_UNPROBED_S)

    def _probe(self, client: ModelClient) -> float:
        """Send one probe and record its latency; return the seconds to wait before the next one.

        Without a version, a request or a response nothing is recorded, unless the probe took longer than 2 s.
        """
        version = self._version()
        request = None if version is None else self._request(version)
        self._is_answered = request is not None
        if version is None or request is None:
            return _UNPROBED_S
        was_applying, began = self._is_applying, time.monotonic()
        try:
            client.replay(request, version)
        except CallFailed as error:
            if error.code != "DEADLINE_EXCEEDED":
                self._is_answered = False
                return _UNPROBED_S
        took = time.monotonic() - began
        is_applying = was_applying or self._is_applying
        period = self._probe_s if is_applying or len(self._idle) < LEAST_PROBES else self._slow_s
        with self._lock:
            kept = self._applying if is_applying else self._idle
            waited = took
            while waited > 0:
                kept.append(waited)
                waited -= period
        return max(0.0, period - took)

    def _request(self, version: int) -> Proto | None:
        if version not in self._requests:
            found = probe_request(self._path / str(version))
            self._requests = {} if found is None else {version: found}
        return self._requests.get(version)

    @property
    def _slow_s(self) -> float:
        return self._probe_s * _IDLE_SHARE

    @property
    def _is_applying(self) -> bool:
        return self._calls > 0 or time.monotonic() - self._applied_at < _AFTER_S
