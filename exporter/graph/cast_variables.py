"""Store a variable as bfloat16 or float16 and compute with it in the graph's own dtype.

A `ReadVariableOp` or `ResourceGather` of such a variable yields the stored dtype, and a `Cast` takes its
name, so nothing that consumes it changes. Gathers cast only the gathered rows. Handles are followed through
forwarding nodes and into functions, of which specialised copies are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count

from msgspec import Struct

from exporter.errors import MappingError
from exporter.graph.nodes import CALLS, LOOPS, Body, called, input_names
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_READS = {"ReadVariableOp": "value", "ResourceGather": "output", "ResourceGatherNd": "output"}
_INDIFFERENT = {"VariableShape", "VarIsInitializedOp", "DisableCopyOnRead"}
_FORWARDS = {"Identity": 1, "Enter": 1, "Switch": 2}


class _Cast(Struct, frozen=True):
    """A variable's handle: the variable node (for messages), the dtype the graph wants, the dtype stored."""

    variable: str
    wanted: DType
    stored: DType


def cast_variables(graph_def: Proto, stored: Mapping[str, DType]) -> None:
    """Change `graph_def` so that the variables in `stored` (VarHandleOp name -> dtype) have that dtype.

    Variables that have it already stay as they are.

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
        _rewrite(Body(graph_def.node), handles, library)


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
            _rewrite(Body.of(copy), {arguments[i].name: cast for i, cast in casts.items()}, self)
            self.functions[copy.signature.name] = self.proto.function.add()
            self.functions[copy.signature.name].CopyFrom(copy)
        return self.copies[key]

    def _free_name(self, name: str) -> str:
        taken = self.functions.keys() | set(self.copies.values())
        return next(new for n in range(len(taken) + 1) if (new := f"{name}_cast_{n}") not in taken)


def _rewrite(body: Body, handles: dict[str, _Cast], library: _Library) -> None:
    _follow_handles(body, handles)
    for node in list(body.nodes):
        inputs = map(body.canonical, input_names(node))
        casts = {i: handles[tensor] for i, tensor in enumerate(inputs) if tensor in handles}
        if not casts or node.op in _INDIFFERENT or node.op in _FORWARDS:
            continue
        if node.op in _READS:
            _cast_read(body, node, casts[0])
        elif node.op in CALLS:
            _cast_call(node, casts, library)
        else:
            raise _refusal(next(iter(casts.values())), node)
    if body.function is not None:
        _refuse_returned_handles(body.function, handles)


def _follow_handles(body: Body, handles: dict[str, _Cast]) -> None:
    """Add to `handles` every tensor that forwards one of them."""
    found = True
    while found:
        found = False
        for node in body.nodes:
            for output, source in _forwarded(body, node):
                if source in handles and output not in handles:
                    handles[output] = handles[source]
                    found = True


def _forwarded(body: Body, node: Proto) -> Iterator[tuple[str, str]]:
    """Pairs (output, input) of tensors that are the same handle before and after `node`."""
    if node.op in _FORWARDS:
        for index in range(_FORWARDS[node.op]):
            yield body.output(node, index), body.canonical(node.input[0])
    elif node.op in LOOPS:
        for index, reference in enumerate(input_names(node)):
            yield body.output(node, index), body.canonical(reference)


def _cast_read(body: Body, node: Proto, cast: _Cast) -> None:
    """Let `node` yield the stored dtype under a new name, and give its old name to a Cast."""
    output_name, output = node.name, _READS[node.op]
    del body.by_name[output_name]
    node.name = next(new for n in count() if (new := f"{output_name}/stored_{n}") not in body.by_name)
    body.by_name[node.name] = node
    node.attr["dtype"].type = int(cast.stored)
    stored = body.single(node, output)
    body.add(output_name, "Cast", stored, device=node.device, SrcT=cast.stored, DstT=cast.wanted)
    if body.function is not None:
        _rename_output(body.function, f"{output_name}:{output}:", f"{output_name}:y:")


def _rename_output(function: Proto, before: str, after: str) -> None:
    """Rename an output in a function's body and results; a graph's inputs do not name outputs."""
    for consumer in function.node_def:
        for position, reference in enumerate(consumer.input):
            if reference.startswith(before):
                consumer.input[position] = after + reference.removeprefix(before)
    for name, reference in dict(function.ret).items():
        if reference.startswith(before):
            function.ret[name] = after + reference.removeprefix(before)


def _cast_call(node: Proto, casts: dict[int, _Cast], library: _Library) -> None:
    before = CALLS[node.op]
    arguments = {index - before: cast for index, cast in casts.items()}
    for function in called(node):
        if function.name not in library.functions:
            raise _refusal(next(iter(casts.values())), node)
        function.name = library.specialise(function.name, arguments)


def _refuse_returned_handles(function: Proto, handles: dict[str, _Cast]) -> None:
    """Refuse a function that returns a handle, except a loop's body that returns its argument in place."""
    signature = function.signature
    arguments = [argument.name for argument in signature.input_arg]
    for index, result in enumerate(signature.output_arg):
        cast = handles.get(function.ret[result.name])
        if cast and (index >= len(arguments) or handles.get(arguments[index]) != cast):
            raise MappingError(
                f"variable {cast.variable!r} cannot be cast: function {signature.name!r} returns its handle",
                hint="leave that variable out of --cast",
            )


def _refusal(cast: _Cast, node: Proto) -> MappingError:
    return MappingError(
        f"variable {cast.variable!r} cannot be cast to {cast.stored.label}: "
        f"node {node.name!r} ({node.op}) takes its handle",
        cause="only reads, gathers and calls of functions of the same graph can be changed to another dtype",
        hint="leave that variable out of --cast",
    )
