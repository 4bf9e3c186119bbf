"""Warm-up requests: a server runs them on a new version before the version takes traffic.

`assets.extra/tf_serving_warmup_requests` is an uncompressed TFRecord of `PredictionLog`s, at most 1,000. A
record that fails keeps the version from serving, so every given line is checked against its signature.
Sources: tensorflow_serving/servables/tensorflow/saved_model_warmup.cc, tensorflow/core/lib/io/record_writer.h

Where no requests are given, they are generated from the signatures: one row of zeros, empty strings or empty
examples. A signature gets one only if it is certain not to fail:

- what depends on the request alone is run once, here, over the very request: it will give the same again;
- what depends on a variable's value must consist of operations that fail on no values (`_ANY_VALUE`,
  `_FIRST_VALUE`), so that trying them over zeros tells whether their shapes fit;
- every row that a table is asked for must be a row of the table.

Tables are not needed for that: the trial reads row 0 of tables that have one row. Signatures for which this
is not certain (vocabularies, loops, unknown operations) get no request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from exporter.errors import UsageError, os_error
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.graph.nodes import input_names
from exporter.graph.signatures import canonical, tensors_of
from exporter.graph.variable_uses import read_rows_only
from exporter.storage.files import read_regular
from exporter.storage.layout import WARMUP_FILE
from exporter.storage.local_paths import quoted
from exporter.wire import rest_json, tensor_proto
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class
from exporter.wire.tfrecord import encode_records

MAX_RECORDS = 1000
"""More than this and TF Serving refuses the version."""

DEFAULT_SIGNATURE = "serving_default"

_EXAMPLE_METHODS = {"tensorflow/serving/classify", "tensorflow/serving/regress"}


class WarmupRequest(Struct, frozen=True):
    """One line of a request file: its signature, the inputs by name, the record for the server."""

    line: int
    signature: str
    inputs: Mapping[str, NDArray[Any]]
    record: bytes


def read_requests(path: Path, meta_graph: Proto) -> tuple[WarmupRequest, ...]:
    """The requests in a file, one a line, for the signatures of `meta_graph`. Blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, holds no requests or too many; or a line is not a request that
            its signature takes: line number, input, what was expected.
    """
    requests = []
    for line, text in _lines(path):
        try:
            requests.append(parse_request(text, meta_graph.signature_def, line))
        except ValueError as exc:
            raise UsageError(
                f"{path}, line {line}: {exc}",
                hint="write one request a line, as TF Serving's REST takes it: "
                '{"signature_name": "serving_default", "instances": [...]}',
            ) from None
    if not requests:
        raise UsageError(f"{path} holds no requests", hint="write one JSON request a line")
    if len(requests) > MAX_RECORDS:
        raise UsageError(
            f"{path} holds {len(requests)} requests; a server takes at most {MAX_RECORDS}",
            hint=f"head -n {MAX_RECORDS} {quoted(path)}",
        )
    return tuple(requests)


def parse_request(text: str, signatures: Mapping[str, Proto], line: int = 1) -> WarmupRequest:
    """One request as TF Serving's REST takes it.

    Raises:
        ValueError: it is not JSON, not a request, or not one that its signature takes.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise ValueError(f"not JSON: {exc}") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, found {type(document).__name__}")
    name = document.get("signature_name", DEFAULT_SIGNATURE)
    if not isinstance(name, str) or name not in signatures:
        raise ValueError(f"no signature {name!r}; the model has {', '.join(sorted(signatures)) or 'none'}")
    signature = signatures[name]
    if takes_examples(signature):
        return examples_request(name, signature, document, line)
    if "examples" in document:
        raise ValueError(f"signature {name!r} is for predict and takes 'instances' or 'inputs'")
    return tensors_request(name, rest_json.predict_inputs(document, signature), line)


def takes_examples(signature: Proto) -> bool:
    """True for a signature of Classify or Regress."""
    return signature.method_name in _EXAMPLE_METHODS


def tensors_request(name: str, inputs: Mapping[str, NDArray[Any]], line: int = 1) -> WarmupRequest:
    """A Predict request of arrays for the signature `name`."""
    log = message_class("serving.PredictionLog")()
    request = log.predict_log.request
    request.model_spec.signature_name = name
    for key, array in inputs.items():
        tensor_proto.fill(request.inputs[key], array)
    return WarmupRequest(line, name, inputs, log.SerializeToString(deterministic=True))


