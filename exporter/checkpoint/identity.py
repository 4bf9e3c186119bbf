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
    """A checkpoint, with the names, sizes, times and inodes of its files when it was identified.

    `digest` is a lower-case SHA-256: of a tensor bundle's index, which has every tensor's checksum; for other
    families, without an index, of their files' names, sizes and modification times. `paths` are the prefix
    and, for other families, these files.
    """

    prefix: Path
    digest: str
    files: Looks
    paths: tuple[Path, ...]
    is_indexed: bool

    @classmethod
    def of(cls, catalog: Catalog) -> Identity:
        """Return the identity of a checkpoint whose catalog was just read.

        CheckpointChanged if its index was replaced, or the checkpoint vanished; CheckpointError if a store
        cannot be read.
        """
        if catalog.index_digest is not None:
            # Before the digest: what is replaced in between then differs for `require_same_files`.
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
        """Return the lower-case SHA-256 of the checkpoint's contents, without file names.

        With an index it is `digest`. Without one the files are read: `of` returns the digest of each, and for
        several files the result is the digest of their digests. CheckpointChanged if a file was replaced,
        vanished or cannot be read; CheckpointError if a store cannot be listed; other errors of `of` pass.
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
        """Return the existing files of a checkpoint without index.

        Their order does not depend on the directory: sorted below a directory, else the prefix and then the
        shards.
        """
        if self.prefix.is_dir():
            return sorted(path for path in self.prefix.rglob("*") if path.is_file())
        return [path for path in self.paths if path.is_file()]  # a prefix may be a pattern of shards

    @property
    def is_untouched(self) -> bool:
        """True if no file was replaced, removed or added since the checkpoint was identified.

        CheckpointError if a store cannot be listed.
        """
        return _look_at(self.paths) == self.files

    def require_same_files(self) -> None:
        """Raise CheckpointChanged if a file was replaced since the checkpoint was identified.

        Removed and new files are allowed. CheckpointError if a store cannot be listed.
        """
        now = {entry[0]: entry for entry in _look_at(self.paths)}
        replaced = [entry[0] for entry in self.files if now.get(entry[0], entry) != entry]
        if replaced:
            raise CheckpointChanged(
                f"{self.prefix.with_name(replaced[0])} was replaced while it was exported",
                cause="a trainer wrote another checkpoint of the same name",
            )


def index_digest(prefix: Path) -> str:
    """Return the lower-case SHA-256 of a tensor bundle's index.

    Raises:
        CheckpointNotFound: the index cannot be read, or is too large.
        CheckpointError: a store cannot be read; CheckpointChanged if the object was replaced.
    """
    try:
        return hashlib.sha256(read_regular(index_path(prefix), MAX_INDEX_BYTES)).hexdigest()
    except OSError as error:
        raise CheckpointNotFound(f"cannot read {index_path(prefix)}", cause=str(error)) from None


def look(prefix: Path) -> Looks:
    """Return (name, bytes, modification time in ns, inode) of each of a checkpoint's files, sorted by name.

    `prefix` may also be one file. A mirror is listed again first. Empty if there are no files, one vanishes
    meanwhile, or the directory cannot be listed; CheckpointError if a store cannot be listed.
    """
    mirror.refresh(prefix)
    with suppress(OSError):
        names = [path.name for path in prefix.parent.iterdir()]
        # only the checkpoint's own: others put checksums and unfinished downloads beside them
        found = sorted(family_of(prefix).files(prefix, names))
        looks = [(name, prefix.with_name(name).stat()) for name in found]
        return tuple((name, now.st_size, now.st_mtime_ns, now.st_ino) for name, now in looks)
    return ()


def _look_at(paths: tuple[Path, ...]) -> Looks:
    """Return the entries of `look` for several paths of one directory, sorted, each file once."""
    return tuple(sorted({entry for path in paths for entry in look(path)}))
