"""Tensors as a Saver of TensorFlow Recommenders-Addons writes them; nothing of it is run here."""

from __future__ import annotations

import numpy as np

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
