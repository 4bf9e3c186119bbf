"""Find operations that reach out of a model, and prepare a source graph for being run here.

*Reaching out* is reading or writing files, calling other processes, or running code. A graph is data until a
process runs it: then a server reads its own disk for any client that asks, and so does this process when it
compares answers. `harmless_ops.txt` lists the operations that were judged not to reach out, and `_EFFECTS`
those that do; any other operation of TensorFlow counts as one that may do anything.
`tests/graph/test_outside_ops.py` compares both with TensorFlow's own registry. Reading a file of the version
itself (an asset) does not count: see `exporter.graph.own_files`.

*Attributes.* Functions that an attribute names are judged like the graph. Whatever cannot be followed counts
as an operation that may do anything: functions in the attributes of functions, and tensors of resource
handles or serialised objects.

*Running a source graph* (`runnable_graph`). Control edges may lead from an output to operations that only
training can run: checks of a label that is not fed, reads of a queue that is not filled, updates of an
average. They would fail, block for ever, or change the answers, so these edges are removed. Everything else
stays, so that a comparison finds errors of cleaning; only operations that TensorFlow cannot import go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

from exporter.errors import AccessRefused, NotServable, few
from exporter.graph.deeprec_ops import foreign_attributes, is_deeprecs
from exporter.graph.functions import callees_first
from exporter.graph.inference_graph import Effect, Outside
from exporter.graph.nodes import (
    Body,
    GraphIndex,
    Pivots,
    all_before,
    attr,
    attr_dtype,
    attr_text,
    closure,
    data_inputs,
    drop_nodes,
    endpoint,
    input_names,
    put_nodes,
)
from exporter.graph.own_files import OwnFiles, unambiguous
from exporter.graph.servable import called_functions, foreign_ops, is_refused
from exporter.graph.source_graph import SourceGraph
from exporter.graph.stablehlo import is_plain_module
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.stock_ops import is_stock

_EFFECTS = {
    Effect.READS: r"""
        ReadFile | MatchingFiles | (Experimental)?MatchingFilesDataset | ImmutableConst
        | InitializeTableFromTextFile(V2)? | GenerateVocabRemapping | LoadAndRemapMatrix
        | Restore(Slice|V2)? | DTensorRestoreV2 | FixedUnigramCandidateSampler | Skipgram
        | (TextLine|TFRecord|FixedLengthRecord)Dataset(V2)? | (Experimental)?(CSV|LMDB|Sql)Dataset(V2)?
        | LoadDataset | ListSnapshotChunksDataset | Snapshot(Nested)?(Dataset)?Reader | SnapshotChunkDataset
        | (WholeFile|TextLine|FixedLengthRecord|TFRecord|LMDB|Identity)Reader(V2)?
        | Reader(Read\w*|Restore\w+) | RecordInput | DecodeProtoV2 | EncodeProto | ImportEvent""",
    Effect.WRITES: r"""
        WriteFile | Save(V2|Slices)? | SaveDataset(V2)? | MergeV2Checkpoints | DistributedSave
        | (Experimental)?DatasetToTFRecord | SnapshotDataset(V2)? | CacheDataset(V2)? | PrintV2 | DumpTensor
        | CalibrationStatisticsSaver | CreateSummary(File|Db)Writer | (Flush|Close)?SummaryWriter
        | Write\w*Summary | FileSystemSetConfiguration""",
    Effect.CALLS: r"""
        Rpc\w+ | DeleteRpcFutureResource | RemoteCall | (_Host|_)?(Send|Recv) | Collective\w+ | Nccl\w+
        | _Nccl\w+ | DataServiceDataset(V\d)? | RegisterDataset(V2)? | DebugIdentity(V\d)? | DebugNanCount
        | DebugNumericSummary | WorkerHeartbeat | \w*TPUEmbedding\w* | \w*DistributedTPU\w* | TPUExecute\w*
        | \w*TPUSystem\w* | (In|Out)feed(En|De)queue\w* | XlaHostCompute | Xla(Send|Recv)(To|From)Host
        | _Xla(Send|Recv)\w+ | _XlaHostComputeMlir | Xla(Send|Recv) | ConfigureAndInitializeGlobalTPU
        | _?(DTensor)?SetGlobalTPUArray | UpdateTaskIdAndGlobalCoreArray | TPUCompile | _TPUCompileMlir
        | _TPUReplicate | TPUReshardVariables""",
    Effect.RUNS: r"""
        (Eager)?PyFunc | PyFuncStateless | Abort | DatasetFromGraph | DeserializeIterator | ParseTensor
        | XlaCallModule | XlaCustomCall(V2)?""",
}

_PATTERNS = {effect: re.compile(pattern, re.VERBOSE) for effect, pattern in _EFFECTS.items()}

_HARMLESS = Path(__file__).with_name("harmless_ops.txt")
# Dtypes whose values name state of the process, or hold serialised objects.
_OPAQUE = frozenset({DType.RESOURCE, DType.VARIANT})

# Tests of an operation's attributes that are true if it does not reach out after all.
_UNLESS: dict[str, Callable[[Proto], bool]] = {
    "PrintV2": lambda node: not attr_text(node, "output_stream").startswith("file:"),
    "DecodeProtoV2": lambda node: _is_in_memory(attr_text(node, "descriptor_source")),
    "EncodeProto": lambda node: _is_in_memory(attr_text(node, "descriptor_source")),
    "FixedUnigramCandidateSampler": lambda node: not attr_text(node, "vocab_file"),
    "ParseTensor": lambda node: attr_dtype(node, "out_type") not in _OPAQUE,
    "XlaCallModule": lambda node: is_plain_module(attr(node, "module").s),
    **dict.fromkeys(
        ("DebugIdentity", "DebugIdentityV2", "DebugIdentityV3", "DebugNanCount", "DebugNumericSummary"),
        lambda node: not attr(node, "debug_urls").list.s,
    ),
}

_ONLY_IF: dict[str, Callable[[Proto], bool]] = {
    "DeserializeManySparse": lambda node: attr_dtype(node, "dtype") not in _OPAQUE,
    "DeserializeSparse": lambda node: attr_dtype(node, "dtype") not in _OPAQUE,
    "Empty": lambda node: bool(attr(node, "init").b),
}
"""Tests of a harmless operation's attributes that are false if it may do harm.

