"""What `push` and `pull` print."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from exporter.cli.documents.values import Status


class Push(Struct, frozen=True, kw_only=True):
    """What `push` prints."""

    dry_run: bool
    """True if nothing was written."""
    status: Status
    """`published`, `planned` or `nothing_to_do`."""
    url: str
    """The model in the store."""
    uploaded: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed from the store, with `--prune`."""
    bytes: int
    """Bytes uploaded."""
    position: int | None
    """The newest position in the store now."""


class Pull(Struct, frozen=True, kw_only=True):
    """What `pull` prints; with `--watch` one document a line, whenever something was fetched."""

    status: Status
    """`published` or `nothing_to_do`."""
    model: str
    """The local model base path."""
    fetched: Sequence[str]
    """Versions and deltas, by their paths below the model, in the order in which they became visible."""
    removed: Sequence[str]
    """What was removed here, with `--prune`."""
    incomplete: Sequence[str]
    """What has a manifest in the store and not yet all its files."""
    waiting: Sequence[str] = ()
    """What servers could not take after the rollback that a canary made here."""
    bytes: int
    """Bytes fetched."""
    position: int | None
    """The newest position here now."""
