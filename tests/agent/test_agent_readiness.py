"""When a server may get requests: nothing that all replicas share takes one away, or keeps one out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.delta.spans import Span
from exporter.publish.model import Log, Model
from exporter.publish.served import Served
from serving.agent.readiness import Readiness
from serving.agent.rollout import Observed, Refusal
from serving.status import VersionState

LINE = "line"


def log(*spans: tuple[int, int], limit: int | None = None) -> Model:
    return Model({LINE: Log(LINE, tuple(Span(*span) for span in spans), limit)}, 1)


def at(position: int | None, number: int = 1, *, lineage: str = LINE) -> Observed:
    state = VersionState.AVAILABLE
    return Observed().answered([Served(number, state, position, position, lineage)], 0.0)


def refusing(observed: Observed, *spans: tuple[int, int]) -> Observed:
    for span in spans:
        observed = observed.refused(Refusal(LINE, Span(*span), "damaged", 0.0))
    return observed


LOADING = Observed().answered([Served(1, VersionState.LOADING)], 0.0)
THREE = log((0, 1), (1, 2), (2, 3))
UNSEEN = Model(problem="its volume is not mounted")
VAIN = "a call that fails"
SILENT = "no response"
Step = tuple[Observed, Model] | str
STORIES: dict[str, tuple[list[Step], bool]] = {
    "never asked": ([], False),
    "it loads": ([(LOADING, THREE)], False),
    "it is where the newest delta leads": ([(at(3), THREE)], True),
    "it takes no deltas": ([(at(None), Model(newest_version=7))], True),
    "it lacks deltas": ([(at(0), THREE), (at(2), THREE)], False),
    "it has caught up": ([(at(0), THREE), (at(3), THREE)], True),
    "more is published while it catches up": ([(at(0), log((0, 1))), (at(1), THREE)], True),
    "a hold comes while it catches up": ([(at(0), THREE), (at(1), log((0, 1), (1, 2), limit=1))], True),
    "behind a hold": ([(at(1), log((0, 1), (1, 2), limit=1))], True),
    "it lacks what the canary has approved": ([(at(0), log((0, 1), (1, 2), limit=1))], False),
    "the next delta is damaged": ([(at(1), THREE), (refusing(at(1), (1, 2)), THREE)], True),
    "there is a way around it": ([(refusing(at(1), (1, 3)), log((1, 2), (2, 3), (1, 3)))], False),
    "nothing can be seen": ([(at(0), UNSEEN)], True),
    "its log is not published here": ([(at(0, lineage="other"), THREE)], True),
    "a call fails, and it stands still": ([(at(0), THREE), VAIN, (at(0), THREE)], True),
    "a call fails, and it has moved": ([(at(0), THREE), VAIN, (at(1), THREE)], False),
    "a call fails, and the server with it": ([(at(0), THREE), VAIN, SILENT, (at(0), THREE)], False),
    "ready, then a damaged delta": ([(at(3), THREE), (at(3), log((3, 4)))], True),
    "ready, then the volume goes": ([(at(3), THREE), (at(3), UNSEEN)], True),
    "ready, then a new base": ([(at(3), THREE), (at(2, 2), log((2, 3)))], True),
    "ready, then silent": ([(at(3), THREE), SILENT], False),
    "back, where it was": ([(at(3), THREE), SILENT, (at(3), THREE)], True),
    "back, and others went on": ([(at(2), log((0, 2))), SILENT, (at(2), THREE)], False),
    "it restarted unnoticed": ([(at(3), THREE), (at(0), THREE)], False),
    "it restarted, and caught up": ([(at(3), THREE), (at(0), THREE), (at(3), THREE)], True),
    "it restarted before a damaged delta": ([(at(3), THREE), (refusing(at(1), (1, 2)), THREE)], True),
    "it restarted with an older version": ([(at(3, 2), THREE), (at(0), THREE)], False),
    "nothing is available any more": ([(at(3), THREE), (LOADING, THREE)], False),
}


def told(steps: list[Step]) -> Readiness:
    found = Readiness()
    for step in steps:
        if step == VAIN:
            found = found.sent_in_vain(1)
        elif step == SILENT:
            found = Readiness()
        else:
            assert not isinstance(step, str)
            found = found.seen(*step)
    return found


@pytest.mark.parametrize("story", STORIES)
def test_a_server_is_ready_once_it_has_caught_up(story: str) -> None:
    steps, is_ready = STORIES[story]
    assert told(steps).is_ready is is_ready


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_it_becomes_ready_and_stays_so_whichever_deltas_are_damaged(
    good: list[bool], start: int, hold: int
) -> None:
    """A server that takes or refuses whatever it may, a delta at a time, ends ready, and once is for good."""
    published = log(*((n, n + 1) for n in range(len(good))), limit=hold)
    state, found = Readiness(), []
    for observed in lives(good, min(start, len(good)), hold):
        state = state.seen(observed, published)
        found.append(state.is_ready)
    assert found[-1]
    assert found == sorted(found)


def lives(good: list[bool], position: int, hold: int) -> Iterator[Observed]:
    yield at(position)
    while position < min(len(good), hold):
        if not good[position]:
            yield refusing(at(position), (position, position + 1))
            return
        position += 1
        yield at(position)
