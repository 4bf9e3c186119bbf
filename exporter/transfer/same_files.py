"""Find files with the same content in the versions of a copy, or of a model in a store, to avoid transfers.

A version is often made from an earlier one: a rollback and its resumption have all files of another version,
and a new version may change one of ten tables. An unchanged file is linked in a copy, and copied inside a
store: none of its bytes crosses the network.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from exporter.bundle.link import link_or_copy
from exporter.errors import ExportError
from exporter.publish.manifest import FileEntry, LinkedFile
from exporter.storage.files import make_directories, sync
from exporter.storage.objects import RemoteObject
from exporter.storage.requests import MOST_COPIED
from exporter.transfer.items import Item, Passage, StoredModel

T = TypeVar("T")


class SameFiles(Generic[T]):
    """Places of files, found by the files' content (`Passage.content`). Threads may share one."""

    def __init__(self) -> None:
        self._new: list[tuple[Item, Path, Callable[[FileEntry], T | None]]] = []
        self._places: dict[object, T] = {}
        self._lock = threading.Lock()

    def add(self, item: Item, directory: Path, place: Callable[[FileEntry], T | None]) -> None:
        """Add the files of the version `item`, whose index is in the local `directory`.

        The function `place` returns the place of a file, or None if the file cannot be used; if it raises an
        ExportError or OSError, the rest of the version is left out. Nothing is read before the next call of
        the method `place`. A delta is ignored, because its files are like no others.
        """
        if not item.is_delta:
            with self._lock:
                self._new.append((item, directory, place))

    def place(self, content: object) -> T | None:
        """Return the place of a file with this content (see `Passage.content`); None if there is none.

        The indexes of the versions that were added since the last call are read first; a damaged version is
        skipped. It waits for other threads in this method.
        """
        with self._lock:
            # under the lock, and only when asked: an index is read once
            while self._new:
                item, directory, place = self._new.pop(0)
                with suppress(ExportError, OSError):  # a damaged version provides no files
                    passage = Passage(item, directory)
                    for file in passage.files:
                        holds, found = passage.content(file), place(file)
                        if holds is not None and found is not None:
                            self._places[holds] = found
            return self._places.get(content)

    def add_file(self, content: object, place: T) -> None:
        """Add the place of a file with this content (see `Passage.content`), unless one is known."""
        with self._lock:
            self._places.setdefault(content, place)


class StoredFiles(SameFiles[RemoteObject]):
    """The files of the versions that are both in a store and, for their indexes, in a local directory.

    A manifest is written after its files, each of which was compared on its way. So an object that is not
    newer than the manifest is unchanged; one that was written later, by any tool, is not used.
    """

    def __init__(self, model: Path, stored: StoredModel, items: Iterable[Item]) -> None:
        super().__init__()
        for item in items:
            self.add(item, model / item.path, partial(_unchanged, stored, item.path))

    def copies_of(self, item: Item, directory: Path) -> int:
        """Return how many bytes of an item, in a local directory, the store can copy in place of an upload.

        The item's other files of at most 5 GiB, which a store can copy, count as stored from then on. 0 for a
        delta. VerificationError or CheckpointError if the item's index is damaged, OSError if it cannot be
        read.
        """
        found, passage = 0, Passage(item, directory)
        for file in () if item.is_delta else passage.files:
            content = passage.content(file)
            if self.place(content) is not None:
                found += file.bytes_
            elif content is not None and file.bytes_ <= MOST_COPIED:
                self.add_file(content, RemoteObject("", file.bytes_, None, 0.0))
        return found


def _unchanged(stored: StoredModel, path: str, file: FileEntry) -> RemoteObject | None:
    """Return the object of a version's file, if the store can copy it as it was published; else None.

    None if it is missing, has another size, was written after the manifest, or has more than 5 GiB. `path` is
    the version's path below the model. KeyError if `stored` does not have the version.
    """
    each, manifest = stored.objects.get(f"{path}/{file.path}"), stored.manifests[path]
    is_same = each is not None and each.size == file.bytes_ and each.modified <= manifest.modified
    return each if is_same and file.bytes_ <= MOST_COPIED else None


class LocalFiles(SameFiles[Path]):
    """The files of the versions in a local model."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self._model = model

    def add_version(self, item: Item) -> None:
        """Add the files of the version `item`, which is in the model; a delta is ignored.

        A file that is linked to a trainer's file is left out, because the trainer may write into it; so is a
        file of another size than the manifest says. Nothing is read yet.
        """

        def place(file: FileEntry) -> Path | None:
            path = self._model / item.path / file.path
            found = path.lstat()
            is_whole = stat.S_ISREG(found.st_mode) and found.st_size == file.bytes_
            # a trainer may write into a file that has another name in its directory
            is_trainers = file.linked is not None and LinkedFile.of(found).inode == file.linked.inode
            return path if is_whole and not is_trainers else None

        self.add(item, self._model / item.path, place)

    def lend(self, content: object, path: Path) -> bool:
        """Make `path` a link to a file with this content (see `Passage.content`), or a copy; return True.

        False if there is no such file. A file at `path` is replaced; missing directories are made. The bytes
        are not compared: whoever altered the file there has altered it here.

        Raises:
            OSError, PublishError, TargetNotWritable, DiskFull: `path` cannot be written.
        """
        source = self.place(content)
        if source is None:
            return False
        make_directories(path.parent)
        # never written in place: it may be a link to a file of another version
        path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # retention has removed the version meanwhile
            link_or_copy(source, path)
            sync(path)
            sync(path.parent)
            return True
        return False
