"""The nodes of a graph: read, walk, make and rename them, without TensorFlow (`exporter.wire.protos`).

*Control edges* (`Pivots`). In a graph of Switch, Merge, Enter and Exit a node without data inputs (a
constant, a random number) belongs to its branch or loop only by a control edge; every other node by its
inputs. So only one control edge matters for each node without data inputs, and it may come from any node of
the same branch or iteration: its *pivot*. All others only order side effects, which an inference graph does
not have. (Source: tensorflow/python/ops/control_flow_ops.py, `_AddOpInternal` of `CondContext` and of
`WhileContext`.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct

from exporter.errors import GraphError, UnknownTensor
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill, to_array

# In the order in which they are tried: a Cast has SrcT and DstT, and its output has DstT.
_TYPE_ATTRS = ("dtype", "T", "Tparams", "out_type", "output_type", "DstT", "SrcT")
_TYPE_LIST_ATTRS = ("Tout", "output_types", "component_types", "dtypes", "_output_types")


class Endpoint(NamedTuple):
    """One output of one node, written `node:output`; output -1 is a control edge."""

    node: str
    output: int

    def __str__(self) -> str:
        return f"{self.node}:{self.output}"

    @property
    def as_input(self) -> str:
        """Return the name as a data input of a NodeDef: `node:output`, or only the node for output 0."""
        return str(self) if self.output else self.node


@lru_cache(maxsize=1 << 17)  # walks parse the same inputs again; graphs have some ten thousand of them
def endpoint(text: str) -> Endpoint:
    """Return the tensor that an input of a GraphDef's node names: `conv/Relu:1`, or `conv/Relu` for output 0.

    A control input, `^conv/Relu`, gives output -1.
    """
    if text.startswith("^"):
        return Endpoint(text[1:], -1)
    name, colon, index = text.rpartition(":")
    if colon and index.isdecimal():
        return Endpoint(name, int(index))
    return Endpoint(text, 0)


def node_of(text: str) -> str:
    """Return the name of the node or function argument in an input of a GraphDef or FunctionDef."""
    return text.removeprefix("^").partition(":")[0]


def input_names(node: Proto) -> list[str]:
    """Return the texts of a node's data inputs, in order; control inputs are left out."""
    return [text for text in node.input if not text.startswith("^")]


def data_inputs(node: Proto) -> list[Endpoint]:
    """Return the tensors that a node of a GraphDef reads, in order."""
    return [endpoint(text) for text in node.input if not text.startswith("^")]


def control_inputs(node: Proto) -> list[str]:
    """Return the names of the nodes that a node waits for by control edges, in order."""
    return [text[1:] for text in node.input if text.startswith("^")]


def readers_of(nodes: Iterable[Proto], *, waiting: bool = False) -> dict[str, list[Proto]]:
    """Return {name of a node or argument: the nodes that read it, once for each use}.

    Only names with readers are keys. With `waiting`, nodes that wait by a control edge count, too.
    """
    readers: dict[str, list[Proto]] = {}
    for node in nodes:
        for text in node.input if waiting else input_names(node):
            readers.setdefault(node_of(text), []).append(node)
    return readers


def base_dtype(number: int) -> DType:
    """Return the DType for a number in a graph; for a reference, the dtype that it refers to.

    GraphError if the number is unknown.
    """
    try:
        return DType(number)
    except ValueError:
        raise GraphError(f"the graph uses data type number {number}, which is unknown") from None


@cache
def _absent() -> Proto:
    return protos.AttrValue()


def attr(node: Proto, name: str) -> Proto:
    """Return the AttrValue of an attribute, only for reading.

    A shared empty one if the node lacks the attribute.
    """
    return node.attr.get(name) or _absent()  # reading a map field by [] would insert the key


def attr_dtype(node: Proto, name: str) -> DType | None:
    """Return the DType in a type attribute, None if the node lacks it.

    GraphError for an unknown type number.
    """
    number = attr(node, name).type
    return base_dtype(number) if number else None


def attr_text(node: Proto, name: str) -> str:
    """Return a string attribute, "" if the node lacks it; bytes that are not UTF-8 become U+FFFD."""
    return str(attr(node, name).s.decode("utf-8", "replace"))


