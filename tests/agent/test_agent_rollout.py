"""Every decision of the agent: what is published, what was observed and the time give one action."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.delta.spans import Span, plan_chain
from exporter.publish.model import Log, Model
from exporter.publish.served import Served
from serving.agent.rollout import (
    LONGEST_BACK_OFF_S,
    Action,
    Apply,
    Audit,
    Observe,
    Observed,
    Refusal,
    RolloutPolicy,
    Wait,
    began_anew,
    differences,
    needs_base,
    next_action,
    quarantined,
)
from serving.status import VersionState

LINE = "line"
POLICY = RolloutPolicy(refresh_s=5.0)


def log(*spans: tuple[int, int], limit: int | None = None, lineage: str = LINE) -> Model:
    return Model({lineage: Log(lineage, tuple(Span(*span) for span in spans), limit)}, 0)


def version(number: int = 1, position: int | None = 0, **more: object) -> Served:
    known = Served(number, VersionState.AVAILABLE, position, position, LINE if position is not None else "")
    return replace(known, **more)


def seen(*versions: Served, at: float = 100.0) -> Observed:
    return Observed().answered(versions, at)


def refusal(start: int, end: int, at: float = 100.0, reason: str = "damaged") -> Refusal:
    return Refusal(LINE, Span(start, end), reason, at)


def spans(*pairs: tuple[int, int]) -> tuple[Span, ...]:
    return tuple(Span(*pair) for pair in pairs)


THREE = log((0, 1), (1, 2), (2, 3))
DECISIONS: dict[str, tuple[Observed, Model, Action]] = {
    "never seen": (Observed(), THREE, Observe()),
    "never seen, nothing published": (Observed(), Model(problem="unmounted"), Observe()),
    "current": (seen(version(position=3)), THREE, Wait(105.0)),
    "behind": (seen(version()), THREE, Apply(1, LINE, 3, spans((0, 1), (1, 2), (2, 3)))),
    "a merger is shorter": (
        seen(version()),
        log((0, 1), (1, 2), (0, 2), (2, 3)),
        Apply(1, LINE, 3, spans((0, 2), (2, 3))),
    ),
    "held": (seen(version()), log((0, 1), (1, 2), limit=1), Apply(1, LINE, 1, spans((0, 1)))),
    "held here": (seen(version(position=1)), log((0, 1), (1, 2), limit=1), Wait(105.0)),
    "past the hold": (seen(version(position=2)), log((0, 1), (1, 2), (2, 3), limit=1), Wait(105.0)),
    "a hold that nobody can read": (seen(version()), log((0, 1), limit=-1), Wait(105.0)),
    "a gap": (seen(version(position=1)), log((0, 1), (2, 3)), Wait(105.0)),
    "before a gap": (seen(version()), log((0, 1), (2, 3)), Apply(1, LINE, 1, spans((0, 1)))),
    "of another log": (seen(version(lineage="other")), THREE, Wait(105.0)),
    "takes no deltas": (seen(version(position=None)), THREE, Wait(105.0)),
    "the newest version first": (
        seen(version(1), version(2, 1)),
        THREE,
        Apply(2, LINE, 3, spans((1, 2), (2, 3))),
    ),
    "then the older one": (
        seen(version(1, 2), version(2, 3)),
        THREE,
        Apply(1, LINE, 3, spans((2, 3))),
    ),
    "the older one while the newest is loaded": (
        seen(version(1, 2), version(2, None, state=VersionState.LOADING)),
        THREE,
        Apply(1, LINE, 3, spans((2, 3))),
    ),
    "a version is loaded": (
        seen(version(1, 3), version(2, None, state=VersionState.LOADING)),
        THREE,
        Wait(100.05),
    ),
    "only a version that ended": (seen(version(1, 0, state=VersionState.END)), THREE, Wait(105.0)),
    "refused, and no way around: it is tried again": (
        seen(version()).refused(refusal(0, 1)).answered([version()], 100.0),
        THREE,
        Wait(101.0),
    ),
    "a refused merger, and its parts": (
        seen(version()).refused(refusal(0, 2)).answered([version()], 100.0),
        log((0, 1), (1, 2), (0, 2), (2, 3)),
        Apply(1, LINE, 1, spans((0, 1))),
    ),
    "past the refused merger's start": (
        seen(version(position=1)).refused(refusal(0, 2)).answered([version(position=1)], 100.0),
        log((0, 1), (1, 2), (0, 2), (2, 3)),
        Apply(1, LINE, 2, spans((1, 2))),
    ),
    "past the refused merger": (
        seen(version(position=2)).refused(refusal(0, 2)).answered([version(position=2)], 100.0),
        log((0, 1), (1, 2), (0, 2), (2, 3), (3, 4)),
        Apply(1, LINE, 4, spans((2, 3), (3, 4))),
    ),
    "a refusal is doubt": (seen(version()).refused(refusal(0, 1)), THREE, Observe()),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    observed, published, expected = DECISIONS[name]
    assert next_action(observed, published, POLICY, 100.0) == expected


def test_a_replica_is_looked_at_again_when_time_has_passed() -> None:
    assert next_action(seen(version(position=3)), THREE, POLICY, 105.0) == Observe()
    loading = seen(version(1, 3), version(2, None, state=VersionState.LOADING))
    assert next_action(loading, THREE, POLICY, 100.05) == Observe()


def test_a_replica_is_looked_at_often_while_a_version_is_due() -> None:
    """It may be loaded and served between two looks, and stands still until the agent knows of it."""
    newer, served = replace(THREE, newest_version=2), seen(version(1, 3))
    assert next_action(served, newer, POLICY, 100.0, new_version_at=99.0) == Wait(100.05)
    assert next_action(served, newer, POLICY, 100.05, new_version_at=99.0) == Observe()
    assert next_action(served, newer, POLICY, 100.0, new_version_at=90.0) == Wait(105.0), "it does not come"
    there = seen(version(1, 3), version(2, 3))
    assert next_action(there, newer, POLICY, 100.0, new_version_at=99.0) == Wait(105.0)


def test_a_refused_delta_is_tried_again_soon_and_then_ever_more_seldom() -> None:
    """It may be a file that a network file system shows late, and somebody may heal it."""
    observed, now, waits = seen(version()), 100.0, []
    for _ in range(9):
        observed = observed.refused(refusal(0, 1, at=now)).answered([version()], now)
        began = now
        while isinstance(action := next_action(observed, THREE, POLICY, now), Wait):
            assert now < action.until
            now = action.until
            if next_action(observed, THREE, POLICY, now) == Observe():
                observed = observed.answered([version()], now)
        assert isinstance(action, Apply)
        waits.append(now - began)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_refused_delta_that_was_healed_or_gone_around_is_forgotten() -> None:
    stuck = seen(version()).refused(refusal(0, 1)).answered([version()], 100.0)
    assert quarantined([stuck], THREE)
    assert not quarantined([stuck.moved(1, 1, 1)], THREE)
    assert not stuck.moved(1, 1, 1).refusals
    assert not stuck.answered([version(position=2)], 101.0).refusals
    assert stuck.answered([version(position=None, state=VersionState.LOADING)], 101.0).refusals
    assert stuck.answered([version(2, 1), version(1, 0)], 101.0).refusals, "the older one has yet to take it"
    elsewhere = Served(9, VersionState.AVAILABLE, 9, 9, "another log")
    assert not stuck.answered([elsewhere], 101.0).refusals, "a new base was published, and is served"


def test_back_off_doubles_spreads_and_is_bounded() -> None:
    observed, waits = Observed(), []
    for _ in range(12):
        observed = observed.failed("UNAVAILABLE", 1000.0, jitter=1.0)
        waits.append(observed.retry_at - 1000.0)
        assert next_action(observed, THREE, POLICY, 1000.0) == Wait(observed.retry_at)
        assert next_action(observed, THREE, POLICY, observed.retry_at) == Observe()
    assert waits[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert waits[-1] == LONGEST_BACK_OFF_S
    assert observed.failed("x", 0.0, jitter=0.0).retry_at == LONGEST_BACK_OFF_S / 2
    assert observed.answered([version()], 1001.0).failures == 0


def test_steps_are_taken_one_by_one_and_not_too_fast() -> None:
    slow = RolloutPolicy(step_s=2.0)
    observed = seen(version())
    assert next_action(observed, THREE, slow, 100.0, last_applied=99.0) == Wait(101.0)
    assert next_action(observed, THREE, slow, 101.0, last_applied=99.0) == Apply(1, LINE, 1, spans((0, 1)))
    moved = observed.moved(1, 1, 1)
    assert next_action(moved, THREE, slow, 103.0, last_applied=101.0) == Apply(1, LINE, 2, spans((1, 2)))


def test_what_is_current_is_audited_now_and_then() -> None:
    audits = RolloutPolicy(audit_s=60.0)
    current = seen(version(1, 3), version(2, None))
    assert next_action(current, THREE, audits, 100.0, last_audit=40.0) == Audit(1, LINE, 3)
    assert next_action(current, THREE, audits, 100.0, last_audit=41.0) == Wait(101.0)
    assert next_action(seen(version()), THREE, audits, 100.0) == Apply(
        1, LINE, 3, spans((0, 1), (1, 2), (2, 3))
    )
    assert next_action(seen(version(position=None)), THREE, audits, 100.0) == Wait(105.0)


def test_a_delta_that_every_replica_refuses_is_quarantined_and_a_base_wanted() -> None:
    stuck = seen(version()).refused(refusal(0, 1)).answered([version()], 100.0)
    past = seen(version(position=2))
    fresh = seen(version())
    assert [found.delta for found in quarantined([stuck, past], THREE)] == [Span(0, 1)]
    assert quarantined([stuck, fresh], THREE) == ()  # perhaps it is that replica alone
    assert quarantined([stuck, Observed()], THREE)  # who does not answer has no say
    assert needs_base([stuck, past], THREE)
    assert not needs_base([stuck, past], log((0, 1), (0, 2), (1, 2), (2, 3)))  # another leads past it
    assert quarantined([stuck], log((1, 2))) == ()  # it is not there any more


def test_no_base_is_wanted_for_what_stands_elsewhere() -> None:
    """A quarantined delta says nothing about versions of another log, or about those that take no deltas."""
    published = log((5, 6), (5, 7), (7, 8))
    stuck = seen(version(position=5)).refused(refusal(5, 6)).answered([version(position=5)], 100.0)
    assert needs_base([stuck, seen(version(position=3))], published), "nothing leads on from there"
    for other in (version(position=3, lineage="other"), version(position=None, lineage=LINE)):
        assert quarantined([stuck, seen(other)], published)
        assert not needs_base([stuck, seen(other)], published)


def test_what_is_told_of_two_looks() -> None:
    before = (version(1, 5), version(2, None, state=VersionState.LOADING))
    now = (version(1, 3), version(2, 6), version(3, None, state=VersionState.END, message="no such op"))
    assert [(found.number, what) for found, what, _ in differences(before, now)] == [
        (1, "restarted"),
        (2, "version"),
        (3, "version"),
    ]
    assert differences(now, now) == ()


@pytest.mark.parametrize(
    ("before", "now", "is_new"),
    [
        (version(position=3), version(position=2), True),
        (version(position=3), version(position=None, state=VersionState.LOADING), True),
        (version(position=3), version(position=None, state=VersionState.START), True),
        (version(position=3), version(position=3), False),
        (version(position=3), version(position=4), False),
        (version(position=3), version(position=None, state=VersionState.UNLOADING), False),
        (version(position=3), version(2, None, state=VersionState.LOADING), False),
        (version(position=None, state=VersionState.START), version(position=0), False),
        (
            version(position=None, state=VersionState.END),
            version(position=None, state=VersionState.LOADING),
            False,
        ),
    ],
)
def test_a_server_has_begun_anew_if_it_goes_back_or_loads_what_it_served(
    before: Served, now: Served, *, is_new: bool
) -> None:
    assert began_anew((before,), (now,)) is is_new


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=12),
    st.integers(0, 12),
    st.none() | st.integers(-1, 16),
)
def test_the_way_is_that_of_the_graph(
    drawn: list[tuple[int, int, bool]], position: int, limit: int | None
) -> None:
    """The graph takes what leads furthest within the limit; where it gets, the agent expects it."""
    deltas = tuple({Span(start, start + length, exact) for start, length, exact in drawn})
    chain = Log(LINE, deltas, limit).reach(position)
    at = position
    for span in chain:
        assert span.accepts(at)
        at = span.end
    assert limit is None or at <= limit or not chain
    if chain:
        assert [span.end for span in plan_chain(deltas, position, at)] == [span.end for span in chain]


@given(st.data())
def test_any_replica_gets_as_far_as_the_log_leads(data: st.DataObject) -> None:
    """Whatever fails or restarts: a replica that answers again becomes current."""
    count = data.draw(st.integers(1, 6))
    pairs = {(i, i + 1) for i in range(count)} | set(
        data.draw(
            st.lists(
                st.integers(0, count - 1).flatmap(
                    lambda start: st.tuples(st.just(start), st.integers(start + 1, count))
                ),
                max_size=4,
            )
        )
    )
    published = log(*sorted(pairs))
    damaged = {Span(*pair) for pair in pairs if pair[1] - pair[0] > 1 and data.draw(st.booleans())}
    position, now, observed = 0, 0.0, Observed()
    trouble = data.draw(st.lists(st.sampled_from(["", "", "fail", "restart"]), max_size=8))
    for _ in range(200):
        action = next_action(observed, published, POLICY, now)
        event = trouble.pop() if trouble else ""
        if event == "restart":
            position = 0
        match action:
            case Wait(until):
                if position == count and not trouble and observed.versions[0].position == count:
                    return
                assert until > now
                now = until
            case _ if event == "fail":
                observed = observed.failed("UNAVAILABLE", now, 0.5)
            case Observe():
                observed = observed.answered([version(position=position)], now)
            case Apply(_, _, up_to, _):
                position, bad = served(published.logs[LINE], position, up_to, damaged)
                if bad is None:
                    observed = observed.moved(1, position, position)
                else:
                    observed = observed.refused(Refusal(LINE, bad, "damaged", now))
    raise AssertionError(f"at {position} of {count}")


def served(log_: Log, position: int, up_to: int, damaged: set[Span]) -> tuple[int, Span | None]:
    """What a graph does: it takes what leads furthest within `up_to`, until one is bad."""
    for span in Log(LINE, log_.deltas, up_to).reach(position):
        if span in damaged:
            return position, span
        position = span.end
    return position, None


def test_what_waits_lies_beyond_what_is_released() -> None:
    chain = ((0, 1), (1, 2), (2, 3), (0, 3))
    for limit, released, waiting in ((None, 3, 0), (3, 3, 0), (2, 2, 1), (1, 1, 2), (-1, 0, 3)):
        published = log(*chain, limit=limit)
        found = published.logs[LINE]
        assert (found.released, found.waiting) == (released, waiting), "the merged delta is none of its own"
        assert published.newest_position == 3, "a hold does not change what is published"
    assert Model().newest_position is None
    assert Model(newest_version=7).newest_position == 7
