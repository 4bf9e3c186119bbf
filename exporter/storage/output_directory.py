"""A directory for the output of jobs: on a file system that all workers see, or below a store's URL.

Objects appear whole: a file by rename, an object by its upload. An object that replaces another has another
tag.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from exporter.errors import os_error
from exporter.storage import mirror
from exporter.storage.files import read_regular
from exporter.storage.objects import ObjectWriter, RemoteObject
from exporter.storage.url import Url

_LONGEST = 16 << 20
NEW_PREFIX = ".new-"


class Directory(Protocol):
    """Objects by name; a name may contain slashes.

    `place` is the directory's absolute path or its URL; `is_in_store` is True for a URL.
    """

    place: str
    is_in_store: bool
    is_stood_for: bool
    """True once `show` made files that only stand for its objects: keep the objects until they are copied."""

    @property
    def scratch(self) -> Path:
        """The directory in which to write files for `put_file` and `put_new`, made if need be.

        PublishError or a subclass if it cannot be made.
        """

    def put_file(self, name: str, path: Path) -> str:
        """Make a file of `scratch` the object of this name, replacing an existing one; return its tag.

        The file may no longer exist then. PublishError or a subclass if it cannot be written.
        """

    def put_new(self, name: str, path: Path) -> None:
        """Make a file of `scratch` the object of this name, or do nothing if such an object exists.

        The file stays. PublishError or a subclass if the object cannot be written.
        """

    def put(self, name: str, content: bytes) -> None:
        """Write a small object, replacing an existing one; PublishError or a subclass if that fails."""

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object of at most 16 MiB; None if it does not exist.

        CheckpointError or PublishError, or a subclass, if it is larger or cannot be read.
        """

    def look(self, name: str) -> tuple[int, str] | None:
        """Return the size in bytes and the tag of an object; None if it does not exist.

        The tag is "" if a store gives none. CheckpointError or PublishError, or a subclass, if the directory
        cannot be read.
        """

    def names(self, below: str) -> list[str]:
        """Return the names, `below/...`, of the objects directly below a name, sorted; empty without any.

        Of a store, objects further down are returned, too; unfinished files of a local directory are left
        out. CheckpointError or PublishError, or a subclass, if the directory cannot be read.
        """

    def show(self, name: str, path: Path, size: int, tag: str) -> None:
        """Make the object of this name, with this size in bytes and tag, readable at the new path `path`.

        The new file is a link to the object's file; or it has the object's bytes, which are fetched at once
        or, if it only stands for the object (`is_stood_for`), when it is read. PublishError or a subclass if
        the file cannot be made, CheckpointError if the object cannot be fetched.
        """

    def as_local(self) -> Path:
        """Return a local directory with the present objects; those of a store are fetched when they are read.

        Of a store, objects whose names contain a slash are left out. CheckpointError or a subclass if a store
        cannot be listed, DiskFull, PublishError or OSError if the local files cannot be made.
        """

    def remove(self) -> None:
        """Remove everything in the directory: a local one as far as possible, without an error.

        Of a store, CheckpointError or PublishError if the objects cannot be listed or removed.
        """


def open_directory(place: str) -> Directory:
    """Return the directory at `place`, a path or a URL; nothing is made or listed yet.

    Raises:
        UsageError: the URL is malformed, or the library that reads stores is not installed.
        CheckpointError: the environment's settings for a store are refused.
    """
    url = Url.parse(place)
    return _LocalDirectory(Path(place)) if url is None else _StoreDirectory(url)