def attr_shape(node: Proto, name: str = "shape") -> tuple[int, ...] | None:
    """Return a shape attribute, with -1 for unknown lengths; None if it is absent or of unknown rank."""
    value = attr(node, name)
    return shape_of(value.shape) if value.HasField("shape") else None


def shape_of(shape: Proto) -> tuple[int, ...] | None:
    """Return a TensorShapeProto as a tuple, with -1 for unknown lengths; None for an unknown rank."""
    return None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)


def shape_proto(shape: tuple[int, ...] | None) -> Proto:
    """Return the TensorShapeProto of a shape; -1 is an unknown length, None an unknown rank."""
    proto = protos.TensorShapeProto(unknown_rank=shape is None)
    for size in shape or ():
        proto.dim.add(size=size)
    return proto


def const_value(node: Proto | None) -> np.ndarray | None:
    """Return the value of a Const as an array; a Const of strings has bytes in it.

    None for any other node or None, for a value that is damaged or cannot be an array, and if more than 8 MiB
    of it are not stored but only filled in.
    """
    if node is None or node.op != "Const":
        return None
    try:
        return to_array(attr(node, "value").tensor, _MAX_FILLED_BYTES)
    except (TypeError, ValueError):
        return None


def const_texts(node: Proto | None) -> list[str] | None:
    """Return the strings of a Const of strings, flattened.

    None for any other node, and for a damaged value. Bytes that are not UTF-8 become surrogates.
    """
    value = const_value(node)
    if value is None or value.dtype != object:
        return None
    return [text.decode("utf-8", "surrogateescape") for text in value.ravel()]


_PASSES_ON = frozenset({"Identity"})


def through_identities(nodes: Mapping[str, Proto], text: str, ops: Collection[str] = _PASSES_ON) -> str:
    """Return the name of the node or argument whose value `text` has, behind operations that forward it.

    First inputs are followed back through the operations `ops`, at most 32 times. A name that `nodes` lacks
    ends the search.
    """
    name = node_of(text)
    for _ in range(_MAX_IDENTITIES):  # a damaged graph may have a cycle of them
        node = nodes.get(name)
        if node is None or node.op not in ops or not node.input:
            break
        name = node_of(node.input[0])
    return name


def tensor_behind(
    nodes: Mapping[str, Proto], tensor: Endpoint, ops: Collection[str] = _PASSES_ON
) -> Endpoint:
    """Return the tensor that a GraphDef's tensor gets its value from, behind operations that forward it.

    First inputs are followed back through the operations `ops`, at most 32 times. A node that `nodes` lacks
    ends the search.
    """
    for _ in range(_MAX_IDENTITIES):
        node = nodes.get(tensor.node)
        if node is None or node.op not in ops or not data_inputs(node):
            break
        tensor = data_inputs(node)[0]
    return tensor


_MAX_IDENTITIES = 32
_MAX_FILLED_BYTES = 8 << 20  # a few bytes of a Const may fill any shape: see `wire.tensor_proto`
_MAX_OUTPUTS = 1 << 20  # an attribute of a damaged graph could claim as many as memory holds


