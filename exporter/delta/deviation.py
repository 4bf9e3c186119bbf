"""The distance between served rows and the trainer's, as in manifests and documents, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct, field

from exporter.options import DeltaDtype, OnWild
from exporter.wire.json_documents import Count, Measure, Moment, Text, doc

if TYPE_CHECKING:
    from exporter.delta.format import Change, Rows
    from exporter.wire.dtypes import Array


class LeftOut(Struct, frozen=True, omit_defaults=True):
    """Rows that were not sent, and their distances from the trainer's, as Euclidean norms."""

    bound: Annotated[Measure, doc("a number that is greater than each row's distance")]
    rows: Annotated[Count, doc("the number of rows")]
    largest: Annotated[Measure, doc("the largest distance of a row")]
    since: Annotated[
        Moment | None, doc("when the oldest began to wait; absent: neither time nor size is limited")
    ] = None
    wild: Annotated[Count, doc("the number of these rows beyond `--max-norm`; absent: none")] = 0


class Rounded(Struct, frozen=True):
    """Rows that are served rounded."""

    dtype: Annotated[DeltaDtype, doc("the type that they were rounded to")]
    rows: Annotated[Count, doc("the number of rows")]
    largest: Annotated[Measure, doc("the largest absolute error of an element")]

    def since(self, before: Rounded | None) -> Rounded:
        """Return this record with the rows added that were rounded `before` (None: no rows).

        The number of rows is an upper bound, as a row may count twice; the largest error is the larger of
        both. A record of another type is ignored.
        """
        if before is None or before.dtype is not self.dtype:
            return self
        return Rounded(self.dtype, self.rows + before.rows, max(self.largest, before.largest))


class Used(Struct, frozen=True):
    """The part of all changes that a delta sends."""

    sent: Annotated[Count, doc("the planned size of the delta in bytes")]
    changes: Annotated[Count, doc("the bytes that all changes would have taken")]
    due: Annotated[Count, doc("the bytes that are sent whatever the budget")]
    share: Annotated[Measure, doc("the sent part of the sum of all rows' distances, from 0 to 1")]


class Budgeted(Used, frozen=True):
    """The use that a delta made of its `--delta-budget`."""

    allowed: Annotated[Count, doc("the size limit of the delta in bytes")]
    planned: Annotated[Moment, doc("the time when it was planned")]
    seconds: Annotated[Measure, doc("the time since the delta before it, or since the base")]

    @property
    def excess(self) -> int:
        """The bytes by which the rows that had to be sent exceed the budget; 0 if they do not."""
        return max(0, self.due - self.allowed)


class WildRows(Struct, frozen=True):
    """Rows of a table whose Euclidean norms exceed the table's bound."""

    table: Annotated[Text, doc("the variable that holds them")]
    rows: Annotated[Count, doc("the number of rows")]
    row: Annotated[Count, doc("the number of the row with the largest norm")]
    norm: Annotated[Measure, doc("that row's norm; the greatest number if it is infinite")]
    bound: Annotated[Measure, doc("the bound of the table")]
    held: Annotated[bool, doc("true: servers keep the rows that they have")]

    @property
    def said(self) -> str:
        """One sentence about these rows, for a person.

        It names the table and the row with the largest norm, and says whether the rows are held.
        """
        rows, kept = f"{self.rows} row{'s' * (self.rows != 1)}", "; servers keep what they have of them"
        found = (
            f"{rows} of {self.table!r} beyond the norm {self.bound:.3g}: row {self.row} has {self.norm:.3g}"
        )
        return found + kept * self.held


class Tolerance(Struct, frozen=True):
    """The permitted distance of served rows from the trainer's: below `bound`, and `delta_dtype`'s rounding.

    `room` is the size limit of the delta in bytes (None: no limit), kept as far as that is possible: the rows
    that are furthest from the served ones are sent first. Rows that wait since before `overdue`, in seconds
    since 1970, are not held back. `norms` are the bounds of rows' norms by table; `on_wild` decides about
    rows beyond them.
    """

    bound: float = 0.0
    delta_dtype: DeltaDtype | None = None
    room: int | None = None
    overdue: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    on_wild: OnWild = OnWild.WARN

    @property
    def counts_time(self) -> bool:
        """True if a delta must record when rows began to wait: with a size limit, or with `overdue`."""
        return self.room is not None or self.overdue is not None

    @property
    def is_nothing(self) -> bool:
        """True if everything except `overdue` has its default.

        Served values must then equal the trainer's bit for bit, and no norms are checked.
        """
        return self == Tolerance(overdue=self.overdue)


class Divided(Struct, frozen=True):
    """The `changes` to send: without the rows that are held back, others rounded.

    By table, `held_back` has the rows left out, with the trainer's values, `since` when each began to wait
    (only if time matters), and `stale` the numbers int64 [n] of all rows that will differ from the trainer's.
    `left_out`, `rounded` and `used` are None if there is nothing to report.
    """

    changes: dict[str, Change]
    left_out: LeftOut | None = None
    rounded: Rounded | None = None
    used: Used | None = None
    wild: tuple[WildRows, ...] = ()
    held_back: Mapping[str, Rows] = field(default_factory=dict)
    since: Mapping[str, Array] = field(default_factory=dict)
    stale: Mapping[str, Array] = field(default_factory=dict)
