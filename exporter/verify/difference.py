"""The result of a comparison of outputs, without the comparison itself: results of an export use it."""

from __future__ import annotations

from msgspec import Struct


class Difference(Struct, frozen=True):
    """The largest difference found in one output: |a - b| / max(1, |a|); for other types 0 or infinity."""

    signature: str
    output: str
    max_error: float
