"""Read embedding variables as DeepRec writes them: tables whose rows have arbitrary integers as keys.

An embedding variable `<ev>`, or each part `<ev>/part_<p>` of it, consists of these tensors:

    <ev>-keys                     int64|int32 [N]      admitted keys
    <ev>-values                   float [N, dim]       their rows
    <ev>-versions                 int64 [N] or [0]     step of each key's last update
    <ev>-freqs                    int64 [N] or [0]     how often each key was seen; may be absent
    <ev>-partition_offset         int32 [1001]         keys are grouped by key % 1000; old files lack it
    <ev>-rows                     int64 [N]            of `exporter.tables`: the rows as slots number them
    <ev>-{keys,versions,freqs}_filtered, -partition_filter_offset     keys that were seen too seldom: no rows

`-versions` always exists; the tables of stock TensorFlow, which are `-keys` and `-values`, have none. Tables
of TensorFlow Recommenders-Addons are read as embedding variables, too: see `recommenders_addons`. Rows are
read unchanged, NaN included, like those of any other variable.

An optimizer's slot is an embedding variable of its own, `<ev>/Adagrad` or `<ev>/part_<p>/Adagrad`, and its
keys need not be the variable's. A key may be in any part: DeepRec, too, finds it in any part when it
restores. No key may be in two places. Rows that DeepRec moved to a disk (`<prefix>-<ev>-ssd_record`) are in
no tensor: such a checkpoint is refused.

Source: DeepRec, tensorflow/core/framework/embedding/embedding_var_ckpt_data.cc (EmbeddingVarCkptData) and
embedding_var_restore.cc (CheckpointLoader).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.recommenders_addons import (
    KEY_DTYPES,
    VALUE_DTYPES,
    AddonsTable,
    addons_tables,
)
from exporter.checkpoint.tensor_values import read_array, read_blocks
from exporter.errors import CorruptFile, UnsupportedFormat
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

BUCKETS = 1000  # DeepRec's kSavedPartitionNum: rows are grouped by the remainder of their key

KEYS, VALUES, VERSIONS, FREQS, ROWS = "-keys", "-values", "-versions", "-freqs", "-rows"
OFFSETS, FILTERED_OFFSETS, FILTERED = "-partition_offset", "-partition_filter_offset", "_filtered"
_SUFFIXES = (
    *(KEYS, VALUES, VERSIONS, FREQS, ROWS, OFFSETS, FILTERED_OFFSETS),
    *(suffix + FILTERED for suffix in (KEYS, VERSIONS, FREQS)),
)

_BLOCK = 1 << 20  # keys in memory at a time: 8 MiB
OBJECT_ATTRIBUTES = "/.ATTRIBUTES/"
_MOST_ROWS = (1 << 31) - 1  # offsets, and row numbers in a served index, are int32
_PART = re.compile(r"(.+)/part_([0-9]{1,6})((?:/.+)?)", re.ASCII)


class FilteredKeys(Struct, frozen=True):
    """The keys of a part that were seen too seldom to get a row. None means not recorded."""

    keys: TensorRef
    versions: TensorRef | None = None
    freqs: TensorRef | None = None
    offsets: TensorRef | None = None


class EmbeddingPart(Struct, frozen=True):
    """One part of an embedding variable: row i of `values` belongs to key i of `keys`.

    None means not recorded.
    """

    number: int
    keys: TensorRef
    values: TensorRef
    versions: TensorRef | None = None
    freqs: TensorRef | None = None
    offsets: TensorRef | None = None
    filtered: FilteredKeys | None = None

    @property
    def rows(self) -> int:
        """The number of admitted keys in this part."""
        return self.keys.shape[0]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Every name that a tensor of the part may have, whether or not the checkpoint has it."""
        stem = self.keys.name.removesuffix(KEYS)
        return tuple(stem + suffix for suffix in _SUFFIXES)


