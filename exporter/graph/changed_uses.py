"""Change how a graph uses some of its variables: rewrite every node that takes their handles.

Handles are followed through forwarding nodes and into functions, of which specialised copies are made. A
change may need other handles beside the variable's own: they are passed the same way, as further inputs of
the nodes and functions on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Protocol

import numpy as np
from msgspec import Struct

from exporter.errors import ExportError, NotServable
from exporter.graph.nodes import (
    CALLS,
    LOOPS,
    Body,
    attr,
    attr_dtype,
    called,
    constant,
    free_name,
    input_names,
)
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

INDIFFERENT = frozenset({"VariableShape", "VarIsInitializedOp", "DisableCopyOnRead"})
"""Operations that take a handle without reading the values."""

# Operations that forward a handle, with the number of outputs.
_FORWARDS = {"Identity": 1, "Enter": 1, "Switch": 2}


class UseChange(Protocol):
    """A change of every use of one variable; hashable, as functions are copied once for equal changes."""

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """The VarHandleOps of further variables whose handles the changed nodes take."""

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Change, in place, a node of `body` that takes the variable's handle.

        `extra_handles` are the tensors in this body with the further handles, in the order of the property.
        Raises `refusal` for a node that cannot be changed.
        """

    def refusal(self, node: Proto) -> ExportError:
        """Return the error to raise for a node that takes the handle and cannot be changed."""

    def returned(self, function: str) -> ExportError:
        """Return the error to raise for a function, by name, that returns the handle."""


class RowReads(Struct, frozen=True):
    """The errors of a change of gathers of rows: other nodes that take or return the handle are refused."""

    def refusal(self, node: Proto) -> ExportError:
        """Return the NotServable that names a node which takes the handle and cannot be changed."""
        return NotServable(f"{node.op} {node.name!r} takes it")

    def returned(self, function: str) -> ExportError:
        """Return the NotServable that names a function which returns the handle."""
        return NotServable(f"function {function!r} returns it")


# A change, and the tensors of its further handles in the same body.
_Here = tuple[UseChange, tuple[str, ...]]


def change_uses(graph_def: Proto, changes: Mapping[str, UseChange]) -> None:
    """Change, in place, all uses of variables in a graph, and in copies of the functions that it calls.

    `changes` is {VarHandleOp: its change}; names that the graph lacks are ignored. Raises the error that a
    change returns as `refusal` or `returned`, which names the use that cannot be changed. The graph may then
    be changed in part.
    """
    if changes:
        handles = {f"{node}:0": (change, change.extra_handles) for node, change in changes.items()}
        _rewrite(Body(graph_def.node), handles, _Library(graph_def.library))


class _Library:
    """The graph's functions, and their specialised copies."""

    def __init__(self, proto: Proto) -> None:
        self._proto = proto
        self._copies: dict[tuple[str, tuple[tuple[int, UseChange], ...], bool], str] = {}
        self.functions = {function.signature.name: function for function in proto.function}

    def specialise(self, name: str, changes: Mapping[int, UseChange], *, passes_on: bool) -> str:
        """Add a copy of a function in which `changes` (by argument number) are made, and return its name.

        Equal changes share a copy. Handles of further variables that the changes need (`extra_handles`) are
        its last arguments and, with `passes_on` (for a loop's body), its last results. Raises a change's
        `refusal` or `returned` if a use cannot be changed.
        """
        key = (name, tuple(changes.items()), passes_on)
        if key not in self._copies:
            copy = deepcopy(self.functions[name])
            taken = self.functions.keys() | set(self._copies.values())
            copy.signature.name = self._copies[key] = next(
                new for n in range(len(taken) + 1) if (new := f"{name}_cast_{n}") not in taken
            )
            _rewrite(Body.of(copy), _arguments(copy, changes, passes_on=passes_on), self)
            self.functions[copy.signature.name] = self._proto.function.add()
            self.functions[copy.signature.name].CopyFrom(copy)
        return self._copies[key]


def _arguments(function: Proto, changes: Mapping[int, UseChange], *, passes_on: bool) -> dict[str, _Here]:
    """Return {argument of a function: (its change, the arguments with the further handles)}.

    `changes` are by the argument's number. An argument is added to the function, in place, for each further
    handle that a change needs; with `passes_on` also a result, which returns it.
    """
    signature = function.signature
    owners = [argument.name for argument in signature.input_arg]
    results = {result.name for result in signature.output_arg}
    names = {*owners, *(node.name for node in function.node_def)}
    handles = {}
    for number, change in changes.items():
        extra = []
        for _ in change.extra_handles:
            name = free_name(names, f"{owners[number]}_beside")
            names.add(name)
            extra.append(name)
            signature.input_arg.add(name=name, type=int(DType.RESOURCE))
            if passes_on:
                result = free_name(results, name)
                results.add(result)
                signature.output_arg.add(name=result, type=int(DType.RESOURCE))
                function.ret[result] = name
        handles[owners[number]] = (change, tuple(extra))
    return handles


def _rewrite(body: Body, handles: dict[str, _Here], library: _Library) -> None:
    """Change, in place, every node of a body that takes one of the handles, or a tensor that forwards one.

    `handles` is {tensor: (its change, the tensors with the further handles)}; forwarding tensors are added to
    it. Raises the change's `refusal` for a node that cannot be changed, and `returned` if a function returns
    a handle.
    """
    _follow(body, handles)
    for node in list(body.nodes):
        inputs = map(body.canonical, input_names(node))
        here = {index: handles[tensor] for index, tensor in enumerate(inputs) if tensor in handles}
        if not here or node.op in _FORWARDS:
            continue
        if node.op in CALLS:
            _change_call(body, node, here, library)
            continue
        index, (change, extra) = next(iter(here.items()))
        if index:  # every operation that reads a variable takes its handle first
            raise change.refusal(node)
        change.apply(body, node, extra)
    if body.function is not None:
        _refuse_returned(body.function, handles)


