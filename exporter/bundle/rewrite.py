"""Tensors whose bytes change on the way: casts, and rows that move between whole tables and `mod` parts.

Values stream in blocks of bounded size. Every source byte passes by, so its checksum is verified: a flipped
bit never gets a new checksum that calls it right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exporter.bundle.source_shard import open_shard
from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint import crc
from exporter.errors import CheckpointChanged, CorruptFile, MappingError
from exporter.mapping import Source
from exporter.row_order import mod_lengths

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 4 << 20
"""Source bytes in memory at a time for each tensor in work."""


def layout(source: Source, *, shard: int, offset: int) -> TensorRef:
    """The tensor as it will be stored from `offset` of `shard`; its checksums are not known yet.

    A cast keeps the slices that are stored; moved rows make a whole tensor, or one slice for each part.

    Raises:
        MappingError: rows are to be moved out of slices that are not ranges of whole rows, or not all stored.
    """
    tensor = source.tensor
    if source.gather_parts or source.scatter_parts:
        _require_whole_rows(tensor)
        specs = _part_specs(tensor.shape, source.scatter_parts)
    else:
        specs = [part.spec for part in tensor.slices if part.extent is not None]
    itemsize = source.dtype.numpy.itemsize
    if not specs:
        extent = Extent(shard, offset, tensor.elements * itemsize, 0)
        return TensorRef(source.key, source.dtype, tensor.shape, extent)
    slices = []
    for spec in specs:
        size = math.prod(spec.lengths) * itemsize
        slices.append(SliceRef(spec, Extent(shard, offset, size, 0)))
        offset += size
    return TensorRef(source.key, source.dtype, tensor.shape, slices=tuple(slices))


def rewrite(source: Source, catalog: Catalog, planned: TensorRef, target: int) -> TensorRef:
    """Write the values of `source` into the open file `target` where `layout` put them; with checksums.

    Raises:
        CorruptFile: a source checksum is wrong.
        CheckpointChanged: a shard vanished or became shorter.
        MappingError: a value is too large for the dtype it is cast to.
        OSError: the target cannot be written.
    """
    outputs = [_Output(target, extent.offset) for extent in planned.extents]
    if source.gather_parts or source.scatter_parts:
        _move_rows(source, catalog, outputs)
    else:
        for extent, output in zip(source.tensor.extents, outputs, strict=True):
            with _open(catalog, source.tensor, extent) as values:
                for block in values.blocks(BLOCK_BYTES // values.itemsize):
                    output.write(_cast(block, source))
    if planned.extent is not None:
        return replace(planned, extent=outputs[0].stamp(planned.extent))
    stamped = (
        replace(part, extent=output.stamp(part.extent))
        for part, output in zip(planned.slices, outputs, strict=True)
        if part.extent is not None
    )
    return replace(planned, slices=tuple(stamped))


def _move_rows(source: Source, catalog: Catalog, outputs: list[_Output]) -> None:
    parts, first = len(outputs), 0
    for block in _rows_in_order(source, catalog):
        for part, output in enumerate(outputs):
            output.write(_cast(block[(part - first) % parts :: parts], source))
        first += len(block)


def _rows_in_order(source: Source, catalog: Catalog) -> Iterator[Array]:
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


def _cast(values: Array, source: Source) -> Array:
    if source.cast is None:
        return values
    with np.errstate(over="ignore"):  # found below, and reported with the variable's name
        converted = values.astype(source.cast.numpy)
    if np.isfinite(converted).all():
        return converted
    lost = np.isfinite(values) & ~np.isfinite(converted)
    if lost.any():
        raise MappingError(
            f"variable {source.key!r} holds {values[lost][0]:g}, which is too large for {source.cast.label}",
            hint="cast it to bfloat16, or leave that variable out of --cast",
        )
    return converted


@contextmanager
def _open(catalog: Catalog, tensor: TensorRef, extent: Extent) -> Iterator[_Input]:
    path = catalog.path_of(extent)
    with open_shard(path) as descriptor:
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
        self._crc = crc.extend(self._crc, data)
        self._done += size
        if self._done == self._extent.size and crc.mask(self._crc) != self._extent.crc32c:
            raise CorruptFile(
                f"{self._path} is damaged: the checksum of {self._name!r} is "
                f"{crc.mask(self._crc):08x}, its index says {self._extent.crc32c:08x}"
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
        self._crc = crc.extend(self._crc, data)
        while data:
            written = os.pwrite(self._descriptor, data, self._offset)
            self._offset += written
            data = data[written:]

    def stamp(self, extent: Extent) -> Extent:
        """The extent with the checksum of what was written."""
        return replace(extent, crc32c=crc.mask(self._crc))


def _part_specs(shape: tuple[int, ...], parts: int) -> list[SliceSpec]:
    specs, start = [], 0
    for rows in mod_lengths(shape[0], parts) if parts else []:
        specs.append(SliceSpec(shape, (start, *([0] * (len(shape) - 1))), (rows, *shape[1:])))
        start += rows
    return specs


def _require_whole_rows(tensor: TensorRef) -> None:
    if not tensor.is_complete or any(part.spec.lengths[1:] != tensor.shape[1:] for part in tensor.slices):
        raise MappingError(
            f"the rows of {tensor.name!r} would have to be put in another order, and its slices in the "
            "checkpoint are not ranges of whole rows",
            hint="export with the trainer's own partitioner, so that the table keeps its partitions",
        )
