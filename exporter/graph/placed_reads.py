"""Reads of a table whose most read rows lie once more behind it: a lookup by row number asks for a place.

Popular rows are scattered over a table, and each keeps a page of cold neighbours in memory. So copies of
them lie side by side behind the table, in the same variable (`exporter.bundle.hot_rows`), and beside it is

    places   int32 or int64 [rows]    the row's own number, or that of its copy behind the table

A gather of `ids` becomes a gather of `places[ids]`. Overlays, updates, digests and deltas keep to row
numbers. This is the last change of a graph, so that it finds all reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from exporter.errors import ExportError, NotServable
from exporter.graph.changed_uses import INDIFFERENT, become_shape, change_uses
from exporter.graph.nodes import Body, attr
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto


class PlacedReads(Struct, frozen=True):
    """The change of a table with rows behind it: its `shape` without them, and the handle of its places."""

    variable: str
    shape: tuple[int, ...]
    places: str
    places_dtype: DType

    @property
    def extra_handles(self) -> tuple[str, ...]:
        """The node of the places' handle."""
        return (self.places,)

    def apply(self, body: Body, node: Proto, extra_handles: Sequence[str]) -> None:
        """Let a node that takes the table's handle read rows at their places; NotServable for other uses."""
        if node.op == "VariableShape":
            become_shape(body, node, self.shape)
        elif node.op == "ResourceGather" and not attr(node, "batch_dims").i:
            asked = {"dtype": self.places_dtype, "Tindices": DType(node.attr["Tindices"].type)}
            ids, device = node.input[1], node.device
            place = body.add(
                f"{node.name}/place", "ResourceGather", *extra_handles, ids, device=device, **asked
            )
            node.input[1] = body.single(place, "output")
            node.attr["Tindices"].type = int(self.places_dtype)
        elif node.op not in INDIFFERENT:
            raise self.refusal(node)

    def refusal(self, node: Proto) -> ExportError:
        """The error for a node that cannot be changed."""
        return NotServable(f"{node.op} {node.name!r} takes it")

    def returned(self, function: str) -> ExportError:
        """The error for a function that returns the handle."""
        return NotServable(f"function {function!r} returns it")


def place_reads(graph_def: Proto, tables: Mapping[str, PlacedReads]) -> None:
    """Let the graph read tables, by the nodes of their handles, at their rows' places.

    Raises:
        NotServable: a table is read in another way than by gathers of rows; the message says by what.
    """
    change_uses(graph_def, tables)
