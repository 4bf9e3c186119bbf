"""A graph that takes deltas: signatures that update it, and snapshot isolation for those that it had.

`make_updatable` is a transformation of an InferenceGraph, done before the SavedModel is written. Nodes and names
that were there stay, signatures keep their names and inputs. Tables are read by rows afterwards (`gather`), every
signature is isolated from updates (`isolation`), and these signatures are added:

    incremental_update   up_to int64 [n] -> position, step, rows, deltas int64 [n], status string [n]
    incremental_status   probe int64 [n] -> position, step int64 [n], lineage string [n]

What the graph is told (lineage, log, schema) is baked in; where it lies it finds out from the path of its asset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from exporter.bundle.delta_reading import Expected
from exporter.bundle.delta_writing import Target
from exporter.bundle.gather import Use, read_rows_only, uses
from exporter.bundle.graft import CPU, Graft
from exporter.bundle.isolation import isolate, order_handles
from exporter.bundle.signature_tensors import SignatureTensor, canonical, rename, tensors_of
from exporter.bundle.update_function import UpdateRules, update
from exporter.bundle.update_state import SETTLED, STATE_INPUTS, State, StateNodes, Tensor, read
from exporter.delta.format import Kind, Schema, ServedVariable, log_name
from exporter.dtypes import DType
from exporter.errors import NotServable
from exporter.graph.inference_graph import Asset, GraphVariable, InferenceGraph
from exporter.protos import Proto, message_class

UPDATE_SIGNATURE = "incremental_update"
STATUS_SIGNATURE = "incremental_status"
ASSET_NAME = "incremental.json"
STAMPS = ("model_position", "model_step")

_PREDICT_METHOD = "tensorflow/serving/predict"
_LARGE_DENSE_BYTES = 16 << 20
_SCATTERED = {
    DType.FLOAT,
    DType.DOUBLE,
    DType.HALF,
    DType.BFLOAT16,
    DType.BOOL,
    DType.COMPLEX64,
    DType.COMPLEX128,
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.UINT8,
    DType.UINT16,
    DType.UINT32,
    DType.UINT64,
}
"""Types whose rows stock kernels scatter."""


class IsolationMode(StrEnum):
    """What a response may mix: nothing (`SNAPSHOT`), or rows of two positions, but no half rows (`ROW`)."""

    SNAPSHOT = "snapshot"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class IncrementalOptions:
    """What is baked into a base: its place in a log, and how it takes updates.

    `log` is the position that the log began with, `position` and `step` the base's own. Deltas of more rows than
    `snapshot_max_rows` are written in chunks, visibly. `stamp` adds position and step to every predict response;
    `finite` refuses deltas with NaN or infinity; `patience_seconds` bounds a reader's wait for an update.
    """

    lineage: str
    log: int
    position: int
    step: int
    isolation: IsolationMode = IsolationMode.SNAPSHOT
    snapshot_max_rows: int = 4_000_000
    stamp: bool = False
    finite: bool = False
    patience_seconds: float = 2.0


def make_updatable(graph: InferenceGraph, options: IncrementalOptions, scratch: Path) -> InferenceGraph:
    """The same graph, able to take deltas. Its new asset is written into the directory `scratch`.

    Variables must have the dtype that they are served in: casts come before this.

    Raises:
        NotServable: a signature has a reserved name or output, or cannot be isolated.
    """
    meta_graph = message_class("MetaGraphDef")()
    meta_graph.CopyFrom(graph.meta_graph)
    graph_def, signatures = meta_graph.graph_def, meta_graph.signature_def
    _refuse_reserved_names(signatures, options)
    read_rows_only(graph_def, _fetched(meta_graph))
    served = _served(graph.variables, uses(graph_def))
    schema = Schema.of(served.keys())
    graft = Graft.onto(graph_def, "incremental")
    state = StateNodes.add(graft)
    _isolate_signatures(
        graft, state, signatures, [node for nodes in served.values() for node in nodes], options
    )
    expected = Expected(options.lineage, schema, options.finite)
    largest = options.snapshot_max_rows if options.isolation is IsolationMode.SNAPSHOT else -1
    rules = UpdateRules(log_name(options.log), expected, largest)
    signatures[UPDATE_SIGNATURE].CopyFrom(_add_update(graft, state, served, schema, rules))
    signatures[STATUS_SIGNATURE].CopyFrom(_add_status(graft, state, options.lineage))
    asset = _add_asset(graft, scratch / ASSET_NAME, schema, options)
    init_op = _add_init(graft, state, asset.node, graph.init_op, options)
    return replace(
        graph,
        meta_graph=meta_graph,
        assets=(*graph.assets, asset),
        init_op=init_op,
        notes=(*graph.notes, *_notes(served)),
    )


def schema_of(graph: InferenceGraph) -> Schema:
    """The schema of the deltas that `make_updatable(graph, ...)` will take.

    Raises:
        NotServable: as `make_updatable`.
    """
    graph_def = message_class("GraphDef")()
    graph_def.CopyFrom(graph.meta_graph.graph_def)
    read_rows_only(graph_def, _fetched(graph.meta_graph))
    return Schema.of(_served(graph.variables, uses(graph_def)).keys())


def _refuse_reserved_names(signatures: Mapping[str, Proto], options: IncrementalOptions) -> None:
    for name, signature in signatures.items():
        if name.startswith("incremental_"):
            raise NotServable(
                f"the graph has a signature {name!r}: names that begin with incremental_ are taken by updates",
                hint="rename the signature",
            )
        taken = sorted(set(STAMPS) & set(signature.outputs))
        if options.stamp and signature.method_name == _PREDICT_METHOD and taken:
            raise NotServable(
                f"signature {name!r} has an output {taken[0]!r} of its own",
                hint="rename it, or leave out --stamp",
            )


def _fetched(meta_graph: Proto) -> set[str]:
    """Nodes whose outputs a signature takes or gives."""
    return {
        tensor.name.partition(":")[0]
        for signature in meta_graph.signature_def.values()
        for tensor in (*tensors_of(signature.inputs), *tensors_of(signature.outputs))
    }


def _served(
    variables: tuple[GraphVariable, ...], found: Mapping[str, Use]
) -> dict[ServedVariable, tuple[str, ...]]:
    """Each variable as deltas see it, with its handles: more than one if several are restored from one tensor."""
    by_name: dict[str, list[GraphVariable]] = {}
    for variable in variables:
        spec = f"[{variable.part.restore_spec}]" if variable.part and not variable.part.is_full else ""
        by_name.setdefault(variable.key + spec, []).append(variable)
    served = {}
    for name, twins in by_name.items():
        first = twins[0]
        if any((twin.dtype, twin.shape) != (first.dtype, first.shape) for twin in twins):
            raise NotServable(f"{name!r} is restored into variables of different shapes or dtypes")
        by_rows = (
            first.dtype in _SCATTERED and bool(first.shape) and all(found[t.node] is Use.ROWS for t in twins)
        )
        kind = Kind.TABLE if by_rows else Kind.DENSE
        served[ServedVariable(name, first.dtype, first.shape, kind)] = tuple(twin.node for twin in twins)
    return served


def _notes(served: Mapping[ServedVariable, tuple[str, ...]]) -> Iterator[str]:
    for variable in served:
        bytes_ = math.prod(variable.shape) * (variable.dtype.itemsize or 0)
        if variable.kind is Kind.DENSE and bytes_ >= _LARGE_DENSE_BYTES:
            yield (
                f"variable {variable.name!r} is read whole by the graph: "
                f"every delta that changes it holds all its {bytes_} bytes"
            )


def _isolate_signatures(
    graft: Graft,
    state: StateNodes,
    signatures: Mapping[str, Proto],
    handles: list[str],
    options: IncrementalOptions,
) -> None:
    snapshot = options.isolation is IsolationMode.SNAPSHOT
    isolation = order_handles(graft, state, handles, options.patience_seconds) if snapshot else None
    for name in sorted(signatures):
        signature = signatures[name]
        outputs = tensors_of(signature.outputs)
        stamped = options.stamp and signature.method_name == _PREDICT_METHOD
        position = None
        if isolation is not None:
            isolated = isolate(
                graft, isolation, name, tensors_of(signature.inputs), outputs, with_position=stamped
            )
            rename(signature.outputs, isolated.tensors)
            position = isolated.position
        if stamped:
            _add_stamps(graft, state, name, signature, position)


def _add_stamps(graft: Graft, state: StateNodes, name: str, signature: Proto, position: str | None) -> None:
    """Give a signature the outputs `model_position` and `model_step`, one of each for each row of a batch."""
    if position is None:
        position = graft.node(
            f"{name}/position", "ReadVariableOp", [state.position], device=CPU, dtype=DType.INT64
        )
    batched = _batched([*tensors_of(signature.inputs), *tensors_of(signature.outputs)])
    shape = batched.name
    if not batched.is_shape:
        shape = graft.node(f"{name}/batch", "Shape", [shape], T=batched.dtype, out_type=DType.INT64)

    def stamps(shape: Tensor, vector: Tensor) -> list[Tensor]:
        import tensorflow as tf

        rows = tf.concat([shape, [1]], 0)[:1]  # a scalar counts as one row
        return [tf.fill(rows, vector[0]), tf.fill(rows, vector[1])]

    part = graft.function(
        f"{name}_stamps", stamps, {"shape": (DType.INT64, (None,)), "position": (DType.INT64, (3,))}
    )
    for key, tensor in zip(STAMPS, graft.call(f"{name}/stamps", part, [shape, position]), strict=True):
        signature.outputs[key].CopyFrom(_vector_info(tensor, DType.INT64))


def _batched(tensors: Sequence[SignatureTensor]) -> SignatureTensor:
    """The tensor to take the batch's size from: the first of unknown length, else the first that has a length."""
    open_ = [t for t in tensors if t.is_shape or (t.shape and t.shape[0] is None)]
    vectors = [t for t in tensors if t.shape != ()]
    return next(iter([*open_, *vectors, *tensors]))


