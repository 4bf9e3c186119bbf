"""Verify a bundle: its files (index, sizes and manifest), and its bytes (every kept tensor's checksum).

`Checksum` tasks read the bytes and write nothing; their receipts have the checksums.
"""

from __future__ import annotations

import os
import stat
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from exporter.catalog import Catalog, Extent
from exporter.checkpoint.bundle_writer import shard_path
from exporter.checkpoint.tensor_bundle import Index, check_values, read_catalog
from exporter.errors import CheckpointError, VerificationError
from exporter.jobs.runner import LOCAL, Runner
from exporter.jobs.shard_job import Stored, stored_runs
from exporter.jobs.shard_sections import renumbered
from exporter.jobs.task import Input, Range, RangeChecksums, Receipt, Task
from exporter.publish.manifest import OVERWRITTEN, FileEntry, TensorEntry
from exporter.publish.versions import read_manifest
from exporter.storage.files import regular_file
from exporter.storage.layout import MANIFEST_FILE, PAIR_NAME, SAVED_MODEL_FILE, VARIABLES_PREFIX
from exporter.storage.output_directory import Directory
from exporter.terminal.progress import NoProgress, Progress
from exporter.wire.crc32c import combine, crc_of, extend, mask
from exporter.wire.dtypes import DType

_Piece = tuple[Stored, Range]  # a range of a stored run; its input is the number of the catalog's shard


class Checksum(Task, frozen=True, kw_only=True):
    """A task that reads ranges; its receipt has the checksum of each. It has no output."""

    operation: ClassVar[str] = "checksum"

    ranges: tuple[Range, ...]

    def run(self, directory: Directory) -> Receipt:
        """Read the ranges of every input; return a receipt with the plain crc32c of each range.

        The checksums are in the order of `ranges`. Nothing is written but scratch files in `directory`.
        Raises CheckpointChanged if an input is not as planned or too short, CheckpointError if it cannot be
        read, DiskFull or PublishError if a scratch file cannot be written.
        """
        crcs = [0] * len(self.ranges)
        for number, source in enumerate(self.inputs):
            mine = [index for index, each in enumerate(self.ranges) if each.input == number]
            found = source.checksums([self.ranges[index] for index in mine], directory.scratch)
            for index, crc in zip(mine, found, strict=True):
                crcs[index] = crc
        return Receipt(self.name, read=tuple(crcs))


_DAMAGED_HINT = "publish it again from the checkpoint; if the source is damaged, name an older one"


def verify_published(version: Path) -> tuple[str, ...]:
    """Compare a published version's files with its manifest; return the paths of unlisted files, sorted.

    Unlisted files do no harm. Their paths are relative to the version.

    Raises:
        ManifestError: there is no valid manifest; NotTrusted if no trusted key has signed it.
        VerificationError: a file or tensor is missing, or differs from its entry: see `verify_files`.
        UsageError: keys are trusted there, and a file of keys cannot be read.
        CheckpointError, OSError: a file cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    manifest = read_manifest(version)
    return verify_files(version, manifest.tensors, manifest.files)


def verify_files(
    bundle: Path,
    tensors: Iterable[TensorEntry],
    files: Iterable[FileEntry] | None = None,
    *,
    prefix: Path | None = None,
    passed: Passed | None = None,
) -> tuple[str, ...]:
    """Compare a SavedModel directory with the tensors and, if given, the files it should hold.

    Return the sorted relative paths of files not among `files`, which do no harm; () if no `files` are given.

    It reads the index and the files that have a checksum in the manifest and have not `passed` (None: no file
    has), or have a digest, too; for data shards it compares only the sizes, unless a trainer's own file may
    have been written to. With `prefix` the directory has a bundle of this prefix and no SavedModel, like a
    delta's.

    Raises:
        VerificationError: a file is missing, not a regular file, or of another size or checksum; the
            index is damaged or points beyond a shard's end; a tensor is missing, unexpected, or has
            another description.
        CheckpointError, OSError: a file cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    expected = {tensor.name: tensor for tensor in tensors}
    found = _found_files(bundle)
    listed = {entry.path: entry for entry in files or ()}
    for entry in listed.values():
        if entry.path not in found:
            raise _not_there(bundle / entry.path)
        verify_file(bundle, entry, passed)
    # a size and times prove nothing of a file into which a trainer may write: only reading it does
    written = {bundle / each.path for each in listed.values() if each.is_written(bundle, for_sure=False)}
    prefix = prefix or _prefix_of_saved_model(bundle, found)
    if expected or f"{prefix}.index" in found:
        _verify_index(bundle, prefix, expected)  # blocks of the index have checksums; O(number of tensors)
    if written:
        _verify_written(read_catalog(bundle / prefix), written)
    return () if files is None else tuple(sorted(found.keys() - listed.keys() - {MANIFEST_FILE}))


