"""Check what is published under the model base path, and what may be published over it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from exporter.catalog import Catalog
from exporter.checkpoint.identity import Identity
from exporter.errors import ManifestError, NotUpdatable, UsageError
from exporter.local_paths import quoted
from exporter.options import ExportRequest
from exporter.publish.commit import VersionRule
from exporter.publish.delta_log import LogBase
from exporter.publish.made_from import PublishedAlready, newest_made_from
from exporter.publish.permission import Permission
from exporter.publish.versions import newest_version


def require_new(request: ExportRequest, checkpoint: Identity, digest: str) -> None:
    """Refuse to publish a checkpoint a second time, by the same plan (of this digest).

    Raises:
        PublishedAlready: the newest version that was made from it was made so.
    """
    made = newest_made_from(request.out, checkpoint.digest)
    choice = VersionRule.parse(request.version).choice
    number = choice if isinstance(choice, int) else None
    takes_deltas = request.updates is not None
    if made is not None and made.is_by(digest, takes_deltas=takes_deltas, number=number):
        raise PublishedAlready(made)


def check_permission(request: ExportRequest) -> None:
    """Refuse what a hold or a log forbids.

    Raises:
        ModelHeld, ChainEnds: see `Permission.check`.
    """
    permission(request).check(request.out, takes_deltas=request.updates is not None)


def require_own_directory(model: Path, catalog: Catalog) -> None:
    """Keep versions out of the trainer's directory: it is pruned, copied and removed by other rules.

    Raises:
        UsageError: checkpoints are saved in `model` itself.
    """
    directory = catalog.prefix.parent
    if catalog.is_bundle and model.is_dir() and model.samefile(directory):
        raise UsageError(
            f"--out {model} is the directory of the checkpoint",
            cause="versions, deltas and unfinished work would lie among the trainer's files",
            hint=f"name a directory of the model's own: --out {quoted(model / 'served')}",
        )


def permission(request: ExportRequest) -> Permission:
    """What the request may do that goes against what is published."""
    return Permission(request.despite_hold, request.plain)


def target_notes(model: Path) -> tuple[str, ...]:
    """A plain version over one that takes deltas ends the freshness of every server that loads it."""
    newest = newest_version(model)
    if newest is None:
        return ()
    with suppress(NotUpdatable, ManifestError):
        LogBase.read(newest.path)
        return (
            f"{newest.path} takes deltas, what replaces it does not: --updatable publishes one that does",
        )
    return ()