def _add_update(
    graft: Graft,
    state: StateNodes,
    served: Mapping[ServedVariable, tuple[str, ...]],
    schema: Schema,
    rules: UpdateRules,
) -> Proto:
    names = [variable.name for variable in schema.variables for _ in served[variable]]
    shapes = {variable.name: variable for variable in schema.variables}
    handles = [node for variable in schema.variables for node in served[variable]]

    def build(up_to: Tensor, *resources: Tensor) -> tuple[Tensor, ...]:
        by_name: dict[str, list[Tensor]] = {variable.name: [] for variable in schema.variables}
        for name, handle in zip(names, resources[len(STATE_INPUTS) :], strict=True):
            by_name[name].append(_with_value(handle, shapes[name]))
        return update(up_to, State(*resources[: len(STATE_INPUTS)]), Target(schema, by_name), rules)

    resources = STATE_INPUTS | {f"variable_{n}": (DType.RESOURCE, ()) for n in range(len(handles))}
    part = graft.function("update", build, {"up_to": (DType.INT64, (None,))} | resources)
    up_to = graft.placeholder("up_to", DType.INT64, (None,))
    position, step, rows, deltas, status = graft.call("update", part, [up_to, *state.names, *handles])
    numbers = {"position": position, "step": step, "rows": rows, "deltas": deltas}
    return _signature({"up_to": up_to}, numbers, {"status": status})


