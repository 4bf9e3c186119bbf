"""Read rows of embedding variables from DeepRec's incremental checkpoints.

    <ev>[/part_<p>]-sparse_incr_keys        int64|int32 [n]   touched since the last full save
    <ev>[/part_<p>]-sparse_incr_values      float [n, dim]
    <ev>[/part_<p>]-sparse_incr_freqs       int64 [n]; 0 unless frequencies are recorded
    <ev>[/part_<p>]-incr_partition_offset   int32 [1001]      keys are grouped by key % 1000

Keys that are not admitted are left out, and no deletion is recorded. Slots are left out here.
Source: DeepRec, tensorflow/core/kernels/incr_save_restore_ops.h (DumpSparseEmbeddingTensor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.embedding_variables import BUCKETS, EmbeddingVariable, check_offsets, part_of
from exporter.checkpoint.tensor_bundle import read_array
from exporter.delta.keyed_rows import KeyedRows
from exporter.errors import CorruptFile
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

INCR_KEYS, INCR_VALUES, INCR_FREQS = "-sparse_incr_keys", "-sparse_incr_values", "-sparse_incr_freqs"
_INCR_OFFSETS = "-incr_partition_offset"


def touched_rows(catalog: Catalog, variables: Mapping[str, EmbeddingVariable]) -> Iterator[KeyedRows]:
    """The touched rows of these embedding variables, of each all parts together, every checksum verified.

    Raises:
        CorruptFile: a checksum is wrong, keys and values do not fit the variable or one another, a key is
            there twice, or the offsets do not fit the keys.
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


def touched_keys(catalog: Catalog) -> Counter[str]:
    """How many keys of each embedding variable an increment holds, by its index alone."""
    found: Counter[str] = Counter()
    for stem in _stems(catalog):
        ref = catalog.tensors.get(stem + INCR_KEYS)
        if ref is not None:
            found[part_of(stem)[0]] += ref.elements
    return found


def _stems(catalog: Catalog) -> list[str]:
    """What the tensors of each part with touched rows are called before the suffix."""
    return sorted(
        {
            name.removesuffix(s)
            for s in (INCR_KEYS, INCR_VALUES)
            for name in catalog.tensors
            if name.endswith(s)
        }
    )


class _Part:
    """The touched rows of one part, each tensor checked against the variable's of the full checkpoint."""

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
        """Frequencies, if the full checkpoint has them, too: else these are zeros."""
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
