"""The versions and deltas of a model, in a local directory or in a store, found by their manifests.

Both places use the same names (see `exporter.storage.layout`). A store has no rename: a version or a delta
exists once its manifest does, which is therefore written last, and removed first.

A version or delta is checked while it is copied. Each file except the data shards has a checksum in the
manifest. One of these files is the index, which has a checksum for each run of a shard's bytes. All are
computed while the bytes pass; only files that an earlier pull has fetched are read again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from exporter.checkpoint.tensor_bundle import MAX_INDEX_BYTES, index_path, parse_index, read_catalog
from exporter.delta.format import log_name
from exporter.errors import CheckpointChanged, LfsPointer, ManifestError, NotTrusted
from exporter.jobs.runner import LOCAL, Runner
from exporter.publish.hold import LONGEST_DOCUMENT, LONGEST_HOLD
from exporter.publish.manifest import FileEntry, Manifest, from_json
from exporter.publish.tags import LONGEST_TAGS, tags_document
from exporter.publish.versions import (
    MAX_MANIFEST_BYTES,
    VERSION_FILES,
    a_copy,
    check_place,
    delta_names,
    inside_a_model,
    is_of_a_model,
    itself_a_version,
    log_directories,
    originals,
    published_versions,
    require_trusted,
    unread_manifest,
)
from exporter.storage.files import Unchanged, is_gone, read_regular, regular_file
from exporter.storage.layout import (
    DELTA_NAME,
    DELTAS_DIRECTORY,
    HEAD_FILE,
    HOLD_DOCUMENT_FILE,
    HOLD_FILE,
    JOBS_DIRECTORY,
    MANIFEST_FILE,
    PAIR_NAME,
    TAGS_FILE,
    VARIABLES_PREFIX,
)
from exporter.storage.objects import ObjectReader, RemoteObject
from exporter.storage.url import Url
from exporter.storage.waiting import workers
from exporter.transfer.head import HOLD, HOLD_DOCUMENT, ITEM
from exporter.verify.version_files import Passed, runs_of, verify_bytes, verify_file, verify_files

_ITEM = re.compile(rf"({ITEM})/(.+)")
_HOLD = re.compile(rf"{HOLD}|{HOLD_DOCUMENT}|{re.escape(TAGS_FILE)}")
_JOBS_END = f"{JOBS_DIRECTORY}0"
"""All names of jobs sort before it (`0` comes after `/`), and all publications after it."""
_CONNECTIONS = 16
_LOOKS = 3
"""How often to list again, at most, because listed objects were removed before they were read."""

if TYPE_CHECKING:
    from exporter.publish.signing import Trust

T = TypeVar("T")


class Item(Struct, frozen=True):
    """A version or a delta: its path below the model, its manifest, and the manifest's bytes."""

    path: str
    manifest: Manifest
    content: bytes

    @property
    def log(self) -> str:
        """The path of the log that a delta is in; "" for a version."""
        return self.path.rpartition("/")[0]

    @property
    def log_path(self) -> str:
        """The path, below the model, of the log that a delta or a base belongs to.

        "" for a version without deltas.
        """
        entry = self.manifest.incremental
        return "" if entry is None else f"{DELTAS_DIRECTORY}/{log_name(entry.log)}"

    @property
    def is_delta(self) -> bool:
        """True for a delta, False for a version."""
        return bool(self.log)

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key by which items are copied: position first, then base, delta, merged base.

        Of two deltas that end at one position, the shorter one comes first. A server at the beginning of a
        merger's last part must find the part whenever it finds the merger, and a copy makes a merged base of
        its parts.
        """
        rank = 2 if self.manifest.merged_from is not None else int(self.is_delta)
        return self.manifest.position, rank, -(self.manifest.from_position or 0)

    @property
    def hold(self) -> str | None:
        """The path, below the model, of the hold that a rollback's delta contains.

        None for any other item.
        """
        return (
            f"{self.log}/{HOLD_FILE}" if any(file.path == HOLD_FILE for file in self.manifest.files) else None
        )

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest's bytes, in lower-case hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def bytes_(self) -> int:
        """The size of its files in bytes, without the manifest."""
        return self.manifest.bytes_


class StoredModel(Struct, frozen=True):
    """A model as it is listed in a store, with the content of its files of holds and tags.

    `objects` are all objects except those of jobs, by key below the model, and `holds` the bytes of the files
    of holds and tags, by key, too. `manifests` are the objects of manifests, by the path of the version or
    delta.
    """

    objects: dict[str, RemoteObject]
    manifests: dict[str, RemoteObject]
    holds: dict[str, bytes]


class StoredItems(StoredModel, frozen=True):
    """A model in a store with its decoded manifests, `items`, by the path of the version or delta.

    `untrusted` has, by path, the reason why a manifest is not among `items`: no trusted key has signed it.
    """

    items: dict[str, Item]
    untrusted: dict[str, NotTrusted] = field(default_factory=dict)


def local_items(model: Path) -> list[Item]:
    """Return the versions and deltas of a local model, in the order in which they are copied (`Item.order`).

    Raises:
        ManifestError: a directory cannot be listed, a manifest cannot be read, is not signed by a trusted
            key, or one version has two numbers.
        CheckpointError: a manifest is an object that cannot be fetched.
    """
    found = []
    for path in local_paths(model).values():
        try:
            found.append(local_item(model, path))
        except ManifestError:
            if not is_gone(path):  # else retention has removed it meanwhile
                raise
    return _without_copies(found, model)


def by_path(items: Iterable[Item]) -> dict[str, Item]:
    """Return items by their paths below the model, in the given order."""
    return {item.path: item for item in items}


def local_paths(model: Path) -> dict[str, Path]:
    """Return the directories of the local publications, by their paths below the model.

    Versions come first, the newest first, then deltas, log by log. ManifestError if they cannot be listed.
    """
    paths = [child.path for child in published_versions(model)]
    paths += [log / name for log in log_directories(model) for name, _, _ in delta_names(log)]
    return {path.relative_to(model).as_posix(): path for path in paths}


def path_of(name: str) -> str | None:
    """Return the path of the version or delta that an object belongs to; None if it belongs to none.

    `name` is the object's key below the model.
    """
    found = _ITEM.fullmatch(name)
    return None if found is None else found[1]


def local_item(model: Path, path: Path) -> Item:
    """Return the version or delta in the directory `path` of the model.

    Raises:
        ManifestError: its manifest cannot be read, or does not belong to this directory.
        NotTrusted: no trusted key has signed it, where keys are in force.
        CheckpointError: the manifest is an object that cannot be fetched.
        ValueError: `path` is not below `model`.
    """
    manifest, content = _manifests.of(path / MANIFEST_FILE, _read_local)
    # each time, as keys may be replaced: only what was parsed is kept
    require_trusted(content, path)
    check_place(manifest, path)
    return Item(path.relative_to(model).as_posix(), manifest, content)


_manifests: Unchanged[tuple[Manifest, bytes]] = Unchanged()
"""A continuous pull reads all local manifests at each update."""


def _read_local(file: Path) -> tuple[Manifest, bytes]:
    try:
        content = read_regular(file, MAX_MANIFEST_BYTES)
    except (OSError, LfsPointer) as error:
        raise unread_manifest(file, "read", error) from error
    return _manifest(content, file), content


def local_holds(model: Path, *, has_tags: bool = True) -> dict[str, bytes]:
    """Return the content of a model's files of holds and tags, by path below the model; empty without any.

    The files of a hold are its number (`hold`) and its document (`hold.json`); a document without a number is
    left out. Content beyond the length that such a file may have is cut off.

    Raises:
        ManifestError: the tags cannot be read; never without `has_tags`, which leaves them out.
        OSError, CheckpointError: a file of a hold cannot be read.
    """
    tags = tags_document(model) if has_tags else None
    found = {} if tags is None else {TAGS_FILE: tags}
    for directory in (model, *(model / DELTAS_DIRECTORY).glob("*")):
        # The number first: the document read after it also states the number before it.
        for path in (directory / HOLD_FILE, directory / HOLD_DOCUMENT_FILE):
            if not path.is_file():
                break  # a document without a number means nothing
            with regular_file(path) as file:
                found[path.relative_to(model).as_posix()] = file.read(_longest(path.name))
    return found


def _longest(name: str) -> int:
    if name == TAGS_FILE:
        return LONGEST_TAGS
    return LONGEST_DOCUMENT if name.endswith(HOLD_DOCUMENT_FILE) else LONGEST_HOLD


def looking_again(work: Callable[[], T]) -> T:
    """Return the result of `work`, which lists a model in a store and reads it; repeat it if objects vanish.

    The third CheckpointChanged of `work` is raised, any other error of it at once.
    """
    for _ in range(_LOOKS - 1):
        with suppress(CheckpointChanged):
            return work()
    return work()


def stored_model(store: ObjectReader) -> StoredModel:
    """Return the model at the URL of `store`, listed now; its holds and tags are read, no manifest is.

    All is empty if nothing is published there.

    Raises:
        UsageError: the URL is a version, or inside another model.
        CheckpointError: the store cannot be read; CheckpointChanged if objects vanished during three
            attempts.
    """
    return looking_again(lambda: _stored_model(store))


def _require_outside_models(place: Url) -> None:
    inner = place
    while inner.path:
        around = inner.parent
        could_be = bool(around.path) and is_of_a_model(inner.name)
        if could_be and ObjectReader(around).look(around.key(HEAD_FILE)) is not None:
            raise inside_a_model(place, around)
        inner = around


def _stored_model(store: ObjectReader) -> StoredModel:
    objects = store.contents(after=_JOBS_END)
    if not objects.keys().isdisjoint(VERSION_FILES):
        raise itself_a_version(store.url, store.url.parent)
    manifests, holds = {}, {}
    for name, each in objects.items():
        found = _ITEM.fullmatch(name)
        if found and found[2] == MANIFEST_FILE:
            manifests[found[1]] = each
        elif _HOLD.fullmatch(name):
            holds[name] = bytes(store.read(each, 0, min(each.size, _longest(name))))
    # only then, as it costs requests: whoever has publications is no directory inside a model
    if not manifests:
        _require_outside_models(store.url)
    return StoredModel(objects, manifests, holds)


def stored_items(
    store: ObjectReader,
    ours: Mapping[str, Item],
    known: StoredItems | None = None,
    look: Callable[[], StoredModel] | None = None,
    trust: Trust | None = None,
) -> StoredItems:
    """Return the model in a store with the manifests of its versions and deltas.

    A manifest that equals a local one in `ours` (by path), or was listed in `known` (None: none was), is not
    read again. With `trust`, only publications that one of its keys has signed are in `items`, all others in
    `untrusted`; None accepts all. `look` returns the listing to read; None lists the store now.

    Raises:
        ManifestError: a manifest is damaged, or one version has two numbers.
        CheckpointChanged: objects vanished during three attempts.
        UsageError: the URL is a version or inside another model, or a file of keys cannot be read.
        CheckpointError: the store cannot be read.
        ExportError: any other error of `look`.
    """
    return looking_again(
        lambda: _with_items(store, look() if look else _stored_model(store), ours, known, trust)
    )


def forged(model: StoredItems) -> dict[str, NotTrusted]:
    """Return the untrusted publications of a model that servers might accept, by path, with the reasons.

    The newest comes first. They are those after the first version that a trusted key has signed: before that
    version, signing had not begun. Without such a version, all untrusted publications are returned.
    """
    first = min((int(path) for path, item in model.items.items() if not item.is_delta), default=-1)
    return {
        path: model.untrusted[path]
        for path in sorted(model.untrusted, key=end_of, reverse=True)
        if end_of(path) > first
    }


def end_of(path: str) -> int:
    """Return the number at the end of a publication's path: a version's number, or a delta's end."""
    return int(re.split("[-/]", path)[-1])


