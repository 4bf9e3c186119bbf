"""Write tensors whose bytes change: casts, and rows that move between layouts of partitions.

Values stream in blocks of bounded size. Every source byte passes by, so its checksum is verified: a flipped
bit never gets a new checksum that calls it right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.cast_values import cast_values
from exporter.checkpoint.source_shard import open_shard
from exporter.errors import CheckpointChanged, CorruptFile, MappingError
from exporter.mapping.build import TensorSource
from exporter.wire import crc32c
from exporter.wire.dtypes import DType

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 4 << 20
"""Source bytes in memory at a time for each tensor in work."""


# RestoreV2 joins and cuts slices of these types alone; of others it reads a slice only as it is stored
# (HANDLE_COPY in BundleReader::GetSliceValue, tensorflow/core/util/tensor_bundle/tensor_bundle.cc).
_JOINABLE = {
    DType.FLOAT,
    DType.DOUBLE,
    DType.BFLOAT16,
    DType.INT8,
    DType.INT16,
    DType.INT32,
    DType.INT64,
    DType.UINT8,
    DType.BOOL,
    DType.COMPLEX64,
    DType.COMPLEX128,
    DType.QINT8,
    DType.QUINT8,
    DType.QINT32,
    DType.INT4,
    DType.UINT4,
}


def is_needed(source: TensorSource) -> bool:
    """True if the source's bytes cannot be served as they are stored."""
    if source.is_verbatim:
        return source.tensor.dtype not in _JOINABLE and not _is_stored_as_served(source)
    return True


def layout(source: TensorSource, *, shard: int, offset: int) -> TensorRef:
    """The tensor as it will be stored from `offset` of `shard`; its checksums are not known yet.

    Moved rows are stored in the boxes that the graph restores; a cast alone keeps what is stored.

    Raises:
        MappingError: values would have to move out of, or into, parts that are not ranges of whole rows.
    """
    boxes = _boxes_served(source) if _moves_rows(source) else _boxes_stored(source.tensor)
    itemsize = source.dtype.numpy.itemsize
    slices = []
    for box in boxes:
        size = math.prod(box.lengths) * itemsize
        slices.append(SliceRef(box, Extent(shard, offset, size, 0)))
        offset += size
    if boxes[0].is_full:
        return TensorRef(source.key, source.dtype, source.tensor.shape, slices[0].extent)
    return TensorRef(source.key, source.dtype, source.tensor.shape, slices=tuple(slices))


