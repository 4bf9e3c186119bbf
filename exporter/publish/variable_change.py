"""A delta's change of one variable, as documents show it."""

from __future__ import annotations

from msgspec import Struct

from exporter.terminal.progress import count


class Mover(Struct, frozen=True):
    """A row, and how far it moved."""

    row: int
    """The row's number in its table."""
    moved: float | None
    """The norm of the difference from the values before; null if that is not finite."""

    @property
    def text(self) -> str:
        """The row's number and its distance as a phrase: `17 by 0.25`, or `17, not finite`."""
        return f"{self.row} by {self.moved:.3g}" if self.moved is not None else f"{self.row}, not finite"


class VariableChange(Struct, frozen=True):
    """A delta's change of one variable."""

    variable: str
    """Its name as served."""
    rows: int | None
    """The number of a table's rows; null for a variable that is replaced whole."""
    moved: float | None
    """The norm of the difference; null if it was not computed, is not finite, or values are not numbers."""
    movers: tuple[Mover, ...] = ()
    """The three rows of a table that moved furthest, the furthest first."""

    @property
    def text(self) -> str:
        """The change as a phrase for people: the variable, its rows, its distance, and the furthest rows."""
        rows = "whole" if self.rows is None else count(self.rows, "row")
        moved = "" if self.moved is None else f", moved by {self.moved:.3g}"
        furthest = ", ".join(one.text for one in self.movers)
        return f"{self.variable}: {rows}{moved}" + (f"; furthest row {furthest}" if furthest else "")
