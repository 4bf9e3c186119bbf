"""Reads of a table whose changed rows lie elsewhere: rows of the table, replaced by those of its overlay.

The table itself cannot be written (`exporter.bundle.mapped_tables`). Beside it are

    changed  bool []                 false: no row has changed, and nothing below is read
    pages    int64 [rows / 128]      add a row's number, and you have the number of its slot
    slots    int32 [128 * (n + 1)]   0: the row is as it is in the table; else its place in the overlay
    overlay  dtype [2 * capacity + 1, ...]    changed rows, each with two places; place 0 is never used

Slots lie by pages, those of 128 rows. The first page is 0 for good: rows of all pages in which nothing has
changed are led there. A gather becomes

    gathered  = rows of the table
    slot      = slots[pages[id / 128] + id]
    at        = places, in the gathered rows, of those whose slot is not 0
    result    = gathered, with overlay[slot] at `at`

and all but the first line is on the side of a Switch that is taken if `changed`. `ListDiff` gives slots that
are not 0 with their places: one node, where `Where` takes four.

`InplaceUpdate` writes into the buffer of its input (tensorflow/core/kernels/inplace_ops.cc), which is that of
the gather, a new one at each call, and which nothing else reads. `where` over both gathers takes 2.1 and 2.2
times as long with 1,000 and 100,000 ids as a table in memory, `TensorScatterUpdate`, which copies its input,
1.6 and 1.8. A slot for each row in one variable would have to be set to zero while the model loads: 1 GB for
a table of 64 GB; and its pages would be touched one by one while readers wait.
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


PAGE_BITS = 7
PAGE_ROWS = 1 << PAGE_BITS
"""Rows whose slots lie together: 512 bytes once one of them has changed, and 8 in `pages` in any case."""


class OverlaidReads(Struct, frozen=True):
    """The change of a table with an overlay; all fields but two name the nodes of handles."""

    variable: str
    dtype: DType
    row_shape: tuple[int, ...]
    changed: str
    pages: str
    slots: str
    overlay: str

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """The nodes of the handles of what lies beside the table."""
        return self.changed, self.pages, self.slots, self.overlay

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
    name, dtype = node.name, table.dtype
    changed_handle, pages_handle, slots_handle, overlay_handle = extra_handles
    indices, index_type = node.input[1], DType(node.attr["Tindices"].type)
    body.rename(node, free_name(body.by_name, f"{name}/mapped"))
    node.attr.pop("_output_shapes", None)

    def known(what: str, value: int | list[int], of: DType = DType.INT32) -> str:
        return body.constant_beside(node, f"{name}/{what}", value, of)

    def add(what: str, op: str, *inputs: str, output: str = "output", **types: Any) -> str:
        made = body.add(f"{name}/{what}" if what else name, op, *inputs, device=node.device, **types)
        return body.single(made, output)

    def if_changed(what: str, tensor: str, of: DType) -> Proto:
        return body.add(f"{name}/{what}", "Switch", tensor, is_changed, device=node.device, T=of)

    def reshape(what: str, tensor: str, shape: str, of: DType) -> str:
        return add(what, "Reshape", tensor, shape, T=of, Tshape=DType.INT32)

    is_changed = add("changed", "ReadVariableOp", changed_handle, output="value", dtype=DType.BOOL)
    either = if_changed("gathered", body.single(node, "output"), dtype)
    unchanged, gathered = body.output(either, 0), body.output(either, 1)
    ids = body.output(if_changed("ids", indices, index_type), 1)
    if index_type is not DType.INT64:
        ids = add("ids_64", "Cast", ids, output="y", SrcT=index_type, DstT=DType.INT64)
    ids = reshape("ids_in_line", ids, known("vector", [-1]), DType.INT64)
    page = add("page", "RightShift", ids, known("bits", PAGE_BITS, DType.INT64), output="z", T=DType.INT64)
    begin = add("begin", "ResourceGather", pages_handle, page, dtype=DType.INT64, Tindices=DType.INT64)
    slot = add("slot", "AddV2", begin, ids, output="z", T=DType.INT64)
    slots = add("slots", "ResourceGather", slots_handle, slot, dtype=DType.INT32, Tindices=DType.INT64)
    types: Any = {"T": DType.INT32, "out_idx": DType.INT32}
    found = body.add(f"{name}/places", "ListDiff", slots, known("none", [0]), device=node.device, **types)
    places, at = body.output(found, 0), body.output(found, 1)
    rows = add("rows", "ResourceGather", overlay_handle, places, dtype=dtype, Tindices=DType.INT32)
    in_line = reshape("in_line", gathered, known("row", [-1, *table.row_shape]), dtype)
    newest = add("newest", "InplaceUpdate", in_line, at, rows, output="y", T=dtype)
    shape = add("shape", "Shape", gathered, T=dtype, out_type=DType.INT32)
    newest = reshape("in_shape", newest, shape, dtype)
    # Its output is called `output`, too: what takes it stays as it is.
    add("", "Merge", unchanged, newest, T=dtype, N=2)
