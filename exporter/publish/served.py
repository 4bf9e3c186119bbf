"""The versions that a model server reports: their numbers, states and positions."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

MOST_VERSION = (1 << 63) - 1
"""The greatest number of a version: requests have an int64."""
_LONGEST_VERSION = len(str(MOST_VERSION))


def version_number(text: str) -> int | None:
    """Return the version that a text of ASCII digits means; None if it is none."""
    digits = text.lstrip("0") or text[-1:]
    # the length before `int`, which refuses thousands of digits
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


class ServedTables(Struct, frozen=True):
    """The tables of a base made for mapping: a server has `mapped` of the `wanted` tables.

    `overlay_percent` is the fill of the fullest overlay of changed rows; overlays with room for every row do
    not count.
    """

    mapped: int
    wanted: int
    overlay_percent: int

    @property
    def text(self) -> str:
        """The state of the tables as a phrase: `mapped`, or `restored: ` and why.

        If some are mapped, the number of the restored ones comes first. The overlay's fill follows from 1 %.
        """
        state = "mapped"
        if self.mapped < self.wanted:
            few = f"{self.wanted - self.mapped} of {self.wanted} " if self.mapped else ""
            state = f"{few}restored: the files are not where the graph looks for them (--served-at)"
        return f"{state}, overlay {self.overlay_percent} % full" if self.overlay_percent else state


class Served(Struct, frozen=True):
    """A version on a server; `position` is None if it takes no deltas or did not report it.

    `message` says why loading failed. `unsettled` is the number of its responses that may mix positions; None
    if the base does not count them. `tables` is None if none were to be mapped.
    """

    number: int
    state: VersionState
    position: int | None = None
    step: int | None = None
    lineage: str = ""
    message: str = ""
    unsettled: int | None = None
    tables: ServedTables | None = None

    @property
    def is_available(self) -> bool:
        """True if it answers requests."""
        return self.state is VersionState.AVAILABLE


def newest_available(versions: Iterable[Served]) -> Served | None:
    """The available version with the greatest number, which answers requests without a version.

    None if there is none.
    """
    available = (version for version in versions if version.is_available)
    return max(available, key=lambda version: version.number, default=None)
