"""Find where a signature's inputs are looked up: in a vocabulary (a file or a constant) or a table by keys.

Calls are replaced by the nodes of the called functions. The values of an input are then followed forward,
through operations that keep or rearrange them, to the lookups. From a lookup its table is followed back to
the node that makes it, and on to the node that fills it. Arithmetic, branches and loops are not followed.

The graph may be of any version that a server loads, and need not be one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from exporter.graph.called_bodies import PLAIN_CALLS
from exporter.graph.lookup_tables import FILLS, FINDS, FROM_FILE
from exporter.graph.nodes import (
    GraphIndex,
    attr,
    attr_text,
    closure,
    const_value,
    endpoint,
    input_names,
    node_of,
)
from exporter.graph.saved_model import asset_files
from exporter.tables.lookup import JOINED, SIZE, TABLE
from exporter.wire.protos import Proto

WHOLE_LINE = -2
"""The column of a file whose whole lines are keys. Source: tensorflow/core/kernels/lookup_util.cc."""


class FromFile(Struct, frozen=True):
    """A vocabulary in an asset of the version; its keys are column `column`, from 0 on, or `WHOLE_LINE`."""

    asset: str
    column: int
    delimiter: str


class Listed(Struct, frozen=True):
    """A vocabulary in the graph: its first keys (at most `_MOST_KEYS`), strings as bytes."""

    keys: tuple[object, ...]


class ByKeys(Struct, frozen=True):
    """A table by keys, by its name."""

    table: str


Lookup = FromFile | Listed | ByKeys

_HANDS_ON = frozenset(
    {
        *("Cast", "EnsureShape", "ExpandDims", "Identity", "PlaceholderWithDefault", "Reshape", "Squeeze"),
        *("ConcatV2", "GatherNd", "Pack", "Slice", "Split", "SplitV", "StridedSlice", "Unpack"),
        *("RegexReplace", "StaticRegexReplace", "StringLower", "StringSplit", "StringSplitV2", "StringStrip"),
        *("Unique", "UniqueV2"),
    }
)
_SAME = frozenset({"Identity", "Enter"})

_MOST_NODES = 1 << 18  # later ones are left out: nested calls can multiply the nodes without limit
_MOST_STEPS = 64  # from a lookup back to its table; a damaged graph may have a circle
_MOST_KEYS = 1 << 10  # of a vocabulary in the graph: an example needs only a few


def fed_lookups(meta_graph: Proto, signature: Proto) -> dict[str, tuple[Lookup, ...]]:
    """Return {input of a signature: its lookups, nearest first} for all inputs that are plain tensors.

    An input's key is its alias. An input that is not looked up has an empty tuple.

    Raises:
        GraphError: nodes of the graph have no name, no operation, or the same name.
        CorruptFile: its list of assets is damaged.
    """
    graph = _Graph(meta_graph)
    return {
        key: graph.lookups(endpoint(info.name).node)
        for key, info in sorted(signature.inputs.items())
        if info.WhichOneof("encoding") == "name"
    }


class _Node(Struct):
    """A node, or an Identity for an argument or a result of a call."""

    op: str
    inputs: list[str]
    proto: Proto


class _Graph:
    """A graph with functions expanded at their calls, in which inputs can be followed."""

    def __init__(self, meta_graph: Proto) -> None:
        self._nodes = _inlined(meta_graph)
        self._assets = dict(asset_files(meta_graph))
        self._readers: dict[str, list[str]] = {}
        self._fills: dict[str, _Node] = {}
        for name, node in self._nodes.items():
            for source in dict.fromkeys(node.inputs):
                self._readers.setdefault(source, []).append(name)
            if FILLS.fullmatch(node.op) and (table := self._table(node)) is not None:
                self._fills.setdefault(table, node)

    def lookups(self, name: str) -> tuple[Lookup, ...]:
        """Return the lookups that the values of the node `name` reach, each once, nearest first."""
        handed_on = closure(
            [name], lambda n: (each for each in self._readers.get(n, ()) if self._nodes[each].op in _HANDS_ON)
        )
        readers = (reader for each in handed_on for reader in self._readers.get(each, ()))
        found = (self._by_keys(reader) or self._vocabulary(self._nodes[reader]) for reader in readers)
        return tuple(dict.fromkeys(lookup for lookup in found if lookup is not None))

    def _by_keys(self, reader: str) -> ByKeys | None:
        """Return the table by keys in which the node `reader` looks keys up; None if it is another node.

        Such a reader is the node of a joined lookup, or the node `key` of a lookup in separate nodes.
        """
        node = self._nodes[reader].proto
        if JOINED in node.attr:
            return ByKeys(attr_text(node, TABLE))
        scope, _, last = reader.rpartition("/")
        sized = self._nodes.get(f"{scope}/group_shift") if last == "key" else None
        return (
            ByKeys(attr_text(sized.proto, TABLE)) if sized is not None and SIZE in sized.proto.attr else None
        )

    def _vocabulary(self, find: _Node) -> Lookup | None:
        """Return the vocabulary in which a node looks keys up: a file, or the first 1,024 keys in the graph.

        None if the node is not a lookup, or the keys are not known.
        """
        table = self._table(find) if find.op in FINDS else None
        fill = self._fills.get(table) if table is not None else None
        name = None if fill is None else self._behind(fill.inputs[1])
        if fill is None or name is None:
            return None
        if FROM_FILE.fullmatch(fill.op):
            asset = self._assets.get(name)
            column, delimiter = attr(fill.proto, "key_index").i, attr_text(fill.proto, "delimiter")
            return None if asset is None else FromFile(asset, column, delimiter or "\t")
        keys = const_value(self._nodes[name].proto)
        return None if keys is None else Listed(tuple(keys.ravel()[:_MOST_KEYS].tolist()))

    def _table(self, node: _Node) -> str | None:
        """Return the name of the lookup table that a node fills or finds keys in; None if it is not known."""
        name = self._behind(node.inputs[0]) if len(node.inputs) > 1 else None
        return None if name is None else attr_text(self._nodes[name].proto, "shared_name") or name

    def _behind(self, name: str) -> str | None:
        """Return the name of the node behind Identity and Enter nodes; None if it is not within 64 steps."""
        for _ in range(_MOST_STEPS):
            node = self._nodes.get(name)
            if node is None or node.op not in _SAME or not node.inputs:
                return None if node is None else name
            name = node.inputs[0]
        return None


def _inlined(meta_graph: Proto) -> dict[str, _Node]:
    """Return a graph's nodes by name, and a copy of a called function's nodes for each call, under a prefix.

    Functions' arguments and results are Identity nodes. Calls are not expanded any more once there are more
    than 262,144 nodes. GraphError if nodes' names are missing or not unique.
    """
    functions = GraphIndex.of(meta_graph).functions
    found: dict[str, _Node] = {}
    pending = [("", meta_graph.graph_def.node)]
    for prefix, nodes in pending:  # grows while it is walked
        if len(found) > _MOST_NODES:
            break
        callees = {n.name: attr(n, "f").func.name if n.op in PLAIN_CALLS else n.op for n in nodes}
        called = {name: functions[callee] for name, callee in callees.items() if callee in functions}
        inner = {name: f"{len(pending) + number}::" for number, name in enumerate(called)}
        for node in nodes:
            inputs = [_source(text, prefix, inner) for text in input_names(node)]
            found[prefix + node.name] = _Node(node.op, inputs, node)
        for name, function in called.items():
            call, own = found[prefix + name], inner[name]
            pending.append((own, function.node_def))
            for argument, source in zip(function.signature.input_arg, call.inputs, strict=False):
                found[own + argument.name] = _Node("Identity", [source], call.proto)
            for number, result in enumerate(function.signature.output_arg):
                made = own + node_of(function.ret.get(result.name, ""))
                found[f"{own}:{number}"] = _Node("Identity", [made], call.proto)
    return found


def _source(text: str, prefix: str, inner: Mapping[str, str]) -> str:
    name = node_of(text)
    return f"{inner[name]}:{endpoint(text).output}" if name in inner else prefix + name
