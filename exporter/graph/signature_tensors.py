"""List and rename the tensors of a SignatureDef; a sparse or composite input or output has several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from exporter.graph.nodes import Endpoint, endpoint
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


class SignatureEnds(Struct, frozen=True):
    """What a signature takes, each tensor with the name it has there, and what it gives."""

    inputs: dict[Endpoint, str]
    outputs: list[Endpoint]

    @classmethod
    def of(cls, signature: Proto) -> SignatureEnds:
        """The ends of a SignatureDef."""
        inputs: dict[Endpoint, str] = {}
        outputs: list[Endpoint] = []
        for role, alias, info in signature_tensors(signature):
            if role == "input":
                inputs |= dict.fromkeys(map(endpoint, tensor_names(info)), alias)
            else:
                outputs += map(endpoint, tensor_names(info))
        return cls(inputs, outputs)

    @property
    def computed(self) -> list[str]:
        """The nodes that make the outputs, without those that are inputs as well."""
        return [*dict.fromkeys(tensor.node for tensor in self.outputs if tensor not in self.inputs)]


def signature_tensors(signature: Proto) -> Iterator[tuple[str, str, Proto]]:
    """Each input and output as (role, alias, TensorInfo)."""
    for alias, info in sorted(signature.inputs.items()):
        yield "input", alias, info
    for alias, info in sorted(signature.outputs.items()):
        yield "output", alias, info


def tensor_names(info: Proto) -> list[str]:
    """The tensors of a TensorInfo: one, a sparse tensor's three, or the components of a composite."""
    return [getattr(message, field) for message, field in _names(info)]


def rename_tensors(info: Proto, names: Mapping[str, str]) -> None:
    """Make a TensorInfo name other tensors, in place; names are canonical."""
    for message, field in _names(info):
        name = canonical(getattr(message, field))
        setattr(message, field, canonical(names.get(name, name)))


def canonical(name: str) -> str:
    """`node:0` for `node`."""
    return name if ":" in name else f"{name}:0"


def _names(info: Proto) -> Iterator[tuple[Proto, str]]:
    """The messages in a TensorInfo that name a tensor, each with the field that has the name."""
    if info.HasField("coo_sparse"):
        for what in ("values", "indices", "dense_shape"):
            yield info.coo_sparse, f"{what}_tensor_name"
    elif info.HasField("composite_tensor"):
        for part in info.composite_tensor.components:
            yield from _names(part)
    elif info.name:
        yield info, "name"


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
