"""Find what a key reads that an embedding variable does not hold.

With a filter it is the constant `default_value_no_permission`. Without one it is row `key mod d` of the
initializer's value, a matrix of d = `default_value_dim` rows that DeepRec computes when a server starts: it
is in no checkpoint. If the initializer draws random numbers, every start of DeepRec's server gives others.
Then `default_value_no_permission` is served, which DeepRec's releases up to 2302 did in all cases, unless
the request gives a number.

Source: DeepRec, tensorflow/core/framework/embedding/{counter_filter,nullable_filter}_policy.h (Lookup) and
tensorflow/python/ops/kv_variable_ops.py (where the initializer's value is made).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.errors import ExportError, NotServable, UsageError
from exporter.graph.deeprec_ops import INITIALISERS
from exporter.graph.nodes import Endpoint, GraphIndex, attr, attr_dtype, data_inputs, through_identities
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import to_array

Array = np.ndarray[Any, Any]

_IMPORT = "KvResourceImportV2"
_VALUE_OF = {**dict.fromkeys(INITIALISERS, 2), _IMPORT: 3}
"""The position of the initial value among the inputs."""
_MAX_BYTES = 1 << 28
_MAX_DEPTH = 64
_SHOWN = 8
_RANDOM = re.compile(r"\w*(Random|Truncated|Multinomial|Shuffle|Rng|Bernoulli)\w*")


class Defaults(Struct, frozen=True, eq=False):
    """The default rows [d, dim] of a table, and what a person should know about them."""

    rows: Array
    note: str = ""


def default_rows(
    index: GraphIndex, name: str, parts: list[Proto], dtype: DType, dim: int, given: float | None
) -> Defaults:
    """What an absent key reads in a table of these parts (handles); `given` is what the request says of it.

    Raises:
        NotServable: nothing in the graph tells, or the parts have different rows.
    """
    if given is not None:
        return Defaults(_constant(given, dtype, dim))
    found = [_part_defaults(index, part, dtype, dim) for part in parts]
    known = [one for one in found if one is not None]
    if not known:
        raise NotServable(
            f"nothing in the graph tells what a key reads that {name!r} does not hold",
            cause="the nodes that initialise the embedding variable are not in the graph",
            hint=f"say it: --absent-key '{name}=0'",
        )
    first = known[0]
    if any(not np.array_equal(other.rows, first.rows, equal_nan=True) for other in known[1:]):
        raise NotServable(
            f"the parts of {name!r} have initializers of different values",
            cause="the parts are served as one table, which has one answer for a key that it does not hold",
            hint=f"choose it: --absent-key '{name}=0'",
        )
    note = f"a key that {name!r} does not hold reads {first.note}" if first.note else ""
    return Defaults(first.rows, note)


class AbsentKeys:
    """What a request says about absent keys: numbers by regular expressions for the names of tables."""

    def __init__(self, texts: Mapping[str, str], names: Collection[str]) -> None:
        """Read them for the embedding variables of a graph.

        Raises:
            UsageError: one is no number, no regular expression, or matches no name.
        """
        self._rules: list[tuple[re.Pattern[str], float]] = []
        for text, number in texts.items():
            try:
                pattern = re.compile(text)
                self._rules.append((pattern, float(number)))
            except (re.error, ValueError) as error:
                raise UsageError(
                    f"--absent-key {text}={number}: expected a regular expression and a number",
                    cause=str(error),
                    hint="--absent-key 'user_.*=0'",
                ) from error
            if not any(map(pattern.fullmatch, names)):
                shown = ", ".join(map(repr, sorted(names)[:_SHOWN])) or "none"
                raise UsageError(
                    f"--absent-key {text}: no embedding variable is called so",
                    cause=f"the pattern is for a whole name; there are {shown}",
                )

    def of(self, name: str) -> float | None:
        """The number for a table, by the first rule that is about it."""
        return next((number for pattern, number in self._rules if pattern.fullmatch(name)), None)


def _part_defaults(index: GraphIndex, handle: Proto, dtype: DType, dim: int) -> Defaults | None:
    made = _initialiser(index, handle.name)
    if made is None:
        return None
    constant = _constant(attr(made, "default_value_no_permission").f, dtype, dim)
    if attr(made, "filter_freq").i > 0:
        return Defaults(constant)
    inputs, position = data_inputs(made), _VALUE_OF[made.op]
    value, why = _Evaluation(index).of(inputs[position] if position < len(inputs) else Endpoint("", 0))
    if value is None:
        shown = f"{float(constant[0, 0]):g}"
        return Defaults(
            constant,
            f"{shown}: {why}, so that nothing stored tells what DeepRec reads there (another: --absent-key)",
        )
    if value.dtype.kind == "O" or value.size % dim or not value.size:
        raise NotServable(
            f"the initial value of {handle.name!r} has shape {list(value.shape)}: no rows of {dim} numbers",
            cause="the graph is damaged, or was made for another dimension",
            hint="write the .meta again from the training program, or say --absent-key",
        )
    rows = np.asarray(value).reshape(-1, dim).astype(dtype.numpy)
    count = attr(made, "default_value_dim").i
    if 0 < count < len(rows):
        rows = rows[:count]
    same = bool((rows == rows[0]).all())
    return Defaults(np.ascontiguousarray(rows[:1] if same else rows))


def _constant(value: float, dtype: DType, dim: int) -> Array:
    return np.full((1, dim), value, dtype.numpy)


def _initialiser(index: GraphIndex, handle: str) -> Proto | None:
    """The operation that gives an embedding variable its initial value: of both, the one that sets it."""
    readers = [index.nodes[name] for name, position in index.consumers[handle] if position < 2]
    for ops in (INITIALISERS, {_IMPORT}):
        for node in readers:
            position, inputs = 1 if node.op == _IMPORT else 0, data_inputs(node)
            if (
                node.op in ops
                and position < len(inputs)
                and through_identities(index.nodes, inputs[position].node) == handle
            ):
                return node
    return None


class _Evaluation:
    """Computes initial values that are made of constants, in numpy."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index

    def of(self, tensor: Endpoint, depth: int = 0) -> tuple[Array | None, str]:
        """A tensor's value, or why it has none."""
        node = self._index.nodes.get(tensor.node)
        if node is None or depth > _MAX_DEPTH:
            return None, "its initializer is not in the graph"
        if _RANDOM.fullmatch(node.op):
            return None, "its initializer draws random numbers"
        if node.op == "Const":
            return _constant_value(node)
        compute = _COMPUTED.get(node.op)
        if compute is None:
            return None, f"its initializer needs {node.op} {node.name!r}, which is not computed here"
        values = []
        for source in data_inputs(node):
            value, why = self.of(source, depth + 1)
            if value is None:
                return None, why
            values.append(value)
        try:
            with np.errstate(all="ignore"):
                return compute(node, values), ""
        except (ValueError, TypeError, IndexError) as error:
            return None, f"its initializer cannot be computed ({error})"


