"""Find what a signature's inputs are looked up in first: a vocabulary, a table by keys, rows of a variable.

The values of an input are followed forward, through operations that hand them on, and into the functions that
are called, to the operations that look them up. What these read is followed back from there to the node that
makes it. Branches, loops and arithmetic are not followed: what lies behind them is not known, and that the
values led there is (`FedInput.is_followed`).

The graph is that of any version that a server loads, perhaps not one of ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from msgspec import Struct

from exporter.errors import GraphError
from exporter.graph.called_bodies import SHAPES
from exporter.graph.functions import callers
from exporter.graph.lookup_tables import FILLS, FROM_FILE, is_restorable, table_keys
from exporter.graph.nodes import (
    Body,
    GraphIndex,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    called,
    const_value,
    endpoint,
    input_names,
    node_of,
)
from exporter.graph.saved_model import asset_files
from exporter.tables.lookup import JOINED, SIZE, TABLE
from exporter.wire.dtypes import Array, DType
from exporter.wire.protos import Proto

WHOLE_LINE = -2
"""The column of a file whose lines are keys. Source: tensorflow/core/kernels/lookup_util.cc."""

INTEGERS = frozenset(
    {
        *(DType.INT8, DType.INT16, DType.INT32, DType.INT64),
        *(DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64),
    }
)


class FromFile(Struct, frozen=True):
    """A vocabulary in an asset of the version: its keys are in a column, from 0 on, or `WHOLE_LINE`."""

    asset: str
    column: int
    delimiter: str


class Listed(Struct, frozen=True, eq=False):
    """A vocabulary in the graph: its keys, strings as `bytes` in an object array."""

    keys: Array


class Kept(Struct, frozen=True):
    """A lookup table that training filled: the tensor of its keys; `empty` are keys of empty buckets."""

    tensor: str
    empty: tuple[int | bytes, ...]


class ByKeys(Struct, frozen=True):
    """A table by keys, by its name."""

    table: str


class ByRows(Struct, frozen=True):
    """A variable that is gathered from, whole or in parts: how many rows it has."""

    rows: int


Lookup = FromFile | Listed | Kept | ByKeys | ByRows


class FedInput(Struct, frozen=True):
    """What an input is looked up in, nearest first, without lookups in what is not known.

    `altered`: operations on the way may change strings that are not all letters and digits, in lower case.
    `is_followed` is False if its values lead also to what was not followed.
    """

    lookups: tuple[Lookup, ...]
    altered: bool
    is_followed: bool


def fed_lookups(meta_graph: Proto, signature: Proto, apart: str = "") -> dict[str, FedInput]:
    """{input of a signature: what it is looked up in}, for all inputs that are plain tensors.

    Nodes whose names begin with `apart` are passed over.

    Raises:
        GraphError: the graph is damaged.
    """
    graph = _Graph(meta_graph, apart)
    try:
        return {
            key: graph.follow(*endpoint(info.name))
            for key, info in sorted(signature.inputs.items())
            if info.WhichOneof("encoding") == "name"
        }
    except IndexError as error:
        raise GraphError(
            "a node of the graph has fewer inputs than its operation takes", cause=str(error)
        ) from error


class _HandsOn(Struct, frozen=True):
    """Which inputs an operation hands on (none: all), as which output; its name in functions; None: all."""

    inputs: tuple[int, ...] = ()
    output: int | None = 0
    name: str = "output"


_FIRST, _SECOND, _ALL = _HandsOn((0,)), _HandsOn((1,)), _HandsOn()
_STRINGS_ALTERED: Mapping[str, _HandsOn] = {
    "StringSplit": _HandsOn((0,), 1, "values"),
    "StringSplitV2": _HandsOn((0,), 1, "values"),
    **dict.fromkeys(("RegexReplace", "StaticRegexReplace", "StringLower", "StringStrip"), _FIRST),
}
_HANDS_ON: Mapping[str, _HandsOn] = {
    **dict.fromkeys(("EnsureShape", "ExpandDims", "Identity", "PlaceholderWithDefault", "Reshape"), _FIRST),
    **dict.fromkeys(("Slice", "Squeeze", "StridedSlice", "Tile", "BroadcastTo", "StopGradient"), _FIRST),
    **dict.fromkeys(("Gather", "GatherNd", "GatherV2"), _FIRST),
    **dict.fromkeys(("ConcatV2", "Pack"), _ALL),
    "Cast": _HandsOn((0,), 0, "y"),
    "Transpose": _HandsOn((0,), 0, "y"),
    **dict.fromkeys(("Unique", "UniqueV2", "UniqueWithCounts"), _HandsOn((0,), 0, "y")),
    **dict.fromkeys(("Maximum", "Minimum"), _HandsOn((0, 1), 0, "z")),
    **dict.fromkeys(("Select", "SelectV2"), _HandsOn((1, 2))),
    "Split": _HandsOn((1,), None),
    **dict.fromkeys(("SplitV", "Unpack"), _HandsOn((0,), None)),
    "SparseFillEmptyRows": _HandsOn((1,), 1, "output_values"),
    "RaggedTensorToTensor": _HandsOn((1,), 0, "result"),
    **_STRINGS_ALTERED,
}
# Operations that do not fail, whatever the values, and whose results are no row numbers.
_ENDS = SHAPES | {
    *("Assert", "AsString", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"),
    *("OnesLike", "StringLength", "Where", "ZerosLike"),
    *("StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
}
_FINDS = frozenset({"LookupTableFind", "LookupTableFindV2"})
_GATHERS = frozenset({"Gather", "GatherV2", "ResourceGather"})
_STATIC = frozenset({"HashTable", "HashTableV2"})
_PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_SAME = frozenset({"Identity", "Enter"})
_SAME_ROWS = _SAME | {"Cast", "ReadVariableOp"}
_SAME_NUMBERS = _SAME | {"Cast", "Reshape"}
_ASSIGN_PARTS = frozenset({"FloorDiv", "FloorMod", "Sub"})

_MOST_TENSORS = 1 << 14  # on the way of one input
_MOST_CALLS = 1 << 10  # that are entered: functions that call others twice, on many levels, make any number
_MOST_STEPS = 64  # back to what a lookup reads; a damaged graph may have a circle
_MOST_KEYS = 1 << 10  # of a vocabulary in the graph: an example needs a few

_Reader = tuple[str, Proto, int]
"""An output of a node, as it is written behind the node's name; who reads it, as which of its inputs."""


