"""A model with two dynamic tables, and that a server answers as its trainer's dicts do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.options import ExportRequest, Updates
from exporter.tables import DynamicTable
from exporter.wire.int8_codes import to_codes
from tests.support.deeprec_logs import DIM, DeepRecTrainer
from tests.support.stock_loaders import StockLoader
from tests.support.updatable import Loaded

DEFAULTS = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
LIMITS = [0, -1, -2, 2**63 - 1, -(2**63)]


def trained(directory: Path) -> DeepRecTrainer:
    """A trainer that has saved keys of both tables, the least and the greatest among them."""
    trainer = DeepRecTrainer(directory)
    trainer.upsert("emb/user", [*range(1, 300), *LIMITS])
    trainer.upsert("item", range(100, 150))
    trainer.save()
    return trainer


def model() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rows of both tables, and the ordinary variable."""
    import tensorflow as tf

    tf1 = tf.compat.v1
    user, item = (tf1.placeholder(tf.int64, [None], name=name) for name in ("user", "item"))
    kernel = tf1.get_variable("kernel", [2], use_resource=True)
    users = DynamicTable("emb/user", DIM, "float32", DEFAULTS).lookup(user)
    items = DynamicTable("item", DIM).lookup(item)
    kernel_rows = tf.ones_like(users[:, :1]) * kernel
    return {"user": user, "item": item}, {"users": users, "items": items, "kernel": kernel_rows}


def request(trainer: DeepRecTrainer, **options: Any) -> ExportRequest:
    out = trainer.directory.parent / "model"
    given = {"model": model, "updates": Updates(stamp=True), **options}
    return ExportRequest(trainer.directory, out, **given)


def in_8_bits(rows: np.ndarray) -> np.ndarray:
    codes, scales, _ = to_codes(rows)
    return codes * scales[:, np.newaxis]


def assert_serves(
    server: Loaded | StockLoader,
    trainer: DeepRecTrainer,
    more: list[int] | None = None,
    stored: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
) -> None:
    """Every key that was ever there, those beside them, and the limits; rows are as `stored` makes them."""
    ever = {key for state in trainer.saved.values() for table in state[0].values() for key in table}
    ever |= {key for table in trainer.tables.values() for key in table} | set(more or ()) | set(LIMITS)
    keys = np.array(sorted(ever), np.int64)
    keys = np.concatenate([keys, keys + 1, keys - 1])
    found = server.predict(user=keys, item=keys)
    for name, output, defaults in (
        ("emb/user", "users", DEFAULTS),
        ("item", "items", np.zeros((1, DIM), np.float32)),
    ):
        table = trainer.tables[name]
        rows = [table.get(key, defaults[key % len(defaults)].tobytes()) for key in keys.tolist()]
        expected = stored(np.frombuffer(b"".join(rows), np.float32).reshape(-1, DIM))
        assert found[output].tobytes() == expected.tobytes(), name
    assert (found["kernel"] == trainer.kernel).all()
