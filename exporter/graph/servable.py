"""Find operations that a server cannot or must not run, and suggest what to do about each.

Foreign operations are those that stock TensorFlow lacks. A server without their library cannot load the
graph. Their state is neither a variable nor a lookup table of TensorFlow's, so `exporter.graph.clean` looks
for the operations that fill it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from exporter.errors import ForeignOperations, NotServable, few
from exporter.graph.deeprec_ops import is_deeprec, is_fused
from exporter.graph.nodes import Reached, attr_dtype, called, control_inputs, endpoint, waited_for
from exporter.wire.protos import Proto
from exporter.wire.stock_ops import is_stock

_RECOMMENDERS = "TensorFlow Recommenders Addons"
# The names of each library's operations, from REGISTER_OP in its source, or from its registry.
_LIBRARIES = (
    (r"TFRA>\w+|\w*CuckooHashTable\w*|\w*RedisTable\w*|\w*HkvHashTable\w*", _RECOMMENDERS),
    (r"SimpleML\w+", "TensorFlow Decision Forests"),
    (
        r"TFText>\w+|(Fast)?Wordpiece\w+|FastBertNormalize|(Fast)?Sentencepiece\w+|WhitespaceTokenize\w+"
        r"|UnicodeScriptTokenize\w+|SplitMergeTokenize\w+|RegexSplitWithOffsets|PhraseTokenize|CaseFoldUTF8"
        r"|NormalizeUTF8\w*|FindSourceOffsets|SentenceFragments\w*|ConstrainedSequence|MaxSpanningTree|RougeL"
        r"|TokenizerFromLogits",
        "TensorFlow Text",
    ),
    (r"Addons>\w+", "TensorFlow Addons"),
    (r"IO>\w+", "TensorFlow I/O"),
    (r"Monolith\w+", "Monolith"),
    (r"Horovod\w+", "Horovod"),
    (
        r"Sok\w*>?\w+|HPS\w*|Hps\w+|EmbeddingLookuper\w*|DummyVar\w+|MergedEmbedding\w*",
        "HugeCTR (SOK or HPS)",
    ),
    (r"TRTEngineOp|\w*TRTResource\w*", "TensorFlow with TensorRT"),
)

# Linked into TensorFlow Serving's own binary: tensorflow_serving/model_servers/BUILD.
_IN_STOCK_IMAGE = frozenset({"TensorFlow Decision Forests", "TensorFlow Text"})

_SHOWN = 8
_REBUILD = (
    "write the graph with tf.nn.embedding_lookup or embedding_lookup_sparse, without do_fusion, or with "
    "groups that neither clip rows (max_norm) nor make sequences: these are converted"
)


def foreign_ops(nodes: Iterable[Proto], functions: Collection[str]) -> frozenset[str]:
    """Return the nodes' operations (names) that stock TensorFlow lacks, without the graph's `functions`."""
    used = {str(node.op) for node in nodes}
    return frozenset(op for op in used if op not in functions and (is_deeprec(op) or not is_stock(op)))


@cache
def library_of(op: str) -> str:
    """Return the name of the library that has an operation, else `the namespace 'X'` for `X>...`; else ""."""
    if is_deeprec(op):
        return "DeepRec"
    for pattern, library in _LIBRARIES:
        if re.fullmatch(pattern, op):
            return library
    return f"the namespace {op.partition('>')[0]!r}" if ">" in op else ""


def by_library(ops: Collection[str]) -> str:
    """Return a text that lists operations by library, for a note; "" for no operations.

    At most 8 of each library are named; operations of no known library are of "unknown origin".
    """
    named: dict[str, list[str]] = {}
    for op in sorted(ops):
        named.setdefault(library_of(op) or "unknown origin", []).append(op)
    return "; ".join(f"{library}: {few(found, _SHOWN)}" for library, found in named.items())


def refusal(found: Mapping[str, str], where: str, cause: str) -> ForeignOperations:
    """Return the error to raise for nodes with foreign operations, `found` ({name: operation}).

    Its hint says what to do. `where` begins the message, and names what needs the nodes; `cause` says how.
    """
    ops = {*found.values()}
    shown = few([f"{op} {name!r}" for name, op in found.items()], _SHOWN)
    libraries = sorted({library for op in ops if (library := library_of(op))})
    whose = f" ({', '.join(libraries)})" if libraries else ""
    return ForeignOperations(
        f"{where} needs operations that stock TensorFlow lacks: {shown}{whose}",
        cause=cause,
        hint=_what_to_do(ops, libraries),
    )


def _what_to_do(ops: Collection[str], libraries: Collection[str]) -> str:
    if any(is_deeprec(op) for op in ops):
        return _REBUILD if any(is_fused(op) for op in ops) else ""
    if libraries and {*libraries} <= _IN_STOCK_IMAGE:
        return (
            "TensorFlow Serving's own image has these operations: --allow foreign-ops serves them with what "
            "they need (serve-model run lacks them)"
        )
    if {*libraries} == {_RECOMMENDERS}:
        return (
            "name a builder, --model FILE.py:FUNCTION, which looks rows up in exporter.tables.DynamicTable("
            "NAME, DIM), in Keras in dynamic_embedding(NAME, DIM); if your server knows these operations: "
            "--allow foreign-ops"
        )
    if not libraries:
        return (
            f"if your server knows them: --allow foreign-ops; if TensorFlow newer than {_installed()} does, "
            "install that"
        )
    return (
        "if your server knows them: --allow foreign-ops, which takes along what they need; else choose "
        "outputs without them"
    )


def _installed() -> str:
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "the one installed here"


_CHANGES_STATE = re.compile(
    r"""Assign | Assign(Add|Sub)(VariableOp)? | AssignVariable(XlaConcatND|Op) | CountUpTo | ResourceCountUpTo
    | (Resource)?(Sparse)?Apply\w+ | ResourceScatter\w+ | (Resource)?StridedSliceAssign
    | Scatter(Add|Sub|Mul|Div|Min|Max|Update) | ScatterNd(Add|Sub|Min|Max|Update)
    | TemporaryVariable | DestroyTemporaryVariable | RefSelect
    | LookupTable(Insert|Remove|Import)(V2)?
    | (Initialize|Destroy)Kv\w+ | KvResource(\w*Apply\w+|Scatter\w+|(Incr)?Import\w*|InitCacheStrategyOp)""",
    re.VERBOSE,
)
_FEEDS_TRAINING = re.compile(
    r"""\w*Dequeue\w* | \w*Enqueue\w* | \w*Queue(V2)? | Queue(Size|IsClosed|Close)\w*
    | (One|Multi)\w*Iterator\w* | Iterator\w*
    | \w*Reader(V2)? | Reader(Read|Num|Serialize|Restore)\w* | (Map|OrderedMap)?(Stage|Unstage)\w*
    | Barrier\w* | \w*Accumulator\w* | RecordInput | InfeedDequeue\w*""",
    re.VERBOSE,
)
_PYTHON = re.compile(r"(Eager)?PyFunc(Stateless)?")
_REASONS = (
    (_CHANGES_STATE, "changes a variable or a table"),
    (_FEEDS_TRAINING, "feeds training"),
    (_PYTHON, "calls Python, which a server does not have"),
)


@cache
def changes_state(op: str) -> bool:
    """True for an operation (by its name) that writes a variable or a table."""
    return _CHANGES_STATE.fullmatch(op) is not None


def is_refused(op: str) -> bool:
    """True for an operation, by its name, that a served output may not need.

    It changes state, feeds training, calls Python, or is one of DeepRec's.
    """
    return bool(_refusal(op))


def check_servable(
    nodes: Mapping[str, Proto],
    reached: Reached,
    fed: set[str],
    allowed: Collection[str] = (),
    foreign: Collection[str] = (),
) -> None:
    """Raise an error if a server cannot or must not run the reached nodes.

    The error names the node nearest to an output. `fed` are the placeholders that get a value; `allowed` are
    nodes that run once, at load; `foreign` are operations that stock TensorFlow lacks.

    Raises:
        ForeignOperations: stock TensorFlow lacks an operation.
        NotServable: a server must not run an operation, or a placeholder gets no value.
    """
    found = {name: nodes[name].op for name in reached.inputs if name not in allowed}
    found = {name: op for name, op in found.items() if op in foreign or is_deeprec(op)}
    if found:
        raise refusal(found, "an output", reached.path(next(iter(found))))
    unfed = [name for name in reached.inputs if nodes[name].op in _PLACEHOLDERS and name not in fed]
    if unfed:
        first, dtype = unfed[0], attr_dtype(nodes[unfed[0]], "dtype")
        others = f"; so do {', '.join(map(repr, unfed[1:]))}" if len(unfed) > 1 else ""
        raise NotServable(
            f"placeholder {first!r} ({dtype.label if dtype else 'unknown type'}) gets no value{others}",
            cause=reached.path(first),
            hint=f"make it an input: {_as_inputs([*unfed, *_batches(nodes, reached)])}, or fix it: --feed "
            f"{first}=VALUE",
        )
    for name in reached.inputs:
        node = nodes[name]
        reason = _refusal(node.op)
        if reason and name not in allowed:
            raise NotServable(
                f"an output needs {node.op} {name!r}, which {reason}",
                cause=reached.path(name),
                hint="choose other outputs, or feed what comes from it: "
                + _as_inputs(_batches(nodes, reached) or [f"{name}:0"]),
            )


def _batches(nodes: Mapping[str, Proto], reached: Reached) -> list[str]:
    """Return the names of the tensors that the reached nodes take from an input pipeline, sorted."""
    feeding = {name for name in reached.inputs if _FEEDS_TRAINING.fullmatch(nodes[name].op)}
    taken = {endpoint(text) for name in reached.inputs.keys() - feeding for text in nodes[name].input}
    return [str(tensor) for tensor in sorted(taken) if tensor.node in feeding and tensor.output >= 0]


def _as_inputs(tensors: Iterable[str]) -> str:
    return " ".join(f"--input NAME={tensor}" for tensor in tensors)


_PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})


@cache
def _refusal(op: str) -> str:
    """Return the reason why a server must not run an operation, as words after "which"; "" if it may."""
    if is_deeprec(op):
        return "stock TensorFlow does not have"
    return next((reason for pattern, reason in _REASONS if pattern.fullmatch(op)), "")


def check_known(nodes: Iterable[Proto], function: str, library: Collection[str]) -> None:
    """Raise ForeignOperations if the function named `function` has operations that stock TensorFlow lacks.

    `nodes` are the function's, `library` has the names of all functions of the graph.
    """
    nodes = [*nodes]
    if foreign := foreign_ops(nodes, library):
        found = {node.name: node.op for node in nodes if node.op in foreign}
        raise refusal(found, f"function {function!r}", "an output, or an initialiser of its tables, calls it")


def check_body(nodes: Iterable[Proto], function: str) -> None:
    """Raise NotServable for a function with an operation that a server must not run.

    `nodes` are the function's. Operations that feed training are allowed: in a function they are its own
    datasets.
    """
    for node in nodes:
        reason = _refusal(node.op)
        if reason and not _FEEDS_TRAINING.fullmatch(node.op):
            raise NotServable(f"function {function!r} needs {node.op} {node.name!r}, which {reason}")


def check_reads(
    nodes: Mapping[str, Proto],
    names: Iterable[str],
    mutating_functions: set[str],
    where: str,
    allowed: Collection[str] = (),
) -> None:
    """Raise NotServable for a read that must see a change of the same call, such as `v.assign_add(1)`.

    The nodes `names` are checked. The nodes `allowed` may change what is read, because they are served, too.
    `mutating_functions` are the functions that change state. `where` follows the error's first clause, such
    as ` in function 'f'`.
    """
    # Control edges are dropped, except from `allowed`, so such a read would silently see the old value.
    for name in names:
        node = nodes[name]
        sources = [text for text in node.input if not text.startswith("^")]
        if not sources or len(sources) == len(node.input):
            continue
        for cause in waited_for(nodes, control_inputs(node)):
            changing = nodes[cause]
            mutates = changes_state(changing.op) or called_functions(changing) & mutating_functions
            if mutates and cause not in allowed and sources[0] in changing.input:
                raise NotServable(
                    f"{node.op} {name!r} reads a value that {changing.op} {cause!r} has just changed{where}",
                    cause="a served model does not change its own variables",
                    hint="choose an output that does not depend on the change",
                )


def called_functions(node: Proto) -> set[str]:
    """Return the name of a node's operation, and of each function in its attributes.

    The operation's name is always among them, because it may be a function's, too.
    """
    return {node.op, *(function.name for function in called(node))}