def verify_bytes(
    catalog: Catalog,
    *,
    runner: Runner = LOCAL,
    progress: Progress | None = None,
    passed: Passed | None = None,
    shards: Collection[Path] | None = None,
) -> int:
    """Read the bundle's bytes that have not `passed`, in parallel, and compare their checksums to the index.

    With `shards` only the bytes of these files. Strings are always read. It waits for all tasks; `progress`
    advances by the bytes read. Return the number of bytes compared, with those that have passed; dtypes
    without a known form have no checksums, and are not compared.

    Raises:
        VerificationError: the first tensor, in the files' order, whose bytes differ or cannot be read.
        EngineFailed, PublishError: the runner's engine failed, or its job cannot be written.
        UsageError: the URL below which the runner keeps jobs cannot be used.
    """
    runs = [run for run in _runs(catalog) if shards is None or run.catalog.path_of(run.extent) in shards]
    numeric = [run for run in runs if run.tensor.dtype.itemsize is not None]
    # no task can check these: their crc32c covers lengths as fixed integers, which are varints on disk
    strings = [run for run in runs if run.tensor.dtype is DType.STRING]
    progress = progress or NoProgress()
    # numbers alone: their stored bytes are what was passed, and what the crc32c covers
    unread = numeric if passed is None else [run for run in numeric if not _has_passed(run, passed)]
    batches = list(_batches(unread, runner.task_bytes))
    try:
        with runner.job(_tasks(catalog, batches)) as job:
            _compare(zip(batches, job.receipts(progress), strict=True))
    except CheckpointError as error:
        raise VerificationError(error.message, cause=error.cause, hint=_DAMAGED_HINT) from error
    for run in strings:
        try:
            check_values(run.catalog, run.tensor, run.part)
        except CheckpointError as error:
            raise _damage(run, "is damaged", cause=error.message) from error
        progress.advance(run.extent.size)
    return sum(run.extent.size for run in numeric + strings)


class Passed:
    """Checksums of files' ranges, computed while the bytes were transferred, in any order, by any thread."""

    def __init__(self) -> None:
        self._checksums: RangeChecksums[Path] = RangeChecksums()
        self._lock = threading.Lock()

    def noting(self, path: Path, cuts: Iterable[int] = ()) -> Callable[[int, memoryview], None]:
        """Return a function that records the checksum of each part of file `path` that it is called with.

        Its arguments are the part's offset in bytes and its bytes; parts are divided at the offsets `cuts`.
        `of` then knows the checksum of every run that begins and ends at a cut.
        """
        known = sorted(set(cuts))

        def note(offset: int, content: memoryview) -> None:
            end = offset + len(content)
            inside = known[bisect_right(known, offset) : bisect_left(known, end)]
            # computed without the lock: it is most of the work, and lets other threads run
            for start, stop in pairwise((offset, *inside, end)):
                crc = extend(0, np.frombuffer(content[start - offset : stop - offset], np.uint8))
                with self._lock:
                    self._checksums.add(path, start, stop - start, crc)

        return note

    def of(self, path: Path, start: int, size: int) -> int | None:
        """Return the plain crc32c of `size` bytes of a file from offset `start`; None if not all have passed.

        It is also None unless parts of the file were cut at both ends (see `noting`).
        """
        with self._lock:
            return self._checksums.of(path, start, size)


