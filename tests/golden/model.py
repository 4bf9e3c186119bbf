"""The model of the golden files. A digest of it stands in their manifests: a change here changes them."""

from __future__ import annotations

from typing import Any


def serving() -> Any:
    """Two tables, one of them in parts; a vector, a number, and a lookup table that training fills."""
    import tensorflow as tf

    v1 = tf.compat.v1
    user = v1.placeholder(tf.int64, [None], name="user")
    item = v1.placeholder(tf.int64, [None], name="item")
    word = v1.placeholder(tf.string, [None], name="word")
    users = v1.get_variable("users", [8, 4], use_resource=True)
    halves = v1.fixed_size_partitioner(2)
    items = v1.get_variable("items", [7, 16], partitioner=halves, use_resource=True)
    kernel = v1.get_variable("kernel", [4], use_resource=True)
    scale = v1.get_variable("scale", [], use_resource=True)
    seen = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1, name="seen")
    score = tf.reduce_sum(tf.gather(users, user) * kernel, axis=1) * scale
    row = v1.nn.embedding_lookup(items, item, partition_strategy="div")
    return (
        {"user": user, "item": item, "word": word},
        {"score": score, "row": tf.identity(row), "number": tf.identity(seen.lookup(word))},
    )


def ranking() -> Any:
    """A table in parts, and a number."""
    import tensorflow as tf

    v1 = tf.compat.v1
    item = v1.placeholder(tf.int64, [None], name="item")
    halves = v1.fixed_size_partitioner(2)
    items = v1.get_variable("items", [7, 16], partitioner=halves, use_resource=True)
    scale = v1.get_variable("scale", [], use_resource=True)
    row = v1.nn.embedding_lookup(items, item, partition_strategy="div")
    return {"item": item}, {"row": row * scale}