def _with_items(
    store: ObjectReader,
    model: StoredModel,
    ours: Mapping[str, Item],
    known: StoredItems | None,
    trust: Trust | None,
) -> StoredItems:
    items: dict[str, Item] = {}
    untrusted: dict[str, NotTrusted] = {}
    new = {}
    for path, each in model.manifests.items():
        if known is not None and known.manifests.get(path) == each:
            if path in known.items:
                items[path] = known.items[path]
            else:
                untrusted[path] = known.untrusted[path]
        elif is_certainly(each, ours.get(path)):
            items[path] = ours[path]
        else:
            new[path] = each
    with workers(_CONNECTIONS, "manifests") as pool:
        contents = pool.map(lambda pair: read_stored(store, *pair), new.items())
        for path, content in zip(new, contents, strict=True):
            where = f"{store.url}/{path}"
            try:
                # before it is parsed: bytes that nobody has signed are not decoded
                if trust is not None:
                    trust.check(content, path, where)
                items[path] = item_of(path, content, where)
            except NotTrusted as error:
                untrusted[path] = error
    _without_copies(items.values(), store.url)
    return StoredItems(model.objects, model.manifests, model.holds, items, untrusted)


def is_certainly(each: RemoteObject, item: Item | None) -> bool:
    """True if an object certainly is the manifest of `item`, without reading it; False if that is unknown.

    In most stores the tag of a small object is the MD5 of its bytes; in all others no tag equals an MD5 by
    chance. False if `item` is None.
    """
    if item is None or each.size != len(item.content):
        return False
    # Python refuses md5 on FIPS systems unless it is said that no security rests on it
    return (each.tag or "").strip('"') == hashlib.md5(item.content, usedforsecurity=False).hexdigest()


