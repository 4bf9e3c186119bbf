"""A model server's metrics for Prometheus, under TF Serving's names where it has them.

Requests are counted when they end. States of versions, and positions of models with deltas, are read for each
request of the page. Sources: tensorflow_serving/servables/tensorflow/util.cc and util/prometheus_exporter.cc.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np

from exporter.terminal.process_metrics import register_process
from exporter.wire.protos import message_class
from serving.inference import Inference, predict_arrays
from serving.models import ServedModels
from serving.status import Code, VersionState

_REQUESTS = ":tensorflow:serving:request_count"
_LATENCY = ":tensorflow:serving:request_latency"
_OURS = "export_model_server"
_STATUS_SIGNATURE = "incremental_status"
_BUCKETS_US = [10 * 1.8**power for power in range(32)]  # `Exponential(10, 1.8, 33)` of TF Serving's util.cc
_QUICKLY = Inference(timeout_ms=1000)


class ServerMetrics:
    """Counts of requests by model, and the states and positions of a server's versions."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._buckets: dict[tuple[str, str, str], list[int]] = {}
        self._sums_us: Counter[tuple[str, str, str]] = Counter()

    def count(self, model: str, api: str, entrypoint: str, code: Code, seconds: float) -> None:
        """Count a request that has ended, and its duration if it succeeded.

        Args:
            model: the name of its model; all names that are not served count as one.
            api: the name of the call.
            entrypoint: `GRPC` or `REST`.
            code: its canonical status.
            seconds: its duration.
        """
        model = model if model in self._models.served() else ""
        key = (model, api, entrypoint)
        took_us = seconds * 1e6
        with self._lock:
            self._requests[model, code.name] += 1
            if code is Code.OK:
                buckets = self._buckets.setdefault(key, [0] * (len(_BUCKETS_US) + 1))
                buckets[bisect_left(_BUCKETS_US, took_us)] += 1
                self._sums_us[key] += took_us  # type: ignore[assignment] # a Counter adds numbers of any kind

    def text(self) -> bytes:
        """Return all metrics, of the process and of this server, in Prometheus' text format.

        Asks each available version that takes deltas for its position, and waits up to a second for each.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        register_process(registry, _OURS)
        registry.register(self)
        return bytes(generate_latest(registry))

    def describe(self) -> list[Any]:
        """Return nothing when prometheus_client registers this collector: it then reserves no names."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all metrics of the server, as families of prometheus_client, which calls this for each page.

        Asks each available version that takes deltas for its position, and waits up to a second for each.
        """
        yield from self._request_metrics()
        yield from self._model_metrics()

    def _request_metrics(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily, Metric

        with self._lock:
            requests, sums = dict(self._requests), dict(self._sums_us)
            latencies = {key: list(buckets) for key, buckets in self._buckets.items()}
        # Declared as unknown: prometheus_client would append _total to the name of a counter.
        counted = Metric(_REQUESTS, "The total number of requests.", "unknown")
        for (model, status), number in sorted(requests.items()):
            counted.add_sample(_REQUESTS, {"model_name": model, "status": status}, number)
        yield counted
        text = "Distribution of wall time (in microseconds) for Tensorflow Serving request."
        histogram = HistogramMetricFamily(_LATENCY, text, labels=("model_name", "API", "entrypoint"))
        limits = [*(f"{limit:g}" for limit in _BUCKETS_US), "+Inf"]
        for key, buckets in sorted(latencies.items()):
            histogram.add_metric(key, list(zip(limits, accumulate(buckets), strict=True)), sums[key])
        yield histogram

    def _model_metrics(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        of_version = ("model_name", "version")
        states = GaugeMetricFamily(
            f"{_OURS}_version_state",
            "1 for the current state of a version.",
            labels=(*of_version, "state"),
        )
        position = GaugeMetricFamily(
            f"{_OURS}_position", "The position that a version serves.", labels=of_version
        )
        step = GaugeMetricFamily(
            f"{_OURS}_step", "The training step of the values that a version serves.", labels=of_version
        )
        for name, manager in sorted(self._models.served().items()):
            for status in manager.statuses():
                labels = (name, str(status.version))
                states.add_metric((*labels, status.state.name), 1)
                if status.state is VersionState.AVAILABLE and (at := self._stands_at(name, status.version)):
                    position.add_metric(labels, at[0])
                    step.add_metric(labels, at[1])
        yield from (states, position, step)

    def _stands_at(self, name: str, version: int) -> tuple[int, int] | None:
        """Return the position and step of a version; None if it takes no deltas.

        None, too, after any error, and if it does not respond within a second.
        """
        spec = message_class("serving.ModelSpec")(name=name)
        spec.version.value = version
        with suppress(Exception), self._models.borrow(spec) as (_, model):
            if _STATUS_SIGNATURE in model.signatures:
                probe = {"probe": np.zeros([1], np.int64)}
                found = predict_arrays(model, _STATUS_SIGNATURE, probe, _QUICKLY)
                return int(found["position"][0]), int(found["step"][0])
        return None
