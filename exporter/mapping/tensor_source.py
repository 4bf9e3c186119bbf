"""Where a served variable's values come from, and how they are stored."""

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
    """Where the values of one served variable (whole, also if the graph partitions it) come from.

    `key` is the name in the published bundle; `variables` the graph variables restored from it: one, or the
    parts of a partitioned one; none for a table's contents. `cast` is the dtype to store instead of the
    tensor's. `gather_parts` > 0 says that the tensor's n slices hold rows in `mod` order (row i in slice
    i % n) and must be put in order; `scatter_parts` > 0 that the graph looks its n parts up by `mod`, so rows
    must be laid out so. `is_mapped` asks for a file of its own for each variable, from which servers map it.
    A table that is cast to int8 is stored as `exporter.wire.int8_codes` says.
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
        """The dtype in the published bundle."""
        return self.cast or self.tensor.dtype

    @property
    def bytes_(self) -> int:
        """Bytes in the published bundle."""
        itemsize = self.dtype.itemsize
        if itemsize is None:
            return self.tensor.bytes_
        return math.prod(self.stored(SliceSpec.whole(self.tensor.shape)).lengths) * itemsize

    @property
    def is_in_8_bits(self) -> bool:
        """True if each row is stored as codes with its scale behind them."""
        return self.cast is DType.INT8

    def stored(self, box: SliceSpec) -> SliceSpec:
        """A box of whole rows as it is stored."""
        if not self.is_in_8_bits:
            return box
        from exporter.wire.int8_codes import SCALE_BYTES

        full, lengths = ((*shape[:-1], shape[-1] + SCALE_BYTES) for shape in (box.full_shape, box.lengths))
        return SliceSpec(full, box.starts, lengths)

    def as_stored(self, variable: GraphVariable) -> GraphVariable:
        """One of its variables with the shape in which it is stored.

        One that has the dtype already has its own shape, too; its part is of the table as it was trained.
        """
        if not self.is_in_8_bits:
            return variable
        if variable.dtype is DType.INT8:
            return replace(variable, part=variable.part and self.stored(variable.part))
        box = self.stored(variable.box)
        return replace(variable, shape=box.lengths, part=variable.part and box)

    @property
    def is_verbatim(self) -> bool:
        """True if the stored bytes are served as they are, so that they can be linked."""
        return self.cast is None and not self.gather_parts and not self.scatter_parts


def stored_names(table: GraphTable, renamed: Callable[[str], str | None]) -> tuple[str, str]:
    """The names of a table's keys and values in a checkpoint."""
    return renamed(table.keys) or table.keys, renamed(table.values) or table.values


def cast_for(key: str, tensor: TensorRef, rules: MappingRules) -> DType | None:
    """The dtype that the rules store a variable in, None for the tensor's own."""
    return rules.cast(key) if tensor.dtype in CASTABLE else None


def group_parts(variables: Iterable[GraphVariable]) -> dict[str, tuple[GraphVariable, ...]]:
    """The variables by key, the parts of a partitioned one in their order."""
    groups: dict[str, list[GraphVariable]] = {}
    for variable in variables:
        groups.setdefault(variable.key, []).append(variable)

    def begins(member: GraphVariable) -> tuple[int, ...]:
        return member.part.starts if member.part else ()

    return {key: tuple(sorted(members, key=begins)) for key, members in groups.items()}
