"""Identify a checkpoint by its contents and files, never by its name, step or directory.

A trainer that was set back writes `model.ckpt-500` again, with other values; others keep one name for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.bundle_writer import index_path
from exporter.checkpoint.families import family_of
from exporter.checkpoint.tensor_bundle import MAX_INDEX_BYTES
from exporter.errors import CheckpointChanged, CheckpointNotFound
from exporter.storage import mirror
from exporter.storage.files import file_digest, read_regular

# Names, sizes in bytes, modification times in nanoseconds and inodes of files, by name.
Looks: TypeAlias = tuple[tuple[str, int, int, int], ...]


class Identity(Struct, frozen=True):
    """A checkpoint, and the looks of its files when it was identified.

    `digest` is a lower-case SHA-256: of a tensor bundle's index, which has every tensor's checksum; of other
    families, that have none, of their files' names, sizes and modification times. `paths` are the prefix and,
    of other families, these files.
    """

    prefix: Path
    digest: str
    files: Looks
    paths: tuple[Path, ...]
    is_indexed: bool

    @classmethod
    def of(cls, catalog: Catalog) -> Identity:
        """The identity of a checkpoint whose catalog was just read; CheckpointChanged if it changed since."""
        if catalog.index_digest is not None:
            files = look(catalog.prefix)
            try:
                digest = index_digest(catalog.prefix)
            except CheckpointNotFound as error:
                raise CheckpointChanged(f"{catalog.prefix} vanished after it was read") from error
            if digest != catalog.index_digest:
                raise CheckpointChanged(f"{index_path(catalog.prefix)} was replaced after it was read")
            return cls(catalog.prefix, digest, files, (catalog.prefix,), is_indexed=True)
        seen = [entry[:3] for path in catalog.shards for entry in look(path) if entry[0] == path.name]
        if not seen:
            raise CheckpointChanged(f"{catalog.prefix} vanished after it was read")
        paths = tuple(dict.fromkeys((catalog.prefix, *catalog.shards)))
        digest = hashlib.sha256(repr(seen).encode()).hexdigest()
        return cls(catalog.prefix, digest, _look_at(paths), paths, is_indexed=False)

    def content_digest(self, of: Callable[[Path], str] = file_digest) -> str:
        """The lower-case SHA-256 of what the checkpoint holds, whatever its files are called: see `digest`.

        Where there is no index the files are read, each by `of`; of several it is that of their digests.
        CheckpointChanged if one was replaced.
        """
        if self.is_indexed:
            return self.digest
        try:
            found = [of(path) for path in self.content_files()]
        except OSError as error:
            raise CheckpointChanged(f"{self.prefix} vanished after it was read", cause=str(error)) from error
        self.require_same_files()
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def content_files(self) -> list[Path]:
        """The files of a checkpoint without index, in an order that does not depend on where it lies."""
        if self.prefix.is_dir():
            return sorted(path for path in self.prefix.rglob("*") if path.is_file())
        return [path for path in self.paths if path.is_file()]  # a prefix may be a pattern of shards

    @property
    def is_untouched(self) -> bool:
        """True while no file was replaced, removed or added."""
        return _look_at(self.paths) == self.files

    def require_same_files(self) -> None:
        """Refuse, by CheckpointChanged, files that were replaced; pruned or new ones do no harm."""
        now = {entry[0]: entry for entry in _look_at(self.paths)}
        replaced = [entry[0] for entry in self.files if now.get(entry[0], entry) != entry]
        if replaced:
            raise CheckpointChanged(
                f"{self.prefix.with_name(replaced[0])} was replaced while it was exported",
                cause="a trainer wrote another checkpoint of the same name",
            )


def index_digest(prefix: Path) -> str:
    """The lower-case SHA-256 of a tensor bundle's index.

    Raises:
        CheckpointNotFound: its index cannot be read.
    """
    try:
        return hashlib.sha256(read_regular(index_path(prefix), MAX_INDEX_BYTES)).hexdigest()
    except OSError as error:
        raise CheckpointNotFound(f"cannot read {index_path(prefix)}", cause=str(error)) from None


def look(prefix: Path) -> Looks:
    """The looks of a checkpoint's files, or of one file; empty if it is gone, or vanishing."""
    mirror.refresh(prefix)
    with suppress(OSError):
        names = [path.name for path in prefix.parent.iterdir()]
        # not what others put beside them: checksums, downloads that are under way
        found = sorted(family_of(prefix).files(prefix, names))
        looks = [(name, prefix.with_name(name).stat()) for name in found]
        return tuple((name, now.st_size, now.st_mtime_ns, now.st_ino) for name, now in looks)
    return ()


def _look_at(paths: tuple[Path, ...]) -> Looks:
    """The looks of the files of several paths, all in one directory."""
    return tuple(sorted({entry for path in paths for entry in look(path)}))
