"""When the agent calls its replicas fresh, and what its metrics tell of those that are gone."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.delta.chunk_digest import Chunk
from serving.agent.audit import Audited
from serving.agent.journal import AgentEvent, EventKind
from serving.agent.metrics import Metrics
from serving.agent.view import FleetView, ModelView, ReplicaView, StoreView, VersionView


def replica(
    stale_s: float | None = 0.0, *, state: str = "AVAILABLE", error: str = "", address: str = "h:1"
) -> ReplicaView:
    version = VersionView(1, state, 5, 5, 0, stale_s, 1.0, None, "")
    return ReplicaView("m", address, not error, error, (version,))


READY = {
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


@pytest.mark.parametrize("case", READY)
def test_a_fleet_is_ready(case: str) -> None:
    replicas, expected = READY[case]
    model = ModelView("m", "/m", "", 1, 5, None, (), False, replicas)
    assert FleetView(datetime.now(timezone.utc), (model,)).why_not_ready(30.0) == expected


def test_what_differs_or_cannot_be_seen_is_not_ready() -> None:
    found = Audited(5, 1, (Chunk("table", 0, 4),))
    other = ReplicaView("m", "h:2", True, "", replica().versions, found)
    model = ModelView("m", "/m", "/m does not exist", 1, 5, None, (), False, (replica(), other))
    view = FleetView(datetime.now(timezone.utc), (model,))
    assert view.wrong() == ("m on h:2 does not hold what was published",)
    assert view.why_not_ready(30.0) == (*view.wrong(), "/m does not exist")


def test_a_store_that_cannot_be_read_is_a_reason_only_while_nothing_was_fetched() -> None:
    store = StoreView("s3://b/m", 400.0, "s3://b/m is not fetched", ())
    served = ModelView("m", "/m", "", 1, 5, None, (), False, (replica(),), store=store)
    assert FleetView(datetime.now(timezone.utc), (served,)).why_not_ready(30.0) == ()
    empty = ModelView("m", "/m", "/m does not exist", None, None, None, (), False, (replica(),), store=store)
    found = FleetView(datetime.now(timezone.utc), (empty,)).why_not_ready(30.0)
    assert found == ("/m does not exist", "s3://b/m is not fetched")


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
