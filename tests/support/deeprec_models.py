"""A small model as a DeepRec program would train it: graph, checkpoints, and what it answers, in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.deeprec import Ev, write_full, write_increment
from tests.support.deeprec_graphs import RANDOM, DeepRecGraph, Generation, deeprec_graph

Array = np.ndarray[Any, Any]

DIM = 4
USERS, ITEMS = "user_embedding", "input/item_embedding"
NO_USER, NO_ITEM = 0.5, -0.25
"""What absent keys read: the users' initializer is a constant, the items have a filter."""
INPUTS = {"user": "user", "items": "items"}
OUTPUTS = {"scores": "scores", "user_rows": "user_rows", "item_rows": "item_rows"}


def build(program: DeepRecGraph, parts: int = 3) -> dict[str, Any]:
    """scores = [row of user, sum of rows of items] . kernel; items that are 0 are none."""
    import tensorflow as tf

    v1 = tf.compat.v1
    user = v1.placeholder(tf.int64, [None], name="user")
    items = v1.placeholder(tf.int64, [None, None], name="items")
    users = program.embedding_variable(USERS, DIM, parts=parts, initializer=NO_USER)
    catalogue = program.embedding_variable(
        ITEMS, DIM, filter_freq=2, initializer=RANDOM, default_value_no_permission=NO_ITEM
    )
    user_rows = tf.identity(program.embedding_lookup(users, user), name="user_rows")
    found = program.embedding_lookup_sparse(catalogue, tf.sparse.from_dense(items), combiner="sum")
    item_rows = tf.identity(found, name="item_rows")
    kernel = v1.get_variable("dense/kernel", [2 * DIM, 1])
    scores = tf.matmul(tf.concat([user_rows, item_rows], 1), kernel, name="scores")
    return {"user": user, "items": items, "scores": scores, "user_rows": user_rows, "item_rows": item_rows}


@dataclass
class Trainer:
    """Tables, a dense variable, and the files that DeepRec leaves of them."""

    directory: Path
    parts: int = 3
    generation: Generation = Generation.SECOND
    step: int = 100
    users: Ev = field(default_factory=lambda: Ev.random(500, DIM, seed=1, negative=True))
    items: Ev = field(default_factory=lambda: Ev.random(300, DIM, seed=2))
    kernel: Array = field(default_factory=lambda: np.linspace(-1, 1, 2 * DIM, dtype=np.float32)[:, None])
    touched: dict[str, set[int]] = field(default_factory=lambda: {USERS: set(), ITEMS: set()})

    def save(self) -> Path:
        """A full checkpoint with its `.meta` and the state file; slots have keys of their own."""
        prefix = self.directory / f"model.ckpt-{self.step}"
        slots = {
            f"{USERS}/Adagrad": self.users.at(np.arange(7)),
            f"{ITEMS}/Adagrad": Ev.random(9, DIM, seed=3),
        }
        tables = {USERS: self.users, ITEMS: self.items}
        write_full(
            prefix,
            tables,
            parts={USERS: self.parts},
            dense={"dense/kernel": self.kernel},
            slots=slots,
            step=self.step,
        )
        with deeprec_graph(self.generation) as program:
            build(program, self.parts)
            program.save_meta(Path(f"{prefix}.meta"))
        state = f'model_checkpoint_path: "{prefix.name}"\nall_model_checkpoint_paths: "{prefix.name}"\n'
        (self.directory / "checkpoint").write_text(state)
        self.touched = {USERS: set(), ITEMS: set()}
        return prefix

    def save_increment(self) -> Path:
        """What was touched since the last full checkpoint."""
        tables = {}
        for name, ev in ((USERS, self.users), (ITEMS, self.items)):
            if self.touched[name]:
                tables[name] = ev.at(np.isin(ev.keys, [*self.touched[name]]))
        return write_increment(
            self.directory, self.step, tables, parts={USERS: self.parts}, dense={"dense/kernel": self.kernel}
        )

    def train(self, seed: int, keys: int = 20) -> None:
        """A few steps: new keys and changed rows in both tables, another kernel."""
        rng = np.random.default_rng(seed)
        self.step += 10
        self.kernel = rng.normal(size=self.kernel.shape).astype(np.float32)
        self.users = self._trained(USERS, self.users, rng, keys)
        self.items = self._trained(ITEMS, self.items, rng, keys)

    def _trained(self, name: str, ev: Ev, rng: np.random.Generator, count: int) -> Ev:
        values = ev.values.copy()
        changed = rng.choice(len(ev.keys), count, replace=False)
        values[changed] = rng.normal(size=(count, DIM))
        new = np.setdiff1d(rng.integers(1, 1 << 62, count), ev.keys)
        self.touched[name] |= {*ev.keys[changed].tolist(), *new.tolist()}
        rows = rng.normal(size=(len(new), DIM)).astype(np.float32)
        return replace(ev, keys=np.concatenate([ev.keys, new]), values=np.concatenate([values, rows]))

    def evict(self, count: int = 15) -> list[int]:
        """Forget the first users; returns their keys."""
        gone = self.users.keys[:count].tolist()
        self.users = self.users.at(np.arange(count, len(self.users.keys)))
        return gone

    def probes(self, more: Iterable[int] = ()) -> dict[str, Array]:
        """A request for keys that are there, and for some that are not."""
        user = np.array(
            [*self.users.keys[-40:].tolist(), *self.users.keys[:40].tolist(), 4, -5, *more], np.int64
        )
        rng = np.random.default_rng(self.step)
        items = rng.choice([*self.items.keys.tolist(), 12345, 0], (len(user), 3)).astype(np.int64)
        items[:, 0] = self.items.keys[-len(user) :]
        return {"user": user, "items": items}

    def answers(self, request: dict[str, Array]) -> dict[str, Array]:
        """What DeepRec answers."""
        users, items = self.users.as_dict(), self.items.as_dict()
        no_user, no_item = np.full(DIM, NO_USER, np.float32), np.full(DIM, NO_ITEM, np.float32)
        user_rows = np.array([users.get(key, no_user) for key in request["user"].tolist()])
        item_rows = np.zeros_like(user_rows)
        for row, keys in zip(item_rows, request["items"].tolist(), strict=True):
            for key in filter(None, keys):
                row += items.get(key, no_item)
        scores = np.concatenate([user_rows, item_rows], 1) @ self.kernel
        return {"user_rows": user_rows, "item_rows": item_rows, "scores": scores}


def assert_answers(found: dict[str, Any], expected: dict[str, Array]) -> None:
    """Rows are the same bit for bit; what is computed of them but for the order of a sum."""
    np.testing.assert_array_equal(found["user_rows"], expected["user_rows"])
    np.testing.assert_allclose(found["item_rows"], expected["item_rows"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5, atol=1e-5)
