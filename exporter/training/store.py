"""Write a trainer's increments directory: publish, note, prune. Every write is atomic and durable."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import BundleWriter, index_path, read_catalog, step_in_name
from exporter.errors import CheckpointError, UsageError
from exporter.increments.history import CheckpointMarker, History, identify, read_history
from exporter.increments.increment import CheckpointId, Contents, Increment, StoredIncrement, to_json
from exporter.publish.staging import Staging
from exporter.storage.files import (
    FileIdentity,
    identity_of,
    make_directories,
    read_regular,
    remove_tree,
    sync,
    write_durably,
    writing,
)
from exporter.storage.layout import (
    CHECKPOINT_STATE_FILE,
    DELTA_NAME,
    INCREMENTS_DIRECTORY,
    MANIFEST_FILE,
    SESSION_FILE,
    TRASH_PREFIX,
    UNFINISHED_MARKER_PREFIX,
)

IndexSignature: TypeAlias = tuple[str, FileIdentity]
"""A full checkpoint's name, and its index's inode and modification time in nanoseconds."""

_MAX_SESSION_BYTES = 1 << 12

Fill = Callable[[BundleWriter], Contents]


class FullCheckpoint(Struct, frozen=True):
    """A full checkpoint of the trainer."""

    prefix: Path
    id: CheckpointId

    def catalog(self) -> Catalog:
        """Its tensors."""
        return read_catalog(self.prefix)


class Store:
    """The increments of the checkpoint directory `ckpt_dir`."""

    def __init__(self, ckpt_dir: Path) -> None:
        self._ckpt_dir = ckpt_dir
        self.path = ckpt_dir / INCREMENTS_DIRECTORY

    def history(self) -> History:
        """The increments and markers of the directory; see `read_history`."""
        return read_history(self._ckpt_dir)

    def publish(self, draft: Increment, fill: Fill) -> StoredIncrement | None:
        """Publish the increment that `fill` writes; None if nothing changed.

        Raises:
            TargetNotWritable, DiskFull, PublishError: nothing was published.
        """
        with Staging(self.path) as staging, writing(self.path):
            with BundleWriter(staging.path / DELTA_NAME) as writer:
                contents = fill(writer)
            if not contents:
                return None
            increment = replace(draft, variables=contents.variables, tables=contents.tables)
            # Data and manifest before the rename, the directory after it: after a crash a reader finds either
            # no increment or a whole one.
            for file in writer.files:
                sync(file)
            write_durably(staging.path / MANIFEST_FILE, to_json(increment).encode("ascii"))
            sync(staging.path)
            target = self.path / increment.directory_name
            if target.exists():  # a trainer that restored an older checkpoint passes the same steps again
                target = target.with_name(f"{target.name}-{(increment.session or increment.run)[:8]}")
            staging.path.rename(target)
            sync(self.path)
        return StoredIncrement(target, increment)

    def note(self, marker: CheckpointMarker) -> None:
        """Write a checkpoint's marker; it replaces an older one of the same name.

        Raises:
            TargetNotWritable, DiskFull, PublishError: it was not written.
        """
        self._write(marker.file_name, marker.to_json())

    def claim(self, session: str) -> None:
        """Note that a session has begun to write here, so that an older one stops.

        Raises:
            TargetNotWritable, DiskFull, PublishError: it was not noted.
        """
        self._write(SESSION_FILE, f"{session}\n")

    def require_claim(self, session: str) -> None:
        """Check that no other session has begun to write here since.

        Raises:
            UsageError: another one has.
        """
        try:
            found = read_regular(self.path / SESSION_FILE, _MAX_SESSION_BYTES).decode("ascii").strip()
        except (OSError, ValueError):  # without a readable note there is no sign of another session
            return
        if found != session:
            raise UsageError(
                f"another training writes increments to {self.path} since this one began",
                cause="two trainings share a checkpoint directory, or this one was thought dead and replaced",
                hint="end one of them, or give each a checkpoint directory of its own",
            )

    def prune(self) -> None:
        """Remove increments that no full checkpoint needs, markers of lost checkpoints, and left-overs."""
        steps = [
            step for path in self._ckpt_dir.glob("*.index") if (step := step_in_name(path.stem)) is not None
        ]
        history = self.history()
        for stored in history.expired(min(steps, default=0)):
            trash = self.path / f"{TRASH_PREFIX}{secrets.token_hex(4)}"
            stored.path.rename(trash)  # readers skip trash, so they never see half an increment
            remove_tree(trash)
        for leftover in self.path.glob(f"{UNFINISHED_MARKER_PREFIX}*"):
            leftover.unlink(missing_ok=True)
        for marker in history.markers:
            if not index_path(self._ckpt_dir / marker.checkpoint.name).exists():
                (self.path / marker.file_name).unlink(missing_ok=True)

    def newest_full(self) -> FullCheckpoint | None:
        """The full checkpoint that a trainer would restore now; None if there is none or it has no step."""
        try:
            prefix = candidates(self._ckpt_dir)[0]
            step = read_catalog(prefix).step
            return None if step is None else FullCheckpoint(prefix, identify(prefix, step))
        except CheckpointError:
            return None

    def _write(self, name: str, text: str) -> None:
        with writing(self.path):
            make_directories(self.path)
            temporary = self.path / f"{UNFINISHED_MARKER_PREFIX}{secrets.token_hex(4)}"
            write_durably(temporary, text.encode("ascii"))
            temporary.rename(self.path / name)
            sync(self.path)

    def index_signatures(self) -> frozenset[IndexSignature]:
        """Signatures of the full checkpoints; a checkpoint that is written again gets another one."""
        found = (self.index_signature(path.with_suffix("")) for path in self._ckpt_dir.glob("*.index"))
        return frozenset(filter(None, found))

    @staticmethod
    def index_signature(prefix: Path) -> IndexSignature | None:
        """The signature of one full checkpoint; None if it is gone."""
        identity = identity_of(index_path(prefix))
        return None if identity is None else (prefix.name, identity)

    def state_signature(self) -> FileIdentity | None:
        """A value that changes whenever a saver has finished a full checkpoint. It costs one system call.

        None before the first.
        """
        return identity_of(self._ckpt_dir / CHECKPOINT_STATE_FILE)
