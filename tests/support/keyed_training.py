"""A TF1-style training of a table by keys, in one process, whose checkpoints and increments are exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.increments.increment import StoredIncrement
from exporter.tables import DynamicTable, TrainableTable
from exporter.training import IncrementHook
from tests.support.training_graphs import OPTIMIZERS, Meanwhile, monitored

v1 = tf.compat.v1

DIM = 3
DEFAULT = -1.0
SEEN = np.arange(400, dtype=np.int64) * 7919 - 1_000_000
"""Every key that trainings meet."""

Rows = dict[int, bytes]


@dataclass
class KeyedSession:
    """A session and what can be run in it."""

    session: Any
    table: TrainableTable
    nodes: Mapping[str, Any]

    def train(self, keys: Iterable[int], steps: int = 1) -> None:
        """Steps with these keys."""
        fed = np.fromiter(keys, np.int64)
        for _ in range(steps):
            self.session.run(self.nodes["train"], {self.nodes["ids"]: fed})

    def remove(self, keys: Iterable[int]) -> int:
        """How many of these keys were there; a step of the training, too."""
        fed = {self.nodes["ids"]: np.fromiter(keys, np.int64)}
        return int(self.session.run(self.nodes["remove"], fed))

    def rows(self) -> Rows:
        """What the trainer has now."""
        keys, values = self.session.run(self.nodes["all"])
        assert len(set(keys.tolist())) == len(keys)
        return {int(key): row.tobytes() for key, row in zip(keys, values, strict=True)}


Work = Callable[[KeyedSession], None]


def idle(_: KeyedSession) -> None:
    """Other workers do nothing."""


@dataclass
class KeyedTraining:
    """Sessions of one training in `directory`."""

    directory: Path
    optimizer: str = "adagrad"
    capacity: int = 300
    save_increment_steps: int = 3
    save_checkpoint_steps: int = 12
    options: dict[str, Any] = field(default_factory=dict)
    master: str = ""
    """A server that keeps the variables when a session ends."""

    @contextmanager
    def session(self, meanwhile: tuple[Work, Work] = (idle, idle)) -> Iterator[KeyedSession]:
        """A monitored session with an `IncrementHook`.

        `meanwhile` is what other workers do between what the session restores and its own first full
        checkpoint, and between that and what increments restore.
        """
        with tf.Graph().as_default():
            v1.set_random_seed(1)
            table, nodes = self._graph()
            hook = IncrementHook(
                self.directory, save_increment_steps=self.save_increment_steps, **self.options
            )
            first, second = (
                Meanwhile(lambda raw, do=do: do(KeyedSession(raw, table, nodes))) for do in meanwhile
            )
            hooks = ([first], [second, hook])
            with monitored(self.master, self.directory, self.save_checkpoint_steps, *hooks) as session:
                yield KeyedSession(session, table, nodes)

    def _graph(self) -> tuple[TrainableTable, dict[str, Any]]:
        ids = v1.placeholder(tf.int64, [None])
        table = TrainableTable("emb", DIM, self.capacity, initializer=same_rows)
        bias = v1.get_variable("bias", [DIM], use_resource=True)
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum((table.lookup(ids) + bias - 1.0) ** 2)
        train = OPTIMIZERS[self.optimizer]().minimize(loss, global_step=step)
        removed = table.remove(ids)
        with tf.control_dependencies([removed]):
            counted = step.assign_add(1)
        with tf.control_dependencies([counted]):
            remove = tf.identity(removed)
        rows, keys = table.index.in_use()
        all_rows = [keys, tf.gather(table.values, rows)]
        return table, {"ids": ids, "train": train, "remove": remove, "all": all_rows}


def same_rows(shape: Any, dtype: Any) -> Any:
    """An initializer that gives every key the same row, wherever that lies."""
    return tf.broadcast_to(tf.constant([0.1, -0.2, 0.3], dtype), shape)


def stored_rows(prefix: Path) -> Rows:
    """The table of a full checkpoint."""
    catalog = read_catalog(prefix)
    keys = read_array(catalog, catalog.tensors["emb-keys"])
    values = read_array(catalog, catalog.tensors["emb-values"])
    assert len(set(keys.tolist())) == len(keys)
    return {int(key): row.tobytes() for key, row in zip(keys, values, strict=True)}


def overlaid(rows: Rows, increments: Iterable[StoredIncrement]) -> Rows:
    """A table with increments over it."""
    found = dict(rows)
    for stored in increments:
        for _, change in stored.tables():
            for key in change.removed.tolist():
                found.pop(key, None)
            pairs = zip(change.keys.tolist(), change.values, strict=True)
            found |= {key: row.tobytes() for key, row in pairs}
    return found


def serving() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The builder of the model that is exported."""
    ids = v1.placeholder(tf.int64, [None], name="ids")
    bias = v1.get_variable("bias", [DIM], use_resource=True)
    rows = DynamicTable("emb", DIM, default=DEFAULT).lookup(ids)
    return {"ids": ids}, {"rows": rows, "biased": rows + bias}


class Served:
    """A version that is loaded by TensorFlow, as TF Serving does it."""

    def __init__(self, version: Path) -> None:
        with context.eager_mode():  # whatever graph is being built
            self._model = tf.saved_model.load(str(version))

    def update(self) -> None:
        """Apply what was published since."""
        with context.eager_mode():
            self._model.signatures["incremental_update"](up_to=tf.constant([-1], tf.int64))

    def rows(self, keys: Any = SEEN) -> Rows:
        """The rows of those keys that have some."""
        with context.eager_mode():
            values = self._model.signatures["serving_default"](ids=tf.constant(keys))["rows"].numpy()
        absent = np.full(DIM, DEFAULT, np.float32).tobytes()
        pairs = zip(keys.tolist(), (row.tobytes() for row in values), strict=True)
        return {key: row for key, row in pairs if row != absent}


def newest(directory: Path) -> Path:
    found = tf.train.latest_checkpoint(str(directory))
    assert found is not None
    return Path(found)


def come_and_go(session: KeyedSession, seed: int, steps: int) -> None:
    """Train with keys of which some are new, and take some away."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        session.train(random.choice(SEEN, 20, replace=False))
        session.remove(random.choice(SEEN, 12, replace=False))
