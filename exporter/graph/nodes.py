"""The nodes of a graph: read, walk, make and rename them, without TensorFlow (`exporter.wire.protos`).

*Query* (`GraphIndex`): nodes by name, a tensor's dtype and shape, attributes. The dtypes of an operation's
outputs come from the OpDefs that every MetaGraphDef has (`meta_info_def.stripped_op_list`), and from the
signatures of the function library.

*Walk* (`reach`): all nodes that a set of nodes depends on, and the way back for error messages.

*Control edges* (`Pivots`). In a graph of Switch, Merge, Enter and Exit a node without data inputs (a
constant, a random number) is bound to its branch or loop by a control edge alone; every other node by its
inputs. So of all control edges just one for each node without data inputs matters, and it may come from any
node of the same branch or iteration: its *pivot*. All others only order side effects, which an inference
graph does not have. (Source: tensorflow/python/ops/control_flow_ops.py, `_AddOpInternal` of `CondContext` and
of `WhileContext`.)

*Make* (`new_node`): nodes with attributes from Python values, under free names.

*Bodies* (`Body`): one view of the nodes of a graph and of a function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
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

_REF = 100
"""DT_FLOAT_REF is DT_FLOAT + 100, and so on (source: tensorflow/core/framework/types.proto)."""

_TYPE_ATTRS = ("dtype", "T", "Tparams", "out_type", "output_type", "DstT", "SrcT")
_TYPE_LIST_ATTRS = ("Tout", "output_types", "component_types", "dtypes", "_output_types")


class Endpoint(NamedTuple):
    """One output of one node, written `node:output`; -1 stands for a control edge."""

    node: str
    output: int

    def __str__(self) -> str:
        return f"{self.node}:{self.output}"

    @property
    def as_input(self) -> str:
        """The text by which a NodeDef names it: output 0 is the bare node name."""
        return str(self) if self.output else self.node


@lru_cache(maxsize=1 << 17)
def endpoint(text: str) -> Endpoint:
    """`conv/Relu:1`, `conv/Relu` or a control input `^conv/Relu` as a value."""
    if text.startswith("^"):
        return Endpoint(text[1:], -1)
    name, colon, index = text.rpartition(":")
    if colon and index.isdecimal():
        return Endpoint(name, int(index))
    return Endpoint(text, 0)


def data_inputs(node: Proto) -> list[Endpoint]:
    """The tensors a node reads, in order."""
    return [endpoint(text) for text in node.input if not text.startswith("^")]


def control_inputs(node: Proto) -> list[str]:
    """The nodes that a node waits for without reading them."""
    return [text[1:] for text in node.input if text.startswith("^")]


def base_dtype(number: int) -> DType:
    """The type of a tensor, also if a node outputs a reference to it."""
    try:
        return DType(number - _REF if number > _REF else number)
    except ValueError:
        raise GraphError(f"the graph uses data type number {number}, which is unknown") from None


@cache
def _absent() -> Proto:
    return protos.AttrValue()


def attr(node: Proto, name: str) -> Proto:
    """An attribute's AttrValue, for reading; an empty one if the node lacks the attribute."""
    return node.attr.get(name) or _absent()  # reading a map field by [] would insert the key


def attr_dtype(node: Proto, name: str) -> DType | None:
    """A type attribute."""
    number = attr(node, name).type
    return base_dtype(number) if number else None


def attr_text(node: Proto, name: str) -> str:
    """A string attribute, "" if absent."""
    return str(attr(node, name).s.decode("utf-8", "replace"))


def attr_shape(node: Proto, name: str = "shape") -> tuple[int, ...] | None:
    """A shape attribute as `shape_of` gives it, None if absent."""
    value = attr(node, name)
    return shape_of(value.shape) if value.HasField("shape") else None


def shape_of(shape: Proto) -> tuple[int, ...] | None:
    """A TensorShapeProto as a tuple with -1 for unknown lengths, None for an unknown rank."""
    return None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)