def examples_request(
    name: str, signature: Proto, document: Mapping[str, Any], line: int = 1
) -> WarmupRequest:
    """A Classify or Regress request of the examples in a document.

    Raises:
        ValueError: it holds no examples.
    """
    method = signature.method_name.rpartition("/")[2]
    if "examples" not in document:
        raise ValueError(f"signature {name!r} is for {method}: expected the key 'examples'")
    log = message_class("serving.PredictionLog")()
    request = getattr(log, f"{method}_log").request
    request.model_spec.signature_name = name
    request.input.CopyFrom(rest_json.examples_input(document))
    examples = rest_json.serialized_examples(request.input)
    inputs = dict.fromkeys(signature.inputs, examples)
    return WarmupRequest(line, name, inputs, log.SerializeToString(deterministic=True))


def write_warmup(requests: Iterable[WarmupRequest], directory: Path) -> Path:
    """Write the requests' records under the SavedModel `directory`; the file.

    Raises:
        PublishError: it cannot be written.
    """
    path = directory / WARMUP_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_records(request.record for request in requests))
    except OSError as exc:
        raise os_error(exc, path) from exc
    return path


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_regular(path, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read warm-up requests from {path}", cause=str(exc), hint="name a text file with --warmup"
        ) from exc
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


_MAX_FILE_BYTES = 1 << 30
_MAX_TRIAL_BYTES = 256 << 20
"""More of dense variables than this, and a trial is not worth its memory."""

_ANY_VALUE = """
    Abs Add AddN AddV2 AvgPool BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd Cast Conv2D
    DepthwiseConv2dNative DivNoNan Einsum Elu Equal Erf Exp Expm1 FusedBatchNorm FusedBatchNormV2
    FusedBatchNormV3 Greater GreaterEqual Identity IdentityN L2Loss LeakyRelu Less LessEqual Log Log1p
    LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul MaxPool Maximum Minimum Mul Neg NotEqual OnesLike
    Pack RealDiv Relu Relu6 Rsqrt Select SelectV2 Selu Sigmoid Sign Snapshot Softmax Softplus Softsign
    Sqrt Square SquaredDifference StopGradient Sub Tanh Unpack ZerosLike
"""
"""Operations that fail on no values of their inputs, given that the shapes fit."""

_FIRST_VALUE = """
    All Any ArgMax ArgMin AsString BroadcastTo Cumsum EnsureShape ExpandDims Gather GatherNd GatherV2
    Max Mean Min MirrorPad Pad PlaceholderWithDefault Prod Reshape ReverseV2 SegmentMax SegmentMean
    SegmentSum Slice SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum SplitV Squeeze StridedSlice
    Sum Tile TopKV2 Transpose UnsortedSegmentSum
"""
"""Operations that fail on no values of their first input; the others say what to do with it."""

_SHAPE_OF = frozenset({"Rank", "Shape", "ShapeN", "Size"})
"""Operations whose result depends on no value."""

_OF_REQUEST = """
    Assert Bitcast BitwiseAnd BitwiseOr BitwiseXor BroadcastArgs Bucketize Ceil ConcatV2 Const
    DecodeBase64 DecodeCSV DecodeRaw Div DynamicPartition DynamicStitch Fill Floor FloorDiv FloorMod
    InvertPermutation ListDiff LogicalXor Mod NoOp OneHot ParallelDynamicStitch ParseExample
    ParseExampleV2 Placeholder Pow RaggedGather RaggedRange RaggedTensorToTensor Range RegexFullMatch
    RegexReplace Round ScatterNd SparseConcat SparseFillEmptyRows SparseReorder SparseReshape
    SparseSlice SparseToDense Split StaticRegexFullMatch StaticRegexReplace StringJoin StringLength
    StringLower StringSplit StringSplitV2 StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Substr TruncateDiv Unique UniqueV2
    UniqueWithCounts UnsortedSegmentMax UnsortedSegmentMin Where
"""
"""Further operations that give the same for the same inputs and touch nothing else."""

_CERTAIN_ANY, _CERTAIN_FIRST = frozenset(_ANY_VALUE.split()), frozenset(_FIRST_VALUE.split())
_CERTAIN = _CERTAIN_ANY | _CERTAIN_FIRST | _SHAPE_OF | frozenset(_OF_REQUEST.split())
_GATHERS = frozenset({"ResourceGather", "ResourceGatherNd"})


class _Uncertain(Exception):
    """No certainty that a request would not fail."""