def read_stored(store: ObjectReader, path: str, each: RemoteObject) -> bytes:
    """Return the bytes of a manifest in a store; `path` is the publication's below the model.

    `each` is the manifest's object as listed.

    Raises:
        ManifestError: it is too long.
        CheckpointError: it cannot be read; CheckpointChanged if it was replaced or removed.
    """
    if each.size > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{store.url}/{path}/{MANIFEST_FILE} is longer than {MAX_MANIFEST_BYTES} bytes")
    return bytes(store.read(each, 0, each.size))


def item_of(path: str, content: bytes, where: str) -> Item:
    """Return the publication at `path` below a model, whose manifest has these bytes (`content`).

    Errors call it `where`.

    Raises:
        ManifestError: the manifest cannot be decoded, or does not belong to this path.
    """
    manifest = _manifest(content, f"{where}/{MANIFEST_FILE}")
    check_place(manifest, PurePosixPath(path), where)
    return Item(path, manifest, content)


def _manifest(content: bytes, where: object) -> Manifest:
    try:
        return from_json(content)
    except ManifestError as error:
        raise ManifestError(f"{where}: {error.message}", cause=error.cause, hint=error.hint) from error


def _without_copies(items: Iterable[Item], where: object) -> list[Item]:
    """Return the items in the order in which they are copied; `where` is the model's path or URL, for errors.

    Raises:
        ManifestError: one version has two numbers.
    """
    found = sorted(items, key=lambda item: item.order)
    for copy, original in originals(
        {item.path: item.manifest for item in found if not item.is_delta}
    ).items():
        raise a_copy(where, copy, original)
    return found


