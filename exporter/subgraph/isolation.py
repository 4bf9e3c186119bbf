"""Snapshot isolation: no response of a signature mixes two positions.

Writers keep a sequence: odd while they write. A signature reads it, computes, and reads it again:

    before -> handles -> the forward pass, as it was -> outputs -> after
    clean  =  before is even and equal to after
    clean: the outputs as they are; else: the outputs of a function that tries again until they are

The first try is the graph's own nodes, to which only the order is added, so what isolation costs while
nothing is written is two reads and a branch. The function holds a second copy of the forward pass in a loop.
It sleeps while the sequence is odd; its patience is bounded, and when it ends the position is given as -1: an
update that died half-way does not stall readers.

TensorFlow's graph optimizers pass over the function, which would double what a first call takes, and it is
prepared when it is needed first. Where a warm-up record makes a signature's first call, that one goes through
the function as well: no client waits for either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from exporter.graph.bodies import input_names
from exporter.graph.editor import CPU, GraphEditor, PlacedFunction
from exporter.graph.signature_tensors import SignatureTensor, StaticShape, canonical
from exporter.subgraph.forward_pass import HANDLE_MARK, Forward, cut_out
from exporter.subgraph.state import SETTLED, StateNodes, Tensor, assign, read
from exporter.wire.dtypes import DType

_POLL_MICROSECONDS = 200


class SharedNodes(Struct, frozen=True):
    """The nodes that all signatures share: the first read of the sequence, the ordered handles by name."""

    state: StateNodes
    before: str
    handles: dict[str, str]
    patience_seconds: float


def order_handles(
    editor: GraphEditor, state: StateNodes, handles: Iterable[str], patience_seconds: float
) -> SharedNodes:
    """Order every use of `handles` (VarHandleOps) after the first read of the sequence."""
    consumers = list(editor.graph_def.node)
    before = editor.node("before", "ReadVariableOp", [state.sequence], device=CPU, dtype=DType.INT64)
    ordered = {}
    for number, handle in enumerate((*handles, state.position)):
        node = editor.node(f"handle_{number}", "Identity", [handle], after=[before], T=DType.RESOURCE)
        editor.graph_def.node[-1].attr[HANDLE_MARK].b = True
        ordered[handle] = node
    names = ordered | {f"{handle}:0": node for handle, node in ordered.items()}
    for consumer in consumers:
        for index, reference in enumerate(input_names(consumer)):
            if reference in names:
                consumer.input[index] = names[reference]
    return SharedNodes(state, before, ordered, patience_seconds)


class Isolated(Struct, frozen=True):
    """A signature's outputs by the tensors that they replace; the position vector if it was asked for."""

    tensors: dict[str, str]
    position: str | None


def isolate(
    editor: GraphEditor,
    isolation: SharedNodes,
    signature: str,
    inputs: Sequence[SignatureTensor],
    outputs: Sequence[SignatureTensor],
    *,
    with_position: bool,
    warmed: bool,
) -> Isolated:
    """Make a signature compute again if an update came in between.

    A signature that reads nothing that updates write keeps its outputs. With `warmed` its first call goes
    through the function that tries again.

    Raises:
        NotServable: see `cut_out`.
    """
    fetches = [(output.name, output.dtype) for output in outputs]
    read_position = None
    if with_position:
        handle = isolation.handles[isolation.state.position]
        read_position = editor.node(f"{signature}/position", "ReadVariableOp", [handle], dtype=DType.INT64)
        fetches.append((canonical(read_position), DType.INT64))
    forward = cut_out(editor.graph_def, [name for name, _ in fetches], [feed.name for feed in inputs])
    written = {
        canonical(node) for handle, node in isolation.handles.items() if handle != isolation.state.position
    }
    if not written & {name for name, _ in forward.captures}:
        return Isolated({}, read_position)
    retry = _Retry(isolation, forward, tuple(dtype for _, dtype in fetches), with_position, warmed)
    part = editor.function(
        f"{signature}_again", retry.build, retry.inputs(inputs), inline=False, as_written=True
    )
    merged = _first_try_or(editor, isolation, signature, fetches, part, retry)
    return Isolated(
        {output.name: result for output, result in zip(outputs, merged, strict=False)},
        merged[-1] if with_position else None,
    )


