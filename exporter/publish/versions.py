"""Read a model base path: its versions and their manifests, deltas by their names, the last position.

Readers of a version take a lease, which keeps retention from removing it. Errors about a path without
publications name the model that was probably meant.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec import Struct

from exporter.delta.format import POSITION_LIMIT, log_name, span_name
from exporter.errors import (
    ExportError,
    LfsPointer,
    ManifestError,
    NotTrusted,
    NotUpdatable,
    TargetNotWritable,
    UsageError,
    is_unread,
)
from exporter.publish.manifest import Manifest, ManifestHead, from_json, head_from_json
from exporter.storage.files import (
    Unchanged,
    close_quietly,
    nearest,
    open_regular,
    read_record,
    still_at,
    try_lock,
)
from exporter.storage.layout import (
    CHECKPOINT_STATE_FILE,
    DELTAS_DIRECTORY,
    IDENTITY_FILE,
    MANIFEST_FILE,
    SAVED_MODEL_FILES,
    TAKEN_FILE,
)
from exporter.storage.local_paths import quoted

_ADDRESS = re.compile(r"[^/]+:[0-9]+")
"""A server's address, typed where a model's path is expected."""


def nothing_published(model: Path) -> NotUpdatable:
    """The error for a model base path without a version; its hint names the model that was probably meant.

    It is returned, not raised.
    """
    what = f"nothing is published under {model}" if model.exists() else f"there is no model {model}"
    if found := likely_model(model):
        return NotUpdatable(what, hint=f"did you mean {quoted(found)}?")
    if (model / CHECKPOINT_STATE_FILE).exists():
        return NotUpdatable(what, hint=f"it holds checkpoints: export-model inspect {quoted(model)}")
    if _ADDRESS.fullmatch(str(model)):
        return NotUpdatable(what, hint=f"of a server, ask: serve-model status {quoted(model)}")
    export = f"export-model --ckpt-dir DIR --out {quoted(model)} --model WHAT --incr"
    return NotUpdatable(what, hint=f"publish a base: {export}")


def likely_model(model: Path) -> Path | None:
    """Return the path of a published model near `model`, which has no version itself.

    It is its parent, a misspelt neighbour, or a child; MODEL/VERSION and MODEL@POSITION give MODEL. Without
    one, the nearest existing path; None if `model` exists, nothing is near, or a directory cannot be read.
    """
    place = model if model.exists() else nearest(model)
    tried = [model.parent] if place is None else [place, place.parent]  # it may be MODEL/VERSION
    if (named := model.name.rpartition("@")[0]) and not model.exists():  # or MODEL@POSITION
        tried.append(model.parent / named)  # also of `.@20`
    try:
        within = sorted(place.iterdir()) if place is not None and place.is_dir() else []
        for found in (*tried, *within):
            if found != model and _is_model(found):
                return found
    except (OSError, ExportError):
        return None
    return place if place != model else None


def _is_other_than_directory(path: Path) -> bool:
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except OSError:  # it does not exist yet, or this user may not see it
        return False


def _is_model(path: Path) -> bool:
    return path.is_dir() and newest_version(path) is not None


def models_in(directory: Path) -> list[str]:
    """The names of the models in a directory, sorted; none if the directory or a model cannot be read."""
    try:
        return sorted(child.name for child in directory.iterdir() if _is_model(child))
    except (OSError, ExportError):
        return []


if TYPE_CHECKING:
    from exporter.publish.signing import Signer, Trust

T = TypeVar("T")

MAX_MANIFEST_BYTES = 256 << 20
"""A longer manifest is refused unread; 20,000 tensors take 3 MB."""
VERSION_FILES = (MANIFEST_FILE, *SAVED_MODEL_FILES)
"""Files that only a version has at its top."""

_manifests: Unchanged[Manifest] = Unchanged()
_MOST_SHOWN = 5
_INT64 = range(-(1 << 63), 1 << 63)
_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_DELTA = re.compile(r"([0-9]{20})-([0-9]{20})", re.ASCII)
_LONGEST_IDENTITY = 80  # 64 digits, and a line break
_MOST_NAMES = 1 << 16
"""The most delta names kept parsed: a watch lists the same thousands several times for each new one."""


class VersionDir(Struct, frozen=True):
    """A name under the model base path that TensorFlow Serving takes for a version.

    `has_manifest`: it is a directory with a manifest, so this program published it.
    """

    version: int
    path: Path
    has_manifest: bool


def served_version(name: str) -> int | None:
    """Return the version number that TensorFlow Serving reads from a name in a model's directory.

    None if it skips the name. The whole name must be a decimal int64; blanks around it and leading zeros are
    allowed. Source: ParseVersionNumber in
    tensorflow_serving/sources/storage_path/file_system_storage_path_source.cc.
    """
    # no file has a longer name; of thousands of digits `int` raises
    if len(name) > 255 or not _INTEGER.fullmatch(name):
        return None
    number = int(name)
    return number if number in _INT64 else None


def version_dirs(model: Path) -> tuple[VersionDir, ...]:
    """Return everything in a model base path that TensorFlow Serving takes for a version, the newest first.

    "Newest" is the greatest number. Plain files count, too; () if the path does not exist. ManifestError if
    it, or a version in it, cannot be looked at.
    """
    found = []
    for entry in _entries(model):
        version = served_version(entry.name)
        if version is not None:
            # not through a link: what it leads to is another's, and retention neither counts nor removes it
            has_manifest = entry.is_dir(follow_symlinks=False) and _is_regular(
                Path(entry.path) / MANIFEST_FILE
            )
            found.append(VersionDir(version, Path(entry.path), has_manifest))
    return tuple(sorted(found, key=lambda child: child.version, reverse=True))


def published_versions(model: Path) -> list[VersionDir]:
    """Return the versions with a manifest, the newest first; ManifestError if the path cannot be listed."""
    return [child for child in version_dirs(model) if child.has_manifest]


def newest_version(model: Path) -> VersionDir | None:
    """The newest version with a manifest; None without one; ManifestError if the path cannot be listed."""
    return newest_of(version_dirs(model))


def newest_of(versions: Iterable[VersionDir]) -> VersionDir | None:
    """The newest listed version (as by `version_dirs`) with a manifest; None if there is none."""
    return next((child for child in versions if child.has_manifest), None)


def require_base_path(model: Path) -> None:
    """Refuse a path that cannot be a model base path, whether or not it exists.

    Raises:
        UsageError: `model` is itself a version, is inside another model, or holds models and no version.
        TargetNotWritable: it, or a parent, is a file or a broken symbolic link.
        ManifestError: it cannot be listed.
    """
    for place in (model, *model.parents):
        # here, since `mkdir` would only say that it exists
        if place.is_symlink() and not place.exists():
            raise TargetNotWritable(
                f"{place} is a symbolic link that leads nowhere",
                cause=f"it names {place.readlink()}",
                hint="make the directory that it names, mount it, or name another one with --out",
            )
        if _is_other_than_directory(place):
            raise TargetNotWritable(
                f"{place} is a file: a model is a directory", hint="name a new directory in its place"
            )
    if any(_is_regular(model / name) for name in VERSION_FILES):
        raise itself_a_version(model, model.parent)
    # resolved: a link may lead into another model
    place = model.resolve()
    for inner in (place, *place.parents):
        with suppress(ManifestError):  # an unreadable version is not this user's to publish over
            if is_of_a_model(inner.name) and newest_version(inner.parent) is not None:
                raise inside_a_model(model, inner.parent)
    if not _is_model(model) and (found := models_in(model)):
        raise UsageError(
            f"{model} is not a model: it holds {', '.join(found[:_MOST_SHOWN])}",
            cause="each model has a directory of its own, which servers are given",
            hint=f"name the model, as {quoted(model / found[0])}, or a new one beside it",
        )


def is_of_a_model(name: str) -> bool:
    """True for names with a meaning below a model base path: a version's number, or `deltas`."""
    return name == DELTAS_DIRECTORY or served_version(name) is not None


