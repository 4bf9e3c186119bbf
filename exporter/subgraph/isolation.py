"""Snapshot isolation: no response of a signature mixes two positions.

A sequence lock. Updates keep a sequence number odd while they write (`write_delta`). A signature reads the
sequence, computes, and reads it again:

    before -> handles -> the unchanged forward pass -> outputs -> after
    clean  =  before is even and equal to after
    clean: return the outputs; else: the outputs of a function that retries until it is clean

The first try runs the graph's own nodes; only an order is added. So while nothing is written, isolation costs
two reads and a branch. The function has a second copy of the forward pass, cut out of the graph, in a loop.
It sleeps while the sequence is odd. After a try that was not clean it asks updates for quiet, somewhat longer
than the try took: otherwise a pass that takes longer than the pauses between updates would never be clean. An
update waits, before it writes, for the quiet requested until then, once. So readers delay an update, but do
not block it.

An update that died half-way must not stall readers. They wait for it for a limited time; after that a
response may mix positions, gives its position as -1, and is counted in `unsettled`.

TensorFlow's graph optimizers skip the function, because optimizing it would double the time of a first call;
a server prepares it when it is first needed. If a warm-up record makes a signature's first call, that call
goes through the function as well, so that no client waits for either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

from msgspec import Struct

from exporter.errors import NotServable
from exporter.graph.editor import CPU, GraphEditor, privately_named
from exporter.graph.nodes import base_dtype, input_names, through_identities
from exporter.graph.signatures import SignatureTensor, StaticShape, canonical
from exporter.late_names import tf
from exporter.subgraph.state import SETTLED, StateNodes, Tensor, assign, read, sleep
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

HANDLE_MARK = "_updated_handle"
"""The attribute that marks the nodes through which signatures get the handles of updated variables."""

_LARGE_CONSTANT_BYTES = 1024  # the function copies smaller constants, and captures larger ones
_MOST_TRIES = 12

# After try number n a reader asks for quiet of `_QUIET ** n` times what that try took: on a busy machine the
# next one may take longer.
_QUIET = 1.5

_STATE = ("sequence", "since", "quiet", "unsettled")


class SharedNodes(Struct, frozen=True):
    """The nodes that all signatures share.

    `before` is the node that first reads the sequence. `handles` maps the node of the handle of each updated
    variable or lookup table to the node through which signatures get it, which runs after that read.
    `patience_seconds` limits a reader's wait for an update.
    """

    state: StateNodes
    before: str
    handles: dict[str, str]
    patience_seconds: float


def order_handles(
    editor: GraphEditor, state: StateNodes, handles: Iterable[str], patience_seconds: float
) -> SharedNodes:
    """Put a read of the sequence before all present uses of `handles` and of the position's handle.

    The uses are rerouted through new nodes, which run after that read. `handles` are the nodes of the handles
    of variables and lookup tables, each once. Changes the graph's nodes in place; returns the nodes that
    signatures share; nodes that are added later are not rerouted. `patience_seconds` limits a reader's wait
    for an update.
    """
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


def isolate(
    editor: GraphEditor,
    isolation: SharedNodes,
    signature: str,
    inputs: Sequence[SignatureTensor],
    outputs: Sequence[SignatureTensor],
    *,
    with_position: bool,
    warmed: bool,
) -> tuple[dict[str, str], str | None]:
    """Add the nodes by which the signature named `signature` computes again if an update wrote while it read.

    `inputs` and `outputs` are the signature's tensors. Returns the node names of the new outputs, by the
    names of the tensors that they replace (empty if the signature reads nothing that updates write), and the
    name of its position tensor, int64 [3] (None unless `with_position`). With `warmed` the first call goes
    through the function that retries. The caller puts the outputs into the signature.

    Raises:
        NotServable: a node outputs a reference.
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
        return {}, read_position
    retry = _Retry(isolation, forward, tuple(dtype for _, dtype in fetches), with_position, warmed)
    merged = _first_try_or(editor, signature, inputs, fetches, retry)
    tensors = {output.name: result for output, result in zip(outputs, merged, strict=False)}
    return tensors, merged[-1] if with_position else None


