"""How far served rows are from the trainer's, as manifests and documents tell it, and how far they may be."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from exporter.options import DeltaDtype
from exporter.wire.json_documents import Count, Measure, doc


class LeftOut(Struct, frozen=True):
    """Rows that were not sent, and how far what is served stays behind, as Euclidean norms."""

    bound: Annotated[Measure, doc("each row's distance is below it")]
    rows: Annotated[Count, doc("how many")]
    largest: Annotated[Measure, doc("the largest distance of a row")]


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


class Tolerance(Struct, frozen=True):
    """How far what is served may be from the trainer's: rows by less than `bound`, and rounded."""

    bound: float = 0.0
    delta_dtype: DeltaDtype | None = None

    @property
    def is_nothing(self) -> bool:
        """True if what is served is to be the trainer's bit for bit."""
        return self.bound == 0 and self.delta_dtype is None
