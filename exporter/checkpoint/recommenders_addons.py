"""Find the tables of TensorFlow Recommenders-Addons (TFRA) in a checkpoint.

A `tfra.dynamic_embedding.Variable` called `<name>` is n hash tables, a key's being `key % n` unless the
trainer says otherwise. Each is two tensors, of exactly the keys that it holds:

    <name, slashes as underscores>_mht_<1..n>of<n>-keys    int64|int32 [N]
    <the same>-values                                      float [N, dim]

In an object-based checkpoint they are called `<path of the object>/.ATTRIBUTES/table-keys` and `-values`, and
the graph of objects tells the table's own name. An optimizer's slot is such a variable, too:
`<name>_<optimizer>_<slot>`.

Source: tensorflow/recommenders-addons, dynamic_embedding/python/ops: dynamic_embedding_variable.py
(_make_name), cuckoo_hashtable_ops.py (_Saveable), dynamic_embedding_optimizer.py (create_slots).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from google.protobuf.message import DecodeError
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.checkpoint.tensor_values import read_array
from exporter.wire import protos
from exporter.wire.dtypes import DType

_SHARD = re.compile(r"(.+)_mht_([0-9]{1,6})of([0-9]{1,6})", re.ASCII)
_SLOT = re.compile(r"_(\w+_)?(Adam|Adagrad|Adadelta|Momentum|RMSProp|Ftrl|Lamb|Nadam|Adamax|SGD)\w*_\w+")
_KEYS, _VALUES = "-keys", "-values"


class TableShard(Struct, frozen=True):
    """One of `count` tables: what its tensors are called before the suffix, and its number, from 0."""

    stem: str
    name: str
    number: int
    count: int


def table_shards(catalog: Catalog) -> Iterator[TableShard]:
    """The shards of all tables of TFRA that lead from integers to vectors; others are no embeddings."""
    for stem, name in _stems(catalog):
        keys, values = catalog.tensors.get(stem + _KEYS), catalog.tensors.get(stem + _VALUES)
        match = _SHARD.fullmatch(name)
        if match is None or keys is None or values is None:
            continue
        if keys.dtype in (DType.INT64, DType.INT32) and len(values.shape) == 2:
            yield TableShard(stem, match[1], int(match[2]) - 1, int(match[3]))


def slot_owner(name: str, known: Collection[str]) -> str:
    """The table whose optimizer's slot has this name; "" if it is no slot's."""
    ends = [at for at, letter in enumerate(name) if letter == "_"]
    owners = (name[:end] for end in ends if name[:end] in known and _SLOT.fullmatch(name[end:]))
    return next(owners, "")


def _stems(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """What tensors of tables are called before the suffix, with the table's own name."""
    for tensor in catalog.tensors:
        if "_mht_" in tensor and tensor.endswith(_KEYS):
            yield tensor.removesuffix(_KEYS), tensor.removesuffix(_KEYS)
    ref = catalog.tensors.get(OBJECT_GRAPH)
    if ref is None or ref.dtype is not DType.STRING or ref.shape != ():
        return
    data = read_array(catalog, ref).item()
    if b"_mht_" not in data:
        return
    try:
        nodes = protos.TrackableObjectGraph.FromString(data).nodes
    except DecodeError:
        return  # whoever needs the objects says so
    for node in nodes:
        for attribute in node.attributes:
            if "_mht_" in attribute.full_name:
                yield attribute.checkpoint_key, attribute.full_name
