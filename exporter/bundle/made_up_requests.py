"""Make warm-up requests where none are given: a row of zeros, "" or an empty example per signature.

A record that fails keeps a version from serving, so a signature gets a request only if it is certain not to
fail, now and after every delta:

- nodes that depend on the request alone are run once, here, with this very request: they give the same again;
- nodes that depend on a variable's value must be operations that fail on no values (`_ANY_VALUE`,
  `_FIRST_VALUE`), so that a trial with zeros shows whether their shapes fit;
- every row number that a table is asked for must be a row of the table: a number that depends on the request
  alone is compared in the trial; one that depends on values must be bounded by its computation
  (`_Certainty`).

The tables themselves are not needed: the trial reads row 0 of tables that have one row. Signatures for which
this is not certain (vocabularies, loops, unknown operations) get no request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from exporter.bundle.warmup import WarmupRequest, examples_request, takes_examples, tensors_request
from exporter.graph.inference_graph import GraphVariable, InferenceGraph
from exporter.graph.nodes import attr, base_dtype, const_value, endpoint, input_names, through_identities
from exporter.graph.signatures import canonical, tensors_of
from exporter.graph.variable_uses import read_rows_only
from exporter.tables.parts import INDEX_ROWS, PARTS
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

_MAX_TRIAL_BYTES = 256 << 20  # more of dense variables than this, and a trial is not worth its memory

# Operations that fail on no values of their inputs, given that the shapes fit. Bitcast, as rows in 8 bits
# have it: any bits are a number. Shifts, as lookups by keys have them: the kernels limit how far
# (tensorflow/core/kernels/cwise_ops.h, `right_shift_op`). Integer divisions are not here: by zero they
# fail.
_ANY_VALUE = """
    Abs Add AddN AddV2 AvgPool BatchMatMul BatchMatMulV2 BatchMatMulV3 BiasAdd Bitcast BitwiseAnd
    BitwiseOr BitwiseXor Cast Conv2D DepthwiseConv2dNative DivNoNan Einsum Elu Equal Erf Exp Expm1
    FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Greater GreaterEqual Identity IdentityN L2Loss
    LeakyRelu LeftShift Less LessEqual Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul MaxPool
    Maximum Minimum Mul Neg NotEqual OnesLike Pack RealDiv Relu Relu6 RightShift Rsqrt Select SelectV2
    Selu Sigmoid Sign Snapshot Softmax Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub
    Tanh Unpack ZerosLike
"""

# Operations that fail on no values of their first input; the others say what to do with it.
_FIRST_VALUE = """
    All Any ArgMax ArgMin AsString BroadcastTo Cumsum EnsureShape ExpandDims Gather GatherNd GatherV2
    Max Mean Min MirrorPad Pad PlaceholderWithDefault Prod Reshape ReverseV2 SegmentMax SegmentMean
    SegmentSum Slice SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum SplitV Squeeze StridedSlice
    Sum Tile TopKV2 Transpose UnsortedSegmentSum
"""

_SHAPE_OF = frozenset({"Rank", "Shape", "ShapeN", "Size"})  # operations whose result depends on no value

# Operations whose shapes depend on values, but not of a single number: that is unique, at place 0.
_UNIQUE = frozenset({"Unique", "UniqueV2", "UniqueWithCounts"})

# Further operations that give the same for the same inputs and touch nothing else.
_OF_REQUEST = """
    Assert BroadcastArgs Bucketize Ceil ConcatV2 Const DecodeBase64 DecodeCSV DecodeRaw Div
    DynamicPartition DynamicStitch Fill Floor FloorDiv FloorMod InvertPermutation ListDiff LogicalXor Mod
    NoOp OneHot ParallelDynamicStitch ParseExample ParseExampleV2 Placeholder Pow RaggedGather RaggedRange
    RaggedTensorToTensor Range RegexFullMatch RegexReplace Round ScatterNd SparseConcat
    SparseFillEmptyRows SparseReorder SparseReshape SparseSlice SparseToDense Split StaticRegexFullMatch
    StaticRegexReplace StringJoin StringLength StringLower StringSplit StringSplitV2 StringStrip
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Substr
    TruncateDiv UnsortedSegmentMax UnsortedSegmentMin Where