class GraphIndex:
    """A GraphDef with its nodes by name, and the OpDefs that give outputs their dtypes.

    Raises:
        GraphError: two nodes of one name, or a node without a name or an operation.
    """

    def __init__(self, graph_def: Proto, op_defs: Iterable[Proto] = ()) -> None:
        self.graph_def = graph_def
        self.nodes: dict[str, Proto] = {}
        for node in graph_def.node:
            if node.name in self.nodes:
                raise GraphError(f"the graph has two nodes named {node.name!r}")
            if not node.name or not node.op:
                raise GraphError(
                    f"the graph has a node without a name or an operation: {node.name or node.op!r}"
                )
            self.nodes[node.name] = node
        self.functions: dict[str, Proto] = {f.signature.name: f for f in graph_def.library.function}
        self._op_defs = {op.name: op for op in op_defs} | {n: f.signature for n, f in self.functions.items()}

    @classmethod
    def of(cls, meta_graph: Proto) -> GraphIndex:
        """Index a MetaGraphDef's graph with the OpDefs in it.

        GraphError if two nodes have the same name, or a node has no name or no operation.
        """
        return cls(meta_graph.graph_def, meta_graph.meta_info_def.stripped_op_list.op)

    @cached_property
    def consumers(self) -> dict[str, list[tuple[str, int]]]:
        """Return {node: [(reader, position among its data inputs)]}, an entry for each use of its outputs.

        Nodes without readers have an empty list. It is memoised: later changes of the graph are not seen.
        """
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for position, source in enumerate(data_inputs(node)):
                if source.node in readers:
                    readers[source.node].append((node.name, position))
        return readers

    def resolve(self, text: str, role: str) -> Endpoint:
        """Return the tensor that a user named by `text` (output 0 if only a node is named).

        `role` begins the error's message. UnknownTensor if the graph does not have that tensor, or if `text`
        is a control input; GraphError if its node has an unknown type number.
        """
        found = endpoint(text)
        node = self.nodes.get(found.node)
        if node is None or found.output < 0:
            near = self.nearest(text.lstrip("^"))
            cause = "the nearest names are " + ", ".join(near) if near else "no name in the graph is like it"
            raise UnknownTensor(f"{role} names {text!r}, which the graph does not have", cause=cause)
        dtypes = self.output_dtypes(node)
        if dtypes is not None and found.output >= len(dtypes):
            raise UnknownTensor(
                f"{role} names {text!r}, but {node.op} {node.name!r} has {len(dtypes)} output(s)",
                cause="outputs are counted from 0; a node without outputs cannot be served",
            )
        return found

    def nearest(self, text: str, count: int = 5) -> list[str]:
        """Return at most `count` names of tensors (`node:0`) like `text`, similar ones first.

        Names that contain the last part of `text` come next, beginning with names of about the same length.
        """
        import difflib

        name = endpoint(text).node
        leaf = name.rpartition("/")[2].lower()
        holding = [known for known in self.nodes if leaf and leaf in known.lower()]
        holding.sort(key=lambda known: abs(len(known) - len(name)))
        similar = difflib.get_close_matches(name, list(self.nodes), n=count, cutoff=0.6)
        return [f"{known}:0" for known in [*dict.fromkeys([*similar, *holding])][:count]]

    def op_def(self, op: str) -> Proto | None:
        """Return the graph's OpDef of an operation, or the signature of a function of this name.

        None if neither exists.
        """
        return self._op_defs.get(op)

    def output_dtypes(self, node: Proto) -> list[DType] | None:
        """Return the dtypes of a node's outputs, in order; None if neither OpDefs nor attributes have them.

        GraphError for an unknown type number, or for more than 2^20 outputs.
        """
        op_def = self._op_defs.get(node.op)
        if op_def is None:
            return _guessed_dtypes(node)
        found: list[DType] = []
        for argument in op_def.output_arg:
            found += _argument_dtypes(node, op_def, argument)
        return found

    def dtype(self, tensor: Endpoint) -> DType:
        """Return the dtype of a tensor of a node in the graph.

        GraphError if the graph does not describe the operation, if that has fewer outputs, or if its type
        number is unknown. KeyError if the graph lacks the node.
        """
        dtypes = self.output_dtypes(self.nodes[tensor.node])
        if dtypes is None or tensor.output >= len(dtypes):
            op = self.nodes[tensor.node].op
            raise GraphError(
                f"the type of {tensor} is unknown",
                cause=f"the MetaGraph does not describe the operation {op}",
            )
        return dtypes[tensor.output]

    def shape(self, tensor: Endpoint) -> tuple[int, ...] | None:
        """Return the recorded shape of a tensor of a node in the graph, with -1 for unknown lengths.

        None if no shape, or an unknown rank, is recorded.
        """
        node = self.nodes[tensor.node]
        recorded = attr(node, "_output_shapes" if "_output_shapes" in node.attr else "output_shapes")
        if tensor.output < len(recorded.list.shape):
            return shape_of(recorded.list.shape[tensor.output])
        return attr_shape(node) if tensor.output == 0 else None