class _LocalDirectory:
    """A directory of a file system; it is made when the first object is put into it."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.is_in_store = self.is_stood_for = False
        self.place = os.fspath(self._path)

    @property
    def scratch(self) -> Path:
        """The directory itself, which is made if need be: a rename makes a file an object.

        PublishError or a subclass if it cannot be made.
        """
        with _naming(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def put_file(self, name: str, path: Path) -> str:
        target = self._path / name
        with _naming(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            return str(target.stat().st_mtime_ns)

    def put_new(self, name: str, path: Path) -> None:
        # a link fails if the name is taken, where a rename would replace: of two tasks the first one counts
        with _naming(self._path / name), suppress(FileExistsError):
            (self._path / name).hardlink_to(path)

    def put(self, name: str, content: bytes) -> None:
        with _naming(self._path / name), new_file(self.scratch) as (descriptor, path):
            # of a copy, as the end of `new_file` closes its own descriptor
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
            self.put_file(name, path)

    def read(self, name: str) -> bytes | None:
        with _naming(self._path / name), suppress(FileNotFoundError):
            return read_regular(self._path / name, _LONGEST)
        return None

    def look(self, name: str) -> tuple[int, str] | None:
        with _naming(self._path / name), suppress(FileNotFoundError):
            found = (self._path / name).stat()
            return found.st_size, str(found.st_mtime_ns)
        return None

    def names(self, below: str) -> list[str]:
        with _naming(self._path), suppress(FileNotFoundError):
            names = (entry.name for entry in (self._path / below).iterdir())
            return sorted(f"{below}/{name}" for name in names if not name.startswith(NEW_PREFIX))
        return []

    def show(self, name: str, path: Path, size: int, tag: str) -> None:
        with _naming(path):
            path.hardlink_to(self._path / name)

    def as_local(self) -> Path:
        return self._path

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class _StoreDirectory:
    """The objects below a URL."""

    def __init__(self, url: Url) -> None:
        self.place = str(url)
        self.is_in_store, self.is_stood_for = True, False
        self._url = url
        self._store = ObjectWriter(url)

    @property
    def scratch(self) -> Path:
        """The system's directory for temporary files."""
        return Path(tempfile.gettempdir())

    def put_file(self, name: str, path: Path) -> str:
        return self._store.upload(self._url.key(name), path)

    def put_new(self, name: str, path: Path) -> None:
        with _naming(path):
            content = path.read_bytes()
        self._store.create(self._url.key(name), content)

    def put(self, name: str, content: bytes) -> None:
        self._store.put(self._url.key(name), content)

    def read(self, name: str) -> bytes | None:
        found = self._store.fetch(self._url.key(name), _LONGEST)
        return None if found is None else found[0]

    def look(self, name: str) -> tuple[int, str] | None:
        found = self._store.look(self._url.key(name))
        return None if found is None else (found.size, found.tag or "")

    def names(self, below: str) -> list[str]:
        base = self._url.key("")
        return sorted(each.key.removeprefix(base) for each in self._store.below(self._url.key(below)))

    def show(self, name: str, path: Path, size: int, tag: str) -> None:
        found = RemoteObject(self._url.key(name), size, tag, 0.0)
        if mirror.stand_in(path, self._url, found):
            self.is_stood_for = True
            return
        with _naming(path), path.open("xb") as file:
            self._store.copy(found, file.fileno(), [(0, size, 0)], path)

    def as_local(self) -> Path:
        found = self._store.contents()
        shown = mirror.Mirror(self._url, is_directory=True)
        # without tags, so that reads are not pinned: repeated tasks write the same bytes
        shown.show({name: replace(each, tag=None) for name, each in found.items() if "/" not in name})
        mirror.register(shown)
        return shown.path

    def remove(self) -> None:
        self._store.delete(*(each.key for each in self._store.below(self._url.path)))


@contextmanager
def new_file(directory: Path) -> Iterator[tuple[int, Path]]:
    """Make an empty file in `directory`, open to read and write; yield its descriptor and path.

    The file is closed at the end of the block, and removed unless it was moved.

    Raises:
        TargetNotWritable, DiskFull, PublishError: it cannot be made.
    """
    with new_path(directory) as path:
        with _naming(path):  # not tempfile: others may read what is published
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor, path
        finally:
            os.close(descriptor)


@contextmanager
def new_path(directory: Path) -> Iterator[Path]:
    """Yield an unused path in `directory`; at the end of the block, remove the file that was made there.

    A file that was moved away or cannot be removed is no error.
    """
    path = directory / f"{NEW_PREFIX}{os.urandom(8).hex()}"
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise os_error(error, path) from error
