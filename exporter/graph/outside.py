"""Find operations that reach out of a model, and prepare a source graph for being run here.

*Reaching out* is reading or writing files, calling other processes, or running code. A graph is data until a
process runs it: then a server reads its own disk for any client that asks, and so does this process where it
compares answers. One table says what each operation does, from its kernel in tensorflow/core;
`tests/graph/test_outside_ops.py` compares the table with TensorFlow's own registry. Reading a file of the
version itself (an asset) does not count: the loader gives its path.

*Running a source graph* (`runnable_graph`). Control edges may lead from an output to operations that only
training can run: checks of a label that is not fed, reads of a queue that is not filled, updates of an
average. They would fail, block for ever, or change the answers, so these edges are removed. Everything else
stays, so that a comparison finds what cleaning did wrong; except for operations that stock TensorFlow lacks,
and nodes that read from them, which cannot be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache

from msgspec import Struct

from exporter.errors import AccessRefused, NotServable
from exporter.graph.deeprec_ops import foreign_attributes, is_deeprecs
from exporter.graph.functions import reachable
from exporter.graph.inference_graph import Effect, Outside
from exporter.graph.nodes import (
    CALLS,
    GraphIndex,
    Pivots,
    all_before,
    attr,
    attr_text,
    closure,
    const_texts,
    data_inputs,
    endpoint,
    put_nodes,
)
from exporter.graph.servable import called_functions, foreign_ops, is_refused
from exporter.graph.source_graph import SourceGraph
from exporter.wire.protos import Proto

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
        | CalibrationStatisticsSaver | CreateSummary(File|Db)Writer | SummaryWriter | Write\w*Summary
        | FileSystemSetConfiguration""",
    Effect.CALLS: r"""
        Rpc\w+ | DeleteRpcFutureResource | RemoteCall | (_Host|_)?(Send|Recv) | Collective\w+ | Nccl\w+
        | _Nccl\w+ | DataServiceDataset(V\d)? | RegisterDataset(V2)? | DebugIdentity(V\d)? | DebugNanCount
        | DebugNumericSummary | WorkerHeartbeat | \w*TPUEmbedding\w* | \w*DistributedTPU\w* | TPUExecute\w*
        | \w*TPUSystem\w* | (In|Out)feed(En|De)queue\w* | XlaHostCompute | Xla(Send|Recv)(To|From)Host
        | _Xla(Send|Recv)\w+ | _XlaHostComputeMlir | Xla(Send|Recv) | ConfigureAndInitializeGlobalTPU
        | _?(DTensor)?SetGlobalTPUArray | UpdateTaskIdAndGlobalCoreArray | TPUCompile | _TPUCompileMlir
        | _TPUReplicate | TPUReshardVariables""",
    Effect.RUNS: r"(Eager)?PyFunc | PyFuncStateless | Abort",
}

_PATTERNS = {effect: re.compile(pattern, re.VERBOSE) for effect, pattern in _EFFECTS.items()}

_HARMLESS: dict[str, Callable[[Proto], bool]] = {
    "PrintV2": lambda node: not attr_text(node, "output_stream").startswith("file:"),
    "DecodeProtoV2": lambda node: _is_in_memory(attr_text(node, "descriptor_source")),
    "EncodeProto": lambda node: _is_in_memory(attr_text(node, "descriptor_source")),
    "FixedUnigramCandidateSampler": lambda node: not attr_text(node, "vocab_file"),
    "DebugIdentity": lambda node: _has_no_urls(node),
    "DebugIdentityV2": lambda node: _has_no_urls(node),
    "DebugIdentityV3": lambda node: _has_no_urls(node),
    "DebugNanCount": lambda node: _has_no_urls(node),
    "DebugNumericSummary": lambda node: _has_no_urls(node),
}
"""Tests of an operation's attributes that are true if it does not reach out after all."""

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
"""The inputs that name a file, for operations that read just the files that these inputs name."""

_HANDS_ON = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "ReadVariableOp"})
_JOINS = frozenset({"Pack", "ConcatV2"})
_PYTHON = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})
_SHOWN = 6
_MAX_STEPS = 64


@cache
def effect_of(op: str) -> Effect | None:
    """The effect that operations of this kind may have, whatever their attributes say."""
    return next((effect for effect, pattern in _PATTERNS.items() if pattern.fullmatch(op)), None)


def outside_ops(graph_def: Proto, files: Collection[str] = (), own: Collection[str] = ()) -> list[Outside]:
    """Every operation of a served graph that reaches out, except reads of the version's own files.

    `files` are nodes that hold the path of such a file; the nodes `own` are not judged.
    """
    return _Judge(graph_def, files).found(own)


