"""Which operations stock TensorFlow has, without importing it.

The installed package lists its operations in one generated file, from which the names are read.
"""

from __future__ import annotations

import re
from functools import cache

from exporter.wire.protos import package_directory

_LIST = "_api/v2/raw_ops/__init__.py"
_IMPORTED = re.compile(r"^from tensorflow\.python\.\S+ import (\w+)", re.MULTILINE)
_INTERNAL = re.compile(r"_\w+|Xla\w+|TPU\w+|Risc\w+|DTensor\w+")
"""Operations that TensorFlow makes for itself are not in the list."""


def is_stock(op: str) -> bool:
    """True for an operation of TensorFlow's own."""
    return op in _listed() or _INTERNAL.fullmatch(op) is not None


@cache
def _listed() -> frozenset[str]:
    text = (package_directory("tensorflow") / _LIST).read_text()
    return frozenset(_IMPORTED.findall(text))