def _follow(body: Body, handles: dict[str, _Here]) -> None:
    """Add to `handles` every tensor that forwards one of them, with its change.

    For further handles, twins of the forwarding nodes are added to the body. Raises the change's `refusal` if
    a loop returns a handle whose change needs further handles, and a node or result uses the returned one.
    """
    found = True
    while found:
        found = False
        for node in list(body.nodes):
            for output, source in _forwarded(body, node):
                if source not in handles or output in handles:
                    continue
                change, extra = handles[source]
                if extra and node.op in LOOPS:
                    taken = (body.canonical(text) for other in body.nodes for text in input_names(other))
                    if output in taken or output in body.results():
                        raise change.refusal(node)
                    continue  # nothing takes it
                if extra:
                    outputs = [body.output(node, index) for index in range(_FORWARDS[node.op])]
                    twins = [_twin(body, node, handle) for handle in extra]
                    for index, each in enumerate(outputs):
                        handles[each] = change, tuple(body.output(twin, index) for twin in twins)
                else:
                    handles[output] = change, ()
                found = True


def _forwarded(body: Body, node: Proto) -> Iterator[tuple[str, str]]:
    """Yield (output, input) for each output of a node that forwards the handle in an input.

    An output is a tensor's name in `body`. Yields nothing for operations that forward no handle.
    """
    if node.op in _FORWARDS:
        for index in range(_FORWARDS[node.op]):
            yield body.output(node, index), body.canonical(node.input[0])
    elif node.op in LOOPS:
        for index, reference in enumerate(input_names(node)):
            yield body.output(node, index), body.canonical(reference)


def _twin(body: Body, node: Proto, handle: str) -> Proto:
    """Add a copy of `node` that forwards `handle` instead, in the same frame or branch; return the copy."""
    twin = deepcopy(node)
    twin.name = free_name(body.by_name, f"{node.name}_beside")
    twin.input[0] = handle
    return body.put(twin)


def _change_call(body: Body, node: Proto, here: Mapping[int, _Here], library: _Library) -> None:
    """Let a call use copies of its functions in which the uses of handles are changed, with further handles.

    `here` is {position among the call's inputs: (the handle's change, the tensors with the further handles)}.
    Raises a change's `refusal` for a function that the graph lacks, for one that XLA compiles if it needs
    further handles, and for uses in a function that cannot be changed, or `returned`.
    """
    before = CALLS[node.op]
    changes = {index - before: change for index, (change, _) in here.items()}
    for function in called(node):
        if function.name not in library.functions:
            raise next(iter(changes.values())).refusal(node)
        # XLA has no kernels for the operations of overlays.
        is_compiled = any(attr(n, "_XlaMustCompile").b for n in (node, library.functions[function.name]))
        if is_compiled and any(change.extra_handles for change in changes.values()):
            raise next(iter(changes.values())).refusal(node)
        passes_on = node.op in LOOPS and function.name == node.attr["body"].func.name
        function.name = library.specialise(function.name, changes, passes_on=passes_on)
    further = [handle for _, extra in here.values() for handle in extra]
    if further:
        count = len(input_names(node))
        node.input[:] = [*node.input[:count], *further, *node.input[count:]]
        types = node.attr["T" if node.op in LOOPS else "Tin"].list.type
        types.extend([int(DType.RESOURCE)] * len(further))
        shapes = node.attr["output_shapes"].list.shape if node.op in LOOPS else ()
        if shapes:
            shapes.extend(message_class("TensorShapeProto")() for _ in further)


def _refuse_returned(function: Proto, handles: Mapping[str, _Here]) -> None:
    """Raise the `returned` error of a change if a function returns a handle in `handles`.

    `handles` is {tensor: (its change, the tensors with the further handles)}. A result may return the handle
    of the argument with the same number, as a loop's body does.
    """
    signature = function.signature
    arguments = [argument.name for argument in signature.input_arg]
    for index, result in enumerate(signature.output_arg):
        found = handles.get(function.ret[result.name])
        if found and (index >= len(arguments) or handles.get(arguments[index]) != found):
            raise found[0].returned(signature.name)


def become_shape(body: Body, node: Proto, shape: tuple[int, ...]) -> None:
    """Turn a VariableShape node of `body`, in place, into a constant with the value `shape`.

    `shape` is the variable's shape in the graph, from which that of the stored variable may differ.
    GraphError if the node has an unknown type number.
    """
    handle = body.producer(node.input[0])
    out_type = attr_dtype(node, "out_type") or DType.INT32
    known = constant(node.name, np.array(shape, out_type.numpy), out_type)
    known.device = node.device
    if handle is not None:  # in a loop of Enter and Exit a constant belongs to the frame of its control input
        known.input.append(f"^{handle.name}")
    known.input.extend(text for text in node.input if text.startswith("^"))
    node.CopyFrom(known)


def rename_output(function: Proto, before: str, after: str) -> None:
    """Rename an output in a function, in place, where other nodes and results read it.

    `before` and `after` are the beginnings of its references, `node:output:`.
    """
    for consumer in function.node_def:
        for position, reference in enumerate(consumer.input):
            if reference.startswith(before):
                consumer.input[position] = after + reference.removeprefix(before)
    for name, reference in dict(function.ret).items():
        if reference.startswith(before):
            function.ret[name] = after + reference.removeprefix(before)
