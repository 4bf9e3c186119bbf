"""List the tensors that a SignatureDef names; a sparse or composite input or output has several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

StaticShape = tuple[int | None, ...] | None
"""A shape as far as it is known; None if not even the rank is."""


class SignatureTensor(Struct, frozen=True):
    """A tensor by its canonical name (`node:0`); `is_shape` if it holds the shape of a sparse tensor."""

    name: str
    dtype: DType
    shape: StaticShape
    is_shape: bool = False


def tensors_of(infos: Mapping[str, Proto]) -> list[SignatureTensor]:
    """The tensors of a signature's inputs or outputs, each once, in the order of their keys."""
    found = (tensor for key in sorted(infos) for tensor in _tensors(infos[key]))
    return list({tensor.name: tensor for tensor in found}.values())


def rename(infos: Mapping[str, Proto], names: Mapping[str, str]) -> None:
    """Make the TensorInfos name other tensors; names are canonical."""
    for info in infos.values():
        encoding = info.WhichOneof("encoding")
        if encoding == "name":
            info.name = _renamed(info.name, names)
        elif encoding == "coo_sparse":
            sparse = info.coo_sparse
            sparse.values_tensor_name = _renamed(sparse.values_tensor_name, names)
            sparse.indices_tensor_name = _renamed(sparse.indices_tensor_name, names)
            sparse.dense_shape_tensor_name = _renamed(sparse.dense_shape_tensor_name, names)
        elif encoding == "composite_tensor":
            rename({str(n): part for n, part in enumerate(info.composite_tensor.components)}, names)


def canonical(name: str) -> str:
    """`node:0` for `node`."""
    return name if ":" in name else f"{name}:0"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return canonical(names.get(canonical(name), name))


def _tensors(info: Proto) -> Iterator[SignatureTensor]:
    encoding = info.WhichOneof("encoding")
    if encoding == "name":
        yield SignatureTensor(canonical(info.name), DType(info.dtype), _shape(info.tensor_shape))
    elif encoding == "coo_sparse":
        sparse = info.coo_sparse
        yield SignatureTensor(canonical(sparse.values_tensor_name), DType(info.dtype), (None,))
        yield SignatureTensor(canonical(sparse.indices_tensor_name), DType.INT64, (None, None))
        yield SignatureTensor(canonical(sparse.dense_shape_tensor_name), DType.INT64, (None,), is_shape=True)
    elif encoding == "composite_tensor":
        for part in info.composite_tensor.components:
            yield from _tensors(part)


def _shape(shape: Proto) -> StaticShape:
    if shape.unknown_rank:
        return None
    return tuple(dim.size if dim.size >= 0 else None for dim in shape.dim)
