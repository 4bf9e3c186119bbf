"""Find assets that a graph reads during requests, not only while a model loads.

A loader feeds an asset's path while it runs the init op, and never again. So the init op puts the path into a
variable, and whatever runs at a request reads it there:

    Const (fed at load) -> AssignVariableOp -> VarHandleOp -> ReadVariableOp -> ReadFile
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exporter.graph.inference_graph import Asset
from exporter.graph.nodes import data_inputs, endpoint
from exporter.graph.reach import reach
from exporter.graph.resource_variables import free_name
from exporter.wire import protos
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
        nodes[handle] = _variable(handle)
        read = free_name(nodes, f"{handle}/ReadVariableOp")
        for name in served:
            _replace_input(nodes[name], path, read)
        nodes[read] = _typed(protos.NodeDef(name=read, op="ReadVariableOp", input=[handle]))
        assign = free_name(nodes, f"{handle}/Assign")
        nodes[assign] = _typed(protos.NodeDef(name=assign, op="AssignVariableOp", input=[handle, path]))
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
                nodes[copies[name]] = protos.NodeDef()
                nodes[copies[name]].CopyFrom(nodes[name])
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


def _variable(name: str) -> Proto:
    handle = _typed(protos.NodeDef(name=name, op="VarHandleOp"))
    handle.attr["shape"].shape.SetInParent()
    handle.attr["shared_name"].s = name.encode()
    return handle


def _typed(node: Proto) -> Proto:
    node.attr["dtype"].type = int(DType.STRING)
    return node
