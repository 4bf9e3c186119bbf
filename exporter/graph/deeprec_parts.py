"""Find lookups in partitioned embedding variables, which can be one lookup in one table.

flat_ids -> FloorMod(1000) -> FloorMod(P) -> Cast = assignments
DynamicPartition(flat_ids, assignments)    -> P gathers -> ParallelDynamicStitch
DynamicPartition(range(size), assignments)               /
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from exporter.graph.deeprec_ops import GATHERS
from exporter.graph.nodes import Endpoint, GraphIndex, attr, const_value, data_inputs
from exporter.wire.protos import Proto

_STITCHES = frozenset({"ParallelDynamicStitch", "DynamicStitch"})
_MAX_STEPS = 16


class PartedLookup(Struct, frozen=True):
    """A stitch whose result is what one lookup of `ids` gives; `handle` is that of the first part.

    `default` are the rows that absent keys read, if the lookup brings them along.
    """

    stitch: str
    handle: str
    ids: Endpoint
    default: Endpoint | None


def parted_lookups(index: GraphIndex, table_of: Callable[[Proto], str | None]) -> Iterator[PartedLookup]:
    """The lookups of a graph over all parts of a table; `table_of` names the table of a gather."""
    for node in index.nodes.values():
        if node.op in _STITCHES:
            found = _parted(index, node, table_of)
            if found is not None:
                yield found


def _parted(index: GraphIndex, stitch: Proto, table_of: Callable[[Proto], str | None]) -> PartedLookup | None:
    inputs = data_inputs(stitch)
    count = len(inputs) // 2
    gathers = [_origin(index, tensor) for tensor in inputs[count:]]
    if not gathers or len(inputs) % 2 or any(node is None or node.op not in GATHERS for node in gathers):
        return None
    reads = [node for node in gathers if node is not None]
    if len({table_of(node) for node in reads}) != 1 or table_of(reads[0]) is None:
        return None
    ids = _partitioned(index, [data_inputs(node)[1] for node in reads])
    places = _partitioned(index, inputs[:count])
    if ids is None or places is None or ids[1] != places[1] or not _counts_up(index, places[0], ids[0]):
        return None
    default = None
    brought = {uses_default(node) for node in reads}
    if brought == {True}:
        rows = _partitioned(index, [data_inputs(node)[2] for node in reads])
        if rows is None or rows[1] != ids[1]:
            return None
        default = rows[0]
    elif brought != {False}:
        return None
    return PartedLookup(stitch.name, data_inputs(reads[0])[0].node, ids[0], default)


def uses_default(gather: Proto) -> bool:
    """True if absent keys read the row of `default_value` in the key's place."""
    return bool(attr(gather, "is_use_default_value_tensor").b)


def _partitioned(index: GraphIndex, parts: list[Endpoint]) -> tuple[Endpoint, Endpoint] | None:
    """The tensor that these are all parts of, in order, and the assignment; None if there is none."""
    found = [_source(index, tensor) for tensor in parts]
    node = index.nodes.get(found[0].node)
    if node is None or node.op != "DynamicPartition" or len(data_inputs(node)) < 2:
        return None
    if found != [Endpoint(node.name, number) for number in range(len(found))]:
        return None
    if attr(node, "num_partitions").i != len(found):
        return None
    data, assignment = data_inputs(node)[:2]
    return _source(index, data), _source(index, assignment)


def _counts_up(index: GraphIndex, places: Endpoint, ids: Endpoint) -> bool:
    """True for `range(size(ids))`."""
    node = index.nodes.get(places.node)
    if node is None or node.op != "Range" or len(data_inputs(node)) < 3:
        return False
    start, limit, step = data_inputs(node)[:3]
    size = _origin(index, limit)
    while size is not None and size.op == "Cast" and data_inputs(size):
        size = _origin(index, data_inputs(size)[0])
    counted = data_inputs(size) if size is not None and size.op == "Size" else []
    if not counted or _source(index, counted[0]) != ids:
        return False
    return _number(index, start) == 0 and _number(index, step) == 1


def _number(index: GraphIndex, tensor: Endpoint) -> int | None:
    value = const_value(_origin(index, tensor))
    is_number = value is not None and value.size == 1 and value.dtype.kind in "iu"
    return int(value.ravel()[0]) if value is not None and is_number else None


def _origin(index: GraphIndex, tensor: Endpoint) -> Proto | None:
    return index.nodes.get(_source(index, tensor).node)


def _source(index: GraphIndex, tensor: Endpoint) -> Endpoint:
    """Where a tensor comes from, Identity nodes passed over."""
    for _ in range(_MAX_STEPS):
        node = index.nodes.get(tensor.node)
        if node is None or node.op != "Identity" or not data_inputs(node):
            break
        tensor = data_inputs(node)[0]
    return tensor