Sparse tensors come from texts, as in `ParseTensor`; and `Empty` without `init` returns old contents of
memory, which may be another model's or one of its clients'.
"""

# The inputs that name a file, for operations that read just the files that these inputs name.
_FILE_INPUTS = {
    "ReadFile": (0,),
    "InitializeTableFromTextFile": (1,),
    "InitializeTableFromTextFileV2": (1,),
    "TextLineDataset": (0,),
    "TFRecordDataset": (0,),
    "TFRecordDatasetV2": (0,),
    "FixedLengthRecordDataset": (0,),
    "FixedLengthRecordDatasetV2": (0,),
    "CSVDataset": (0,),
    "CSVDatasetV2": (0,),
    "ExperimentalCSVDataset": (0,),
    "GenerateVocabRemapping": (0, 1),
}

_PYTHON = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})
_SHOWN = 6


@cache
def effect_of(op: str) -> Effect | None:
    """Return the worst effect that an operation of this name can have; None if it is harmless.

    Attributes do not count. UNKNOWN for an operation in neither `_EFFECTS` nor `harmless_ops.txt`. Memoised.
    """
    # `_EFFECTS` has precedence over the list, so that an operation in both counts as reaching out.
    known = next((effect for effect, pattern in _PATTERNS.items() if pattern.fullmatch(op)), None)
    return known if known or op in _harmless() else Effect.UNKNOWN


@cache
def _harmless() -> frozenset[str]:
    lines = _HARMLESS.read_text().splitlines()
    return frozenset(op for line in lines if not line.startswith("#") for op in line.split())


def outside_ops(
    graph_def: Proto, files: Collection[str] = (), own: Collection[str] = (), fed: Collection[str] = ()
) -> list[Outside]:
    """Return every operation of a served graph that reaches out, to files, processes or code, each once.

    Reads of the version's own files are left out: `files` are nodes with the path of such a file. The nodes
    `own` are not judged; clients send values for the nodes `fed`. NotServable if a function calls itself or
    nests too deeply; GraphError if the graph lacks a called function, a type number is unknown, or two nodes
    of a function have one name.
    """
    return _Judge(graph_def, OwnFiles(graph_def, files, fed)).found(own)


def running_outside(
    graph_def: Proto, names: Collection[str], is_stateful: Callable[[str], bool]
) -> list[Outside]:
    """Return the operations that reach out, beyond reading, if this process imports a graph and runs `names`.

    `names` are all nodes that would run. First come operations that certainly run. `is_stateful` returns
    True for the name of an operation with state; TensorFlow may run others while it imports the graph.

    Raises:
        NotServable: a function calls itself, or functions nest too deeply.
        GraphError: the graph lacks a called function, or a type number is unknown.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    called = {*callees_first((node for node in graph_def.node if node.name in names), library)}

    def runs(each: Outside) -> bool:
        return each.function in called if each.function else each.node in names

    bodies = [("", graph_def.node), *((name, library[name].node_def) for name in sorted(library))]
    found = [each for name, nodes in bodies for each in _judged(nodes, name, library)]
    found.sort(key=lambda each: not runs(each))  # errors name the first ones: those certain to run
    # To know shapes, TensorFlow computes constants from operations without state while it imports a graph.
    found = [each for each in found if runs(each) or not is_stateful(each.op)]
    return [each for each in found if each.effect is not Effect.READS]