def shape_proto(shape: tuple[int, ...] | None) -> Proto:
    """The TensorShapeProto of a shape as `shape_of` gives it."""
    proto = protos.TensorShapeProto(unknown_rank=shape is None)
    for size in shape or ():
        proto.dim.add(size=size)
    return proto


def const_value(node: Proto | None) -> np.ndarray | None:
    """The value of a Const; None for any other node, and if it is damaged or too large when filled."""
    if node is None or node.op != "Const":
        return None
    try:
        return to_array(attr(node, "value").tensor, _MAX_FILLED_BYTES)
    except ValueError:
        return None


def const_texts(node: Proto | None) -> list[str] | None:
    """The strings of a Const, None for anything else."""
    value = const_value(node)
    if value is None or value.dtype != object:
        return None
    return [text.decode("utf-8", "surrogateescape") for text in value.ravel()]


def through_identities(nodes: Mapping[str, Proto], name: str) -> str:
    """The node behind Identity nodes; a node that is not an Identity itself."""
    for _ in range(_MAX_IDENTITIES):
        node = nodes.get(name)
        if node is None or node.op != "Identity" or not node.input:
            break
        name = endpoint(node.input[0]).node
    return name


_MAX_IDENTITIES = 32
_MAX_FILLED_BYTES = 8 << 20
_MAX_OUTPUTS = 1 << 20


