"""Snapshot isolation: no response of a signature mixes two positions.

Writers keep a sequence: odd while they write. A signature reads it, computes, and reads it again:

    before -> handles -> the forward pass, as it was -> outputs -> after
    clean  =  before is even and equal to after
    clean: the outputs as they are; else: the outputs of a function that tries again until they are

The first try is the graph's own nodes, to which only the order is added, so what isolation costs while
nothing is written is two reads and a branch. The function holds a second copy of the forward pass in a loop.
It sleeps while the sequence is odd. After a try that was not clean it asks updates for quiet, for somewhat
longer than the try took: a pass that takes longer than updates leave between them would never be clean. An
update that is about to write grants what was asked until then, once (`write_delta`), so it is delayed, not
kept out. An update that died half-way must not stall readers: their patience with it is bounded, and when it
ends the position is given as -1, values may be of several positions, and the response is counted.

TensorFlow's graph optimizers pass over the function, which would double what a first call takes, and it is
prepared when it is needed first. Where a warm-up record makes a signature's first call, that one goes through
the function as well: no client waits for either.

Cut out the part of a graph that computes a signature, so that it can run again inside a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from msgspec import Struct

from exporter.errors import NotServable
from exporter.graph.editor import CPU, GraphEditor, PlacedFunction, privately_named
from exporter.graph.nodes import input_names
from exporter.graph.signatures import SignatureTensor, StaticShape, canonical
from exporter.subgraph.state import SETTLED, StateNodes, Tensor, assign, read, sleep
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

HANDLE_MARK = "_updated_handle"
"""The attribute of nodes through which signatures take the handles of variables that updates write."""

_LARGE_CONSTANT_BYTES = 1024
"""Constants above this are shared with the graph instead of being stored in the function once more."""


class Forward(Struct, frozen=True):
    """What computes `fetches` from `feeds` and `captures` (resources and constants that stay outside)."""

    nodes: tuple[Proto, ...]
    library: Proto
    fetches: tuple[str, ...]
    feeds: tuple[str, ...]
    captures: tuple[tuple[str, DType], ...]

    def compute(self, inputs: dict[str, Any]) -> list[Any]:
        """Build the nodes in TensorFlow's default graph, over tensors for `feeds` and `captures` by name."""
        import tensorflow as tf

        graph_def = privately_named(self.library, self.nodes)
        native = tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString())
        passed_on = {name: inputs[name] for name in self.fetches if name in inputs}
        computed = [name for name in self.fetches if name not in inputs]
        taken = {canonical(ref) for node in self.nodes for ref in input_names(node)}
        found = tf.graph_util.import_graph_def(
            native,
            input_map={name: tensor for name, tensor in inputs.items() if name in taken},
            return_elements=computed,
            name="forward",
        )
        passed_on.update(zip(computed, found, strict=True))
        return [passed_on[name] for name in self.fetches]


def cut_out(graph_def: Proto, fetches: Sequence[str], feeds: Iterable[str]) -> Forward:
    """The nodes that compute the tensors `fetches` if the tensors `feeds` are given.

    Raises:
        NotServable: a node hands out a reference (a TF1 variable or table), which no function can take.
    """
    by_name = {node.name: node for node in graph_def.node}
    given = {canonical(feed) for feed in feeds}
    inside: dict[str, Proto] = {}
    captures: dict[str, DType] = {}
    used: dict[str, None] = {}
    pending = [canonical(fetch) for fetch in fetches]
    while pending:
        reference = pending.pop()
        if reference in given:
            used[reference] = None
            continue
        node = by_name[reference.removeprefix("^").partition(":")[0]]
        if (dtype := _kept_outside(node)) is not None:
            if not reference.startswith("^"):
                captures[reference] = dtype
        elif node.name not in inside and not (node.op == "Placeholder" and f"{node.name}:0" in given):
            inside[node.name] = node
            pending += [ref if ref.startswith("^") else canonical(ref) for ref in node.input]
    nodes = tuple(_without_outer_controls(node, inside) for node in graph_def.node if node.name in inside)
    return Forward(
        nodes,
        graph_def.library,
        tuple(canonical(fetch) for fetch in fetches),
        tuple(used),
        tuple(sorted(captures.items())),
    )


def _kept_outside(node: Proto) -> DType | None:
    """The dtype of a node's output if it is to be passed in, None if the node is to be repeated."""
    if node.op == "Const":
        large = node.ByteSize() > _LARGE_CONSTANT_BYTES and not node.input
        return DType(node.attr["dtype"].type) if large else None
    if HANDLE_MARK in node.attr:
        return DType.RESOURCE
    definition = _definition(node.op)
    outputs = definition.output_arg if definition is not None else ()
    if any(argument.is_ref for argument in outputs):
        raise NotServable(
            f"node {node.name!r} ({node.op}) hands out a reference, which cannot be isolated",
            hint="build the graph with resource variables and tables, or use --isolation row",
        )
    is_handle = bool(outputs) and all(argument.type == DType.RESOURCE for argument in outputs)
    return DType.RESOURCE if is_handle and definition.is_stateful else None


def _without_outer_controls(node: Proto, inside: dict[str, Proto]) -> Proto:
    if all(not ref.startswith("^") or ref[1:] in inside for ref in node.input):
        return node
    copy = deepcopy(node)
    copy.input[:] = [ref for ref in node.input if not ref.startswith("^") or ref[1:] in inside]
    return copy