def keep_before(graph_def: Proto, names: Collection[str]) -> None:
    """Reduce a graph, in place, to the nodes `names`, all nodes that run before, and functions they call.

    Colocation is removed from the nodes. NotServable if such a function calls itself or nests too deeply,
    GraphError if the graph lacks it.
    """
    nodes = {node.name: node for node in graph_def.node}
    kept = all_before(nodes, [endpoint(name) for name in names])
    put_nodes(graph_def.node, [node for name, node in nodes.items() if name in kept])
    for node in graph_def.node:
        node.attr.pop("_class", None)  # colocation may name nodes that are dropped
    library = {function.signature.name: function for function in graph_def.library.function}
    called = callees_first(graph_def.node, library)
    put_nodes(graph_def.library.function, [library[name] for name in called])


def require_inside(found: Iterable[Outside], *, is_allowed: bool) -> None:
    """Raise an error if operations reach out of the version and that is not allowed, or if one calls Python.

    Raises:
        NotServable: an initialiser calls Python, whatever is allowed.
        AccessRefused: the graph reaches out, and `is_allowed` is false.
    """
    found = [*found]
    python = [each for each in found if each.op in _PYTHON]
    if python:
        raise NotServable(
            f"an initialiser of the tables needs {python[0].op} {python[0].node!r}, which calls Python",
            cause="a server does not have it",
        )
    if found and not is_allowed:
        raise AccessRefused(
            f"a served graph may not reach out of its version: {few([*map(str, found)], _SHOWN, '; ')}",
            cause="a server would do that for any client that sends a request, or when it loads the version",
            hint="make the file an asset (a constant path in the graph), or choose other outputs; "
            "if you trust the graph: --allow file-ops",
        )


def require_harmless(found: Iterable[Outside], what: str, *, is_allowed: bool) -> None:
    """Raise AccessRefused, naming the operations, if some have effects beyond reading, unless `is_allowed`.

    `what` names the step that would run the graph here.
    """
    found = [each for each in found if each.effect is not Effect.READS]
    if found and not is_allowed:
        raise AccessRefused(
            f"{what} would run what reaches out of this process: {few([*map(str, found)], _SHOWN, '; ')}",
            hint=f"if you trust the graph: --allow code; else leave {what} out",
        )


def _judged(nodes: Iterable[Proto], function: str, library: Collection[str]) -> Iterator[Outside]:
    """Yield the operations with an effect among the nodes of a function ("": the graph), in their order.

    `library` has the names of the graph's functions. GraphError for an unknown type number.
    """
    for node in nodes:
        effect = effect_in(node, library)
        if effect is not None:
            yield Outside(node.name, node.op, effect, function)


