"""Bytes of a publication that a pull did not fetch, and a copy's note of a base that it had to fetch."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from exporter.errors import ManifestError
from exporter.storage.files import read_record, replace_file, writing
from exporter.storage.layout import FETCHED_FILE
from exporter.terminal.progress import count, human_bytes
from exporter.wire.json_documents import DocumentError, decode, encode

_LONGEST = 1 << 16


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
    fetched: int = 0
    """Bytes of files that came from the store."""

    @property
    def bytes_(self) -> int:
        """All bytes that were not fetched."""
        return self.linked + self.made

    @property
    def text(self) -> str:
        """A sentence on which bytes were not fetched, and why others were."""
        said = []
        if self.made:
            said.append(f"made here from {count(self.deltas, 'delta')}: {human_bytes(self.made)} not fetched")
        if self.linked:
            said.append(f"{human_bytes(self.linked)} were here already")
        if self.why_fetched:
            said.append(f"{human_bytes(self.fetched)} fetched, because {self.why_fetched}")
        return f"{self.path}: {'; '.join(said)}"


def note(model: Path, spared: Spared) -> None:
    """Write into a file of the copy `model` why the copy fetched its newest base.

    Without a reason in `spared`, the file of an earlier base is removed.

    Raises:
        PublishError and subclasses: the file cannot be written or removed.
    """
    path = model / FETCHED_FILE
    with writing(path):
        if not spared.why_fetched:
            path.unlink(missing_ok=True)
            return
        replace_file(path, encode(spared))


def noted(model: Path) -> Spared | None:
    """Return the note that `note` wrote into a copy; None if the copy has none, or is not a copy.

    Raises:
        ManifestError: the note is damaged, or cannot be read.
    """
    path = model / FETCHED_FILE
    try:
        found: Spared = decode(read_record(path, _LONGEST), Spared, FETCHED_FILE, written=encode)
        return found
    except FileNotFoundError:
        return None
    except (DocumentError, OSError) as error:
        raise ManifestError(
            f"{path} cannot be read", cause=str(error), hint=f"remove it: rm {path}"
        ) from None
