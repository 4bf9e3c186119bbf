"""Store a variable as bfloat16 or float16 and compute with it in the graph's own dtype.

A `ReadVariableOp` or `ResourceGather` of such a variable yields the stored dtype, and a `Cast` takes its
name, so nothing that consumes it changes. Gathers cast only the gathered rows. Handles are followed through
forwarding nodes and into functions, of which specialised copies are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

from msgspec import Struct

from exporter.errors import MappingError
from exporter.graph.function_ops import CALLS, LOOPS
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_READS = {"ReadVariableOp": "value", "ResourceGather": "output", "ResourceGatherNd": "output"}
_INDIFFERENT = {"VariableShape", "VarIsInitializedOp", "DisableCopyOnRead"}
_FORWARDS = {"Identity": ("output",), "Enter": ("output",), "Switch": ("output_false", "output_true")}


class _Cast(Struct, frozen=True):
    """A variable's handle: the variable node (for messages), the dtype the graph wants, the dtype stored."""

    variable: str
    wanted: DType
    stored: DType


def cast_variables(graph_def: Proto, stored: Mapping[str, DType]) -> None:
    """Change `graph_def` so that the variables in `stored` (VarHandleOp name -> dtype) have that dtype.

    Those that have it already are left alone.

    Raises:
        MappingError: a handle reaches a node that cannot be served in another dtype, such as an assignment.
    """
    handles = {}
    for node in graph_def.node:
        wanted = DType(node.attr["dtype"].type) if node.op == "VarHandleOp" else None
        if wanted is not None and wanted != stored.get(node.name, wanted):
            handles[f"{node.name}:0"] = _Cast(node.name, wanted, stored[node.name])
            node.attr["dtype"].type = int(stored[node.name])
    if handles:
        library = _Library(graph_def.library)
        _rewrite(_GraphBody(graph_def.node), handles, library)


class _GraphBody(Struct):
    """Nodes of a GraphDef: tensors are called `node:index`, `node` for index 0."""

    nodes: Proto

    def tensor(self, reference: str) -> str:
        return reference if ":" in reference else f"{reference}:0"

    def output(self, node: str, argument: str, index: int) -> str:
        return f"{node}:{index}"

    def rename_output(self, node: str, old: str, new: str) -> None:
        """Do nothing: references do not name output arguments."""


class _FunctionBody(Struct):
    """Nodes of a FunctionDef: tensors are called `node:output argument:index in it`, arguments by name."""

    function: Proto

    @property
    def nodes(self) -> Proto:
        return self.function.node_def

    def tensor(self, reference: str) -> str:
        return reference

    def output(self, node: str, argument: str, index: int) -> str:
        flat_index = 0 if argument.startswith("output_") else index
        return f"{node}:{argument}:{flat_index}"

    def rename_output(self, node: str, old: str, new: str) -> None:
        before, after = f"{node}:{old}:", f"{node}:{new}:"
        for consumer in self.nodes:
            for position, reference in enumerate(consumer.input):
                if reference.startswith(before):
                    consumer.input[position] = after + reference.removeprefix(before)
        for name, reference in dict(self.function.ret).items():
            if reference.startswith(before):
                self.function.ret[name] = after + reference.removeprefix(before)


_Body = _GraphBody | _FunctionBody


class _Library:
    """The graph's functions, and the specialised copies made so far."""

    def __init__(self, proto: Proto) -> None:
        self.proto = proto
        self.copies: dict[tuple[str, tuple[tuple[int, _Cast], ...]], str] = {}
        self.functions = {function.signature.name: function for function in proto.function}

    def specialise(self, name: str, casts: dict[int, _Cast]) -> str:
        """A copy of function `name` whose handle arguments, by index, are cast."""
        key = (name, tuple(sorted(casts.items())))
        if key not in self.copies:
            copy = deepcopy(self.functions[name])
            copy.signature.name = self.copies[key] = self._free_name(name)
            arguments = copy.signature.input_arg
            _rewrite(_FunctionBody(copy), {arguments[i].name: cast for i, cast in casts.items()}, self)
            self.functions[copy.signature.name] = self.proto.function.add()
            self.functions[copy.signature.name].CopyFrom(copy)
        return self.copies[key]

    def _free_name(self, name: str) -> str:
        taken = self.functions.keys() | set(self.copies.values())
        return next(new for n in range(len(taken) + 1) if (new := f"{name}_cast_{n}") not in taken)