def rewrite(source: TensorSource, catalog: Catalog, planned: TensorRef, target: int) -> TensorRef:
    """Write the values of `source` into the open file `target` where `layout` put them; with checksums.

    Raises:
        CorruptFile: a source checksum is wrong.
        CheckpointChanged: a shard vanished or became shorter.
        MappingError: a value is too large for the dtype it is cast to.
        OSError: the target cannot be written.
    """
    outputs = [_Output(target, extent.offset) for extent in planned.extents]
    if _moves_rows(source):
        _move_rows(source, catalog, outputs)
    else:
        for extent, output in zip(source.tensor.extents, outputs, strict=True):
            with _open(catalog, source.tensor, extent) as values:
                for block in values.blocks(BLOCK_BYTES // values.itemsize):
                    output.write(cast_values(block, source.dtype, source.key))
    if planned.extent is not None:
        return replace(planned, extent=outputs[0].stamp(planned.extent))
    stamped = (
        replace(part, extent=output.stamp(part.extent))
        for part, output in zip(planned.slices, outputs, strict=True)
        if part.extent is not None
    )
    return replace(planned, slices=tuple(stamped))


def _moves_rows(source: TensorSource) -> bool:
    """False if every stored box is served as it is, or may be left for RestoreV2 to join and cut."""
    if not source.gather_parts and not source.scatter_parts:
        if _is_stored_as_served(source):
            return False
        if not _has_whole_rows(source) and source.dtype in _JOINABLE:
            return False
    if not _has_whole_rows(source):
        raise MappingError(
            f"the values of {source.tensor.name!r} would have to be laid out anew, and its parts in the "
            "checkpoint or in the graph are not ranges of whole rows",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )
    return True


def _is_stored_as_served(source: TensorSource) -> bool:
    return set(_boxes_served(source)) <= set(_boxes_stored(source.tensor))


def _has_whole_rows(source: TensorSource) -> bool:
    """True if numbers lie in boxes that are ranges of whole rows, in the checkpoint and in the graph."""
    boxes = [*_boxes_stored(source.tensor), *_boxes_served(source)]
    whole = all(box.lengths[1:] == box.full_shape[1:] for box in boxes)
    return whole and source.tensor.is_complete and source.tensor.dtype.itemsize is not None


def _boxes_stored(tensor: TensorRef) -> list[SliceSpec]:
    return [part.spec for part in tensor.slices if part.extent is not None] or [SliceSpec.whole(tensor.shape)]


def _boxes_served(source: TensorSource) -> list[SliceSpec]:
    return sorted((variable.box for variable in source.variables), key=lambda box: box.starts)


def _move_rows(source: TensorSource, catalog: Catalog, outputs: list[_Output]) -> None:
    first, boxes = 0, _boxes_served(source)
    for block in _rows_in_order(source, catalog):
        for part, (box, output) in enumerate(zip(boxes, outputs, strict=True)):
            if source.scatter_parts:
                rows = block[(part - first) % len(boxes) :: len(boxes)]
            else:
                start = box.starts[0] - first
                rows = block[max(0, start) : max(0, start + box.lengths[0])]
            output.write(cast_values(rows, source.dtype, source.key))
        first += len(block)


def _rows_in_order(source: TensorSource, catalog: Catalog) -> Iterator[Array]:
    """The table's rows in their natural order, as two-dimensional blocks."""
    tensor = source.tensor
    width = math.prod(tensor.shape[1:])
    stored = sorted(tensor.slices, key=lambda part: part.spec.starts)
    extents = [part.extent for part in stored if part.extent is not None] or list(tensor.extents)
    rows = max(1, BLOCK_BYTES // max(1, width * tensor.dtype.numpy.itemsize))
    with ExitStack() as stack:
        inputs = [stack.enter_context(_open(catalog, tensor, extent)) for extent in extents]
        if source.gather_parts:
            yield from _interleave(inputs, tensor.shape[0], width, rows)
        else:
            for values in inputs:
                for block in values.blocks(rows * width):
                    yield block.reshape(-1, width)


def _interleave(inputs: list[_Input], rows: int, width: int, block_rows: int) -> Iterator[Array]:
    """Rows of `mod` parts in order: row i is row i // n of part i % n."""
    parts = len(inputs)
    step = max(parts, block_rows // parts * parts)
    for start in range(0, rows, step):
        block = np.empty((min(step, rows - start), width), inputs[0].dtype)
        for part, values in enumerate(inputs):
            into = block[part::parts]
            into[...] = values.read(into.size).reshape(into.shape)
        yield block


@contextmanager
def _open(catalog: Catalog, tensor: TensorRef, extent: Extent) -> Iterator[_Input]:
    path = catalog.path_of(extent)
    with open_shard(path, extent) as descriptor:
        yield _Input(descriptor, path, tensor, extent)


class _Input:
    """An extent's elements in sequence; when the last was read its checksum is compared."""

    def __init__(self, descriptor: int, path: Path, tensor: TensorRef, extent: Extent) -> None:
        self._descriptor = descriptor
        self._path = path
        self.dtype = tensor.dtype.numpy
        self.itemsize = self.dtype.itemsize
        self._name = tensor.name
        self._extent = extent
        self._done = 0
        self._crc = 0

    def blocks(self, elements: int) -> Iterator[Array]:
        """All elements, up to `elements` at a time."""
        while self._done < self._extent.size:
            yield self.read(min(max(1, elements), (self._extent.size - self._done) // self.itemsize))

    def read(self, elements: int) -> Array:
        """The next elements."""
        # A read, not a map: a file that shrinks under a map kills the process.
        size = elements * self.itemsize
        data = os.pread(self._descriptor, size, self._extent.offset + self._done)
        if len(data) != size:
            raise CheckpointChanged(f"{self._path} became shorter after its index was read")
        self._crc = crc32c.extend(self._crc, data)
        self._done += size
        if self._done == self._extent.size and crc32c.mask(self._crc) != self._extent.crc32c:
            raise CorruptFile(
                f"{self._path} is damaged: the checksum of {self._name!r} is "
                f"{crc32c.mask(self._crc):08x}, its index says {self._extent.crc32c:08x}"
            )
        return np.frombuffer(data, self.dtype)


class _Output:
    """A place in the target file that fills from its beginning."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._crc = 0

    def write(self, values: Array) -> None:
        data = values.tobytes()
        self._crc = crc32c.extend(self._crc, data)
        while data:
            written = os.pwrite(self._descriptor, data, self._offset)
            self._offset += written
            data = data[written:]

    def stamp(self, extent: Extent) -> Extent:
        """The extent with the checksum of what was written."""
        return replace(extent, crc32c=crc32c.mask(self._crc))
