"""Open a trainer's shard to link or read it, and notice if it changes or vanishes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exporter.errors import CheckpointChanged, CheckpointError
from exporter.files import open_regular


@contextmanager
def open_shard(path: Path) -> Iterator[int]:
    """A descriptor to read the shard with.

    Raises:
        CheckpointChanged: it is no longer there.
        CheckpointError: it cannot be opened.
    """
    with _reading(path):
        descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shard_status(path: Path) -> os.stat_result:
    """What the file system says of the shard, symbolic links followed.

    Raises:
        CheckpointChanged: it is no longer there.
        CheckpointError: it cannot be reached.
    """
    with _reading(path):
        return path.stat()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as exc:
        raise vanished(path) from exc
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}", cause=exc.strerror or str(exc)) from exc


def check_size(path: Path, found: int, expected: int) -> None:
    """Compare a shard's size with the catalog's.

    Raises:
        CheckpointChanged: they differ.
    """
    if found != expected:
        raise CheckpointChanged(
            f"{path} has {found} bytes now and had {expected} when its index was read",
            cause="a trainer wrote a checkpoint of the same name, or writes its shards in place",
        )


def vanished(path: Path) -> CheckpointChanged:
    """The error for a shard that is no longer there."""
    return CheckpointChanged(f"{path} vanished after its index was read")
