"""Plan with deltas as ranges of positions: which fit a state, which continue it, which to merge or remove.

A state of a log is a *position*. A delta is a *span* of positions, `start` to `end`: it fits every state `p`
with `start <= p < end` and brings it to `end`. A delta that rounded or left out rows (`only_from`) fits only
`p = start`. A merged delta of such deltas fits every state inside again: it holds each row that any of its
parts changed, with the value that is served at its end, and rows that were left out differ in none of these
states.

Everything here is values; the rules are those by which the served graph itself plans (the delta with the
greatest end goes first), so that servers do what the exporter promises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from msgspec import Struct

from exporter.delta.format import DeltaHeader
from exporter.errors import (
    DeltaGap,
    ForeignLineage,
    PositionError,
    PositionUnknown,
    SchemaChanged,
    StaleDelta,
)

FANOUT = 8
"""The number of neighbouring deltas of one magnitude that are merged into one of the next."""


class Position(Struct, frozen=True, order=True):
    """A state's place in a log: `position` orders publications, `step` is the training's own count."""

    position: int
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.position}" if self.step is None else f"{self.position} (step {self.step})"


class SpanLike(Protocol):
    """A delta to plan with, for example a `Span`."""

    @property
    def start(self) -> int:
        """The first position that the delta fits."""

    @property
    def end(self) -> int:
        """The position of a state after it has taken the delta."""

    @property
    def only_from(self) -> bool:
        """True if the delta fits only `start`."""

    @property
    def merged_count(self) -> int:
        """The number of publications that were merged into the delta; 1 for a delta as published."""

    def accepts(self, position: int) -> bool:
        """True if a state at `position`, of the same log and schema, may take the delta."""


class Reach:
    """The one rule for which states a delta fits, by its `start`, `end` and `only_from`."""

    __slots__ = ()

    def accepts(self: SpanLike, position: int) -> bool:
        """True if a state at `position`, of the same log and schema, may take the delta."""
        return self.start <= position < self.end and (position == self.start or not self.only_from)


class Span(Struct, Reach, frozen=True, order=True):
    """The positions before and after a delta, and the number of publications in it."""

    start: int
    end: int
    only_from: bool = False
    merged_count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a delta cannot lead from {self.start} to {self.end}")

    @classmethod
    def of(cls, header: DeltaHeader) -> Span:
        """Return the span of a delta, given its header.

        A header does not have the number of publications: `merged_count` is 1.
        """
        return cls(header.from_position, header.to_position, header.only_from)

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


SpanT = TypeVar("SpanT", bound=SpanLike)


def check_fits(header: DeltaHeader, *, lineage: str, schema_digest: str, position: int) -> None:
    """Require that a state at `position` of the log `lineage` may take the delta of a header.

    `schema_digest` is the state's.

    Raises:
        ForeignLineage: the delta is of another log.
        SchemaChanged: it was made for other variables.
        StaleDelta: it ends at `position` or before.
        DeltaGap: it begins after `position`, or fits only its first position.
    """
    span = Span.of(header)
    if header.lineage != lineage:
        raise ForeignLineage(f"delta {span} is of lineage {header.lineage!r}, expected {lineage!r}")
    if header.schema_digest != schema_digest:
        raise SchemaChanged(
            f"delta {span} was made for other variables",
            cause=f"its schema is {header.schema_digest[:12]}, expected {schema_digest[:12]}",
        )
    if span.accepts(position):
        return
    if span.end <= position:
        raise StaleDelta(f"delta {span} leads to {span.end}; the state is at {position} already")
    why = f"fits {span.start} alone" if span.start < position else f"begins at {span.start}"
    raise DeltaGap(f"delta {span} does not fit a state at {position}: it {why}")


def plan_chain(spans: Iterable[SpanT], start: int, target: int | None = None) -> tuple[SpanT, ...]:
    """Return the deltas, in order, that bring a state from `start` to `target` (None: as far as possible).

    At each position the delta with the greatest end up to `target` is next; of several, the one with the
    greatest start, which is the smallest.

    Raises:
        DeltaGap: no delta fits before `target` is reached, or (without a target) before the last delta.
        StaleDelta: `target` is before `start`.
    """
    if target is not None and target < start:
        raise StaleDelta(f"the state is at {start}, beyond {target}")
    known = [span for span in spans if span.end > start and (target is None or span.end <= target)]
    goal = max([start, *(span.end for span in known)]) if target is None else target
    chain = furthest(known, start)
    position = chain[-1].end if chain else start
    if position < goal:
        ahead = [span for span in known if span.start > position]
        next_ = min(ahead, key=lambda span: (span.start, span.end), default=None)
        found = "no delta begins there or before" if next_ is None else f"the next delta is {_text(next_)}"
        raise DeltaGap(f"no delta leads on from {position} to {goal}", cause=found)
    return chain


def furthest(spans: Collection[SpanT], start: int) -> tuple[SpanT, ...]:
    """Return the deltas, in order, that bring a state at `start` as far as possible; empty if none fits it.

    At each position the delta with the greatest end is next; of several, the one with the greatest start.
    """
    chain: list[SpanT] = []
    position = start
    while fitting := [span for span in spans if span.accepts(position)]:
        chain.append(max(fitting, key=lambda span: (span.end, span.start)))
        position = chain[-1].end
    return tuple(chain)


def reached(spans: Collection[SpanT], start: int) -> int:
    """Return the position to which the deltas bring a state at `start`; `start` itself if none fits it."""
    chain = furthest(spans, start)
    return chain[-1].end if chain else start


def merged(spans: Sequence[SpanLike]) -> Span:
    """Return the span of a delta that holds the rows of `spans`, oldest first; it fits every state inside.

    Raises:
        DeltaGap: a delta does not fit the state at the end of the previous one.
        ValueError: there are none.
    """
    if not spans:
        raise ValueError("nothing to merge")
    for before, after in pairwise(spans):
        if not after.accepts(before.end):
            raise DeltaGap(f"deltas {_text(before)} and {_text(after)} do not follow each other")
    return Span(spans[0].start, spans[-1].end, merged_count=sum(span.merged_count for span in spans))


def merge_due(spans: Iterable[SpanT]) -> tuple[SpanT, ...]:
    """Return the `FANOUT` neighbouring deltas that should be merged now, oldest first, or none.

    As in a log-structured merge tree: `FANOUT` neighbours of one magnitude (of publications, to base
    `FANOUT`) become one of the next. A reader is then at most `FANOUT - 1` deltas of each magnitude behind,
    and each row is merged once per magnitude.
    """
    run: list[SpanT] = []
    for span in reversed(_tiles(spans)):  # the newest first: they are small, and merging is due there first
        if run and _magnitude(span) != _magnitude(run[-1]):
            run = []
        run.append(span)
        if len(run) == FANOUT:
            return tuple(reversed(run))
    return ()


def expendable(
    spans: Iterable[SpanT], bases: Collection[int], *, needed: Collection[int]
) -> tuple[SpanT, ...]:
    """Return the deltas that may be removed, ordered by their ends; `bases` and `needed` are positions.

    Without these deltas, and by the same chains as with them,

    - every base still reaches the newest position and each of `needed`, if it did before;
    - every state that a base reached, and every one of `needed`, still reaches the newest position.
    """
    furthest_first = sorted(spans, key=lambda span: (span.end, span.start), reverse=True)
    newest = max([*(span.end for span in furthest_first), *bases], default=0)
    oldest_base = min(bases, default=newest)
    passed = {span.end for span in furthest_first if span.end >= oldest_base}
    kept = _followed(furthest_first, {*bases, *passed, *needed}, newest)
    for goal in {*needed} - {newest}:
        kept |= _followed(furthest_first, bases, goal)
    return tuple(span for span in furthest_first[::-1] if id(span) not in kept)


def _followed(furthest_first: Sequence[SpanLike], starts: Iterable[int], goal: int) -> set[int]:
    """Return the Python `id` of each delta on the chains from the positions `starts` towards `goal`.

    `goal` is a position. A chain may miss the goal. `furthest_first` are all deltas, greatest end and then
    greatest start first.
    """
    within = [span for span in furthest_first if span.end <= goal]
    by_start = sorted(range(len(within)), key=lambda number: within[number].start)
    begins = [within[number].start for number in by_start]
    furthest = [*accumulate(by_start, min)]  # of the deltas that begin there or before
    taken: set[int] = set()
    seen: set[int] = set()
    for start in starts:
        position = start
        while position < goal and position not in seen:
            seen.add(position)
            many = bisect_right(begins, position)
            ahead = range(furthest[many - 1] if many else len(within), len(within))
            following = next((within[n] for n in ahead if within[n].accepts(position)), None)
            if following is None:
                break
            taken.add(id(following))
            position = following.end
    return taken


def nearest_base(spans: Collection[SpanLike], bases: Iterable[int], target: int) -> int:
    """Return the position of the base from which the fewest deltas reach `target`.

    Of several, the newest. `bases` are positions. A base at `target` itself needs no deltas.

    Raises:
        PositionUnknown: no base reaches `target`.
    """
    reached = []
    for base in bases:
        try:
            reached.append((len(plan_chain(spans, base, target)), -base))
        except PositionError:
            continue
    if not reached:
        raise PositionUnknown(f"nothing published leads to position {target}")
    return -min(reached)[1]


def _tiles(spans: Iterable[SpanT]) -> list[SpanT]:
    """Return the chain of deltas that ends at the newest position, oldest first.

    Of several deltas with one end the longest is chosen. Empty without deltas.
    """
    by_end: dict[int, SpanT] = {}
    for span in spans:
        if span.end not in by_end or span.start < by_end[span.end].start:
            by_end[span.end] = span
    tiles: list[SpanT] = []
    position = max(by_end, default=0)
    while position in by_end:
        tiles.append(by_end[position])
        position = by_end[position].start
    return tiles[::-1]


def _magnitude(span: SpanLike) -> int:
    """Return the logarithm of a delta's number of publications to base `FANOUT`, rounded down."""
    count, magnitude = span.merged_count, 0
    while count >= FANOUT:
        count //= FANOUT
        magnitude += 1
    return magnitude


def _text(span: SpanLike) -> str:
    return f"{span.start}-{span.end}"
