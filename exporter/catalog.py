"""Values that describe a checkpoint: its tensors, and the files and offsets of their bytes.

Every checkpoint family is read into a `Catalog`; later stages know nothing else of a source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field

from exporter.wire.dtypes import DType


class Extent(Struct, frozen=True):
    """`size` consecutive bytes at `offset` of one shard, and their crc32c, masked as TensorFlow does it."""

    shard: int
    offset: int
    size: int
    crc32c: int


class SliceSpec(Struct, frozen=True):
    """A box in a tensor of shape `full_shape`: its start and length in each dimension."""

    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> SliceSpec:
        """Return the box that is all of a tensor of this shape."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of an array of shape `full_shape`."""
        return tuple(slice(start, start + n) for start, n in zip(self.starts, self.lengths, strict=True))

    @property
    def is_full(self) -> bool:
        """True if the box is the whole tensor."""
        return self.lengths == self.full_shape

    @property
    def restore_spec(self) -> str:
        """The box in the form of RestoreV2's `shape_and_slices`: `"6 4 0,3:0,4"`."""
        # Source: tensorflow/core/framework/tensor_slice.h. A dimension taken whole could be written `-`, but
        # Savers store numbers, and only a spec equal to the stored one is read without joining and cutting
        # (which float16, the larger unsigned types and float8 do not have).
        boxes = (f"{start},{length}" for start, length in zip(self.starts, self.lengths, strict=True))
        return " ".join([*map(str, self.full_shape), ":".join(boxes)])


class Content(Protocol):
    """Values in a file that is not a tensor bundle: without a checksum, perhaps compressed."""

    def blocks(self) -> Iterator[Any]:
        """Yield the values in C order and little endian, as flat numpy arrays.

        The arrays are of bounded size, except where a format can only be read whole. Raises CheckpointError
        (and subclasses), while iterated, if the file is damaged, was replaced, or cannot be read.
        """


class SliceRef(Struct, frozen=True):
    """One slice of a partitioned tensor, stored in a bundle (`extent`) or another file (`content`).

    It is missing if both are None.
    """

    spec: SliceSpec
    extent: Extent | None
    content: Content | None = None


class Naming(Enum):
    """The kind of a checkpoint's tensor names, by which variables are found.

    `NAMES`: names of variables. `LAYERS`: the class and number of a layer and the number of its value, as in
    Keras 3's `layers/dense_1/vars/0`. `ORDER`: only a position in a list.
    """

    NAMES = "names"
    LAYERS = "layers"
    ORDER = "order"


class TensorRef(Struct, frozen=True):
    """A named tensor, stored whole (`extent`), in `slices` or in another file (`content`).

    `owner` is its layer.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    extent: Extent | None = None
    slices: tuple[SliceRef, ...] = ()
    content: Content | None = None
    owner: str = ""

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The runs of the tensor's bytes in a bundle: one for the whole, else one for each stored slice.

        Empty for a tensor in another file.
        """
        if self.extent is not None:
            return (self.extent,)
        return tuple(part.extent for part in self.slices if part.extent is not None)

    @property
    def is_complete(self) -> bool:
        """True if the tensor is stored whole, or its slices in the bundle have as many elements as it has."""
        stored = sum(math.prod(part.spec.lengths) for part in self.slices if part.extent is not None)
        return self.extent is not None or self.content is not None or stored == self.elements

    @property
    def bytes_(self) -> int:
        """Bytes on disk, without missing slices; of a tensor outside a bundle, its bytes in a bundle.

        Outside a bundle 0 for strings, and TypeError for a type that the installed ml-dtypes lacks.
        """
        if self.content is not None:
            return self.elements * (self.dtype.itemsize or 0)
        return sum(extent.size for extent in self.extents)

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


class Catalog(Struct, frozen=True):
    """A checkpoint: its tensors by name, and the shard files to which their extents refer.

    `prefix` is TensorFlow's checkpoint path; `step` is the global step, None if the checkpoint has none;
    `family` is the trainer's family in the words of the report; `index_digest` is the lower-case SHA-256 of
    the index that was read, None without an index.
    """

    family: str
    prefix: Path
    tensors: Mapping[str, TensorRef]
    shards: tuple[Path, ...]
    shard_sizes: tuple[int, ...]
    step: int | None = None
    notes: tuple[str, ...] = field(default=())
    naming: Naming = Naming.NAMES
    index_digest: str | None = None

    def __repr__(self) -> str:
        size = f"{len(self.tensors)} tensors in {len(self.shards)} file{'' if len(self.shards) == 1 else 's'}"
        return f"Catalog({str(self.prefix)!r}, step={self.step}, {size})"

    @property
    def label(self) -> str:
        """The checkpoint's name for people: the last part of its prefix, such as `model.ckpt-100`.

        If that has no digit and the directory's name ends in one, both: `100/variables`.
        """
        directory, name = self.prefix.parent.name, self.prefix.name
        return f"{directory}/{name}" if directory[-1:].isdigit() and not any(map(str.isdigit, name)) else name

    @property
    def is_bundle(self) -> bool:
        """True if all tensors are stored in a tensor bundle; False if a bundle has to be written first."""
        return all(ref.content is None for ref in self.tensors.values())

    @property
    def bytes_(self) -> int:
        """Sum of the tensors' `bytes_`: on disk, or if they are not in a bundle, as in a bundle.

        Raises TypeError for a tensor outside a bundle whose type the installed ml-dtypes lacks.
        """
        return sum(ref.bytes_ for ref in self.tensors.values())

    def path_of(self, extent: Extent) -> Path:
        """Return the path of the shard that holds an extent."""
        return self.shards[extent.shard]


class ExtraKind(Enum):
    """The purpose of an ignored tensor, in the report's words."""

    SLOT = "optimizer slot"
    GLOBAL_STEP = "global step"
    MOVING_AVERAGE = "moving average"
    COUNTER = "counter"
    BOOKKEEPING = "embedding bookkeeping"
    OBJECT_GRAPH = "object graph"
    OTHER = "other"


class Extra(Struct, frozen=True):
    """A tensor of the checkpoint that inference does not need, and its purpose."""

    tensor: TensorRef
    kind: ExtraKind
