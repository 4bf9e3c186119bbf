"""Find the two tensors, keys and values, that each lookup table is restored from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.errors import MissingTensors, ShapeMismatch
from exporter.graph.inference_graph import GraphTable


def find_tables(
    tables: Iterable[GraphTable], catalog: Catalog, renamed: Callable[[str], str | None]
) -> Iterator[tuple[GraphTable, TensorRef, TensorRef]]:
    """Each table under the names and with the shapes that the checkpoint has, its keys' and values' tensor.

    Raises:
        MissingTensors: the checkpoint lacks them; served, the table would be empty.
        ShapeMismatch: they are of other dtypes or shapes than the table.
    """
    for table in tables:
        names = stored_names(table, renamed)
        missing = [name for name in names if name not in catalog.tensors]
        if missing:
            raise MissingTensors(
                f"table {table.node!r} is filled while training and would be empty when served: "
                f"{catalog.prefix.name} has no {' and no '.join(map(repr, missing))}",
                cause="a Saver stores tables made with checkpoint=True, unless it is told what to save",
                hint="map its names with --rename, or fill a static table (tf.lookup.StaticHashTable)",
            )
        keys, values = (catalog.tensors[name] for name in names)
        _check(table, keys, values)
        found = replace(table, keys=keys.name, values=values.name)
        yield replace(found, key_shape=keys.shape[1:], value_shape=values.shape[1:]), keys, values


def stored_names(table: GraphTable, renamed: Callable[[str], str | None]) -> tuple[str, str]:
    """The names of a table's keys and values in a checkpoint."""
    return renamed(table.keys) or table.keys, renamed(table.values) or table.values


def _check(table: GraphTable, keys: TensorRef, values: TensorRef) -> None:
    for tensor, dtype in ((keys, table.key_dtype), (values, table.value_dtype)):
        if tensor.dtype is not dtype:
            raise ShapeMismatch(
                f"table {table.node!r} has {dtype.label} in the graph, tensor {tensor.name!r} is "
                f"{tensor.dtype.label} in the checkpoint"
            )
    entries = keys.shape[:1]
    if not entries or values.shape[:1] != entries:
        raise ShapeMismatch(
            f"{keys.name!r} has shape {list(keys.shape)} and {values.name!r} {list(values.shape)}: "
            "no keys with a value each"
        )
    if table.key_shape not in (None, keys.shape[1:]):
        raise ShapeMismatch(
            f"a key of table {table.node!r} has shape {list(table.key_shape or ())} in the graph, "
            f"{list(keys.shape[1:])} in the checkpoint"
        )
    if table.value_shape is not None and not _fits(values.shape[1:], table):
        raise ShapeMismatch(
            f"a value of table {table.node!r} has shape {list(table.value_shape)} in the graph, "
            f"{list(values.shape[1:])} in the checkpoint"
        )
    if table.has_all_buckets and (entries[0] < 1 or entries[0] & (entries[0] - 1)):
        raise ShapeMismatch(
            f"{keys.name!r} has {entries[0]} entries, and a dense table's buckets are a power of two",
            cause="the checkpoint is of a table of another kind",
        )


def _fits(shape: tuple[int, ...], table: GraphTable) -> bool:
    declared = table.value_shape or ()
    if table.has_all_buckets and declared == ():
        declared = (1,)  # a dense table holds scalars as vectors of one
    return len(shape) == len(declared) and all(
        want in (-1, size) for size, want in zip(shape, declared, strict=True)
    )
