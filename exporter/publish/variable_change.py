"""What a delta changed of a variable, as documents tell it."""

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
        """The row in words."""
        return f"{self.row} by {self.moved:.3g}" if self.moved is not None else f"{self.row}, not finite"


class VariableChange(Struct, frozen=True):
    """What a delta changed of a variable."""

    variable: str
    """Its name as served."""
    rows: int | None
    """Rows of a table; null for a variable that is replaced whole."""
    moved: float | None
    """The norm of the whole difference; null if it was not computed, is not finite, or of no numbers."""
    movers: tuple[Mover, ...] = ()
    """The rows of a table that moved furthest, the furthest first."""

    @property
    def text(self) -> str:
        """The change in words."""
        rows = "whole" if self.rows is None else count(self.rows, "row")
        moved = "" if self.moved is None else f", moved by {self.moved:.3g}"
        furthest = ", ".join(one.text for one in self.movers)
        return f"{self.variable}: {rows}{moved}" + (f"; furthest row {furthest}" if furthest else "")
