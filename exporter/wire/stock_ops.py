"""The operations of stock TensorFlow and their attributes, without TensorFlow.

`stock_ops.txt` lists those of the newest supported TensorFlow, a line each: the name, then the names of its
attributes, or `?` if they are not known. `tools/stock_tensorflow.py` makes it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_LIST = Path(__file__).with_name("stock_ops.txt")
# Operations that TensorFlow makes for itself are not in the list.
_INTERNAL = re.compile(
    r"_\w+|Xla\w+|TPU\w+|Risc\w+|DTensor\w+|\w*TPUEmbedding\w*|TopK(WithUnique|Unique)|MakeUnique"
    r"|KthOrderStatistic|StochasticCastToInt|QuantizedConcatV2|NegTrain|Skipgram|HostConst|AudioMicrofrontend"
)


def is_stock(op: str) -> bool:
    """True for an operation (its name) of TensorFlow's own, listed or internal."""
    return op in _listed() or _INTERNAL.fullmatch(op) is not None


def stock_attributes(op: str) -> frozenset[str] | None:
    """Return the names of a stock operation's attributes; None if they, or the operation, are not known."""
    attributes = _listed().get(op, "?").split()
    return None if attributes == ["?"] else frozenset(attributes)


@cache
def _listed() -> dict[str, str]:
    """Return {operation: its attributes, separated by blanks}, "?" if unknown; memoised."""
    lines = _LIST.read_text().splitlines()
    return {op: attributes for op, _, attributes in (line.partition(" ") for line in lines)}
