"""What a model server says of the versions that it serves."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from exporter.wire.version_state import VersionState


class ServedTables(Struct, frozen=True):
    """The tables of a base that was made to map them: how many a server maps, of how many.

    `overlay_percent` is how full the fullest overlay of changed rows is; one with room for every row does not
    count.
    """

    mapped: int
    wanted: int
    overlay_percent: int

    @property
    def text(self) -> str:
        """`mapped`, or `restored: ` and why; then how full the overlay is, once it holds a hundredth."""
        state = "mapped"
        if self.mapped < self.wanted:
            few = f"{self.wanted - self.mapped} of {self.wanted} " if self.mapped else ""
            state = f"{few}restored: the files are not where the graph looks for them (--served-at)"
        return f"{state}, overlay {self.overlay_percent} % full" if self.overlay_percent else state


class Served(Struct, frozen=True):
    """A version on a server; `position` is None if it takes no deltas or did not report it.

    `message` says why loading failed. `unsettled` counts its responses that may mix positions; None if the
    base does not count them. `tables` are those that were to be mapped.
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
        """True if requests get it."""
        return self.state is VersionState.AVAILABLE


def newest_available(versions: Iterable[Served]) -> Served | None:
    """The version that requests without a version get; None if none is available."""
    available = (version for version in versions if version.is_available)
    return max(available, key=lambda version: version.number, default=None)
