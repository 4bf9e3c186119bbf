"""A checkpoint of tables, and what an export of it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.storage.layout import VARIABLES_PREFIX

ROWS, WIDTH, TABLES = 4000, 16, 6
MODEL = f"""
import tensorflow as tf

def serving():
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    tables = [tf.compat.v1.get_variable(f"t{{n}}", [{ROWS}, {WIDTH}]) for n in range({TABLES})]
    rows = [tf.cast(tf.nn.embedding_lookup(table, ids), tf.float32) for table in tables]
    return {{"ids": ids}}, {{"rows": tf.concat(rows, 1)}}
"""


def table(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)


def train(directory: Path) -> Path:
    with BundleWriter(directory / "model.ckpt-7") as writer:
        for number in range(TABLES):
            writer.add(f"t{number}", table(number))
    (directory / "model.py").write_text(MODEL)
    return directory


def assert_right(directory: Path, dtype: type = np.float32) -> None:
    catalog = read_catalog(directory / "7" / VARIABLES_PREFIX)
    for number in range(TABLES):
        found = read_array(catalog, catalog.tensors[f"t{number}"])
        np.testing.assert_array_equal(found, table(number).astype(dtype), strict=True)