def _argument_dtypes(node: Proto, op_def: Proto, argument: Proto) -> list[DType]:
    """Return the dtypes of one output argument of a node: one, `number_attr` equal ones, or a whole list.

    Empty if the node and `op_def` lack the attributes. GraphError for an impossible number of outputs, or an
    unknown type number.
    """
    if argument.type_list_attr:
        types = _attr_or_default(node, op_def, argument.type_list_attr)
        return [base_dtype(number) for number in types.list.type] if types is not None else []
    count = 1
    if argument.number_attr:
        number = _attr_or_default(node, op_def, argument.number_attr)
        count = number.i if number is not None else 0
    if not 0 <= count <= _MAX_OUTPUTS:
        raise GraphError(f"{node.op} {node.name!r} claims {count} outputs")
    if argument.type:
        return [base_dtype(argument.type)] * count
    dtype = _attr_or_default(node, op_def, argument.type_attr)
    return [base_dtype(dtype.type)] * count if dtype is not None and dtype.type else []


def _attr_or_default(node: Proto, op_def: Proto, name: str) -> Proto | None:
    """Return an attribute of a node, or the default in its OpDef, which MetaGraphs may leave out.

    None if there is neither.
    """
    if name in node.attr:
        return attr(node, name)
    return next((a.default_value for a in op_def.attr if a.name == name), None)


def _guessed_dtypes(node: Proto) -> list[DType] | None:
    for name in _TYPE_LIST_ATTRS:
        types = attr(node, name)
        if types.list.type:
            return [base_dtype(number) for number in types.list.type]
    for name in _TYPE_ATTRS:
        dtype = attr_dtype(node, name)
        if dtype is not None:
            return [dtype]
    return None


_SHOWN_AT_EACH_END = 4

ItemT = TypeVar("ItemT", bound=Hashable)


def closure(start: Iterable[ItemT], following: Callable[[ItemT], Iterable[ItemT]]) -> dict[ItemT, None]:
    """Return `start` and all items that are reached by `following`, as keys, nearest first, each once.

    `following` returns the next items of an item.
    """
    found = dict.fromkeys(start)
    pending = deque(found)
    while pending:
        for item in following(pending.popleft()):
            if item not in found:
                found[item] = None
                pending.append(item)
    return found


class Reached(Struct, frozen=True):
    """The nodes that outputs need, nearest to the outputs first, as `reach` finds them."""

    inputs: Mapping[str, tuple[str, ...]]  # each node's inputs, without needless control edges
    toward_output: Mapping[str, str | None]  # for each node one that needs it; None where the search began

    def path(self, name: str) -> str:
        """Return the path from an output to a reached node, `output <- ... <- name`, for an error message.

        One of more than nine nodes is shortened in the middle. KeyError for a node that was not reached.
        """
        steps: list[str] = []
        current: str | None = name
        while current is not None:
            steps.append(current)
            current = self.toward_output[current]
        steps.reverse()
        if len(steps) > 2 * _SHOWN_AT_EACH_END + 1:
            steps = [*steps[:_SHOWN_AT_EACH_END], "...", *steps[-_SHOWN_AT_EACH_END:]]
        return " <- ".join(steps)


def reach(
    nodes: Mapping[str, Proto],
    roots: Iterable[str],
    replaced: Mapping[Endpoint, Endpoint] | None = None,
    given: Collection[Endpoint] = (),
) -> Reached:
    """Return all nodes that the nodes `roots` need for their values.

    Control edges count only where they bind a node to its branch or loop. Tensors are `replaced` by others
    first; the search does not go beyond the tensors `given`. GraphError if a node reads a tensor of a node
    that the graph does not have, or if conditionals are nested more than 64 deep. KeyError if the graph lacks
    a root.
    """
    pivots = Pivots(nodes)
    replaced = replaced or {}
    inputs: dict[str, tuple[str, ...]] = {}
    toward_output: dict[str, str | None] = dict.fromkeys(roots)
    pending = deque(toward_output)
    while pending:
        name = pending.popleft()
        needed = pivots.needed_inputs(nodes[name])
        if replaced:
            needed = [replaced[t].as_input if (t := endpoint(text)) in replaced else text for text in needed]
        inputs[name] = tuple(needed)
        for text in needed:
            tensor = endpoint(text)
            source = tensor.node
            if tensor in given:
                continue
            if source not in nodes:
                raise GraphError(
                    f"{nodes[name].op} {name!r} reads {text!r}, which the graph does not have",
                    cause="the graph is damaged, or was cut by hand",
                    hint="write the .meta again from the training program",
                )
            if source not in toward_output:
                toward_output[source] = name
                pending.append(source)
    return Reached(inputs, toward_output)


