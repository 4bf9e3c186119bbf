"""Read DeepRec's incremental checkpoints: full checkpoint + increment = the trainer's state.

    <ckpt-dir>/.incremental_checkpoint/incremental_model.ckpt-<step>.{index,data-*}

Each is a tensor bundle with all changes since the last full save, so that the newest one of a higher step
than the full checkpoint's is sufficient. Ordinary variables are in it whole, under their names; with the
option for ordinary tables, rows of `<var>` or of its part p are in

    <var>[/part_<p>]-sparse_incr_keys    int64|int32 [n]    row numbers, local to the part
    <var>[/part_<p>]-sparse_incr_values  dtype [n, ...]

and a table without touched rows is absent. An increment does not say which full save it builds on: one beyond
another full checkpoint's step builds on that one, if any. A trainer that was set back leaves its former
files: increments of higher steps than the next full save, to which they must not be added. The trainer writes
an increment after the full save that it builds on, so one whose index is older belongs to another save. A
delta continues the published state without comparison only if all rows published before are also in the
newest increment. Source: DeepRec's incremental_saver and its documentation.

Times are compared only with each other, never with a clock. Equal times, of file systems and stores that
count seconds, prove nothing: no trainer is set back within one. Copies that do not keep times may make an
increment look older than it is: then it is left out, and the full checkpoint is served, never a mixture.

Rows of embedding variables, whose keys are not row numbers, are in

    <ev>[/part_<p>]-sparse_incr_keys        int64|int32 [n]   touched since the last full save
    <ev>[/part_<p>]-sparse_incr_values      float [n, dim]
    <ev>[/part_<p>]-sparse_incr_freqs       int64 [n]; 0 unless frequencies are recorded
    <ev>[/part_<p>]-incr_partition_offset   int32 [1001]      keys are grouped by key % 1000

Keys that are not admitted are left out, and no deletion is recorded. Slots are left out here. Source:
DeepRec, tensorflow/core/kernels/incr_save_restore_ops.h (DumpSparseEmbeddingTensor).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.embedding_variables import (
    BUCKETS,
    EmbeddingVariable,
    check_offsets,
    embedding_variables,
    part_of,
)
from exporter.checkpoint.identity import index_digest
from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import (
    index_path,
    read_array,
    read_catalog,
    step_in_name,
)
from exporter.delta.format import Change, ChangeKind, Rows, ServedVariable
from exporter.delta.table_changes import KeyedChange, KeyedRows
from exporter.errors import CheckpointChanged, CheckpointError, CheckpointNotFound, CorruptFile, MissingShard
from exporter.increments.increment import Changed, CheckpointId
from exporter.increments.plan import LEFT_OUT, ROUNDED, ChangePlan
from exporter.increments.trained import TrainerVersion
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY
from exporter.tables.integer_sets import among
from exporter.wire.dtypes import Array, DType

INCR_KEYS, INCR_VALUES, INCR_FREQS = "-sparse_incr_keys", "-sparse_incr_values", "-sparse_incr_freqs"
_INCR_OFFSETS = "-incr_partition_offset"


def touched_rows(catalog: Catalog, variables: Mapping[str, EmbeddingVariable]) -> Iterator[KeyedRows]:
    """Yield the touched rows of each embedding variable in an increment, parts joined, checksums verified.

    `catalog` is the increment's; `variables` are those of the full checkpoint, by name. Touched rows of other
    variables are ignored, and variables without any yield nothing. Rows have frequencies only if all their
    parts have them. While iterating, raises CorruptFile if a key occurs twice or a part is damaged;
    CheckpointChanged if a shard vanished, other CheckpointErrors if it cannot be read.
    """
    parts: dict[str, list[KeyedRows]] = {}
    for stem in _stems(catalog):
        if (variable := variables.get(part_of(stem)[0])) is not None:
            parts.setdefault(variable.name, []).append(_Part(catalog, stem, variable).read())
    for name, found in parts.items():
        freqs = [part.freqs for part in found if part.freqs is not None]
        rows = KeyedRows(
            name,
            np.concatenate([part.keys for part in found]),
            np.concatenate([part.values for part in found]),
            np.concatenate(freqs) if len(freqs) == len(found) else None,
        )
        ordered = np.sort(rows.keys)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise CorruptFile(f"{catalog.prefix}: key {twice[0]} of {name!r} is there twice")
        yield rows


def _stems(catalog: Catalog) -> list[str]:
    """Return the sorted names of the variables or parts that have touched rows, without tensors' suffixes."""
    return sorted(
        {name.rpartition("-")[0] for name in catalog.tensors if name.endswith((INCR_KEYS, INCR_VALUES))}
    )


