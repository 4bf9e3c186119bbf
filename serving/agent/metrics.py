"""The agent's metrics for Prometheus: counters of events, and gauges that are read from the fleet per
request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from exporter.publish.judge import Code
from exporter.terminal.process_metrics import Described, build_info, register_process
from serving.agent.audit import Audited
from serving.agent.journal import AgentEvent, EventKind
from serving.agent.standing import standing
from serving.agent.view import CanaryView, FleetView, ModelView, PaceView, ReplicaView, StoreView, VersionView

PREFIX = "export_model_agent"
_APPLY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_EVENT_BUCKETS_S = (0.1, 0.3, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_FRESHNESS_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)

ItemT = TypeVar("ItemT")
_Gauges: TypeAlias = Mapping[str, tuple[str, Callable[[ItemT], float | None]]]
"""The help text of each gauge by name, and the function from a model, a replica or the like to its value."""

_OF_MODEL: _Gauges[ModelView] = {
    "published_visible": ("1 if the model base path can be read.", lambda model: not model.problem),
    "published_position": (
        "The newest published position, whatever keeps replicas from it.",
        lambda model: model.published,
    ),
    "released_position": (
        "The newest published position that a hold or a canary allows replicas to serve.",
        lambda model: model.position,
    ),
    "waiting_publications": (
        "Publications that a hold or a canary keeps from replicas.",
        lambda model: model.waiting,
    ),
    "held": ("1 while an operator's hold or a rollback stops the model.", lambda model: model.is_held),
    "base_wanted": ("1 if replicas need a new base to get further.", lambda model: model.base_wanted),
    "quarantined_deltas": ("Deltas that every replica refuses.", lambda model: len(model.quarantined)),
    "worst_stale_seconds": ("The largest stale_seconds of all replicas.", lambda model: model.stale_s),
    "worst_served_age_seconds": ("The largest served_age_seconds of all.", lambda model: model.served_age_s),
    "worst_event_age_seconds": ("The largest event_age_seconds of all.", lambda model: model.event_age_s),
    "published_age_seconds": (
        "Since the last publication, as this machine saw it.",
        lambda model: model.silence.seconds,
    ),
    "longest_silence_seconds": (
        "The time without a publication that is too long, learned or given; absent while it is unknown.",
        lambda model: model.silence.longest_s,
    ),
    "publisher_silent": (
        "1 if nothing was published for longer than that.",
        lambda model: model.silence.is_too_long,
    ),
    "publisher_clock_ahead_seconds": (
        "Least seconds by which the publisher's clock is ahead of this machine's, negative if it is behind; "
        "absent until something is published.",
        lambda model: model.skew_s,
    ),
    "publishers": (
        "Machines that publish the model in turn; 1 if only one does.",
        lambda model: max(1, len(model.publishers)),
    ),
    "rolled_back": ("1 while the model is held at a rollback.", lambda model: model.rollback is not None),
}
_OF_CANARY: _Gauges[CanaryView] = {
    "canary_waiting_seconds": (
        "Since the publication of the oldest delta that the canary has not approved.",
        lambda canary: canary.waiting_s,
    ),
    "canary_approved_position": (
        "The position that the canary has approved.",
        lambda canary: canary.approved,
    ),
    "golden_failing": (
        "1 if the approved position fails golden requests.",
        lambda canary: bool(canary.failing),
    ),
}
_OF_STORE: _Gauges[StoreView] = {
    "copy_age_seconds": (
        "Since the model base path last held everything that is in its store (--pull).",
        lambda store: store.age_s,
    ),
    "store_visible": (
        "1 if the last look into the store succeeded; what it found may be damaged, or not fit on the disk.",
        lambda store: store.trouble is None or store.trouble.code in (Code.DAMAGED, Code.DISK_FULL),
    ),
    "store_damaged": (
        "1 if what comes next in the store is damaged, so that the copy stays where it is.",
        lambda store: store.trouble is not None and store.trouble.code is Code.DAMAGED,
    ),
    "copy_disk_full": (
        "1 if what comes next has no room on the copy's disk.",
        lambda store: store.trouble is not None and store.trouble.code is Code.DISK_FULL,
    ),
    "withheld_publications": (
        "Publications in the store that do not fit after a rollback of this copy.",
        lambda store: len(store.waiting),
    ),
}
_OF_REPLICA: _Gauges[ReplicaView] = {
    "replica_up": ("1 if the replica responded to the last call.", lambda replica: replica.is_answering),
    "replica_restarts": (
        "How often the replica came back in the last ten minutes: after nothing had listened, at an "
        "earlier position, or loading again.",
        lambda replica: replica.restarts,
    ),
    "replica_ready": (
        "1 if the replica serves a version and has caught up once since it started, as /readyz says.",
        lambda replica: replica.is_ready,
    ),
}
_OF_STATE: _Gauges[Code] = {
    "replica_fresh": (
        "1 if the replica answers from the newest publication; absent if it is unknown what is published.",
        lambda code: None if code is Code.UNKNOWN else code is Code.FRESH,
    ),
}
_OF_AUDIT: _Gauges[Audited] = {
    "replica_right": (
        "0 if the last audit found values that differ from what was published.",
        lambda audited: not audited.differing if audited.chunks else None,
    ),
}
_OF_SERVED: _Gauges[VersionView] = {
    "superseded_seconds": (
        "Since the publication of a base that starts a new log, while the newest available version "
        "belongs to another log.",
        lambda served: served.superseded_s,
    ),
}
_OF_PACE: _Gauges[PaceView] = {
    "pause_seconds": ("The current pause between two deltas, chosen by pacing.", lambda pace: pace.pause_s),
}
_OF_VERSION: _Gauges[VersionView] = {
    "position": ("The position of a version.", lambda version: version.position),
    "step": ("The training step whose values a version serves.", lambda version: version.step),
    "behind_deltas": ("Deltas that a version has not applied yet.", lambda version: version.behind_deltas),
    "stale_seconds": (
        "Since the publication of the oldest delta that a version does not serve yet.",
        lambda version: version.stale_s,
    ),
    "served_age_seconds": (
        "Since the publication of the values that a version serves.",
        lambda version: version.served_age_s,
    ),
    "event_age_seconds": (
        "Since the newest event that a version was trained on; absent if the trainer does not record it.",
        lambda version: version.event_age_s,
    ),
    "unsettled_responses": (
        "Responses of a version since loading that may mix positions, because an update died half-way.",
        lambda version: version.unsettled,
    ),
    "overlay_ratio": (
        "How full the overlay of changed rows of a version with mapped tables is: 0 to 1; one with room for "
        "every row counts as empty.",
        lambda version: version.tables.overlay_percent / 100 if version.tables else None,
    ),
    "mapped_tables_ratio": (
        "The share of the tables that were to be mapped that the server maps; the others are restored.",
        lambda version: version.tables.mapped / max(1, version.tables.wanted) if version.tables else None,
    ),
}
_OF_PROBES: _Gauges[float | None] = {
    "probe_p99_seconds": (
        "The p99 of probes, while the replica was idle and while it applied deltas.",
        lambda p99: p99,
    ),
}
_BY_MODEL, _BY_REPLICA = ("model",), ("model", "replica")
_BY_VERSION, _BY_STATE = (*_BY_REPLICA, "version"), (*_BY_REPLICA, "state")
_GAUGES: tuple[tuple[tuple[str, ...], _Gauges[Any]], ...] = (
    (_BY_MODEL, _OF_MODEL),
    (_BY_MODEL, _OF_CANARY),
    (_BY_MODEL, _OF_STORE),
    (_BY_REPLICA, _OF_REPLICA),
    (_BY_REPLICA, _OF_STATE),
    (_BY_REPLICA, _OF_AUDIT),
    (_BY_REPLICA, _OF_SERVED),
    (_BY_VERSION, _OF_VERSION),
    (_BY_REPLICA, _OF_PACE),
    (_BY_STATE, _OF_PROBES),
)
_COUNTERS = {
    "events_total": ((*_BY_REPLICA, "kind"), "Events, by kind."),
    "rows_total": (_BY_REPLICA, "Rows of tables that were applied."),
    "deltas_total": (_BY_REPLICA, "Deltas that were applied."),
}
_HISTOGRAMS = {
    "apply_seconds": ("Duration of calls that applied deltas.", _APPLY_BUCKETS_S),
    "commit_to_served_seconds": (
        "From the publication of a delta until a replica served it.",
        _FRESHNESS_BUCKETS_S,
    ),
    "event_to_served_seconds": (
        "From the newest event that a delta was trained on until a replica served it.",
        _EVENT_BUCKETS_S,
    ),
}


def described() -> Iterator[Described]:
    """Yield every metric of the agent: its full name, kind, labels and help text.

    Metrics of the process (`process_...`), which `Metrics` has, too, are left out.
    """
    yield build_info(PREFIX)
    for labels, table in _GAUGES:
        for name, (text, _) in table.items():
            yield Described(f"{PREFIX}_{name}", "gauge", labels, text)
    for name, (labels, text) in _COUNTERS.items():
        yield Described(f"{PREFIX}_{name}", "counter", labels, text)
    for name, (text, _) in _HISTOGRAMS.items():
        yield Described(f"{PREFIX}_{name}", "histogram", _BY_REPLICA, text)


class Metrics:
    """Counters of events, and gauges of the fleet's state."""

    def __init__(self, view: Callable[[], FleetView]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry()
        register_process(self.registry, PREFIX)

        def counter(name: str) -> Any:
            labels, text = _COUNTERS[name]
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        def histogram(name: str) -> Any:
            text, buckets = _HISTOGRAMS[name]
            return Histogram(f"{PREFIX}_{name}", text, _BY_REPLICA, buckets=buckets, registry=self.registry)

        self._events = counter("events_total")
        self._rows = counter("rows_total")
        self._deltas = counter("deltas_total")
        self._apply = histogram("apply_seconds")
        self._served = histogram("commit_to_served_seconds")
        self._event_served = histogram("event_to_served_seconds")
        self.registry.register(_Standing(view))
        self._view = view
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str, str]] = set()

    def __call__(self, event: AgentEvent) -> None:
        """Count an event; of one that applied deltas also rows, deltas and times."""
        # So that `text` removes no labels between these two.
        with self._lock:
            self._seen.add((event.model, event.replica or "", str(event.what)))
            self._count(event)

    def _count(self, event: AgentEvent) -> None:
        labels = (event.model, event.replica or "")
        self._events.labels(*labels, str(event.what)).inc()
        if event.what is not EventKind.APPLIED:
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
        """Return all metrics in Prometheus' text format.

        Counters of replicas that are gone are removed first.
        """
        from prometheus_client import generate_latest

        # Before the lock: threads that write events wait for that.
        there = {(model.name, replica.address) for model in self._view().models for replica in model.replicas}
        with self._lock:
            self._forget_all_but(there)
        return bytes(generate_latest(self.registry))

    def _forget_all_but(self, there: Collection[tuple[str, str]]) -> None:
        """Remove the counters of replicas that are not in `there`, pairs of model and address.

        The caller holds the lock. Counters of events without a replica stay. A name may resolve to new
        addresses each day.
        """
        gone = {seen for seen in self._seen if seen[1] and seen[:2] not in there}
        self._seen -= gone
        for seen in gone:
            self._events.remove(*seen)
        for labels in {seen[:2] for seen in gone}:
            for metric in (self._rows, self._deltas, self._apply, self._served, self._event_served):
                with suppress(KeyError):  # the replica had no such event
                    metric.remove(*labels)