def effect_in(node: Proto, library: Collection[str]) -> Effect | None:
    """Return the effect of a node with its attributes; None if it is harmless.

    A call and a foreign operation count as harmless, unless an attribute cannot be followed: then the effect
    is UNKNOWN. `library` has the names of the graph's functions. GraphError for an unknown type number.
    """
    effect = effect_of(node.op)
    if effect is Effect.UNKNOWN and (node.op in library or not is_stock(node.op)):
        effect = None  # a function's body is judged itself, and `clean` judges foreign operations
    if node.op in _UNLESS and _is_fixed(node) and _UNLESS[node.op](node):
        effect = None
    if node.op in _ONLY_IF and not (_is_fixed(node) and _ONLY_IF[node.op](node)):
        effect = Effect.UNKNOWN
    return effect or (Effect.UNKNOWN if _is_opaque(node, library) else None)


def _is_fixed(node: Proto) -> bool:
    """True unless a call of the node's function supplies one of its attributes, which can be anything."""
    return not any(value.placeholder for value in node.attr.values())


def _is_opaque(node: Proto, library: Collection[str]) -> bool:
    """True if an attribute holds a handle, a serialised object, or a function that cannot be followed.

    `library` has the names of the graph's functions.
    """
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "tensor" and value.tensor.dtype in _OPAQUE:
            return True
        if kind == "func" and not _can_be_followed(value.func, library):
            return True
        if kind == "list" and (
            any(tensor.dtype in _OPAQUE for tensor in value.list.tensor)
            or not all(_can_be_followed(function, library) for function in value.list.func)
        ):
            return True
    return False


def _can_be_followed(function: Proto, library: Collection[str]) -> bool:
    """True for a function of the graph without functions or tensors as attributes, and for an empty name."""
    is_known = not function.name or function.name in library
    return is_known and not any(
        value.WhichOneof("value") in ("func", "tensor") or value.list.func or value.list.tensor
        for value in function.attr.values()
    )


def _is_in_memory(source: str) -> bool:
    """True if `source`, a proto's `descriptor_source`, names no file: it is linked in, or in the graph.

    Source: core/util/proto/descriptors.cc.
    """
    return source in ("", "local://") or source.startswith("bytes://")


class _Judge:
    """Finds operations that reach out in a graph and its functions.

    A read is judged where the name of its file comes from, which may be the caller of its function.
    """

    def __init__(self, graph_def: Proto, own: OwnFiles) -> None:
        self._nodes = graph_def.node
        self._library = {function.signature.name: function for function in graph_def.library.function}
        self._own = own
        self._judged: dict[str, tuple[set[int], list[Outside]]] = {}

    def found(self, own: Collection[str]) -> list[Outside]:
        """Return the operations that reach out, each once; nodes `own` of the graph are left out.

        NotServable if a function calls itself or nests too deeply, GraphError if the graph lacks a called
        function, a type number is unknown, or two nodes of a function have one name.
        """
        inside: list[Outside] = []
        for name in callees_first(self._nodes, self._library):  # deep calls without deep recursion
            inside += self._function(name)[1]
        found = self._body(Body(self._nodes))[1]
        return [*dict.fromkeys([*(each for each in found if each.function or each.node not in own), *inside])]

    def _function(self, name: str) -> tuple[set[int], list[Outside]]:
        """Return the result of `_body` for the function with this name; memoised.

        GraphError if two of its nodes have the same name, or one has an unknown type number.
        """
        if name not in self._judged:
            # Functions of one `api_implements` may call each other: until this one is judged, it is empty.
            self._judged[name] = (set(), [])
            self._judged[name] = self._body(unambiguous(self._library[name]))
        return self._judged[name]

    def _body(self, scope: Body) -> tuple[set[int], list[Outside]]:
        """Return (positions of the body's arguments that must name own files, operations that reach out).

        The operations reach out whatever the arguments are: operations of the body, and of functions that it
        calls with names of other files. The graph itself has no arguments. GraphError if two nodes of a
        called function have the same name, or for an unknown type number.
        """
        found: list[Outside] = []
        arguments: set[int] = set()
        for each in _judged(scope.by_name.values(), scope.name, self._library):
            inputs = input_names(node := scope.by_name[each.node])
            if self._own.is_memory_cache(node, scope):
                continue
            places = _FILE_INPUTS.get(each.op, ())
            is_named = places and max(places) < len(inputs) and each.effect is Effect.READS
            needed = self._own.needs(scope, [inputs[place] for place in places]) if is_named else None
            arguments |= needed or set()
            found += [each] if needed is None else []
        for node in scope.by_name.values():
            for callee in sorted(called_functions(node) & self._library.keys()):
                needed = self._needed(node, callee, scope)
                arguments |= needed or set()
                found += self._reads(node, callee, scope) if needed is None else []
        return arguments, found

    def _needed(self, node: Proto, callee: str, scope: Body) -> set[int] | None:
        """Return the positions of the arguments of `scope` that a call needs to be own files.

        None if the call may read another file whatever they are. GraphError if two nodes of the function have
        the same name.
        """
        places = {place for name in self._alike(callee) for place in self._function(name)[0]}
        return self._own.needs_of_call(node, callee, places, scope) if places else set()

    def _alike(self, name: str) -> list[str]:
        """Return the name of a function, then of others that may replace it: of the same `api_implements`."""
        interface = attr(self._library[name], "api_implements").s
        others = self._library.items() if interface else ()
        return [name, *(n for n, f in others if attr(f, "api_implements").s == interface and n != name)]

    def _reads(self, node: Proto, callee: str, scope: Body) -> list[Outside]:
        """Return the operations that read files in a function called with another file's name.

        Without any, the call itself, as a read.
        """
        bodies = ((name, self._library[name].node_def) for name in self._alike(callee))
        judged = (each for name, body in bodies for each in _judged(body, name, self._library))
        readers = [each for each in judged if each.op in _FILE_INPUTS]
        return readers or [Outside(node.name, node.op, Effect.READS, scope.name)]