class _Part:
    """Reads the touched rows of one part, and checks them against the variable of the full checkpoint."""

    def __init__(self, catalog: Catalog, stem: str, variable: EmbeddingVariable) -> None:
        self._catalog, self._stem, self._variable = catalog, stem, variable

    def read(self) -> KeyedRows:
        keys_ref, values_ref = self._find(INCR_KEYS), self._find(INCR_VALUES)
        if keys_ref is None or values_ref is None:
            there, what = (INCR_VALUES, "keys") if keys_ref is None else (INCR_KEYS, "values")
            raise CorruptFile(f"{self._catalog.prefix}: {self._stem + there!r} has no {what} beside it")
        wanted = (*keys_ref.shape, self._variable.dim)
        is_keys = keys_ref.dtype in (DType.INT64, DType.INT32) and len(keys_ref.shape) == 1
        if not is_keys or values_ref.shape != wanted or values_ref.dtype is not self._variable.value_dtype:
            raise CorruptFile(
                f"{self._catalog.prefix}: {keys_ref.name!r} is {_typed(keys_ref)} and its values "
                f"{_typed(values_ref)}, expected keys and a {self._variable.value_dtype.label} row of "
                f"{self._variable.dim} for each"
            )
        keys = read_array(self._catalog, keys_ref).astype(np.int64)
        offsets = self._find(_INCR_OFFSETS)
        if offsets is not None:
            if offsets.dtype is not DType.INT32 or offsets.shape != (BUCKETS + 1,):
                raise CorruptFile(
                    f"{self._catalog.prefix}: {offsets.name!r} is {_typed(offsets)}, expected int32 of "
                    f"{BUCKETS + 1} offsets"
                )
            check_offsets(self._catalog, keys_ref, offsets, keys)
        return KeyedRows(
            self._variable.name, keys, read_array(self._catalog, values_ref), self._freqs(len(keys))
        )

    def _freqs(self, rows: int) -> Array | None:
        """Return the keys' frequencies; None if the increment, or the full checkpoint, records none.

        If only the full checkpoint records none, the increment has zeros, which are ignored. `rows` is the
        number of keys. Raises CorruptFile unless there is one int64 for each key, CheckpointError and other
        subclasses if they cannot be read.
        """
        is_recorded = all(part.freqs is not None for part in self._variable.parts)
        ref = self._find(INCR_FREQS)
        if ref is None or not is_recorded:
            return None
        if ref.dtype is not DType.INT64 or ref.shape != (rows,):
            raise CorruptFile(
                f"{self._catalog.prefix}: {ref.name!r} is {_typed(ref)}, expected int64, one for each of "
                f"{rows} keys"
            )
        return read_array(self._catalog, ref)

    def _find(self, suffix: str) -> TensorRef | None:
        return self._catalog.tensors.get(self._stem + suffix)


def _typed(ref: TensorRef) -> str:
    return f"{ref.dtype.label}{list(ref.shape)}"


_PREFIX = re.compile(r"(incremental_.+-([0-9]{1,18}))\.index", re.ASCII)
_PART = re.compile(r"(.+)/part_([0-9]{1,6})", re.ASCII)
_ID = "deeprec:"
_HIGHEST = 10**18  # above every step