def _with_value(handle: Tensor, variable: ServedVariable) -> Tensor:
    """A function's argument that shape inference knows to be the handle of a variable."""
    import tensorflow as tf
    from tensorflow.python.ops import handle_data_util  # there is no public way to say it

    shape, dtype = tf.TensorShape(variable.shape), tf.as_dtype(int(variable.dtype))
    handle_data_util.set_handle_data(handle, handle_data_util.create_handle_data(shape, dtype))
    return handle


def _add_status(graft: Graft, state: StateNodes, lineage: str) -> Proto:
    def build(probe: Tensor, position: Tensor) -> list[Tensor]:
        import tensorflow as tf

        vector = read(position, DType.INT64, (3,))
        return [tf.fill(tf.shape(probe), value) for value in (vector[0], vector[1], tf.constant(lineage))]

    part = graft.function(
        "status", build, {"probe": (DType.INT64, (None,)), "position": (DType.RESOURCE, ())}
    )
    probe = graft.placeholder("probe", DType.INT64, (None,))
    position, step, owner = graft.call("status", part, [probe, state.position])
    return _signature({"probe": probe}, {"position": position, "step": step}, {"lineage": owner})


def _add_asset(graft: Graft, path: Path, schema: Schema, options: IncrementalOptions) -> Asset:
    """A file that says what the base takes, and whose path tells the graph where it lies."""
    document = {
        "format_version": 1,
        "lineage": options.lineage,
        "log": options.log,
        "position": options.position,
        "step": options.step,
        "isolation": options.isolation.value,
        "schema_digest": schema.digest,
        "schema": schema.to_json(),
    }
    path.write_text(json.dumps(document) + "\n")
    return Asset(graft.constant("asset", ASSET_NAME, DType.STRING), path)


