"""Reads of a table whose changed rows lie elsewhere: rows of the table, replaced by those of its overlay.

The table itself cannot be written (`exporter.bundle.mapped_tables`). Beside it are

    slots    int32 [rows]             0: the row is as it is in the table; else its place in the overlay
    overlay  dtype [2 * capacity + 1, ...]    changed rows, each with two places; place 0 is never used

and a gather becomes

    gathered  = rows of the table
    at        = places, in the gathered rows, of those whose slot is not 0
    result    = gathered, with overlay[slot] at `at`

`InplaceUpdate` writes into the buffer of its input (tensorflow/core/kernels/inplace_ops.cc), which is that of
the gather, a new one at each call, and which nothing else reads. Processor time of 1 / 64 / 1,000 / 100,000
ids of 1 M x 64 floats against a table in memory, none of the rows changed: 1.06 / 1.07 / 1.21 / 1.12; 10 % of
them: 1.04 / 1.10 / 1.35 / 1.45. `where` over both gathers takes 2.1 and 2.2 times for the last two, and
`TensorScatterUpdate`, which copies its input, 1.6 and 1.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from exporter.errors import ExportError, NotServable
from exporter.graph.changed_uses import INDIFFERENT, change_uses
from exporter.graph.nodes import Body, attr, free_name
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

SCATTERED = {
    *(DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16, DType.COMPLEX64, DType.COMPLEX128, DType.BOOL),
    *(DType.INT8, DType.INT16, DType.INT32, DType.INT64),
    *(DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64),
}
"""The dtypes for which TensorFlow has scatter kernels, and whose rows a delta can therefore hold."""


class OverlaidReads(Struct, frozen=True):
    """The change of a table with an overlay; three fields name the nodes of handles."""

    variable: str
    dtype: DType
    row_shape: tuple[int, ...]
    slots: str
    overlay: str

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """The nodes of the slots' and the overlay's handles."""
        return self.slots, self.overlay

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Let a node that takes the table's handle read changed rows from the overlay.

        NotServable for other uses.
        """
        if node.op in INDIFFERENT:
            return
        if node.op != "ResourceGather" or attr(node, "batch_dims").i:
            raise self.refusal(node)
        _overlay_rows(body, node, self, extra_handles)

    def refusal(self, node: Proto) -> ExportError:
        """The error for a node that cannot be changed."""
        return NotServable(f"{node.op} {node.name!r} takes it")

    def returned(self, function: str) -> ExportError:
        """The error for a function that returns the handle."""
        return NotServable(f"function {function!r} returns it")


def overlay_reads(graph_def: Proto, tables: Mapping[str, OverlaidReads]) -> None:
    """Let the graph read tables, by the nodes of their handles, through their overlays.

    Raises:
        NotServable: a table is read in another way than by gathers of rows; the message says by what.
    """
    change_uses(graph_def, tables)


def _overlay_rows(body: Body, node: Proto, table: OverlaidReads, extra_handles: Sequence[str]) -> None:
    """Let a gather yield the table's rows under a new name; the rows as they are now take its old name."""
    name, dtype, (slots_handle, overlay_handle) = node.name, table.dtype, extra_handles
    indices, index_type = node.input[1], DType(node.attr["Tindices"].type)
    body.rename(node, free_name(body.by_name, f"{name}/mapped"))
    node.attr.pop("_output_shapes", None)
    gathered = body.single(node, "output")

    def known(what: str, value: int | list[int]) -> str:
        return body.constant_beside(node, f"{name}/{what}", value)

    def add(what: str, op: str, *inputs: str, output: str = "output", **types: Any) -> str:
        made = body.add(f"{name}/{what}" if what else name, op, *inputs, device=node.device, **types)
        return body.single(made, output)

    def reshape(what: str, tensor: str, shape: str, of: DType) -> str:
        return add(what, "Reshape", tensor, shape, T=of, Tshape=DType.INT32)

    vector = known("vector", [-1])
    slots = add("slots", "ResourceGather", slots_handle, indices, dtype=DType.INT32, Tindices=index_type)
    slots = reshape("slots_in_line", slots, vector, DType.INT32)
    at = reshape("at", add("where", "Where", slots, output="index", T=DType.INT32), vector, DType.INT64)
    types: Any = {"Tparams": DType.INT32, "Tindices": DType.INT64, "Taxis": DType.INT32}
    changed = add("changed", "GatherV2", slots, at, known("axis", 0), **types)
    rows = add("rows", "ResourceGather", overlay_handle, changed, dtype=dtype, Tindices=DType.INT32)
    places = add("places", "Cast", at, output="y", SrcT=DType.INT64, DstT=DType.INT32)
    in_line = reshape("in_line", gathered, known("row", [-1, *table.row_shape]), dtype)
    newest = add("newest", "InplaceUpdate", in_line, places, rows, output="y", T=dtype)
    shape = add("shape", "Shape", gathered, T=dtype, out_type=DType.INT32)
    reshape("", newest, shape, dtype)  # its output is called `output`, too: what takes it stays as it is
