"""Keep the row order of partitioned tables, so that a lookup in other partitions finds the same row.

TF1's `embedding_lookup` on a partitioned variable defaults to `mod`: row i is row i // n of part i % n, while
the parts lie on disk as contiguous boxes. Served with another number of parts, or whole, the table would give
silently wrong rows. Nothing in a checkpoint tells; the trainer's graph does.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from exporter.catalog import SliceSpec, TensorRef
from exporter.errors import PartitionStrategyUnknown
from exporter.graph.inference_graph import GraphVariable, PartitionStrategy


class RowOrder(Struct, frozen=True):
    """How rows must move: out of `gather_parts` mod parts, into `scatter_parts` mod parts; 0 for neither."""

    gather_parts: int = 0
    scatter_parts: int = 0


_STAYS = RowOrder()


def row_order(
    key: str,
    variables: Iterable[GraphVariable],
    tensor: TensorRef,
    *,
    trained: PartitionStrategy | None,
    served: PartitionStrategy | None,
) -> RowOrder:
    """The moves between a table as it was trained and as it will be looked up.

    `trained` and `served` are None where unknown; a table that no id looks up is `NONE`.

    Raises:
        PartitionStrategyUnknown: rows would have to move and it is unknown how, or the parts cannot be mod's.
    """
    stored_boxes = [part.spec for part in tensor.slices]
    served_boxes = [variable.part for variable in variables if variable.part is not None]
    if not stored_boxes and not served_boxes:  # most variables of most models
        return _STAYS
    stored_parts, served_parts = _parts_of_rows(stored_boxes), _parts_of_rows(served_boxes)
    same_boxes = set(stored_boxes) == set(served_boxes)
    if same_boxes and (trained is None or served is None):
        return RowOrder()
    if trained is None and stored_parts > 1:
        if served is PartitionStrategy.NONE:
            return RowOrder()
        raise PartitionStrategyUnknown(
            f"table {key!r}: {stored_parts} partitions in the checkpoint, {served_parts} in the graph, "
            "and it is not known whether training looked it up by mod or by div",
            cause="under mod, row i lies in partition i % n; under div, partitions are ranges of rows",
            hint=f"put the trainer's .meta beside the checkpoint, or say --partition-strategy {key}=mod|div",
        )
    if served is None and served_parts > 1:
        raise PartitionStrategyUnknown(
            f"table {key!r}: {stored_parts} partitions in the checkpoint, {served_parts} in the graph, which "
            "looks its parts up neither by mod nor by div",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )
    was_mod = trained is PartitionStrategy.MOD and stored_parts > 1
    is_mod = served is PartitionStrategy.MOD and served_parts > 1
    if was_mod and is_mod and same_boxes:
        return RowOrder()
    if was_mod:
        _require_mod_lengths(key, stored_boxes, "checkpoint")
    if is_mod:
        _require_mod_lengths(key, served_boxes, "graph")
    return RowOrder(stored_parts if was_mod else 0, served_parts if is_mod else 0)


def mod_lengths(rows: int, parts: int) -> list[int]:
    """Rows of each part under `mod`: part p holds rows p, p + parts, p + 2 * parts, ..."""
    return [len(range(part, rows, parts)) for part in range(parts)]


def _parts_of_rows(boxes: list[SliceSpec]) -> int:
    return max(1, len({box.starts[0] for box in boxes if box.starts}))


def _require_mod_lengths(key: str, boxes: list[SliceSpec], where: str) -> None:
    rows = boxes[0].full_shape[0]
    lengths = [box.lengths[0] for box in sorted(boxes, key=lambda box: box.starts)]
    if lengths != mod_lengths(rows, len(boxes)):
        raise PartitionStrategyUnknown(
            f"table {key!r} is looked up by mod, but its partitions in the {where} have {lengths} rows; "
            f"mod over {len(boxes)} partitions needs {mod_lengths(rows, len(boxes))}",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )
