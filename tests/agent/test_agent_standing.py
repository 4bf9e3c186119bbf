"""What the agent says first: the worst state; and that all is well only if every replica is at the newest."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.delta.chunk_digest import Chunk
from exporter.delta.spans import Span
from exporter.publish.hold import HeldBy
from exporter.publish.judge import Code, Level
from exporter.publish.model import Rollback
from exporter.publish.served import ServedTables
from serving.agent.audit import Audited
from serving.agent.puller import Trouble
from serving.agent.rollout import Quarantined
from serving.agent.standing import FleetStanding, assess, natural
from serving.agent.view import CanaryView, FleetView, ModelView, ReplicaView, StoreView, VersionView

FRESH_WITHIN_S = 30.0


def replica(address: str = "r1:8500", *, error: str = "", **fields: Any) -> ReplicaView:
    """A replica at position 120, as far as `fields` do not say otherwise."""
    version = VersionView(40, "AVAILABLE", 120, 120, 0, 0.0, 1.0, None, "", 0.0)
    return ReplicaView("m", address, not error, error, (replace(version, **fields),))


def model(*replicas: ReplicaView, **fields: Any) -> ModelView:
    """A model with 120 as its newest position, as far as `fields` do not say otherwise."""
    usual = ModelView("m", "/m", "", 40, 120, None, (), False, replicas, published=120)
    return replace(usual, **fields)


def found(*models: ModelView) -> FleetStanding:
    return assess(FleetView(datetime.now(timezone.utc), models), FRESH_WITHIN_S)


HELD = {"hold": 65, "position": 65, "waiting": 3, "is_held": True}
AT_65 = {"position": 65, "step": 65}
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def trouble(code: Code, text: str) -> Trouble:
    return Trouble(code, text, "s3://b/m/head.json: 500", AT)


BY_ANN = HeldBy(65, "ann@web-1", datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc), "NaN in scores")
DIFFERS = Audited(120, 1, (Chunk("table", 0, 4),))
OF_ONE: dict[str, tuple[ReplicaView, Code]] = {
    "at the newest": (replica(), Code.FRESH),
    "down": (replica(error="UNAVAILABLE: gone"), Code.DOWN),
    "without the model": (replica(error="NOT_FOUND: m"), Code.ABSENT),
    "not asked yet": (replace(replica(), is_answering=False), Code.UNASKED),
    "at its start": (replica(state="LOADING"), Code.LOADING),
    "it could not load": (replica(state="END", message="no memory"), Code.ABSENT),
    "behind for long": (replica(**AT_65, behind_deltas=2, stale_s=31.0), Code.LATE),
    "behind for a moment": (replica(**AT_65, behind_deltas=2, stale_s=0.2), Code.UPDATING),
    "it takes no deltas": (replica(position=None, behind_deltas=None), Code.NOT_UPDATABLE),
    "of a log that is unknown": (replica(behind_deltas=None), Code.NOT_UPDATABLE),
    "it refused a delta": (replace(replica(**AT_65, behind_deltas=1), error="bad"), Code.REFUSES),
    "a base it does not load": (replica(**AT_65, superseded_s=500.0), Code.LATE),
    "a base that it loads": (replica(**AT_65, superseded_s=3.0), Code.UPDATING),
    "wrong values": (replace(replica(), audited=DIFFERS), Code.DIFFERS),
}


@pytest.mark.parametrize("case", OF_ONE)
def test_the_state_of_a_replica(case: str) -> None:
    one, expected = OF_ONE[case]
    (each,) = found(model(one)).models
    assert each.rows[0].standing.code is expected
    assert (each.fresh == 1) is (expected is Code.FRESH)


MODELS: dict[str, tuple[ModelView, str]] = {
    "fresh": (model(replica(), replica("r2:8500")), "Every replica is fresh"),
    "held": (
        model(replica(**AT_65), **HELD),
        "Held at 65: 3 publications wait (newest 120, serving 65)",
    ),
    "held by a person": (
        model(replica(**AT_65), **HELD, held_by=BY_ANN),
        "Held at 65: 3 publications wait (newest 120, serving 65)",
    ),
    "held, at the newest": (
        model(replica(), hold=120, is_held=True),
        "Held at 120: what is published from now on waits",
    ),
    "a hold that cannot be read": (
        model(replica(), **{**HELD, "hold": -1}),
        "The hold cannot be read, so no replica is updated",
    ),
    "rolled back": (
        model(replica(**AT_65), replica("r2", position=66), **HELD, rollback=Rollback(65, 60, "NaN")),
        "Rolled back to the values of 60: 3 publications wait (newest 120, serving 65 to 66)",
    ),
    "rolled back, and nothing newer": (
        model(replica(), hold=120, is_held=True, rollback=Rollback(120, 60, "NaN")),
        "Rolled back to the values of 60: what is published from now on waits",
    ),
    "golden requests": (
        model(replica(), canary=CanaryView(120, 0.0, None, "", "score is NaN")),
        "Golden requests fail at 120",
    ),
    "a canary at work": (
        model(
            replica(**AT_65),
            replica("r2:8500"),
            hold=65,
            waiting=1,
            canary=CanaryView(65, 0.4, "r2:8500", "is judged at 120"),
        ),
        "The canary decides: 1 publication waits (newest 120, serving 65 to 120)",
    ),
    "another agent's canary": (
        model(replica(**AT_65), hold=65, waiting=1),
        "1 publication waits for a canary",
    ),
    "one is down": (
        model(replica(), replica("r2:8500", error="gone")),
        "1 of 2 replicas is down: r2:8500",
    ),
    "many are down": (
        model(replica("r0"), *(replica(f"r{number}", error="gone") for number in range(1, 12))),
        "11 of 12 replicas are down: r1, r2, r3 and 8 more",
    ),
    "all are down": (
        model(replica("r1", error="gone"), replica("r2", error="gone")),
        "None of 2 replicas answers",
    ),
    "one is late": (
        model(replica(), replica("r2", **AT_65, behind_deltas=2, stale_s=45.0)),
        "1 of 2 replicas is late: r2",
    ),
    "one takes no deltas": (
        model(replica(), replica("r2", position=None)),
        "1 of 2 replicas is not updatable: r2",
    ),
    "no replica": (model(), "No replica is known"),
    "no directory": (model(replica(), problem="/m does not exist"), "What is published cannot be seen"),
    "quarantined": (
        model(replica(**AT_65, behind_deltas=1), quarantined=(Quarantined("x", Span(65, 120), "bad"),)),
        f"Every replica refuses delta {Span(65, 120)}",
    ),
    "a base is wanted": (
        model(replica(**AT_65), base_wanted=True),
        "A new base is needed: replicas refuse a delta, and no other leads past it",
    ),
    "a store": (
        model(replica(), store=StoreView("s3://b/m", 90.0, trouble(Code.STORE, "it cannot be read"), ())),
        "It cannot be read, since 03:04:05 UTC",
    ),
    "a store, before anything was fetched": (
        model(
            problem="/m does not exist",
            store=StoreView("s3://b/m", 9.0, trouble(Code.DISK_FULL, "no space left: 7 B are needed"), ()),
        ),
        "No space left: 7 B are needed, since 03:04:05 UTC",
    ),
    "damage in a store": (
        model(replica(), store=StoreView("s3://b/m", 9.0, trouble(Code.DAMAGED, "publication 7 is bad"), ())),
        "Publication 7 is bad, since 03:04:05 UTC",
    ),
    "two publishers": (
        model(replica(), publishers=("ann@a", "ann@b")),
        "Ann@a and ann@b publish this model in turn",
    ),
    "one that restarts": (
        model(replica(), replace(replica("r2"), restarts=4)),
        "1 of 2 replicas restarts again and again: r2 (4 times)",
    ),
    "a store that went on from what was rolled back": (
        model(replica(), store=StoreView("s3://b/m", 0.0, None, ("66-80", "80-95"))),
        "2 publications of the store cannot be fetched after the rollback here",
    ),
    "an overlay that fills": (
        model(replica(tables=ServedTables(1, 1, 30)), replica("r2", tables=ServedTables(1, 1, 80))),
        "The overlay of mapped tables is 80 % full",
    ),
    "a new version": (
        model(replica(position=None), published=41, newest_version=41, position=None),
        "1 of 1 replica is late: r1:8500",
    ),
    "another log, and no newer version": (
        model(replica(**AT_65, behind_deltas=None), newest_version=40, position=None),
        "1 of 1 replica is not updatable: r1:8500",
    ),
}


def test_nobody_is_fresh_while_it_is_unknown_what_is_published() -> None:
    unseen = model(replica(), problem="/m does not exist", published=None, position=None, newest_version=None)
    standing = found(unseen)
    assert standing.headline == "What is published cannot be seen"
    assert [row.standing.code for row in standing.models[0].rows] == [Code.UNKNOWN]
    assert standing.models[0].fresh == 0


@pytest.mark.parametrize("case", MODELS)
def test_the_headline(case: str) -> None:
    one, text = MODELS[case]
    standing = found(one)
    assert standing.headline == text
    assert (standing.level is Level.GOOD) is (case == "fresh")


@pytest.mark.parametrize("rollback", [None, Rollback(65, 60, "NaN in scores")])
def test_who_holds_a_model_and_why_is_told(rollback: Rollback | None) -> None:
    one = model(replica(**AT_65), **HELD, held_by=BY_ANN, rollback=rollback)
    told = "set by ann@web-1 at 2026-01-02 03:04:05 UTC: NaN in scores"
    until = "; replicas stay there until this is typed, once the cause is mended" if rollback else ""
    assert found(one).findings[0].why == f"{told}{until}"


def test_a_store_is_to_be_asked_where_the_agent_runs() -> None:
    """From a person's own machine it may be seen, and nothing be wrong."""
    store = StoreView("s3://b/m", 90.0, trouble(Code.STORE, "it is silent"), (), read_by="agent@pod-3")
    (finding,) = found(model(replica(), store=store)).findings
    assert finding.why.endswith("; from elsewhere it may be seen: type this as agent@pod-3")
    assert finding.command == "export-model doctor s3://b/m"


