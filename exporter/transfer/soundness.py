"""Check a version or delta before it goes from one place to another: damage does not travel."""

from __future__ import annotations

from pathlib import Path

from exporter.checkpoint.tensor_bundle import index_path, read_catalog
from exporter.layout import DELTA_NAME, VARIABLES_PREFIX
from exporter.verify.version_files import verify_bytes, verify_published


def require_sound(publication: Path, *, is_delta: bool) -> None:
    """Read all of it, and compare checksums.

    Raises:
        VerificationError, ManifestError: it is damaged.
        CheckpointError: it cannot be read.
    """
    if not is_delta:
        verify_published(publication)
    prefix = publication / (DELTA_NAME if is_delta else VARIABLES_PREFIX)
    if index_path(prefix).exists():
        verify_bytes(read_catalog(prefix))
