"""Read checkpoints of format V1: one file, or shards that a pattern names, each a sorted string table.

They are as old as TensorFlow 0.x and its own reader knows them best, so TensorFlow is imported to read one.
The largest tensor, or part of one, passes through memory. Each file lists its parts under the empty key; they
are read here because the row order of a table depends on them, and TensorFlow's reader does not return them.
Source: tensorflow/core/util/{tensor_slice_reader.h,saved_tensor_slice.proto}.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint.file_range import FileRange
from exporter.checkpoint.sstable import MAGIC, read_first_block
from exporter.checkpoint.tensor_bundle import GLOBAL_STEP, step_in_name
from exporter.checkpoint.tensor_values import read_step
from exporter.errors import CorruptFile, MissingShard
from exporter.storage.local_paths import quoted
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto, message_class

FAMILY = "TensorFlow V1"


class V1Values(Struct, frozen=True):
    """A tensor in files of format V1, or a part of one, in RestoreV2's notation ("" for the whole)."""

    files: tuple[FileRange, ...]
    pattern: str
    name: str
    dtype: DType
    part: str = ""

    def blocks(self) -> Iterator[Any]:
        """Yield all values as one flat block, read by TensorFlow, which is imported.

        CheckpointChanged if a file was replaced or vanished, CheckpointError if it cannot be opened,
        CorruptFile if TensorFlow cannot read it: all during the iteration.
        """
        for file in self.files:
            with file.open():  # raises if the file was replaced
                pass
        yield _restored(self.pattern, self.name, self.dtype, self.part).reshape(-1)


def read_v1(pattern: Path, files: list[Path]) -> Catalog:
    """Read the catalog of the checkpoint in these files, sorted, at least one; TensorFlow calls it `pattern`.

    Imports TensorFlow. MissingShard if their number differs from the one in their names; CorruptFile,
    TruncatedFile or UnsupportedFormat if one is damaged or not of format V1; CheckpointNotFound or
    CheckpointChanged if one vanished; CheckpointError if one cannot be read.
    """
    ranges = tuple(FileRange.whole(file) for file in files)
    said = re.search(r"-of-([0-9]{5})$", files[0].name)
    if len(ranges) != (expected := int(said[1]) if said else 1):
        raise MissingShard(f"there are {len(ranges)} of {expected} shards of {pattern}")
    for file in ranges:
        if file.size < len(MAGIC) or file.part(file.size - 8, 8).read() != MAGIC:
            raise CorruptFile(
                f"{file.path} is not a checkpoint",
                cause="its end is not that of format V1",
                hint="name a directory of checkpoints, a checkpoint's prefix, or an archive; or copy the "
                "file again"
                if file.path.suffix != ".py"
                else f"a file with a builder goes behind --model: --model {quoted(file.path)}:FUNCTION",
            )
    tensors = {}
    parts = _parts(ranges)
    for name, (dtype, shape) in sorted(_listed(str(pattern)).items()):
        content = V1Values(ranges, str(pattern), name, dtype)
        slices = tuple(
            SliceRef(spec, None, replace(content, part=spec.restore_spec)) for spec in parts.get(name, ())
        )
        tensors[name] = TensorRef(name, dtype, shape, slices=slices, content=content)
    sizes = tuple(file.size for file in ranges)
    catalog = Catalog(FAMILY, pattern, tensors, tuple(files), sizes)
    step = read_step(catalog, GLOBAL_STEP)
    return replace(catalog, step=step_in_name(pattern.name.partition("-?")[0]) if step is None else step)


def _parts(files: Iterable[FileRange]) -> dict[str, list[SliceSpec]]:
    """Return the boxes of the tensors that are stored in parts, by name; tensors stored whole are left out.

    CorruptFile, TruncatedFile or UnsupportedFormat if a file is damaged, CheckpointChanged if it was
    replaced, CheckpointError if it cannot be read.
    """
    found: dict[str, list[SliceSpec]] = {}
    for file in files:
        for listed in _meta(file).tensor:
            shape = tuple(dim.size for dim in listed.shape.dim)
            found.setdefault(listed.name, []).extend(_spec(file.path, shape, each) for each in listed.slice)
    return {name: specs for name, specs in found.items() if not any(spec.is_full for spec in specs)}


def _meta(file: FileRange) -> Proto:
    with file.open() as descriptor, mmap.mmap(descriptor, file.size, prot=mmap.PROT_READ) as data:
        entries = read_first_block(data, file.path)  # type: ignore[arg-type]  # a map is read as bytes are
    if not entries or entries[0][0] != b"":
        raise CorruptFile(f"{file.path} is damaged: it does not list its tensors")
    try:
        return message_class("SavedTensorSlices").FromString(entries[0][1]).meta
    except DecodeError as error:
        raise CorruptFile(f"{file.path} is damaged: its list of tensors", cause=str(error)) from None


def _spec(path: Path, shape: tuple[int, ...], part: Proto) -> SliceSpec:
    """Return the box of a part of a tensor, given the tensor's shape and the part as a TensorSliceProto.

    A dimension that is taken whole has no length there. CorruptFile if the box is not inside the tensor.
    """
    starts = tuple(box.start for box in part.extent)
    ends = tuple(
        box.start + box.length if box.HasField("length") else size
        for box, size in zip(part.extent, shape, strict=False)
    )
    if not len(starts) == len(ends) == len(shape) or any(
        not 0 <= start <= end <= size for start, end, size in zip(starts, ends, shape, strict=True)
    ):
        raise CorruptFile(
            f"{path} is damaged: a part of a tensor of shape {list(shape[:8])} lies outside of it"
        )
    return SliceSpec(shape, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _listed(pattern: str) -> dict[str, tuple[DType, tuple[int, ...]]]:
    import tensorflow as tf

    try:
        reader = tf.compat.v1.train.NewCheckpointReader(pattern)
        types = reader.get_variable_to_dtype_map()
        shapes = reader.get_variable_to_shape_map()
        return {name: (DType(types[name].as_datatype_enum), tuple(shapes[name])) for name in shapes}
    except (tf.errors.OpError, ValueError) as error:
        raise CorruptFile(f"{pattern} is damaged", cause=str(error)) from None


def _restored(pattern: str, name: str, dtype: DType, part: str) -> np.ndarray[Any, Any]:
    """Read a tensor, or `part` of it ("" for the whole), by RestoreV2, which joins parts.

    CorruptFile if TensorFlow cannot read it.
    """
    import tensorflow as tf

    try:
        with tf.init_scope():  # eager, also where a graph is the default
            found = tf.raw_ops.RestoreV2(
                prefix=pattern, tensor_names=[name], shape_and_slices=[part], dtypes=[int(dtype)]
            )
        return np.asarray(found[0].numpy())
    except tf.errors.OpError as error:
        raise CorruptFile(f"{pattern} is damaged at {name!r}", cause=str(error.message)) from None
