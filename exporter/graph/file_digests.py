"""Digest files; a file that has not changed since it was last read is not read again.

A vocabulary may be large and a delta is made every few seconds. A file is told by device, inode, size and the
times of its last modification and change, as Git's index does, and with the same care: what was changed just
before it was read may be changed again within one tick of the clock, so that is read once more.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from exporter.files import SETTLED_NS, kept_identity, open_regular


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests(Struct):
    """Digests by path, each with what its file looked like; `is_new` once there is one worth keeping."""

    known: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    is_new: bool = False

    def __call__(self, path: Path, of: Callable[[Path], str] = file_digest) -> str:
        """The digest of a file, taken by `of`, which must always be the same for one path.

        Raises:
            OSError: it cannot be read, or is no regular file.
        """
        name, looks = str(path.absolute()), kept_identity(path)
        was, digest = self.known.get(name, ([], ""))
        if was == looks:
            return digest
        digest = of(path)
        if time.time_ns() - max(looks[-2:]) > SETTLED_NS and kept_identity(path) == looks:
            self.known[name] = (looks, digest)
            self.is_new = True
        return digest

    def to_json(self) -> dict[str, Any]:
        """The digests as a JSON object."""
        return {name: [*looks, digest] for name, (looks, digest) in self.known.items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FileDigests:
        """The digests that `to_json` gave; what is of another form is left out."""
        entries = {name: entry for name, entry in document.items() if isinstance(entry, list) and entry}
        return cls({name: (looks, str(digest)) for name, (*looks, digest) in entries.items()})
