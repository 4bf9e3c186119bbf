"""The values of every served variable at one position: a bundle with changes applied on top of it.

Both sides of a comparison are states: the published values (a base and its deltas) and the trainer's (a full
checkpoint and its increments). Values are read only when they are asked for, and then by rows.

Rows of tables are read through memory maps, without their checksums: code that publishes them, or values
derived from them, calls `check` first. Variables that are read as a whole are verified on reading.

`CheckedFiles` remembers which checksums were verified, in a file beside the log:

    {"files": {name: [device, inode, bytes, modified, changed]}, "runs": [[name, offset, bytes, crc32c]]}

Published files are never written to. A delta that holds rows back asks for the distance of some rows of a
base, again and again; it need not read the whole base each time as long as these five numbers stay the same.
A rollback or a new base, which publish the bytes that they read, do not use this cache.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from msgspec import Struct, field

from exporter.delta.format import Change, Rows
from exporter.delta.row_reader import RowReader, StoredRun, check_stored
from exporter.errors import CheckpointError
from exporter.storage import mirror
from exporter.storage.files import kept_identity, read_record, replace_file
from exporter.tables.integer_sets import among, distinct
from exporter.wire.dtypes import Array

_Identity = list[int]
_RunKey = tuple[str, int, int, int]


_MAX_BYTES = 256 << 20  # a few numbers for each stored run


class CheckedFiles(Struct, frozen=True):
    """The cache at `path`; `identities` are those of the shards before anything was read."""

    path: Path
    identities: dict[str, _Identity]

    @classmethod
    def of(cls, path: Path, variables: Iterable[RowReader]) -> CheckedFiles:
        """Return the cache at `path` for the shards of these variables.

        It is not read yet, the shards' identities are. A shard that cannot be reached has no identity, so
        that nothing in it counts as verified.
        """
        shards = {run.path for variable in variables for run in variable.runs}
        found = {shard.name: _identity(shard) for shard in shards}
        return cls(path, {name: identity for name, identity in found.items() if identity})

    def known(self, variables: Iterable[RowReader]) -> frozenset[StoredRun]:
        """Return the stored runs of these variables that the cache lists as verified.

        Runs in files that have changed since are left out. Empty if the cache is missing, unreadable, damaged
        or larger than 256 MiB; no exception is raised.
        """
        try:
            document = json.loads(read_record(self.path, _MAX_BYTES))
            same = {name for name, was in document["files"].items() if self.identities.get(name) == was}
            checked: set[_RunKey] = {tuple(run) for run in document["runs"] if run[0] in same}
        # Whatever JSON may be in the file, nested too deeply for the parser or of other types.
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return frozenset()
        return frozenset(run for variable in variables for run in variable.runs if _key(run) in checked)

    def save(self, checked: Collection[StoredRun]) -> None:
        """Write the cache with the verified runs `checked`, by a rename.

        Runs in shards without an identity are left out. The directory is made if its parent exists. Errors of
        the file system are ignored.
        """
        runs = [_key(run) for run in checked if run.path.name in self.identities]
        content = json.dumps({"files": self.identities, "runs": sorted(runs)}).encode()
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, content)


def _identity(path: Path) -> _Identity:
    try:
        return kept_identity(path)
    except OSError:
        return []


def _key(run: StoredRun) -> _RunKey:
    return (run.path.name, run.extent.offset, run.extent.size, run.extent.crc32c)


Changes = Mapping[str, Change]
"""Changes by the served variable's name."""


