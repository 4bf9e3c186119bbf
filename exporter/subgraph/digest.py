"""`incremental_digest`: checksums of what a server holds, to compare with what was published.

`exporter.delta.chunk_digest` says what is summed; here it is stock ops on uint64. A server gives digests as
text, the decimal of a signed 64-bit integer: JavaScript reads larger numbers wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from exporter.delta.chunk_digest import CHUNK_ROWS, GOLDEN, LAST_SHIFT, ROUNDS, digested, row_count, word_size
from exporter.delta.format import ChangeKind, ServedVariable
from exporter.subgraph.state import SETTLED, Tensor, UpdateState, read
from exporter.subgraph.write_delta import UpdateTarget
from exporter.wire.dtypes import DType


def digest(numbers: Tensor, state: UpdateState, target: UpdateTarget) -> tuple[Tensor, ...]:
    """Digests of the chunks with these numbers, string [n], and the position before and after, int64 [n].

    The positions are -1 while an unfinished update is to be made good. Last a refusal, string []: empty, or
    why the call is to fail: there is no such chunk.
    """
    import tensorflow as tf

    variables = digested(target.schema)
    counts = [-(-row_count(variable) // CHUNK_ROWS) for variable in variables]
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
        stop = tf.minimum(start + CHUNK_ROWS, row_count(variable))
        if variable.kind is ChangeKind.TABLE:  # never read whole: see gather.py
            ids = tf.range(start, stop)
            return _digest_of(
                tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=dtype), variable.dtype
            )
        whole = tf.reshape(read(handle, variable.dtype, variable.shape), [row_count(variable), -1])
        return _digest_of(whole[start:stop], variable.dtype)

    return of_rows


def _digest_of(rows: Tensor, dtype: DType) -> Tensor:
    import tensorflow as tf

    flat = tf.reshape(rows, [-1])
    if dtype is not DType.BOOL:
        flat = tf.reshape(tf.bitcast(flat, f"uint{8 * word_size(dtype.numpy)}"), [-1])
    words = tf.cast(flat, tf.uint64)
    words += tf.cast(tf.range(1, tf.size(words, tf.int64) + 1), tf.uint64) * tf.constant(GOLDEN, tf.uint64)
    for shift, factor in ROUNDS:
        words = _shifted_xor(words, shift) * tf.constant(factor, tf.uint64)
    return tf.bitcast(tf.reduce_sum(_shifted_xor(words, LAST_SHIFT)), tf.int64)


def _shifted_xor(words: Tensor, shift: int) -> Tensor:
    import tensorflow as tf

    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))


def _settled_position(state: UpdateState) -> Tensor:
    import tensorflow as tf

    vector = state.read_position()
    return tf.where(tf.equal(vector[2], SETTLED), vector[0], SETTLED)
