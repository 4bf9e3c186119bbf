"""Store a variable as bfloat16 or float16 and compute with it in the graph's own dtype.

A `ReadVariableOp` or `ResourceGather` of such a variable yields the stored dtype, and a `Cast` takes its
name, so nothing that consumes it changes. Gathers cast only the gathered rows. Handles are followed through
forwarding nodes and into functions, of which specialised copies are made.

A table in int8 has scales behind its codes (`exporter.wire.int8_codes`): a gather yields rows of both, which
are split, and multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count

import numpy as np
from msgspec import Struct

from exporter.errors import MappingError
from exporter.graph.nodes import (
    CALLS,
    LOOPS,
    Body,
    attr,
    attr_dtype,
    attr_shape,
    called,
    constant,
    free_name,
    input_names,
)
from exporter.wire.dtypes import DType
from exporter.wire.int8_codes import SCALE_BYTES
from exporter.wire.protos import Proto

_READS = {"ReadVariableOp": "value", "ResourceGather": "output", "ResourceGatherNd": "output"}
_INDIFFERENT = {"VariableShape", "VarIsInitializedOp", "DisableCopyOnRead"}
_FORWARDS = {"Identity": 1, "Enter": 1, "Switch": 2}


class _Cast(Struct, frozen=True):
    """A variable's handle: the variable node (for messages), the dtype the graph wants, the dtype stored."""

    variable: str
    wanted: DType
    stored: DType
    shape: tuple[int, ...] = ()

    @property
    def is_in_8_bits(self) -> bool:
        """True if it is stored as codes and scales, in another shape than the graph's."""
        return self.stored is DType.INT8


_NO_CAST = _Cast("", DType.FLOAT, DType.FLOAT)


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
            cast = _Cast(node.name, wanted, stored[node.name], attr_shape(node) or ())
            handles[f"{node.name}:0"] = cast
            node.attr["dtype"].type = int(cast.stored)
            if cast.is_in_8_bits:
                node.attr["shape"].shape.dim[-1].size += SCALE_BYTES
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
        if casts and casts.get(0, _NO_CAST).is_in_8_bits and node.op == "VariableShape":
            _become_shape(body, node, casts[0].shape)
            continue
        if not casts or node.op in _INDIFFERENT or node.op in _FORWARDS:
            continue
        if casts.get(0, _NO_CAST).is_in_8_bits and node.op in _READS:
            _multiply_rows(body, node, casts[0])
        elif node.op in _READS:
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


def _become_shape(body: Body, node: Proto, shape: tuple[int, ...]) -> None:
    """Turn a read of the shape into the shape that the graph knows; its only output has the same name."""
    handle = body.producer(node.input[0])
    out_type = attr_dtype(node, "out_type") or DType.INT32
    known = constant(node.name, np.array(shape, out_type.numpy), out_type)
    known.device = node.device
    if handle is not None:  # in a loop of Enter and Exit a constant belongs to the frame of what it waits for
        known.input.append(f"^{handle.name}")
    known.input.extend(text for text in node.input if text.startswith("^"))
    node.CopyFrom(known)


def _multiply_rows(body: Body, node: Proto, cast: _Cast) -> None:
    """Let a gather yield codes and scales under a new name; their product takes its old name."""
    if node.op != "ResourceGather" or attr(node, "batch_dims").i or len(cast.shape) != 2:
        raise _refusal(cast, node)
    name, output, device = node.name, _READS[node.op], node.device
    del body.by_name[name]
    node.name = free_name(body.by_name, f"{name}/stored")
    body.by_name[node.name] = node
    node.attr["dtype"].type = int(DType.INT8)
    node.attr.pop("_output_shapes", None)
    sizes, axis = (
        body.put(constant(free_name(body.by_name, f"{name}/{what}"), np.array(value, np.int32), DType.INT32))
        for what, value in (("sizes", [cast.shape[-1], SCALE_BYTES]), ("axis", -1))
    )
    for known in (sizes, axis):  # in the frame of the gather, if it is in a loop of Enter and Exit
        known.input.append(f"^{node.name}")
    inputs = [body.single(node, output), body.single(sizes, "output"), body.single(axis, "output")]
    parts = body.add(
        f"{name}/parts", "SplitV", *inputs, device=device, T=DType.INT8, Tlen=DType.INT32, num_split=2
    )
    codes, bits = (body.output(parts, number) for number in range(2))
    scale = body.add(f"{name}/scale", "Bitcast", bits, device=device, T=DType.INT8, type=DType.FLOAT)
    column = body.add(
        f"{name}/column",
        "ExpandDims",
        body.single(scale, "output"),
        body.single(axis, "output"),
        device=device,
        T=DType.FLOAT,
        Tdim=DType.INT32,
    )
    values = body.add(f"{name}/codes", "Cast", codes, device=device, SrcT=DType.INT8, DstT=DType.FLOAT)
    factors = body.single(values, "y"), body.single(column, "output")
    if cast.wanted is DType.FLOAT:
        body.add(name, "Mul", *factors, device=device, T=DType.FLOAT)
        last = "z"
    else:
        product = body.add(f"{name}/rows", "Mul", *factors, device=device, T=DType.FLOAT)
        body.add(name, "Cast", body.single(product, "z"), device=device, SrcT=DType.FLOAT, DstT=cast.wanted)
        last = "y"
    if body.function is not None:
        _rename_output(body.function, f"{name}:{output}:", f"{name}:{last}:")


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
