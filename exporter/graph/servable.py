"""Find operations that a served graph may not depend on, and explain what to do about each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from exporter.errors import ForeignOperations, NotServable
from exporter.graph.bodies import called
from exporter.graph.deeprec_ops import is_deeprec, is_fused
from exporter.graph.nodes import attr_dtype, control_inputs
from exporter.graph.reach import Reached, waited_for
from exporter.wire.protos import Proto

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
_SHOWN = 8


@cache
def changes_state(op: str) -> bool:
    """True for operations that write variables or tables."""
    return _CHANGES_STATE.fullmatch(op) is not None


def is_refused(op: str) -> bool:
    """True for operations that a served output may not need."""
    return bool(_refusal(op))


def check_servable(
    nodes: Mapping[str, Proto],
    reached: Reached,
    fed: set[str],
    allowed: Collection[str] = (),
    foreign: Collection[str] = (),
) -> None:
    """Refuse the nearest operation that a server cannot or must not run.

    `fed` are the placeholders that a request fills; `allowed` are operations that run once, at load;
    `foreign` are kinds of operations that stock TensorFlow does not have.

    Raises:
        NotServable: names the operation, the way to it from an output, and what to do.
        ForeignOperations: names all such operations.
    """
    _check_foreign(nodes, reached, allowed, foreign)
    unfed = [name for name in reached.inputs if nodes[name].op in _PLACEHOLDERS and name not in fed]
    if unfed:
        raise _unfed(nodes, reached, unfed)
    for name in reached.inputs:
        node = nodes[name]
        reason = _refusal(node.op)
        if reason and name not in allowed:
            raise NotServable(
                f"an output needs {node.op} {name!r}, which {reason}",
                cause=reached.path(name),
                hint=f"choose other outputs, or feed a tensor behind it: --input NAME={name}:0",
            )


def _check_foreign(
    nodes: Mapping[str, Proto], reached: Reached, allowed: Collection[str], foreign: Collection[str]
) -> None:
    found = [name for name in reached.inputs if nodes[name].op in foreign or is_deeprec(nodes[name].op)]
    found = [name for name in found if name not in allowed]
    if not found:
        return
    shown = ", ".join(f"{nodes[name].op} {name!r}" for name in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ForeignOperations(
        f"an output needs what stock TensorFlow does not have: {shown}{more}",
        cause=reached.path(found[0]),
        hint=_REBUILD if any(is_fused(nodes[name].op) for name in found) else "",
    )


_REBUILD = (
    "write the graph with tf.nn.embedding_lookup or embedding_lookup_sparse, without do_fusion, or with "
    "groups that neither clip rows (max_norm) nor make sequences: these are converted"
)
_PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})


def _unfed(nodes: Mapping[str, Proto], reached: Reached, names: list[str]) -> NotServable:
    first = names[0]
    dtype = attr_dtype(nodes[first], "dtype")
    others = f"; so do {', '.join(map(repr, names[1:]))}" if len(names) > 1 else ""
    return NotServable(
        f"placeholder {first!r} ({dtype.label if dtype else 'unknown type'}) gets no value{others}",
        cause=reached.path(first),
        hint=f"make it an input: --input NAME={first}, or fix it: --feed {first}=VALUE",
    )


@cache
def _refusal(op: str) -> str:
    """Why a server cannot run an operation, "" if it can."""
    if is_deeprec(op):
        return "stock TensorFlow does not have"
    return next((reason for pattern, reason in _REASONS if pattern.fullmatch(op)), "")


def check_body(nodes: Iterable[Proto], function: str) -> None:
    """As `check_servable`, for a function's body; datasets and iterators are allowed within one call.

    Raises:
        NotServable: names the operation and the function.
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
    """Refuse a read that is to see a change made in the same call (as when `v.assign_add(1)` is an output).

    Control edges are dropped from inference graphs, so such a read would silently see the value before. Those
    from changes that are `allowed` are not.

    Raises:
        NotServable: names the read and the change.
    """
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
                    f"{node.op} {name!r} reads what {changing.op} {cause!r} has just changed{where}",
                    cause="a served model does not change its own variables",
                    hint="choose an output that does not depend on the change",
                )


def called_functions(node: Proto) -> set[str]:
    """The library functions that a node's attributes or its operation name."""
    return {node.op, *(function.name for function in called(node))}
