"""Read the hot rows of a table from copies behind it: a lookup by row number goes through a table of places.

Popular rows are scattered over a table, and each keeps a page of cold neighbours in memory. So copies of them
are stored together after the table, in the same variable (`exporter.bundle.hot_rows`), and beside it is

    places   int32 or int64 [rows]    the row's own number, or that of its copy after the table

A gather of `ids` becomes a gather of `places[ids]`. Overlays, updates, digests and deltas keep to row
numbers. This is the last change of a graph, so that it finds all reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from exporter.graph.changed_uses import INDIFFERENT, RowReads, become_shape
from exporter.graph.nodes import Body, attr, base_dtype
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


class PlacedReads(RowReads, frozen=True):
    """The change of reads of a table with copied rows, by node names of handles; see `RowReads`.

    `shape` is the table's without the copies, `places` the node of the places' handle.
    """

    shape: tuple[int, ...]
    places: str
    places_dtype: DType

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """Return the name of the node of the places' handle, the only variable beside the table."""
        return (self.places,)

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Change a node that takes the table's handle, in place, so that it reads rows at their places.

        A gather gets its row numbers from a new gather of the places, whose handle in this body is in
        `extra_handles`; a VariableShape becomes the shape without copies. Operations in `INDIFFERENT` are not
        changed. NotServable for any other use, GraphError for an unknown type number.
        """
        if node.op == "VariableShape":
            become_shape(body, node, self.shape)
        elif node.op == "ResourceGather" and not attr(node, "batch_dims").i:
            asked = {"dtype": self.places_dtype, "Tindices": base_dtype(node.attr["Tindices"].type)}
            ids, device = node.input[1], node.device
            place = body.add(
                f"{node.name}/place", "ResourceGather", *extra_handles, ids, device=device, **asked
            )
            node.input[1] = body.single(place, "output")
            node.attr["Tindices"].type = int(self.places_dtype)
        elif node.op not in INDIFFERENT:
            raise self.refusal(node)