def _add_init(
    graft: Graft, state: StateNodes, asset: str, before: str | None, options: IncrementalOptions
) -> str:
    def model_base(path: Tensor) -> Tensor:
        import tensorflow as tf

        version = tf.strings.regex_replace(path, "/+[^/]+/+[^/]+$", "")
        base = tf.strings.regex_replace(version, "/*[^/]+/*$", "")
        relative = tf.logical_not(tf.strings.regex_full_match(version, "(?s)/.*"))
        dots = tf.strings.regex_full_match(version, r"(?s)(.*/)?\.\.?")
        base = tf.where(tf.equal(base, "") & relative, ".", base)
        return tf.where(dots, tf.strings.join([version, "/.."]), base)

    part = graft.function("model_base", model_base, {"path": (DType.STRING, ())})
    (base,) = graft.call("model_base", part, [asset])
    start = [options.position, options.step, SETTLED]
    values = {
        state.sequence: (graft.constant("first_sequence", 0, DType.INT64), DType.INT64),
        state.position: (graft.constant("first_position", start, DType.INT64), DType.INT64),
        state.since: (graft.constant("first_since", 0.0, DType.DOUBLE), DType.DOUBLE),
        state.base: (base, DType.STRING),
    }
    cold = graft.constant("cold", False, DType.BOOL)
    own = [node.name for node in graft.graph_def.node if node.name.startswith(f"{graft.scope}/")]
    values |= {name: (cold, DType.BOOL) for name in own if name.endswith("/warm")}
    assigned = [
        graft.node(f"init_{n}", "AssignVariableOp", [handle, value], dtype=dtype)
        for n, (handle, (value, dtype)) in enumerate(values.items())
    ]
    return graft.node("init", "NoOp", after=[*assigned, *([before] if before else [])])


def _signature(inputs: Mapping[str, str], numbers: Mapping[str, str], texts: Mapping[str, str]) -> Proto:
    signature = message_class("SignatureDef")(method_name=_PREDICT_METHOD)
    for key, tensor in inputs.items():
        signature.inputs[key].CopyFrom(_vector_info(tensor, DType.INT64))
    for key, tensor in numbers.items():
        signature.outputs[key].CopyFrom(_vector_info(tensor, DType.INT64))
    for key, tensor in texts.items():
        signature.outputs[key].CopyFrom(_vector_info(tensor, DType.STRING))
    return signature


def _vector_info(tensor: str, dtype: DType) -> Proto:
    info = message_class("TensorInfo")(name=canonical(tensor), dtype=int(dtype))
    info.tensor_shape.dim.add(size=-1)
    return info