def files_of(model: StoredModel, item: Item) -> dict[str, RemoteObject] | None:
    """Return the objects of an item in a store, by the paths of its files; None if the item is incomplete.

    It is if an object is missing, or has another size than the item's manifest says.
    """
    found = {file.path: model.objects.get(f"{item.path}/{file.path}") for file in item.manifest.files}
    sizes = {file.path: file.bytes_ for file in item.manifest.files}
    whole = {path: each for path, each in found.items() if each is not None and each.size == sizes[path]}
    return whole if len(whole) == len(found) else None


def require_sound(item: Item, path: Path) -> None:
    """Read all files of the publication in the directory `path`, and compare them with its manifest.

    Raises:
        VerificationError: a file differs or is missing.
        CheckpointError: the index is damaged, or a file stands for an object that cannot be fetched.
        OSError: the operating system cannot read a file.
    """
    passage = Passage(item, path)
    passage.check_files()
    passage.check_values()
    passage.check_digests()


class Passage:
    """The checks of a publication while it is copied out of the local directory `path`, or into it."""

    def __init__(self, item: Item, path: Path) -> None:
        self._item, self._path = item, path
        self._passed = Passed()
        self._compared = set[FileEntry]()

    @property
    def files(self) -> list[FileEntry]:
        """The entries of the publication's files, the data shards last, because the index lists their
        content.
        """
        return sorted(self._item.manifest.files, key=lambda file: file.crc32c is None)

    def noting(self, file: FileEntry) -> Callable[[int, memoryview], None]:
        """Return a function that computes checksums of blocks of a file, called with their offset and bytes.

        It may be called in any order and from several threads. The check methods then need not read these
        bytes again. For a data shard this method reads the index, if it exists: VerificationError or
        CheckpointError if the index is damaged, OSError if it cannot be read.
        """
        path = self._path / file.path
        return self._passed.noting(path, self._cuts.get(path, ()) if file.crc32c is None else ())

    def check_file(self, file: FileEntry) -> None:
        """Compare a complete file with the manifest: its size and, except for data shards, its checksums.

        These are a crc32c and, if it is signed, a SHA-256. The file is read unless `noting` has seen all its
        bytes and the manifest has no SHA-256 of it.
        VerificationError if it differs or does not exist, OSError or CheckpointError if it cannot be read.
        """
        verify_file(self._path, file, self._passed)

    def check_files(self) -> None:
        """Compare all files and the index with the manifest; all must be complete.

        VerificationError if one differs, CheckpointError if the index is damaged, OSError if a file cannot be
        read.
        """
        manifest, prefix = self._item.manifest, Path(DELTA_NAME) if self._item.is_delta else None
        verify_files(self._path, manifest.tensors, manifest.files, prefix=prefix, passed=self._passed)

    def check_digests(self) -> None:
        """If the manifest is signed, compare the files that `compare` has not read with their SHA-256.

        All bytes of these files are read. VerificationError if one differs, OSError or CheckpointError if one
        cannot be read.
        """
        self._check_digests(file for file in self._item.manifest.files if file not in self._compared)

    def _check_digests(self, files: Iterable[FileEntry], runner: Runner | None = None) -> None:
        if self._item.manifest.signature is not None:
            from exporter.publish.signing import verify_digests

            verify_digests(self._path, files, anew=True, runner=runner)

    def check_values(self, shards: Iterable[FileEntry] | None = None, runner: Runner | None = None) -> None:
        """Compare the stored values of all data shards, or only of `shards`, with the index.

        Values that `noting` or `compare` has seen are not read again, except strings. Tasks of `runner` read
        the others; None runs them in this process. Nothing is compared if there is no index.
        VerificationError if a value or the index differs, CheckpointError if the index is damaged or a shard
        is missing, OSError if a file cannot be read, EngineFailed if the engine of `runner` fails.
        """
        if self._index is not None:
            wanted = self.files if shards is None else shards
            named = {self._path / file.path for file in wanted if file not in self._compared}
            catalog = read_catalog(self._prefix)
            verify_bytes(catalog, runner=runner or LOCAL, passed=self._passed, shards=named)

    def compare(self, files: Sequence[FileEntry], runner: Runner | None = None) -> None:
        """Read files whose bytes `noting` has not seen, and compare their bytes with the manifest.

        If some are data shards, all other files must be there, too. The later checks do not read these files
        again. Tasks of `runner` read shards and signed files; None reads them in this process.

        Raises:
            VerificationError, CheckpointError: one differs.
            OSError: one cannot be read.
            EngineFailed: the engine of `runner` failed.
        """
        for file in files:
            self.check_file(file)
        if shards := [file for file in files if file.crc32c is None]:
            self.check_values(shards, runner)
        self._check_digests(files, runner)
        self._compared.update(files)

    def content(self, file: FileEntry) -> object:
        """Return a value that two files share only if they have the same bytes, without reading the file.

        It is the SHA-256 of a signed file; else size and checksum or, of a data shard, the checksums of all
        its values. Bytes of a shard outside of any value have no checksum: then the value includes that of
        the whole index. None for an unsigned shard that holds no value, or whose index does not exist yet.
        VerificationError or CheckpointError if the index is damaged, OSError if it cannot be read.
        """
        if file.sha256 is not None:
            return file.sha256
        if file.crc32c is not None:
            return file.bytes_, file.crc32c
        if (found := self._contents.get(self._path / file.path)) is None:
            return None
        end = 0
        for start, size, _ in found:
            end = max(end, start + size) if start <= end else file.bytes_ + 1
        is_filled = end == file.bytes_
        index = next(each for each in self.files if self._path / each.path == index_path(self._prefix))
        return file.bytes_, found, None if is_filled else (file.path, self.content(index))

    @cached_property
    def _prefix(self) -> Path:
        listed = {file.path for file in self._item.manifest.files}
        is_pair = f"{PAIR_NAME}.meta" in listed
        return self._path / (
            DELTA_NAME if self._item.is_delta else PAIR_NAME if is_pair else VARIABLES_PREFIX
        )

    @property
    def _index(self) -> Path | None:
        """The path of the index, which is compared with the manifest each time; None until it exists.

        VerificationError if it differs, OSError or CheckpointError if it cannot be read.
        """
        path = index_path(self._prefix)
        named = [file for file in self._item.manifest.files if self._path / file.path == path]
        if not path.exists() or not named:
            return None
        self.check_file(named[0])
        return path

    @cached_property
    def _cuts(self) -> dict[Path, set[int]]:
        return {
            path: {*(start for start, _, _ in runs), *(start + size for start, size, _ in runs)}
            for path, runs in self._contents.items()
        }

    @cached_property
    def _contents(self) -> Mapping[Path, tuple[tuple[int, int, int], ...]]:
        """Offset, size and checksum of each stored run of bytes, by the shard's path; no shard need exist.

        Empty without an index. VerificationError or CheckpointError if the index is damaged, OSError if it
        cannot be read.
        """
        # compared with the manifest first: nothing of a damaged index is believed
        index = self._index
        if index is None:
            return {}
        return runs_of(parse_index(read_regular(index, MAX_INDEX_BYTES), index), self._prefix)
