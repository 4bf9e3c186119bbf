"""Recognise operations that only DeepRec has.

DeepRec is a TensorFlow 1.15 with operations of its own. Those that a served output needs are rewritten
(`exporter.graph.deeprec_conversion`) or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from exporter.errors import ForeignOperations
from exporter.wire.protos import Proto
from exporter.wire.stock_ops import stock_attributes

HANDLE = "KvVarHandleOp"
GATHERS = frozenset({"KvResourceGather", "KvResourceGatherV1"})
INITIALISERS = frozenset({"InitializeKvVariableOp", "InitializeKvVariableV2Op"})
_SAVES_KEYS = "has_ev"  # an attribute that every SaveV2 of DeepRec has
_KNOWN = re.compile(
    r"""(_OPT_)?Kv\w+ | (Read|Initialize|Destroy)Kv\w+ | EVGet\w+ | MultiKv\w+
    | Group(EmbeddingVar|Variable)\w+ | \w*Fused\w*Embedding\w+ | PruneInvalid\w+ | TensorBuffer\w+
    | SaveV3""",
    re.VERBOSE,
)
_FUSED = re.compile(
    r"Group(EmbeddingVar|Variable)\w+ | \w*Fused\w*Embedding\w+ | PruneInvalid\w+", re.VERBOSE
)


@cache
def is_deeprec(op: str) -> bool:
    """True for an operation whose name is known to be DeepRec's."""
    return _KNOWN.fullmatch(op) is not None


def is_convertible(op: str) -> bool:
    """True for DeepRec's handle of an embedding variable, and for its gathers, by the name of the operation.

    `deeprec_conversion` rewrites these if outputs need them.
    """
    return op == HANDLE or op in GATHERS


def is_fused(op: str) -> bool:
    """True for the name of an operation by which DeepRec fuses a whole lookup, or a group of lookups."""
    return _FUSED.fullmatch(op) is not None


def is_deeprecs(nodes: Iterable[Proto]) -> bool:
    """True if DeepRec made a graph: it has an operation of DeepRec's, or a node with the attribute `has_ev`.

    DeepRec gives this attribute to every SaveV2.
    """
    return any(is_deeprec(node.op) or _SAVES_KEYS in node.attr for node in nodes)


def drop_foreign_attributes(nodes: Iterable[Proto], op_defs: Iterable[Proto]) -> None:
    """Remove DeepRec's attributes of stock operations from nodes, in place.

    `op_defs` are the graph's own OpDefs. ForeignOperations if an attribute differs from its default in these,
    or has none, because it may have an effect; nodes before that one are changed already.
    """
    # An attribute with the default value in the graph's own OpDefs has no effect.
    defaults = {op.name: {a.name: a.default_value for a in op.attr} for op in op_defs}
    for node in nodes:
        for name in foreign_attributes(node):
            if node.attr[name] != defaults.get(node.op, {}).get(name):
                raise ForeignOperations(
                    f"an output needs {node.op} {node.name!r} with the attribute {name!r}, "
                    "which stock TensorFlow does not have"
                )
            del node.attr[name]


def foreign_attributes(node: Proto) -> list[str]:
    """Return a node's attributes that its stock operation lacks, without names that begin with `_`.

    Empty for an operation that stock TensorFlow lacks.
    """
    known = stock_attributes(node.op)
    if known is None:
        return []
    return [name for name in node.attr if name not in known and not name.startswith("_")]
