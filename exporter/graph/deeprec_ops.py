"""Tell which operations of a graph only DeepRec has.

DeepRec is a TensorFlow 1.15 with operations of its own. What a served output needs of those has to be
rewritten (`exporter.graph.deeprec_conversion`) or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from exporter.wire.protos import Proto
from exporter.wire.stock_ops import is_stock

HANDLE = "KvVarHandleOp"
GATHERS = frozenset({"KvResourceGather", "KvResourceGatherV1"})
INITIALISERS = frozenset({"InitializeKvVariableOp", "InitializeKvVariableV2Op"})
RESTORES = re.compile(r"KvResource(Incr)?Import\w*")

_KNOWN = re.compile(
    r"""(_OPT_)?Kv\w+ | (Read|Initialize|Destroy)Kv\w+ | EVGet\w+ | MultiKv\w+
    | Group(EmbeddingVar|Variable)\w+ | \w*Fused\w*Embedding\w+ | PruneInvalid\w+ | SaveV3""",
    re.VERBOSE,
)
_FUSED = re.compile(
    r"Group(EmbeddingVar|Variable)\w+ | \w*Fused\w*Embedding\w+ | PruneInvalid\w+", re.VERBOSE
)


@cache
def is_deeprec(op: str) -> bool:
    """True for an operation that is known as one of DeepRec's."""
    return _KNOWN.fullmatch(op) is not None


def is_convertible(op: str) -> bool:
    """True for DeepRec's operations that are rewritten if outputs need them."""
    return op == HANDLE or op in GATHERS


def is_fused(op: str) -> bool:
    """True for a lookup that DeepRec does in one operation, or for a group of tables at once."""
    return _FUSED.fullmatch(op) is not None


def foreign_ops(nodes: Iterable[Proto], functions: Mapping[str, Proto]) -> frozenset[str]:
    """The operations of a graph that stock TensorFlow does not have.

    In a graph of another origin nothing is known of those that are not DeepRec's: whoever has operations of
    their own may have a server that knows them.
    """
    used = {str(node.op) for node in nodes}
    if not any(map(is_deeprec, used)):
        return frozenset()
    return frozenset(op for op in used if op not in functions and (is_deeprec(op) or not is_stock(op)))