def running_outside(graph_def: Proto, names: Iterable[str]) -> list[Outside]:
    """Operations of these nodes, and of functions that they call, that reach out and do more than read."""
    library = {function.signature.name: function for function in graph_def.library.function}
    wanted = {*names}
    nodes = [node for node in graph_def.node if node.name in wanted]
    found = [*_judged(nodes, "")]
    for name in sorted(reachable(nodes, library)):
        found += _judged(library[name].node_def, name)
    return [each for each in found if each.effect is not Effect.READS]


def require_inside(found: Iterable[Outside], *, is_allowed: bool) -> None:
    """Refuse to serve a graph that reaches out.

    Raises:
        NotServable: it calls Python, which no server has.
        AccessRefused: it reaches out, and that was not allowed; the error names the operations.
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
            f"a served graph may not reach out of its version: {_listed(found)}",
            cause="a server would do that for any client that sends a request, or when it loads the version",
            hint="make the file an asset (a constant path in the graph), or choose other outputs; "
            "if it is meant: --allow-file-ops",
        )


def require_harmless(found: Iterable[Outside], what: str, *, is_allowed: bool) -> None:
    """Refuse to run a graph here that writes, calls out or runs code; `what` would run it.

    Raises:
        AccessRefused: it does, and that was not allowed; the error names the operations.
    """
    found = [each for each in found if each.effect is not Effect.READS]
    if found and not is_allowed:
        raise AccessRefused(
            f"{what} would run what reaches out of this process: {_listed(found)}",
            hint=f"if you trust the graph: --allow-code; else leave {what} out",
        )


def _listed(found: list[Outside]) -> str:
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more


def _judged(nodes: Iterable[Proto], function: str) -> Iterator[Outside]:
    for node in nodes:
        effect = effect_of(node.op)
        if effect is not None and not _HARMLESS.get(node.op, lambda _: False)(node):
            yield Outside(node.name, node.op, effect, function)


def _is_in_memory(source: str) -> bool:
    """True if a proto's descriptor is linked in, or in the graph (core/util/proto/descriptors.cc)."""
    return source in ("", "local://") or source.startswith("bytes://")


def _has_no_urls(node: Proto) -> bool:
    return not attr(node, "debug_urls").list.s


class _Scope(Struct, frozen=True):
    """A graph (with the name "") or a function: its nodes, and the arguments found to name files."""

    function: str
    nodes: Mapping[str, Proto]
    arguments: set[str]


class _Judge:
    """Judges a graph with its functions; an argument that names a file is judged at the function's calls."""

    def __init__(self, graph_def: Proto, files: Collection[str]) -> None:
        self._graph = {node.name: node for node in graph_def.node}
        self._library = {function.signature.name: function for function in graph_def.library.function}
        self._files = {*files}
        for node in self._graph.values():  # a variable that holds an asset's path
            if node.op == "AssignVariableOp" and _node_of(node.input[1]) in self._files:
                self._files.add(_node_of(node.input[0]))
        self._judged: dict[str, tuple[set[int], list[Outside]]] = {}

    def found(self, own: Collection[str]) -> list[Outside]:
        """The operations that reach out, each once."""
        found = [each for each in self._body(_Scope("", self._graph, set())) if each.node not in own]
        for name in sorted(reachable(self._graph.values(), self._library)):
            found += self._function(name)[1]
        return [*dict.fromkeys(found)]

    def _function(self, name: str) -> tuple[set[int], list[Outside]]:
        """The arguments of a function that name files, and its operations that reach out in other ways."""
        if name not in self._judged:
            self._judged[name] = (set(), [])  # of a function that calls itself
            function = self._library[name]
            scope = _Scope(name, {node.name: node for node in function.node_def}, set())
            found = self._body(scope)
            places = [argument.name for argument in function.signature.input_arg]
            self._judged[name] = ({places.index(a) for a in scope.arguments if a in places}, found)
        return self._judged[name]

    def _body(self, scope: _Scope) -> list[Outside]:
        found = []
        for each in _judged(scope.nodes.values(), scope.function):
            node = scope.nodes[each.node]
            if _is_memory_cache(node, scope.nodes):
                continue
            places = _FILE_INPUTS.get(each.op)
            if places is None or not self._are_files(node, places, scope):
                found.append(each)
        for node in scope.nodes.values():
            for callee in sorted(called_functions(node) & self._library.keys()):
                found += self._call(node, callee, scope)
        return found

    def _call(self, node: Proto, callee: str, scope: _Scope) -> list[Outside]:
        """The reads in a function to which this call passes the name of a file outside of the version."""
        named, _ = self._function(callee)
        is_plain = node.op in CALLS or node.op == callee
        places = [place + CALLS.get(node.op, 0) for place in sorted(named)]
        if not places or (is_plain and self._are_files(node, places, scope)):
            return []
        body = self._library[callee].node_def
        readers = [each for each in _judged(body, callee) if each.op in _FILE_INPUTS]
        return readers or [Outside(node.name, node.op, Effect.READS, scope.function)]

    def _are_files(self, node: Proto, places: Iterable[int], scope: _Scope) -> bool:
        """True if these inputs are paths of the version's own files, or arguments; the scope notes those."""
        inputs = [text for text in node.input if not text.startswith("^")]
        taken: set[str] = set()
        if all(place < len(inputs) and self._is_file(inputs[place], scope, taken) for place in places):
            scope.arguments.update(taken)
            return True
        return False

    def _is_file(self, text: str, scope: _Scope, taken: set[str], steps: int = 0) -> bool:
        name = _node_of(text)
        if scope.function and ":" not in text:
            taken.add(name)
            return True
        node = scope.nodes.get(name)
        if node is None or steps > _MAX_STEPS:
            return False
        if not scope.function and name in self._files:
            return True
        inputs = [source for source in node.input if not source.startswith("^")]
        if node.op in _JOINS:
            sources = inputs[:-1] if node.op == "ConcatV2" else inputs
        else:
            sources = inputs[:1] if node.op in _HANDS_ON else []
        return bool(sources) and all(self._is_file(source, scope, taken, steps + 1) for source in sources)


