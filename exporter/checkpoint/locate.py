"""Find the checkpoint that a path names, and read it while a trainer may be writing or pruning.

A path is a prefix (`model.ckpt-100`, also with `.index`, `.meta` or `.data-*` behind it) or a directory. In a
directory the state file `checkpoint` comes first (a text `CheckpointState`, tensorflow/python/training/
checkpoint_state.proto), then the complete prefixes from the highest step down: compared as numbers, never by
modification time. Archives of Keras and numpy (`.keras`, `.weights.h5`, `.npz`, ...) are named as files; in a
directory they count if it holds no tensor bundle and their names are one series, differing only in numbers.
Orbax writes a directory for each step, with another name until it is finished. Other libraries keep each
checkpoint in a numbered directory of its own (Ray Train's `checkpoint_000012`, MLflow's `epoch_3`): if the
names of these directories are one series, the highest number comes first.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from google.protobuf import text_encoding
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.bundle_writer import index_path
from exporter.checkpoint.families import (
    BUNDLE,
    ORBAX,
    SAVED_MODEL,
    V1,
    archives,
    is_archive,
    is_checkpoint,
    is_series,
    read_family,
)
from exporter.checkpoint.identity import look
from exporter.checkpoint.tensor_bundle import step_in_name
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    LfsPointer,
    MissingShard,
    TruncatedFile,
    UnsafeArchive,
    UnsupportedFormat,
)
from exporter.errors import nearest as nearest_name
from exporter.storage import mirror
from exporter.storage.files import nearest, read_regular
from exporter.storage.layout import (
    CHECKPOINT_STATE_FILE,
    CHECKPOINT_SUFFIX,
    SAVED_MODEL_FILES,
    VARIABLES_NAME,
    is_saved_model,
)
from exporter.storage.local_paths import quoted

# Workers save copies of the chief's checkpoints into directories with this prefix, to be deleted.
WORKER_PREFIX = "workertemp_"

_STATE_PATH = re.compile(
    r"""(?<!\w)model_checkpoint_path\s*:\s*(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)')"""
)
# A file and the directory beside it with the tensor bundle: Keras' backups, SavedModels.
_NESTED = (("chief", "chief"), *((name, VARIABLES_NAME) for name in SAVED_MODEL_FILES))

# Directories of one checkpoint each; those of parallel trainings or of workers are not a series in time.
_NUMBERED, _NUMBER = re.compile(r"(?!\.).*[0-9]"), re.compile("[0-9]+")
_NO_SERIES = re.compile("fold|trial|seed|split|worker|rank|replica|task|shard", re.IGNORECASE)
_LOOKED_INTO = 8  # of them, the newest: older ones matter only if newer ones are incomplete
_CHECKPOINTS = "checkpoints"  # in a run's directory, beside logs

_MAX_STATE_BYTES = 1 << 24
_MAX_NAME = 250  # of a file, with `.index` behind it
_SETTLE_SECONDS = 0.1  # a file that is unchanged after this time is not being written
_LOOKS = 3  # listings of a directory whose checkpoints all vanish while they are read


def open_checkpoint(path: Path) -> Catalog:
    """Read the catalog of the checkpoint that `path` names; in a directory, of the newest complete one.

    A candidate that cannot be read is read once more after 0.1 s, as it may be being written. In a directory,
    a checkpoint that is incomplete, or changes while it is read, is passed over for the next candidate (see
    `candidates`), and a note in the catalog says so. Permanent damage is an error, never a reason to read an
    older checkpoint. Nothing replaces a checkpoint that `path` names itself. CheckpointNotFound if several
    were passed over and none is left; if only one was, its own error (CheckpointNotFound, MissingShard or
    CheckpointChanged). Otherwise the errors of `candidates` (UsageError is one), or for damage CorruptFile,
    TruncatedFile and other CheckpointErrors.
    """
    path = mirror.local(path)
    if _directory(path) is None:
        return _read_settled(candidates(path)[0])
    passed_over: dict[Path, CheckpointError] = {}
    for _ in range(_LOOKS):
        fresh = [prefix for prefix in candidates(path) if prefix not in passed_over]
        for prefix in fresh:
            try:
                catalog = _read_settled(prefix)
            except (CheckpointNotFound, CheckpointChanged, MissingShard) as error:
                passed_over[prefix] = error
            else:
                notes = [f"passed over {gone}: {error.message}" for gone, error in passed_over.items()]
                return replace(catalog, notes=(*notes, *catalog.notes))
        if not fresh:
            break
    if len(passed_over) == 1:
        raise next(iter(passed_over.values()))
    why = "; ".join(error.message for error in passed_over.values())
    raise CheckpointNotFound(f"there is no complete checkpoint in {path}", cause=why)


