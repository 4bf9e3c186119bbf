"""Tensor bundles for tests: by TensorFlow's own kernels, by our writer, and hostile ones made by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cramjam
import numpy as np

from exporter.catalog import Extent, TensorRef
from exporter.checkpoint.sstable import read_table, varint, write_table
from exporter.checkpoint.tensor_bundle import BundleWriter, shard_path
from exporter.wire import protos
from exporter.wire.crc32c import masked_crc
from exporter.wire.dtypes import DType

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)


def save(prefix: Path, tensors: Mapping[str, Any], specs: Sequence[str] = ()) -> None:
    """Write a bundle of one shard with TensorFlow's SaveV2."""
    save_parts(prefix, list(tensors), list(tensors.values()), specs)


def save_parts(prefix: Path, names: Sequence[str], values: Sequence[Any], specs: Sequence[str] = ()) -> None:
    """As `save`, for names that repeat: slices of partitioned tensors."""
    import tensorflow as tf

    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(names),
        shape_and_slices=list(specs) or [""] * len(names),
        tensors=[tf.constant(value) for value in values],
    )


def restore(prefix: Path, refs: Iterable[TensorRef], specs: Sequence[str] = ()) -> list[np.ndarray[Any, Any]]:
    """Read tensors with TensorFlow's RestoreV2."""
    import tensorflow as tf

    refs = list(refs)
    tensors = tf.raw_ops.RestoreV2(
        prefix=str(prefix),
        tensor_names=[ref.name for ref in refs],
        shape_and_slices=list(specs) or [""] * len(refs),
        dtypes=[tf.dtypes.as_dtype(int(ref.dtype)) for ref in refs],
    )
    return [np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None) for tensor in tensors]


def write(prefix: Path, **tensors: Any) -> Path:
    """A small bundle by our writer; without tensors, one named `w`."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with BundleWriter(prefix) as writer:
        for name, value in (tensors or {"w": np.arange(4, dtype=np.float32)}).items():
            writer.add(name, np.asarray(value))
    return prefix


def header(num_shards: int = 1, **fields: Any) -> tuple[bytes, bytes]:
    """The header's table entry."""
    return b"", protos.BundleHeaderProto(num_shards=num_shards, **fields).SerializeToString()


def entry(
    name: str | bytes,
    shape: Sequence[int] = (2,),
    *,
    dtype: int = DType.FLOAT,
    extent: Extent | None = None,
    slices: Iterable[Sequence[tuple[int, int]]] = (),
    **fields: Any,
) -> tuple[bytes, bytes]:
    """A tensor's table entry: well formed unless told otherwise."""
    message = protos.BundleEntryProto(dtype=int(dtype))
    message.shape.SetInParent()
    for size in shape:
        message.shape.dim.add(size=size)
    extent = extent or Extent(0, 0, 8, masked_crc(bytes(8)))
    message.shard_id, message.offset = extent.shard, extent.offset
    message.size, message.crc32c = extent.size, extent.crc32c
    for boxes in slices:
        part = message.slices.add()
        for start, length in boxes:
            part.extent.add(start=start, length=length)
    for field, value in fields.items():
        setattr(message, field, value)
    return name if isinstance(name, bytes) else name.encode(), message.SerializeToString()


def write_index(prefix: Path, entries: Iterable[tuple[bytes, bytes]], shard_bytes: int = 1024) -> Path:
    """An index of these entries, whatever they say, beside one shard of zeros."""
    Path(f"{prefix}.index").write_bytes(write_table(sorted(entries)))
    shard_path(prefix, 0, 1).write_bytes(bytes(shard_bytes))
    return prefix


def block(entries: Iterable[tuple[int, bytes, bytes]], restarts: Sequence[int] = (0,)) -> bytes:
    """A table's block from (shared, unshared key bytes, value)."""
    body = b"".join(
        varint(shared) + varint(len(unshared)) + varint(len(value)) + unshared + value
        for shared, unshared, value in entries
    )
    return body + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def seal(contents: bytes, type_: int = 0) -> bytes:
    """A block with its trailer."""
    typed = contents + bytes([type_])
    return typed + struct.pack("<I", masked_crc(typed))


def handle(offset: int, size: int) -> bytes:
    """A block's handle."""
    return varint(offset) + varint(size)


def compressed(contents: bytes) -> bytes:
    """A block as snappy packs it."""
    return bytes(cramjam.snappy.compress_raw(contents))


def compressed_table(
    entries: Sequence[tuple[bytes, bytes]], in_block: int = 40, pack: Callable[[bytes], bytes] = compressed
) -> bytes:
    """A table as builds of TensorFlow with snappy write it: every block is compressed, also the index."""
    data = b""

    def add(contents: bytes) -> bytes:
        nonlocal data
        packed = pack(contents)
        at, data = len(data), data + seal(packed, 1)
        return handle(at, len(packed))

    groups = [entries[at : at + in_block] for at in range(0, len(entries), in_block)]
    index = [(0, group[-1][0], add(block([(0, *pair) for pair in group]))) for group in groups]
    footer = add(block([])) + add(block(index))
    return data + footer.ljust(40, b"\0") + MAGIC


def compress_index(prefix: Path) -> None:
    """Replace a bundle's index by the same one in compressed blocks."""
    path = Path(f"{prefix}.index")
    path.write_bytes(compressed_table(read_table(path.read_bytes(), path)))


def table(
    blocks: Sequence[bytes], handles: Sequence[bytes] | None = None, *, type_: int = 0, padding: bytes = b""
) -> bytes:
    """A table of data blocks; `handles` replaces what its index says about them."""
    data = b""
    true_handles = []
    for contents in blocks:
        true_handles.append(handle(len(data), len(contents)))
        data += seal(contents, type_)
    metaindex = handle(len(data), 8)
    data += seal(block([]))
    contents = block(
        [(0, b"%05d" % at, to) for at, to in enumerate(true_handles if handles is None else handles)]
    )
    footer = metaindex + handle(len(data), len(contents)) + padding
    return data + seal(contents) + footer.ljust(40, b"\0") + MAGIC
