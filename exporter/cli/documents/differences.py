"""The document that `diff` prints."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from exporter.pipeline.comparison import TableDifference, VariableDifference


class Side(Struct, frozen=True):
    """One side of a comparison."""

    label: str
    """What was compared, as it was named."""
    position: int | None
    """Its position, if it is published."""
    step: int | None
    """Its training step."""


class Differences(Struct, frozen=True):
    """The document that `diff` prints."""

    a: Side
    """The first side."""
    b: Side
    """The second side."""
    equal: bool
    """True if both hold the same variables with the same bits."""
    compared: int
    """How many variables both have."""
    variables: Sequence[VariableDifference]
    """Those that differ."""
    tables: Sequence[TableDifference]
    """Tables by keys that differ."""
    only_a: Sequence[str]
    """Names that only the first side has."""
    only_b: Sequence[str]
    """Names that only the second side has."""
