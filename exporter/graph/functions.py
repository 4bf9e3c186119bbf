"""Prune the function library: keep functions that the graph calls, and in each what its results need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

from exporter.errors import GraphError
from exporter.graph.bodies import CALLS
from exporter.graph.constant_tables import constant_fills, fill_before_use
from exporter.graph.control_flow import ENTERS, SWITCHES
from exporter.graph.new_nodes import put_nodes
from exporter.graph.reach import closure
from exporter.graph.resource_variables import gather_rows
from exporter.graph.servable import called_functions, changes_state, check_body, check_reads
from exporter.wire import protos
from exporter.wire.protos import Proto

_ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_CALLEES = ("f", "then_branch", "else_branch", "cond", "body")


def reachable(nodes: Iterable[Proto], library: Mapping[str, Proto]) -> set[str]:
    """The functions that `nodes` call, directly or through others.

    Raises:
        GraphError: a call of a function that the library lacks.
    """
    return {*closure(_callees(nodes, library), lambda name: _callees(library[name].node_def, library))}


def _callees(nodes: Iterable[Proto], library: Mapping[str, Proto]) -> Iterator[str]:
    """The functions of the library that nodes call directly."""
    for node in nodes:
        _check_callees(node, library)
        yield from (name for name in called_functions(node) if name in library)


def _check_callees(node: Proto, library: Mapping[str, Proto]) -> None:
    for key in _CALLEES if node.op in CALLS else ():
        name = node.attr[key].func.name if key in node.attr else ""
        if name and name not in library:
            raise GraphError(
                f"{node.op} {node.name!r} calls function {name!r}, which the graph does not have",
                cause="the graph is damaged, or was cut by hand",
            )


def mutating(library: Mapping[str, Proto]) -> set[str]:
    """The functions that write a variable or a table, themselves or through others.

    To fill a table of its own with constants does not count.
    """
    found = set[str]()
    for name, function in library.items():
        changing = [node.name for node in function.node_def if changes_state(node.op)]
        if changing and not constant_fills({n.name: n for n in function.node_def}).keys() >= {*changing}:
            found.add(name)
    return callers(library, found)


def callers(library: Mapping[str, Proto], called: Iterable[str]) -> set[str]:
    """These functions, and those that call one of them, directly or through others."""
    found = {*called}
    if not found:
        return found
    calling: dict[str, set[str]] = {name: set() for name in library}
    for name, function in library.items():
        for node in function.node_def:
            for callee in called_functions(node) & library.keys():
                calling[callee].add(name)
    return {*closure(found, calling.__getitem__)}


def served_library(
    library: Mapping[str, Proto], inference: Iterable[Proto], initialisers: Iterable[Proto]
) -> Proto:
    """The FunctionDefLibrary that the graph needs; bodies that initialisers call lose assignments alone.

    Raises:
        NotServable: a body reads a variable after changing it.
        GraphError: a function or a node of a body is missing.
    """
    if not library:
        return protos.FunctionDefLibrary()
    for_init = reachable(initialisers, library)
    served = protos.FunctionDefLibrary()
    changing = mutating(library)
    for_inference = _prune_reachable(inference, library, changing, for_init)
    for name in library:
        if name in for_inference:
            served.function.append(for_inference[name])
        elif name in for_init:
            served.function.append(_without_assignments(without_placement(library[name])))
    return served


def _prune_reachable(
    nodes: Iterable[Proto], library: Mapping[str, Proto], changing: set[str], keep_whole: set[str]
) -> dict[str, Proto]:
    """Pruned bodies may call less than whole ones: walk and prune in one go."""
    found: dict[str, Proto] = {}
    pending = [*nodes]
    while pending:
        for name in _callees([pending.pop()], library):
            if name not in found:
                body = without_placement(library[name])
                found[name] = (
                    _without_assignments(body) if name in keep_whole else pruned_body(body, changing)
                )
                pending += found[name].node_def
    return found


def without_placement(function: Proto) -> Proto:
    """A copy of a function without devices and colocation."""
    copy = deepcopy(function)
    for node in copy.node_def:
        node.device = ""
        node.attr.pop("_class", None)
    return copy


def _without_assignments(function: Proto) -> Proto:
    """The function without assignments of variables, in place: their values come from the checkpoint."""
    assigning = {node.name for node in function.node_def if node.op in _ASSIGNS}
    if not assigning:
        return function
    kept = [node for node in function.node_def if node.name not in assigning]
    for node in kept:
        node.input[:] = [text for text in node.input if text.removeprefix("^") not in assigning]
    put_nodes(function.node_def, kept)
    _keep_control_outputs(function, {node.name for node in kept})
    return function


def pruned_body(function: Proto, changing: set[str]) -> Proto:
    """A function reduced, in place, to what its results are computed from; returned for convenience.

    Source of the naming: tensorflow/core/framework/function.proto: a body's input is `argument`,
    `node:output name:index` or `^node`.
    """
    nodes = {node.name: node for node in function.node_def}
    if any(node.op in SWITCHES or node.op in ENTERS for node in nodes.values()):
        return function  # control edges bind nodes to branches here, see control_flow
    gather_rows(nodes)
    fills = constant_fills(nodes)
    kept = needed_by(nodes, function.ret.values())
    kept |= needed_by(nodes, [fill for fill, table in fills.items() if table in kept])
    name = function.signature.name
    read = [n for n in nodes if n in kept]
    check_reads(nodes, read, changing, where=f" in function {name!r}", allowed=fills)
    check_body((nodes[n] for n in kept if n not in fills), name)
    fill_before_use(nodes, fills)
    arguments = {argument.name for argument in function.signature.input_arg}
    for node in (nodes[n] for n in kept):
        inputs = [text for text in node.input if not text.startswith("^") or text[1:] in kept]
        _check_inputs(node, inputs, kept, arguments, name)
        node.input[:] = inputs
    put_nodes(function.node_def, [node for n, node in nodes.items() if n in kept])
    _keep_control_outputs(function, kept)
    return function


def _keep_control_outputs(function: Proto, kept: set[str]) -> None:
    for output, node_name in [*function.control_ret.items()]:
        if node_name not in kept:
            del function.control_ret[output]
    function.signature.control_output[:] = [
        output for output in function.signature.control_output if output in function.control_ret
    ]


def needed_by(nodes: Mapping[str, Proto], results: Iterable[str]) -> set[str]:
    """The nodes of a body that results are computed from."""

    def makers(texts: Iterable[str]) -> Iterator[str]:
        return (name for text in texts if (name := text.partition(":")[0]) in nodes)

    return {*closure(makers(results), lambda name: makers(nodes[name].input))}


def _check_inputs(node: Proto, inputs: list[str], kept: set[str], arguments: set[str], function: str) -> None:
    for text in inputs:
        source = text.removeprefix("^").partition(":")[0]
        if source not in kept and source not in arguments:
            raise GraphError(
                f"{node.op} {node.name!r} of function {function!r} reads {text!r}, which is not there"
            )
