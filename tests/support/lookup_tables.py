"""Lookup tables that training fills, of every kind, and a trainer that saves and records them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.format import ChangeKind, ServedVariable
from exporter.increments.history import CheckpointMarker, identify
from exporter.increments.increment import Changed, CheckpointId, Contents, Increment
from exporter.wire.dtypes import DType
from tests.support.graph_runs import v1_graph
from tests.support.increments import note, publish

ENDS = {"inputs": {"x": "x"}, "outputs": {"y": "y"}}


def mutable(key: str, value: str, width: int = 0) -> Callable[[Any], Any]:
    def make(name: str) -> Any:
        import tensorflow as tf

        default = np.full([width], -1) if width else -1
        default = default if value != "string" else np.full([width] if width else [], "?")
        table = tf.lookup.experimental.MutableHashTable
        return table(
            tf.as_dtype(key), tf.as_dtype(value), tf.constant(default, tf.as_dtype(value)), name=name
        )

    return make


def dense(key: str, value: str, width: int = 0) -> Callable[[Any], Any]:
    def make(name: str) -> Any:
        import tensorflow as tf

        empty, deleted = ("<none>", "<gone>") if key == "string" else (-1, -2)
        default = tf.constant(np.full([width], -1) if width else -1, tf.as_dtype(value))
        return tf.lookup.experimental.DenseHashTable(
            tf.as_dtype(key), tf.as_dtype(value), default, empty_key=empty, deleted_key=deleted, name=name
        )

    return make


KINDS = {
    "mutable-string-int64": (mutable("string", "int64"), "string", "int64", 0),
    "mutable-int64-vectors": (mutable("int64", "float32", 3), "int64", "float32", 3),
    "mutable-int64-string": (mutable("int64", "string"), "int64", "string", 0),
    "dense-int64-int64": (dense("int64", "int64"), "int64", "int64", 0),
    "dense-string-vectors": (dense("string", "float32", 3), "string", "float32", 3),
}
ENTRIES = 300


def entries(key: str, value: str, width: int, count: int = ENTRIES, seed: int = 0) -> tuple[Any, Any]:
    numbers = np.random.default_rng(seed).permutation(10 * count)[:count]
    keys = numbers if key == "int64" else np.array([f"word {n}".encode() for n in numbers], object)
    values = np.arange(count * max(1, width)).reshape([count, width] if width else [count])
    if value == "string":
        return keys, np.array([f"{n}".encode() for n in values], object)
    return keys, values.astype(value)


ROWS, DIM = 60, 4


@dataclass
class TableTrainer:
    """Rows of `emb`, a dense `bias` and a table `seen`: what a Saver and an increment hook leave of them."""

    directory: Path
    kind: str = "dense-int64-int64"
    step: int = 10
    touched: set[int] = field(default_factory=set)
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    parent: str | CheckpointId | None = None
    parent_step: int = 0

    def __post_init__(self) -> None:
        import tensorflow as tf

        self.directory.mkdir(parents=True, exist_ok=True)
        self.make, self.key, self.value, self.width = KINDS[self.kind]
        self.rng = np.random.default_rng(0)
        with v1_graph() as graph:
            self.graph = graph
            self._build()
            self.session = tf.compat.v1.Session(graph=graph)
            self.session.run("init")

    def _build(self) -> None:
        import tensorflow as tf

        v1 = tf.compat.v1
        x, ids = v1.placeholder(self.key, [None], name="x"), v1.placeholder(tf.int64, [None], name="ids")
        emb = v1.get_variable("emb", initializer=self.rng.normal(size=[ROWS, DIM]).astype(np.float32))
        bias = v1.get_variable("bias", initializer=np.zeros([DIM], np.float32))
        step = v1.train.get_or_create_global_step()
        table = self.make("seen")
        tf.identity(table.lookup(x), name="y")
        tf.add(tf.gather(emb, ids), bias, name="rows")
        keys = v1.placeholder(self.key, [None], name="keys")
        shape = [None, self.width] if self.width else [None]
        filled = table.insert(keys, v1.placeholder(self.value, shape, name="values"))
        tf.group(filled, name="insert")
        tf.group(table.remove(keys), name="remove")
        new = v1.placeholder(tf.float32, [None, DIM], name="new")
        tf.group(v1.scatter_update(emb, ids, new), name="write")
        v1.assign(bias, v1.placeholder(tf.float32, [DIM], name="new_bias"), name="write_bias")
        v1.assign(step, v1.placeholder(tf.int64, [], name="new_step"), name="write_step")
        self.saver = v1.train.Saver(max_to_keep=100)
        tf.group(v1.global_variables_initializer(), name="init")

    def insert(self, count: int = 20, seed: int = 0) -> None:
        """New entries, some of which replace others."""
        keys, values = entries(self.key, self.value, self.width, count, seed)
        if self.value != "string":
            values = values + np.asarray(seed, values.dtype)
        self.session.run("insert", {"keys:0": keys, "values:0": values})

    def remove(self, count: int = 5, seed: int = 0) -> None:
        keys, _ = entries(self.key, self.value, self.width, 20, seed)
        self.session.run("remove", {"keys:0": keys[:count]})

    def train(self, rows: int = 4) -> None:
        """A step: some rows of `emb`, and `bias`; not the table."""
        self.step += 1
        ids = np.sort(self.rng.choice(ROWS, rows, replace=False))
        self.touched |= set(ids.tolist())
        self.session.run("write", {"ids:0": ids, "new:0": self.rng.normal(size=[rows, DIM])})
        self.session.run("write_bias", {"new_bias:0": self.rng.normal(size=[DIM])})

    def save(self, *, is_equal: bool = False) -> CheckpointId:
        """A full checkpoint of now, and where it stands among the increments, if there are any."""
        self.session.run("write_step", {"new_step:0": self.step})
        with self.graph.as_default():
            self.saver.save(self.session, str(self.directory / "model.ckpt"), self.step)
        saved = identify(self.directory / f"model.ckpt-{self.step}", self.step)
        if isinstance(self.parent, str):
            marker = CheckpointMarker(
                checkpoint=saved, run=self.run, after=self.parent, is_equal=is_equal, session=self.run
            )
            note(self.directory, marker)
        else:
            self.parent, self.parent_step, self.touched = saved, self.step, set()
        return saved

    def increment(self) -> None:
        """What was trained since the last one: rows and `bias`, nothing of the table."""
        assert self.parent is not None
        draft = Increment(
            id=secrets.token_hex(16),
            run=self.run,
            session=self.run,
            generation=1,
            parent=self.parent,
            from_step=self.parent_step,
            to_step=self.step,
            variables=(),
        )
        publish(self.directory, draft, self._fill)
        self.parent, self.parent_step, self.touched = draft.id, self.step, set()

    def _fill(self, writer: BundleWriter) -> Contents:
        emb, bias = self.session.run(["emb/Read/ReadVariableOp:0", "bias/Read/ReadVariableOp:0"])
        ids = np.array(sorted(self.touched), np.int64)
        table = ServedVariable("emb", DType.FLOAT, emb.shape, ChangeKind.TABLE)
        dense = ServedVariable("bias", DType.FLOAT, bias.shape, ChangeKind.DENSE)
        writer.add(dense.keys[0], bias[np.newaxis])
        writer.add(table.keys[0], ids)
        writer.add(table.keys[1], emb[ids])
        return Contents((Changed(dense, 1), Changed(table, len(ids))))

    def asked(self) -> dict[str, Any]:
        """A request for every key that may ever be in the table, and every row."""
        found = [entries(self.key, self.value, self.width, 20, seed)[0] for seed in range(8)]
        return {"x": np.concatenate(found), "ids": np.arange(ROWS)}

    def answers(self) -> dict[str, Any]:
        feeds = {f"{name}:0": value for name, value in self.asked().items()}
        return dict(zip(("y", "rows"), self.session.run(["y:0", "rows:0"], feeds), strict=True))