def test_a_server_that_restarts_says_when_this_ends() -> None:
    (finding,) = found(model(replace(replica(), restarts=3, restarted_s=40.0))).findings
    assert finding.why.startswith("in the last ten minutes, the last time 40 s ago; its log says why")
    assert finding.why.endswith("this goes by itself within ten minutes once it stays up")


def test_an_overlay_is_a_warning_from_four_fifths_on_with_the_command_that_empties_it() -> None:
    fills = {fill: found(model(replica(tables=ServedTables(1, 1, fill)))).findings for fill in (79, 80)}
    assert not fills[79]
    (finding,) = fills[80]
    assert (finding.code, finding.level) == (Code.OVERLAY, Level.WARNING)
    assert "--new-base always --again" in finding.command


def test_a_version_that_is_loaded_is_not_late() -> None:
    one = replica(position=None)
    loading = replace(one.versions[0], number=41, state="LOADING")
    newer = {"published": 41, "newest_version": 41, "position": None}
    states = [
        found(model(replace(one, versions=versions), **newer)).models[0].rows[0].standing.code
        for versions in (one.versions, (*one.versions, loading))
    ]
    assert states == [Code.LATE, Code.UPDATING]


@pytest.mark.parametrize(
    ("asked", "said"), [("r2:8500", "r2:8500 is judged at 120"), (None, "is judged at 120")]
)
def test_what_the_canary_does_names_its_replica(asked: str | None, said: str) -> None:
    canary = CanaryView(65, 0.4, asked, "is judged at 120")
    (finding,) = found(model(replica(**AT_65), hold=65, waiting=1, canary=canary)).findings
    assert (finding.code, finding.why) == (Code.CANARY, said)


