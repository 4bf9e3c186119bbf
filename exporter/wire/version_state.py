"""The states of a version on a model server."""

from __future__ import annotations

from enum import IntEnum


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
