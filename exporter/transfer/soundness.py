"""Check a version or delta while it goes somewhere: what its manifest does not say stays back.

Every file but the data shards has a checksum in the manifest, so the index, too, which has one for each run
of a shard's bytes. All are taken while the bytes go by; only what an earlier pull has fetched is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import index_path, parse_index, read_catalog
from exporter.files import read_regular
from exporter.layout import DELTA_NAME, PAIR_NAME, VARIABLES_PREFIX
from exporter.publish.manifest import FileEntry
from exporter.transfer.items import Item
from exporter.verify.version_files import Passed, cuts_of, verify_bytes, verify_file, verify_files


def require_sound(item: Item, path: Path) -> None:
    """Read all of a publication, and compare it with its manifest.

    Raises:
        VerificationError, CheckpointError: it is damaged, or cannot be read.
    """
    passage = Passage(item, path)
    passage.check_files()
    passage.check_values()


class Passage:
    """A publication that goes out of a local directory, or into it: `path`."""

    def __init__(self, item: Item, path: Path) -> None:
        self._item, self._path = item, path
        self._passed = Passed()

    @property
    def files(self) -> list[FileEntry]:
        """Its files: data shards last, because the index tells of them."""
        return sorted(self._item.manifest.files, key=lambda file: file.crc32c is None)

    def noting(self, file: FileEntry) -> Callable[[int, memoryview], None]:
        """What takes the checksums of a file, of its parts in any order and from several threads.

        Raises:
            CheckpointError: the index that tells of it is damaged.
        """
        path = self._path / file.path
        return self._passed.noting(path, self._cuts.get(path, ()) if file.crc32c is None else ())

    def check_file(self, file: FileEntry) -> None:
        """Compare a file that is there with the manifest.

        Raises:
            VerificationError: it has another size or checksum.
        """
        verify_file(self._path, file, self._passed)

    def check_files(self) -> None:
        """Compare all files, which are there, and the index with the manifest.

        Raises:
            VerificationError: one is missing, or is not what the manifest says.
        """
        manifest, prefix = self._item.manifest, Path(DELTA_NAME) if self._item.is_delta else None
        verify_files(self._path, manifest.tensors, manifest.files, prefix=prefix, passed=self._passed)

    def check_values(self, shards: Iterable[FileEntry] | None = None) -> None:
        """Compare the stored values with the index; those of some data shards, if these are named.

        Raises:
            VerificationError: a value is damaged.
            CheckpointError: the index is, or a shard cannot be read.
        """
        if not self._index.exists():
            return
        catalog = read_catalog(self._prefix)
        if shards is not None:
            named = {self._path / file.path for file in shards}
            tensors = {
                name: ref
                for name, ref in catalog.tensors.items()
                if all(catalog.path_of(extent) in named for extent in ref.extents)
            }
            catalog = replace(catalog, tensors=tensors)
        verify_bytes(catalog, passed=self._passed)

    @cached_property
    def _prefix(self) -> Path:
        listed = {file.path for file in self._item.manifest.files}
        is_pair = f"{PAIR_NAME}.meta" in listed
        return self._path / (
            DELTA_NAME if self._item.is_delta else PAIR_NAME if is_pair else VARIABLES_PREFIX
        )

    @property
    def _index(self) -> Path:
        return index_path(self._prefix)

    @cached_property
    def _cuts(self) -> dict[Path, set[int]]:
        if not self._index.exists():
            return {}
        return cuts_of(parse_index(read_regular(self._index), self._index), self._prefix)
