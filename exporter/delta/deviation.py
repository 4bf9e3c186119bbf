"""How much served values may differ from the trainer's: rows left out of deltas, and rows rounded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from exporter.options import DeltaDtype
from exporter.wire.json_fields import Fields


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that were not sent: how many, and how far what is served stays behind, as Euclidean norms.

    Each row's distance is below `bound`; the largest of them is `largest`.
    """

    bound: float
    rows: int
    largest: float

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {"bound": self.bound, "rows": self.rows, "largest": self.largest}

    @classmethod
    def from_fields(cls, fields: Fields) -> LeftOut:
        """What `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        return cls(fields.number("bound"), fields.integer("rows"), fields.number("largest"))


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows that are served rounded to `dtype`: how many, and the largest absolute error of an element."""

    dtype: DeltaDtype
    rows: int
    largest: float

    def since(self, before: Rounded | None) -> Rounded:
        """With rows that were rounded in the same way before: at most so many, and so far off at most."""
        if before is None or before.dtype is not self.dtype:
            return self
        return Rounded(self.dtype, self.rows + before.rows, max(self.largest, before.largest))

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return {"dtype": self.dtype.value, "rows": self.rows, "largest": self.largest}

    @classmethod
    def from_fields(cls, fields: Fields) -> Rounded:
        """What `to_json` gave.

        Raises:
            FieldError: it is something else.
        """
        dtype = DeltaDtype(fields.text("dtype", _DELTA_DTYPE))
        return cls(dtype, fields.integer("rows"), fields.number("largest"))


def rounded_of(fields: Fields) -> Rounded | None:
    """What a document says of rows that were rounded, None if it says nothing."""
    return None if fields.document.get("rounded") is None else Rounded.from_fields(fields.object("rounded"))


_DELTA_DTYPE = re.compile("|".join(dtype.value for dtype in DeltaDtype))