def all_before(
    nodes: Mapping[str, Proto], tensors: Iterable[Endpoint], given: Collection[Endpoint] = ()
) -> dict[str, None]:
    """Return the names of all nodes that run to compute some tensors, as keys, nearest first.

    Control edges are followed like data. The search stops at the tensors `given`; nodes that the graph lacks
    are left out.
    """
    found: dict[str, None] = {}
    pending = deque(tensors)
    while pending:
        tensor = pending.popleft()
        if tensor in given or tensor.node in found or tensor.node not in nodes:
            continue
        found[tensor.node] = None
        pending.extend(map(endpoint, nodes[tensor.node].input))
    return found


def check_acyclic(nodes: Mapping[str, Proto], reached: Reached) -> None:
    """Raise GraphError for a cycle among the reached nodes, outside of TF1 loops.

    TensorFlow could not run it.
    """
    waits_for = {name: forward_sources(nodes, name, texts) for name, texts in reached.inputs.items()}
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        cycle = [*reversed(error.args[1])]  # from a node to its readers; the last is the first again
        shown = [*cycle[:_SHOWN_AT_EACH_END], "..."] if len(cycle) > 2 * _SHOWN_AT_EACH_END + 1 else cycle
        raise GraphError(
            f"the graph has a cycle outside of any loop: {' <- '.join(shown)}",
            hint="write the .meta again from the training program",
        ) from None


def forward_sources(nodes: Mapping[str, Proto], name: str, inputs: Iterable[str]) -> set[str]:
    """Return the names of the nodes that make the tensors `inputs` of the node `name`.

    The NextIteration that closes a loop at a Merge is left out. KeyError if the graph lacks the node `name`,
    or one that a Merge reads.
    """
    sources = {endpoint(text).node for text in inputs}
    if nodes[name].op in MERGES:
        return {source for source in sources if nodes[source].op not in NEXT_ITERATIONS}
    return sources


def waited_for(nodes: Mapping[str, Proto], names: Iterable[str]) -> list[str]:
    """Return the names of nodes, with each NoOp (a group) replaced by the nodes that it waits for.

    Each is returned once, in any order. Names that the graph lacks are left out.
    """
    pending, found, seen = [*names], list[str](), set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        if nodes[name].op == "NoOp":
            pending += control_inputs(nodes[name])
        else:
            found.append(name)
    return found


SWITCHES = frozenset({"Switch", "RefSwitch", "_SwitchN"})
MERGES = frozenset({"Merge", "RefMerge"})
ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
NEXT_ITERATIONS = frozenset({"NextIteration", "RefNextIteration"})
CONTROL_FLOW = frozenset(
    {
        *("Switch", "Merge", "Enter", "Exit", "NextIteration"),
        *("RefSwitch", "RefMerge", "RefEnter", "RefExit", "RefNextIteration"),
    }
)
"""The operations of TensorFlow 1's branches and loops."""
_MAX_NESTED = 64  # conditionals, each followed by recursion: Python allows 1,000 nested calls
_FRAME_BOUND = ENTERS | NEXT_ITERATIONS | {"LoopCond"}


def has_control_flow(nodes: Mapping[str, Proto]) -> bool:
    """True if a graph or function has Switch or Enter, where control edges bind nodes to branches."""
    return any(node.op in SWITCHES or node.op in ENTERS for node in nodes.values())


