"""The agent's metrics, for Prometheus: gauges are read from the fleet when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from serving.agent.journal import Event, What
from serving.agent.view import FleetView

PREFIX = "export_model_agent"
_APPLY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_EVENT_BUCKETS_S = (0.1, 0.3, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_FRESHNESS_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of what happened and gauges of how the fleet stands."""

    def __init__(self, view: Callable[[], FleetView]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry()
        by_replica = ("model", "replica")

        def counter(name: str, text: str, labels: tuple[str, ...] = by_replica) -> Any:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        self._events = counter("events_total", "What happened, by kind.", ("model", "replica", "kind"))
        self._rows = counter("rows_total", "Rows of tables that were applied.")
        self._deltas = counter("deltas_total", "Deltas that were applied.")
        self._apply = Histogram(
            f"{PREFIX}_apply_seconds",
            "How long calls took that applied deltas.",
            by_replica,
            buckets=_APPLY_BUCKETS_S,
            registry=self.registry,
        )
        self._served = Histogram(
            f"{PREFIX}_commit_to_served_seconds",
            "From the publication of a delta until a replica served it.",
            by_replica,
            buckets=_FRESHNESS_BUCKETS_S,
            registry=self.registry,
        )
        self._event_served = Histogram(
            f"{PREFIX}_event_to_served_seconds",
            "From the newest event that a delta was trained on until a replica served it.",
            by_replica,
            buckets=_EVENT_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_Standing(view))
        self._view = view
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str, str]] = set()

    def __call__(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            self._seen.add((event.model, event.replica or "", str(event.what)))
            self._count(event)

    def _count(self, event: Event) -> None:
        labels = (event.model, event.replica or "")
        self._events.labels(*labels, str(event.what)).inc()
        if event.what is not What.APPLIED:
            return
        self._rows.labels(*labels).inc(event.rows or 0)
        self._deltas.labels(*labels).inc(event.deltas or 0)
        if event.seconds is not None:
            self._apply.labels(*labels).observe(event.seconds)
        if event.behind_seconds is not None:
            self._served.labels(*labels).observe(max(0.0, event.behind_seconds))
        if event.event_age_seconds is not None:
            self._event_served.labels(*labels).observe(max(0.0, event.event_age_seconds))

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        from prometheus_client import generate_latest

        there = {(model.name, replica.address) for model in self._view().models for replica in model.replicas}
        with self._lock:
            self._forget_all_but(there)
        return bytes(generate_latest(self.registry))

    def _forget_all_but(self, there: Collection[tuple[str, str]]) -> None:
        """Without the counters of replicas that are gone: a name may stand for new addresses each day."""
        gone = {seen for seen in self._seen if seen[1] and seen[:2] not in there}
        self._seen -= gone
        for seen in gone:
            self._events.remove(*seen)
        for labels in {seen[:2] for seen in gone}:
            for metric in (self._rows, self._deltas, self._apply, self._served, self._event_served):
                with suppress(KeyError):  # it had no such event
                    metric.remove(*labels)


class _Standing:
    """Gauges from a view of the fleet."""

    def __init__(self, view: Callable[[], FleetView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)

        of_model, of_replica = ("model",), ("model", "replica")
        visible = gauge("published_visible", "1 if the model base path can be read.", *of_model)
        published = gauge("published_position", "The newest position that is to be served.", *of_model)
        wanted = gauge("base_wanted", "1 if replicas cannot go on without a new base.", *of_model)
        quarantined = gauge("quarantined_deltas", "Deltas that no replica takes.", *of_model)
        worst = gauge("worst_stale_seconds", "The largest stale_seconds of all replicas.", *of_model)
        oldest = gauge("worst_served_age_seconds", "The largest served_age_seconds of all.", *of_model)
        last_event = gauge("worst_event_age_seconds", "The largest event_age_seconds of all.", *of_model)
        waiting = gauge(
            "canary_waiting_seconds",
            "Since a delta was published that the canary has yet to approve.",
            *of_model,
        )
        approved = gauge("canary_approved_position", "How far the canary approved.", *of_model)
        failing = gauge(
            "golden_failing", "1 if the approved position does not pass golden requests.", *of_model
        )
        copy_age = gauge(
            "copy_age_seconds",
            "Since the model base path last held all that is in the store that it is fetched from (--pull).",
            *of_model,
        )
        fetching = gauge("store_visible", "1 if the store could be read, and fetched from, last.", *of_model)
        withheld = gauge(
            "withheld_publications",
            "What is in the store and does not fit after a canary's rollback.",
            *of_model,
        )
        rolled_back = gauge("rolled_back", "1 while the model is held at a rollback.", *of_model)
        up = gauge("replica_up", "1 if the replica answered last.", *of_replica)
        by_version = (*of_replica, "version")
        right = gauge(
            "replica_right", "0 if the last audit found other values than were published.", *of_replica
        )
        position = gauge("position", "Where a version stands.", *by_version)
        step = gauge("step", "The training step whose values a version serves.", *by_version)
        behind = gauge("behind_deltas", "Deltas that a version has yet to take.", *by_version)
        stale = gauge(
            "stale_seconds", "Since a delta was published that a version does not serve yet.", *by_version
        )
        age = gauge("served_age_seconds", "Since what a version serves was published.", *by_version)
        event_age = gauge(
            "event_age_seconds",
            "Since the newest event that a version was trained on; absent where the trainer does not tell.",
            *by_version,
        )
        superseded = gauge(
            "superseded_seconds",
            "Since a base was published that begins a new log, while the newest version that is available is "
            "of another.",
            *of_replica,
        )
        pause = gauge("pause_seconds", "The pause between two deltas that pacing chose.", *of_replica)
        probes = gauge(
            "probe_p99_seconds", "The p99 of probes, by what the replica did meanwhile.", *of_replica, "state"
        )
        for model in self._view().models:
            visible.add_metric([model.name], float(not model.problem))
            wanted.add_metric([model.name], float(model.base_wanted))
            quarantined.add_metric([model.name], len(model.quarantined))
            rolled_back.add_metric([model.name], float(model.rollback is not None))
            if model.store is not None:
                copy_age.add_metric([model.name], model.store.age_s)
                fetching.add_metric([model.name], float(not model.store.problem))
                withheld.add_metric([model.name], len(model.store.waiting))
            if model.canary is not None:
                waiting.add_metric([model.name], model.canary.waiting_s)
                failing.add_metric([model.name], float(bool(model.canary.failing)))
                if model.canary.approved is not None:
                    approved.add_metric([model.name], model.canary.approved)
            if model.position is not None:
                published.add_metric([model.name], model.position)
            for metric, seconds in (
                (worst, model.stale_s),
                (oldest, model.served_age_s),
                (last_event, model.event_age_s),
            ):
                if seconds is not None:
                    metric.add_metric([model.name], seconds)
            for replica in model.replicas:
                up.add_metric([model.name, replica.address], float(replica.is_answering))
                if replica.audited is not None and replica.audited.chunks:
                    right.add_metric([model.name, replica.address], float(not replica.audited.differing))
                if replica.pace is not None:
                    pause.add_metric([model.name, replica.address], replica.pace.pause_s)
                    for state, seconds in (
                        ("idle", replica.pace.idle_p99_s),
                        ("applying", replica.pace.applying_p99_s),
                    ):
                        if seconds is not None:
                            probes.add_metric([model.name, replica.address, state], seconds)
                if replica.served is not None and replica.served.superseded_s is not None:
                    superseded.add_metric([model.name, replica.address], replica.served.superseded_s)
                for version in replica.versions:
                    labels = [model.name, replica.address, str(version.number)]
                    for metric, value in (
                        (position, version.position),
                        (step, version.step),
                        (behind, version.behind_deltas),
                        (stale, version.stale_s),
                        (age, version.served_age_s),
                        (event_age, version.event_age_s),
                    ):
                        if value is not None:
                            metric.add_metric(labels, value)
        yield from (visible, published, wanted, quarantined, worst, oldest, last_event, up, right)
        yield from (position, step, behind, stale, age, event_age, superseded, pause, probes)
        yield from (rolled_back, waiting, approved, failing, copy_age, fetching, withheld)
