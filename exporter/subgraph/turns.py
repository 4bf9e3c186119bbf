"""Run a part of the graph for one call at a time, however calls end: by an error, or cut off half-way.

No call waits, since each that waits holds a thread of the server: the turn is free, or the call has another
answer at once. Idle, it costs nothing.

A turn begins and ends with the iterator of a `GeneratorDataset` (source: tensorflow/core/kernels/data/
generator_dataset_op.cc). Its `init_func` takes the turn if that is free. Its destructor runs `finalize_func`,
which gives it back, if `init_func` succeeded, whatever became of all that came between; and runs it under a
cancellation manager of its own. So a call that is cut off gives its turn back, and does so after the last
operation that it started. `init_func` is one operation: nothing comes between its taking and its success.

What was tried before. A `MutexLock` is unlocked by a waiter that is cancelled, whichever call holds it
(mutex_ops.cc, `AcquireAsync`). A `BatchFunction` looks into its queue each millisecond, and each call that
waits in it holds a thread (shared_batch_scheduler.h, `ThreadLogic`). With its adaptive scheduler it begins
128 threads, runs two batches at once if the clock is set back as one is added, and may use a scheduler that
was deleted with its model (adaptive_shared_batch_scheduler.h, `CallbackWrapper`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from exporter.subgraph.state import Tensor

Dataset = Any
"""A `tf.data.Dataset`."""

_PHILOX = 1


def one_at_a_time(
    turn: Tensor, part: Callable[[], Sequence[Tensor]], occupied: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The results of `part`; or `occupied`, of the same dtypes, while another call runs it.

    `turn` is the handle of a variable, int64 [3], of zeros when the model is loaded. What `part` reads, it
    reads in its turn.
    """
    import tensorflow as tf

    function = tf.compat.v1.wrap_function(part, [])
    dtypes = [output.dtype for output in function.outputs]

    def call(_: Tensor) -> tuple[Tensor, ...]:
        # A function of its own is left as it is written (`GraphEditor.function`); a dataset's is optimized.
        return tuple(
            tf.raw_ops.StatefulPartitionedCall(args=function.captured_inputs, Tout=dtypes, f=function)
        )

    # Not `tf.cond`: servers that rewrite graphs by MLIR fail at what grappler makes of its branches.
    own = _taken(turn).filter(_was_free).map(call)
    either = own.concatenate(tf.data.Dataset.from_tensors(tuple(occupied))).take(1)
    found: Sequence[Tensor] = either.get_single_element()
    return found


def _was_free(before: Tensor) -> Tensor:
    import tensorflow as tf

    return tf.equal(before[0], 0)


def _taken(turn: Tensor) -> Dataset:
    """What the variable was before this call: zeros if the turn is its own, until the iterator ends."""
    import tensorflow as tf

    state = tf.TensorSpec([3], tf.int64)

    def take() -> Tensor:
        # The one stock operation that reads and changes a variable under one lock, and says what it read,
        # whose shape TensorFlow 2's loader can infer. What it adds is not zero; how much, does not matter.
        delta = tf.constant(1, tf.uint64)
        return tf.raw_ops.RngReadAndSkip(resource=turn, alg=tf.constant(_PHILOX), delta=delta)

    def give_back(before: Tensor) -> Tensor:
        # Only if it was taken, and by no `tf.cond` (see above): no index is no write.
        first = tf.range(tf.cast(_was_free(before), tf.int32))
        zeros = tf.zeros_like(first, tf.int64)
        with tf.control_dependencies(
            [tf.raw_ops.ResourceScatterUpdate(resource=turn, indices=first, updates=zeros)]
        ):
            return tf.identity(before)

    init, next_, finalize = (
        tf.compat.v1.wrap_function(function, specs)
        for function, specs in ((take, []), (tf.identity, [state]), (give_back, [state]))
    )
    element = tf.raw_ops.GeneratorDataset(
        init_func=init,
        init_func_other_args=init.captured_inputs,
        next_func=next_,
        next_func_other_args=next_.captured_inputs,
        finalize_func=finalize,
        finalize_func_other_args=finalize.captured_inputs,
        output_types=[state.dtype],
        output_shapes=[state.shape],
    )
    return tf.data.experimental.from_variant(element, state).take(1)
