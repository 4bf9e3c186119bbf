"""`diff` of one table in different partitions compares its rows, whatever they are called."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import export_model
from tests.support.table_layouts import LAYOUTS, write

TABLE = np.arange(22, dtype=np.float32).reshape(11, 2)


@pytest.mark.parametrize(("a", "b"), permutations(LAYOUTS, 2))
def test_values_are_compared_and_not_the_layout(tmp_path: Path, a: str, b: str) -> None:
    changed = TABLE.copy()
    changed[7] += 3
    old, same = write(tmp_path / "old-1", a, TABLE), write(tmp_path / "same-2", b, TABLE)
    assert export_model("diff", old, same, "--exit-code", "-q").code == 0
    new = write(tmp_path / "new-3", b, changed)
    found = export_model("diff", old, new, "--json").document
    assert (found["only_a"], found["only_b"], found["compared"]) == ([], [], 3)
    rows = [(v["name"], v["changed_rows"], v["rows"], v["largest"]) for v in found["variables"]]
    assert sorted(rows) == [("emb", 1, 11, 3.0), ("emb/Adagrad", 1, 11, 3.0)]


def test_parts_that_are_as_the_other_sides_keep_their_names(tmp_path: Path) -> None:
    changed = TABLE.copy()
    changed[0] += 3
    a = write(tmp_path / "a-1", "2 parts", TABLE)
    b = write(tmp_path / "b-2", "2 parts", changed)
    found = export_model("diff", a, b, "--json").document
    assert [v["name"] for v in found["variables"]] == ["emb/part_0", "emb/part_0/Adagrad"]


def test_a_table_that_grew_is_another_one(tmp_path: Path) -> None:
    a = write(tmp_path / "a-1", "2 parts", TABLE)
    b = write(tmp_path / "b-2", "3 parts", np.concatenate([TABLE, TABLE]))
    found = export_model("diff", a, b, "--json").document
    assert found["only_a"] == found["only_b"] == ["emb", "emb/Adagrad"]


def test_rows_that_training_looks_up_by_mod_are_found(tmp_path: Path) -> None:
    """As a trainer leaves it that was started again with another number of parameter servers."""
    import tensorflow as tf

    tf1 = tf.compat.v1

    def save(parts: int, step: int, changed: tuple[int, ...] = ()) -> Path:
        rows = np.concatenate([np.arange(12)[part::parts] for part in range(parts)])
        values = np.stack([rows, rows], 1).astype(np.float32)
        values[np.isin(rows, changed)] += 3
        with tf.Graph().as_default(), tf1.Session() as session:
            table = tf1.get_variable(
                "emb", initializer=tf.constant(values), partitioner=tf1.fixed_size_partitioner(parts)
            )
            tf1.nn.embedding_lookup(list(table), tf1.placeholder(tf.int64, [None]))  # by mod
            session.run(tf1.global_variables_initializer())
            return Path(tf1.train.Saver().save(session, str(tmp_path / f"{parts}.ckpt"), step))

    old, same, new = save(3, 1), save(2, 2), save(4, 3, changed=(5,))
    assert export_model("diff", old, same, "--exit-code", "-q").code == 0
    found = export_model("diff", old, new, "--json").document
    assert [(v["name"], v["changed_rows"]) for v in found["variables"]] == [("emb", 1)]
