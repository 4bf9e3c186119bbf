"""Run a part of the graph for one call at a time, even if waiting or running calls are cancelled.

The part is run by a `BatchFunction`: a queue with one thread, for batches of one call each. A call has its
turn when the thread has returned from the one before, and the thread returns when all that the call started
has ended, also if it was cancelled half-way. A call that is cancelled while it waits keeps its place and is
passed over when its turn comes. So no call can leave anything locked, and none can unlock what another
holds, as one does that is cancelled while it waits for a `MutexLock` (source:
tensorflow/core/kernels/mutex_ops.cc, `AcquireAsync`).

Waiting takes none of the threads that run a graph: there may be one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exporter.subgraph.state import Tensor

MOST_WAITING = 200
"""Calls beyond these are refused (UNAVAILABLE) and may be tried again; each holds a thread of the server."""


def one_at_a_time(
    queue: str, part: Callable[[Tensor], Sequence[Tensor]], argument: Tensor
) -> Sequence[Tensor]:
    """Run `part` on `argument` while no other call of `queue` in the process runs.

    The argument and each result have a first dimension of 1. What the part reads, it reads in its turn.
    """
    import tensorflow as tf

    function = tf.compat.v1.wrap_function(part, [tf.TensorSpec(argument.shape, argument.dtype)])
    dtypes = [output.dtype for output in function.outputs]

    def call(given: Tensor) -> tuple[Tensor, ...]:
        arguments = [given, *function.captured_inputs]
        return tuple(tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=dtypes, f=function))

    # As inputs of a BatchFunction all variables would have to be on its device; as those of a dataset not.
    prepared = tf.data.Dataset.from_tensors(argument).map(call)

    def turn(_: Tensor, dataset: Tensor) -> Sequence[Tensor]:
        shapes = [output.shape for output in function.outputs]
        element: Sequence[Tensor] = tf.raw_ops.DatasetToSingleElement(
            dataset=dataset, output_types=dtypes, output_shapes=shapes
        )
        return element

    results: Sequence[Tensor] = tf.raw_ops.BatchFunction(
        in_tensors=[argument],
        captured_tensors=[tf.data.experimental.to_variant(prepared)],
        f=tf.compat.v1.wrap_function(
            turn, [tf.TensorSpec(argument.shape, argument.dtype), tf.TensorSpec([], tf.variant)]
        ),
        Tout=dtypes,
        num_batch_threads=1,
        max_batch_size=1,
        batch_timeout_micros=0,
        max_enqueued_batches=MOST_WAITING,
        enable_large_batch_splitting=False,
        shared_name=queue,
    )
    return results
