"""The algebra of a log: what fits, in which order, what may be merged and dropped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.delta.deviation import Rounded
from exporter.delta.format import DeltaHeader
from exporter.delta.spans import (
    FANOUT,
    Position,
    Span,
    check_fits,
    expendable,
    merge_due,
    merged,
    nearest_base,
    plan_chain,
)
from exporter.errors import DeltaGap, ForeignLineage, PositionUnknown, SchemaChanged, StaleDelta
from exporter.increments.history import CheckpointMarker, History
from exporter.increments.increment import CheckpointId, StoredIncrement
from exporter.increments.plan import plan_changes
from exporter.increments.trained import TrainerVersion
from exporter.options import DeltaDtype
from tests.support.increments import A, checkpoint, increment

HEADER = DeltaHeader("a", "digest", 10, 20, 200)


@dataclass(frozen=True)
class Case:
    name: str
    header: DeltaHeader
    position: int
    error: type[Exception] | None


@pytest.mark.parametrize(
    "case",
    [
        Case("first", HEADER, 10, None),
        Case("inside", HEADER, 19, None),
        Case("gap", HEADER, 9, DeltaGap),
        Case("stale", HEADER, 20, StaleDelta),
        Case("foreign", DeltaHeader("b", "digest", 10, 20, 200), 10, ForeignLineage),
        Case("schema", DeltaHeader("a", "other", 10, 20, 200), 10, SchemaChanged),
        Case("only from", DeltaHeader("a", "digest", 10, 20, 200, only_from=True), 10, None),
        Case("rounded", DeltaHeader("a", "digest", 10, 20, 200, only_from=True), 11, DeltaGap),
    ],
    ids=lambda case: case.name,
)
def test_each_reason_why_a_delta_does_not_fit_has_its_name(case: Case) -> None:
    if case.error is None:
        check_fits(case.header, lineage="a", schema_digest="digest", position=case.position)
        return
    with pytest.raises(case.error) as caught:
        check_fits(case.header, lineage="a", schema_digest="digest", position=case.position)
    assert type(caught.value) is case.error


def test_a_position_says_its_step_where_there_is_one() -> None:
    assert [str(Position(7)), str(Position(7, 3))] == ["7", "7 (step 3)"]


def test_a_span_goes_forward() -> None:
    with pytest.raises(ValueError, match="cannot lead from 5 to 5"):
        Span(5, 5)


def chain_of(ends: list[int]) -> list[Span]:
    return [Span(start, end) for start, end in zip([0, *ends], ends, strict=False)]


ends = st.lists(st.integers(1, 10_000), min_size=1, max_size=60, unique=True).map(sorted)


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], list[Span]]:
    """The ends of a log's deltas, and the deltas: the smallest, exact or not, and mergers of neighbours.

    Earlier releases published mergers that fit their first position alone.
    """
    found = draw(ends)
    spans = [replace(span, only_from=draw(st.booleans())) for span in chain_of(found)]
    for _ in range(draw(st.integers(0, 8))):
        first = draw(st.integers(0, len(found) - 1))
        last = draw(st.integers(first, len(found) - 1))
        if first < last:
            spans.append(replace(merged(spans[first : last + 1]), only_from=draw(st.booleans())))
    by_ends = {(span.start, span.end): span for span in spans}
    return found, list(by_ends.values())


@given(logs(), st.data())
def test_a_chain_leads_to_the_newest_position_from_everywhere(
    log: tuple[list[int], list[Span]], data: st.DataObject
) -> None:
    positions, spans = log
    start = data.draw(st.sampled_from([0, *positions]))
    chain = plan_chain(spans, start)
    position = start
    for span in chain:
        assert span.accepts(position)
        position = span.end
    assert position == positions[-1]
    assert len(chain) <= sum(end > start for end in positions)


@given(logs(), st.data())
def test_a_chain_reaches_every_position_exactly(
    log: tuple[list[int], list[Span]], data: st.DataObject
) -> None:
    positions, spans = log
    target = data.draw(st.sampled_from(positions))
    chain = plan_chain(spans, 0, target)
    assert chain[-1].end == target
    with pytest.raises(StaleDelta):
        plan_chain(spans, target + 1, target)


@given(ends, st.data())
def test_a_missing_delta_is_a_gap(positions: list[int], data: st.DataObject) -> None:
    spans = chain_of(positions)
    if len(spans) > 1:
        del spans[data.draw(st.integers(0, len(spans) - 2))]
        with pytest.raises(DeltaGap, match="no delta leads on"):
            plan_chain(spans, 0)


def test_a_gap_names_the_delta_after_it() -> None:
    with pytest.raises(DeltaGap) as caught:
        plan_chain([Span(10, 20), Span(9, 12)], 1)
    assert caught.value.cause == "the next delta is 9-12"


def test_a_rounded_delta_is_not_taken_from_inside() -> None:
    rounded = Span(10, 40, only_from=True)
    assert plan_chain([rounded, Span(10, 20), Span(20, 40)], 10) == (rounded,)
    assert plan_chain([rounded, Span(10, 20), Span(20, 40)], 15) == (Span(10, 20), Span(20, 40))


def test_only_neighbours_merge_and_a_merger_fits_every_state_inside() -> None:
    assert merged([Span(1, 4), Span(4, 6)]) == Span(1, 6, merged_count=2)
    for inexact in ((True, False), (False, True), (True, True)):
        parts = [Span(1, 4, only_from=inexact[0]), Span(4, 6, only_from=inexact[1])]
        assert merged(parts) == Span(1, 6, merged_count=2)
    with pytest.raises(DeltaGap, match="1-4 and 5-6 do not follow each other"):
        merged([Span(1, 4), Span(5, 6)])
    with pytest.raises(ValueError, match="nothing to merge"):
        merged([])


@given(st.integers(1, 700), st.booleans())
def test_merging_as_it_becomes_due_keeps_chains_short_and_work_small(count: int, only_from: bool) -> None:
    spans: list[Span] = []
    work = 0
    for end in range(1, count + 1):
        spans.append(Span(end - 1, end, only_from))
        while run := merge_due(spans):
            spans.append(merged(run))
            work += sum(span.merged_count for span in run)
            for span in run:
                spans.remove(span)
    magnitudes = 1
    while FANOUT**magnitudes <= count:
        magnitudes += 1
    assert len(plan_chain(spans, 0)) <= (FANOUT - 1) * magnitudes
    assert work <= count * magnitudes


def test_a_merger_of_as_many_as_are_merged_at_once_is_of_the_next_magnitude() -> None:
    """Else its rows would be merged again with the first deltas that come after it."""
    large = Span(0, FANOUT, merged_count=FANOUT)
    small = [Span(end - 1, end) for end in range(FANOUT + 1, 2 * FANOUT)]
    assert merge_due([large, *small]) == ()
    last = Span(2 * FANOUT - 1, 2 * FANOUT)
    assert merge_due([large, *small, last]) == (*small, last)


@given(logs(), st.data())
def test_what_is_expendable_is_missed_by_nobody(
    log: tuple[list[int], list[Span]], data: st.DataObject
) -> None:
    positions, spans = log
    bases = data.draw(st.lists(st.sampled_from([0, *positions]), min_size=1, max_size=3, unique=True))
    needed = data.draw(st.lists(st.sampled_from(positions), max_size=3))
    spare = expendable(spans, bases, needed=needed)
    rest = [span for span in spans if span not in spare]
    for base in bases:
        assert plan_chain(rest, base) == plan_chain(spans, base)
        for goal in needed:
            if goal >= base:
                assert plan_chain(rest, base, goal) == plan_chain(spans, base, goal)
    for position in {*positions, *needed}:
        if position >= min(bases) or position in needed:
            assert plan_chain(rest, position) == plan_chain(spans, position)


def test_the_nearest_base_is_the_one_with_the_fewest_deltas() -> None:
    spans = [Span(0, 10), Span(10, 20), Span(20, 30)]
    assert nearest_base(spans, [0, 20], 30) == 20
    assert nearest_base(spans, [0, 20], 10) == 0
    with pytest.raises(PositionUnknown, match="nothing published leads to position 5"):
        nearest_base(spans, [0, 20], 5)


# --- the way from what was published to what the trainer has ------------------------------------------------


B = increment("b", A.increment.id, 20, 30)
C = increment("c", checkpoint(10), 10, 15, generation=2)
F25 = CheckpointMarker(
    checkpoint=checkpoint(25), run="f" * 16, after=A.increment.id, is_equal=False, session="1" * 32
)
F30 = CheckpointMarker(
    checkpoint=checkpoint(30), run="f" * 16, after=B.increment.id, is_equal=True, session="1" * 32
)
RESTORED = increment("d", A.increment.id, 20, 22, generation=2)


@dataclass(frozen=True)
class WayCase:
    name: str
    published: TrainerVersion
    full: CheckpointId
    history: History
    increments: tuple[StoredIncrement, ...]
    is_known: bool = True
    awaits: bool = False


@pytest.mark.parametrize(
    "case",
    [
        WayCase("the same checkpoint", TrainerVersion(checkpoint(10)), checkpoint(10), History(), ()),
        WayCase(
            "another checkpoint",
            TrainerVersion(checkpoint(10)),
            checkpoint(20),
            History(),
            (),
            is_known=False,
        ),
        WayCase(
            "the same step, other values",
            TrainerVersion(checkpoint(10)),
            checkpoint(10, "1"),
            History(),
            (),
            False,
        ),
        WayCase("increments", TrainerVersion(checkpoint(10)), checkpoint(10), History((A, B)), (A, B)),
        WayCase(
            "the rest", TrainerVersion(checkpoint(10), A.increment.id), checkpoint(10), History((A, B)), (B,)
        ),
        WayCase(
            "all done", TrainerVersion(checkpoint(10), B.increment.id), checkpoint(10), History((A, B)), ()
        ),
        WayCase(
            "over a full checkpoint",
            TrainerVersion(checkpoint(10), A.increment.id),
            checkpoint(25),
            History((A, B), (F25,)),
            (B,),
        ),
        WayCase(
            "from a full one inside",
            TrainerVersion(checkpoint(25)),
            checkpoint(25),
            History((A, B), (F25,)),
            (B,),
        ),
        WayCase(
            "a full one that equals the end",
            TrainerVersion(checkpoint(10), A.increment.id),
            checkpoint(30),
            History((A, B), (F30,)),
            (B,),
        ),
        WayCase(
            "a full one ahead of the end",
            TrainerVersion(checkpoint(10), A.increment.id),
            checkpoint(25),
            History((A,), (F25,)),
            (),
            is_known=False,
        ),
        WayCase(
            "up to a full one whose increment is awaited",
            TrainerVersion(checkpoint(10)),
            checkpoint(25),
            History((A,), (F25,)),
            (A,),
            awaits=True,
        ),
        WayCase(
            "the awaited increment came",
            TrainerVersion(checkpoint(10), A.increment.id),
            checkpoint(25),
            History((A, B), (F25,)),
            (B,),
            awaits=True,
        ),
        WayCase(
            "awaited in vain by what is on no way to it",
            TrainerVersion(checkpoint(5)),
            checkpoint(25),
            History((A,), (F25,)),
            (),
            is_known=False,
            awaits=True,
        ),
        WayCase(
            "from a full one that was saved before the first increment",
            TrainerVersion(checkpoint(12)),
            checkpoint(12),
            History(
                (A,),
                (
                    CheckpointMarker(
                        checkpoint=checkpoint(12), run="f" * 16, after=None, is_equal=False, session="1" * 32
                    ),
                ),
            ),
            (A,),
        ),
        WayCase(
            "a fork",
            TrainerVersion(checkpoint(10), A.increment.id),
            checkpoint(10),
            History((A, C)),
            (C,),
            is_known=False,
        ),
        WayCase("a fork at its root", TrainerVersion(checkpoint(10)), checkpoint(10), History((A, C)), (C,)),
        WayCase(
            "restored without what was published last",
            TrainerVersion(checkpoint(25)),
            checkpoint(10),
            History((A, RESTORED), (F25,)),
            (A, RESTORED),
            is_known=False,
        ),
        WayCase(
            "to be restored without what was published last",
            TrainerVersion(checkpoint(25)),
            checkpoint(10),
            History((A,), (F25,)),
            (A,),
            is_known=False,
        ),
        WayCase(
            "pruned",
            TrainerVersion(checkpoint(5), "9" * 16),
            checkpoint(10),
            History((A,)),
            (A,),
            is_known=False,
        ),
    ],
    ids=lambda case: case.name,
)
def test_the_way_to_what_the_trainer_has(case: WayCase) -> None:
    plan = plan_changes(case.published, case.full, case.history, awaits_increment=case.awaits)
    assert (plan.increments, plan.is_known) == (case.increments, case.is_known)
    assert bool(plan.reason) is not case.is_known
    if case.is_known and plan.increments:
        assert plan.target.increment == plan.increments[-1].increment.id


def test_what_lies_before_a_full_checkpoint_is_no_state_of_it() -> None:
    """Until its increment comes there is nothing to do; then the way goes on from where it ended."""
    history = History((A,), (F25,))
    published = plan_changes(
        TrainerVersion(checkpoint(10)), checkpoint(25), history, awaits_increment=True
    ).target
    assert published == TrainerVersion(checkpoint(10), A.increment.id)
    assert plan_changes(published, checkpoint(25), history, awaits_increment=True).is_nothing
    assert not plan_changes(published, checkpoint(25), history).is_nothing
    assert plan_changes(published, checkpoint(25), History((A, B), (F25,))).increments == (B,)


def test_rows_that_are_rounded_as_the_next_ones_count_as_exact() -> None:
    rounded = TrainerVersion(checkpoint(10), rounded=Rounded(DeltaDtype.INT8, 3, 0.1))
    assert rounded.exact_but_for(DeltaDtype.INT8).is_exact
    assert [rounded.exact_but_for(dtype) for dtype in (DeltaDtype.BFLOAT16, None)] == [rounded] * 2
