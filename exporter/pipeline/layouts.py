"""Align two checkpoints that store a table in different partitions, so that equal rows are compared.

A table lies whole, in slices of one tensor, or in tensors of its own that are called `<table>/part_<n>`.
Under `mod`, row i is row i // n of slice i % n: if the trainer's graph beside a checkpoint says so, rows are
read in the order of their ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from exporter.catalog import Catalog, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.graph.inference_graph import PartitionStrategy
from exporter.graph.metagraph import read_metagraph
from exporter.graph.partition import trained_strategies
from exporter.mapping.row_order import mod_lengths
from exporter.wire.dtypes import DType

_PART = re.compile(r"(.+)/part_([0-9]+)(/.+)?")
_Parts = Mapping[int, TensorRef]


def side_by_side(catalog: Catalog, other: Catalog) -> dict[str, RowReader]:
    """The tensors of `catalog` by name, laid out so that they compare with those of `other`."""
    tensors = _joined(_compared(catalog), _compared(other))
    theirs = _joined(_compared(other), _compared(catalog))
    moved = {
        name
        for name, ref in tensors.items()
        if name in theirs and _boxes(ref) != _boxes(theirs[name]) and ref.shape == theirs[name].shape
    }
    strategies = {**_strategies(other), **_strategies(catalog)} if moved else {}
    found = {}
    for name, ref in tensors.items():
        gather = len(ref.slices) if name in moved and _is_mod(ref, _strategy(strategies, name)) else 0
        whole = SliceSpec.whole(ref.shape)
        found[name] = RowReader(name, catalog, ref, whole, ref.dtype, SliceOrder(gather))
    return found


def _compared(catalog: Catalog) -> dict[str, TensorRef]:
    return {
        name: ref
        for name, ref in catalog.tensors.items()
        if ref.is_complete and name != OBJECT_GRAPH and ref.dtype is not DType.VARIANT
    }


def _joined(tensors: Mapping[str, TensorRef], others: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """The tensors, with `<table>/part_<n>` as one where the other side has the table in other parts."""
    groups, other_groups = dict(_groups(tensors)), dict(_groups(others))
    result = dict(tensors)
    for name, parts in groups.items():
        is_there = name in others or name in other_groups
        if not is_there or name in tensors or _shapes(parts) == _shapes(other_groups.get(name, {})):
            continue
        if (table := _table(name, parts)) is not None:
            for part in parts.values():
                del result[part.name]
            result[name] = table
    return result


def _groups(tensors: Mapping[str, TensorRef]) -> Iterator[tuple[str, _Parts]]:
    found: dict[str, dict[int, TensorRef]] = {}
    for ref in tensors.values():
        if match := _PART.fullmatch(ref.name):
            found.setdefault(f"{match[1]}{match[3] or ''}", {})[int(match[2])] = ref
    yield from found.items()


def _shapes(parts: _Parts) -> dict[int, tuple[int, ...]]:
    return {number: ref.shape for number, ref in parts.items()}


def _table(name: str, parts: _Parts) -> TensorRef | None:
    """The table that the parts are of; None if they do not fit together."""
    ordered = [parts[number] for number in sorted(parts)]
    first = ordered[0]
    fits = all(
        ref.extent is not None and ref.dtype is first.dtype and ref.shape and ref.shape[1:] == first.shape[1:]
        for ref in ordered
    )
    if sorted(parts) != list(range(len(parts))) or not fits or first.dtype.itemsize is None:
        return None
    shape = (sum(ref.shape[0] for ref in ordered), *first.shape[1:])
    slices, start = [], 0
    for ref in ordered:
        slices.append(SliceRef(SliceSpec(shape, (start, *(0 for _ in shape[1:])), ref.shape), ref.extent))
        start += ref.shape[0]
    return TensorRef(name, first.dtype, shape, slices=tuple(slices))


def _boxes(ref: TensorRef) -> frozenset[SliceSpec]:
    return frozenset(part.spec for part in ref.slices)


def _strategies(catalog: Catalog) -> Mapping[str, PartitionStrategy]:
    """How the trainer looked its tables up, if its graph lies beside the checkpoint."""
    path = catalog.prefix.with_name(f"{catalog.prefix.name}.meta")
    return trained_strategies(read_metagraph(path)) if path.is_file() else {}


def _strategy(strategies: Mapping[str, PartitionStrategy], name: str) -> PartitionStrategy | None:
    """That of a table; that of a slot or an average is its table's, whose name its own begins with."""
    owners = [owner for owner in strategies if name == owner or name.startswith(f"{owner}/")]
    return strategies[min(owners, key=len)] if owners else None


def _is_mod(ref: TensorRef, strategy: PartitionStrategy | None) -> bool:
    if strategy is not PartitionStrategy.MOD or len(ref.slices) < 2:
        return False
    boxes = sorted(_boxes(ref), key=lambda box: box.starts)
    return [box.lengths for box in boxes] == [
        (rows, *ref.shape[1:]) for rows in mod_lengths(ref.shape[0], len(boxes))
    ]