def made_up_requests(graph: InferenceGraph) -> tuple[WarmupRequest, ...]:
    """One request for each signature that answers it, which is tried out by running it once."""
    graph_def = message_class("GraphDef")()
    graph_def.CopyFrom(graph.meta_graph.graph_def)
    signatures = graph.meta_graph.signature_def
    fetched = {t.name.partition(":")[0] for s in signatures.values() for t in _tensors(s)}
    try:
        graph_def = _without_calls(graph_def, fetched)
    except Exception:  # noqa: BLE001 - grappler's errors are of no one class; warm-up is a courtesy
        return ()
    read_rows_only(graph_def, fetched)
    nodes = {node.name: node for node in graph_def.node}
    found = []
    for name in sorted(signatures):
        request = _request(name, signatures[name])
        if request is not None and _is_certain(nodes, graph.variables, signatures[name], request):
            found.append(request)
    return tuple(found)


def _tensors(signature: Proto) -> Iterator[Any]:
    yield from tensors_of(signature.inputs)
    yield from tensors_of(signature.outputs)


def _request(name: str, signature: Proto) -> WarmupRequest | None:
    """The request, if the signature's inputs are plain tensors."""
    if takes_examples(signature):
        return examples_request(name, signature, {"examples": [{}]})
    inputs: dict[str, NDArray[Any]] = {}
    for key, info in signature.inputs.items():
        dtype = DType(info.dtype)
        if info.WhichOneof("encoding") != "name" or info.tensor_shape.unknown_rank:
            return None
        shape = [dim.size if dim.size >= 0 else 1 for dim in info.tensor_shape.dim]
        if dtype is DType.STRING:
            inputs[key] = np.full(shape, b"", object)
        elif dtype.itemsize is not None:
            inputs[key] = np.zeros(shape, dtype.numpy)
        else:
            return None
    return tensors_request(name, inputs) if inputs else None


def _without_calls(graph_def: Proto, fetched: Iterable[str]) -> Proto:
    """The graph with the functions that it calls written out."""
    if not graph_def.library.function:
        return graph_def
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer  # as convert_variables_to_constants does it

    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.ParseFromString(graph_def.SerializeToString())
    meta_graph.collection_def["train_op"].node_list.value.extend(sorted(fetched))  # what grappler keeps
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    config.graph_options.rewrite_options.optimizers.append("function")
    inlined = tf_optimizer.OptimizeGraph(config, meta_graph)
    return message_class("GraphDef").FromString(inlined.SerializeToString())


def _is_certain(
    nodes: Mapping[str, Proto], variables: Iterable[GraphVariable], signature: Proto, request: WarmupRequest
) -> bool:
    fetches = [tensor.name for tensor in tensors_of(signature.outputs)]
    feeds = {
        info.name: request.inputs[key] for key, info in signature.inputs.items() if key in request.inputs
    }
    try:
        order = _in_order(nodes, fetches, {name.partition(":")[0] for name in feeds})
        _check(order, {name.partition(":")[0] for name in feeds})
        _Trial.of(order, variables).run(fetches, feeds)
    except _Uncertain:
        return False
    return True


def _in_order(nodes: Mapping[str, Proto], fetches: Iterable[str], fed: set[str]) -> list[Proto]:
    """What computes `fetches`, inputs first."""
    done: dict[str, Proto] = {}
    under_way: set[str] = set()
    pending = [fetch.partition(":")[0] for fetch in fetches]
    while pending:
        name = pending[-1]
        if name in done or name not in nodes:
            pending.pop()
            if name not in done:
                raise _Uncertain(name)
            continue
        inputs = [] if name in fed else [_node(ref) for ref in nodes[name].input]
        missing = [ref for ref in inputs if ref not in done]
        if not missing:
            done[pending.pop()] = nodes[name]
        elif name in under_way:  # its inputs were all asked for: a loop
            raise _Uncertain(name)
        else:
            under_way.add(name)
            pending += missing
    return list(done.values())


def _node(reference: str) -> str:
    return reference.removeprefix("^").partition(":")[0]


def _check(order: Iterable[Proto], fed: set[str]) -> None:
    """Refuse what could fail on other values of variables, or does more than compute."""
    valued: set[str] = set()
    for node in order:
        if node.name in fed or node.op == "VarHandleOp":
            continue
        inputs = [_node(ref) for ref in input_names(node)]
        depends = [index for index, name in enumerate(inputs) if name in valued]
        if node.op == "ReadVariableOp" or (node.op in _GATHERS and not depends):
            valued.add(node.name)
        elif not depends:
            if node.op not in _CERTAIN:
                raise _Uncertain(node.op)
        elif node.op not in _SHAPE_OF:
            if not set(depends) <= set(_free_inputs(node, len(inputs))):
                raise _Uncertain(node.op)
            valued.add(node.name)