class LayeredState(Struct, frozen=True, eq=False):
    """Readers of stored variables by name, changes on top, oldest first, and a hint for damage errors."""

    stored: Mapping[str, RowReader]
    layers: tuple[Changes, ...] = ()
    hint: str = ""
    _checked: set[StoredRun] = field(default_factory=set)
    _trusted: set[StoredRun] = field(default_factory=set)

    def check(self, names: Iterable[str]) -> None:
        """Verify the stored checksums of these variables and record them in `checked`.

        Runs that were verified before, or are trusted, are skipped. Raises CorruptFile if one differs,
        CheckpointChanged or CheckpointError if a shard is gone or cannot be read, DiskFull or PublishError if
        bytes fetched from a store cannot be kept.
        """
        known = self._checked | self._trusted
        with self._naming_damage():
            self._checked.update(check_stored((self.stored[name] for name in names), known))

    @property
    def checked(self) -> frozenset[StoredRun]:
        """The stored runs whose checksums this state has verified or had noted so far."""
        return frozenset(self._checked)

    def trust(self, runs: Iterable[StoredRun]) -> None:
        """Let `check` skip these stored runs, which are known to be right.

        They are not added to `checked`.
        """
        self._trusted.update(runs)  # verified by hashes of blocks: no checksum was compared

    def note_checked(self, runs: Iterable[StoredRun]) -> None:
        """Add these stored runs to `checked`: their checksums were verified while values were streamed."""
        self._checked.update(runs)

    def is_remote(self, name: str) -> bool:
        """True if the stored rows of the variable `name` are in an object store."""
        return self.stored[name].is_remote

    def touched(self, name: str) -> Array:
        """Return the numbers, int64 ascending, of a variable's rows that changes on top contain.

        Changes of the whole variable do not count.
        """
        ids = [change.ids for layer in self.layers if isinstance(change := layer.get(name), Rows)]
        return distinct(np.concatenate([np.empty(0, np.int64), *ids]))

    def is_stored_as(self, other: LayeredState, name: str) -> bool:
        """True if both states store the variable `name` in the same bytes of the same files.

        Changes on top are ignored. False also if the answer cannot be determined.
        """
        a, b = self.stored[name], other.stored[name]
        runs = list(a.runs), list(b.runs)
        is_same = (a.box, a.dtype, a.order, a.part) == (b.box, b.dtype, b.order, b.part)
        return (
            is_same
            and [(run.extent, run.part) for run in runs[0]] == [(run.extent, run.part) for run in runs[1]]
            and all(
                mirror.is_same_file(x, y) for x, y in {(x.path, y.path) for x, y in zip(*runs, strict=True)}
            )
        )

    def replaces(self, name: str) -> bool:
        """True if a change on top replaces the variable `name` as a whole."""
        return any(name in layer and not isinstance(layer[name], Rows) for layer in self.layers)

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Return rows `start` to `stop` of a table: a view of stored bytes or of a change, or a copy.

        Checksums are not verified. Raises MappingError or NotFinite if a value does not fit the served dtype,
        CorruptFile if rows are not stored, CheckpointChanged or CheckpointError if a shard is gone or cannot
        be read, DiskFull or PublishError if rows fetched from a store cannot be kept.
        """
        values = self.stored[name].rows(start, stop)
        own = False
        for layer in self.layers:
            change = layer.get(name)
            if change is None:
                continue
            if not isinstance(change, Rows):
                values, own = change[start:stop], False
                continue
            low, high = np.searchsorted(change.ids, (start, stop))
            if low < high:
                values = values if own else np.array(values)  # it may be a view of a file
                own = True
                values[change.ids[low:high] - start] = change.values[low:high]
        return values

    def rows_at(self, name: str, ids: Array) -> Array:
        """Return rows `ids` (int64 [n], in any order) of a table, as a copy in their order.

        Checksums are not verified; rows that are not stored have undefined values. Raises MappingError or
        NotFinite if a value does not fit the served dtype, CheckpointChanged or CheckpointError if a shard is
        gone or cannot be read, DiskFull or PublishError if rows fetched from a store cannot be kept.
        """
        values = self.stored[name].rows_at(ids)
        for layer in self.layers:
            change = layer.get(name)
            if isinstance(change, Rows):
                _overwrite(values, ids, change)
            elif change is not None:
                values = change[ids]
        return values

    def whole(self, name: str) -> Array:
        """Return a whole variable, checksum verified, with changes of the variable or of its rows applied.

        Raises CheckpointError and subclasses (CorruptFile: the checksum differs), MappingError or NotFinite
        if a value does not fit the served dtype, DiskFull or PublishError if bytes fetched from a store
        cannot be kept. The result may be the array of a change itself: do not write into it.
        """
        with self._naming_damage():
            value = self.stored[name].whole()
        own = False
        for layer in self.layers:
            change = layer.get(name)
            if isinstance(change, Rows):
                value = value if own else value.copy()
                own = True
                value[change.ids] = change.values
            elif change is not None:
                value, own = change, False
        return value

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        """Add the hint of this state to every CheckpointError of the block."""
        try:
            yield
        except CheckpointError as error:
            error.advise(self.hint)
            raise


# Rows between first and last per row wanted: below this, a byte for each is cheaper than a search.
_SPARSE = 64


def _overwrite(values: Array, ids: Array, change: Rows) -> None:
    """Overwrite in place the rows of `values` that a change contains.

    `values` are the rows `ids`, in any order.
    """
    if not len(ids) or not len(change.ids):
        return
    first, last = int(ids.min()), int(ids.max())
    low, high = np.searchsorted(change.ids, (first, last + 1))
    touched = change.ids[low:high]
    if last - first < _SPARSE * len(ids):
        is_touched = np.zeros(last - first + 1, bool)
        is_touched[touched - first] = True
        hits = np.flatnonzero(is_touched[ids - first])
    else:
        hits = np.flatnonzero(among(ids, touched))
    values[hits] = change.values[low + np.searchsorted(touched, ids[hits])]
