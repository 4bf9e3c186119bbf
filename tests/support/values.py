"""Small catalogs and graphs made by hand, for tests of pure logic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.graph.inference_graph import GraphVariable, InferenceGraph, PartitionStrategy
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_rules import mod_lengths
from exporter.mapping.tensor_source import TensorSource
from exporter.wire import protos
from exporter.wire.dtypes import DType


def tensor(name: str, *shape: int, dtype: DType = DType.FLOAT, rows: Iterable[int] = ()) -> TensorRef:
    """A tensor stored whole, or in slices of `rows` rows each."""
    width = (dtype.itemsize or 1) * math.prod(shape[1:])
    if not rows:
        return TensorRef(name, dtype, shape, Extent(0, 0, width * (shape[0] if shape else 1), 0))
    specs = boxes(shape, rows)
    return TensorRef(
        name,
        dtype,
        shape,
        slices=tuple(SliceRef(spec, Extent(0, 0, width * spec.lengths[0], 0)) for spec in specs),
    )


def boxes(shape: tuple[int, ...], rows: Iterable[int]) -> list[SliceSpec]:
    specs, start = [], 0
    for length in rows:
        specs.append(SliceSpec(shape, (start,) + (0,) * (len(shape) - 1), (length, *shape[1:])))
        start += length
    return specs


def catalog(*tensors: TensorRef) -> Catalog:
    return Catalog(
        "tensor bundle",
        Path("model.ckpt-7"),
        {ref.name: ref for ref in tensors},
        (Path("model.ckpt-7.data-00000-of-00001"),),
        (1 << 40,),
        7,
    )


def variable(key: str, *shape: int, dtype: DType = DType.FLOAT) -> GraphVariable:
    return GraphVariable(key, key, dtype, shape)


def parts(key: str, *shape: int, rows: Iterable[int]) -> tuple[GraphVariable, ...]:
    return tuple(
        GraphVariable(f"{key}/part_{number}", key, DType.FLOAT, spec.lengths, spec)
        for number, spec in enumerate(boxes(shape, rows))
    )


def graph(
    *variables: GraphVariable, lookups: Mapping[str, PartitionStrategy] | None = None
) -> InferenceGraph:
    return InferenceGraph("test", protos.MetaGraphDef(), variables, lookups=lookups or {})


def in_parts(table: np.ndarray, count: int, by_mod: bool) -> list[np.ndarray]:
    lengths = mod_lengths(len(table), count)
    if by_mod:
        return [table[part::count] for part in range(count)]
    return np.split(table, np.cumsum(lengths)[:-1])


def mapping_of(
    catalog: Catalog,
    *,
    cast: DType | None = None,
    gather_parts: int = 0,
    served_parts: int = 1,
    scatter: bool = False,
) -> VariableMapping:
    ref = catalog.tensors["w"]
    if served_parts > 1:
        variables = parts("w", *ref.shape, rows=mod_lengths(ref.shape[0], served_parts))
    else:
        variables = (GraphVariable("w", "w", ref.dtype, ref.shape),)
    scatter_parts = served_parts if scatter and served_parts > 1 else 0
    source = TensorSource("w", variables, ref, "name", cast, gather_parts, scatter_parts)
    return VariableMapping(catalog, (source,), ())
