"""Graphs of one batch size that mix the rows of a request, however rarely: they keep their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.fixed_batches import BATCH, loaded, table

v1 = tf.compat.v1


def normalised(row: Any) -> Any:
    """Batch normalisation by the statistics of the request."""
    scale, offset = tf.ones([3]), tf.zeros([3])
    images = tf.reshape(row["vector"], [BATCH, 1, 1, 3])
    found, *_ = v1.nn.fused_batch_norm(images, scale, offset, is_training=True)
    return tf.reshape(found, [BATCH, 3]) * table(1, 1, "w", 3)[0]


def in_batch_softmax(row: Any) -> Any:
    """The items of all rows as candidates of each."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return tf.reshape(tf.nn.softmax(tf.matmul(users, users, transpose_b=True)), [BATCH, BATCH])


def contrastive(row: Any) -> Any:
    """Scores less those of the row behind, as a loss of pairs has them."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return users - tf.roll(users, 1, 0)


def ranked(row: Any) -> Any:
    """Each row's place among the others."""
    scores = tf.reduce_sum(tf.nn.embedding_lookup(table(11, 1), row["ids"]), 1)
    return tf.argsort(tf.reshape(scores, [BATCH]))


def randomised(row: Any) -> Any:
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return users * tf.random.uniform([BATCH, 4])


def class_of_mixed(row: Any) -> Any:
    """A class alone is served, and hides that its scores depend on other rows."""
    users = tf.nn.embedding_lookup(table(11, 1), row["ids"])
    return tf.argmax(users - tf.reduce_sum(users, 0, keepdims=True) / float(BATCH) * 1e-2, 1)


def users(row: Any) -> Any:
    return tf.nn.embedding_lookup(table(11, 1), row["ids"])


def best_of_the_batch(row: Any) -> Any:
    """The rows with the best scores alone get an answer."""
    scores = tf.reduce_sum(row["vector"], 1)
    best = tf.math.top_k(tf.reshape(scores, [BATCH]), 2).values[-1]
    return tf.where(scores >= best, scores, tf.zeros([BATCH]))


def counted(row: Any) -> Any:
    """Ids that are there more than once, which is rare."""
    _, places, counts = tf.unique_with_counts(row["ids"])
    seen = tf.gather(counts, places)
    return tf.where(seen > 1, row["price"] * 2.0, tf.reshape(row["price"], [BATCH]))


def of_one_group(row: Any) -> Any:
    """The mean of the rows with the same id."""
    unique, places = tf.unique(row["ids"])
    means = tf.math.unsorted_segment_mean(tf.reshape(row["price"], [BATCH]), places, tf.size(unique))
    return tf.gather(means, places)


def with_the_best(row: Any) -> Any:
    best = tf.argmax(row["vector"], 0)
    return tf.reshape(row["vector"], [BATCH, 3]) + tf.gather(row["vector"][:, 0], best)


def above_a_mean(threshold: float) -> Any:
    def build(row: Any) -> Any:
        mean = tf.reduce_mean(row["vector"])
        x = tf.reshape(row["vector"], [BATCH, 3])
        return tf.where(tf.fill([BATCH, 3], mean > threshold), x - mean, x)

    build.__name__ = f"above_a_mean_of_{threshold:g}"
    return build


def hidden_by_a_relu(row: Any) -> Any:
    x = tf.reshape(row["vector"], [BATCH, 3])
    return tf.concat([x, tf.nn.relu(x - tf.reduce_mean(x, 0) - 50.0)], 1)


def a_branch_by_a_statistic(row: Any) -> Any:
    x = tf.reshape(row["vector"], [BATCH, 3])
    return tf.cond(tf.reduce_max(x) > 20.0, lambda: x / tf.reduce_max(x), lambda: tf.identity(x))


def clipped_together(row: Any) -> Any:
    """A norm of all rows, which is rarely too great."""
    return tf.clip_by_global_norm([tf.reshape(row["vector"], [BATCH, 3])], 40.0)[0][0]


def compared_with_negatives(row: Any) -> Any:
    """Scores against negatives that are sampled."""
    labels = tf.reshape(row["ids"], [BATCH, 1])
    sampled, _, _ = v1.random.log_uniform_candidate_sampler(labels, 1, 3, True, 11)
    negatives = tf.gather(table(11, 1, "items"), sampled)
    return tf.matmul(users(row), negatives, transpose_b=True)


def dropped(rate: float) -> Any:
    def build(row: Any) -> Any:
        return tf.nn.dropout(tf.reshape(row["vector"], [BATCH, 3]), rate)

    build.__name__ = f"dropped_{rate:g}"
    return build


def rarely_random(row: Any) -> Any:
    """One request in ten thousand gets another answer."""
    x = tf.reshape(row["vector"], [BATCH, 3])
    return tf.cond(tf.random.uniform([]) < 1e-4, lambda: x * 2.0, lambda: tf.identity(x))


def seeded(row: Any) -> Any:
    """Random numbers that are the same in each request, by place."""
    return tf.reshape(row["vector"], [BATCH, 3]) * tf.random.stateless_uniform([BATCH, 1], [1, 2])


def after_the_row_before(row: Any) -> Any:
    """A row that repeats the one before it, which is rare."""
    ids = tf.reshape(row["ids"], [BATCH])
    return tf.where(tf.equal(ids, tf.roll(ids, 1, 0)), row["price"] * 2.0, row["price"])


def summed_up(row: Any) -> Any:
    return tf.cumsum(tf.reshape(row["vector"], [BATCH, 3])) * 1e-3 + row["vector"]


MIXING = [
    normalised, in_batch_softmax, contrastive, ranked, randomised, class_of_mixed, best_of_the_batch,
    counted, of_one_group, with_the_best, above_a_mean(0.3), above_a_mean(3.0), above_a_mean(30.0),
    hidden_by_a_relu, a_branch_by_a_statistic, clipped_together, compared_with_negatives, dropped(0.5),
    dropped(0.01), rarely_random, seeded, after_the_row_before, summed_up,
]  # fmt: skip


@pytest.mark.parametrize("build", MIXING, ids=lambda build: build.__name__)
def test_rows_that_are_mixed_keep_their_size(build: Any, tmp_path: Path) -> None:
    _, graph, _ = loaded(tmp_path, build)
    (note,) = (note for note in graph.notes if "rows" in note)
    assert note.startswith("only requests of 8 rows are answered"), note
    infos = graph.meta_graph.signature_def["serving_default"].inputs.values()
    assert {info.tensor_shape.dim[0].size for info in infos} == {BATCH}