class GraphIndex:
    """A GraphDef with its nodes by name; the answers are computed once.

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
        """The index of a MetaGraphDef, with the OpDefs that it carries."""
        return cls(meta_graph.graph_def, meta_graph.meta_info_def.stripped_op_list.op)

    @cached_property
    def consumers(self) -> dict[str, list[tuple[str, int]]]:
        """For each node the readers of its outputs, as (consumer, position among the consumer's inputs)."""
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for position, source in enumerate(data_inputs(node)):
                if source.node in readers:
                    readers[source.node].append((node.name, position))
        return readers

    def resolve(self, text: str, role: str) -> Endpoint:
        """The tensor that a user named; a bare operation name means its output 0."""
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
        """Tensor names like `text`; names that contain its last component come first."""
        import difflib

        name = endpoint(text).node
        leaf = name.rpartition("/")[2].lower()
        holding = [known for known in self.nodes if leaf and leaf in known.lower()]
        holding.sort(key=lambda known: abs(len(known) - len(name)))
        similar = difflib.get_close_matches(name, list(self.nodes), n=count, cutoff=0.6)
        return [f"{known}:0" for known in [*dict.fromkeys([*similar, *holding])][:count]]

    def op_def(self, op: str) -> Proto | None:
        """The graph's own description of an operation, or a function's signature."""
        return self._op_defs.get(op)

    def output_dtypes(self, node: Proto) -> list[DType] | None:
        """The types of a node's outputs, None if neither OpDefs nor attributes give them."""
        op_def = self._op_defs.get(node.op)
        if op_def is None:
            return _guessed_dtypes(node)
        found: list[DType] = []
        for argument in op_def.output_arg:
            found += _argument_dtypes(node, op_def, argument)
        return found

    def dtype(self, tensor: Endpoint) -> DType:
        """A tensor's element type."""
        dtypes = self.output_dtypes(self.nodes[tensor.node])
        if dtypes is None or tensor.output >= len(dtypes):
            op = self.nodes[tensor.node].op
            raise GraphError(
                f"the type of {tensor} is unknown",
                cause=f"the MetaGraph does not describe the operation {op}",
            )
        return dtypes[tensor.output]

    def shape(self, tensor: Endpoint) -> tuple[int, ...] | None:
        """A tensor's shape with -1 for unknown lengths; None if its rank is unknown."""
        node = self.nodes[tensor.node]
        recorded = attr(node, "_output_shapes" if "_output_shapes" in node.attr else "output_shapes")
        if tensor.output < len(recorded.list.shape):
            return shape_of(recorded.list.shape[tensor.output])
        return attr_shape(node) if tensor.output == 0 else None


def _argument_dtypes(node: Proto, op_def: Proto, argument: Proto) -> list[DType]:
    """The types of one output argument: one, `number_attr` equal ones, or a list of them."""
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
    """An attribute, or its default: a MetaGraph may be written without attributes of default values."""
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
    """The names `start` and all that are reached from them by `following`, nearest first."""
    found = dict.fromkeys(start)
    pending = deque(found)
    while pending:
        for item in following(pending.popleft()):
            if item not in found:
                found[item] = None
                pending.append(item)
    return found


class Reached(Struct, frozen=True):
    """The needed nodes, nearest to the outputs first; `inputs` has theirs without needless control edges.

    `toward_output` leads from each node one step back to a node that needs it.
    """

    inputs: Mapping[str, tuple[str, ...]]
    toward_output: Mapping[str, str | None]

    def path(self, name: str) -> str:
        """The path from an output to a node, for an error message; a long one is cut in the middle."""
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
    """All nodes that the nodes `roots` need. `replaced` maps tensors to those to read instead.

    The search stops at the tensors `given`.
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
            needed = [_redirected(text, replaced) for text in needed]
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
    """Every node that runs for some tensors, including those that are only waited for, nearest first.

    The search stops at the tensors `given`; names that the graph lacks are skipped.
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


def _redirected(text: str, replaced: Mapping[Endpoint, Endpoint]) -> str:
    target = replaced.get(endpoint(text))
    return text if target is None else target.as_input


def check_acyclic(nodes: Mapping[str, Proto], reached: Reached) -> None:
    """Refuse a graph whose data flow has a cycle outside of TF1 loops, which TensorFlow could not run."""
    waits_for = {name: forward_sources(nodes, name, texts) for name, texts in reached.inputs.items()}
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        cycle = [*reversed(error.args[1])]  # it leads from a node to its readers, and ends where it begins
        shown = [*cycle[:_SHOWN_AT_EACH_END], "..."] if len(cycle) > 2 * _SHOWN_AT_EACH_END + 1 else cycle
        raise GraphError(
            f"the graph has a cycle outside of any loop: {' <- '.join(shown)}",
            hint="write the .meta again from the training program",
        ) from None


def forward_sources(nodes: Mapping[str, Proto], name: str, inputs: Iterable[str]) -> set[str]:
    """The nodes that a node waits for, without the edge from NextIteration to Merge that closes a loop."""
    sources = {endpoint(text).node for text in inputs}
    if nodes[name].op in MERGES:
        return {source for source in sources if nodes[source].op not in NEXT_ITERATIONS}
    return sources


def waited_for(nodes: Mapping[str, Proto], names: Iterable[str]) -> list[str]:
    """These nodes, each NoOp (which groups others) replaced by the nodes that it waits for."""
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
_MAX_NESTED = 64
_FRAME_BOUND = ENTERS | NEXT_ITERATIONS | {"LoopCond"}


class Pivots:
    """Finds pivots in one graph, and remembers nodes that lie outside of all control flow."""

    def __init__(self, nodes: Mapping[str, Proto]) -> None:
        self._nodes = nodes
        self._outside: set[str] = set()
        self._is_plain = not any(node.op in SWITCHES or node.op in ENTERS for node in nodes.values())

    def needed_inputs(self, node: Proto) -> list[str]:
        """A node's inputs without the control edges that do not affect its outputs."""
        data = [text for text in node.input if not text.startswith("^")]
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
        """Nodes that run exactly when and where `node` does."""
        if node.op in EXITS:
            return self._before_loop(node)
        if node.op in MERGES:
            return self._before_branch(node, depth)
        return [source.node for source in data_inputs(node)] or control_inputs(node)

    def _before_loop(self, node: Proto) -> list[str]:
        """From an Exit through Switch and Merge to the nodes that the loop's Enter reads."""
        for _ in range(4):
            sources = data_inputs(node)
            if not sources or sources[0].node not in self._nodes:
                return []
            if node.op in ENTERS:
                return [sources[0].node]
            node = self._nodes[sources[0].node]
        return []

    def _before_branch(self, merge: Proto, depth: int) -> list[str]:
        """From the Merge that ends a conditional to the nodes that its Switch reads."""
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
    """A NodeDef; `after` names nodes that it waits for.

    An attribute is a `DType` or a tuple of them, a shape (a tuple of numbers, -1 or None where unknown), a
    bool, an int, bytes, a `TensorProto`, or the name of a function, as a str.
    """
    node = protos.NodeDef(name=name, op=op, device=device)
    node.input.extend([*inputs, *(f"^{other}" for other in after)])
    for key, value in attrs.items():
        _set_attr(node.attr[key], value)
    return node


def constant(name: str, value: np.ndarray[Any, Any], dtype: DType) -> Proto:
    """A Const node."""
    tensor = protos.TensorProto()
    fill(tensor, value)
    tensor.dtype = int(dtype)  # numpy knows no quantised types
    return new_node(name, "Const", dtype=dtype, value=tensor)


def free_name(taken: Collection[str], wish: str) -> str:
    """`wish`, with a number appended if a node has that name already."""
    name, number = wish, 0
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name


def put_nodes(field: Any, nodes: Iterable[Proto]) -> None:
    """Replace all nodes of a graph (its `node`) or a function (its `node_def`); `nodes` may be its own."""
    kept = [*nodes]
    del field[:]
    field.extend(kept)


def _set_attr(attr: Proto, value: Any) -> None:
    match value:
        case DType():
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
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "While": 0,
    "StatelessWhile": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}