def _is_ordered(tensor: str, isolation: SharedNodes) -> bool:
    return tensor in map(canonical, isolation.handles.values())


def _first_try_or(
    editor: GraphEditor,
    isolation: SharedNodes,
    signature: str,
    fetches: Sequence[tuple[str, DType]],
    again: PlacedFunction,
    retry: _Retry,
) -> list[str]:
    """The outputs of the first try if it was clean, else those of the function `again`."""
    state = isolation.state
    after = [name.partition(":")[0] for name, _ in fetches]
    after_read = editor.node(
        f"{signature}/after",
        "ReadVariableOp",
        [state.sequence],
        after=dict.fromkeys(after),
        device=CPU,
        dtype=DType.INT64,
    )
    # The mask is for the sequence before: one that is odd equals nothing then, nor does one that turned odd.
    mask = editor.constant(f"{signature}/even", ~1, DType.INT64)
    even = editor.node(
        f"{signature}/before_even", "BitwiseAnd", [isolation.before, mask], device=CPU, T=DType.INT64
    )
    clean, warm = _clean(editor, signature, even, after_read, warmed=retry.warmed)
    first = [
        editor.node(f"{signature}/first_{n}", "Switch", [name, clean], T=dtype)
        for n, (name, dtype) in enumerate(fetches)
    ]
    # After a clean first try the false outputs are dead, and so is the call: it costs nothing.
    outer = [
        state.sequence,
        state.since,
        *warm,
        *(name for name, _ in retry.forward.captures),
        *retry.forward.feeds,
    ]
    second = editor.call(f"{signature}/again", again, [*outer, *first])
    return [
        editor.node(f"{signature}/output_{n}", "Merge", [f"{first[n]}:1", second[n]], T=dtype, N=2)
        for n, (_, dtype) in enumerate(fetches)
    ]


def _clean(
    editor: GraphEditor, signature: str, even: str, after: str, *, warmed: bool
) -> tuple[str, tuple[str, ...]]:
    """The node that tells if a first try counts; the handle of the variable that tells if it may, if any."""
    if not warmed:
        return editor.node(f"{signature}/clean", "Equal", [even, after], device=CPU, T=DType.INT64), ()
    same = editor.node(f"{signature}/same", "Equal", [even, after], device=CPU, T=DType.INT64)
    warm = editor.variable(f"{signature}/warm", DType.BOOL)
    is_warm = editor.node(f"{signature}/is_warm", "ReadVariableOp", [warm], device=CPU, dtype=DType.BOOL)
    return editor.node(f"{signature}/clean", "LogicalAnd", [same, is_warm], device=CPU), (warm,)