class Pivots:
    """Finds pivots (see the module) in one graph, and remembers nodes outside of all control flow."""

    def __init__(self, nodes: Mapping[str, Proto]) -> None:
        self._nodes = nodes
        self._outside: set[str] = set()
        self._is_plain = not has_control_flow(nodes)

    def needed_inputs(self, node: Proto) -> list[str]:
        """Return the texts of a node's data inputs; without any, the control edge from its pivot, `^node`.

        The pivot is a node in the same branch or iteration. Empty if there is neither. GraphError if
        conditionals are nested more than 64 deep.
        """
        data = input_names(node)
        if data or self._is_plain:
            return data
        pivot = self._first_pivot(control_inputs(node))
        return [f"^{pivot}"] if pivot else []

    def _first_pivot(self, names: list[str], depth: int = 0) -> str | None:
        if depth > _MAX_NESTED:
            raise GraphError(f"the graph nests conditionals more than {_MAX_NESTED} deep, near {names[0]!r}")
        pending, seen = [*reversed(names)], set[str]()
        while pending:
            name = pending.pop()
            if name in seen or name in self._outside or name not in self._nodes:
                continue
            seen.add(name)
            node = self._nodes[name]
            if self._is_pivot(node):
                return name
            pending += reversed(self._same_context(node, depth))
        self._outside |= seen
        return None

    def _is_pivot(self, node: Proto) -> bool:
        if node.op in _FRAME_BOUND:
            return True
        ops = {self._op(source) for source in data_inputs(node)}
        if node.op in MERGES:
            return bool(ops & (ENTERS | NEXT_ITERATIONS))
        return node.op not in SWITCHES and node.op not in EXITS and bool(ops & SWITCHES)

    def _same_context(self, node: Proto, depth: int) -> list[str]:
        """Return the nodes to search next for the pivot of `node`.

        They are its sources in the same branch or iteration; for an Exit or a Merge, which end a loop or
        conditional, the nodes that enter it. `depth` counts nested conditionals; GraphError for more than 64.
        """
        if node.op in EXITS:
            return self._before_loop(node)
        if node.op in MERGES:
            return self._before_branch(node, depth)
        return [source.node for source in data_inputs(node)] or control_inputs(node)

    def _before_loop(self, node: Proto) -> list[str]:
        """Return the node that the loop's Enter reads, found from the Exit `node`.

        Empty if the loop is damaged.
        """
        for _ in range(4):  # Exit, Switch, Merge, Enter
            sources = data_inputs(node)
            if not sources or sources[0].node not in self._nodes:
                return []
            if node.op in ENTERS:
                return [sources[0].node]
            node = self._nodes[sources[0].node]
        return []

    def _before_branch(self, merge: Proto, depth: int) -> list[str]:
        """Return the nodes that a conditional's Switch reads, found from the Merge that ends it.

        Empty if it has no Switch. `depth` counts nested conditionals; GraphError for more than 64.
        """
        switch = next((s for s in data_inputs(merge) if self._op(s) in SWITCHES), None)
        if switch is None:
            branch_pivot = self._first_pivot([source.node for source in data_inputs(merge)], depth + 1)
            if branch_pivot is None:
                return []
            sources = data_inputs(self._nodes[branch_pivot])
            switch = next((s for s in sources if self._op(s) in SWITCHES), None)
        return [source.node for source in data_inputs(self._nodes[switch.node])] if switch else []

    def _op(self, source: Endpoint) -> str:
        node = self._nodes.get(source.node)
        return "" if node is None else str(node.op)


def new_node(
    name: str,
    op: str,
    inputs: Iterable[str] = (),
    *,
    after: Iterable[str] = (),
    device: str = "",
    **attrs: Any,
) -> Proto:
    """Return a new NodeDef with these data inputs, which waits for the nodes `after`.

    An attribute is a `DType` or a tuple of them, a shape (a tuple of numbers, -1 or None if unknown), a bool,
    an int, bytes, a `TensorProto`, or the name of a function, as a str. `device` names a device, "" any.
    """
    node = protos.NodeDef(name=name, op=op, device=device)
    node.input.extend([*inputs, *(f"^{other}" for other in after)])
    for key, value in attrs.items():
        _set_attr(node.attr[key], value)
    return node


