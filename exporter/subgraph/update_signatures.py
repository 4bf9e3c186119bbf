"""Add the signatures of a graph that takes deltas: update, status, digest, and stamps on predictions.

`incremental_digest` gives checksums of a server's values, to compare with the published ones.
`exporter.delta.chunk_digest` defines them; here they are computed by stock operations. A server answers with
the decimal text of a signed 64-bit integer, because JavaScript rounds numbers of that size.

Every input and output is a vector of one length, so that the signatures work with `--enable_batching`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
from msgspec import Struct

from exporter.delta.chunk_digest import CHUNK_ROWS, GOLDEN, LAST_SHIFT, ROUNDS, digested, row_count, word_size
from exporter.delta.format import ChangeKind, Schema, ServedVariable
from exporter.graph.editor import CPU, GraphEditor, TracedFunction, trace
from exporter.graph.inference_graph import JoinedPart
from exporter.graph.signatures import SignatureTensor, canonical, tensors_of
from exporter.late_names import tf
from exporter.subgraph.overlay import OverlaidTable, add_fill
from exporter.subgraph.read_delta import Expected
from exporter.subgraph.state import SETTLED, STATE_INPUTS, State, StateNodes, Tensor, UpdateState, read
from exporter.subgraph.update import UpdateRules, update
from exporter.subgraph.write_delta import HandleLayout, JoinedRows, MappedRows, UpdateTarget
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

PREDICT_METHOD = "tensorflow/serving/predict"
STAMPS = ("model_position", "model_step")
NO_TEXTS: Mapping[str, str] = {}

Served = Mapping[ServedVariable, tuple[str, ...]]
"""The variables that deltas write, with the nodes of their handles (a lookup table's are with its keys)."""


def add_update(
    editor: GraphEditor,
    state: StateNodes,
    served: Served,
    overlaid: Mapping[str, OverlaidTable],
    joined: Mapping[str, JoinedPart],
    how: HowToUpdate,
    texts: Mapping[str, str],
) -> Proto:
    """Add the nodes of `incremental_update` to the graph and return its signature.

    `served` are the variables that it writes; `overlaid` and `joined` are keyed by node name of a handle;
    `how` traces the update. `texts` has the names of the log's directory and the lineage, keyed `log` and
    `lineage`, in this order.
    """
    up_to, outputs = _add_part(editor, state, served, overlaid, joined, "update", "up_to", how, texts)
    dtypes = (*[DType.INT64] * 4, DType.STRING)
    position, step, rows, deltas, status = _unless_refused(editor, "update", outputs, dtypes)
    numbers = {"position": position, "step": step, "rows": rows, "deltas": deltas}
    return _signature({"up_to": up_to}, numbers, {"status": status})


class HowToUpdate(Struct, frozen=True):
    """A tracer of `update`, hashable: bases with equal fields and an equal layout share a traced function.

    `finite` refuses NaN and infinity; `snapshot_max_rows` is that of `UpdateRules` (-1: always in chunks).
    """

    finite: bool
    snapshot_max_rows: int

    def __call__(
        self, up_to: Tensor, state: UpdateState, target: UpdateTarget, log: Tensor, lineage: Tensor
    ) -> tuple[Tensor, ...]:
        """Add the nodes of `update` and return its tensors.

        `log`, the name of the log's directory, and `lineage` are string [], and inputs of the traced
        function instead of constants, so that bases share it.
        """
        expected = Expected(lineage, target.layout.form, self.finite)
        return update(up_to, state, target, UpdateRules(log, expected, self.snapshot_max_rows))


def add_digest(
    editor: GraphEditor,
    state: StateNodes,
    served: Served,
    overlaid: Mapping[str, OverlaidTable],
    joined: Mapping[str, JoinedPart],
) -> Proto:
    """Add the nodes of `incremental_digest` to the graph and return its signature.

    `served` are the variables that deltas write; `overlaid` and `joined` are keyed by node name of a handle.
    """
    rows, outputs = _add_part(editor, state, served, overlaid, joined, "digest", "rows", digest)
    dtypes = (DType.STRING, DType.INT64, DType.INT64)
    checksum, before, after = _unless_refused(editor, "digest", outputs, dtypes)
    return _signature(
        {"rows": rows}, {"position_before": before, "position_after": after}, {"digest": checksum}
    )


OVERLAY_OUTPUTS = ("mapped_tables", "tables_to_map", "overlay_percent")
"""Further outputs of `incremental_status` of a base with mapped tables: `overlay.add_fill`."""


def add_status(
    editor: GraphEditor, state: StateNodes, lineage: str, overlaid: Collection[OverlaidTable] = ()
) -> Proto:
    """Add the nodes of `incremental_status` to the graph and return its signature.

    `lineage` is the log's. With any table in `overlaid` the signature has the outputs `OVERLAY_OUTPUTS`, too.
    """

    def build(probe: Tensor, position: Tensor, unsettled: Tensor) -> list[Tensor]:
        vector = read(position, DType.INT64, (3,))  # once: position and step are of one moment
        values = vector[0], vector[1], read(unsettled, DType.INT64, ()), tf.constant(lineage)
        return [tf.fill(tf.shape(probe), value) for value in values]

    handles = dict.fromkeys(("position", "unsettled"), (DType.RESOURCE, ()))
    part = editor.function("status", build, {"probe": (DType.INT64, (None,)), **handles})
    probe = editor.placeholder("probe", DType.INT64, (None,))
    position, step, unsettled, owner = editor.call("status", part, [probe, state.position, state.unsettled])
    numbers = {"position": position, "step": step, "unsettled": unsettled}
    if overlaid:

        def fill(probe: Tensor, *values: Tensor) -> list[Tensor]:
            return [tf.fill(tf.shape(probe), value) for value in values]

        kinds = {"probe": (DType.INT64, (None,)), **dict.fromkeys(OVERLAY_OUTPUTS, (DType.INT64, ()))}
        spread = editor.function("overlay_status", fill, kinds)
        found = editor.call("overlay_status", spread, [probe, *add_fill(editor, overlaid)])
        numbers |= dict(zip(OVERLAY_OUTPUTS, found, strict=True))
    return _signature({"probe": probe}, numbers, {"lineage": owner})


def add_stamps(
    editor: GraphEditor, state: StateNodes, name: str, signature: Proto, position: str | None
) -> None:
    """Add the outputs `model_position` and `model_step` to `signature`, int64 [n], n being the batch size.

    `name` is the signature's. `position` is the tensor, int64 [3], of the position at which the answer was
    computed; with None the position is read independently of the answer.
    """
    if position is None:
        position = editor.node(
            f"{name}/position", "ReadVariableOp", [state.position], device=CPU, dtype=DType.INT64
        )
    batched = _batched([*tensors_of(signature.inputs), *tensors_of(signature.outputs)])
    shape = editor.node(f"{name}/batch", "Shape", [batched.name], T=batched.dtype, out_type=DType.INT64)

    def stamps(shape: Tensor, vector: Tensor) -> list[Tensor]:
        rows = tf.concat([shape, [1]], 0)[:1]  # a scalar counts as one row
        return [tf.fill(rows, vector[0]), tf.fill(rows, vector[1])]

    part = editor.function(
        f"{name}_stamps", stamps, {"shape": (DType.INT64, (None,)), "position": (DType.INT64, (3,))}
    )
    for key, tensor in zip(STAMPS, editor.call(f"{name}/stamps", part, [shape, position]), strict=True):
        signature.outputs[key].CopyFrom(_vector_info(tensor, DType.INT64))


def _batched(tensors: Sequence[SignatureTensor]) -> SignatureTensor:
    """Return the tensor whose length is the batch size.

    It is the first of unknown length, else the first that is not a scalar. If all are scalars, it is the
    first of them. `tensors` must not be empty.
    """
    open_ = [t for t in tensors if t.shape and t.shape[0] is None]
    vectors = [t for t in tensors if t.shape != ()]
    return next(iter([*open_, *vectors, *tensors]))


def _add_part(
    editor: GraphEditor,
    state: StateNodes,
    served: Served,
    overlaid: Mapping[str, OverlaidTable],
    joined: Mapping[str, JoinedPart],
    name: str,
    argument: str,
    build: Callable[..., tuple[Tensor, ...]],
    texts: Mapping[str, str] = NO_TEXTS,
) -> tuple[str, list[str]]:
    """Add a call of the function `build`; return its placeholder's name and the names of its outputs.

    `build` gets `argument`, int64 [n], which the placeholder feeds, the state, an `UpdateTarget` of the
    variables in `served`, and `texts` as string [], in their order. It is traced once for all bases of one
    layout. `overlaid` and `joined` are keyed by node name of a handle. `name` prefixes the nodes.
    """
    schema = Schema.of(served)
    owners = tuple(variable for variable in schema.variables for _ in served[variable])
    nodes = [node for variable in schema.variables for node in served[variable]]
    parts = [joined.get(node) for node in nodes]
    firsts = tuple(None if part is None else part.first for part in parts)
    handles = [node if part is None else part.node for node, part in zip(nodes, parts, strict=True)]
    numbered = {handle: number for number, handle in enumerate(dict.fromkeys(handles))}
    numbers = tuple(numbered[handle] for handle in handles)
    of_tables = tuple(map(overlaid.get, nodes))
    overlays = dict.fromkeys(table.overlay for table in of_tables if table is not None)
    further = [handle for overlay in overlays for handle in overlay.handles]
    # Handles of mapped tables are no part of a vector: their uses are changed later, for hot rows.
    apart = frozenset(n for n, table in zip(numbers, of_tables, strict=True) if table is not None)
    packed = [*numbered, *further]
    vectors = editor.pack(f"{name}/variables", packed, apart=apart)
    vectors |= {(n,): packed[n] for n in sorted(apart)}
    layout = HandleLayout(schema, owners, numbers, of_tables, firsts, (*vectors,), apart)
    part = editor.place(name, _traced(build, argument, layout, tuple(texts)))
    given = editor.placeholder(argument, DType.INT64, (None,))
    said = [editor.constant(f"{name}/{key}", text, DType.STRING) for key, text in texts.items()]
    return given, editor.call(name, part, [given, *state.all, *vectors.values(), *said])


@lru_cache(maxsize=8)
def _traced(
    build: Callable[..., tuple[Tensor, ...]], argument: str, layout: HandleLayout, texts: tuple[str, ...]
) -> TracedFunction:
    """Return `build` traced as a function, memoised for the last 8 layouts: tracing takes a second.

    `argument` names the first input, int64 [n], `texts` the last ones, string [].
    """

    def part(given: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, own = inputs[: len(STATE_INPUTS)], inputs[len(STATE_INPUTS) :]
        packed, own = own[: len(layout.vectors)], own[len(layout.vectors) :]
        return build(given, State(*state), UpdateTarget(layout, packed), *own)

    shapes = [() if each[0] in layout.apart else (len(each),) for each in layout.vectors]
    vectors = {f"variables_{n}": (DType.RESOURCE, shape) for n, shape in enumerate(shapes)}
    resources = STATE_INPUTS | vectors
    kinds = {argument: (DType.INT64, (None,))} | resources | dict.fromkeys(texts, (DType.STRING, ()))
    return trace(part, kinds, as_written=True)


def _unless_refused(
    editor: GraphEditor, name: str, outputs: Sequence[str], dtypes: Sequence[DType]
) -> list[str]:
    """Add a check of the refusal, the last of `outputs`; return copies of the other outputs, by node name.

    The copies run after the check: a refusal that is not empty lets the call fail with it as the message.
    `dtypes` are the dtypes of the other outputs.
    """
    # The check is outside the function: inside, TensorFlow would put the function's name before the message.
    *results, refusal = outputs
    none = editor.constant(f"{name}/none", "", DType.STRING)
    accepted = editor.node(f"{name}/accepted", "Equal", [refusal, none], device=CPU, T=DType.STRING)
    reported = editor.node(f"{name}/refused", "Assert", [accepted, refusal], device=CPU, T=(DType.STRING,))
    return [
        editor.node(f"{name}/output_{n}", "Identity", [result], after=[reported], device=CPU, T=dtype)
        for n, (result, dtype) in enumerate(zip(results, dtypes, strict=True))
    ]


def _signature(inputs: Mapping[str, str], numbers: Mapping[str, str], texts: Mapping[str, str]) -> Proto:
    signature = message_class("SignatureDef")(method_name=PREDICT_METHOD)
    for infos, tensors, dtype in (
        (signature.inputs, inputs, DType.INT64),
        (signature.outputs, numbers, DType.INT64),
        (signature.outputs, texts, DType.STRING),
    ):
        for key, tensor in tensors.items():
            infos[key].CopyFrom(_vector_info(tensor, dtype))
    return signature


def _vector_info(tensor: str, dtype: DType) -> Proto:
    info = message_class("TensorInfo")(name=canonical(tensor), dtype=int(dtype))
    info.tensor_shape.dim.add(size=-1)
    return info


def add_init(
    editor: GraphEditor,
    state: StateNodes,
    overlaid: Iterable[OverlaidTable],
    asset: str,
    before: str | None,
    start: tuple[int, int],
) -> str:
    """Add an operation that initializes the state and overlays, after the node `before`; return its name.

    It also sets all variables named `.../warm` to false. `asset` is the node with the path of the asset,
    `<base>/<version>/assets/<file>`; `before` is the model's own initializer, None without one; `start` is
    position and step. `overlaid` are all tables with an overlay.
    """

    def model_base(path: Tensor) -> Tensor:
        """Return `<base>` of the asset's path; `.` if the path begins with `<version>`.

        If `<version>` is `.` or `..`, return the version's path with `/..` behind it.
        """
        version = tf.strings.regex_replace(path, "/+[^/]+/+[^/]+$", "")
        base = tf.strings.regex_replace(version, "/*[^/]+/*$", "")
        relative = tf.logical_not(tf.strings.regex_full_match(version, "(?s)/.*"))
        dots = tf.strings.regex_full_match(version, r"(?s)(.*/)?\.\.?")
        base = tf.where(tf.equal(base, "") & relative, ".", base)
        return tf.where(dots, tf.strings.join([version, "/.."]), base)

    # Servers feed an asset's path only while this op runs, so what follows from it goes into a variable. A
    # model whose directory was moved before it was loaded finds its own deltas.
    part = editor.function("model_base", model_base, {"path": (DType.STRING, ())})
    (base,) = editor.call("model_base", part, [asset])
    values = {
        state.sequence: (editor.constant("first_sequence", 0, DType.INT64), DType.INT64),
        state.position: (editor.constant("first_position", [*start, SETTLED], DType.INT64), DType.INT64),
        state.turn: (editor.constant("first_turn", [0, 0, 0], DType.INT64), DType.INT64),
        state.holder: (editor.constant("first_holder", [b""], DType.STRING), DType.STRING),
        state.quiet: (editor.constant("first_quiet", 0.0, DType.DOUBLE), DType.DOUBLE),
        state.unsettled: (editor.constant("first_unsettled", 0, DType.INT64), DType.INT64),
        state.since: (editor.constant("first_since", 0.0, DType.DOUBLE), DType.DOUBLE),
        state.base: (base, DType.STRING),
    }
    for overlay in dict.fromkeys(table.overlay for table in overlaid):
        values |= overlay.add_first_values(editor)
    cold = editor.constant("cold", False, DType.BOOL)
    own = [node.name for node in editor.graph_def.node if node.name.startswith(f"{editor.scope}/")]
    values |= {name: (cold, DType.BOOL) for name in own if name.endswith("/warm")}
    assigned = [
        editor.node(f"init_{n}", "AssignVariableOp", [handle, value], dtype=dtype)
        for n, (handle, (value, dtype)) in enumerate(values.items())
    ]
    return editor.node("init", "NoOp", after=[*assigned, *([before] if before else [])])


def digest(numbers: Tensor, state: UpdateState, target: UpdateTarget) -> tuple[Tensor, ...]:
    """Add the nodes of digests; return digests string [n], positions before and after int64 [n], a refusal.

    `numbers`, int64 [n], are numbers of chunks, counted over all digested variables. A digest is a decimal
    text. A position is -1 while an update is unfinished. The refusal, string [], is empty, or the message
    with which the caller has to let the call fail: a chunk does not exist.
    """
    variables = digested(target.schema)
    counts = [-(-row_count(variable) // CHUNK_ROWS) for variable in variables]
    first = np.cumsum([0, *counts], dtype=np.int64)
    exist = (numbers >= 0) & (numbers < int(first[-1]))
    refusal = tf.where(tf.reduce_all(exist), "", f"chunks are numbered 0 to {first[-1] - 1}")
    numbers = tf.where(exist, numbers, 0)
    before = _settled_position(state)
    branches = [_branch(variable, target) for variable in variables]
    branches = branches or [lambda _: tf.constant(0, tf.int64)]  # without chunks every call is refused

    def of_chunk(number: Tensor) -> Tensor:
        index = tf.searchsorted(first[1:], [number], side="right")[0]
        start = (number - tf.gather(first, index)) * CHUNK_ROWS
        return tf.switch_case(index, [partial(branch, start) for branch in branches])

    # Position, digests, position: a caller that gets two equal positions has the digests of that position.
    with tf.control_dependencies([before]):
        found = tf.map_fn(of_chunk, tf.identity(numbers), fn_output_signature=tf.int64, parallel_iterations=1)
    with tf.control_dependencies([found]):
        after = _settled_position(state)
    shape = tf.shape(numbers)
    return tf.strings.as_string(found), tf.fill(shape, before), tf.fill(shape, after), refusal


def _branch(variable: ServedVariable, target: UpdateTarget) -> Callable[[Tensor], Tensor]:
    """Return a function that adds nodes for the digest of a chunk of `variable`.

    It takes the chunk's first row, int64 [], and returns the digest, int64 []. The digest of strings is 0.
    """
    dtype = tf.as_dtype(int(variable.dtype))

    def of_rows(start: Tensor) -> Tensor:
        if variable.dtype is DType.STRING:
            return tf.constant(0, tf.int64)
        handle = target.handle(variable)
        stop = tf.minimum(start + CHUNK_ROWS, row_count(variable))
        if variable.kind is ChangeKind.DENSE:
            whole = tf.reshape(read(handle, variable.dtype, variable.shape), [row_count(variable), -1])
            rows = whole[start:stop]
        elif isinstance(handle, MappedRows):
            rows = handle.overlay.gather(handle.handle, handle.first, tf.range(start, stop))
        else:  # reading it whole would copy it: see `graph.variable_uses`
            ids = tf.range(start, stop)
            if isinstance(handle, JoinedRows):
                whole, ids = handle.handle, ids + handle.first
            else:
                whole = handle
            rows = tf.raw_ops.ResourceGather(resource=whole, indices=ids, dtype=dtype)
        return _digest_of(rows, variable.dtype)

    return of_rows


def _digest_of(rows: Tensor, dtype: DType) -> Tensor:
    """Add the nodes of `chunk_digest.chunk_digest` for `rows` of this dtype; return the digest, int64 []."""
    flat = tf.reshape(rows, [-1])
    if dtype is not DType.BOOL:
        flat = tf.reshape(tf.bitcast(flat, f"uint{8 * word_size(dtype.numpy)}"), [-1])
    # Sums and products are int64, which wraps alike: TensorFlow has them for uint64 only from 2.5 on.
    words = tf.bitcast(tf.cast(flat, tf.uint64), tf.int64)
    words += tf.range(1, tf.size(words, tf.int64) + 1) * _signed(GOLDEN)
    for shift, factor in ROUNDS:
        words = _shifted_xor(words, shift) * _signed(factor)
    return tf.reduce_sum(_shifted_xor(words, LAST_SHIFT))


def _signed(number: int) -> Tensor:
    """Return a constant, int64 [], with the same 64 bits as an unsigned number below 2**64."""
    return tf.constant(np.uint64(number).astype(np.int64))


def _shifted_xor(words: Tensor, shift: int) -> Tensor:
    unsigned = tf.bitcast(words, tf.uint64)  # a right shift of int64 keeps the sign
    shifted = tf.bitwise.right_shift(unsigned, tf.constant(shift, tf.uint64))
    return tf.bitwise.bitwise_xor(words, tf.bitcast(shifted, tf.int64))


def _settled_position(state: UpdateState) -> Tensor:
    """Add a read of the position and return it, int64 []; -1 while an update is unfinished."""
    vector = state.read("position")
    return tf.where(tf.equal(vector[2], SETTLED), vector[0], SETTLED)