def runs_of(index: Index, prefix: Path) -> dict[Path, tuple[tuple[int, int, int], ...]]:
    """Return (offset, size, checksum) of each stored run of tensors, sorted by offset, by shard path.

    `prefix` is the bundle's; no shard need exist. Sizes are bytes; checksums are masked crc32c, as in the
    index.
    """
    runs: dict[int, set[tuple[int, int, int]]] = {}
    for extent in (extent for ref in index.tensors.values() for extent in ref.extents):
        # a set: tensors may share a run
        runs.setdefault(extent.shard, set()).add((extent.offset, extent.size, extent.crc32c))
    return {
        shard_path(prefix, shard, index.num_shards): tuple(sorted(found)) for shard, found in runs.items()
    }


def _has_passed(run: Stored, passed: Passed) -> bool:
    extent = run.extent
    crc = passed.of(run.catalog.path_of(extent), extent.offset, extent.size)
    if crc is not None:
        _check(run, crc)
    return crc is not None


def _found_files(bundle: Path) -> dict[str, int]:
    """Return the size in bytes of each regular file below a directory, by relative path.

    Symbolic links, and what vanishes meanwhile, are left out. OSError if a directory cannot be listed: its
    files may be there.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found = {}
    # without `onerror` a directory that may not be listed would look empty
    for directory, _, names in os.walk(bundle, onerror=refuse):
        for path in (Path(directory, name) for name in names):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[path.relative_to(bundle).as_posix()] = status.st_size
    return found


def _prefix_of_saved_model(bundle: Path, found: Collection[str]) -> Path:
    if SAVED_MODEL_FILE in found:
        return VARIABLES_PREFIX
    if f"{PAIR_NAME}.meta" in found:
        return Path(PAIR_NAME)
    raise VerificationError(f"{bundle} has no {SAVED_MODEL_FILE}", hint=_DAMAGED_HINT)


OVERWRITTEN_HINT = (
    "publish a new version, with --data compact: such a version holds no file that a trainer writes to"
)


def _verify_written(catalog: Catalog, shards: Collection[Path]) -> None:
    """Read the files `shards` of a bundle, links to a trainer's files that may have been written to since.

    Raises VerificationError if their bytes differ from the index; a file that was merely touched is accepted.
    """
    try:
        verify_bytes(catalog, shards=shards)
    except VerificationError as error:
        path = next((shard for shard in sorted(shards) if str(shard) in error.message), min(shards))
        raise _overwritten(path, error.message) from error


def _overwritten(path: Path, cause: str) -> VerificationError:
    return VerificationError(f"{path} {OVERWRITTEN}", cause=cause, hint=OVERWRITTEN_HINT)


def verify_file(bundle: Path, entry: FileEntry, passed: Passed | None = None) -> None:
    """Compare the file at `entry.path` in a directory with its manifest entry.

    It is read only if the entry has a checksum that `passed` does not know, or if it has a digest, too. Data
    shards have no checksum here: their digests are compared elsewhere.

    Raises:
        VerificationError: it is not a file, or has another size, checksum or digest.
        CheckpointError, OSError: it cannot be read.
        DiskFull, PublishError: bytes fetched from a store cannot be kept.
    """
    path = bundle / entry.path
    try:
        status = path.stat()  # not `is_file`, which hides from Python 3.14 on that it may not look
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path) from None
    if not stat.S_ISREG(status.st_mode):
        raise _not_there(path)
    size = status.st_size
    if size != entry.bytes_:
        said = f"{path} has {size} bytes, expected {entry.bytes_}"
        if entry.is_written(bundle):
            raise _overwritten(path, said)
        raise VerificationError(said, hint=_DAMAGED_HINT)
    if entry.crc32c is None:
        return
    plain = None if passed is None else passed.of(path, 0, size)
    if plain is None:
        with regular_file(path) as file:
            plain = crc_of(file.fileno(), 0, size)
    crc = f"{mask(plain):08x}"
    if crc != entry.crc32c:
        raise VerificationError(f"{path} has checksum {crc}, expected {entry.crc32c}", hint=_DAMAGED_HINT)
    if entry.sha256 is not None:  # an attacker can alter a file and keep its crc32c
        from exporter.publish.signing import verify_digests

        verify_digests(bundle, [entry])


def _not_there(path: Path) -> VerificationError:
    return VerificationError(f"{path} is in the manifest and not there as a file", hint=_DAMAGED_HINT)


def _verify_index(bundle: Path, prefix: Path, expected: dict[str, TensorEntry]) -> None:
    try:
        catalog = read_catalog(bundle / prefix)
    except CheckpointError as exc:
        raise VerificationError(
            f"the bundle is damaged: {exc.message}", cause=exc.cause, hint=_DAMAGED_HINT
        ) from exc
    for name, entry in expected.items():
        ref = catalog.tensors.get(name)
        if ref is None:
            raise VerificationError(f"{bundle} lacks tensor {name!r}", hint=_DAMAGED_HINT)
        if not ref.is_complete:
            raise VerificationError(f"{bundle} lacks slices of tensor {name!r}", hint=_DAMAGED_HINT)
        if TensorEntry.of(ref) != entry:
            raise VerificationError(
                f"{bundle} holds another tensor {name!r} than expected",
                cause=f"found {_described(TensorEntry.of(ref))}, expected {_described(entry)}",
                hint=_DAMAGED_HINT,
            )
    if extra := sorted(catalog.tensors.keys() - expected.keys()):
        raise VerificationError(f"{bundle} holds {len(extra)} unexpected tensors, the first is {extra[0]!r}")


def _described(entry: TensorEntry) -> str:
    crcs = " ".join(entry.crc32c[:4])
    return f"{entry.dtype}{list(entry.shape)}, {entry.bytes_} bytes, crc32c {crcs}"


def _runs(catalog: Catalog) -> list[Stored]:
    """Return every stored run of a bundle's tensors once, sorted by shard and offset."""
    runs: dict[Extent, Stored] = {}
    for ref in catalog.tensors.values():
        for _, stored in stored_runs(catalog, ref):
            runs.setdefault(stored.extent, stored)
    return [runs[extent] for extent in sorted(runs, key=lambda extent: (extent.shard, extent.offset))]