def _first_try_or(
    editor: GraphEditor,
    signature: str,
    inputs: Sequence[SignatureTensor],
    fetches: Sequence[tuple[str, DType]],
    retry: _Retry,
) -> list[str]:
    """Add the branch between a clean first try and the function that retries; return the outputs' node names.

    `signature` prefixes the nodes; `inputs` are the signature's. `fetches` are the tensors that the first try
    computes, with dtypes; the outputs have their order. `retry` builds the function.
    """
    state, before = retry.isolation.state, retry.isolation.before
    after = [name.partition(":")[0] for name, _ in fetches]
    after_read = editor.node(
        f"{signature}/after",
        "ReadVariableOp",
        [state.sequence],
        after=dict.fromkeys(after),
        device=CPU,
        dtype=DType.INT64,
    )
    # One comparison for both conditions: an even `before` is itself under the mask, and an odd one becomes a
    # number that the sequence does not return to. `before` precedes all handles and `after` follows all
    # outputs: an update that wrote while the pass read has changed the sequence.
    mask = editor.constant(f"{signature}/even", ~1, DType.INT64)
    even = editor.node(f"{signature}/before_even", "BitwiseAnd", [before, mask], device=CPU, T=DType.INT64)
    clean, warm = _clean(editor, signature, even, after_read, warmed=retry.warmed)
    first = [
        editor.node(f"{signature}/first_{n}", "Switch", [name, clean], T=dtype)
        for n, (name, dtype) in enumerate(fetches)
    ]
    # A Switch gives a dead output on the side that is not taken, and a node with a dead input does not run:
    # after a clean first try the call costs nothing.
    # So this vector waits for a dead output: with hundreds of handles it takes longer than a small pass.
    dead = editor.node(f"{signature}/unclean", "Identity", [first[0]], T=fetches[0][1])
    vectors = editor.pack(f"{signature}/handles", retry.handles, after=[dead], apart=retry.alone)
    vectors |= {(number,): retry.handles[number] for number in sorted(retry.alone)}
    build, kinds = partial(retry.build, [*vectors]), retry.inputs(inputs, [*vectors])
    again = editor.function(f"{signature}_again", build, kinds, inline=False, as_written=True)
    outer = [
        *(getattr(state, name) for name in _STATE),
        *warm,
        *vectors.values(),
        *retry.others,
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
    """Add the node that is true if the first try counts: `even` and `after` are equal. Return its name.

    With `warmed` it is true only after the retrying function has run once; the second value is then the
    handle of the variable that records this run, else it is empty.
    """
    if not warmed:
        return editor.node(f"{signature}/clean", "Equal", [even, after], device=CPU, T=DType.INT64), ()
    same = editor.node(f"{signature}/same", "Equal", [even, after], device=CPU, T=DType.INT64)
    warm = editor.variable(f"{signature}/warm", DType.BOOL)
    is_warm = editor.node(f"{signature}/is_warm", "ReadVariableOp", [warm], device=CPU, dtype=DType.BOOL)
    return editor.node(f"{signature}/clean", "LogicalAnd", [same, is_warm], device=CPU), (warm,)


class _Retry(Struct, frozen=True, dict=True):
    """The builder of the function that repeats a forward pass until no update wrote meanwhile.

    `forward` computes the outputs, of these `dtypes`; the last is the position if `with_position`. With
    `warmed` the function also records that it has run. After 12 tries it returns the outputs of the last.
    """

    isolation: SharedNodes
    forward: Forward
    dtypes: tuple[DType, ...]
    with_position: bool
    warmed: bool

    @cached_property
    def handles(self) -> list[str]:
        """Return the names of the captured handles of variables and tables that updates write, sorted.

        The function takes these handles as vectors, but for those in `alone`.
        """
        # Not those of mapped tables: a vector would hide their uses, which are changed later for hot rows.
        written = {canonical(node) for node in self.isolation.handles.values()}
        return [name for name, _ in self.forward.captures if name in written]

    @cached_property
    def alone(self) -> frozenset[int]:
        """Return the indices in `handles` of the handles that the function takes by themselves."""
        # ResourceGatherNd infers shapes from the handle's own shape where it does not know the variable's
        # (GatherNdShape in TensorFlow's common_shape_fns.cc): an argument's is unknown, but an element of a
        # vector is a scalar, from which no rows can be gathered.
        readers = (node for node in self.forward.nodes if node.op == "ResourceGatherNd")
        nodes = {node.name: node for node in self.forward.nodes}
        taken = {canonical(through_identities(nodes, input_names(node)[0])) for node in readers}
        return frozenset(n for n, name in enumerate(self.handles) if name in taken)

    @property
    def others(self) -> dict[str, DType]:
        """Return the dtypes of the other captures, by name, sorted."""
        return {name: dtype for name, dtype in self.forward.captures if name not in self.handles}

    def inputs(
        self, feeds: Sequence[SignatureTensor], vectors: Sequence[Sequence[int]]
    ) -> dict[str, tuple[DType, StaticShape]]:
        """Return the dtype and shape of each argument, by name, in order.

        The order is: `_STATE`, `warm` (if `warmed`), a vector of handles for each of `vectors`, other
        captures, feeds, and the outputs of the first try. `feeds` are the signature's inputs. A shape of None
        is unknown.
        """
        names = (*_STATE, "warm") if self.warmed else _STATE
        handles: dict[str, tuple[DType, StaticShape]] = dict.fromkeys(names, (DType.RESOURCE, ()))
        handles |= {
            f"handles_{n}": (DType.RESOURCE, None if each[0] in self.alone else (len(each),))
            for n, each in enumerate(vectors)
        }
        captures = {f"capture_{n}": (dtype, None) for n, dtype in enumerate(self.others.values())}
        known = {feed.name: (feed.dtype, feed.shape) for feed in feeds}
        given = {f"feed_{n}": known[name] for n, name in enumerate(self.forward.feeds)}
        first = {f"first_{n}": (dtype, None) for n, dtype in enumerate(self.dtypes)}
        return handles | captures | given | first

    def build(
        self,
        vectors: Sequence[Sequence[int]],
        sequence: Tensor,
        since: Tensor,
        quiet: Tensor,
        unsettled: Tensor,
        *others: Tensor,
    ) -> list[Tensor]:
        """Add the function's nodes, over the arguments of `inputs`; return the signature's outputs.

        `vectors` has, for each vector of handles, the indices in `handles` of its elements. `sequence` to
        `unsettled` are the handles of `_STATE`; `others` are the arguments after these.
        """
        warm, rest = others[: self.warmed], others[self.warmed :]
        packed, rest = dict(zip(map(tuple, vectors), rest, strict=False)), rest[len(vectors) :]
        names = [*self.others, *self.forward.feeds]
        outer = dict(zip(names, rest, strict=False))
        first = list(rest[len(names) :])

        def again(_: Tensor, tries: Tensor, __: Tensor, *variables: Tensor) -> list[Tensor]:
            # Before the wait: the parts of the pass that read no variable do not wait for the sequence, and
            # the quiet to ask for must cover them.
            began = tf.timestamp()
            before = self._wait_until_even(sequence, since)
            outputs = self._compute(outer, packed, before)
            with tf.control_dependencies(outputs):
                after = read(sequence, DType.INT64, ())
                ended = tf.timestamp()
            clean = tf.equal(tf.bitwise.bitwise_and(before, ~1), after)
            if self.with_position:
                nowhere = tf.fill([3], tf.constant(SETTLED, tf.int64))
                outputs[-1] = tf.where(clean, outputs[-1], nowhere)
            # An odd `before` means that patience with a dead update has ended: it would end again.
            unfinished = tf.logical_not(clean | _is_odd(before) | (tries >= _MOST_TRIES))
            times = tf.pow(tf.constant(_QUIET, tf.float64), tf.cast(tries, tf.float64))
            # The last try asks for 0.0, which changes nothing.
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
        # Every output waits for the assignments: a server runs only what outputs need, so a write that no
        # output depends on would not run.
        with tf.control_dependencies(outputs):
            done = [assign(handle, tf.constant(True)) for handle in warm]
            done.append(tf.raw_ops.AssignAddVariableOp(resource=unsettled, value=missed))
        with tf.control_dependencies(done):
            return [tf.identity(output) for output in outputs]

    def _compute(
        self, outer: dict[str, Tensor], packed: Mapping[tuple[int, ...], Tensor], before: Tensor
    ) -> list[Tensor]:
        """Add the forward pass, over handles that depend on the read of the sequence; return its outputs.

        `outer` are captures and feeds by name; `packed` are the vectors of handles, by the indices in
        `handles` of their elements; `before` is the sequence that was read.
        """
        # The handles wait, not the values: each read through one comes after the sequence was read.
        with tf.control_dependencies([before]):
            inputs = {
                self.handles[number]: handle
                for numbers, vector in packed.items()
                for number, handle in zip(
                    numbers,
                    [tf.identity(vector)]
                    if numbers[0] in self.alone
                    else tf.raw_ops.Unpack(value=vector, num=len(numbers)),
                    strict=True,
                )
            }
        # The importer accepts tensors of the innermost graph only: an identity brings the others into it.
        inputs |= {name: tf.identity(tensor) for name, tensor in outer.items()}
        return self.forward.compute(inputs)

    def _wait_until_even(self, sequence: Tensor, since: Tensor) -> Tensor:
        """Add a loop that reads the sequence until it is even; return the value that was read last, int64 [].

        It is odd if patience ended first: after `patience_seconds`, or at once if an update has been writing
        for longer than that. `sequence` and `since`, the time at which that update began, are handles.
        """
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
        """Return true, bool [], if an update has been writing for longer than `patience_seconds`.

        `sequence` is a value, `since` a handle, `now` the time in seconds since 1970.
        """
        return _is_odd(sequence) & (now > read(since, DType.DOUBLE, ()) + self.isolation.patience_seconds)


def _is_odd(sequence: Tensor) -> Tensor:
    return tf.not_equal(tf.bitwise.bitwise_and(sequence, 1), 0)


def _assign_greater(handle: Tensor, value: Tensor) -> Tensor:
    """Add an assignment that raises a variable to `value` if that is greater; return the operation.

    The variable is a float64 [].
    """
    # This read and this write are two operations: of two calls at once one may be lost. A reader whose
    # request is lost, and whose next try is not clean, asks again.
    return assign(handle, tf.maximum(read(handle, DType.DOUBLE, ()), tf.cast(value, tf.float64)))


class Forward(Struct, frozen=True):
    """The nodes that compute `fetches` from `feeds` and `captures`, to be built again inside a function.

    `captures` are resources and large constants, whose nodes stay outside the function.
    """

    nodes: tuple[Proto, ...]
    library: Proto
    fetches: tuple[str, ...]
    feeds: tuple[str, ...]
    captures: tuple[tuple[str, DType], ...]

    def compute(self, inputs: dict[str, Any]) -> list[Any]:
        """Import the nodes into the default graph and return the tensors of `fetches`, in their order.

        `inputs` has a tensor for each feed and capture, by name.
        """
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
    """Return the nodes that compute the tensors `fetches` from the tensors `feeds`, and their captures.

    The graph is not changed. A feed that nothing uses is left out.

    Raises:
        KeyError: a node of `fetches`, or one that it reads, does not exist: `clean` refuses such graphs.
        NotServable: a node outputs a reference.
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
    """Return the output's dtype of a node that stays outside the function; None if it goes inside.

    Large constants and stateful sources of handles stay outside. NotServable if the node outputs a reference.
    """
    if node.op == "Const":
        large = node.ByteSize() > _LARGE_CONSTANT_BYTES and not node.input
        return base_dtype(node.attr["dtype"].type) if large else None
    if HANDLE_MARK in node.attr:
        return DType.RESOURCE
    from tensorflow.python.framework import op_def_registry  # the public API does not give an op's outputs

    definition = op_def_registry.get(node.op)
    outputs = definition.output_arg if definition is not None else ()
    if any(argument.is_ref for argument in outputs):
        raise NotServable(
            f"node {node.name!r} ({node.op}) outputs a reference, which cannot be isolated",
            hint="build the graph with resource variables and tables, or use --isolation row",
        )
    is_handle = bool(outputs) and all(argument.type == DType.RESOURCE for argument in outputs)
    return DType.RESOURCE if is_handle and definition.is_stateful else None


def _without_outer_controls(node: Proto, inside: dict[str, Proto]) -> Proto:
    """Return the node if all its control inputs are in `inside`, else a copy without the others.

    `inside` has the function's nodes by name.
    """
    if all(not ref.startswith("^") or ref[1:] in inside for ref in node.input):
        return node
    copy = deepcopy(node)
    copy.input[:] = [ref for ref in node.input if not ref.startswith("^") or ref[1:] in inside]
    return copy
