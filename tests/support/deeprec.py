"""Write checkpoints with embedding variables as DeepRec does, in numpy, by our own bundle writer.

Each rule has its source in DeepRec (github.com/DeepRec-AI/DeepRec), of which nothing is run here:

    full checkpoints    tensorflow/core/framework/embedding/embedding_var_ckpt_data.cc: SetWithPartition
                        groups rows by key % 1000, in any order inside; ExportToCkpt names the tensors
    versions, freqs     Emplace: [0] unless recorded; those of filtered keys always have frequencies
    partitions          python/ops/embedding_ops.py: part = ids % 1000 % P (FloorMod)
    slots               python/training/slot_creator.py: `<part>/<slot name>`, itself an embedding variable
    old files           embedding_var_restore.cc, IsOldCheckpoint: no offsets, nothing filtered
    increments          core/kernels/incr_save_restore_ops.h, DumpSparseEmbeddingTensor: ordered by
                        (key % 1000, key); versions 0 unless recorded; keys not admitted are left out
    where, which step   python/training/incremental_saver.py

DeepRec saves no negative keys in files with offsets (C's % is negative for them); old files have them.
Here they are grouped by FloorMod in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.storage.layout import DEEPREC_INCREMENTS_DIRECTORY
from exporter.tables.integer_sets import distinct
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

BUCKETS = 1000
_PIECE = 1 << 20


@dataclass(frozen=True)
class Ev:
    """An embedding variable's contents: row i of `values` belongs to key i.

    `versions` and `freqs` are None unless the trainer recorded them; `filtered` are keys without rows.
    """

    keys: Array
    values: Array
    versions: Array | None = None
    freqs: Array | None = None
    filtered: Array = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def random(
        cls,
        rows: int,
        dim: int = 4,
        *,
        seed: int = 0,
        keys: Any = np.int64,
        values: Any = np.float32,
        negative: bool = False,
    ) -> Ev:
        """Distinct keys from the whole range of their type, and normal values."""
        rng = np.random.default_rng(seed)
        low, high = (np.iinfo(keys).min if negative else 0), np.iinfo(keys).max
        found = distinct(rng.integers(low, high, rows + 16 + rows // 1000, keys, endpoint=True))
        while len(found) < rows:
            found = distinct(np.concatenate([found, rng.integers(low, high, rows, keys, endpoint=True)]))
        found = found[rng.choice(len(found), rows, replace=False)] if rows < 1 << 20 else found[:rows]
        return cls(found, rng.standard_normal((rows, dim), np.float32).astype(values))

    @property
    def dim(self) -> int:
        return int(self.values.shape[1])

    def as_dict(self) -> dict[int, Array]:
        return dict(zip(self.keys.tolist(), self.values, strict=True))

    def at(self, which: Array) -> Ev:
        """The rows that a mask or row numbers choose."""
        versions = None if self.versions is None else self.versions[which]
        freqs = None if self.freqs is None else self.freqs[which]
        return replace(self, keys=self.keys[which], values=self.values[which], versions=versions, freqs=freqs)


def parts_of(ev: Ev, parts: int) -> list[Ev]:
    """What each of `parts` parts holds: buckets by FloorMod, as the graph finds them."""
    if parts == 1:
        return [ev]
    owner, filtered = ev.keys % BUCKETS % parts, ev.filtered % BUCKETS % parts
    return [replace(ev.at(owner == part), filtered=ev.filtered[filtered == part]) for part in range(parts)]


def write_part(
    writer: BundleWriter, stem: str, ev: Ev, *, old: bool = False, with_freqs: bool = True
) -> None:
    """The tensors of one part. An `old` file has no offsets and nothing filtered; a very old one no freqs."""
    order, offsets = grouped(ev.keys)
    ev = ev if old else ev.at(order)
    none = np.empty(0, np.int64)
    writer.add(f"{stem}-keys", ev.keys)
    writer.add(f"{stem}-values", ev.values)
    writer.add(f"{stem}-versions", none if ev.versions is None else ev.versions)
    if with_freqs:
        writer.add(f"{stem}-freqs", none if ev.freqs is None else ev.freqs)
    if old:
        return
    order, filtered_offsets = grouped(ev.filtered)
    filtered = ev.filtered[order].astype(ev.keys.dtype)
    writer.add(f"{stem}-keys_filtered", filtered)
    writer.add(f"{stem}-versions_filtered", none if ev.versions is None else np.ones(len(filtered), np.int64))
    writer.add(f"{stem}-freqs_filtered", np.ones(len(filtered), np.int64))
    writer.add(f"{stem}-partition_offset", offsets)
    writer.add(f"{stem}-partition_filter_offset", filtered_offsets)


def grouped(keys: Array) -> tuple[Array, Array]:
    """Row numbers by bucket, and where each bucket begins."""
    buckets = (keys % BUCKETS).astype(np.int16)
    offsets = np.zeros(BUCKETS + 1, np.int32)
    np.cumsum(np.bincount(buckets, minlength=BUCKETS), out=offsets[1:])
    return np.argsort(buckets, kind="stable"), offsets


def write_full(
    prefix: Path,
    tables: Mapping[str, Ev],
    *,
    parts: int | Mapping[str, int] = 1,
    dense: Mapping[str, Array] | None = None,
    slots: Mapping[str, Ev] | None = None,
    step: int | None = None,
    old: bool = False,
    with_freqs: bool = True,
) -> Path:
    """A full checkpoint. `parts` is 0 for a variable that no partitioner made parts of (1: one `part_0`).

    `slots` are optimizer slots by `<ev>/<slot>`, with keys of their own; they have their variable's parts.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with BundleWriter(prefix) as writer:
        if step is not None:
            writer.add("global_step", np.array(step, np.int64))
        for name, value in (dense or {}).items():
            writer.add(name, value)
        for name, ev in {**tables, **(slots or {})}.items():
            owner = name if name in tables else name.rpartition("/")[0]
            count = parts if isinstance(parts, int) else parts.get(owner, 0)
            for stem, part in stems(owner, name.removeprefix(owner), ev, count):
                write_part(writer, stem, part, old=old, with_freqs=with_freqs)
    return prefix


