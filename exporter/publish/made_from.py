"""Find the version that was made from a checkpoint, so that the same export is not published twice."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from exporter.errors import NothingChanged
from exporter.publish.manifest import ManifestHead
from exporter.publish.versions import MAX_MANIFEST_BYTES, read_head, version_dirs
from exporter.storage.files import read_regular
from exporter.storage.layout import MANIFEST_FILE


class MadeVersion(Struct, frozen=True):
    """A version that was made from a checkpoint, and the greatest version number in use."""

    version: int
    path: Path
    head: ManifestHead
    newest: int

    def is_by(self, plan_digest: str, *, takes_deltas: bool, number: int | None) -> bool:
        """True if the plan would make this version again; `number` is one that it asks for by name.

        Versions of earlier releases do not tell their plan: of those the checkpoint decides, and whether
        they take deltas.
        """
        if number is not None and number != self.version:
            return False
        if self.head.plan_digest is None:
            return (self.head.log is not None) == takes_deltas
        return self.head.plan_digest == plan_digest


class PublishedAlready(NothingChanged):
    """A checkpoint is published, by the same plan; `made` is the version."""

    def __init__(self, made: MadeVersion) -> None:
        super().__init__(
            f"{made.head.source.checkpoint} is published already: {made.path}",
            hint="publish it once more, as the newest version: --again",
        )
        self.made = made


def newest_made_from(model: Path, digest: str) -> MadeVersion | None:
    """The newest version that was made from the checkpoint with this digest.

    Raises:
        ManifestError: the model, or that version's manifest, cannot be read.
    """
    versions = version_dirs(model)
    for child in versions:
        if child.has_manifest and _mentions(child.path, digest):
            head = read_head(child.path)
            if head.source.digest == digest:
                return MadeVersion(child.version, child.path, head, versions[0].version)
    return None


def _mentions(version: Path, digest: str) -> bool:
    """A quick look: parsing the manifests of many versions takes long. What vanishes is not published."""
    try:
        return digest.encode("ascii") in read_regular(version / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except OSError:
        return False
