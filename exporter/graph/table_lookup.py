"""Turn a node into a lookup in a dynamic table; what finds the rows is `exporter.tables.lookup`'s."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.graph.inference_graph import GraphDynamicTable
from exporter.graph.new_nodes import new_node
from exporter.graph.nodes import Endpoint
from exporter.tables.lookup import add_rows
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill


class Lookup(Struct, frozen=True):
    """A lookup to be made: of `ids`, under `name`, after the nodes `after`.

    `default` holds a row for each id, which is read where the table does not hold the key; else absent keys
    read the table's default rows.
    """

    name: str
    table: GraphDynamicTable
    ids: Endpoint
    default: Endpoint | None = None
    after: tuple[str, ...] = ()


def lookup_nodes(lookup: Lookup, taken: Collection[str]) -> list[Proto]:
    """The nodes of a lookup, none of which is `taken`; the last has its name and gives a row for each id."""
    for number in itertools.count():
        scope = f"{lookup.name}/lookup_{number}" if number else f"{lookup.name}/lookup"
        made = _made(lookup, scope)
        if not any(node.name in taken for node in made[:-1]):
            return made
    raise AssertionError("some scope is free")


def _made(lookup: Lookup, scope: str) -> list[Proto]:
    table, made = lookup.table, protos.GraphDef()
    ids, values_handle = lookup.ids.as_input, table.nodes[-1]
    if table.key_dtype is not DType.INT64:
        ids = _add(made, f"{scope}/ids", "Cast", ids, SrcT=table.key_dtype, DstT=DType.INT64)
    rows = add_rows(made, scope, table.name, table.nodes, ids, defaults=len(table.defaults))
    name = lookup.name if lookup.default is None else f"{scope}/values"
    values = _add(
        made, name, "ResourceGather", values_handle, rows.rows, dtype=table.value_dtype, Tindices=DType.INT32
    )
    if lookup.default is not None:
        _choose(made, lookup, lookup.default, scope, rows.found, values)
    made.node[-1].input.extend(f"^{name}" for name in lookup.after)
    return [*made.node]


def _choose(made: Proto, lookup: Lookup, default: Endpoint, scope: str, found: str, values: str) -> None:
    """Add the choice between values that were found and the rows of `default`, as the lookup's own node."""
    dtype = lookup.table.value_dtype
    shape = _add(made, f"{scope}/shape", "Shape", values, T=dtype, out_type=DType.INT32)
    given = default.as_input
    rows = _add(made, f"{scope}/default", "Reshape", given, shape, T=dtype, Tshape=DType.INT32)
    number = protos.TensorProto()
    fill(number, np.array(-1, np.int32), as_fields=True)
    last = _add(made, f"{scope}/last", "Const", dtype=DType.INT32, value=number)
    mask = _add(made, f"{scope}/is_found", "ExpandDims", found, last, T=DType.BOOL, Tdim=DType.INT32)
    _add(made, lookup.name, "SelectV2", mask, values, rows, T=dtype)


def _add(graph_def: Proto, name: str, op: str, *inputs: str, **attrs: Any) -> str:
    graph_def.node.append(new_node(name, op, inputs, **attrs))
    return name