"""

_CERTAIN_ANY, _CERTAIN_FIRST = frozenset(_ANY_VALUE.split()), frozenset(_FIRST_VALUE.split())
_CERTAIN = _CERTAIN_ANY | _CERTAIN_FIRST | _SHAPE_OF | _UNIQUE | frozenset(_OF_REQUEST.split())
_GATHERS = frozenset({"ResourceGather", "ResourceGatherNd"})
_READS = _GATHERS | {"ReadVariableOp", "StatefulPartitionedCall"}
# Operations whose first output has the numbers of their first input, and no others.
_SAME_NUMBERS = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze"}) | _UNIQUE


class _Uncertain(Exception):
    """It is not certain that a request would succeed."""


def made_up_requests(graph: InferenceGraph) -> tuple[WarmupRequest, ...]:
    """Return one request for each signature that is certain to answer it, ordered by the signatures' names.

    TensorFlow runs each of them once, on a graph whose variables are zeros. Empty if grappler cannot inline
    the functions that the graph calls.
    """
    graph_def = message_class("GraphDef")()
    graph_def.CopyFrom(graph.meta_graph.graph_def)
    signatures = graph.meta_graph.signature_def
    tensors = (
        tensor for s in signatures.values() for ends in (s.inputs, s.outputs) for tensor in tensors_of(ends)
    )
    fetched = {tensor.name.partition(":")[0] for tensor in tensors}
    try:
        graph_def = _without_calls(graph_def, fetched)
    except Exception:  # noqa: BLE001 - grappler's errors are of no one class; warm-up is a courtesy
        return ()
    read_rows_only(graph_def, fetched)
    nodes = {node.name: node for node in graph_def.node}
    found = []
    for name in sorted(signatures):
        request = _request(name, signatures[name])
        if request is not None and _is_certain(nodes, graph, signatures[name], request):
            found.append(request)
    return tuple(found)


def _request(name: str, signature: Proto) -> WarmupRequest | None:
    """Return a request of zeros and empty strings for a signature; unknown dimensions are 1.

    None if the signature takes no inputs, or inputs that are not plain tensors.
    """
    if takes_examples(signature):
        return examples_request(name, signature, {"examples": [{}]})
    inputs: dict[str, NDArray[Any]] = {}
    for key, info in signature.inputs.items():
        dtype = base_dtype(info.dtype)
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
    """Return the graph with the functions that it calls inlined by grappler; `fetched` are the nodes to keep.

    Without functions, the graph itself. With functions, `graph_def` is changed, too. Raises whatever grappler
    raises.
    """
    if not graph_def.library.function:
        return graph_def
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer  # as convert_variables_to_constants does it

    _keep_reads(graph_def)
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.ParseFromString(graph_def.SerializeToString())
    meta_graph.collection_def["train_op"].node_list.value.extend(sorted(fetched))  # what grappler keeps
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1  # or grappler leaves small graphs alone
    config.graph_options.rewrite_options.optimizers.append("function")
    inlined = tf_optimizer.OptimizeGraph(config, meta_graph)
    return message_class("GraphDef").FromString(inlined.SerializeToString())


def _keep_reads(graph_def: Proto) -> None:
    """Make reads of variables control outputs of the functions that contain them, in place."""
    for function in graph_def.library.function:
        # Grappler writes a function out only if every stateful node is a control output, or leads to one; a
        # gather that the graph stage made of a read is none (inline_function_utils.cc, `Can't guarantee
        # execution`).
        kept = {*function.control_ret.values()}
        for node in function.node_def:
            if node.op in _READS and node.name not in kept:
                function.signature.control_output.append(node.name)
                function.control_ret[node.name] = node.name


def _is_certain(
    nodes: Mapping[str, Proto], graph: InferenceGraph, signature: Proto, request: WarmupRequest
) -> bool:
    fetches = [tensor.name for tensor in tensors_of(signature.outputs)]
    feeds = {
        info.name: request.inputs[key] for key, info in signature.inputs.items() if key in request.inputs
    }
    fed = {endpoint(name).node for name in feeds}
    try:
        order = _in_order(nodes, fetches, fed)
        needs = _Certainty(order, fed, graph).needs()
        _Trial.of(order, graph.variables).run(fetches, feeds, needs)
    except _Uncertain:
        return False
    return True


def _in_order(nodes: Mapping[str, Proto], fetches: Iterable[str], fed: set[str]) -> list[Proto]:
    """Return the nodes that compute the tensors `fetches`, each after its inputs.

    Nodes in `fed` count as inputs of the graph. Raises _Uncertain for a loop or a missing node.
    """
    done: dict[str, Proto] = {}
    under_way: set[str] = set()
    # not by recursion: graphs are deeper than the stack
    pending = [fetch.partition(":")[0] for fetch in fetches]
    while pending:
        name = pending[-1]
        if name in done or name not in nodes:
            pending.pop()
            if name not in done:
                raise _Uncertain(name)
            continue
        inputs = [] if name in fed else [endpoint(ref).node for ref in nodes[name].input]
        missing = [ref for ref in inputs if ref not in done]
        if not missing:
            done[pending.pop()] = nodes[name]
        elif name in under_way:  # its inputs were all asked for: a loop
            raise _Uncertain(name)
        else:
            under_way.add(name)
            pending += missing
    return list(done.values())


class _Needs(Struct):
    """The checks left for a trial: `rows` are below their limits, `single` have at most one element."""

    rows: dict[str, int] = {}  # msgspec copies an empty default for each instance
    single: set[str] = set()

    def limit(self, tensor: str, rows: int) -> None:
        """Require that a tensor's row numbers are below `rows`; the lowest of several limits counts."""
        self.rows[tensor] = min(rows, self.rows.get(tensor, rows))