def _definition(op: str) -> Any:
    from tensorflow.python.framework import op_def_registry  # the one way to ask what an op gives

    return op_def_registry.get(op)


_MOST_TRIES = 12
_QUIET = 1.5
"""Quiet that is asked for, in times that the try took; to the power of the number of tries, since on a busy
machine the next one takes longer."""


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
        *(getattr(state, name) for name in _STATE),
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


_STATE = ("sequence", "since", "quiet", "unsettled")


class _Retry(Struct, frozen=True):
    """The function that computes a forward pass again and again, until no update came between."""

    isolation: SharedNodes
    forward: Forward
    dtypes: tuple[DType, ...]
    with_position: bool
    warmed: bool

    def inputs(self, feeds: Sequence[SignatureTensor]) -> dict[str, tuple[DType, StaticShape]]:
        """Its arguments: `_STATE`, warm if any, captures, feeds, and the outputs of the first try."""
        names = (*_STATE, "warm") if self.warmed else _STATE
        handles = dict.fromkeys(names, (DType.RESOURCE, ()))
        captures = {f"capture_{n}": (dtype, None) for n, (_, dtype) in enumerate(self.forward.captures)}
        known = {feed.name: (feed.dtype, feed.shape) for feed in feeds}
        given = {f"feed_{n}": known[name] for n, name in enumerate(self.forward.feeds)}
        first = {f"first_{n}": (dtype, None) for n, dtype in enumerate(self.dtypes)}
        return handles | captures | given | first

    def build(
        self, sequence: Tensor, since: Tensor, quiet: Tensor, unsettled: Tensor, *others: Tensor
    ) -> list[Tensor]:
        """The function's nodes; see `inputs` for its arguments."""
        import tensorflow as tf

        warm, others = others[: self.warmed], others[self.warmed :]
        names = [*(name for name, _ in self.forward.captures), *self.forward.feeds]
        outer = dict(zip(names, others, strict=False))
        first = list(others[len(names) :])

        def again(_: Tensor, tries: Tensor, __: Tensor, *variables: Tensor) -> list[Tensor]:
            began = tf.timestamp()  # parts that read no variable begin now, too
            before = self._wait_until_even(sequence, since)
            outputs = self._compute(outer, before)
            with tf.control_dependencies(outputs):
                after = read(sequence, DType.INT64, ())
                ended = tf.timestamp()
            clean = tf.equal(tf.bitwise.bitwise_and(before, ~1), after)
            if self.with_position:
                nowhere = tf.fill([3], tf.constant(SETTLED, tf.int64))
                outputs[-1] = tf.where(clean, outputs[-1], nowhere)
            # Odd: waiting was in vain, and would be again.
            unfinished = tf.logical_not(clean | _is_odd(before) | (tries >= _MOST_TRIES))
            times = tf.pow(tf.constant(_QUIET, tf.float64), tf.cast(tries, tf.float64))
            asked = _assign_greater(quiet, tf.where(unfinished, ended + times * (ended - began), 0.0))
            with tf.control_dependencies([asked]):
                return [tf.ensure_shape(unfinished, []), tries + 1, clean, *outputs]

        _, _, clean, *outputs = tf.while_loop(
            lambda unfinished, *_: unfinished,
            again,
            [tf.constant(True), tf.constant(1), tf.constant(False), *first],
            shape_invariants=[tf.TensorShape([])] * 3 + [tf.TensorShape(None)] * len(first),
            parallel_iterations=1,
        )
        missed = tf.cast(tf.logical_not(clean), tf.int64)
        with tf.control_dependencies(outputs):
            done = [assign(handle, tf.constant(True)) for handle in warm]
            done.append(tf.raw_ops.AssignAddVariableOp(resource=unsettled, value=missed))
        with tf.control_dependencies(done):
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

    def _wait_until_even(self, sequence: Tensor, since: Tensor) -> Tensor:
        """The sequence once no update writes; odd if patience ends."""
        import tensorflow as tf

        deadline = tf.timestamp() + self.isolation.patience_seconds

        def poll(_: Tensor) -> Tensor:
            with tf.control_dependencies([sleep()]):
                return read(sequence, DType.INT64, ())

        def goes_on(value: Tensor) -> Tensor:
            with tf.control_dependencies([value]):
                now = tf.timestamp()
                is_over = (now > deadline) | self._has_died(value, since, now)
            return _is_odd(value) & tf.logical_not(is_over)

        (even,) = tf.while_loop(goes_on, poll, [read(sequence, DType.INT64, ())], parallel_iterations=1)
        return even

    def _has_died(self, sequence: Tensor, since: Tensor, now: Tensor) -> Tensor:
        """True if an update is still writing that has had its time."""
        return _is_odd(sequence) & (now > read(since, DType.DOUBLE, ()) + self.isolation.patience_seconds)


def _is_odd(sequence: Tensor) -> Tensor:
    import tensorflow as tf

    return tf.not_equal(tf.bitwise.bitwise_and(sequence, 1), 0)


def _assign_greater(handle: Tensor, value: Tensor) -> Tensor:
    """Of two that do this at once one may be lost: who asked for more quiet in vain asks again."""
    import tensorflow as tf

    return assign(handle, tf.maximum(read(handle, DType.DOUBLE, ()), tf.cast(value, tf.float64)))
