"""InferenceGraph x Catalog -> Mapping: which tensor each variable is restored from, and what is left over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from exporter.catalog import Catalog, TensorRef
from exporter.dtypes import DType
from exporter.graph.inference_graph import GraphVariable


class ExtraKind(Enum):
    """What an ignored tensor was for, in the report's words."""

    SLOT = "optimizer slot"
    GLOBAL_STEP = "global step"
    MOVING_AVERAGE = "moving average"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor of the checkpoint that inference does not need."""

    tensor: TensorRef
    kind: ExtraKind


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values of one served variable (whole, also if the graph partitions it) come from.

    `key` is the name in the published bundle; `variables` the graph variables restored from it: one, or the
    parts of a partitioned one. `cast` is the dtype to store instead of the tensor's. `gather_parts` > 0 says
    that the tensor's n slices hold rows in `mod` order (row i in slice i % n) and must be put in order;
    `scatter_parts` > 0 that the graph looks its n parts up by `mod`, so rows must be laid out so.
    """

    key: str
    variables: tuple[GraphVariable, ...]
    tensor: TensorRef
    via: str = "name"
    cast: DType | None = None
    gather_parts: int = 0
    scatter_parts: int = 0

    @property
    def dtype(self) -> DType:
        """The dtype in the published bundle."""
        return self.cast or self.tensor.dtype

    @property
    def is_verbatim(self) -> bool:
        """True if the stored bytes are served as they are, so that they can be linked."""
        return self.cast is None and not self.gather_parts and not self.scatter_parts


@dataclass(frozen=True)
class Mapping:
    """Every served variable's source, and the tensors that nobody needs."""

    catalog: Catalog
    sources: tuple[Source, ...]
    extras: tuple[Extra, ...]

    @property
    def bytes_(self) -> int:
        """Bytes of the served variables as published."""
        return sum(
            source.tensor.elements * (source.dtype.itemsize or 0)
            if source.dtype.itemsize
            else source.tensor.bytes_
            for source in self.sources
        )
