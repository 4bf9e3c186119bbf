"""Events as lines: a delta is one, whoever went first; a rollback stays however much comes after it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from msgspec.structs import replace

from serving.agent.http import seconds
from serving.agent.journal import AgentEvent, EventKind, Journal, Line, lines

NOON = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)


def event(what: EventKind, message: str, after_s: float = 0.0, **fields: Any) -> AgentEvent:
    return replace(AgentEvent(what, message, "m"), at=NOON + timedelta(seconds=after_s), **fields)


def applied(replica: str, position: int, after_s: float, *, deltas: int = 1) -> AgentEvent:
    return event(
        EventKind.APPLIED,
        f"version 1 is at position {position}: {deltas} deltas, {deltas * 5} rows",
        after_s,
        replica=replica,
        position=position,
        deltas=deltas,
        rows=deltas * 5,
        behind_seconds=after_s,
    )


def read(*events: AgentEvent, most: int = 30) -> tuple[Line, ...]:
    journal = Journal()
    for each in events:
        journal.write(each)
    return lines(journal.last(), most, seconds)


def test_a_delta_is_one_line_with_its_canary() -> None:
    (line,) = read(
        event(EventKind.CANARY, "goes first, to 7", replica="r2", position=7),
        applied("r2", 7, 0.1),
        event(EventKind.APPROVED, "position 7 is approved: r2 passed 3 golden requests", 0.2, position=7),
        applied("r1", 7, 0.3, deltas=4),
        applied("r3", 7, 0.4),
    )
    assert (line.where, line.what, line.is_trouble) == ("3 replicas", EventKind.APPLIED, False)
    assert line.text == "position 7: 1 delta, 5 rows; r2 passed 3 golden requests"
    assert line.aside == "served after 100 ms to 400 ms"


def test_a_canary_that_is_not_approved_yet_went_first() -> None:
    goes = event(EventKind.CANARY, "goes first, to 7", replica="r2", position=7)
    (line,) = read(goes, applied("r2", 7, 0.1))
    assert line.text == "position 7: 1 delta, 5 rows; r2 went first"


def test_one_event_is_a_line_in_its_own_words() -> None:
    (line,) = read(applied("r1", 7, 0.1))
    assert (line.where, line.text) == ("r1", "version 1 is at position 7: 1 deltas, 5 rows")
    went, waits = read(
        event(EventKind.CANARY, "goes first, to 7", replica="r2", position=7),
        event(EventKind.CANARY, "an operator decides", -1.0),
    )
    assert (went.text, waits.text) == ("goes first, to 7", "an operator decides")


def test_deltas_and_models_are_lines_of_their_own() -> None:
    other = replace(applied("r1", 7, 0.2), model="other")
    assert len(read(applied("r1", 7, 0.1), applied("r1", 8, 0.2), other)) == 3


def test_the_same_on_many_replicas_is_one_line_if_it_is_of_one_minute() -> None:
    failed = [event(EventKind.FAILED, "gone", number, replica=f"r{number}") for number in range(5)]
    (line,) = read(*failed)
    assert (line.where, line.text, line.is_trouble) == ("5 replicas", "gone", True)
    assert len(read(*failed, event(EventKind.FAILED, "gone", 300.0, replica="r1"))) == 2


def test_a_rollback_stays_visible() -> None:
    rolled_back = event(EventKind.ROLLED_BACK, "rolled back to the values of 3: NaN", position=3)
    later = [applied(f"r{number}", position, position) for position in range(5, 100) for number in range(30)]
    found = read(rolled_back, *later)
    assert len(found) == 31
    assert found[-1].text == rolled_back.message
    again = event(EventKind.ROLLED_BACK, "rolled back to the values of 9: NaN", 98.5, position=9)
    assert [line.text for line in read(rolled_back, *later, again) if line.is_trouble] == [again.message]


def test_what_one_replica_repeats_crowds_out_no_other_kind() -> None:
    base = event(EventKind.BASE_WANTED, "a new base is needed")
    failed = [event(EventKind.FAILED, f"gone {number}", number) for number in range(500)]
    journal = Journal()
    for each in (base, *failed):
        journal.write(each)
    assert base in journal.last()
    assert len(journal.last()) < 200, "and memory is bounded"
