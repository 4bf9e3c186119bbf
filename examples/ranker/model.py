"""A click model with partitioned embedding tables, in the style of TF1 parameter-server trainers.

`export-model --model examples/ranker/model.py:serving` names the builder at the end of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

USERS, ITEMS, WIDTH, PARTS = 5_000, 2_000, 16, 3


@dataclass(frozen=True)
class Batch:
    """Ids of n impressions, int64 [n] each."""

    user: Any
    item: Any


def click_logit(batch: Batch, *, parts: int = PARTS, users: int = USERS, items: int = ITEMS) -> Any:
    """The logit of a click, float32 [n]; tables are looked up by TF1's default strategy, `mod`."""
    with tf.compat.v1.variable_scope("ranker", reuse=tf.compat.v1.AUTO_REUSE):
        user = _lookup("user_embedding", users, batch.user, parts)
        item = _lookup("item_embedding", items, batch.item, parts)
        hidden = tf.nn.relu(_dense(tf.concat([user, item, user * item], axis=1), 32, "hidden"))
        return tf.squeeze(_dense(hidden, 1, "logit"), axis=1)


def serving(
    parts: int | str = PARTS, users: int | str = USERS, items: int | str = ITEMS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The signature to serve: ids in, click probability out. `--model-arg parts=1` merges the tables."""
    user = tf.compat.v1.placeholder(tf.int64, [None], name="user")
    item = tf.compat.v1.placeholder(tf.int64, [None], name="item")
    logit = click_logit(Batch(user, item), parts=int(parts), users=int(users), items=int(items))
    return {"user": user, "item": item}, {"click": tf.sigmoid(logit, name="click")}


def _lookup(name: str, rows: int, ids: Any, parts: int) -> Any:
    table = tf.compat.v1.get_variable(
        name,
        [rows, WIDTH],
        initializer=tf.compat.v1.random_normal_initializer(stddev=0.1),
        partitioner=tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None,
    )
    return tf.nn.embedding_lookup(table, ids)


def _dense(net: Any, units: int, name: str) -> Any:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [net.shape[-1], units])
        bias = tf.compat.v1.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.matmul(net, kernel) + bias
