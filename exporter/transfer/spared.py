"""Bytes of a publication that a pull did not fetch."""

from __future__ import annotations

from msgspec import Struct

from exporter.terminal.progress import count, human_bytes


class Spared(Struct, frozen=True):
    """Bytes of a new publication that were not fetched."""

    path: str
    """The publication, by its path below the model."""
    linked: int = 0
    """Bytes of files that another version here has, too: they are links to these."""

    made: int = 0
    """Bytes of files that were merged here, as the publisher had merged them, and are the same."""
    deltas: int = 0
    """How many deltas were merged with a base for that."""
    why_fetched: str = ""
    """Why a base that was merged was not merged here, or not all of it is the same; empty if it is."""

    @property
    def bytes_(self) -> int:
        """All bytes that were not fetched."""
        return self.linked + self.made

    @property
    def text(self) -> str:
        """A sentence on what was not fetched, or why it was."""
        said = []
        if self.made:
            said.append(f"made here from {count(self.deltas, 'delta')}: {human_bytes(self.made)} not fetched")
        if self.linked:
            said.append(f"{human_bytes(self.linked)} were here already")
        if self.why_fetched:
            said.append(f"fetched, because {self.why_fetched}")
        return f"{self.path}: {'; '.join(said)}"