def runnable_graph(source: SourceGraph) -> Proto:
    """Return a copy of the source's GraphDef to run here, with control edges only from nodes that can be run.

    Nodes that the init op waits for keep all their control edges. Operations that TensorFlow cannot import,
    and all nodes that read from them, are left out. GraphError if two nodes have the same name, or one has
    none, or if conditionals are nested more than 64 deep.
    """
    index = GraphIndex.of(source.meta_graph)
    # Nodes behind a fed tensor, too: TensorFlow's optimizer turns a control edge from `Identity(fed)` into
    # one from the node that computes `fed`, which then runs although it is fed.
    unfit = _behind(
        index, [n.name for n in index.nodes.values() if is_refused(n.op) or n.op == "Placeholder"]
    )
    pivots = Pivots(index.nodes)
    initialising = all_before(index.nodes, [endpoint(source.init_op)] if source.init_op else [])
    graph_def = deepcopy(source.meta_graph.graph_def)
    _drop_foreign(graph_def, index)
    for node in graph_def.node:
        kept = [text for text in node.input if not (text.startswith("^") and text[1:] in unfit)]
        # If such an edge bound the node to its branch or iteration, it gets another edge from there.
        if len(kept) < len(node.input) and node.name not in initialising:
            node.input[:] = (
                dict.fromkeys([*kept, *pivots.needed_inputs(node)]) if not data_inputs(node) else kept
            )
    return graph_def


def _drop_foreign(graph_def: Proto, index: GraphIndex) -> None:
    """Remove operations that stock TensorFlow cannot import, and their readers, from `graph_def`, in place.

    Readers of readers are removed, too. `index` is of an equal graph.
    """
    foreign = foreign_ops(index.nodes.values(), index.functions)
    has_attributes = is_deeprecs(index.nodes.values())
    found = [
        name
        for name, node in index.nodes.items()
        if node.op in foreign or (has_attributes and foreign_attributes(node))
    ]
    if found:
        drop_nodes(graph_def.node, _behind(index, found))


def _behind(index: GraphIndex, start: list[str]) -> set[str]:
    """Return the names of the nodes `start`, and of all nodes that read from them, directly or not."""
    return {*closure(start, lambda name: (reader for reader, _ in index.consumers[name]))}
