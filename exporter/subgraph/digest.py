"""`incremental_digest`: checksums of what a server holds, to compare with what was published.

The variables of the schema, in its order, are cut along their first dimension into *chunks* of `CHUNK_ROWS`
rows (a scalar is one row), numbered from 0 through all variables. A chunk's digest is the sum modulo 2**64 of
mix(w + (i + 1) * 0x9E3779B97F4A7C15) over its words w: an element's bits as an unsigned integer (a complex
one has two), i its index in the chunk, mix the finaliser of splitmix64 (S. Vigna, public domain):

    z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

All of it is stock ops on uint64. Strings have no fixed words: their chunks have the digest 0. Lookup tables
have no chunks: a server gives their entries in an order of its own. A server gives
digests as text, the decimal of a signed 64-bit integer: JavaScript reads larger numbers wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, read
from exporter.subgraph.write_delta import UpdateTarget
from exporter.wire.dtypes import DType

CHUNK_ROWS = 4096

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `stop` of a variable."""

    variable: str
    start: int
    stop: int


def chunks(schema: Schema) -> Iterator[Chunk]:
    """All chunks in the order of their numbers."""
    for variable in _digested(schema):
        rows = _rows(variable)
        for start in range(0, rows, CHUNK_ROWS):
            yield Chunk(variable.name, start, min(rows, start + CHUNK_ROWS))


def chunk_digest(rows: NDArray[Any]) -> int:
    """The digest, as a signed 64-bit integer, of one chunk's rows."""
    if rows.dtype.kind in "OSU":
        return 0
    flat = np.ascontiguousarray(rows).reshape(-1)
    words = flat.view(f"u{_word_size(flat.dtype)}").astype(np.uint64)
    words += np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    for shift, factor in _ROUNDS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    total = (words ^ (words >> np.uint64(_LAST_SHIFT))).sum(dtype=np.uint64)
    return int(total.astype(np.int64))


def _word_size(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def digest(numbers: Tensor, state: UpdateState, target: UpdateTarget) -> tuple[Tensor, ...]:
    """Digests of the chunks with these numbers, string [n], and the position before and after, int64 [n].

    The positions are -1 while an unfinished update is to be made good. Last a refusal, string []: empty, or
    why the call is to fail: there is no such chunk.
    """
    import tensorflow as tf

    variables = _digested(target.schema)
    counts = [-(-_rows(variable) // CHUNK_ROWS) for variable in variables]
    first = np.cumsum([0, *counts], dtype=np.int64)
    exist = (numbers >= 0) & (numbers < int(first[-1]))
    refusal = tf.where(tf.reduce_all(exist), "", f"chunks are numbered 0 to {first[-1] - 1}")
    numbers = tf.where(exist, numbers, 0)
    before = _settled_position(state)
    branches = [_branch(variable, target.handles[variable.name][0]) for variable in variables]
    branches = branches or [lambda _: tf.constant(0, tf.int64)]  # no chunk exists: none is asked for

    def of_chunk(number: Tensor) -> Tensor:
        index = tf.searchsorted(first[1:], [number], side="right")[0]
        start = (number - tf.gather(first, index)) * CHUNK_ROWS
        return tf.switch_case(index, [partial(branch, start) for branch in branches])

    with tf.control_dependencies([before]):
        found = tf.map_fn(of_chunk, tf.identity(numbers), fn_output_signature=tf.int64, parallel_iterations=1)
    with tf.control_dependencies([found]):
        after = _settled_position(state)
    shape = tf.shape(numbers)
    return tf.strings.as_string(found), tf.fill(shape, before), tf.fill(shape, after), refusal


def _branch(variable: ServedVariable, handle: Tensor) -> Callable[[Tensor], Tensor]:
    """The digest of the chunk of `variable` that begins at a row."""
    import tensorflow as tf

    dtype = tf.as_dtype(int(variable.dtype))

    def of_rows(start: Tensor) -> Tensor:
        if variable.dtype is DType.STRING:
            return tf.constant(0, tf.int64)
        stop = tf.minimum(start + CHUNK_ROWS, _rows(variable))
        if variable.kind is ChangeKind.TABLE:  # never read whole: see gather.py
            ids = tf.range(start, stop)
            return _digest_of(
                tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=dtype), variable.dtype
            )
        whole = tf.reshape(read(handle, variable.dtype, variable.shape), [_rows(variable), -1])
        return _digest_of(whole[start:stop], variable.dtype)

    return of_rows


def _digest_of(rows: Tensor, dtype: DType) -> Tensor:
    import tensorflow as tf

    flat = tf.reshape(rows, [-1])
    if dtype is not DType.BOOL:
        flat = tf.reshape(tf.bitcast(flat, f"uint{8 * _word_size(dtype.numpy)}"), [-1])
    words = tf.cast(flat, tf.uint64)
    words += tf.cast(tf.range(1, tf.size(words, tf.int64) + 1), tf.uint64) * tf.constant(_GOLDEN, tf.uint64)
    for shift, factor in _ROUNDS:
        words = _shifted_xor(words, shift) * tf.constant(factor, tf.uint64)
    return tf.bitcast(tf.reduce_sum(_shifted_xor(words, _LAST_SHIFT)), tf.int64)


def _shifted_xor(words: Tensor, shift: int) -> Tensor:
    import tensorflow as tf

    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))


def _settled_position(state: UpdateState) -> Tensor:
    import tensorflow as tf

    vector = state.read_position()
    return tf.where(tf.equal(vector[2], SETTLED), vector[0], SETTLED)


def _digested(schema: Schema) -> list[ServedVariable]:
    return [variable for variable in schema.variables if variable.contents is None]


def _rows(variable: ServedVariable) -> int:
    return variable.shape[0] if variable.shape else 1
