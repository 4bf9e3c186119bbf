"""Which operations stock TensorFlow has, and their attributes, without importing it.

The installed package lists its operations in one generated file. That names the generated modules with a
Python function for each operation, which says what its attributes are called. Both are read as text.
"""

from __future__ import annotations

import re
from functools import cache

from exporter.wire.protos import package_directory

_LIST = "_api/v2/raw_ops/__init__.py"
_IMPORTED = re.compile(r"^from tensorflow\.(python\.\S+) import (\w+)", re.MULTILINE)
_MADE = re.compile(
    r'_apply_op_helper\(\s*"(\w+)"(?:(?!_apply_op_helper).)*?_attrs = (None|\(.*?\))\n', re.DOTALL
)
_NAME = re.compile(r'"(\w+)"')
_INTERNAL = re.compile(
    r"_\w+|Xla\w+|TPU\w+|Risc\w+|DTensor\w+|\w*TPUEmbedding\w*|TopK(WithUnique|Unique)|MakeUnique"
    r"|KthOrderStatistic|StochasticCastToInt|QuantizedConcatV2|NegTrain|Skipgram|HostConst|AudioMicrofrontend"
)
"""Operations that TensorFlow makes for itself are not in the list."""


def is_stock(op: str) -> bool:
    """True for an operation of TensorFlow's own."""
    return op in _modules() or _INTERNAL.fullmatch(op) is not None


def stock_attributes(op: str) -> frozenset[str] | None:
    """The names of a stock operation's attributes; None if they are not known."""
    module = _modules().get(op)
    return None if module is None else _attributes(module).get(op)


@cache
def _modules() -> dict[str, str]:
    """The generated module of each operation."""
    text = (package_directory("tensorflow") / _LIST).read_text()
    return {name: module for module, name in _IMPORTED.findall(text)}


@cache
def _attributes(module: str) -> dict[str, frozenset[str]]:
    path = package_directory("tensorflow") / f"{module.replace('.', '/')}.py"
    text = path.read_text() if path.is_file() else ""
    return {op: frozenset(_NAME.findall(attributes)) for op, attributes in _MADE.findall(text)}