def _free_inputs(node: Proto, count: int) -> range:
    """The inputs that may have any value."""
    if node.op in _CERTAIN_ANY:
        return range(count)
    if node.op in _CERTAIN_FIRST:
        return range(1)
    if node.op == "ConcatV2":
        return range(count - 1)
    if node.op in {"Split", "Fill"}:
        return range(1, 2)
    if node.op in {"DynamicStitch", "ParallelDynamicStitch"}:
        return range(count // 2, count)
    return range(0)


class _Trial(Struct, frozen=True):
    """A graph whose tables have one row each, which is what all their lookups read."""

    graph_def: Proto
    shapes: Mapping[str, tuple[DType, list[int]]]
    lookups: Mapping[str, int]

    @classmethod
    def of(cls, order: Iterable[Proto], variables: Iterable[GraphVariable]) -> _Trial:
        """The trial of some nodes; `lookups` gives for each tensor of row numbers how many rows there are."""
        graph_def = message_class("GraphDef")()
        graph_def.node.extend(order)
        known = {variable.node: variable for variable in variables}
        users: dict[str, set[str]] = {}
        for node in graph_def.node:
            for reference in input_names(node):
                users.setdefault(_node(reference), set()).add(node.op)
        handles = {node.name for node in graph_def.node if node.op == "VarHandleOp"}
        if not handles <= known.keys():
            raise _Uncertain("a variable that is not restored")
        tables = {name for name in handles if users[name] <= _GATHERS}
        shapes: dict[str, tuple[DType, list[int]]] = {}
        lookups: dict[str, int] = {}
        for node in list(graph_def.node):
            if node.op == "VarHandleOp":
                shape = list(known[node.name].shape)
                shape[:1] = [1] if node.name in tables else shape[:1]
                shapes[node.name] = known[node.name].dtype, shape
                node.attr["dtype"].type = int(known[node.name].dtype)
                node.attr["shape"].shape.Clear()
                for size in shape:
                    node.attr["shape"].shape.dim.add(size=size)
                node.attr["shared_name"].s = node.name.encode()
            elif node.op in _GATHERS:
                table, rows = _node(node.input[0]), canonical(node.input[1])
                if node.op == "ResourceGatherNd" or table not in known:
                    raise _Uncertain(node.op)
                lookups[rows] = min(known[table].shape[0], lookups.get(rows, known[table].shape[0]))
                zeros = graph_def.node.add(name=f"trial/{node.name}", op="ZerosLike")
                zeros.input.append(node.input[1])
                zeros.attr["T"].CopyFrom(node.attr["Tindices"])
                node.input[1] = zeros.name
        return cls(graph_def, shapes, lookups)

    def run(self, fetches: list[str], feeds: Mapping[str, NDArray[Any]]) -> None:
        """Run it over variables that are zero.

        Raises:
            _Uncertain: it failed.
        """
        import tensorflow as tf

        if sum(math.prod(s) * (d.itemsize or 1) for d, s in self.shapes.values()) > _MAX_TRIAL_BYTES:
            raise _Uncertain("memory")
        native = tf.compat.v1.GraphDef.FromString(self.graph_def.SerializeToString())
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        try:
            with tf.Graph().as_default() as graph:
                tf.graph_util.import_graph_def(native, name="")
                assigned = [
                    tf.raw_ops.AssignVariableOp(
                        resource=graph.get_tensor_by_name(f"{name}:0"),
                        value=tf.zeros(shape, tf.as_dtype(int(dtype))),
                    )
                    for name, (dtype, shape) in self.shapes.items()
                ]
                with tf.compat.v1.Session(graph=graph, config=config) as session:
                    session.run(assigned)
                    _, rows = session.run((fetches, {name: name for name in self.lookups}), dict(feeds))
        except (tf.errors.OpError, ValueError, TypeError, KeyError) as exc:
            raise _Uncertain(str(exc)) from exc
        for name, limit in self.lookups.items():
            if rows[name].size and not (rows[name].min() >= 0 and rows[name].max() < limit):
                raise _Uncertain(f"{name} leaves its table")
