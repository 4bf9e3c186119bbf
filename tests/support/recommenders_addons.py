"""Tensors as a Saver of TensorFlow Recommenders-Addons writes them; nothing of it is run here."""

from __future__ import annotations

import numpy as np

from exporter.wire import protos
from tests.support.deeprec import Ev


def hash_tables(ev: Ev, count: int, name: str) -> dict[str, np.ndarray]:
    """The tensors of a `tfra.dynamic_embedding.Variable`: `count` hash tables, by remainder.

    Source: dynamic_embedding_variable.py (_make_name, default_partition_fn), cuckoo_hashtable_ops.py.
    """
    found = {}
    for number in range(count):
        part = ev.at(ev.keys % count == number)
        stem = f"{name}_mht_{number + 1}of{count}"
        found |= {f"{stem}-keys": part.keys, f"{stem}-values": part.values}
    return found


def by_objects(tables: dict[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    """The same in an object-based checkpoint, the tables in a list of one object."""
    graph, found = protos.TrackableObjectGraph(), {}
    root = graph.nodes.add()
    for number, stem in enumerate(sorted({name.rpartition("-")[0] for name in tables})):
        key = f"{path}/{number}/.ATTRIBUTES/table"
        root.children.add(node_id=number + 1, local_name=str(number))
        graph.nodes.add().attributes.add(name="table", full_name=stem, checkpoint_key=key)
        found |= {f"{key}-{suffix}": tables[f"{stem}-{suffix}"] for suffix in ("keys", "values")}
    return {**found, "_CHECKPOINTABLE_OBJECT_GRAPH": np.array(graph.SerializeToString(), object)}