def _batches(runs: Iterable[Stored], most: int) -> Iterator[list[_Piece]]:
    """Divide runs into pieces of at most `most` bytes and yield them in order, in lists for one task each.

    A list has about `most` bytes and at most a thousand pieces.
    """
    batch: list[_Piece] = []
    room = most
    for run in runs:
        extent = run.extent
        # an empty run is one piece, too: its checksum must be compared
        for start in range(0, max(extent.size, 1), most):
            size = min(most, extent.size - start)
            batch.append((run, Range(extent.shard, extent.offset + start, size)))
            room -= size
            # a task gets at most a thousand tensors, however small
            if room <= 0 or len(batch) == 1000:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _tasks(catalog: Catalog, batches: Iterable[list[_Piece]]) -> list[Checksum]:
    # one look at each shard, however many tasks read it
    planned = cache(Input.of)
    tasks = []
    for number, batch in enumerate(batches):
        ranges = [each for _, each in batch]
        shards = sorted({each.input for each in ranges})
        sources = tuple(planned(catalog.shards[shard]) for shard in shards)
        own = renumbered(ranges, {shard: at for at, shard in enumerate(shards)})
        size = sum(each.size for each in ranges)
        tasks.append(Checksum(name=f"{number:06d}", inputs=sources, bytes_=size, ranges=own))
    return tasks


def _compare(jobs: Iterable[tuple[list[_Piece], Receipt]]) -> None:
    """Join the checksums of pieces to checksums of stored runs, and compare these to the index.

    Each item is a list of pieces and the receipt of its task; items and pieces come in the files' order.
    Raises VerificationError if a checksum differs.
    """
    crc = 0
    for batch, receipt in jobs:
        for (run, piece), piece_crc in zip(batch, receipt.read, strict=True):
            extent = run.extent
            # the first piece of a run begins anew: the pieces before it are of another one
            crc = combine(crc, piece_crc, piece.size) if piece.offset > extent.offset else piece_crc
            if piece.offset + piece.size == extent.offset + extent.size:
                _check(run, crc)


def _check(run: Stored, crc: int) -> None:
    if mask(crc) != run.extent.crc32c:
        raise _damage(run, f"has checksum {mask(crc):08x}, expected {run.extent.crc32c:08x}")


def _damage(run: Stored, what: str, *, cause: str = "") -> VerificationError:
    extent = run.extent
    place = f"{run.catalog.path_of(extent)}, bytes {extent.offset}-{extent.offset + extent.size}"
    return VerificationError(f"tensor {run.tensor.name!r} {what}: {place}", cause=cause, hint=_DAMAGED_HINT)