def write_large(prefix: Path, name: str, keys: Array, dim: int, *, parts: int, step: int) -> Path:
    """A full checkpoint of one table with as many rows as one likes: values are drawn piece by piece."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rng, none = np.random.default_rng(step), np.empty(0, np.int64)
    owner = (keys % BUCKETS).astype(np.int16) % parts
    with BundleWriter(prefix) as writer:
        writer.add("global_step", np.array(step, np.int64))
        for part in range(parts):
            ours = keys[owner == part]
            order, offsets = grouped(ours)
            pieces = (
                rng.random((min(_PIECE, len(ours) - first), dim), np.float32).view(np.uint8).data.cast("B")
                for first in range(0, len(ours), _PIECE)
            )
            stem = f"{name}/part_{part}"
            writer.add(f"{stem}-keys", ours[order])
            writer.add_chunks(f"{stem}-values", DType.FLOAT, (len(ours), dim), pieces)
            writer.add(f"{stem}-versions", none)
            writer.add(f"{stem}-freqs", none)
            writer.add(f"{stem}-partition_offset", offsets)
    return prefix


def stems(owner: str, slot: str, ev: Ev, count: int) -> Iterable[tuple[str, Ev]]:
    """What the tensors of each part are called before the suffix; `slot` begins with a slash, or is empty."""
    if not count:
        return [(f"{owner}{slot}", ev)]
    return [(f"{owner}/part_{number}{slot}", part) for number, part in enumerate(parts_of(ev, count))]


def write_increment(
    directory: Path,
    step: int,
    tables: Mapping[str, Ev],
    *,
    parts: int | Mapping[str, int] = 0,
    dense: Mapping[str, Array] | None = None,
) -> Path:
    """What changed since the last full save, beside it: touched rows of tables, every other variable whole.

    A table that nobody touched is left out by the caller.
    """
    prefix = directory / DEEPREC_INCREMENTS_DIRECTORY / f"incremental_model.ckpt-{step}"
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with BundleWriter(prefix) as writer:
        writer.add("global_step", np.array(step, np.int64))
        for name, value in (dense or {}).items():
            writer.add(name, value)
        for name, ev in tables.items():
            count = parts if isinstance(parts, int) else parts.get(name, 0)
            for stem, part in stems(name, "", ev, count):
                write_incremental_part(writer, stem, part)
    return prefix


def write_incremental_part(writer: BundleWriter, stem: str, ev: Ev) -> None:
    """The tensors of one part's touched rows."""
    ordered = ev.at(np.lexsort([ev.keys, ev.keys % BUCKETS]))
    _, offsets = grouped(ordered.keys)
    zeros = np.zeros(len(ordered.keys), np.int64)
    writer.add(f"{stem}-incr_partition_offset", offsets)
    writer.add(f"{stem}-sparse_incr_keys", ordered.keys)
    writer.add(f"{stem}-sparse_incr_values", ordered.values)
    writer.add(f"{stem}-sparse_incr_versions", zeros if ordered.versions is None else ordered.versions)
    writer.add(f"{stem}-sparse_incr_freqs", zeros if ordered.freqs is None else ordered.freqs)