def inside_a_model(place: object, model: object) -> UsageError:
    """The error for a model base path `place` among the versions and deltas of the model `model`."""
    return UsageError(
        f"{place} lies in the published model {model}",
        cause="servers and retention take what is there for versions and deltas of that model",
        hint=f"name a directory beside it; to publish to it: {quoted(model)}",
    )


def itself_a_version(place: object, above: object) -> UsageError:
    """The error for a version, `place`, that is named as a model base path.

    `above` is the directory it is in.
    """
    return UsageError(
        f"{place} is itself a version",
        cause="a model base path holds versions, in directories that are named by numbers",
        hint=f"name the directory above it: {quoted(above)}",
    )


def identities_of(versions: Iterable[VersionDir]) -> tuple[str, ...]:
    """Return the identities of the models to which versions belong, in the order of the versions, each once.

    There is one, unless versions of another model were put there; () if all are of earlier releases, which
    have no identity. Versions are as `version_dirs` lists them; those with a damaged or untrusted manifest
    are skipped.

    Raises:
        CheckpointError: a manifest cannot be fetched from its store.
        UsageError: keys are trusted there, and a file of keys cannot be read.
    """
    found: dict[str, None] = {}
    for child in versions:
        with suppress(ManifestError):
            identity = read_head(child.path).identity if child.has_manifest else None
            found |= {} if identity is None else {identity: None}
    return tuple(found)