def constant(name: str, value: np.ndarray[Any, Any], dtype: DType) -> Proto:
    """Return a new Const of a value, with this dtype, which may be a quantised one that numpy lacks.

    ValueError if TensorFlow has no type for the value's own dtype.
    """
    tensor = protos.TensorProto()
    fill(tensor, value)
    tensor.dtype = int(dtype)  # numpy knows no quantised types
    return new_node(name, "Const", dtype=dtype, value=tensor)


def free_name(taken: Collection[str], wish: str) -> str:
    """Return `wish`, or the first of `wish_1`, `wish_2` ... that is not in `taken`, which stays unchanged."""
    name, number = wish, 0
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name


def put_nodes(field: Any, nodes: Iterable[Proto]) -> None:
    """Replace all nodes of a graph (`field` is its `node`) or a function (its `node_def`).

    `nodes` may be its own.
    """
    kept = [*nodes]  # before the field is emptied: they may be views of it
    del field[:]
    field.extend(kept)


def drop_nodes(field: Any, gone: Collection[str]) -> None:
    """Remove the nodes named `gone`, and the edges from them, in place.

    `field` is the `node` of a graph or the `node_def` of a function.
    """
    for at in reversed(range(len(field))):  # from the end, so that removing the last nodes moves no others
        if field[at].name in gone:
            del field[at]
    for node in field:
        kept = [text for text in node.input if node_of(text) not in gone]
        if len(kept) < len(node.input):
            node.input[:] = kept


def drop_from_function(function: Proto, gone: Collection[str]) -> None:
    """Remove the nodes named `gone` from a function, in place.

    Edges from them, and control outputs that name them, are removed, too.
    """
    drop_nodes(function.node_def, gone)
    for output in [output for output, node in function.control_ret.items() if node in gone]:
        del function.control_ret[output]
    outputs = [output for output in function.signature.control_output if output in function.control_ret]
    function.signature.control_output[:] = outputs


def _set_attr(attr: Proto, value: Any) -> None:
    match value:
        case DType():  # before int, because an IntEnum is an int; so is a bool
            attr.type = int(value)
        case bool():
            attr.b = value
        case int():
            attr.i = value
        case bytes():
            attr.s = value
        case str():
            attr.func.name = value
        case (DType(), *_):
            attr.list.type.extend(map(int, value))
        case tuple():
            attr.shape.SetInParent()
            for size in value:
                attr.shape.dim.add(size=-1 if size is None else size)
        case _:
            attr.tensor.CopyFrom(value)


LOOPS = {"While", "StatelessWhile"}
CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall", *LOOPS), 0),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1),
}
"""The operations that call functions, with the number of inputs before the functions' arguments."""


class Body:
    """The nodes of a graph or of a function, with the two ways in which they name tensors.

    A GraphDef names them `node` or `node:1`; a FunctionDef `node:output argument:0`, or an argument's bare
    name.
    """

    def __init__(self, nodes: Proto, function: Proto | None = None) -> None:
        self.nodes = nodes
        self.function = function
        self.by_name: dict[str, Proto] = {node.name: node for node in nodes}

    @property
    def name(self) -> str:
        """Return the function's name, "" for a graph."""
        return "" if self.function is None else str(self.function.signature.name)

    @classmethod
    def of(cls, function: Proto) -> Body:
        """Return a FunctionDef's body; changes are made in the FunctionDef."""
        return cls(function.node_def, function)

    def producer(self, reference: str) -> Proto | None:
        """Return the node that makes a tensor.

        None for a function's argument, or if there is no such node.
        """
        is_argument = self.function is not None and ":" not in reference
        return None if is_argument else self.by_name.get(node_of(reference))

    def results(self) -> Iterator[str]:
        """Return an iterator over the names of the tensors that a function returns; empty for a graph."""
        return iter(self.function.ret.values() if self.function is not None else ())

    def canonical(self, reference: str) -> str:
        """Return a tensor's canonical name: in a graph `node:0`, also for `node`.

        In a function a tensor has only one name, which is returned.
        """
        return reference if self.function is not None or ":" in reference else f"{reference}:0"

    def output(self, node: Proto, index: int) -> str:
        """Return the name of output `index` of an Identity, a Switch, a Merge or a loop."""
        if self.function is None:
            return f"{node.name}:{index}"
        if node.op == "Switch":
            return f"{node.name}:{('output_false', 'output_true')[index]}:0"
        return f"{node.name}:output:{index}"

    def single(self, node: Proto, argument: str) -> str:
        """Return the name of a node's only output, named `argument` in its OpDef."""
        return str(node.name) if self.function is None else f"{node.name}:{argument}:0"

    def add(self, name: str, op: str, *inputs: str, device: str = "", **attrs: Any) -> Proto:
        """Add a node under `name`, or a free name like it, and return it.

        `inputs` are tensors by the names used in this body; attributes are as for `new_node`.
        """
        return self.put(new_node(free_name(self.by_name, name), op, inputs, device=device, **attrs))

    def rename(self, node: Proto, name: str) -> None:
        """Rename a node; the new name must be free. Readers keep the old name, which becomes free."""
        del self.by_name[node.name]
        node.name = name
        self.by_name[name] = node

    def constant_beside(
        self, node: Proto, wish: str, value: int | Sequence[int], dtype: DType = DType.INT32
    ) -> str:
        """Add a constant that waits for `node`, and return the name of its output.

        The constant is named `wish`, or has a free name like it.
        """
        name = free_name(self.by_name, wish)
        made = self.put(constant(name, np.array(value, dtype.numpy), dtype))
        made.input.append(f"^{node.name}")  # in a loop of Enter and Exit it then belongs to the node's frame
        return self.single(made, "output")

    def put(self, node: Proto) -> Proto:
        """Add a node whose name is free; returns the body's own copy, the only one to change further."""
        self.nodes.append(node)
        self.by_name[node.name] = self.nodes[-1]
        return self.nodes[-1]