class _Certainty:
    """Decides whether values of variables could make a node fail; the nodes come inputs first.

    Row numbers that depend on values count as bounded if they are computed as lookups by keys do it
    (`exporter.tables.lookup`): by a mask, by a choice between bounded numbers, or because they are read from
    a table's own index, which holds only rows of that table.
    """

    def __init__(self, order: Iterable[Proto], fed: set[str], graph: InferenceGraph) -> None:
        self._order, self._fed = order, fed
        self._nodes = {node.name: node for node in order}
        self._variables = {variable.node: variable for variable in graph.variables}
        self._tables = {node: table for table in graph.dynamic_tables for node in table.nodes}
        self._valued: set[str] = set()
        self._steady: set[str] = set()
        self._needs = _Needs()

    def needs(self) -> _Needs:
        """Return the checks that are left for a trial.

        Raises _Uncertain if a value of a variable could make a node fail.
        """
        for node in self._order:
            if node.name not in self._fed and node.op != "VarHandleOp":
                self._meet(node)
        return self._needs

    def _meet(self, node: Proto) -> None:
        inputs = input_names(node)
        depends = [index for index, reference in enumerate(inputs) if self._is_valued(reference)]
        if node.op in _GATHERS:
            self._bound_rows(node)
        elif node.op == "ReadVariableOp":
            pass
        elif not depends or node.op in _SHAPE_OF:
            if node.op not in _CERTAIN:
                raise _Uncertain(node.op)
            return
        elif node.op in _UNIQUE and depends == [0]:
            self._needs.single.add(canonical(inputs[0]))
            self._steady |= {f"{node.name}:1", f"{node.name}:2"}
        elif not set(depends) <= set(_free_inputs(node, len(inputs))):
            raise _Uncertain(node.op)
        self._valued.add(node.name)

    def _is_valued(self, reference: str) -> bool:
        """True if the tensor depends on a variable's value; `reference` is the name of an input."""
        return endpoint(reference).node in self._valued and canonical(reference) not in self._steady

    def _bound_rows(self, gather: Proto) -> None:
        """Record the limits under which a gather's row numbers are rows of its table.

        Raises _Uncertain if it is not a plain gather, the table's shape is unknown, or no limits prove it.
        """
        handle = through_identities(self._nodes, endpoint(gather.input[0]).node)
        is_plain = gather.op == "ResourceGather" and not attr(gather, "batch_dims").i
        if not is_plain or not self._shape(handle):
            raise _Uncertain(gather.op)
        pending, seen = [(str(gather.input[1]), self._shape(handle)[0])], set()
        while pending:
            reference, rows = bound = pending.pop()
            if bound in seen:
                continue
            seen.add(bound)
            if not self._is_valued(reference):
                self._needs.limit(canonical(reference), rows)
            elif not self._is_of_index(reference, handle):
                pending += self._parts(reference, rows)

    def _shape(self, handle: str) -> tuple[int, ...]:
        return self._variables[handle].shape if handle in self._variables else ()

    def _is_of_index(self, reference: str, handle: str) -> bool:
        """True if the tensor is read from the index of the table with this variable `handle`.

        Its numbers are then rows of that table.
        """
        node, table = self._nodes[endpoint(reference).node], self._tables.get(handle)
        if node.op != "ResourceGather" or table is None:
            return False
        parts = dict(zip(PARTS, table.nodes, strict=True))
        source = through_identities(self._nodes, endpoint(node.input[0]).node)
        return source == parts[INDEX_ROWS] and handle in table.nodes[PARTS.index(INDEX_ROWS) + 1 :]

    def _parts(self, reference: str, rows: int) -> list[tuple[str, int]]:
        """Return the inputs, each with a limit, that together prove a tensor's numbers to be below `rows`.

        Raises _Uncertain unless the tensor forwards, selects or adds up its inputs.
        """
        node = self._nodes[endpoint(reference).node]
        inputs = input_names(node)
        if node.op in _SAME_NUMBERS:
            return [(inputs[0], rows)]
        if node.op in ("Select", "SelectV2"):
            return [(inputs[1], rows), (inputs[2], rows)]
        if node.op in ("Add", "AddV2"):
            for added, other in (inputs, inputs[::-1]):
                if (most := self._mask(added)) is not None:
                    return [(other, rows - most)]
        raise _Uncertain(f"{node.op} of values is a row number")

    def _mask(self, reference: str) -> int | None:
        """Return the largest number that a BitwiseAnd of a value with a constant lets through.

        None for other tensors, and if no input is a constant scalar integer of at least 0.
        """
        node = self._nodes[endpoint(reference).node]
        if node.op != "BitwiseAnd" or not self._is_valued(reference):
            return None
        for each in input_names(node):
            mask = const_value(self._nodes[endpoint(each).node])
            if mask is not None and mask.shape == () and mask.dtype.kind == "i" and mask >= 0:
                return int(mask)
        return None