def _constant_value(node: Proto) -> tuple[Array | None, str]:
    if "value" not in node.attr:
        return None, "its initializer has no value"
    try:
        return to_array(attr(node, "value").tensor, _MAX_BYTES), ""
    except (ExportError, ValueError, TypeError) as error:
        return None, f"its initializer's constant is damaged ({error})"


def _fill(_: Proto, values: list[Array]) -> Array:
    shape = tuple(int(size) for size in values[0])
    if np.prod(shape, dtype=np.float64) * values[1].itemsize > _MAX_BYTES:
        raise ValueError("it has too many values")
    return np.broadcast_to(values[1], shape)


def _cast(node: Proto, values: list[Array]) -> Array:
    wanted = attr_dtype(node, "DstT")
    return values[0].astype(wanted.numpy) if wanted is not None else values[0]


_COMPUTED: Mapping[str, Callable[[Proto, list[Array]], Array]] = {
    "Identity": lambda _, values: values[0],
    "Fill": _fill,
    "Cast": _cast,
    "Reshape": lambda _, values: values[0].reshape([int(size) for size in values[1]]),
    "BroadcastTo": lambda _, values: np.broadcast_to(values[0], [int(size) for size in values[1]]),
    "ZerosLike": lambda _, values: np.zeros_like(values[0]),
    "OnesLike": lambda _, values: np.ones_like(values[0]),
    "Add": lambda _, values: values[0] + values[1],
    "AddV2": lambda _, values: values[0] + values[1],
    "Sub": lambda _, values: values[0] - values[1],
    "Mul": lambda _, values: values[0] * values[1],
    "RealDiv": lambda _, values: values[0] / values[1],
    "Neg": lambda _, values: -values[0],
}
