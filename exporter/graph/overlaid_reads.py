"""Read a table whose changed rows are stored separately: replace its rows by its overlay's.

The table itself cannot be written (`exporter.bundle.mapped_tables`). Beside it are

    changed  bool []                 false: no row has changed, and nothing below is read
    slots    int32 [rows]            0: the table's row is current; else the row's place in the overlay
    overlay  dtype [2 * capacity + 1, ...]    changed rows, each with two places; place 0 is never used

A gather becomes

    gathered  = rows of the table
    at        = places, in the gathered rows, of rows whose slot is not 0
    result    = gathered, with overlay[slot] at `at`

and all but the first line is on the side of a Switch that runs if `changed`. `ListDiff` returns slots that
are not 0 with their places, and needs three nodes less than `Where`; but it hashes each slot twice, so that a
lookup of 100,000 ids takes 10 % longer.

Tables of more than `MOST_ROWS_OF_A_PAGE` rows have their slots in pages of 128 rows:

    pages    int64 [rows / 128]      to be added to a row's number: the sum is the number of its slot
    slots    int32 [128 * (n + 1)]   as above

The first page is always 0: the rows of all pages without changes use it. With 10 % of 4 M rows changed, pages
make a lookup of 64, 1,000, 100,000 ids 8, 15, 10 % longer.

`InplaceUpdate` writes into the buffer of its input (tensorflow/core/kernels/inplace_ops.cc), which is that of
the gather, a new one at each call, and which nothing else reads. `where` over both gathers takes 2.1 and 2.2
times as long with 1,000 and 100,000 ids as a table in memory, `TensorScatterUpdate`, which copies its input,
1.6 and 1.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.graph.changed_uses import INDIFFERENT, RowReads, change_uses
from exporter.graph.nodes import Body, attr, base_dtype, free_name, makes_vector
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
"""The rows whose slots are one page: 512 bytes once one of them has changed, and 8 in `pages` in any case."""

MOST_ROWS_OF_A_PAGE = 1 << 22
"""The most rows of a table without pages: its slots take up to 16 MiB once one of its rows has changed."""


class OverlaidReads(RowReads, frozen=True):
    """The change of the reads of a table with an overlay, by the nodes of handles.

    `pages` is None for a table with a slot for each row. `named` are the nodes that signatures name.
    """

    variable: str
    dtype: DType
    row_shape: tuple[int, ...]
    changed: str
    slots: str
    overlay: str
    pages: str | None = None
    named: frozenset[str] = frozenset()

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """Return the nodes of the handles of the variables beside the table."""
        return self.changed, self.slots, self.overlay, *([self.pages] if self.pages else [])

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Let a node that takes the table's handle read changed rows from the overlay.

        NotServable for other uses.
        """
        if node.op in INDIFFERENT:
            return
        if node.op != "ResourceGather" or attr(node, "batch_dims").i:
            raise self.refusal(node)
        _overlay_rows(body, node, self, extra_handles)


def overlay_reads(graph_def: Proto, tables: Mapping[str, OverlaidReads]) -> None:
    """Let the graph read tables, by the nodes of their handles, through their overlays.

    Raises:
        NotServable: a table is read in another way than by gathers of rows; the message says by which node.
    """
    change_uses(graph_def, tables)


def _overlay_rows(body: Body, node: Proto, table: OverlaidReads, extra_handles: Sequence[str]) -> None:
    """Rename a gather of the table's rows; a node with its old name returns the current rows."""
    name, dtype = node.name, table.dtype
    changed_handle, slots_handle, overlay_handle, *pages_handle = extra_handles
    indices, index_type = node.input[1], base_dtype(node.attr["Tindices"].type)
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
    is_vector = makes_vector(body, indices, table.named)
    vector = known("vector", [-1])
    if not is_vector:
        ids = reshape("ids_in_line", ids, vector, index_type)
    for pages in pages_handle:
        if index_type is not DType.INT64:
            ids = add("ids_64", "Cast", ids, output="y", SrcT=index_type, DstT=DType.INT64)
        index_type = DType.INT64
        page = add("page", "RightShift", ids, known("bits", PAGE_BITS, index_type), output="z", T=index_type)
        begin = add("begin", "ResourceGather", pages, page, dtype=index_type, Tindices=index_type)
        ids = add("slot", "AddV2", begin, ids, output="z", T=index_type)
    slots = add("slots", "ResourceGather", slots_handle, ids, dtype=DType.INT32, Tindices=index_type)
    at = reshape("at", add("where", "Where", slots, output="index", T=DType.INT32), vector, DType.INT64)
    types: Any = {"Tparams": DType.INT32, "Tindices": DType.INT64, "Taxis": DType.INT32}
    places = add("places", "GatherV2", slots, at, known("axis", 0), **types)
    rows = add("rows", "ResourceGather", overlay_handle, places, dtype=dtype, Tindices=DType.INT32)
    at = add("at_32", "Cast", at, output="y", SrcT=DType.INT64, DstT=DType.INT32)
    in_line = gathered
    if not is_vector:
        in_line = reshape("in_line", gathered, known("row", [-1, *table.row_shape]), dtype)
    newest = add("newest", "InplaceUpdate", in_line, at, rows, output="y", T=dtype)
    if not is_vector:
        shape = add("shape", "Shape", gathered, T=dtype, out_type=DType.INT32)
        newest = reshape("in_shape", newest, shape, dtype)
    # Its output has the gather's name, `output`, so its readers need no change.
    add("", "Merge", unchanged, newest, T=dtype, N=2)