class _Body:
    """The graph, or a function, with the readers of each of its tensors."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.readers: dict[str, list[_Reader]] = {}
        for node in body.nodes:
            for position, text in enumerate(input_names(node)):
                name, _, output = body.canonical(text).partition(":")
                self.readers.setdefault(name, []).append((output, node, position))

    @cached_property
    def keyed(self) -> dict[str, str]:
        """{tensor of ids: the table by keys that they are looked up in}."""
        found = {}
        for node in self.body.nodes:
            if JOINED in node.attr:
                counted: Proto | None = node
            elif attr_text(node, SIZE) == "group_shift":
                counted = self.body.by_name.get(f"{node.name.rpartition('/')[0]}/key")
            else:
                continue
            if counted is not None and counted.input:
                found[self.body.canonical(counted.input[0])] = attr_text(node, TABLE)
        return found

    @cached_property
    def arguments(self) -> list[str]:
        """The names of a function's arguments."""
        return [each.name for each in self.body.function.signature.input_arg] if self.body.function else []

    @cached_property
    def results(self) -> dict[str, list[int]]:
        """{tensor of a function: the results that it is}."""
        found: dict[str, list[int]] = {}
        if (function := self.body.function) is not None:
            for number, result in enumerate(function.signature.output_arg):
                found.setdefault(function.ret.get(result.name, ""), []).append(number)
        return found


