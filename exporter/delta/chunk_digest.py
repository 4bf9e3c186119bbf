"""Checksums of a server's values, chunk by chunk, as an exporter computes them from its own copy.

The variables of the schema, in its order, are cut along their first dimension into *chunks* of `CHUNK_ROWS`
rows (a scalar is one row), numbered from 0 through all variables. A chunk's digest is the sum modulo 2**64 of
mix(w + (i + 1) * 0x9E3779B97F4A7C15) over its words w: an element's bits as an unsigned integer (a complex
one has two), i its index in the chunk, mix the finaliser of splitmix64 (S. Vigna, public domain):

    z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

Strings have no fixed words: their chunks have the digest 0. Lookup tables have no chunks, because the order
of their entries differs between servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState

# These numbers are constants of published graphs: with others, every server would seem to be wrong.
CHUNK_ROWS = 4096

GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


class Chunk(Struct, frozen=True):
    """Rows `start` to `stop` of a served variable."""

    variable: str
    start: int
    stop: int


def chunks(schema: Schema) -> Iterator[Chunk]:
    """Yield all chunks of the schema's variables, in the order of their numbers (the first is chunk 0).

    Keys and values of lookup tables have no chunks.
    """
    for variable in digested(schema):
        rows = row_count(variable)
        for start in range(0, rows, CHUNK_ROWS):
            yield Chunk(variable.name, start, min(rows, start + CHUNK_ROWS))


def cheapest_chunk(schema: Schema) -> int | None:
    """Return the number of the smallest, in bytes, of the variables' first chunks.

    Strings count as 0 bytes; of several the first. None for a schema without chunks.
    """
    sizes, number = dict[int, int](), 0
    for variable in digested(schema):
        rows = row_count(variable)
        if rows:
            element_bytes = variable.dtype.itemsize or 0  # strings are not read
            sizes[number] = min(rows, CHUNK_ROWS) * math.prod(variable.shape[1:]) * element_bytes
        number += -(-rows // CHUNK_ROWS)
    return min(sizes, key=sizes.__getitem__, default=None)


def chunk_digest(rows: NDArray[Any]) -> int:
    """Return the digest of one chunk's rows, an array [n, ...] or a scalar, as a signed 64-bit integer.

    0 for strings.
    """
    if rows.dtype.kind in "OSU":
        return 0
    flat = np.ascontiguousarray(rows).reshape(-1)
    words = flat.view(f"u{word_size(flat.dtype)}").astype(np.uint64)
    words += np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for shift, factor in ROUNDS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    total = (words ^ (words >> np.uint64(LAST_SHIFT))).sum(dtype=np.uint64)
    return int(total.astype(np.int64))


def served_digests(schema: Schema, state: LayeredState, wanted: Sequence[Chunk]) -> list[int]:
    """Return the digests that a server with this state computes for the chunks `wanted`, in their order.

    Each is a signed 64-bit integer. The stored checksums of the chunks' variables are verified first. Raises
    CorruptFile if one differs, CheckpointError (and subclasses) if values cannot be read, DiskFull or
    PublishError if bytes fetched from a store cannot be kept, KeyError for a variable that is not in the
    schema.
    """
    state.check({chunk.variable for chunk in wanted})
    variables = {variable.name: variable for variable in schema.variables}
    found = []
    for chunk in wanted:
        if variables[chunk.variable].kind is ChangeKind.TABLE:
            rows = state.rows(chunk.variable, chunk.start, chunk.stop)
        else:
            whole = state.whole(chunk.variable)
            rows = whole[chunk.start : chunk.stop] if whole.ndim else whole
        found.append(chunk_digest(rows))
    return found


def digested(schema: Schema) -> list[ServedVariable]:
    """Return the variables that have chunks, in the schema's order.

    Keys and values of lookup tables have none.
    """
    return [variable for variable in schema.variables if variable.contents is None]


def row_count(variable: ServedVariable) -> int:
    """The length of a variable's first dimension; 1 for a scalar."""
    return variable.shape[0] if variable.shape else 1


def word_size(dtype: np.dtype[Any]) -> int:
    """Return the bytes per word: the element size, or half of it for complex types."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