def several_models(place: object, identities: Iterable[str]) -> NotTrusted:
    """The error for the path or URL `place` with publications of several models, all by trusted keys."""
    found = tuple(identities)
    return NotTrusted(
        f"publications of {len(found)} models lie under {place}",
        cause=f"their identities are {', '.join(found)}",
        hint=f"find out who wrote there; name the model that is meant: --signed-as NAME@{found[-1]}",
    )


def last_position(model: Path, versions: Iterable[VersionDir]) -> int | None:
    """Return the greatest position in use in a model, whose `versions` are as `version_dirs` lists them.

    Versions and positions grow together, however versions are numbered, so the newest base has the greatest
    position of all bases: only its manifest is read. None if nothing is published.

    Raises:
        ManifestError: the manifest of the newest base is damaged, so that its position is unknown; or a
            directory cannot be listed.
        NotTrusted, UsageError: keys are trusted there, and none has signed that manifest, or they cannot
            be read.
        CheckpointError: that manifest cannot be fetched from its store.
    """
    versions = tuple(versions)
    newest = newest_of(versions)
    bases = [] if newest is None else [read_head(newest.path).position]
    return max([*bases, *unread_positions(versions), *delta_positions(model)], default=None)


def unread_positions(versions: Iterable[VersionDir]) -> list[int]:
    """The numbers of versions without a manifest that are newer than every version with one, newest first.

    `versions` are as `version_dirs` lists them. Such a version may be a base that has lost its manifest. A
    base's number is its position: a server that has loaded it would take another publication at that position
    for it.
    """
    unread = takewhile(lambda child: not child.has_manifest, versions)
    return [child.version for child in unread if child.version >= 0]


class AbandonedNumbers(Struct, frozen=True):
    """The greatest numbers of publications that were begun in a store and abandoned; None if there are none.

    Their uploads may still go on, so that no other publication may have these numbers.
    """

    version: int | None = None
    position: int | None = None


def taken(model: Path) -> AbandonedNumbers:
    """Return the greatest version and position of publications that were begun in the store and abandoned.

    The model's directory has the store's list of them; both are None for a local model, or if the list cannot
    be read.
    """
    names = [PurePosixPath(path).name for path in _taken_paths(model)]
    ends = [int(match[2]) for name in names if (match := _DELTA.fullmatch(name))]
    numbers = [number for name in names if (number := served_version(name)) is not None]
    return AbandonedNumbers(max(numbers, default=None), max(ends, default=None))


def is_taken(model: Path, path: Path) -> bool:
    """True if a version's or delta's path in the model is in the store's list of abandoned publications.

    ValueError if `path` is not below `model`.
    """
    return path.relative_to(model).as_posix() in _taken_paths(model)


_MOST_TAKEN_BYTES = 64 << 20