class _Standing:
    """A collector of gauges from a view of the fleet."""

    def __init__(self, view: Callable[[], FleetView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of the present state; prometheus_client calls it for each request."""
        models = [((model.name,), model) for model in self._view().models]
        replicas = [((*labels, each.address), each) for labels, model in models for each in model.replicas]
        versions = [((*labels, str(each.number)), each) for labels, at in replicas for each in at.versions]
        paces = [(labels, each.pace) for labels, each in replicas if each.pace is not None]
        probes = [((*labels, "idle"), pace.idle_p99_s) for labels, pace in paces]
        probes += [((*labels, "applying"), pace.applying_p99_s) for labels, pace in paces]
        canaries = [(labels, model.canary) for labels, model in models if model.canary is not None]
        stores = [(labels, model.store) for labels, model in models if model.store is not None]
        audits = [(labels, each.audited) for labels, each in replicas if each.audited is not None]
        served = [(labels, each.served) for labels, each in replicas if each.served is not None]
        states = [
            ((model.name, each.address), standing(model, each, math.inf).code)
            for _, model in models
            for each in model.replicas
        ]
        # In the order of `_GAUGES`.
        items: tuple[Collection[tuple[tuple[str, ...], Any]], ...] = (
            models,
            canaries,
            stores,
            replicas,
            states,
            audits,
            served,
            versions,
            paces,
            probes,
        )
        for (names, table), found in zip(_GAUGES, items, strict=True):
            yield from _gauges(table, names, found)


def _gauges(
    table: _Gauges[ItemT], names: tuple[str, ...], items: Collection[tuple[tuple[str, ...], ItemT]]
) -> Iterator[Any]:
    """Yield a gauge for each row of a table, with a sample for each item that has a value.

    `names` are the names of the labels; `items` are pairs of the labels' values and the item.
    """
    from prometheus_client.core import GaugeMetricFamily

    for name, (text, value_of) in table.items():
        gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=names)
        for labels, item in items:
            if (value := value_of(item)) is not None:
                gauge.add_metric(labels, float(value))
        yield gauge