class _Scope(Struct, frozen=True, eq=False):
    """The graph, or a function as one node of the scope `caller` calls it."""

    within: _Body
    caller: _Scope | None = None
    call: Proto | None = None

    @property
    def body(self) -> Body:
        return self.within.body


_Place = tuple[_Scope, str, str]
"""A tensor: the name of a node, or of a function's argument, and the output."""


class _Graph:
    """A graph whose inputs are followed."""

    def __init__(self, meta_graph: Proto, apart: str) -> None:
        self._meta_graph, self._apart = meta_graph, apart
        self._index = GraphIndex.of(meta_graph)
        self._library = self._index.functions
        self._top = _Scope(_Body(Body(meta_graph.graph_def.node)))
        self._functions: dict[str, _Body] = {}
        self._entered: dict[tuple[_Scope, str], _Scope] = {}
        self._parts: dict[_Scope, dict[str, ByRows]] = {}

    def follow(self, node: str, output: int) -> FedInput:
        """What the tensor of an input leads to."""
        start = (self._top, node, str(output))
        found: dict[Lookup, None] = {}
        altered, is_followed = False, True
        pending, seen = deque([start]), {start}
        while pending and len(seen) < _MOST_TENSORS:
            place = pending.popleft()
            scope, name, own = place
            if table := scope.within.keyed.get(_tensor(name, own)):
                found[ByKeys(table)] = None
            if whole := self._in_parts(scope).get(_tensor(name, own)):
                found[whole] = None
            further = list(self._returned(place))
            for written, reader, position in scope.within.readers.get(name, ()):
                if written != own or self._is_passed_over(scope, reader):
                    continue
                if whole and reader.op in _ASSIGN_PARTS:
                    continue
                if (lookup := self._lookup(scope, reader, position)) is not None:
                    found[lookup] = None
                elif (led := self._led_to(scope, reader, position)) is not None:
                    altered |= reader.op in _STRINGS_ALTERED
                    further += led
                else:
                    is_followed = False
            new = [each for each in further if each not in seen]
            seen.update(new)
            pending.extend(new)
        return FedInput(tuple(found), altered, is_followed and not pending)

    def _is_passed_over(self, scope: _Scope, node: Proto) -> bool:
        if scope is self._top and self._apart and node.name.startswith(self._apart):
            return True
        # Ids of rows of a mapped table go to its overlay, too: see `overlaid_reads`.
        gather, _, last = node.name.rpartition("/")
        return node.op == "Switch" and last == "ids" and f"{gather}/mapped" in scope.body.by_name

    def _led_to(self, scope: _Scope, node: Proto, position: int) -> list[_Place] | None:
        """The tensors in which a node hands on its input; none of an end, None if that is not known."""
        if node.op in _ENDS or (node.op == "Cast" and not _is_whole(node)) or _is_for_negative(scope, node):
            return []
        if (inner := self._enter(scope, node)) is not None:
            arguments = inner.within.arguments
            return [(inner, arguments[position], "")] if position < len(arguments) else None
        hands_on = _HANDS_ON.get(node.op)
        if hands_on is None or (hands_on.inputs and position not in hands_on.inputs):
            return None
        return [
            (scope, node.name, written)
            for written in dict.fromkeys(each for each, _, _ in scope.within.readers.get(node.name, ()))
            if _is_output(scope.body, written, hands_on)
        ] + [
            (scope, node.name, written)
            for result in scope.within.results
            for name, _, written in [result.partition(":")]
            if name == node.name and _is_output(scope.body, written, hands_on)
        ]

    def _returned(self, place: _Place) -> Iterator[_Place]:
        """The tensors of the caller that a function returns this tensor as."""
        scope, name, output = place
        if scope.caller is not None and scope.call is not None:
            for number in scope.within.results.get(_tensor(name, output), ()):
                is_function = scope.caller.body.function is not None
                yield scope.caller, scope.call.name, f"output:{number}" if is_function else str(number)

    def _enter(self, scope: _Scope, node: Proto) -> _Scope | None:
        """The function that a node calls; None if it calls none, or in another way, or too much is called."""
        name = attr(node, "f").func.name if node.op in _PLAIN_CALLS else node.op
        if name not in self._library:
            return None
        known = self._entered.get((scope, node.name))
        if known is None and len(self._entered) < _MOST_CALLS:
            if name not in self._functions:
                self._functions[name] = _Body(Body.of(self._library[name]))
            known = self._entered[scope, node.name] = _Scope(self._functions[name], scope, node)
        return known

    def _behind(self, scope: _Scope, text: str, ops: Collection[str] = _SAME) -> tuple[_Scope, Proto] | None:
        """The node that makes what an input is, through nodes of these operations, and out of functions."""
        for _ in range(_MOST_STEPS):
            node = scope.body.producer(text)
            if node is None:
                name = node_of(text)
                if scope.caller is None or scope.call is None or name not in scope.within.arguments:
                    return None
                scope, text = scope.caller, input_names(scope.call)[scope.within.arguments.index(name)]
            elif node.op in ops and node.input:
                text = node.input[0]
            else:
                return scope, node
        return None

    def _lookup(self, scope: _Scope, node: Proto, position: int) -> Lookup | None:
        """What a node looks its input up in; None if it does not, or if that is not known."""
        if position != 1:
            return None
        if node.op in _FINDS:
            return self._vocabulary(scope, node)
        if node.op in _GATHERS and not attr(node, "batch_dims").i and self._is_of_rows(scope, node):
            ops = _SAME if node.op == "ResourceGather" else _SAME_ROWS
            found = self._behind(scope, node.input[0], ops)
            shape = attr_shape(found[1]) if found is not None and found[1].op == "VarHandleOp" else None
            return ByRows(shape[0]) if shape and shape[0] > 0 else None
        return None

    def _in_parts(self, scope: _Scope) -> dict[str, ByRows]:
        """{tensor of ids: the rows of all parts of the variable that it is looked up in}."""
        # `embedding_lookup` assigns ids to parts by a remainder, or the larger of two divisions: see `keys`.
        if scope not in self._parts:
            found = self._parts[scope] = {}
            for node in scope.body.nodes:
                ids = self._assigned(scope, node) if node.op == "DynamicPartition" else None
                if ids is None:
                    continue
                gathered = {
                    written: self._lookup(scope, reader, position)
                    for written, reader, position in scope.within.readers.get(node.name, ())
                }
                rows = [each.rows for each in gathered.values() if isinstance(each, ByRows)]
                if len(rows) == len(gathered) == attr(node, "num_partitions").i:
                    found[scope.body.canonical(ids)] = ByRows(sum(rows))
        return self._parts[scope]

    def _assigned(self, scope: _Scope, partition: Proto) -> str | None:
        """The ids that a DynamicPartition sends to parts; None if it sends anything else."""
        found = self._behind(scope, partition.input[1], _SAME_NUMBERS)
        if found is not None and found[1].op == "Maximum":
            found = self._behind(found[0], found[1].input[0])
            is_known = found is not None and found[1].op == "FloorDiv"
        else:
            is_known = found is not None and found[1].op == "FloorMod"
        return str(found[1].input[0]) if found is not None and is_known and found[0] is scope else None

    def _is_of_rows(self, scope: _Scope, gather: Proto) -> bool:
        if gather.op != "GatherV2":
            return True
        found = self._behind(scope, gather.input[2])
        axis = None if found is None else const_value(found[1])
        return axis is not None and not axis.any()

    def _vocabulary(self, scope: _Scope, find: Proto) -> Lookup | None:
        """The keys of a lookup table; None if it is not known what fills it."""
        found = self._behind(scope, find.input[0])
        if found is None:
            return None
        scope, table = found
        if is_restorable(table.op):
            stored = self._stored.get(table.name)
            return None if scope is not self._top or stored is None else self._kept(scope, table, stored)
        filled = self._fills.get(_identity(table)) if table.op in _STATIC else None
        if filled is None:
            return None
        scope, fill = filled
        keys = self._behind(scope, fill.input[1])
        if keys is None:
            return None
        if FROM_FILE.fullmatch(fill.op):
            asset = self._assets.get(keys[1].name) if keys[0] is self._top else None
            column, delimiter = attr(fill, "key_index").i, attr_text(fill, "delimiter")
            return None if asset is None else FromFile(asset, column, delimiter or "\t")
        listed = const_value(keys[1])
        return None if listed is None else Listed(listed.ravel()[:_MOST_KEYS])

    def _kept(self, scope: _Scope, table: Proto, tensor: str) -> Lookup | None:
        if "Dense" not in table.op:
            return Kept(tensor, ())
        marks = [self._behind(scope, text) for text in input_names(table)[:2]]
        values = [None if mark is None else const_value(mark[1]) for mark in marks]
        known = [value.item() for value in values if value is not None and value.size == 1]
        return Kept(tensor, tuple(known)) if len(known) == len(values) else None

    @cached_property
    def _stored(self) -> dict[str, str]:
        """{node of a table that training fills: the tensor of its keys}."""
        return {node: key.keys for node, key in table_keys(self._meta_graph, self._index).items()}

    @cached_property
    def _assets(self) -> dict[str, str]:
        """{node that gets the path of an asset: its file's name}."""
        return dict(asset_files(self._meta_graph))

    @cached_property
    def _fills(self) -> dict[str, tuple[_Scope, Proto]]:
        """{table: the node that fills it}, also of nodes in functions."""
        has_fill = (
            name
            for name, function in self._library.items()
            if any(FILLS.fullmatch(node.op) for node in function.node_def)
        )
        filling = callers(self._library, has_fill)
        found: dict[str, tuple[_Scope, Proto]] = {}
        pending = [self._top]
        for scope in pending:  # grows while it is walked
            for node in scope.body.nodes:
                if FILLS.fullmatch(node.op) and len(node.input) > 1:
                    table = self._behind(scope, node.input[0])
                    if table is not None and table[1].op in _STATIC:
                        found.setdefault(_identity(table[1]), (scope, node))
                elif filling and not filling.isdisjoint({node.op, *(each.name for each in called(node))}):
                    inner = self._enter(scope, node)
                    pending += [] if inner is None else [inner]
        return found


