"""Cut out the part of a graph that computes a signature, so that it can run again inside a function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from msgspec import Struct

from exporter.errors import NotServable
from exporter.graph.editor import privately_named
from exporter.graph.nodes import input_names
from exporter.graph.signatures import canonical
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

HANDLE_MARK = "_updated_handle"
"""The attribute of nodes through which signatures take the handles of variables that updates write."""

_LARGE_CONSTANT_BYTES = 1024
"""Constants above this are shared with the graph instead of being stored in the function once more."""


class Forward(Struct, frozen=True):
    """What computes `fetches` from `feeds` and `captures` (resources and constants that stay outside)."""

    nodes: tuple[Proto, ...]
    library: Proto
    fetches: tuple[str, ...]
    feeds: tuple[str, ...]
    captures: tuple[tuple[str, DType], ...]

    def compute(self, inputs: dict[str, Any]) -> list[Any]:
        """Build the nodes in TensorFlow's default graph, over tensors for `feeds` and `captures` by name."""
        import tensorflow as tf

        graph_def = privately_named(self.library, self.nodes)
        native = tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString())
        passed_on = {name: inputs[name] for name in self.fetches if name in inputs}
        computed = [name for name in self.fetches if name not in inputs]
        taken = {canonical(ref) for node in self.nodes for ref in input_names(node)}
        found = tf.graph_util.import_graph_def(
            native,
            input_map={name: tensor for name, tensor in inputs.items() if name in taken},
            return_elements=computed,
            name="forward",
        )
        passed_on.update(zip(computed, found, strict=True))
        return [passed_on[name] for name in self.fetches]


def cut_out(graph_def: Proto, fetches: Sequence[str], feeds: Iterable[str]) -> Forward:
    """The nodes that compute the tensors `fetches` if the tensors `feeds` are given.

    Raises:
        NotServable: a node hands out a reference (a TF1 variable or table), which no function can take.
    """
    by_name = {node.name: node for node in graph_def.node}
    given = {canonical(feed) for feed in feeds}
    inside: dict[str, Proto] = {}
    captures: dict[str, DType] = {}
    used: dict[str, None] = {}
    pending = [canonical(fetch) for fetch in fetches]
    while pending:
        reference = pending.pop()
        if reference in given:
            used[reference] = None
            continue
        node = by_name[reference.removeprefix("^").partition(":")[0]]
        if (dtype := _kept_outside(node)) is not None:
            if not reference.startswith("^"):
                captures[reference] = dtype
        elif node.name not in inside and not (node.op == "Placeholder" and f"{node.name}:0" in given):
            inside[node.name] = node
            pending += [ref if ref.startswith("^") else canonical(ref) for ref in node.input]
    nodes = tuple(_without_outer_controls(node, inside) for node in graph_def.node if node.name in inside)
    return Forward(
        nodes,
        graph_def.library,
        tuple(canonical(fetch) for fetch in fetches),
        tuple(used),
        tuple(sorted(captures.items())),
    )


def _kept_outside(node: Proto) -> DType | None:
    """The dtype of a node's output if it is to be passed in, None if the node is to be repeated."""
    if node.op == "Const":
        large = node.ByteSize() > _LARGE_CONSTANT_BYTES and not node.input
        return DType(node.attr["dtype"].type) if large else None
    if HANDLE_MARK in node.attr:
        return DType.RESOURCE
    definition = _definition(node.op)
    outputs = definition.output_arg if definition is not None else ()
    if any(argument.is_ref for argument in outputs):
        raise NotServable(
            f"node {node.name!r} ({node.op}) hands out a reference, which cannot be isolated",
            hint="build the graph with resource variables and tables, or use --isolation row",
        )
    is_handle = bool(outputs) and all(argument.type == DType.RESOURCE for argument in outputs)
    return DType.RESOURCE if is_handle and definition.is_stateful else None


def _without_outer_controls(node: Proto, inside: dict[str, Proto]) -> Proto:
    if all(not ref.startswith("^") or ref[1:] in inside for ref in node.input):
        return node
    copy = deepcopy(node)
    copy.input[:] = [ref for ref in node.input if not ref.startswith("^") or ref[1:] in inside]
    return copy


def _definition(op: str) -> Any:
    from tensorflow.python.framework import op_def_registry  # the one way to ask what an op gives

    return op_def_registry.get(op)