def test_a_canary_of_the_store_that_nobody_has_any_more() -> None:
    """As of a copy that was pushed into an emptied bucket, its own canary's hold with it."""
    held_by = HeldBy(65, "ann@web-1", AT, canary=True, url="s3://b/m")
    canary = CanaryView(65, 61.0, None, "a canary in s3://b/m decides: the hold is at 65")
    (finding,) = found(model(replica(**AT_65), hold=65, waiting=1, canary=canary, held_by=held_by)).findings
    assert (finding.code, finding.command) == (Code.CANARY_LATE, "export-model resume s3://b/m --lift-canary")
    assert finding.why.endswith("; if no agent has that canary, lift its hold")


def test_the_worst_comes_first_and_nothing_is_left_out() -> None:
    down = replica("r3", error="gone")
    canary = CanaryView(60, 0.0, None, "", "score is NaN")
    worst = model(replica(**AT_65), down, **HELD, rollback=Rollback(65, 60, "NaN"), canary=canary)
    states = [finding.code for finding in found(worst).findings]
    assert states == [Code.GOLDEN, Code.ROLLED_BACK, Code.DOWN]
    both = found(replace(model(replica(), down), name="a"), replace(worst, name="b"))
    assert [finding.model for finding in both.findings] == ["b", "b", "a", "b"]
    assert both.headline == "b: golden requests fail at 60"


def test_troubled_replicas_come_first_in_natural_order() -> None:
    replicas = [replica(f"r{number}:8500") for number in (10, 2, 1)]
    replicas += [replica(f"r{number}:8500", error="gone") for number in (30, 4)]
    (each,) = found(model(*replicas)).models
    assert [row.replica.address.partition(":")[0] for row in each.rows] == ["r4", "r30", "r1", "r2", "r10"]
    assert natural("10.0.9.1:80") < natural("10.0.10.1:80") < natural("a"), "addresses of any form compare"
    assert natural("9" * 5000)