class DeepRecIncrement(Struct, frozen=True):
    """An incremental checkpoint on top of the full one in `full`."""

    full: Catalog
    catalog: Catalog
    step: int

    @property
    def path(self) -> Path:
        """The prefix of the increment's bundle, for messages."""
        return self.catalog.prefix

    @property
    def id(self) -> str:
        """The increment's id: its step and a digest of its index file, which is read on each access.

        Raises CheckpointError if the index cannot be read.
        """
        return f"{_ID}{self.step}:{index_digest(self.catalog.prefix)[:32]}"

    def covers(self, increment: str) -> bool:
        """True if every key and variable of the increment with the id `increment` is also in this one.

        False if that increment is gone, damaged or unreadable, or is not DeepRec's. Reads the keys of both.
        """
        # It is, if both are of one training since the same full save.
        try:
            before = self._find(increment)
            return before is not None and all(self._has_all(before, name) for name in before.tensors)
        except CheckpointError:
            return False

    def _find(self, increment: str) -> Catalog | None:
        """Return the catalog of the increment with this id, from the same directory; None if it is gone.

        None also if the id is not of DeepRec's increments. Raises CheckpointError if an increment of the
        same step cannot be read.
        """
        step = int(increment.split(":")[1]) if increment.startswith(_ID) else None
        for _, name in filter(lambda found: found[0] == step, _listed(self.catalog.prefix.parent)):
            found = DeepRecIncrement(self.full, read_catalog(self.catalog.prefix.with_name(name)), step or 0)
            if found.id == increment:
                return found.catalog
        return None

    def _has_all(self, before: Catalog, name: str) -> bool:
        """True if tensor `name` of the earlier increment `before` is also in this one.

        For a tensor of keys, true only if this increment has all of its keys. Raises CheckpointError and
        subclasses if the keys of either increment cannot be read.
        """
        ref = self.catalog.tensors.get(name)
        if ref is None or not name.endswith(INCR_KEYS):
            return ref is not None
        known, wanted = read_array(self.catalog, ref), read_array(before, before.tensors[name])
        return bool(among(wanted, np.sort(known)).all())  # keys are grouped by key % 1000, not sorted

    def changes(self) -> Iterator[tuple[Changed, Change]]:
        """Yield each changed variable of the full checkpoint with its new value or rows, checksums verified.

        Whole variables come first; then tables, with increasing row numbers of the whole table. If a row is
        given twice, the first one counts. Variables that the full checkpoint lacks are ignored. Embedding
        variables are left out (see `keyed`). While iterating, raises CorruptFile if keys and values do not
        fit; CheckpointChanged if a shard vanished, other CheckpointErrors if it cannot be read.
        """
        rows: dict[str, list[Rows]] = {}
        for name, ref in self.catalog.tensors.items():
            if name.endswith(INCR_KEYS):
                owner, part = self._owner(name.removesuffix(INCR_KEYS))
                if (tensor := self.full.tensors.get(owner)) is not None:
                    rows.setdefault(owner, []).append(self._rows(name, tensor, part))
            elif name.endswith(INCR_VALUES):
                self._require_keys(name)
            elif (whole := self.full.tensors.get(name)) is not None:
                yield _changed(whole, ChangeKind.DENSE, 1), read_array(self.catalog, ref)
        for owner, parts in rows.items():
            ids = np.concatenate([part.ids for part in parts])
            values = np.concatenate([part.values for part in parts])
            unique, first = np.unique(ids, return_index=True)
            yield (
                _changed(self.full.tensors[owner], ChangeKind.TABLE, len(unique)),
                Rows(unique, values[first]),
            )

    def keyed(self, names: Collection[str]) -> Iterator[KeyedRows]:
        """Yield the touched rows of the named embedding variables, checksums verified.

        Names that the full checkpoint lacks, and variables without touched rows, yield nothing. Raises, at
        the call for the full checkpoint and while iterating for the increment, CorruptFile or
        UnsupportedFormat for damaged or unknown forms, CheckpointChanged if a shard vanished, other
        CheckpointErrors if it cannot be read.
        """
        return touched_rows(self.catalog, self._variables(names))

    def keyed_changes(self, names: Collection[str]) -> Iterator[KeyedChange]:
        """Yield the touched rows of the named embedding variables as changes without removed keys.

        DeepRec records no deletion. Raises what `keyed` raises: CheckpointError and subclasses.
        """
        return (KeyedChange(rows, np.empty(0, np.int64)) for rows in self.keyed(names))

    def row_counts(self) -> Counter[str]:
        """Return the number of touched keys or rows of each embedding variable or table, by its name.

        The index alone is used; nothing is read.
        """
        found: Counter[str] = Counter()
        for name, ref in self.catalog.tensors.items():
            if name.endswith(INCR_KEYS):
                found[part_of(name.removesuffix(INCR_KEYS))[0]] += ref.elements
        return found

    def published_before(self, increment: str | None, names: Collection[str]) -> Mapping[str, KeyedRows]:
        """Return the touched rows of the named embedding variables in another increment, by variable name.

        `increment` is its id. Empty if `increment` is None, or that increment is gone or damaged. Raises
        OSError if its index cannot be read.
        """
        try:
            before = None if increment is None else self._find(increment)
            found = () if before is None else touched_rows(before, self._variables(names))
            return {rows.name: rows for rows in found}
        except CheckpointError:  # it was pruned meanwhile, or is damaged: then every row is sent
            return {}

    def _variables(self, names: Collection[str]) -> dict[str, EmbeddingVariable]:
        known = embedding_variables(self.full)
        return {name: known[name] for name in names if name in known}

    def _owner(self, name: str) -> tuple[str, int | None]:
        """Return the name of the full checkpoint's variable to which `name` belongs, and the part's number.

        `name` is a variable's, or `<variable>/part_<n>`; the number is None for the whole variable. The
        variable need not exist.
        """
        part = _PART.fullmatch(name)
        return (name, None) if name in self.full.tensors or part is None else (part[1], int(part[2]))

    def _require_keys(self, name: str) -> None:
        owner = name.removesuffix(INCR_VALUES)
        if self._owner(owner)[0] in self.full.tensors and owner + INCR_KEYS not in self.catalog.tensors:
            raise CorruptFile(f"{self.path}: {name!r} has no keys beside it")

    def _rows(self, name: str, tensor: TensorRef, part: int | None) -> Rows:
        """Return the increment's rows of an ordinary table or a part of it, numbered in the whole table.

        They are unsorted. `name` is the tensor of the keys, `tensor` the table in the full checkpoint, `part`
        the number of the part, None for the whole. Raises CorruptFile if the values are absent, or do not fit
        rows and table, CheckpointError and other subclasses if they cannot be read.
        """
        values_ref = self.catalog.tensors.get(name.removesuffix(INCR_KEYS) + INCR_VALUES)
        if values_ref is None:
            raise CorruptFile(f"{self.path}: {name!r} has no values beside it")
        ids = read_array(self.catalog, self.catalog.tensors[name]).astype(np.int64)
        values = read_array(self.catalog, values_ref)
        start, count = _range_of(tensor, part)
        fits = values.shape == (*ids.shape, *tensor.shape[1:]) and values.dtype == tensor.dtype.numpy
        if not fits or (len(ids) and not 0 <= ids.min() <= ids.max() < count):
            raise CorruptFile(
                f"{self.path}: {name!r} and its values are not rows of {count} x {list(tensor.shape[1:])}"
            )
        return Rows(ids + start, values)


