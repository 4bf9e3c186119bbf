"""Digest an inference graph. Graphs that compute the same from the same variables have equal digests.

Two runs of one builder, or two `.meta` files of one program, differ in details that do not count: the order
of nodes and functions, functions' numbers, hints, shared names, debugging information, the version of
TensorFlow, sizes of dynamic tables. Names of nodes count, because another name may mean another variable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from copy import deepcopy

from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.nodes import called
from exporter.tables.lookup import SIZE
from exporter.wire.protos import Proto

_MEANINGLESS = ("shared_name", "container", "config_proto", "executor_type")


def graph_digest(graph: InferenceGraph) -> str:
    """Return the SHA-256, in hexadecimal, of a graph's computation.

    Names of nodes, signatures, and the default rows of dynamic tables count. The order of nodes, the names of
    functions, shared names, and the contents of files that the graph reads do not.
    """
    graph_def = graph.meta_graph.graph_def
    functions = {function.signature.name: function for function in graph_def.library.function}
    names = _FunctionNames(functions)
    total = hashlib.sha256()
    sized = {node for table in graph.dynamic_tables for node in table.nodes}
    sized |= {node.name for node in graph_def.node if SIZE in node.attr}
    for node in sorted(graph_def.node, key=lambda node: str(node.name)):
        total.update(_node(node, names, but_for=("shape", "value") if node.name in sized else ()))
    for table in sorted(graph.dynamic_tables, key=lambda table: table.name):
        total.update(f"{table.name}\0{table.defaults.shape}\0".encode() + table.defaults.tobytes())
    for name, signature in sorted(graph.meta_graph.signature_def.items()):
        total.update(name.encode() + b"\0" + signature.SerializeToString(deterministic=True))
    total.update((graph.init_op or "").encode())
    return total.hexdigest()


class _FunctionNames:
    """Replaces functions' names by digests of their bodies; keeps other names."""

    def __init__(self, functions: Mapping[str, Proto]) -> None:
        self._functions, self._known = functions, dict[str, str]()

    def __call__(self, name: str) -> str:
        if name not in self._functions:
            return name
        if name not in self._known:
            self._known[name] = name  # a function that calls itself
            self._known[name] = self._digest(self._functions[name])
        return self._known[name]

    def _digest(self, function: Proto) -> str:
        copy = deepcopy(function)
        _forget_own_name(copy)
        nodes = sorted(copy.node_def, key=lambda node: str(node.name))
        body = [_node(node, self) for node in nodes]
        for part in ("node_def", "attr", "arg_attr", "resource_arg_unique_id"):
            copy.ClearField(part)
        copy.signature.ClearField("name")
        own = [copy.SerializeToString(deterministic=True), *body]
        return hashlib.sha256(b"\0".join(own)).hexdigest()


def _forget_own_name(function: Proto) -> None:
    """Remove the prefix `<function's name>___` from the names of a function's arguments, in place.

    The prefix is in lower case; arguments without it stay.
    """
    # `<function>___redundant_placeholder0`: while_v2.py makes the inputs of condition and body alike.
    own = f"{function.signature.name.lower()}___"
    for argument in function.signature.input_arg:
        if argument.name.startswith(own):
            argument.name = argument.name.removeprefix(own)


def _node(node: Proto, names: _FunctionNames, but_for: Collection[str] = ()) -> bytes:
    """Return the serialized bytes of a node without attributes that do not count.

    These are hints, debugging information, and the attributes named in `but_for`. `names` replaces the names
    of called functions by digests.
    """
    copy = deepcopy(node)
    copy.ClearField("experimental_debug_info")
    copy.op = names(copy.op)
    for name in [*copy.attr]:
        if name.startswith("_") or name in _MEANINGLESS or name in but_for:
            del copy.attr[name]
    for function in called(copy):
        function.name = names(function.name)
    return bytes(copy.SerializeToString(deterministic=True))
