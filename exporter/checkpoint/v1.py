"""Read checkpoints of format V1: one file, or shards that a pattern names, each a sorted string table.

They are as old as TensorFlow 0.x and its own reader knows them best, so TensorFlow is imported to read one.
It gives whole tensors: the largest one passes through memory.
Source: tensorflow/core/util/tensor_slice_reader.h.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.file_range import FileRange
from exporter.checkpoint.tensor_bundle import GLOBAL_STEP, step_in_name
from exporter.errors import CorruptFile, MissingShard
from exporter.wire.dtypes import DType

_TABLE_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FAMILY = "TensorFlow V1"


class V1Values(Struct, frozen=True):
    """A tensor in files of format V1."""

    files: tuple[FileRange, ...]
    pattern: str
    name: str
    dtype: DType

    def blocks(self) -> Iterator[Any]:
        """See `Content.blocks`; the one block is the whole tensor."""
        for file in self.files:
            with file.open():  # raises if it is another one by now
                pass
        yield _restored(self.pattern, self.name, self.dtype).reshape(-1)


def read_v1(pattern: Path, files: list[Path]) -> Catalog:
    """The tensors of the checkpoint whose files are `files`; `pattern` is what TensorFlow calls it.

    Raises:
        MissingShard: a shard is not there.
        CorruptFile: a file is no checkpoint.
        CheckpointError: a file cannot be read.
    """
    ranges = tuple(FileRange.whole(file) for file in files)
    if len(ranges) != (expected := _number_of_shards(files[0].name)):
        raise MissingShard(f"there are {len(ranges)} of {expected} shards of {pattern}")
    for file in ranges:
        if file.size < len(_TABLE_MAGIC) or file.part(file.size - 8, 8).read() != _TABLE_MAGIC:
            raise CorruptFile(f"{file.path} is not a checkpoint", cause="its end is not that of format V1")
    tensors = {}
    for name, (dtype, shape) in sorted(_listed(str(pattern)).items()):
        content = V1Values(ranges, str(pattern), name, dtype)
        tensors[name] = TensorRef(name, dtype, shape, content=content)
    sizes = tuple(file.size for file in ranges)
    return Catalog(FAMILY, pattern, tensors, tuple(files), sizes, step=_step(pattern, tensors))


def _number_of_shards(name: str) -> int:
    found = re.search(r"-of-([0-9]{5})$", name)
    return int(found[1]) if found else 1


def _step(pattern: Path, tensors: dict[str, TensorRef]) -> int | None:
    ref = tensors.get(GLOBAL_STEP)
    if ref is not None and ref.content is not None and ref.shape == ():
        return int(next(ref.content.blocks())[0])
    return step_in_name(pattern.name.partition("-?")[0])


def _listed(pattern: str) -> dict[str, tuple[DType, tuple[int, ...]]]:
    import tensorflow as tf

    try:
        reader = tf.compat.v1.train.NewCheckpointReader(pattern)
        types = reader.get_variable_to_dtype_map()
        shapes = reader.get_variable_to_shape_map()
        return {name: (DType(types[name].as_datatype_enum), tuple(shapes[name])) for name in shapes}
    except (tf.errors.OpError, ValueError) as error:
        raise CorruptFile(f"{pattern} is damaged", cause=str(error)) from None


def _restored(pattern: str, name: str, dtype: DType) -> np.ndarray[Any, Any]:
    """A tensor by the operation that restores it, which joins parts, as the reader does not."""
    import tensorflow as tf

    try:
        with tf.init_scope():
            found = tf.raw_ops.RestoreV2(
                prefix=pattern, tensor_names=[name], shape_and_slices=[""], dtypes=[int(dtype)]
            )
        return np.asarray(found[0].numpy())
    except tf.errors.OpError as error:
        raise CorruptFile(f"{pattern} is damaged at {name!r}", cause=str(error.message)) from None