def _rewrite(body: _Body, handles: dict[str, _Cast], library: _Library) -> None:
    _follow_handles(body, handles)
    names = {node.name for node in body.nodes}
    for node in list(body.nodes):
        inputs = ((i, body.tensor(reference)) for i, reference in _data_inputs(node))
        casts = {i: handles[tensor] for i, tensor in inputs if tensor in handles}
        if not casts or node.op in _INDIFFERENT or node.op in _FORWARDS:
            continue
        if node.op in _READS:
            _cast_read(body, node, casts[0], names)
        elif node.op in CALLS:
            _cast_call(node, casts, library)
        else:
            raise _refusal(next(iter(casts.values())), node)
    if isinstance(body, _FunctionBody):
        _refuse_returned_handles(body, handles)


def _follow_handles(body: _Body, handles: dict[str, _Cast]) -> None:
    """Add to `handles` every tensor that forwards one of them."""
    found = True
    while found:
        found = False
        for node in body.nodes:
            for output, source in _forwarded(body, node):
                if source in handles and output not in handles:
                    handles[output] = handles[source]
                    found = True


def _forwarded(body: _Body, node: Proto) -> Iterator[tuple[str, str]]:
    """Pairs (output, input) of tensors that are the same handle before and after `node`."""
    if node.op in _FORWARDS:
        for index, argument in enumerate(_FORWARDS[node.op]):
            yield body.output(node.name, argument, index), body.tensor(node.input[0])
    elif node.op in LOOPS:
        for index, reference in _data_inputs(node):
            yield body.output(node.name, "output", index), body.tensor(reference)


def _cast_read(body: _Body, node: Proto, cast: _Cast, names: set[str]) -> None:
    """Let `node` yield the stored dtype under a new name, and a Cast take its old one."""
    output_name = node.name
    node.name = next(new for n in range(len(names) + 1) if (new := f"{output_name}/stored_{n}") not in names)
    names.add(node.name)
    node.attr["dtype"].type = int(cast.stored)
    converted = body.nodes.add(name=output_name, op="Cast", device=node.device)
    stored = node.name if isinstance(body, _GraphBody) else f"{node.name}:{_READS[node.op]}:0"
    converted.input.append(stored)
    converted.attr["SrcT"].type = int(cast.stored)
    converted.attr["DstT"].type = int(cast.wanted)
    body.rename_output(output_name, _READS[node.op], "y")


def _cast_call(node: Proto, casts: dict[int, _Cast], library: _Library) -> None:
    before = CALLS[node.op]
    arguments = {index - before: cast for index, cast in casts.items()}
    for attr in node.attr.values():
        functions = [attr.func] if attr.WhichOneof("value") == "func" else attr.list.func
        for function in functions:
            if function.name not in library.functions:
                raise _refusal(next(iter(casts.values())), node)
            function.name = library.specialise(function.name, arguments)


def _refuse_returned_handles(body: _FunctionBody, handles: dict[str, _Cast]) -> None:
    """Only a loop's body may return a handle, and only the one it was given in that place."""
    signature = body.function.signature
    arguments = [argument.name for argument in signature.input_arg]
    for index, result in enumerate(signature.output_arg):
        cast = handles.get(body.function.ret[result.name])
        if cast and (index >= len(arguments) or handles.get(arguments[index]) != cast):
            raise MappingError(
                f"variable {cast.variable!r} cannot be cast: function {signature.name!r} returns its handle",
                hint="leave that variable out of --cast",
            )


def _data_inputs(node: Proto) -> Iterator[tuple[int, str]]:
    return ((i, reference) for i, reference in enumerate(node.input) if not reference.startswith("^"))


def _refusal(cast: _Cast, node: Proto) -> MappingError:
    return MappingError(
        f"variable {cast.variable!r} cannot be cast to {cast.stored.label}: "
        f"node {node.name!r} ({node.op}) takes its handle",
        cause="only reads, gathers and calls of functions of the same graph can be changed to another dtype",
        hint="leave that variable out of --cast",
    )