def candidates(path: Path) -> list[Path]:
    """Return the prefixes, or archives, that `path` may mean, best first, at least one.

    There is only one if `path` names a checkpoint or one of its files. A directory's first is the one that
    its state file names, even if that is gone; a state file that was moved with its directory still names
    files beside it. The others follow from the highest step down. A store is listed again.

    Raises:
        CheckpointNotFound: there are none, or several series.
        CheckpointError: the directory, or the store of a URL, cannot be listed; or the state file cannot be
            fetched from a store, or is a pointer of Git LFS.
        UsageError: a URL is malformed, or the library that reads stores is not installed.
        DiskFull, PublishError: files of a store cannot be kept here.
    """
    path = mirror.local(path)
    mirror.refresh(path)
    directory = _directory(path)
    if directory is not None:
        found = _in_directory(directory)
        if not found:
            raise _nothing_in(directory)
        return found
    if is_archive(path):
        return [path]
    prefix = path if _exists(index_path(path)) else path.with_name(CHECKPOINT_SUFFIX.sub("", path.name))
    if not is_checkpoint(prefix):
        raise _no_index(prefix)
    return [prefix]


def is_named(path: Path) -> bool:
    """True if `path` always means the same checkpoint; False for a directory, whose newest one is meant.

    A store's URL is listed for that: CheckpointError if the store cannot be read, UsageError if the URL is
    malformed or the library that reads stores is not installed.
    """
    path = mirror.local(path)
    return _directory(path) is None or ORBAX.matches(path)


def _directory(path: Path) -> Path | None:
    """Return the directory that `path` means: itself, or the state file's.

    None for a prefix or an archive.
    """
    if (mode := _mode(path)) and stat.S_ISDIR(mode):
        return path
    is_state = path.name == CHECKPOINT_STATE_FILE and _exists(path) and not _exists(index_path(path))
    return path.parent if is_state else None