def _tensor(name: str, output: str) -> str:
    return f"{name}:{output}" if output else name


def _identity(table: Proto) -> str:
    return attr_text(table, "shared_name") or str(table.name)


def _is_whole(cast: Proto) -> bool:
    """True if a cast hands integers on as integers."""
    target = attr_dtype(cast, "DstT")
    return target in INTEGERS


def _is_for_negative(scope: _Scope, node: Proto) -> bool:
    """True for the sum in `where(x < 0, x + size, x)`, as Keras looks up x: no others are read."""
    readers = scope.within.readers.get(node.name, ()) if node.op in ("Add", "AddV2") else ()
    for _, select, position in readers:
        body, x = scope.body, node.input[0]
        less = body.producer(select.input[0])
        zero = const_value(body.producer(less.input[1])) if less is not None and less.op == "Less" else None
        is_such = (
            select.op in ("Select", "SelectV2") and position == 1 and zero is not None and not zero.any()
        )
        if less is None or not is_such or not less.input[0] == select.input[2] == x:
            return False
    return bool(readers)


def _is_output(body: Body, written: str, hands_on: _HandsOn) -> bool:
    """True if an output, as it is written behind a node's name, has the values that are handed on."""
    if hands_on.output is None:
        return True
    if body.function is None:
        return written == str(hands_on.output)
    return written.partition(":")[0] == hands_on.name