def _free_inputs(node: Proto, count: int) -> range:
    """Return the positions of a node's inputs (`count` of them) for which it accepts any value.

    Empty for unknown operations.
    """
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
    """A graph whose tables have one row each, which all its lookups read."""

    graph_def: Proto
    shapes: Mapping[str, tuple[DType, list[int]]]

    @classmethod
    def of(cls, order: Iterable[Proto], variables: Iterable[GraphVariable]) -> _Trial:
        """Return the trial of some nodes, with the variables whose handles they use.

        The nodes themselves stay unchanged. Raises _Uncertain if a handle belongs to none of `variables`.
        """
        graph_def = message_class("GraphDef")()
        graph_def.node.extend(order)
        known = {variable.node: variable for variable in variables}
        nodes = {node.name: node for node in graph_def.node}
        users: dict[str, set[str]] = {}
        for node in graph_def.node:
            node.attr.pop("_class", None)  # colocated, perhaps with a node that another signature needs
            for reference in input_names(node) if node.op != "Identity" else ():
                source = through_identities(nodes, endpoint(reference).node)
                users.setdefault(source, set()).add(node.op)
        shapes: dict[str, tuple[DType, list[int]]] = {}
        for node in list(graph_def.node):
            if node.op == "VarHandleOp" and node.name in users:
                if node.name not in known:
                    raise _Uncertain("a variable that is not restored")
                shape = list(known[node.name].shape)
                shape[:1] = [1] if users[node.name] <= _GATHERS else shape[:1]
                shapes[node.name] = known[node.name].dtype, shape
                node.attr["dtype"].type = int(known[node.name].dtype)
                node.attr["shape"].shape.Clear()
                for size in shape:
                    node.attr["shape"].shape.dim.add(size=size)
                node.attr["shared_name"].s = node.name.encode()
            elif node.op in _GATHERS:
                zeros = graph_def.node.add(name=f"trial/{node.name}", op="ZerosLike")
                zeros.input.append(node.input[1])
                zeros.attr["T"].CopyFrom(node.attr["Tindices"])
                node.input[1] = zeros.name
        return cls(graph_def, shapes)

    def run(self, fetches: list[str], feeds: Mapping[str, NDArray[Any]], needs: _Needs) -> None:
        """Run the trial in TensorFlow with variables of zeros, and do the checks in `needs`.

        `fetches` are names of tensors, `feeds` arrays by the names of tensors. Raises _Uncertain if it fails,
        a row number exceeds its limit, or it would take too much memory.
        """
        import tensorflow as tf

        if sum(math.prod(s) * (d.itemsize or 1) for d, s in self.shapes.values()) > _MAX_TRIAL_BYTES:
            raise _Uncertain("memory")
        native = tf.compat.v1.GraphDef.FromString(self.graph_def.SerializeToString())
        # By default a session takes nearly all memory of a GPU.
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        asked = {name: name for name in (*needs.rows, *needs.single)}
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
                    # in a call of its own: within one, nothing orders it before the reads
                    session.run(assigned)
                    _, found = session.run((fetches, asked), dict(feeds))
        except (tf.errors.OpError, ValueError, TypeError, KeyError) as exc:
            raise _Uncertain(str(exc)) from exc
        for name, limit in needs.rows.items():
            if found[name].size and not (found[name].min() >= 0 and found[name].max() < limit):
                raise _Uncertain(f"{name} leaves its table")
        for name in needs.single:
            if found[name].size > 1:
                raise _Uncertain(f"the shape of what is unique in {name} depends on values")
