"""Find assets that a graph reads during requests, not only while a model loads.

A loader feeds an asset's path while it runs the init op, and never again. So the init op puts the path into a
variable, and whatever runs at a request reads it there:

    Const (fed at load) -> AssignVariableOp -> VarHandleOp -> ReadVariableOp -> ReadFile
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy

from exporter.graph.inference_graph import Asset
from exporter.graph.new_nodes import free_name, new_node
from exporter.graph.nodes import data_inputs, endpoint
from exporter.graph.reach import reach
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


def remember_paths(
    nodes: dict[str, Proto], roots: Iterable[str], filling: Iterable[str], assets: Iterable[Asset]
) -> list[str]:
    """Put the paths that outputs need into variables, in place; what the init op is to run for that.

    `roots` make the signatures' tensors, `filling` runs at load and goes on reading the asset itself.
    """
    served = reach(nodes, dict.fromkeys(roots)).inputs
    needed = [asset.node for asset in assets if asset.node in served]
    if not needed:
        return []
    _part_from_loading(nodes, served, [*filling], needed)
    assignments = []
    for path in needed:
        handle = free_name(nodes, f"{path}/path")
        nodes[handle] = new_node(
            handle, "VarHandleOp", dtype=DType.STRING, shape=(), shared_name=handle.encode()
        )
        read = free_name(nodes, f"{handle}/ReadVariableOp")
        for name in served:
            _replace_input(nodes[name], path, read)
        nodes[read] = new_node(read, "ReadVariableOp", [handle], dtype=DType.STRING)
        assign = free_name(nodes, f"{handle}/Assign")
        nodes[assign] = new_node(assign, "AssignVariableOp", [handle, path], dtype=DType.STRING)
        assignments.append(assign)
    return assignments


def _part_from_loading(
    nodes: dict[str, Proto], served: Mapping[str, object], filling: list[str], paths: list[str]
) -> None:
    """Give the initialisers copies of nodes between them and a path that requests use as well, in place."""
    loading = reach(nodes, filling).inputs
    changed = {*paths}
    copies: dict[str, str] = {}
    pending = True
    while pending:  # until no more nodes are found behind the paths
        pending = False
        for name in loading:
            if name in served and name not in changed and _sources(nodes[name]) & changed:
                changed.add(name)
                copies[name] = free_name(nodes, f"{name}/at_load")
                nodes[copies[name]] = deepcopy(nodes[name])
                nodes[copies[name]].name = copies[name]
                pending = True
    for name in [*copies.values(), *(name for name in loading if name not in served)]:
        for original, copy in copies.items():
            _replace_input(nodes[name], original, copy)


def _sources(node: Proto) -> set[str]:
    return {source.node for source in data_inputs(node)}


def _replace_input(node: Proto, source: str, replacement: str) -> None:
    for position, text in enumerate(node.input):
        tensor = endpoint(text)
        if tensor.node == source and tensor.output >= 0:
            node.input[position] = tensor._replace(node=replacement).as_input