def read_increment(full: Catalog) -> DeepRecIncrement | None:
    """Return the newest incremental checkpoint on top of the full checkpoint `full`; None if there is none.

    Its step is above the step of `full`, below the step of the next full checkpoint, and at most the step
    that the state file beside the increments names; its index file is not older than that of `full`. An
    incomplete increment (being written or pruned) is skipped for the next older one. Raises CheckpointError
    and subclasses if an increment is damaged or the directory cannot be listed.
    """
    directory = full.prefix.parent / DEEPREC_INCREMENTS_DIRECTORY
    for step, name in _beyond(full):
        if _is_older(directory / name, full.prefix):
            continue
        try:
            return DeepRecIncrement(full, read_catalog(directory / name), step)
        except (CheckpointNotFound, CheckpointChanged, MissingShard):
            continue
    return None


def abandoned_increment(full: Catalog) -> str:
    """Return the name of the increment of the highest step after `full` if its index is older than `full`'s.

    Such an increment is left over from a training that was set back. "" if it is not older, or there is none.
    Raises CheckpointError if the directory cannot be listed.
    """
    directory = full.prefix.parent / DEEPREC_INCREMENTS_DIRECTORY
    return next((name for _, name in _beyond(full)[:1] if _is_older(directory / name, full.prefix)), "")