class _Retry(Struct, frozen=True):
    """The function that computes a forward pass again and again, until no update came between."""

    isolation: SharedNodes
    forward: Forward
    dtypes: tuple[DType, ...]
    with_position: bool
    warmed: bool

    def inputs(self, feeds: Sequence[SignatureTensor]) -> dict[str, tuple[DType, StaticShape]]:
        """Its arguments: sequence, since, warm if any, captures, feeds, and the outputs of the first try."""
        names = ("sequence", "since", "warm") if self.warmed else ("sequence", "since")
        handles = dict.fromkeys(names, (DType.RESOURCE, ()))
        captures = {f"capture_{n}": (dtype, None) for n, (_, dtype) in enumerate(self.forward.captures)}
        known = {feed.name: (feed.dtype, feed.shape) for feed in feeds}
        given = {f"feed_{n}": known[name] for n, name in enumerate(self.forward.feeds)}
        first = {f"first_{n}": (dtype, None) for n, dtype in enumerate(self.dtypes)}
        return handles | captures | given | first

    def build(self, sequence: Tensor, since: Tensor, *others: Tensor) -> list[Tensor]:
        """The function's nodes; see `inputs` for its arguments."""
        import tensorflow as tf

        warm, others = others[: self.warmed], others[self.warmed :]
        names = [*(name for name, _ in self.forward.captures), *self.forward.feeds]
        outer = dict(zip(names, others, strict=False))
        first = list(others[len(names) :])
        deadline = tf.timestamp() + self.isolation.patience_seconds

        def again(*variables: Tensor) -> list[Tensor]:
            before = self._wait_until_even(sequence, since, deadline)
            outputs = self._compute(outer, before)
            with tf.control_dependencies(outputs):
                after = read(sequence, DType.INT64, ())
                late = self._is_late(after, since, deadline)
            clean = tf.equal(tf.bitwise.bitwise_and(before, ~1), after)
            if self.with_position:
                nowhere = tf.fill([3], tf.constant(SETTLED, tf.int64))
                outputs[-1] = tf.where(clean, outputs[-1], nowhere)
            return [tf.logical_not(clean | late), *outputs]

        _, *outputs = tf.while_loop(
            lambda unfinished, *_: unfinished,
            again,
            [tf.constant(True), *first],
            shape_invariants=[tf.TensorShape([]), *(tf.TensorShape(None) for _ in first)],
            parallel_iterations=1,
        )
        with tf.control_dependencies(outputs):
            warmed = [assign(handle, tf.constant(True)) for handle in warm]
        with tf.control_dependencies(warmed):
            return [tf.identity(output) for output in outputs]

    def _compute(self, outer: dict[str, Tensor], before: Tensor) -> list[Tensor]:
        """The forward pass over handles that cannot be used before the sequence was read."""
        import tensorflow as tf

        with tf.control_dependencies([before]):
            inputs = {
                name: tf.identity(tensor)
                for name, tensor in outer.items()
                if _is_ordered(name, self.isolation)
            }
        # The importer takes tensors of the innermost graph alone: so the others get a name in it too.
        inputs |= {name: tf.identity(tensor) for name, tensor in outer.items() if name not in inputs}
        return self.forward.compute(inputs)

    def _wait_until_even(self, sequence: Tensor, since: Tensor, deadline: Tensor) -> Tensor:
        """The sequence once no update writes, or as it is when patience ends."""
        import tensorflow as tf

        def poll(_: Tensor) -> Tensor:
            with tf.control_dependencies([_sleep()]):
                return read(sequence, DType.INT64, ())

        def writing(value: Tensor) -> Tensor:
            with tf.control_dependencies([value]):
                return tf.not_equal(tf.bitwise.bitwise_and(value, 1), 0) & tf.logical_not(
                    self._is_late(value, since, deadline)
                )

        (even,) = tf.while_loop(writing, poll, [read(sequence, DType.INT64, ())], parallel_iterations=1)
        return even

    def _is_late(self, sequence: Tensor, since: Tensor, deadline: Tensor) -> Tensor:
        """True when the reader, or an update that is still writing, has had its time."""
        import tensorflow as tf

        now = tf.timestamp()
        writing = tf.not_equal(tf.bitwise.bitwise_and(sequence, 1), 0)
        overdue = now > read(since, DType.DOUBLE, ()) + self.isolation.patience_seconds
        return (now > deadline) | (writing & overdue)


def _sleep() -> Tensor:
    """An operation that ends a little later without occupying a thread that computes."""
    import tensorflow as tf

    kind: dict[str, Any] = {"output_types": [tf.int32], "output_shapes": [tf.TensorShape([])]}
    element = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=kind["output_shapes"])
    slow = tf.raw_ops.SleepDataset(
        input_dataset=element, sleep_microseconds=tf.constant(_POLL_MICROSECONDS, tf.int64), **kind
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=slow, **kind)[0]
