"""When the agent calls its replicas fresh and ready, and what its metrics tell of those that are gone."""

from __future__ import annotations

from datetime import datetime, timezone
from threading import Event, Thread

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from exporter.delta.chunk_digest import Chunk
from exporter.publish.judge import Code
from serving.agent import view as agent_view
from serving.agent.audit import Audited
from serving.agent.journal import AgentEvent, EventKind
from serving.agent.metrics import Metrics
from serving.agent.puller import Trouble
from serving.agent.view import FleetView, ModelView, Recorder, ReplicaView, StoreView, VersionView


def replica(
    stale_s: float | None = 0.0, *, state: str = "AVAILABLE", error: str = "", address: str = "h:1"
) -> ReplicaView:
    version = VersionView(1, state, 5, 5, 0, stale_s, 1.0, None, "")
    return ReplicaView("m", address, not error, error, (version,))


FRESH = {
    "fresh": ((replica(),), ()),
    "behind, not for long": ((replica(29.0),), ()),
    "behind for too long": ((replica(), replica(31.0)), ("m on h:1 is 31.0 s behind what is published",)),
    "it takes no deltas": ((replica(None),), ()),
    "nothing available": ((replica(state="LOADING"),), ("m on h:1 has no version available",)),
    "no answer": ((replica(error="UNAVAILABLE"),), ("m on h:1 does not answer: UNAVAILABLE",)),
    "another model": (
        (replica(error="NOT_FOUND: m"),),
        ("m on h:1 does not serve this model: NOT_FOUND: m",),
    ),
    "a name that stands for none": ((), ("no replica of m is known",)),
}


TIMED_OUT = Trouble(
    Code.STORE, "the store cannot be read", "s3://b/m/head.json: 500", datetime.now(timezone.utc)
)


@pytest.mark.parametrize("case", FRESH)
def test_a_fleet_is_fresh(case: str) -> None:
    replicas, expected = FRESH[case]
    model = ModelView("m", "/m", "", 1, 5, None, (), False, replicas)
    assert FleetView(datetime.now(timezone.utc), (model,)).why_not_fresh(30.0) == expected


READY = {
    "behind for ever": (replace(replica(1e6), is_ready=True), ""),
    "an update got no response": (replace(replica(error="DEADLINE_EXCEEDED"), is_ready=True), ""),
    "not caught up": (replica(), "m on h:1 is at 5, and has not caught up since it started"),
    "nothing available": (replica(state="LOADING"), "m on h:1 has no version available"),
    "no answer": (replica(error="UNAVAILABLE"), "m on h:1 does not answer: UNAVAILABLE"),
}


@pytest.mark.parametrize("case", READY)
def test_a_replica_is_ready_whatever_all_of_them_share(case: str) -> None:
    each, why = READY[case]
    store = StoreView("s3://b/m", 400.0, TIMED_OUT, ())
    model = ModelView("m", "/m", "/m does not exist", 1, 5, None, (), False, (each,), store=store)
    assert FleetView(datetime.now(timezone.utc), (model,)).why_not_ready() == ((why,) if why else ())


def test_a_model_without_replicas_is_not_ready() -> None:
    model = ModelView("m", "/m", "", 1, 5, None, (), False, ())
    assert FleetView(datetime.now(timezone.utc), (model,)).why_not_ready() == ("no replica of m is known",)


def test_what_differs_or_cannot_be_seen_is_not_fresh() -> None:
    found = Audited(5, 1, (Chunk("table", 0, 4),))
    other = ReplicaView("m", "h:2", True, "", replica().versions, found, is_ready=True)
    model = ModelView("m", "/m", "/m does not exist", 1, 5, None, (), False, (replica(), other))
    view = FleetView(datetime.now(timezone.utc), (model,))
    assert view.wrong() == ("m on h:2 does not hold what was published",)
    assert view.why_not_fresh(30.0) == (*view.wrong(), "/m does not exist")
    assert view.wrong()[0] in view.why_not_ready()


def test_a_store_from_which_nothing_came_for_long_is_a_reason() -> None:
    """Nobody knows what was published since, or whether somebody has emptied it."""
    why = "s3://b/m cannot be fetched: the store cannot be read: s3://b/m/head.json: 500"
    why += "; m is as its store was 400 s ago"
    store = StoreView("s3://b/m", 400.0, TIMED_OUT, ())
    served = ModelView("m", "/m", "", 1, 5, None, (), False, (replica(),), store=store)
    at = datetime.now(timezone.utc)
    assert FleetView(at, (served,)).why_not_fresh(30.0) == (why,)
    assert FleetView(at, (served,)).why_not_fresh(500.0) == (), "for a moment it is none"
    slow = replace(served, store=replace(store, trouble=None))
    assert FleetView(at, (slow,)).why_not_fresh(30.0) == (), "a large base comes"
    empty = ModelView("m", "/m", "/m does not exist", None, None, None, (), False, (replica(),), store=store)
    assert FleetView(at, (empty,)).why_not_fresh(500.0) == ("/m does not exist", why)


def test_replicas_that_are_gone_leave_the_metrics() -> None:
    """A headless service has new addresses each day."""
    there = [replica()]

    def view() -> FleetView:
        return FleetView(
            datetime.now(timezone.utc), (ModelView("m", "/m", "", 1, 5, None, (), False, tuple(there)),)
        )

    metrics = Metrics(view)
    for address in ("h:1", "h:2"):
        metrics(
            AgentEvent(EventKind.APPLIED, "", "m", address, rows=1, deltas=1, seconds=0.1, behind_seconds=0.1)
        )
    metrics(AgentEvent(EventKind.FAILED, "", "m", "h:2"))
    metrics(AgentEvent(EventKind.UNSEEN, "", "m"))
    told = samples(metrics)
    assert {labels["replica"] for labels in told} == {"h:1", ""}, "and those of the model itself"
    there.append(replica(address="h:2"))
    metrics(AgentEvent(EventKind.FAILED, "", "m", "h:2"))
    assert {labels["replica"] for labels in samples(metrics)} == {"h:1", "h:2", ""}, "it is back"


def samples(metrics: Metrics) -> list[dict[str, str]]:
    """The labels of every sample that names a replica."""
    families = text_string_to_metric_families(metrics.text().decode())
    return [sample.labels for family in families for sample in family.samples if "replica" in sample.labels]


def test_a_view_that_fails_leaves_out_a_second_and_not_all_that_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_view, "PERIOD_S", 0.01)
    looks = Event()
    stop = Event()

    def view() -> FleetView:
        if not looks.is_set():
            looks.set()
            raise RuntimeError("once")
        stop.set()
        return FleetView(datetime(2026, 3, 1, tzinfo=timezone.utc), ())

    recorder = Recorder(view)
    Thread(target=recorder.follow, args=(stop,), daemon=True).start()
    assert stop.wait(30)
    assert "missing: once" in caplog.text
