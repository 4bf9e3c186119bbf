"""Bytes of a publication that a pull did not fetch."""

from __future__ import annotations

from msgspec import Struct

from exporter.terminal.progress import human_bytes


class Spared(Struct, frozen=True):
    """Bytes of a new publication that were not fetched."""

    path: str
    """The publication, by its path below the model."""
    linked: int = 0
    """Bytes of files that another version here has, too: they are links to these."""

    @property
    def bytes_(self) -> int:
        """All bytes that were not fetched."""
        return self.linked

    @property
    def text(self) -> str:
        """A sentence on what was not fetched."""
        return f"{self.path}: {human_bytes(self.linked)} were here already, and were not fetched"