class EmbeddingVariable(Struct, frozen=True):
    """A table by keys.

    `slot_of` is the name of the table that it belongs to if it is an optimizer's slot, else None; `also` are
    further names for it. `dim` is the number of values in a row.
    """

    name: str
    key_dtype: DType
    value_dtype: DType
    dim: int
    parts: tuple[EmbeddingPart, ...]
    slot_of: str | None = None
    also: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of admitted keys."""
        return sum(part.rows for part in self.parts)

    @property
    def filtered_keys(self) -> int:
        """The number of keys that were seen too seldom to have a row."""
        return sum(part.filtered.keys.shape[0] for part in self.parts if part.filtered is not None)

    @property
    def bytes_(self) -> int:
        """The bytes of the values of all rows, without keys and counts."""
        return sum(part.values.bytes_ for part in self.parts)


def embedding_variables(catalog: Catalog) -> Mapping[str, EmbeddingVariable]:
    """Return a checkpoint's embedding variables by name, sorted, optimizer slots included.

    The catalog is sufficient, except for tables of TFRA in an object-based checkpoint: its object graph is
    read.

    Raises:
        CorruptFile: a tensor has another length, rank or type than it should, or a part is missing.
        UnsupportedFormat: rows are stored outside the checkpoint's tensors.
        CheckpointChanged: the object graph's shard vanished or shrank since the catalog was read.
        CheckpointError: the object graph cannot be read.
    """
    parts: dict[str, dict[int | None, EmbeddingPart]] = {}
    for stem in _stems(catalog):
        name, number = part_of(stem)
        parts.setdefault(name, {})[number] = _Part(catalog, stem).read(number or 0)
    found = {name: _joined(catalog, name, part) for name, part in parts.items()}
    found = {name: _with_owner(variable, found) for name, variable in found.items()}
    found |= {table.name: _of_addons(catalog, table) for table in addons_tables(catalog)}
    if found:
        _refuse_rows_elsewhere(catalog)
    return dict(sorted(found.items()))


def find_variable(known: Mapping[str, EmbeddingVariable], name: str) -> EmbeddingVariable | None:
    """Return the variable with this name, or else the only one that has it among its further names (`also`).

    A further name also matches if it equals `name` with underscores for slashes. None if no variable matches,
    or several match by further names.
    """
    if name in known:
        return known[name]
    spelt = {name, name.replace("/", "_")}
    found = [variable for variable in known.values() if not spelt.isdisjoint(variable.also)]
    return found[0] if len(found) == 1 else None


def _of_addons(catalog: Catalog, table: AddonsTable) -> EmbeddingVariable:
    parts: dict[int | None, EmbeddingPart] = {
        number: _Part(catalog, stem).read(number) for number, stem in table.stems.items()
    }
    variable = _joined(catalog, table.name, parts, table.count)
    return replace(variable, slot_of=table.slot_of, also=table.also)


def _stems(catalog: Catalog) -> Iterator[str]:
    """Yield the common prefix of each part's tensor names, `emb/part_0` for example.

    A part is recognised by its `-versions`, with `-keys` and `-values` beside it. CorruptFile if one of these
    two is missing and `-partition_offset` is there.
    """
    for tensor in catalog.tensors:
        stem = tensor.removesuffix(VERSIONS)
        if stem == tensor:
            continue
        missing = [stem + suffix for suffix in (KEYS, VALUES) if stem + suffix not in catalog.tensors]
        if not missing:
            yield stem
        # else it is another variable whose name has this ending
        elif len(missing) == 1 and stem + OFFSETS in catalog.tensors:
            raise CorruptFile(f"{catalog.prefix}: {tensor!r} has no {missing[0]!r} beside it")


def part_of(stem: str) -> tuple[str, int | None]:
    """Return the name of an embedding variable and the number of its part, None if it is stored as a whole.

    `stem` is the common prefix of the part's tensor names.
    """
    _, attributes, name = stem.rpartition(OBJECT_ATTRIBUTES)
    if attributes:
        return unquote(name), None
    match = _PART.fullmatch(stem)  # a slot of a part, `emb/part_1/Adagrad`, is part 1 of `emb/Adagrad`
    return (stem, None) if match is None else (match[1] + match[3], int(match[2]))


def name_in_object(name: str) -> str:
    """Return a table's name, quoted for the keys of an object-based checkpoint.

    Slashes, dots and other special characters become `%` and two hexadecimal digits, as in URLs.
    """
    return quote(name, safe="").replace(".", "%2E")


def table_tensor(stored: str) -> str | None:
    """Return the tensor name of a table, `user.emb-keys`, for the key under which an object stored it.

    `stored` is that key without the object's path, `user%2Eemb-keys`. None for tensors of other kinds.
    """
    for suffix in (KEYS, VALUES, VERSIONS, ROWS):
        if stored.endswith(suffix):
            return unquote(stored.removesuffix(suffix)) + suffix
    return None


def read_keys(catalog: Catalog, variable: EmbeddingVariable) -> Array:
    """Return the admitted keys, int64 [rows], in stored order: row i of all parts together belongs to key i.

    Raises:
        CorruptFile: a checksum is wrong, the offsets do not fit the keys, or a key occurs twice.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
        CheckpointError: a shard cannot be read.
    """
    keys = np.empty(variable.rows, np.int64)
    for first, found in key_blocks(catalog, variable):
        keys[first : first + len(found)] = found
    ordered = np.sort(keys)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise key_twice(catalog, variable, int(ordered[twice[0]]))
    return keys


def key_blocks(catalog: Catalog, variable: EmbeddingVariable) -> Iterator[tuple[int, Array]]:
    """Yield (row of the first key, keys) for blocks of the admitted keys, int64, in stored order.

    Duplicates are not checked. While iterating: CorruptFile if a key is in the wrong bucket, the offsets do
    not fit the keys, or a checksum differs; CheckpointChanged if a shard vanished or shrank, other
    CheckpointErrors if it cannot be read.
    """
    begin = 0
    for part in variable.parts:
        offsets = None if part.offsets is None else read_offsets(catalog, part.keys, part.offsets)
        first = 0
        for block in read_blocks(catalog, part.keys, _BLOCK):
            keys = block.astype(np.int64, copy=False)
            if part.offsets is not None and offsets is not None:
                check_buckets(catalog, part.offsets, offsets - first, keys)
            yield begin + first, keys
            first += len(keys)
        begin += part.rows


def key_twice(catalog: Catalog, variable: EmbeddingVariable, key: int) -> CorruptFile:
    """Return the error for `key`, which occurs twice; the keys are read again to name the tensors.

    Raises CheckpointError and subclasses, as `key_blocks`, if they cannot be read again.
    """
    rows = [first + np.flatnonzero(keys == key) for first, keys in key_blocks(catalog, variable)]
    bounds = np.cumsum([part.rows for part in variable.parts])
    places = np.searchsorted(bounds, np.concatenate(rows)[:2], side="right")
    names = [variable.parts[place].keys.name for place in places]
    where = f"twice in {names[0]!r}" if names[0] == names[1] else f"in {names[0]!r} and in {names[1]!r}"
    return CorruptFile(f"{catalog.prefix}: key {key} is {where}")


def bucket_sizes(catalog: Catalog, variable: EmbeddingVariable) -> Array:
    """Count the admitted keys of each remainder modulo `BUCKETS`: int64 [1000].

    For parts without offsets the keys are read.

    Raises:
        CorruptFile: a checksum is wrong, or offsets do not fit the keys.
        CheckpointChanged: a shard vanished or shrank since the catalog was read.
        CheckpointError: a shard cannot be read.
    """
    sizes = np.zeros(BUCKETS, np.int64)
    for part in variable.parts:
        if part.offsets is not None:
            offsets = read_offsets(catalog, part.keys, part.offsets)
            sizes += offsets[1:] - offsets[:-1]
        else:
            sizes += np.bincount(read_array(catalog, part.keys) % BUCKETS, minlength=BUCKETS)
    return sizes


def count_blocks(
    catalog: Catalog, variable: EmbeddingVariable, what: str
) -> Iterator[tuple[int, Array]] | None:
    """Return an iterator over the recorded versions or counts of all keys; None if a part has none recorded.

    `what` is "versions" or "freqs". Each item is (row of the first, int64 values), in stored order. The
    values are read, and their checksums verified, during the iteration: CorruptFile if a checksum is wrong,
    CheckpointChanged if a shard vanished or shrank, other CheckpointErrors if it cannot be read.
    """
    refs = [part.versions if what == "versions" else part.freqs for part in variable.parts]
    known = [ref for ref in refs if ref is not None]
    return _joined_blocks(catalog, known) if len(known) == len(refs) else None


def _joined_blocks(catalog: Catalog, refs: Iterable[TensorRef]) -> Iterator[tuple[int, Array]]:
    first = 0
    for ref in refs:
        for block in read_blocks(catalog, ref, _BLOCK):
            yield first, block
            first += len(block)


class _Part:
    """Reads the tensors of one part, each checked against the keys."""

    def __init__(self, catalog: Catalog, stem: str) -> None:
        self._catalog, self._stem = catalog, stem

    def read(self, number: int) -> EmbeddingPart:
        keys, values = self._find(KEYS), self._find(VALUES)
        assert keys is not None and values is not None  # the caller looked
        if keys.dtype not in KEY_DTYPES or len(keys.shape) != 1:
            raise self._corrupt(keys, "int64 or int32 keys, one dimension")
        rows = keys.shape[0]
        if rows > _MOST_ROWS:
            raise self._corrupt(keys, f"{_MOST_ROWS} keys at most")
        if values.dtype not in VALUE_DTYPES or len(values.shape) != 2 or values.shape[0] != rows:
            raise self._corrupt(values, f"a row of numbers for each of {rows} keys")
        return EmbeddingPart(
            number,
            keys,
            values,
            self._counts(VERSIONS, rows),
            self._counts(FREQS, rows),
            self._offsets(OFFSETS),
            self._filtered(keys.dtype),
        )

    def _filtered(self, key_dtype: DType) -> FilteredKeys | None:
        keys = self._find(KEYS + FILTERED)
        if keys is None:
            return None
        if keys.dtype is not key_dtype or len(keys.shape) != 1:
            raise self._corrupt(keys, f"{key_dtype.label} keys, one dimension")
        versions = self._counts(VERSIONS + FILTERED, keys.shape[0])
        freqs = self._counts(FREQS + FILTERED, keys.shape[0])
        return FilteredKeys(keys, versions, freqs, self._offsets(FILTERED_OFFSETS))

    def _counts(self, suffix: str, rows: int) -> TensorRef | None:
        """Return the part's tensor with this suffix, one number for each key; None if none were recorded.

        Then it is absent, or empty although there are keys. `rows` is the number of keys. CorruptFile unless
        the tensor has one int64 for each key and is stored as a whole.
        """
        ref = self._find(suffix)
        if ref is None or (ref.shape == (0,) and rows):
            return None
        if ref.dtype is not DType.INT64 or ref.shape != (rows,):
            raise self._corrupt(ref, f"int64, one for each of {rows} keys, or none")
        return ref

    def _offsets(self, suffix: str) -> TensorRef | None:
        ref = self._find(suffix)
        if ref is not None and (ref.dtype is not DType.INT32 or ref.shape != (BUCKETS + 1,)):
            raise self._corrupt(ref, f"int32 of {BUCKETS + 1} offsets")
        return ref

    def _find(self, suffix: str) -> TensorRef | None:
        ref = self._catalog.tensors.get(self._stem + suffix)
        if ref is not None and ref.extent is None and ref.content is None:
            raise CorruptFile(
                f"{self._catalog.prefix}: {ref.name!r} is stored in slices, expected as a whole"
            )
        return ref

    def _corrupt(self, ref: TensorRef, expected: str) -> CorruptFile:
        found = f"{ref.dtype.label}{list(ref.shape)}"
        return CorruptFile(f"{self._catalog.prefix}: {ref.name!r} is {found}, expected {expected}")


def _joined(
    catalog: Catalog, name: str, parts: Mapping[int | None, EmbeddingPart], count: int = 0
) -> EmbeddingVariable:
    """Return the variable `name` with these parts, in the order of their numbers.

    The key None means a variable stored as a whole. There must be at least `count` parts (0 if the number is
    unknown). CorruptFile if a part is missing, the variable is stored as a whole and in parts, or the parts
    differ in dtypes or row length.
    """
    numbers = [number for number in parts if number is not None]
    if None in parts and numbers:
        raise CorruptFile(f"{catalog.prefix}: {name!r} is stored as a whole and in parts")
    missing = sorted(set(range(max([count - 1, *numbers]) + 1 if numbers else 0)) - set(numbers))
    if missing:
        raise CorruptFile(f"{catalog.prefix}: {name!r} has {len(numbers)} parts, and not part {missing[0]}")
    ordered = tuple(sorted(parts.values(), key=lambda part: part.number))
    kinds = {(part.keys.dtype, part.values.dtype, part.values.shape[1]) for part in ordered}
    if len(kinds) > 1:
        listed = sorted(f"{key.label} -> {value.label}[{dim}]" for key, value, dim in kinds)
        raise CorruptFile(f"{catalog.prefix}: the parts of {name!r} differ: {', '.join(listed)}")
    ((key_dtype, value_dtype, dim),) = kinds
    return EmbeddingVariable(name, key_dtype, value_dtype, dim, ordered)


def _with_owner(variable: EmbeddingVariable, known: Mapping[str, EmbeddingVariable]) -> EmbeddingVariable:
    """Return the variable with `slot_of` set to the name of its owner, None if it is not an optimizer's slot.

    The owner is the variable in `known` with the longest name that, followed by a slash, begins the
    variable's.
    """
    owner = variable.name.rpartition("/")[0]
    while owner and owner not in known:
        owner = owner.rpartition("/")[0]
    return replace(variable, slot_of=owner or None)


def check_offsets(catalog: Catalog, ref: TensorRef, offsets_ref: TensorRef, keys: Array) -> None:
    """Require that each key is in the bucket in which the stored offsets place it; reads the offsets.

    `keys` are all keys of the tensor `ref`, in stored order.

    Raises:
        CorruptFile: a key is in another bucket, the offsets do not divide the keys, or their checksum is
            wrong.
        CheckpointChanged: the shard of the offsets vanished or shrank since the catalog was read.
        CheckpointError: it cannot be read.
    """
    check_buckets(catalog, offsets_ref, read_offsets(catalog, ref, offsets_ref), keys)


def check_buckets(catalog: Catalog, offsets_ref: TensorRef, offsets: Array, keys: Array) -> None:
    """Require that each of some consecutive keys is in its bucket, which is the key modulo 1000.

    `offsets` (int64 [1001]) are the buckets' bounds, counted from the first of these keys; the error names
    the tensor `offsets_ref`.

    Raises:
        CorruptFile: a key is in another bucket.
    """
    expected = np.repeat(np.arange(BUCKETS, dtype=np.int16), np.diff(np.clip(offsets, 0, len(keys))))
    wrong = np.flatnonzero(_buckets_of(keys) != expected)
    if len(wrong):
        key, bucket = keys[wrong[0]], expected[wrong[0]]
        what = f"{catalog.prefix}: {offsets_ref.name!r}"
        raise CorruptFile(f"{what} places key {key} in bucket {bucket}, it belongs in {key % BUCKETS}")


def read_offsets(catalog: Catalog, ref: TensorRef, offsets_ref: TensorRef) -> Array:
    """Return the position of each bucket's first key in `ref`, and the end of the last: int64 [1001].

    Raises:
        CorruptFile: the offsets do not divide the keys, or their checksum is wrong.
        CheckpointChanged: the shard vanished or shrank since the catalog was read.
        CheckpointError: it cannot be read.
    """
    offsets: Array = read_array(catalog, offsets_ref).astype(np.int64)
    rows = ref.shape[0]
    if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise CorruptFile(
            f"{catalog.prefix}: {offsets_ref.name!r} does not divide the {rows} keys of {ref.name!r}"
        )
    return offsets


def _buckets_of(keys: Array) -> Array:
    """Return the bucket of each int64 key, as int16: its remainder, never negative, modulo `BUCKETS`."""
    # unsigned remainders take half the time; negative keys are corrected below
    found = (keys.view(np.uint64) % np.uint64(BUCKETS)).astype(np.int16)
    negative = np.flatnonzero(keys < 0)
    found[negative] = keys[negative] % BUCKETS
    return found


def _refuse_rows_elsewhere(catalog: Catalog) -> None:
    for path in sorted(catalog.prefix.parent.glob(f"{escape(catalog.prefix.name)}-*")):
        if path.name.endswith(("-ssd_record.index", "-emb_files")):
            raise UnsupportedFormat(
                f"{path} holds rows of an embedding variable outside the checkpoint's tensors",
                cause="DeepRec keeps rows of this variable on a disk (storage_type with SSDHASH or LEVELDB)",
                hint="restore it in DeepRec with storage_type DRAM, and write another checkpoint",
            )