VECTORS = "_vectors"
"""The attribute of nodes of ours that make vectors, all their outputs."""

_VECTORS = {"Unique": "y", "UniqueWithCounts": "y", "Range": "output"}
"""{operation: its output that is a vector}."""
_BY_ELEMENT = frozenset(
    {
        *("Identity", "Cast", "StringToHashBucketFast", "StringToNumber"),
        *("Add", "AddV2", "Sub", "Mul", "FloorDiv", "FloorMod", "Maximum", "Minimum"),
    }
)


def makes_vector(body: Body, reference: str, named: Collection[str], depth: int = 12) -> bool:
    """True if a tensor is one-dimensional whatever the inputs of the graph are, as a result of `Unique` is.

    `reference` names the tensor. False also if this is not known. Shapes that the graph only declares do not
    count: nothing checks them for values that a client sends. A client may send the value of any node that
    signatures name (`named`), also of one that another signature computes. At most `depth` operations are
    followed back.
    """

    def unless_sent(text: str) -> Proto | None:
        found = body.producer(text)
        is_sent = found is not None and body.function is None and found.name in named
        return None if is_sent else found

    node = unless_sent(reference)
    if node is None or depth == 0:
        return False
    if attr(node, VECTORS).b:
        return True
    sources = input_names(node)
    if node.op == "Reshape":
        shape = const_value(unless_sent(sources[1])) if len(sources) == 2 else None
        return shape is not None and shape.shape == (1,)
    if node.op == "DynamicPartition":
        return all(makes_vector(body, source, named, depth - 1) for source in sources)
    if node.op in _BY_ELEMENT:
        constants = [const_value(unless_sent(source)) for source in sources]
        others = [source for source, value in zip(sources, constants, strict=True) if value is None]
        are_few = all(value is None or value.ndim < 2 for value in constants)
        are_vectors = (makes_vector(body, source, named, depth - 1) for source in others)
        return bool(others) and are_few and all(are_vectors)
    return node.op in _VECTORS and reference.partition(":")[2] in ("", "0", f"{_VECTORS[node.op]}:0")


def bodies(graph_def: Proto) -> Iterator[Body]:
    """Yield the body of the graph, then the body of each function, in the library's order.

    A change of a body changes the graph.
    """
    yield Body(graph_def.node)
    yield from map(Body.of, graph_def.library.function)


def called(node: Proto) -> Iterator[Proto]:
    """Yield the functions that a node's attributes name, in any order; their `name` may be set."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        else:
            yield from value.list.func
