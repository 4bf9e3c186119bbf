"""Convert reference variables to resource variables, and make gathers read rows instead of whole tables.

Serving needs both: the incremental subgraph updates resource variables, and a ReadVariableOp under a gather
copies the whole table at each request once a row was scattered into it (copy-on-read).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from exporter.errors import NotServable
from exporter.graph.inference_graph import GraphVariable
from exporter.graph.keys import VARIABLE_OPS
from exporter.graph.nodes import (
    ENTERS,
    SWITCHES,
    Endpoint,
    attr,
    attr_dtype,
    attr_shape,
    attr_text,
    const_value,
    endpoint,
    free_name,
    new_node,
)
from exporter.graph.source_graph import VariableKey
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

_REF_FORMS = {
    name: name.removeprefix("Ref")
    for name in ("RefSwitch", "RefMerge", "RefEnter", "RefExit", "RefNextIteration")
}
_GATHERS = frozenset({"Gather", "GatherV2"})
_MAX_STEPS = 32


def use_resource_variables(nodes: dict[str, Proto]) -> dict[Endpoint, Endpoint]:
    """Turn every variable node into a VarHandleOp of the same name, and its readers into reads, in place.

    An Identity on a reference variable becomes the ReadVariableOp under its own name. Returns where a tensor
    of that was a variable itself is to be read from now.
    """
    references = {name for name, node in nodes.items() if node.op in ("Variable", "VariableV2")}
    reads: dict[Endpoint, Endpoint] = {}
    for node in list(nodes.values()):
        if any(endpoint(text).node in references for text in node.input):
            _read_by_value(nodes, node, references, reads)
        node.op = _REF_FORMS.get(node.op, node.op)
    for name in references:
        reads.setdefault(Endpoint(name, 0), Endpoint(_add_read(nodes, nodes[name]), 0))
    first_of: dict[tuple[str, str], str] = {}
    for name in [name for name, node in nodes.items() if node.op in VARIABLE_OPS]:
        identity = (attr_text(nodes[name], "container"), attr_text(nodes[name], "shared_name") or name)
        _make_handle(nodes[name], first_of.setdefault(identity, name))
    return reads


def _read_by_value(
    nodes: dict[str, Proto], node: Proto, references: set[str], reads: dict[Endpoint, Endpoint]
) -> None:
    if node.op in ("Identity", "RefIdentity"):
        node.op = "ReadVariableOp"
        if "T" in node.attr:
            node.attr["dtype"].CopyFrom(node.attr["T"])
            del node.attr["T"]
        return
    if node.op == "IsVariableInitialized":
        node.op = "VarIsInitializedOp"
        node.attr.pop("dtype", None)
        return
    for position, text in enumerate(node.input):
        source = endpoint(text)
        if source.node in references and source.output >= 0:
            if source not in reads:
                reads[source] = Endpoint(_add_read(nodes, nodes[source.node]), 0)
            node.input[position] = reads[source].as_input


def _add_read(nodes: dict[str, Proto], variable: Proto) -> str:
    name = free_name(nodes, f"{variable.name}/ReadVariableOp")
    dtype = attr_dtype(variable, "dtype") or DType.FLOAT
    nodes[name] = new_node(name, "ReadVariableOp", [variable.name], dtype=dtype)
    return name


def _make_handle(node: Proto, shared_name: str) -> None:
    """Two nodes of one container and shared name are one variable: they keep a common name.

    `allowed_devices` and `debug_name` go: they mean nothing to a server, and old servers do not know them.
    """
    kept = {name: node.attr[name] for name in ("shape", "_output_shapes") if name in node.attr}
    dtype = attr_dtype(node, "dtype") or DType.FLOAT
    handle = new_node(node.name, "VarHandleOp", dtype=dtype, shared_name=shared_name.encode())
    for name, value in kept.items():
        if not (name == "_output_shapes" and node.op != "VarHandleOp"):
            handle.attr[name].CopyFrom(value)
    node.CopyFrom(handle)


def graph_variables(
    nodes: Mapping[str, Proto], keys: Mapping[str, VariableKey], without: Collection[str] = ()
) -> tuple[GraphVariable, ...]:
    """The variables behind the VarHandleOps, one for each that differs; `without` these nodes.

    Objects may share a name (`Variable`), which would give them one tensor: such go by their nodes' names.

    Raises:
        NotServable: one has no static shape, so that it is unknown whether a tensor fits.
    """
    found = []
    for name, node in nodes.items():
        if node.op != "VarHandleOp" or attr_text(node, "shared_name") != name or name in without:
            continue
        shape = attr_shape(node)
        if shape is None or min(shape, default=0) < 0:
            raise NotServable(
                f"variable {name!r} has no static shape",
                hint="create it with a shape (validate_shape=True), and export again",
            )
        key = keys.get(name, VariableKey(name))
        dtype = attr_dtype(node, "dtype") or DType.FLOAT
        found.append(GraphVariable(name, key.key, dtype, shape, key.part))
    uses = Counter(variable.key for variable in found if variable.part is None)
    return tuple(replace(v, key=v.node) if uses[v.key] > 1 else v for v in found)


def gather_rows(nodes: dict[str, Proto]) -> None:
    """Turn gathers from a variable that is read whole into ResourceGather, in place.

    Works on a graph's nodes and on a function's body alike: only the part of an input before its first
    colon is looked at. Reads behind Identity, Switch and Enter are found too.
    """
    twins: dict[str, str] = {}
    for node in list(nodes.values()):
        if node.op in _GATHERS and _is_row_lookup(nodes, node):
            handle = _handle_of(nodes, twins, node.input[0], _MAX_STEPS)
            if handle is not None:
                _make_resource_gather(node, handle)


def _is_row_lookup(nodes: Mapping[str, Proto], node: Proto) -> bool:
    if attr(node, "batch_dims").i:
        return False
    if attr_dtype(node, "Tindices") not in (DType.INT32, DType.INT64):
        return False
    if node.op == "Gather":
        return len(node.input) >= 2
    axis = nodes.get(_producer(node.input[2])) if len(node.input) >= 3 else None
    value = const_value(axis)
    return value is not None and value.size == 1 and int(value.ravel()[0]) == 0


def _handle_of(nodes: dict[str, Proto], twins: dict[str, str], text: str, steps_left: int) -> str | None:
    """The input that gives the handle of the variable whose whole value `text` is, None if it is no such.

    A Switch or an Enter on the value gets a twin on the handle; `twins` remembers them.
    """
    name = _producer(text)
    node = nodes.get(name)
    if node is None or not node.input or not steps_left:
        return None
    if node.op == "ReadVariableOp":
        return str(node.input[0])
    if node.op == "Identity":
        return _handle_of(nodes, twins, node.input[0], steps_left - 1)
    if node.op not in SWITCHES and node.op not in ENTERS:
        return None
    if name not in twins:
        handle = _handle_of(nodes, twins, node.input[0], steps_left - 1)
        if handle is None:
            return None
        twins[name] = free_name(nodes, f"{name}/handle")
        nodes[twins[name]] = _on_handle(node, twins[name], handle)
    return twins[name] + text[len(name) :]


def _on_handle(node: Proto, name: str, handle: str) -> Proto:
    twin = new_node(name, node.op, [handle, *node.input[1:]], T=DType.RESOURCE)
    for key in ("frame_name", "is_constant", "parallel_iterations"):
        if key in node.attr:
            twin.attr[key].CopyFrom(node.attr[key])
    return twin


def _producer(text: str) -> str:
    return text.partition(":")[0]


def _make_resource_gather(node: Proto, handle: str) -> None:
    gather = new_node(
        node.name, "ResourceGather", [handle, node.input[1]], batch_dims=0, validate_indices=True
    )
    for name, kept in (("dtype", "Tparams"), ("Tindices", "Tindices"), ("_output_shapes", "_output_shapes")):
        if kept in node.attr:
            gather.attr[name].CopyFrom(node.attr[kept])
    node.CopyFrom(gather)
