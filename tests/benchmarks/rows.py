"""A benchmark's result: what was measured, of what, against which target; as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.table import Table
from rich.text import Text

from exporter.terminal.progress import human_bytes


class Unit(Enum):
    """What a figure counts."""

    SECONDS = "s"
    BYTES = "B"
    RATIO = "x"
    SHARE = "of 1"
    COUNT = "of them"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure with its unit; as text in the scale that reads best."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        if self.unit is Unit.BYTES:
            return human_bytes(round(self.value))
        if self.unit is Unit.RATIO:
            return f"{self.value:.3g} x" if self.value < 100 else f"{self.value:,.0f} x"
        if self.unit is Unit.COUNT:
            return f"{self.value:,.0f}"
        if self.unit is Unit.SHARE:
            return f"{self.value:.1%}"
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if self.value >= scale:
                return f"{self.value / scale:.3g} {name}"
        return f"{self.value * 1e9:.3g} ns"


def seconds(value: float) -> Quantity:
    return Quantity(value, Unit.SECONDS)


def share(value: float) -> Quantity:
    """A part of a whole, which is 1."""
    return Quantity(value, Unit.SHARE)


def count(value: float) -> Quantity:
    """How many there are."""
    return Quantity(value, Unit.COUNT)


def bytes_(value: float) -> Quantity:
    return Quantity(value, Unit.BYTES)


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a figure: a floor if `at_least`, else a ceiling."""

    limit: Quantity
    at_least: bool = False

    def is_met_by(self, found: Quantity) -> bool:
        assert found.unit is self.limit.unit
        return found.value >= self.limit.value if self.at_least else found.value <= self.limit.value

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. The target, if there is one, bounds the ratio, else our own figure."""

    what: str
    ours: Quantity
    stock: Quantity | None = None
    ratio: Quantity | None = None
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        return self.target and self.target.is_met_by(self.ratio or self.ours)

    def as_document(self) -> dict[str, Any]:
        """The row for JSON: numbers in seconds, bytes and ratios."""
        figures = {"ours": self.ours, "stock": self.stock, "ratio": self.ratio}
        return {
            "what": self.what,
            "unit": self.ours.unit.value,
            **{name: found and found.value for name, found in figures.items()},
            "target": self.target and str(self.target),
            "met": self.is_met,
        }


def cost(what: str, ours: Quantity, stock: Quantity, *, at_most: float | None = None) -> Row:
    """Ours as a multiple of stock's: less is better."""
    ratio = Quantity(ours.value / stock.value, Unit.RATIO)
    return Row(what, ours, stock, ratio, at_most and Target(Quantity(at_most, Unit.RATIO)))


def gain(what: str, ours: Quantity, stock: Quantity, *, at_least: float | None = None) -> Row:
    """How many times faster ours is: more is better."""
    ratio = Quantity(stock.value / ours.value, Unit.RATIO)
    return Row(what, ours, stock, ratio, at_least and Target(Quantity(at_least, Unit.RATIO), at_least=True))


def bounded(what: str, ours: Quantity, *, at_most: Quantity, stock: Quantity | None = None) -> Row:
    """Ours against an absolute limit."""
    return Row(what, ours, stock, target=Target(at_most))


def table(rows: Iterable[Row]) -> Table:
    """The rows for a terminal."""
    result = Table(
        "what", title="export-model against stock TensorFlow and plain tools", title_justify="left"
    )
    for name in ("ours", "stock", "ratio", "target", "met"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(*_cells(row))
    return result


def _cells(row: Row) -> Iterator[str | Text]:
    yield row.what
    for found in (row.ours, row.stock, row.ratio, row.target):
        yield "" if found is None else str(found)
    verdict = {None: Text(""), True: Text("yes", "green"), False: Text("NO", "bold red")}
    yield verdict[row.is_met]
