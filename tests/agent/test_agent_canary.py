"""Every decision of a canary: the hold, the replicas, the trial under way and the time give one action."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.delta.spans import Span
from exporter.publish.model import Log
from exporter.publish.served import Served
from serving.agent.canary import (
    Action,
    Approve,
    Go,
    Idle,
    Judge,
    Learn,
    RollBack,
    Trial,
    decide,
)
from serving.agent.rollout import Observed, Refusal
from serving.status import VersionState

Member = tuple[str, Observed]

LINE = "line"
NOW = 100.0
PATIENCE_S = 30.0


def log(*ends: int, limit: int | None, is_canary: bool = True) -> Log:
    """Deltas from 0 to each end in turn."""
    starts = (0, *ends)
    spans = tuple(Span(start, end) for start, end in zip(starts, ends, strict=False))
    return Log(LINE, spans, limit, is_canary and limit is not None, base=0)


def at(position: int | None, number: int = 1, lineage: str = LINE, **more: object) -> Served:
    return replace(Served(number, VersionState.AVAILABLE, position, position, lineage), **more)


def replica(name: str, *versions: Served | int) -> Member:
    known = [at(version) if isinstance(version, int) else version for version in versions]
    return (name, Observed().answered(known, NOW))


def down(name: str, *versions: int) -> Member:
    return (name, replica(name, *versions)[1].failed("UNAVAILABLE", NOW, 0.0))


def away(name: str, *versions: Served | int) -> Member:
    """Nothing listened when it was called, nor does anything since."""
    known = replica(name, *versions)[1].failed("UNAVAILABLE", NOW, 0.0, was_sent=False)
    return (name, known.failed("UNAVAILABLE", NOW, 0.0))


def refusing(name: str, position: int, *pair: int, ago: float = 0.0) -> Member:
    refusal = Refusal(LINE, Span(*pair), "damaged", NOW - ago)
    return (name, replica(name, position)[1].refused(refusal).answered([at(position)], NOW))


def trial(address: str, ago: float = 0.0, **more: object) -> Trial:
    return replace(Trial(1, address, NOW - ago), **more)


UNASKED = ("z", Observed())
A0, A1, A2, B0, B1, B2, C1 = (
    *(replica("a", position) for position in (0, 1, 2)),
    *(replica("b", position) for position in (0, 1, 2)),
    replica("c", 1),
)
HELD = log(1, 2, 3, limit=1)
STUCK = True
DECISIONS: dict[str, tuple[Log, list[Member], Trial | None, bool, Action]] = {
    "a person holds it": (
        log(1, 2, limit=1, is_canary=False),
        [A1],
        None,
        True,
        Idle("an operator decides: the hold is at 1"),
    ),
    "a hold that nobody can read": (
        log(1, 2, limit=-1, is_canary=False),
        [A1],
        None,
        True,
        Idle("an operator decides: the hold cannot be read"),
    ),
    "a person holds it while one is judged": (
        log(1, 2, limit=1, is_canary=False),
        [A2, B1],
        trial("a"),
        True,
        Idle("an operator decides: the hold is at 1"),
    ),
    "no hold, one was never asked": (
        log(1, 2, limit=None),
        [A1, UNASKED],
        None,
        True,
        Idle("some replicas have not been asked yet"),
    ),
    "no hold, no replica is known yet": (
        log(1, 2, limit=None),
        [],
        None,
        True,
        Idle("some replicas have not been asked yet"),
    ),
    "no hold: nobody is sent back": (
        log(1, 2, limit=None),
        [A1, B2, replica("c", 0)],
        None,
        True,
        Approve(None, 2),
    ),
    "no hold: one that is down has no say": (
        log(1, 2, limit=None),
        [A1, down("b", 2)],
        None,
        True,
        Approve(None, 1),
    ),
    "no hold: what is on trial is not approved by lifting it": (
        log(1, 2, 3, limit=None),
        [A1, B2],
        trial("b"),
        True,
        Approve(None, 1),
    ),
    "no hold: the one on trial is the only one": (
        log(1, 2, 3, limit=None),
        [B2],
        trial("b"),
        True,
        Approve(None, 1),
    ),
    "no hold, a new log that nobody has loaded": (
        Log("new", (), None, base=7),
        [A1, B1],
        None,
        True,
        Approve(None, 7),
    ),
    "no hold, nobody answers": (
        log(1, limit=None),
        [down("a", 1)],
        None,
        True,
        Idle("no replica reports its position", STUCK),
    ),
    "all is approved": (log(1, limit=1), [A1, B1], None, True, Idle("all is approved, up to 1")),
    "an agent begins: who was not asked yet may stand beyond the hold": (
        HELD,
        [A1, UNASKED],
        None,
        True,
        Idle("some replicas have not been asked yet"),
    ),
    "an agent begins: all were asked, one is down": (HELD, [A1, down("b", 1)], None, True, Go("a", 3)),
    "one that is new holds up no trial": (HELD, [A1, UNASKED], trial("a"), True, Go("a", 3)),
    "no replica is known: another agent may see some": (
        HELD,
        [],
        None,
        True,
        Idle("no replica can go first: they refuse, or do not answer", STUCK),
    ),
    "one lags behind what is approved": (
        log(1, limit=1),
        [A0, B1],
        None,
        True,
        Idle("all is approved, up to 1"),
    ),
    "something new, answers are unknown": (HELD, [A1, B1], None, False, Learn("a", 1, 1)),
    "they are asked of one that stands there": (HELD, [A0, B1], None, False, Learn("b", 1, 1)),
    "nobody stands there": (HELD, [A0, B0], None, False, Go("a", 3)),
    "something new": (HELD, [B1, A1], None, True, Go("a", 3)),
    "the one on trial goes on": (HELD, [A1, B1], trial("b", 29), True, Go("b", 3)),
    "the target moves on with what is published": (
        log(1, 2, 9, limit=1),
        [A1, B1],
        trial("a"),
        True,
        Go("a", 9),
    ),
    "approval ends a trial": (log(1, 2, 3, limit=2), [A2, B2], trial("b"), True, Go("a", 3)),
    "one stands beyond": (HELD, [A1, B2], None, True, Judge("b", 1, 2, 1)),
    "after the agent was killed": (HELD, [A1, B2], None, False, Judge("b", 1, 2, 1)),
    "two stand beyond: the furthest": (HELD, [A2, replica("b", 3)], None, True, Judge("b", 1, 3, 1)),
    "two at one place: the one on trial": (HELD, [A2, B2], trial("b"), True, Judge("b", 1, 2, 1)),
    "judged however long it takes": (HELD, [A1, B2], trial("b", 1000), True, Judge("b", 1, 2, 1)),
    "its time is over": (HELD, [A1, B1], trial("a", 30), True, Go("b", 3)),
    "so is that of all": (HELD, [A1, B1], trial("b", 30, lost=("a",)), True, Go("a", 3)),
    "it refuses": (HELD, [refusing("a", 1, 1, 2), B1], trial("a"), True, Go("b", 3)),
    "it refuses, and there is another way": (
        Log(LINE, (Span(1, 2), Span(1, 3)), 1, True),
        [refusing("a", 1, 1, 3), B1],
        trial("a"),
        True,
        Go("a", 3),
    ),
    "it refused long ago": (HELD, [refusing("a", 1, 1, 2, ago=60)], None, True, Go("a", 3)),
    "all refuse": (
        HELD,
        [refusing("a", 1, 1, 2), refusing("b", 1, 1, 2)],
        trial("a"),
        True,
        Idle("no replica can go first: they refuse, or do not answer", STUCK),
    ),
    "it does not answer, and may come back": (
        HELD,
        [down("a", 1), B1],
        trial("a", 29),
        True,
        Idle("waiting for a, which goes first", STUCK),
    ),
    "it was gone before it was sent anything": (HELD, [away("a", 1), B1], trial("a"), True, Go("b", 3)),
    "so is the next": (HELD, [away("a", 1), away("b", 1), C1], trial("b", dead=("a",)), True, Go("c", 3)),
    "it died on the way, and nothing listens since": (
        HELD,
        [("a", down("a", 1)[1].failed("UNAVAILABLE", NOW, 0.0, was_sent=False)), B1],
        trial("a"),
        True,
        Idle("waiting for a, which goes first", STUCK),
    ),
    "it ended without a position, before anything is approved": (
        log(1, 2, limit=0),
        [away("a", at(None)), B0],
        trial("a", approved=0),
        True,
        Go("b", 2),
    ),
    "it stood beyond, and is gone since": (
        HELD,
        [away("a", 2), B1],
        trial("a", 29),
        True,
        Idle("waiting for a, which goes first", STUCK),
    ),
    "it did not come back": (HELD, [down("a", 1), B1, C1], trial("a", 30), True, Go("b", 3)),
    "it vanished from the targets": (HELD, [B1], trial("a", 1), True, Go("b", 3)),
    "it stood beyond, and does not answer": (
        HELD,
        [down("a", 2), B1],
        trial("a", 29),
        True,
        Idle("waiting for a, which goes first", STUCK),
    ),
    "it restarted, behind the hold": (HELD, [A1, B1], trial("a", 3), True, Go("a", 3)),
    "two in a row did not survive it": (
        HELD,
        [A1, down("b", 1), C1],
        trial("b", 30, lost=("a",), dead=("a",)),
        True,
        RollBack(1, "a and b stopped answering, one after the other, when they were sent beyond 1"),
    ),
    "the second one was only slow": (
        HELD,
        [A1, B1, C1],
        trial("b", 30, lost=("a",), dead=("a",)),
        True,
        Go("c", 3),
    ),
    "none is left to tell whether it was the network": (
        HELD,
        [down("a", 1), down("b", 1)],
        trial("b", 30, lost=("a",), dead=("a",)),
        True,
        Idle("no replica can go first: they refuse, or do not answer", STUCK),
    ),
    "a new base of the log is loaded: it counts": (
        HELD,
        [replica("a", at(2), at(1, 2)), B1],
        trial("a"),
        True,
        Go("a", 3),
    ),
    "a new base is judged by its version": (
        HELD,
        [replica("a", at(1), at(2, 2)), B1],
        None,
        True,
        Judge("a", 2, 2, 1),
    ),
    "a version that is being loaded does not count": (
        HELD,
        [replica("a", at(2), at(1, 2, state=VersionState.LOADING)), B1],
        None,
        True,
        Judge("a", 1, 2, 1),
    ),
    "a replica of another log cannot go first": (
        HELD,
        [replica("a", at(1, lineage="old")), B1],
        None,
        True,
        Go("b", 3),
    ),
    "the trainer was set back: its delta is one as others": (
        log(1, 2, 5, limit=2),
        [A2],
        None,
        True,
        Go("a", 5),
    ),
}


LOADING = Served(1, VersionState.LOADING, None, None, "")
LOADS_A, LOADS_B = replica("a", LOADING), replica("b", LOADING)
NOT_UP_A, NOT_UP_B = away("a"), away("b")
FREE, AT_BASE = log(1, 2, 3, limit=None), log(1, 2, 3, limit=0)
BEYOND_A, BEYOND_B = replica("a", 3), replica("b", 3)
STARTS: dict[str, tuple[Log, list[Member], bool, Action]] = {
    "nothing is held, both load": (FREE, [LOADS_A, LOADS_B], False, Approve(None, 0)),
    "nothing is held, one loads and one is not up": (FREE, [LOADS_A, NOT_UP_B], False, Approve(None, 0)),
    "nothing is held, none is up": (
        FREE,
        [NOT_UP_A, NOT_UP_B],
        False,
        Idle("no replica reports its position", STUCK),
    ),
    "nothing is held, one serves the base": (FREE, [A0, LOADS_B], False, Approve(None, 0)),
    "nothing is held, both serve what is newest": (FREE, [BEYOND_A, BEYOND_B], False, Approve(None, 3)),
    "held at the base, both load it": (
        AT_BASE,
        [LOADS_A, LOADS_B],
        False,
        Idle("waiting for a and b to load the base"),
    ),
    "held at the base, one loads it and one is not up": (
        AT_BASE,
        [LOADS_A, NOT_UP_B],
        False,
        Idle("waiting for a and b to load the base"),
    ),
    "held at the base, none is up": (
        AT_BASE,
        [NOT_UP_A, NOT_UP_B],
        False,
        Idle("waiting for a and b to start", STUCK),
    ),
    "held at the base, one serves it": (AT_BASE, [A0, LOADS_B], False, Learn("a", 1, 0)),
    "held at the base, one serves it, and it was judged": (AT_BASE, [A0, LOADS_B], True, Go("a", 3)),
    "held at the base, both serve it": (AT_BASE, [A0, B0], True, Go("a", 3)),
    "held at the base, one was faster than the hold": (AT_BASE, [A0, BEYOND_B], True, Judge("b", 1, 3, 0)),
    "held at the base, and there is no more": (
        log(limit=0),
        [LOADS_A, LOADS_B],
        False,
        Idle("all is approved, up to 0"),
    ),
}
"""Each way in which servers and an agent with a canary can begin, on a copy that was empty or a directory."""


@pytest.mark.parametrize("name", STARTS)
def test_every_start(name: str) -> None:
    published, members, knows, expected = STARTS[name]
    action, _ = decide(published, dict(members), None, NOW, patience_s=PATIENCE_S, knows=knows)
    assert action == expected


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    published, members, before, knows, expected = DECISIONS[name]
    action, _ = decide(published, dict(members), before, NOW, patience_s=PATIENCE_S, knows=knows)
    assert action == expected


def test_a_trial_counts_from_when_its_replica_was_chosen() -> None:
    action, first = decide(HELD, dict([A1, B1]), None, NOW, patience_s=PATIENCE_S, knows=True)
    assert (action, first) == (Go("a", 3), Trial(1, "a", NOW))
    action, second = decide(HELD, dict([A1, B1]), first, NOW + 29, patience_s=PATIENCE_S, knows=True)
    assert second == first
    action, third = decide(HELD, dict([A1, B1]), first, NOW + 31, patience_s=PATIENCE_S, knows=True)
    assert (action, third) == (Go("b", 3), Trial(1, "b", NOW + 31, lost=("a",)))


def test_one_that_hangs_gives_way_at_once_and_two_in_a_row_roll_back() -> None:
    members, now = dict([A1, B1, C1]), NOW + 6
    sent = trial("a", 6)
    action, first = decide(HELD, members, sent, NOW, patience_s=PATIENCE_S, knows=True, hangs=True)
    assert (action, first) == (Go("b", 3), Trial(1, "b", NOW, lost=("a",), dead=("a",)))
    action, _ = decide(HELD, members, first, now, patience_s=PATIENCE_S, knows=True, hangs=False)
    assert action == Go("b", 3)
    action, _ = decide(HELD, members, first, now, patience_s=PATIENCE_S, knows=True, hangs=True)
    assert action == RollBack(
        1, "a and b stopped answering, one after the other, when they were sent beyond 1"
    )


@pytest.mark.parametrize("passes_first", [False, True], ids=["as it is applied", "as it is asked"])
def test_what_takes_down_one_replica_after_the_other_takes_down_two(passes_first: bool) -> None:
    """Whether they go down as they take the deltas, or once they stand beyond the hold."""
    now, before, sent = NOW, None, []
    members = {name: replica(name, 1) for name in "abcd"}
    for _ in range(500):
        now += 0.5
        action, before = decide(HELD, dict(members.values()), before, now, patience_s=PATIENCE_S, knows=True)
        match action:
            case RollBack(to, reason):
                assert to == 1
                assert reason.startswith("a and b stopped answering")
                break
            case Go(address, _):
                sent.append(address)
                members[address] = replica(address, 3) if passes_first else down(address, 1)
            case Judge(address, _, _, _):
                members[address] = down(address, 3)
    assert sent == ["a", "b"]


class World:
    """Replicas that do as they are told, or not, and a canary; `bad` is the end of the delta that is bad."""

    def __init__(self, count: int, bad: int | None) -> None:
        self.ends, self.limit, self.is_canary, self.bad = [1], None, False, bad
        self.positions = dict.fromkeys("abcdef"[:count], 0)
        self.is_down: set[str] = set()
        self.trial: Trial | None = None
        self.exposed: set[str] = set()
        self.now = NOW

    @property
    def log(self) -> Log:
        spans = tuple(Span(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False))
        return Log(LINE, spans, self.limit, self.is_canary)

    def step(self) -> Action:
        self.now += 1.0
        members = [
            down(name, position) if name in self.is_down else replica(name, position)
            for name, position in self.positions.items()
        ]
        action, self.trial = decide(
            self.log, dict(members), self.trial, self.now, patience_s=PATIENCE_S, knows=True
        )
        match action:
            case Approve(expected, position):
                assert expected == self.limit
                self.limit, self.is_canary = position, True
            case Go(address, target):
                self.move(address, target)
            case Judge(address, _, position, approved):
                assert self.positions[address] == position
                if self.bad is not None and approved < self.bad <= position:
                    self.roll_back(approved)
                else:
                    self.limit = position
            case RollBack(to, _):
                self.roll_back(to)
            case _:
                pass
        for name in self.positions:
            if self.limit is not None and name not in self.is_down and self.positions[name] < self.limit:
                self.move(name, self.limit)
        return action

    def move(self, name: str, position: int) -> None:
        self.positions[name] = position
        if self.bad is not None and position >= self.bad and position in self.ends:
            self.exposed.add(name)

    def roll_back(self, to: int) -> None:
        del to
        self.ends.append(self.ends[-1] + 1)
        self.limit, self.is_canary, self.bad = self.ends[-1], False, None


@given(st.data())
def test_whatever_happens_all_follow_what_is_good_and_one_alone_meets_what_is_bad(
    data: st.DataObject,
) -> None:
    """Replicas go down and come back, the agent is killed, deltas are published meanwhile."""
    bad = data.draw(st.none() | st.integers(2, 6))
    world = World(data.draw(st.integers(1, 4)), bad)
    for _ in range(5):
        assert isinstance(world.step(), Approve | Go | Judge | Idle)
    events = data.draw(st.lists(st.sampled_from(["", "publish", "kill", "down", "up"]), max_size=30))
    for event in [*events, *["publish"] * 6]:
        name = data.draw(st.sampled_from(sorted(world.positions)))
        if event == "publish" and not (world.limit is not None and not world.is_canary):
            world.ends.append(world.ends[-1] + 1)
        if event == "kill":
            world.trial = None
        if event == "down" and name not in world.exposed:
            world.is_down.add(name)
        if event == "up":
            world.is_down.discard(name)
        world.step()
    world.is_down.clear()
    for _ in range(200):
        world.step()
    assert set(world.positions.values()) == {world.ends[-1]}
    assert len(world.exposed) <= 1
    assert bad is None or not world.is_canary, "it was rolled back, and a person decides"