def _taken_paths(model: Path) -> list[str]:
    try:
        return read_record(model / TAKEN_FILE, _MOST_TAKEN_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def greatest(*numbers: int | None) -> int | None:
    """The greatest of the numbers that are not None; None if all are."""
    return max((number for number in numbers if number is not None), default=None)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published directory; without trusted keys it is parsed again only if it has changed.

    Raises:
        ManifestError: there is none, it cannot be read, it is too long, or it is not a valid manifest.
        NotTrusted: keys are trusted there, and none of them has signed it (`exporter.publish.signing`).
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError: it is an object of a store that cannot be fetched.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    path = directory / MANIFEST_FILE
    # with keys the signature is checked each time: they are replaced at any time
    return _manifests.of(path, _read) if trust_of(directory) is None else _read(path)


def check_place(manifest: Manifest, path: PurePath, where: object = None) -> None:
    """Refuse a manifest that, by its positions, does not belong to `path`, a version's or delta's directory.

    A delta, or a version that takes deltas, must have the name that its positions give. Other versions may
    have any number. The error names the place as `where`, or else as `path`.

    Raises:
        ManifestError: the manifest names another place, as after a copy or a rename.
    """
    start, end, entry = manifest.from_position, manifest.position, manifest.incremental
    if start is not None:
        is_here = path.name == span_name(start, end)
        is_here &= entry is None or path.parent.name == log_name(entry.log)
    else:
        number = served_version(path.name)
        is_here = number is not None and (entry is None or number == end)
    if not is_here:
        raise ManifestError(
            f"{where or path}/{MANIFEST_FILE} names {'version' if start is None else f'{start} to'} {end}",
            cause="the directory, or its manifest, was copied or renamed",
            hint="remove that directory, or give it the name back that its manifest has",
        )


def originals(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Map each version that is a copy of another (two numbers have one manifest) to its original.

    `manifests` are those of all versions, by their numbers as text, as are the keys and values returned. The
    original is the version whose number is its position, or else the least number. ValueError if a key is not
    a number.
    """
    found: dict[str, str] = {}
    firsts: dict[datetime, str] = {}
    for name in sorted(manifests, key=lambda name: (int(name) != manifests[name].position, int(name))):
        first = firsts.setdefault(manifests[name].created, name)
        if first != name and manifests[first] == manifests[name]:
            found[name] = first
    return found


def a_copy(model: object, copy: str, original: str) -> ManifestError:
    """The error for the version `copy` of a model that is the version `original` under a second number."""
    again = f"export-model rollback {quoted(model)} --to {quoted(original)}"
    return ManifestError(
        f"{model}/{copy} is a copy of {model}/{original}: one version has two numbers",
        hint=f"remove the copy; an older version is served again by {again}",
    )


def _read(manifest: Path) -> Manifest:
    with _open_manifest(manifest.parent) as (descriptor, path):
        return _parse(descriptor, path, from_json)


def read_head(directory: Path) -> ManifestHead:
    """Return the head of a version's or delta's manifest: its position and time of publication, among others.

    Raises:
        ManifestError: there is none, it cannot be read, it is too long, or its head is damaged.
        NotTrusted: keys are trusted there, and none of them has signed it.
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError: it is an object of a store that cannot be fetched.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    with _open_manifest(directory) as (descriptor, path):
        return _parse(descriptor, path, head_from_json)


@contextmanager
def lease(version: Path) -> Iterator[Manifest]:
    """Lease a published version for the block, and yield its manifest: retention keeps the version meanwhile.

    The lease is a shared lock (flock) of the version's manifest; it ends with the block or with the process.

    Raises (on entry):
        ManifestError: the version vanished or is vanishing, or its manifest is damaged.
        NotTrusted: keys are trusted there, and none of them has signed the manifest.
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError: the manifest cannot be fetched from its store.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
        OSError: the file system has no locks.
    """
    with _open_manifest(version) as (descriptor, path):
        # in this order: see `retention.move_away`
        if not try_lock(descriptor, shared=True) or not still_at(descriptor, path):
            raise ManifestError(f"{version} is being removed", hint="take a newer version")
        yield _parse(descriptor, path, from_json)


@contextmanager
def _open_manifest(directory: Path) -> Iterator[tuple[int, Path]]:
    path = directory / MANIFEST_FILE
    try:
        descriptor = open_regular(path, follow=False)
    except (OSError, LfsPointer) as exc:
        raise unread_manifest(path, "opened", exc) from exc
    try:
        yield descriptor, path
    finally:
        close_quietly(descriptor)


def unread_manifest(path: Path, what: str, exc: OSError | LfsPointer) -> ManifestError:
    """The error for a manifest that could not be "opened" or "read" (the word `what`) because of `exc`.

    If the manifest's bytes are unknown (no permission, a failing disk), the hint is to make it readable;
    otherwise the hint is the one for damage. For a pointer of Git LFS the hint is to fetch the file.
    """
    if isinstance(exc, LfsPointer):
        return ManifestError(f"{path} cannot be {what}", cause="it is a pointer of Git LFS", hint=exc.hint)
    hint = MAKE_READABLE if is_unread(exc) else ""
    return ManifestError(f"{path} cannot be {what}", cause=exc.strerror or str(exc), hint=hint)


def _parse(descriptor: int, path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as exc:
        raise unread_manifest(path, "read", exc) from exc
    if len(content) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{path} is longer than {MAX_MANIFEST_BYTES} bytes")
    # the bytes that are parsed, not the file again: it could have others by then
    require_trusted(content, path.parent)
    try:
        return parse(content)
    except ManifestError as exc:
        raise ManifestError(f"{path}: {exc.message}", cause=exc.cause, hint=exc.hint) from exc


class _Keys(NamedTuple):
    """The keys in force for a base path."""

    signer: Signer | None = None
    trust: Trust | None = None
    unsigned: bool = False


@contextmanager
def in_force(
    model: Path, signer: Signer | None = None, trust: Trust | None = None, *, unsigned: bool = False
) -> Iterator[None]:
    """During the block, sign publications under a base path, and accept only those signed by trusted keys.

    `signer` is the key that signs; None: nothing is signed. `trust` has the trusted keys; None: everything is
    accepted. `unsigned`: a publication after a signed one may be published without a key. Blocks of several
    threads may overlap, and count for the whole process: the keys of each are in force until that block ends;
    of several keys, the newest block's count.
    """
    place = os.path.abspath(model)  # noqa: PTH100  `resolve` follows links
    keys = _Keys(signer, trust, unsigned)
    with _changing:
        # a new list each time: readers take no lock
        _in_force[place] = [*_in_force.get(place, ()), keys]
    try:
        yield
    finally:
        with _changing:
            left = [each for each in _in_force[place] if each is not keys]  # equal ones are of other blocks
            if left:
                _in_force[place] = left
            else:
                del _in_force[place]


_changing = threading.Lock()
_in_force: dict[str, list[_Keys]] = {}


def _keys_of(place: str) -> _Keys:
    """The newest signer and the newest trust in force for a base path, each None without one.

    `place` is the absolute path. The third part is True if unsigned publications after signed ones are
    permitted.
    """
    found = _in_force.get(place, [])[::-1]
    return _Keys(
        next((keys.signer for keys in found if keys.signer is not None), None),
        next((keys.trust for keys in found if keys.trust is not None), None),
        any(keys.unsigned for keys in found),
    )


def pinned_identity(model: Path) -> str | None:
    """Return the identity of the only model from which a copy accepts publications; None if none is pinned.

    It is read from a file in the model's directory.

    Raises:
        NotTrusted: the file cannot be read, or does not hold an identity.
    """
    path, cause = model / IDENTITY_FILE, "it is not an identity"
    try:
        found = read_record(path, _LONGEST_IDENTITY).decode("ascii", "replace").strip()
        if re.fullmatch(r"[0-9a-f]{16,64}", found):
            return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        cause = str(error.strerror)
    raise NotTrusted(
        f"{path} does not say of which model this copy takes publications",
        cause=cause,
        hint=f"find out who changed it; the next pull pins what is here once it is gone: rm {quoted(path)}",
    )


def signer_of(model: Path) -> Signer | None:
    """Return the key that signs publications under a base path in this process; None: nothing is signed."""
    return _keys_of(os.path.abspath(model)).signer if _in_force else None  # noqa: PTH100


def is_trusting(model: Path) -> bool:
    """True if trusted keys are in force in this process for the base path `model`.

    Then only their publications are accepted there, because others may write to it.
    """
    return bool(_in_force) and _keys_of(os.path.abspath(model)).trust is not None  # noqa: PTH100


def require_signer(model: Path, newest: Manifest) -> None:
    """Refuse to publish without a key after the signed publication `newest`, unless `in_force` permits it.

    Raises:
        UsageError: no key is in force for the model; readers that trust keys would ignore this
            publication and all later ones.
    """
    keys = _keys_of(os.path.abspath(model))  # noqa: PTH100
    if newest.signature is not None and keys.signer is None and not keys.unsigned:
        raise UsageError(
            f"{model} is signed, and no key is named to sign what follows",
            cause=f"the key {newest.signature.key} has signed position {newest.position}; readers that trust "
            "keys take nothing that is not signed",
            hint="name the key: --sign-key FILE; or, if signing is to end: --unsigned",
        )


def trust_of(directory: Path) -> tuple[Trust, str] | None:
    """The keys trusted for a version or delta, and its path below its model; None: everything is accepted.

    `directory` is the version's or the delta's. Keys are in force by `in_force`, in this process.
    """
    if not _in_force:
        return None
    directory = Path(os.path.abspath(directory))  # noqa: PTH100
    # a delta is three levels below its model: deltas/LOG/START-END
    for model in directory.parents[:3]:
        trust = _keys_of(str(model)).trust
        if trust is not None:
            return trust, directory.relative_to(model).as_posix()
    return None


def require_signed_bytes(directory: Path, manifest: Manifest, *, but_shards: bool = False) -> None:
    """Compare a version's or delta's files with their signed digests, if keys are trusted there.

    Call it before the bytes are used; `but_shards` skips data shards, whose values are then not used. Files
    without a digest are not compared. Without trusted keys nothing is read.

    Raises:
        VerificationError: a file differs.
        OSError, CheckpointError: a file cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    if trust_of(directory) is not None:
        from exporter.publish.signing import verify_digests

        files = (file for file in manifest.files if not but_shards or file.crc32c is not None)
        verify_digests(directory, files)


def require_trusted(content: bytes, directory: Path) -> None:
    """Refuse a manifest, `content`, unless a key that is trusted for its version or delta has signed it.

    `directory` is the version's or the delta's. If no keys are trusted there, every manifest is accepted.

    Raises:
        NotTrusted: it is not signed, or by another key, for another model or path, or it was altered.
        UsageError: a file of keys cannot be read or holds anything but public keys, or the library is not
            installed.
    """
    if (found := trust_of(directory)) is not None:
        trust, path = found
        trust.check(content, path, directory)


def delta_names(log: Path) -> list[tuple[str, int, int]]:
    """Return the name, start and end of every delta in a log's directory, sorted; other names are skipped.

    Empty if there is no such directory; ManifestError if it cannot be listed. A symbolic link to a directory
    counts: servers' graphs cannot tell it from a delta. If they applied it and the exporter did not see it,
    its positions would be published a second time, with other values.
    """
    found = [named for entry in _entries(log) if (named := delta_named(entry.name)) and entry.is_dir()]
    return sorted(found)  # all have the same number of digits, so names sort as numbers do


@lru_cache(maxsize=_MOST_NAMES)
def delta_named(name: str) -> tuple[str, int, int] | None:
    """Return the name, start and end of the delta whose directory has this name; None for any other name."""
    match = _DELTA.fullmatch(name)
    if match is None:
        return None
    start, end = int(match[1]), int(match[2])
    return (name, start, end) if start < end < POSITION_LIMIT else None


def delta_positions(model: Path, *, but: Path | None = None) -> Iterator[int]:
    """Yield the end of each delta of each log, log by log, except of the log in the directory `but`.

    With `but` None no log is left out. Only names are read, as there may be thousands. ManifestError, while
    iterating, if a directory cannot be listed.
    """
    for log in log_directories(model):
        if log != but:
            yield from (end for _, _, end in delta_names(log))


def log_directories(model: Path) -> list[Path]:
    """Return the directories of a model's logs, sorted; also of logs without a base.

    ManifestError if they cannot be listed.
    """
    return sorted(Path(entry.path) for entry in _entries(model / DELTAS_DIRECTORY) if entry.is_dir())


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise _unreadable(directory, exc) from exc


def _is_regular(path: Path) -> bool:
    try:
        # of the name itself: a link was not published here
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise _unreadable(path, exc) from exc


MAKE_READABLE = "make it readable for this user, or move it away"


def _unreadable(path: Path, exc: OSError) -> ManifestError:
    return ManifestError(
        f"{path} cannot be looked at: what is published there is not known",
        cause=exc.strerror or str(exc),
        hint=MAKE_READABLE,
    )