"""Ops that call functions, with the number of inputs before the functions' arguments."""


class Body:
    """The nodes of a graph or of a function, with the two ways in which they name tensors.

    A GraphDef says `node` or `node:1`; a FunctionDef `node:output argument:0`, and an argument's bare name.
    """

    def __init__(self, nodes: Proto, function: Proto | None = None) -> None:
        self.nodes = nodes
        self.function = function
        self.by_name: dict[str, Proto] = {node.name: node for node in nodes}

    @classmethod
    def of(cls, function: Proto) -> Body:
        """The body of a FunctionDef."""
        return cls(function.node_def, function)

    def producer(self, reference: str) -> Proto | None:
        """The node that makes a tensor; None for a function's argument."""
        if self.function is not None and ":" not in reference:
            return None
        return self.by_name.get(reference.partition(":")[0])

    def results(self) -> Iterator[str]:
        """Tensors that a function returns."""
        return iter(self.function.ret.values() if self.function is not None else ())

    def canonical(self, reference: str) -> str:
        """One name for a tensor that has two (`node` and `node:0` in a graph)."""
        return reference if self.function is not None or ":" in reference else f"{reference}:0"

    def output(self, node: Proto, index: int) -> str:
        """The name of output `index` of a node that forwards a tensor or loops."""
        if self.function is None:
            return f"{node.name}:{index}"
        if node.op == "Switch":
            return f"{node.name}:{('output_false', 'output_true')[index]}:0"
        return f"{node.name}:output:{index}"

    def single(self, node: Proto, argument: str) -> str:
        """The name of the only output of a node, called `argument` in its op's definition."""
        return str(node.name) if self.function is None else f"{node.name}:{argument}:0"

    def add(self, name: str, op: str, *inputs: str, device: str = "", **attrs: Any) -> Proto:
        """Add a new node under this name, or under a free one like it; attributes as for `new_node`."""
        return self.put(new_node(free_name(self.by_name, name), op, inputs, device=device, **attrs))

    def put(self, node: Proto) -> Proto:
        """Add a node whose name is free; returns the body's own copy."""
        self.nodes.append(node)
        self.by_name[node.name] = self.nodes[-1]
        return self.nodes[-1]


def bodies(graph_def: Proto) -> Iterator[Body]:
    """The graph, then each of its functions."""
    yield Body(graph_def.node)
    yield from map(Body.of, graph_def.library.function)


def input_names(node: Proto) -> list[str]:
    """The tensors that a node takes, as it names them; control inputs come after them."""
    return [reference for reference in node.input if not reference.startswith("^")]


def called(node: Proto) -> Iterator[Proto]:
    """The functions that a node's attributes name, as messages whose `name` may be set."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        else:
            yield from value.list.func
