"""The numbers and states of versions on a model server."""

from __future__ import annotations

from enum import IntEnum

MOST_VERSION = (1 << 63) - 1
"""The greatest number of a version: requests have an int64."""
_LONGEST_VERSION = len(str(MOST_VERSION))


def version_number(text: str) -> int | None:
    """Return the version that a text of ASCII digits means; None if it is none."""
    digits = text.lstrip("0") or text[-1:]
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_VERSION
    return int(digits) if is_number and int(digits) <= MOST_VERSION else None


class VersionState(IntEnum):
    """The state of a version (source: tensorflow_serving/apis/get_model_status.proto)."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50

    @classmethod
    def _missing_(cls, value: object) -> VersionState:
        """Return `UNKNOWN` for a number that only later servers have."""
        return cls.UNKNOWN
