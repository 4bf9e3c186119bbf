"""Make nodes: with attributes from Python values, under names that are free, and in the place of others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill


def new_node(
    name: str,
    op: str,
    inputs: Iterable[str] = (),
    *,
    after: Iterable[str] = (),
    device: str = "",
    **attrs: Any,
) -> Proto:
    """A NodeDef; `after` names nodes that it waits for.

    An attribute is a `DType` or a tuple of them, a shape (a tuple of numbers, -1 or None where unknown), a
    bool, an int, bytes, a `TensorProto`, or the name of a function, as a str.
    """
    node = protos.NodeDef(name=name, op=op, device=device)
    node.input.extend([*inputs, *(f"^{other}" for other in after)])
    for key, value in attrs.items():
        _set_attr(node.attr[key], value)
    return node


def constant(name: str, value: np.ndarray[Any, Any], dtype: DType) -> Proto:
    """A Const node."""
    tensor = protos.TensorProto()
    fill(tensor, value)
    tensor.dtype = int(dtype)  # numpy knows no quantised types
    return new_node(name, "Const", dtype=dtype, value=tensor)


def free_name(taken: Collection[str], wish: str) -> str:
    """`wish`, with a number behind it if a node has that name already."""
    name, number = wish, 0
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name


def put_nodes(field: Any, nodes: Iterable[Proto]) -> None:
    """Let these be all nodes of a graph (its `node`) or a function (its `node_def`); some may be its own."""
    kept = [*nodes]
    del field[:]
    field.extend(kept)


def _set_attr(attr: Proto, value: Any) -> None:
    match value:
        case DType():
            attr.type = int(value)
        case bool():
            attr.b = value
        case int():
            attr.i = value
        case bytes():
            attr.s = value
        case str():
            attr.func.name = value
        case (DType(), *_):
            attr.list.type.extend(map(int, value))
        case tuple():
            attr.shape.SetInParent()
            for size in value:
                attr.shape.dim.add(size=-1 if size is None else size)
        case _:
            attr.tensor.CopyFrom(value)
