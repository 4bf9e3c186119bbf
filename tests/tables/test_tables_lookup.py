"""Lookups in dynamic tables, run by TensorFlow, against numpy: ids of any shape, absent ones, the limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exporter.errors import GraphError
from exporter.tables.change_index import change_index, find_rows
from exporter.tables.geometry import TableGeometry
from exporter.tables.lookup import SIZE, TABLE, add_rows, first_defaults, set_sizes
from exporter.wire import protos
from exporter.wire.dtypes import DType
from tests.support.tables_index import LIMITS, apply, new_table

Array = np.ndarray[Any, Any]
DIM = 5


class Table:
    """A table in a session, and what it should answer."""

    def __init__(self, keys: Array, defaults: int) -> None:
        import tensorflow as tf

        v1 = tf.compat.v1
        self.geometry = TableGeometry.for_keys(len(keys), defaults=defaults)
        self.state = new_table(self.geometry, keys)
        self.values = np.random.default_rng(1).normal(size=(self.geometry.capacity, DIM)).astype(np.float32)
        graph_def = protos.GraphDef()
        names = ("seeds", "rows", "keys", "values", "ids")
        types = (*(DType.RESOURCE,) * 4, DType.INT64)
        for name, dtype in zip(names, types, strict=True):
            graph_def.node.add(name=name, op="Placeholder").attr["dtype"].type = int(dtype)
        found = add_rows(graph_def, "at", "t", names[:4], "ids", defaults=defaults)
        set_sizes(graph_def, {"t": self.geometry, "other": TableGeometry.for_keys(0)})
        with tf.Graph().as_default():
            self.ids = v1.placeholder("int64")
            parts = (self.state.index_seeds, self.state.index_rows, self.state.row_keys, self.values)
            variables = [
                v1.get_variable(f"v{number}", part.shape, part.dtype, use_resource=True)
                for number, part in enumerate(parts)
            ]
            self.fed = [v1.placeholder(part.dtype, part.shape) for part in parts]
            self.assign = [v.assign(f) for v, f in zip(variables, self.fed, strict=True)]
            handles = {f"{name}:0": v.handle for name, v in zip(names[:4], variables, strict=True)}
            self.rows, self.found = v1.import_graph_def(
                v1.GraphDef.FromString(graph_def.SerializeToString()),
                {**handles, "ids:0": self.ids},
                [f"{found.rows}:0", f"{found.found}:0"],
            )
            self.out = tf.gather(variables[3], self.rows)
            self.session = v1.Session()
        self.load()

    def load(self) -> None:
        parts = (self.state.index_seeds, self.state.index_rows, self.state.row_keys, self.values)
        self.session.run(self.assign, dict(zip(self.fed, parts, strict=True)))

    def __call__(self, ids: Array) -> Array:
        return np.asarray(self.session.run(self.out, {self.ids: ids}))

    def reference(self, ids: Array) -> Array:
        flat = ids.astype(np.int64).ravel()
        rows = find_rows(self.geometry, self.state, flat)
        rows = np.where(rows < 0, default_rows_of(self.geometry, flat), rows)
        return self.values[rows].reshape(*ids.shape, DIM)


def default_rows_of(geometry: TableGeometry, keys: Array) -> Array:
    return geometry.first_default + np.mod(keys, geometry.defaults)


@pytest.mark.parametrize("defaults", [1, 4])
@pytest.mark.parametrize("shape", [(), (0,), (300,), (20, 15), (3, 0, 2), (2, 3, 4)])
def test_rows_have_the_shape_of_the_ids(shape: tuple[int, ...], defaults: int) -> None:
    random = np.random.default_rng(3)
    keys = np.concatenate([LIMITS[::2], random.integers(-(2**63), 2**63 - 1, 5000)])
    table = Table(keys, defaults)
    ids = random.choice(np.concatenate([keys[:50], LIMITS, np.arange(50)]), shape).astype(np.int64)
    assert table(ids).tobytes() == table.reference(ids).tobytes()


def test_it_tells_which_keys_are_there() -> None:
    table = Table(np.arange(0, 4000, 2, dtype=np.int64), 3)
    ids = np.arange(-1000, 5000, dtype=np.int64).reshape(2, -1)
    found, rows = table.session.run([table.found, table.rows], {table.ids: ids})
    assert (found == ((ids % 2 == 0) & (ids >= 0) & (ids < 4000))).all()
    assert (rows[found] == ids[found] // 2).all()
    assert (rows[~found] == default_rows_of(table.geometry, ids[~found])).all()


def test_changes_are_seen_and_absent_keys_read_defaults_again() -> None:
    random = np.random.default_rng(4)
    keys = np.unique(random.integers(-(2**63), 2**63 - 1, 3000))
    table = Table(keys, 2)
    for _ in range(5):
        add = random.integers(-(2**63), 2**63 - 1, 100)
        drop = random.choice(keys, 200, replace=False)
        apply(table.state, change_index(table.geometry, table.state, np.append(add, -1), drop))
        table.load()
        ids = np.concatenate([keys, add, LIMITS])
        assert table(ids).tobytes() == table.reference(ids).tobytes()


@pytest.mark.parametrize(
    ("attr", "field", "value"),
    [
        ("dtype", "type", 77),
        ("dtype", "type", int(DType.RESOURCE)),
        ("dtype", "type", 0),
        (SIZE, "s", b"another"),
        (SIZE, "s", b"\xff"),
        (TABLE, "s", b"\xff"),
    ],
)
def test_damaged_sizes_of_a_table_are_named(attr: str, field: str, value: Any) -> None:
    graph_def = protos.GraphDef()
    add_rows(graph_def, "at", "t", ["seeds", "rows", "keys", "values"], "ids")
    (node,) = (n for n in graph_def.node if n.name == "at/first_default")
    setattr(node.attr[attr], field, value)
    with pytest.raises(GraphError, match="'at/first_default' is damaged"):
        set_sizes(graph_def, {"t": TableGeometry.for_keys(9)})


def test_damaged_default_rows_of_a_table_are_named() -> None:
    graph_def = protos.GraphDef()
    add_rows(graph_def, "at", "t", ["seeds", "rows", "keys", "values"], "ids")
    (node,) = (n for n in graph_def.node if n.name == "at/first_default")
    assert first_defaults(graph_def) == {"t": 1}
    node.attr["value"].tensor.dtype = 77
    with pytest.raises(GraphError, match="'at/first_default' is damaged"):
        first_defaults(graph_def)