def _in_directory(directory: Path, *, is_numbered: bool = False) -> list[Path]:
    """Return the candidates of a directory, best first; empty if there are none.

    With `is_numbered`, numbered directories below `directory` are not searched.

    Raises:
        CheckpointNotFound: there are several series.
        CheckpointError: the directory cannot be listed, or its state file cannot be fetched from a store.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot list {directory}", cause=str(error)) from None
    found = BUNDLE.candidates(directory, names)
    prefixes = sorted(found, key=_order, reverse=True)
    named = _named_by_state(directory)
    if named is not None:
        first = _beside(named, directory)
        prefixes = [first, *(prefix for prefix in prefixes if prefix != first)]
    if not found and not any(BUNDLE.matches(prefix) or V1.matches(prefix) for prefix in prefixes):
        return _without_index(directory, names, is_numbered=is_numbered)
    return prefixes


def _without_index(directory: Path, names: list[str], *, is_numbered: bool) -> list[Path]:
    """Return the candidates of a directory without a bundle, the best first: for a series, the highest step.

    The first kind that is there counts: a SavedModel, Orbax, a directory in which trainers nest checkpoints,
    V1, archives, and directories that are numbered themselves (not with `is_numbered`). `names` are the
    directory's entries, in order.

    CheckpointNotFound if there are several series, or archives that are not one series, or nothing in a
    nested directory; CheckpointError if that cannot be listed.
    """
    if alone := SAVED_MODEL.candidates(directory, names):
        return alone
    if ORBAX.matches(directory):
        return [directory]
    if steps := ORBAX.candidates(directory, names):
        return sorted(steps, key=_order, reverse=True)
    nested = next((below for mark, below in _NESTED if mark in names and below in names), None)
    if nested is not None:
        return candidates(directory / nested)
    found = V1.candidates(directory, names) or archives(directory, names)
    if not found and not is_numbered and (numbered := _numbered(directory, names)):
        return numbered
    if found and not is_series([path.name for path in found]):
        raise CheckpointNotFound(
            f"{directory} holds several archives: {', '.join(path.name for path in found[:5])}",
            cause="their names are not those of one series, as in model-01.keras, model-02.keras",
            hint=f"name one of them in its place; the last one written: {quoted(last_written(found))}",
        )
    return sorted(found, key=_order, reverse=True)


def _numbered(directory: Path, names: Iterable[str]) -> list[Path]:
    """Return the checkpoints in numbered directories of one checkpoint each, from the highest number down.

    `names` are the entries of `directory`. Of a series only the 8 newest directories are opened. A directory
    that has no checkpoint, and a higher number than all that have one, is itself in the result: it is being
    written. Empty if there are no such directories, or the newest with checkpoints has several.
    CheckpointNotFound if there are several series.
    """
    series: dict[str, list[Path]] = defaultdict(list)
    for name in names:
        if _NUMBERED.fullmatch(name) and not _NO_SERIES.search(name) and (directory / name).is_dir():
            series[_NUMBER.sub("0", name)].append(directory / name)
    found: list[list[Path]] = []
    for places in series.values():
        newest_first = sorted(places, key=lambda place: _order(place)[1], reverse=True)
        inside = ((place, _only_below(place)) for place in newest_first)
        looked = [*islice(inside, _LOOKED_INTO)]
        sizes = [len(below) for _, below in looked if below]
        if sizes[:1] == [1]:
            older = next(n for n, (_, below) in enumerate(looked) if below)
            found.append(
                [place for place, _ in looked[:older]] + [one[0] for _, one in looked if len(one) == 1]
            )
    if len(found) > 1:
        places_of = ", ".join(one[-1].parent.name for one in found)
        raise CheckpointNotFound(
            f"{directory} holds several series of checkpoints: {places_of}",
            hint=f"name a directory that has one series, or one of them: {quoted(found[0][-1].parent)}",
        )
    return found[0] if found else []


def _only_below(directory: Path) -> list[Path]:
    """Return the candidates, best first, of a directory, or else of `checkpoints/` in it.

    Empty if neither has any, or neither can be listed; empty, too, for a version of a published model.
    """
    if is_saved_model(directory):
        return []
    for place in (directory, directory / _CHECKPOINTS):
        with suppress(CheckpointError):
            if found := _in_directory(place, is_numbered=True):
                return found
    return []


def last_written(paths: Iterable[Path]) -> Path:
    """Return the path that was modified last; a path that is gone counts as the oldest."""
    return max(paths, key=lambda path: (path.stat().st_mtime_ns if path.exists() else 0, path.name))


def _order(path: Path) -> tuple[int, list[str | int]]:
    """Return a key that sorts names by step: (step, the name's texts and numbers in turn).

    The step is -1 for a name without one: such names come first, ordered by their numbers.
    """
    parts = re.split(r"([0-9]+)", path.name)
    step = step_in_name(path.name)
    return -1 if step is None else step, [int(part) if at % 2 else part for at, part in enumerate(parts)]


def _named_by_state(directory: Path) -> Path | None:
    """Return the path that a directory's state file names as newest, relative or absolute as in the file.

    None if there is no state file, it cannot be read, is a pointer of Git LFS, or names none. CheckpointError
    if it cannot be fetched from a store.
    """
    try:
        content = read_regular(directory / CHECKPOINT_STATE_FILE, _MAX_STATE_BYTES)
        text = content.decode(errors="surrogateescape")
        found = _STATE_PATH.search(text)
        # The text form of protobuf has octal escapes for bytes that are not ASCII.
        name = os.fsdecode(text_encoding.CUnescape(found[1] or found[2] or "")) if found else ""
    except (OSError, ValueError, LfsPointer):
        return None
    path = Path(name)
    return path if 0 < len(path.name) < _MAX_NAME and "\0" not in name else None


def _beside(named: Path, directory: Path) -> Path:
    """Return the path of the prefix `named` by a state file in `directory`, even if the directory was moved.

    The result is the path beside the state file or the path that it names, whichever has an index; the path
    beside it if neither has.
    """
    neighbour = directory / named.name
    # an absolute path in a store's state file belongs to the trainer's machine, not to this one
    if mirror.is_remote(directory) and (named.is_absolute() or ".." in named.parts):
        return neighbour
    places = [neighbour, named] if named.is_absolute() else [directory / named, neighbour]
    return next((place for place in places if _exists(index_path(place))), neighbour)


def _read_settled(prefix: Path) -> Catalog:
    """Read the catalog of `prefix`; after a failure wait 0.1 s and read it once more.

    CheckpointChanged if the second reading fails too, and the files changed meanwhile; else its own error, a
    CheckpointError, whose hint names an older checkpoint if the file is damaged. CheckpointNotFound,
    UnsupportedFormat and UnsafeArchive are raised at once.
    """
    try:
        return read_family(prefix)
    except (CheckpointNotFound, UnsupportedFormat, UnsafeArchive):
        raise
    except CheckpointError:
        before = look(prefix)
        time.sleep(_SETTLE_SECONDS)
        is_settled = look(prefix) == before
    try:
        return read_family(prefix)
    except CheckpointError as error:
        if is_settled:
            if isinstance(error, CorruptFile | TruncatedFile):
                error.advise(_in_its_place(prefix))
            raise
        raise CheckpointChanged(f"{prefix} is being written or removed", cause=error.message) from error


def _in_its_place(damaged: Path) -> str:
    """Return a hint that names an older checkpoint instead of a damaged one; "" if there is none."""
    try:
        there = candidates(damaged.parent)
    except CheckpointError:
        return ""
    older = there[there.index(damaged) + 1 :] if damaged in there else []
    if not older:
        return ""
    return f"copy the checkpoint again, or name the one before it: --ckpt-dir {quoted(older[0])}"


def _exists(path: Path) -> bool:
    return _mode(path) is not None


def _mode(path: Path) -> int | None:
    """Return the mode bits of a path, links followed; None if it does not exist, or may not be looked at."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def _no_index(prefix: Path) -> CheckpointError:
    if not _exists(prefix.parent):
        return CheckpointNotFound(f"there is no directory {prefix.parent}", hint=_suggestion(prefix))
    if _exists(prefix.with_name(f"{prefix.name}.meta")):
        return CheckpointNotFound(
            f"there is no {index_path(prefix)}",
            cause="its .meta is a left-over: the values were pruned or moved",
        )
    if _exists(prefix):  # a pipe, a device, a socket
        return CheckpointNotFound(
            f"{prefix} is neither a file nor a directory",
            cause="a checkpoint is read from any of its bytes on, which a pipe cannot give",
            hint="write it into a file, and name that",
        )
    try:
        there = [path.name for path in candidates(prefix.parent)]
    except CheckpointError:
        there = []
    close_by = _nearest_step(prefix.name, there)
    close_by = close_by or nearest_name(prefix.name, [*there, *_names(prefix.parent)])
    return CheckpointNotFound(
        f"there is no {prefix}: no directory, no archive, and no {index_path(prefix).name}",
        cause=f"the directory holds {', '.join(there[:5])}" if there else "",
        hint=f"name what is there: {quoted(prefix.with_name(close_by))}"
        if close_by
        else "name a directory of checkpoints, a checkpoint's prefix, or an archive",
    )


def _nearest_step(name: str, there: list[str]) -> str:
    """Return the name in `there` with the same stem as `name` and the nearest step.

    "" if `name` has no step, or no name has its stem.
    """
    step, stem = step_in_name(name), name.rpartition("-")[0]
    alike = [other for other in there if other.rpartition("-")[0] == stem]
    steps = {found: other for other in alike if (found := step_in_name(other)) is not None}
    return "" if step is None or not steps else steps[min(steps, key=lambda found: abs(found - step))]


def _suggestion(prefix: Path) -> str:
    """Return a hint that asks whether an existing path near `prefix` was meant; "" if none is near."""
    close = nearest(prefix.parent)
    if close is None:
        return ""
    there = close / prefix.name
    return f"did you mean {quoted(there if _exists(there) or _exists(index_path(there)) else close)}?"


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except OSError:
        return []


def _is_published(directory: Path) -> bool:
    """True if a directory holds versions of a SavedModel: numbered directories, each with one."""
    return any((child / file).exists() for child in directory.glob("[0-9]*") for file in SAVED_MODEL_FILES)


def _below(directory: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the directories that have a checkpoint: of `names` in `directory`, and `checkpoints/` in each."""
    for name in names:
        for place in (directory / name, directory / name / _CHECKPOINTS):
            with suppress(CheckpointError, PermissionError):  # as of lost+found
                if place.is_dir() and not is_saved_model(place) and _in_directory(place):
                    yield place


def _nothing_in(directory: Path) -> CheckpointError:
    """Return the CheckpointNotFound for a directory; its cause and hint name the files found instead.

    The directory and those below it are listed.
    """
    names, named = sorted(_names(directory)), _named_by_state(directory)
    state = f"its state file names {named}, which is not there" if named else ""
    # left-overs of writers: unfinished shards, and copies that workers save
    kept = [name for name in names if "_temp_" not in name and not name.startswith(WORKER_PREFIX)]
    below = next(_below(directory, kept), None)
    hint = "" if below is None else f"there are checkpoints in {quoted(below)}"
    if _is_published(directory):
        state = state or "it is a published model, and not what a trainer saves"
        hint = f"see what is published: export-model inspect {quoted(directory)}"
    elif below is None and (models := [name for name in kept if _is_published(directory / name)]):
        state = state or "it holds published models, and not what a trainer saves"
        hint = f"see what is published: export-model inspect {quoted(directory / models[0])}"
    cause = "; ".join(filter(None, (state, _parts_among(names))))
    return CheckpointNotFound(f"there is no complete checkpoint in {directory}", cause=cause, hint=hint)


def _parts_among(names: list[str]) -> str:
    """Return a text for an error's cause: how many `.meta` and `.data-*` files are among `names`.

    "it is empty" without names; "" if there are only other files.
    """
    if not names:
        return "it is empty"
    metas = sum(name.endswith(".meta") for name in names)
    shards = sum(".data-" in name for name in names)
    kinds = [f"{count} {kind} files" for count, kind in ((metas, ".meta"), (shards, ".data-*")) if count]
    return f"found: {' and '.join(kinds)} but no .index" if kinds else ""