def _is_memory_cache(node: Proto, known: Mapping[str, Proto]) -> bool:
    """True for a dataset that is cached in memory, whose file name is empty."""
    if node.op not in ("CacheDataset", "CacheDatasetV2") or len(node.input) < 2:
        return False
    return const_texts(known.get(_node_of(node.input[1]))) == [""]


def _node_of(text: str) -> str:
    return text.removeprefix("^").partition(":")[0]


def runnable_graph(source: SourceGraph) -> Proto:
    """A copy of the source's GraphDef without control edges from nodes that a server could not run.

    A node that such an edge bound to its branch or iteration of control flow gets another edge from there.
    """
    index = GraphIndex.of(source.meta_graph)
    unfit, pivots = _unfit(index), Pivots(index.nodes)
    initialising = all_before(index.nodes, [endpoint(source.init_op)] if source.init_op else [])
    graph_def = deepcopy(source.meta_graph.graph_def)
    _drop_foreign(graph_def, index)
    for node in graph_def.node:
        kept = [text for text in node.input if not (text.startswith("^") and text[1:] in unfit)]
        if len(kept) < len(node.input) and node.name not in initialising:
            node.input[:] = (
                dict.fromkeys([*kept, *pivots.needed_inputs(node)]) if not data_inputs(node) else kept
            )
    return graph_def


def _unfit(index: GraphIndex) -> set[str]:
    """The nodes whose inputs need an unfed placeholder, a queue, a change of state or Python.

    Nodes behind a fed tensor count, too: TensorFlow's optimizer turns a control edge from `Identity(fed)`
    into one from the node that computes `fed`, which then runs in spite of the feed.
    """
    return _behind(
        index, [name for name, node in index.nodes.items() if is_refused(node.op) or node.op == "Placeholder"]
    )


def _drop_foreign(graph_def: Proto, index: GraphIndex) -> None:
    """Remove operations that stock TensorFlow cannot import, and nodes that read from them, in place."""
    foreign = foreign_ops(index.nodes.values(), index.functions)
    has_attributes = is_deeprecs(index.nodes.values())
    found = [
        name
        for name, node in index.nodes.items()
        if node.op in foreign or (has_attributes and foreign_attributes(node))
    ]
    if found:
        _drop(graph_def, _behind(index, found))


def _drop(graph_def: Proto, names: set[str]) -> None:
    kept = []
    for node in graph_def.node:
        if node.name not in names:
            node.input[:] = [text for text in node.input if endpoint(text).node not in names]
            kept.append(node)
    put_nodes(graph_def.node, kept)


def _behind(index: GraphIndex, start: list[str]) -> set[str]:
    """These nodes, and all that read from them, directly or not."""
    return {*closure(start, lambda name: (reader for reader, _ in index.consumers[name]))}
