"""How far served rows are from the trainer's, as manifests and documents tell it, and how far they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Struct, field

from exporter.options import DeltaDtype, OnWild
from exporter.wire.json_documents import Count, Measure, Moment, Text, doc


class LeftOut(Struct, frozen=True, omit_defaults=True):
    """Rows that were not sent, and how far what is served stays behind, as Euclidean norms."""

    bound: Annotated[Measure, doc("each row's distance is below it")]
    rows: Annotated[Count, doc("how many")]
    largest: Annotated[Measure, doc("the largest distance of a row")]
    since: Annotated[
        Moment | None, doc("since when the oldest of them waits; absent: neither time nor size is limited")
    ] = None
    wild: Annotated[Count, doc("how many of them are beyond `--max-norm`; absent: none")] = 0


class Rounded(Struct, frozen=True):
    """Rows that are served rounded."""

    dtype: Annotated[DeltaDtype, doc("what to")]
    rows: Annotated[Count, doc("how many")]
    largest: Annotated[Measure, doc("the largest absolute error of an element")]

    def since(self, before: Rounded | None) -> Rounded:
        """With rows that were rounded in the same way before: at most so many, and so far off at most."""
        if before is None or before.dtype is not self.dtype:
            return self
        return Rounded(self.dtype, self.rows + before.rows, max(self.largest, before.largest))


class Used(Struct, frozen=True):
    """What a delta sends of all changes."""

    sent: Annotated[Count, doc("the bytes that it was planned to hold")]
    changes: Annotated[Count, doc("the bytes that all changes would have taken")]
    due: Annotated[Count, doc("the bytes of what went whatever the budget")]
    share: Annotated[Measure, doc("which part of all rows' distances together it sends, from 0 to 1")]


class Budgeted(Used, frozen=True):
    """How a delta of `--delta-budget` used its budget."""

    allowed: Annotated[Count, doc("the bytes that it might hold")]
    planned: Annotated[Moment, doc("when it was planned")]
    seconds: Annotated[Measure, doc("how long after the delta before it, or after the base")]

    @property
    def excess(self) -> int:
        """By how many bytes what had to go exceeds the budget; 0 if it does not."""
        return max(0, self.due - self.allowed)


class WildRows(Struct, frozen=True):
    """Rows of a table whose Euclidean norm is beyond its bound."""

    table: Annotated[Text, doc("the variable that holds them")]
    rows: Annotated[Count, doc("how many")]
    row: Annotated[Count, doc("the number of the one with the largest norm")]
    norm: Annotated[Measure, doc("its norm; the greatest number if that is infinite")]
    bound: Annotated[Measure, doc("the bound of the table")]
    held: Annotated[bool, doc("true: servers keep the rows that they have")]

    @property
    def said(self) -> str:
        """A sentence about them."""
        rows, kept = f"{self.rows} row{'s' * (self.rows != 1)}", "; servers keep what they have of them"
        found = (
            f"{rows} of {self.table!r} beyond the norm {self.bound:.3g}: row {self.row} has {self.norm:.3g}"
        )
        return found + kept * self.held


class Tolerance(Struct, frozen=True):
    """How far what is served may be from the trainer's: rows by less than `bound`, and rounded.

    With `room`, a number of bytes, the delta holds no more, as far as that is possible: rows go first that
    are furthest from what is served. Rows that wait since before `overdue`, in seconds since 1970, are not
    held back. `norms` are the bounds of rows' norms by table, beyond which `on_wild` says what becomes of
    them.
    """

    bound: float = 0.0
    delta_dtype: DeltaDtype | None = None
    room: int | None = None
    overdue: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    on_wild: OnWild = OnWild.WARN

    @property
    def counts_time(self) -> bool:
        """True if it is told since when rows wait."""
        return self.room is not None or self.overdue is not None

    @property
    def is_nothing(self) -> bool:
        """True if what is served is to be the trainer's bit for bit."""
        return self == Tolerance(overdue=self.overdue)