def _beyond(full: Catalog) -> list[tuple[int, str]]:
    """Return (step, name) of each increment with a step between a full checkpoint and the next, newest first.

    Steps above the one that the increments' state file names are left out. Empty if there are no increments;
    CheckpointError if the directory cannot be listed.
    """
    directory = full.prefix.parent / DEEPREC_INCREMENTS_DIRECTORY
    first = full.step or 0
    try:
        newest = step_in_name(candidates(directory)[0].name)
    except CheckpointNotFound:
        return []
    last = min(_later_fulls(full.prefix, first), default=_HIGHEST + 1) - 1
    last = last if newest is None else min(last, newest)
    return sorted((found for found in _listed(directory) if first < found[0] <= last), reverse=True)


def _is_older(increment: Path, full: Path) -> bool:
    """True if an increment's index file was modified before the full checkpoint's; False if either is gone.

    Both arguments are prefixes.
    """
    try:
        times = [index_path(prefix).stat().st_mtime_ns for prefix in (increment, full)]
    except FileNotFoundError:  # it was pruned, which its reader will notice, too
        return False
    return times[0] < times[1]


def _listed(directory: Path) -> list[tuple[int, str]]:
    """Return (step, name) of each incremental checkpoint in a directory, unsorted; empty if it is missing.

    Raises OSError if it cannot be listed.
    """
    try:
        names = [found for path in directory.iterdir() if (found := _PREFIX.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(int(name[2]), name[1]) for name in names]


def _later_fulls(prefix: Path, first: int) -> Iterator[int]:
    """Yield, unsorted, the steps above `first` of other full checkpoints of the same series as `prefix`.

    Incomplete ones count.
    """
    series = prefix.name.rpartition("-")[0]
    for path in prefix.parent.glob("*.index"):
        step = step_in_name(path.stem)
        is_other = path.stem != prefix.name and path.stem.rpartition("-")[0] == series
        if is_other and step is not None and step > first:
            yield step


def plan_deeprec_changes(
    published: TrainerVersion, full: CheckpointId, increment: DeepRecIncrement, within: float
) -> ChangePlan:
    """Plan how to publish a full checkpoint with its increment, after the state `published`.

    The plan is empty if this checkpoint and increment are what `published` names, and no published row is
    further than the distance `within` (a Euclidean norm) from the trainer's row. The increment is known to
    hold all changes if it covers what was published; otherwise both states must be compared, and the plan's
    `reason` says why. Raises CheckpointError if the increment's index cannot be read.
    """
    target = TrainerVersion(full, increment.id)
    if published.is_state_of(target) and published.is_within(within):
        return ChangePlan(target, increment.step)
    if not published.is_exact:
        reason = LEFT_OUT if published.left_out is not None else ROUNDED
        return ChangePlan(target, increment.step, (increment,), is_known=False, reason=reason)
    if published.checkpoint == full and (
        published.increment is None or increment.covers(published.increment)
    ):
        return ChangePlan(target, increment.step, (increment,))
    reason = f"{full.name} is another full checkpoint than the one that was published last"
    if published.checkpoint == full:
        reason = f"{increment.path.name} does not hold all that was published last"
    return ChangePlan(target, increment.step, (increment,), is_known=False, reason=reason)


def _range_of(tensor: TensorRef, part: int | None) -> tuple[int, int]:
    """Return (first row, number of rows) of part number `part` of a tensor; `part` None means all of it.

    Raises CorruptFile if there is no such part.
    """
    if part is None:
        return 0, tensor.shape[0]
    boxes = sorted((found.spec for found in tensor.slices), key=lambda spec: spec.starts)
    if part >= len(boxes):
        raise CorruptFile(f"there is an increment of part {part} of {tensor.name!r}, which has {len(boxes)}")
    return boxes[part].starts[0], boxes[part].lengths[0]


def _changed(tensor: TensorRef, kind: ChangeKind, rows: int) -> Changed:
    return Changed(ServedVariable(tensor.name, tensor.dtype, tensor.shape, kind), rows)
