"""Open a trainer's shard to link or read it, and notice if it changes or vanishes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.catalog import Catalog, Extent, TensorRef
from exporter.errors import CheckpointChanged, CheckpointError
from exporter.storage import mirror
from exporter.storage.files import close_quietly, open_regular


@contextmanager
def open_shard(path: Path, *extents: Extent) -> Iterator[int]:
    """Open a shard to read `extents` of it and yield the descriptor; extents in a store are fetched first.

    Raises:
        CheckpointChanged: the shard no longer exists, or was replaced in the store.
        CheckpointError: it cannot be opened or fetched.
        DiskFull, PublishError: what is fetched cannot be written.
    """
    with reading(path):
        ranges = [(extent.offset, extent.offset + extent.size) for extent in extents]
        descriptor = open_regular(path, ranges=ranges)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def fetch_tensors(catalog: Catalog, tensors: Iterable[TensorRef]) -> None:
    """Fetch the bytes of tensors of a checkpoint in a store, for a program that opens the shards itself.

    Does nothing for local files.

    Raises:
        CheckpointError: they cannot be fetched; CheckpointChanged if a shard was replaced or is gone.
        DiskFull, PublishError: they cannot be written here.
    """
    wanted: dict[Path, list[tuple[int, int]]] = {}
    for extent in (extent for tensor in tensors for extent in tensor.extents):
        wanted.setdefault(catalog.path_of(extent), []).append((extent.offset, extent.offset + extent.size))
    for path, ranges in wanted.items():
        mirror.fetch(path, ranges)


def shard_status(path: Path) -> os.stat_result:
    """Return the file status of a shard, symbolic links followed.

    Raises:
        CheckpointChanged: the shard no longer exists.
        CheckpointError: it cannot be reached.
    """
    with reading(path):
        return path.stat()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert OSErrors and EOFErrors of the block to errors that name the shard `path`.

    Raises:
        CheckpointChanged: it no longer exists, or ends early.
        CheckpointError: it cannot be read.
    """
    try:
        yield
    except FileNotFoundError as exc:
        raise vanished(path) from exc
    except EOFError as exc:
        raise CheckpointChanged(f"{path} became shorter after its index was read") from exc
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}", cause=exc.strerror or str(exc)) from exc


def check_size(path: Path, found: int, expected: int) -> None:
    """Require that the shard `path` still has the size that the catalog states, both in bytes.

    Raises:
        CheckpointChanged: they differ.
    """
    if found != expected:
        raise CheckpointChanged(
            f"{path} has {found} bytes now and had {expected} when its index was read",
            cause="a trainer wrote a checkpoint of the same name, or writes its shards in place",
        )


def vanished(path: Path) -> CheckpointChanged:
    """Return the error for a shard that no longer exists."""
    return CheckpointChanged(f"{path} vanished after its index was read")


def written_to(path: Path) -> CheckpointChanged:
    """Return the error for a shard that was written to between two reads."""
    return CheckpointChanged(
        f"{path} was written to while it was read", cause="a trainer, or a copy, writes its shards in place"
    )
