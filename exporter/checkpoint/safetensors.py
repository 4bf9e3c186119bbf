"""Hugging Face's `.safetensors`: a JSON header, then the plain bytes of every tensor; and lists of shards.

    <header size: u64> <header: JSON, filled up with spaces> <bytes of tensors>

    header: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}

Offsets count from the end of the header; tensors cover the bytes without gaps and share none. A list,
`model.safetensors.index.json`, gives for each tensor the file beside it: {"weight_map": {"name": file}}. The
library of that name gives values but no offsets, so the header is read here, and values are streamed from the
file. (Source: safetensors/src/tensor.rs; huggingface_hub/serialization/_base.py.)
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.file_range import FileRange, PlainValues, listed_shard
from exporter.checkpoint.tensor_bundle import GLOBAL_STEP, step_in_name
from exporter.checkpoint.tensor_values import read_step
from exporter.errors import CorruptFile, MissingShard, TruncatedFile, UnsafeArchive, UnsupportedFormat
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import Count, DocumentError, Text, decode

LIST = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.safetensors")
_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_RANK = 254  # TensorShape::MaxDimensions
_METADATA = "__metadata__"
_DTYPES = {
    "BOOL": DType.BOOL,
    "U8": DType.UINT8,
    "I8": DType.INT8,
    "U16": DType.UINT16,
    "I16": DType.INT16,
    "F16": DType.HALF,
    "BF16": DType.BFLOAT16,
    "U32": DType.UINT32,
    "I32": DType.INT32,
    "F32": DType.FLOAT,
    "U64": DType.UINT64,
    "I64": DType.INT64,
    "F64": DType.DOUBLE,
    "C64": DType.COMPLEX64,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
}


class _Entry(Struct, frozen=True):
    """A tensor in a header."""

    dtype: Text
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _List(Struct, frozen=True):
    weight_map: dict[Text, Text]


def read_safetensors(path: Path) -> Catalog:
    """Read the catalog of a file's tensors, or of all files that a list names.

    The step is from the tensor `global_step`, or else the file's name; None without one.

    Raises:
        MissingShard: the file is one shard of several, or a list names a file that does not exist.
        CheckpointNotFound: the file does not exist.
        CheckpointChanged: a file was replaced while it was read.
        CheckpointError: a file cannot be read.
        CorruptFile, TruncatedFile, UnsafeArchive, UnsupportedFormat: see errors.py.
    """
    if path.name.endswith(LIST):
        return _catalog(path, "safetensors, sharded", *_sharded(path))
    shard = _SHARD.fullmatch(path.name)
    if shard is not None and int(shard[2]) > 1:
        raise MissingShard(
            f"{path} is one of {int(shard[2])} shards",
            hint=f"name the list of them: {path.with_name(f'{shard[1]}{LIST}')}",
        )
    whole = FileRange.whole(path)
    return _catalog(path, "safetensors", _tensors(whole), [whole])


def _catalog(path: Path, family: str, tensors: Mapping[str, TensorRef], files: list[FileRange]) -> Catalog:
    if not tensors:
        raise CorruptFile(f"{path} holds no tensors")
    found: dict[str, TensorRef] = {}
    for ref in tensors.values():
        name = ref.name.partition(":")[0]  # as `{variable.name: ...}` writes them
        if not name or name in found:
            raise CorruptFile(f"{path} holds {'two tensors' if name else 'a tensor'} named {name!r:.99}")
        found[name] = TensorRef(name, ref.dtype, ref.shape, content=ref.content)
    paths, sizes = tuple(file.path for file in files), tuple(file.size for file in files)
    catalog = Catalog(family, path, found, paths, sizes)
    step = read_step(catalog, GLOBAL_STEP)
    in_name = step_in_name(path.name.removesuffix(LIST).removesuffix(_SUFFIX))
    return replace(catalog, step=in_name if step is None else step)


def _sharded(path: Path) -> tuple[dict[str, TensorRef], list[FileRange]]:
    """Return the tensors that a list names, each from its file, and the ranges of the list and of its files.

    CheckpointNotFound if the list does not exist, CorruptFile if a file lacks a tensor that is placed there,
    UnsafeArchive if the list is too large or names a file elsewhere, MissingShard if a file does not exist;
    else the CheckpointErrors of `_tensors`.
    """
    source = FileRange.whole(path)
    if source.size > _MAX_HEADER_BYTES:
        raise UnsafeArchive(f"{path} has {source.size} bytes, expected {_MAX_HEADER_BYTES} at most")
    listed: _List = _decoded(source.read(), _List, path, "list of safetensors shards")
    places = listed.weight_map
    shards = {name: _shard(path, name) for name in dict.fromkeys(places.values())}
    held = {name: _tensors(shard) for name, shard in shards.items()}
    for name, file in places.items():
        if name not in held[file]:
            raise CorruptFile(f"{path} places {name!r:.99} in {file!r}, which does not hold it")
    return {name: held[file][name] for name, file in places.items()}, [source, *shards.values()]


def _shard(path: Path, name: str) -> FileRange:
    if not name.endswith(_SUFFIX):
        raise UnsafeArchive(f"{path} names the shard {name!r:.99}, expected a {_SUFFIX} file beside it")
    return FileRange.whole(listed_shard(path, name))


def _tensors(whole: FileRange) -> dict[str, TensorRef]:
    """Return the tensors of one file by name.

    CorruptFile unless their bytes fill the file without gap or overlap, TruncatedFile if it is too short,
    UnsupportedFormat for a type that no variable has, CheckpointChanged if it was replaced, CheckpointError
    if it cannot be read.
    """
    entries, start = _header(whole)
    values = whole.part(start, whole.size - start)
    found = {name: _tensor(name, entry, values) for name, entry in entries.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != end:
            what = "overlaps another one" if entry.data_offsets[0] < end else "leaves bytes before it to none"
            raise CorruptFile(f"{whole.path} is damaged at {name!r:.99}: it {what}")
        end = entry.data_offsets[1]
    if end != values.size:
        raise CorruptFile(f"{whole.path} has {values.size} bytes of tensors, its header names {end}")
    return found


def _header(whole: FileRange) -> tuple[dict[str, _Entry], int]:
    """Return the header's entry of each tensor, and the offset at which the header ends.

    TruncatedFile or CorruptFile if the file does not begin with a header, CheckpointChanged if it was
    replaced, CheckpointError if it cannot be read.
    """
    if whole.size < _SIZE_BYTES:
        raise TruncatedFile(f"{whole.path} has {whole.size} bytes: it is not a safetensors file")
    (size,) = struct.unpack("<Q", whole.part(0, _SIZE_BYTES).read())
    if size > _MAX_HEADER_BYTES:
        raise CorruptFile(
            f"{whole.path} is not a safetensors file",
            cause=f"it begins with {size}; a header has {_MAX_HEADER_BYTES} bytes at most",
        )
    text = whole.part(_SIZE_BYTES, size).read()
    found: dict[str, Raw] = _decoded(text, dict[str, Raw], whole.path, "safetensors file")
    found.pop(_METADATA, None)
    return {name: _entry(name, raw, whole.path) for name, raw in found.items()}, _SIZE_BYTES + size


def _entry(name: str, raw: Raw, path: Path) -> _Entry:
    try:
        entry: _Entry = decode(bytes(raw), _Entry, "", written=lambda _: bytes(raw))
    except DocumentError as error:
        raise CorruptFile(f"{path} is damaged at {name!r:.99}", cause=str(error)) from None
    return entry


def _decoded(text: bytes, type_: Any, path: Path, what: str) -> Any:
    try:
        return decode(text, type_, path.name, written=lambda _: b"")
    except DocumentError as error:
        raise CorruptFile(f"{path} is not a {what}", cause=str(error)) from None


def _tensor(name: str, entry: _Entry, values: FileRange) -> TensorRef:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UnsupportedFormat(
            f"{values.path}: {name!r:.99} has the data type {entry.dtype!r:.20}, which no variable has",
            cause=f"expected {', '.join(_DTYPES)}",
        )
    (begin, end), rank = entry.data_offsets, len(entry.shape)
    size = math.prod(entry.shape) * dtype.numpy.itemsize
    if rank > _MAX_RANK or begin > end or end - begin != size:
        raise CorruptFile(
            f"{values.path} is damaged at {name!r:.99}",
            cause=f"{entry.dtype} of {rank} dimensions has {size} bytes, it lies at {begin} to {end}",
        )
    return TensorRef(name, dtype, entry.shape, content=PlainValues(values.part(begin, size), values, dtype))
