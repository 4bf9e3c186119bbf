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

import numpy as np
from msgspec import Struct

from exporter.errors import ExportError, NotServable
from exporter.graph.changed_uses import INDIFFERENT, change_uses
from exporter.graph.nodes import Body, attr, constant, free_name
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

SCATTERED = {
    DType.FLOAT,
    DType.DOUBLE,
    DType.HALF,
    DType.BFLOAT16,
    DType.BOOL,
    DType.COMPLEX64,
    DType.COMPLEX128,
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.UINT8,
    DType.UINT16,
    DType.UINT32,
    DType.UINT64,
}
"""The dtypes for which TensorFlow has scatter kernels, and whose rows a delta can therefore hold."""


class OverlaidReads(Struct, frozen=True):
    """The change of a table with an overlay: the node of its handle, its dtype and its row's shape.

    `slots` and `overlay` are the nodes of the handles beside it.
    """

    variable: str
    dtype: DType
    row_shape: tuple[int, ...]
    slots: str
    overlay: str

    @property
    def beside(self) -> tuple[str, ...]:
        """The nodes of the further handles."""
        return self.slots, self.overlay

    def apply(self, body: Body, node: Proto, beside: Sequence[str]) -> None:
        """Change a node that takes the table's handle."""
        if node.op in INDIFFERENT:
            return
        if node.op != "ResourceGather" or attr(node, "batch_dims").i:
            raise self.refusal(node)
        _overlay_rows(body, node, self, beside)

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


def _overlay_rows(body: Body, node: Proto, table: OverlaidReads, beside: Sequence[str]) -> None:
    """Let a gather yield the table's rows under a new name; the rows as they are now take its old name.

    The only output of both is called `output` in a function, so that what takes it stays as it is.
    """
    name, device, dtype = node.name, node.device, table.dtype
    indices = node.input[1]
    index_type = DType(node.attr["Tindices"].type)
    slots_handle, overlay_handle = beside
    del body.by_name[name]
    node.name = free_name(body.by_name, f"{name}/mapped")
    body.by_name[node.name] = node
    node.attr.pop("_output_shapes", None)
    gathered = body.single(node, "output")

    def known(what: str, value: int | list[int]) -> str:
        """A constant; in a loop of Enter and Exit it belongs to the frame of the gather."""
        wish = free_name(body.by_name, f"{name}/{what}")
        made = body.put(constant(wish, np.array(value, np.int32), DType.INT32))
        made.input.append(f"^{node.name}")
        return body.single(made, "output")

    def gather(what: str, handle: str, rows: str, by: DType, of: DType) -> str:
        made = body.add(
            f"{name}/{what}", "ResourceGather", handle, rows, device=device, dtype=of, Tindices=by
        )
        return body.single(made, "output")

    def reshape(what: str, tensor: str, shape: str, of: DType) -> str:
        made = body.add(f"{name}/{what}", "Reshape", tensor, shape, device=device, T=of, Tshape=DType.INT32)
        return body.single(made, "output")

    vector = known("vector", [-1])
    slots = reshape(
        "slots_in_line", gather("slots", slots_handle, indices, index_type, DType.INT32), vector, DType.INT32
    )
    where = body.add(f"{name}/where", "Where", slots, device=device, T=DType.INT32)
    at = reshape("at", body.single(where, "index"), vector, DType.INT64)
    changed = body.add(
        f"{name}/changed",
        "GatherV2",
        slots,
        at,
        known("axis", 0),
        device=device,
        Tparams=DType.INT32,
        Tindices=DType.INT64,
        Taxis=DType.INT32,
    )
    rows = gather("rows", overlay_handle, body.single(changed, "output"), DType.INT32, dtype)
    places = body.add(f"{name}/places", "Cast", at, device=device, SrcT=DType.INT64, DstT=DType.INT32)
    in_line = reshape("in_line", gathered, known("row", [-1, *table.row_shape]), dtype)
    newest = body.add(
        f"{name}/newest", "InplaceUpdate", in_line, body.single(places, "y"), rows, device=device, T=dtype
    )
    shape = body.add(f"{name}/shape", "Shape", gathered, device=device, T=dtype, out_type=DType.INT32)
    body.add(
        name,
        "Reshape",
        body.single(newest, "y"),
        body.single(shape, "output"),
        device=device,
        T=dtype,
        Tshape=DType.INT32,
    )
