"""The source of a served variable's values, and the form in which they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import SliceSpec, TensorRef
from exporter.graph.inference_graph import GraphTable, GraphVariable
from exporter.mapping.mapping_rules import MappingRules
from exporter.wire.dtypes import DType

CASTABLE = {DType.FLOAT, DType.DOUBLE}


class TensorSource(Struct, frozen=True):
    """The tensor with the values of one served variable (whole, also if the graph partitions it).

    `key` is the name in the published bundle; `variables` the graph variables restored from it: one, or the
    parts of a partitioned one; none for a table's contents. `cast` is the dtype to store instead of the
    tensor's. `gather_parts` > 0 is the number of the tensor's slices whose rows are in `mod` order (row i in
    slice i % n) and must be put in order; `scatter_parts` > 0 the number of the graph's parts that it looks
    up by `mod`, so that rows must be stored in that order. With `is_mapped`, each variable gets a file of its
    own, from which servers map it. A table that is cast to int8 is stored in the form of
    `exporter.wire.int8_codes`.
    """

    key: str
    variables: tuple[GraphVariable, ...]
    tensor: TensorRef
    via: str = "name"
    cast: DType | None = None
    gather_parts: int = 0
    scatter_parts: int = 0
    is_mapped: bool = False

    @property
    def dtype(self) -> DType:
        """The dtype in the published bundle: the cast's, else the tensor's own."""
        return self.cast or self.tensor.dtype

    @property
    def bytes_(self) -> int:
        """The bytes of the source in the published bundle; of strings, in the checkpoint."""
        itemsize = self.dtype.itemsize
        if itemsize is None:
            return self.tensor.bytes_
        return math.prod(self.stored(SliceSpec.whole(self.tensor.shape)).lengths) * itemsize

    @property
    def is_in_8_bits(self) -> bool:
        """True if each row is stored as int8 codes followed by the row's scale."""
        return self.cast is DType.INT8

    def stored(self, box: SliceSpec) -> SliceSpec:
        """Return the box in which whole rows are stored: a wider one in 8 bits, else `box` itself."""
        if not self.is_in_8_bits:
            return box
        from exporter.wire.int8_codes import SCALE_BYTES  # late: manifests are read without numpy

        full, lengths = ((*shape[:-1], shape[-1] + SCALE_BYTES) for shape in (box.full_shape, box.lengths))
        return SliceSpec(full, box.starts, lengths)

    def as_stored(self, variable: GraphVariable) -> GraphVariable:
        """Return one of the source's variables with the shape in which it is stored.

        In 8 bits its rows are wider; else it is returned unchanged. A variable of type int8 has that shape
        already; only its part still has the width of the trained table.
        """
        if not self.is_in_8_bits:
            return variable
        if variable.dtype is DType.INT8:
            return replace(variable, part=variable.part and self.stored(variable.part))
        box = self.stored(variable.box)
        return replace(variable, shape=box.lengths, part=variable.part and box)

    @property
    def is_verbatim(self) -> bool:
        """True if the stored bytes are served unchanged, so that they can be linked."""
        return self.cast is None and not self.gather_parts and not self.scatter_parts


def stored_names(table: GraphTable, renamed: Callable[[str], str | None]) -> tuple[str, str]:
    """Return the names of a table's keys and values in a checkpoint.

    `renamed` returns the trainer's name of a tensor, None if no rule gives one; its errors are passed on.
    """
    return renamed(table.keys) or table.keys, renamed(table.values) or table.values


def cast_for(key: str, tensor: TensorRef, rules: MappingRules) -> DType | None:
    """Return the dtype that the rules store a variable in; None for the tensor's own dtype.

    Only float32 and float64 are cast.
    """
    return rules.cast(key) if tensor.dtype in CASTABLE else None


def group_parts(variables: Iterable[GraphVariable]) -> dict[str, tuple[GraphVariable, ...]]:
    """Group variables by key, in the order of first occurrence.

    The parts of a partitioned variable are in the order of their starts in the whole.
    """
    groups: dict[str, list[GraphVariable]] = {}
    for variable in variables:
        groups.setdefault(variable.key, []).append(variable)

    def begins(member: GraphVariable) -> tuple[int, ...]:
        return member.part.starts if member.part else ()

    return {key: tuple(sorted(members, key=begins)) for key, members in groups.items()}
