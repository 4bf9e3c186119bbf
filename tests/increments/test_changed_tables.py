"""Tables by keys in increments: what is written comes back, what is damaged is named, changes merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta.table_changes import KeyedChange, KeyedRows, merged
from exporter.errors import CorruptFile
from exporter.increments.changed_tables import ChangedTable, TableRows
from exporter.increments.history import read_history
from exporter.increments.increment import CheckpointId, Contents, Increment, StoredIncrement
from tests.support.increments import publish

IDS = np.array([1, 4], np.int64)
KEYS = np.array([2**63 - 1, -(2**63)], np.int64)
VALUES = np.array([[1, 2, 3], [4, 5, np.nan]], np.float32)
REMOVED = np.array([-5, 7, 9], np.int64)
TABLE = ChangedTable("user/emb", "float32", 3, 5, 2, 3)


def published(directory: Path, table: ChangedTable, *tensors: np.ndarray | None) -> StoredIncrement:
    def fill(writer: BundleWriter) -> Contents:
        for key, value in zip((*table.keys, "stranger/ids"), tensors, strict=False):
            if value is not None:
                writer.add(key, value)
        return Contents(tables=(table,))

    draft = Increment(
        id="1" * 32,
        run="2" * 32,
        generation=1,
        parent=CheckpointId("model.ckpt-1", 1, "3" * 64),
        from_step=1,
        to_step=2,
        variables=(),
    )
    publish(directory, draft, fill)
    (found,) = read_history(directory).increments
    return found


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    stored = published(tmp_path, TABLE, IDS, KEYS, VALUES, REMOVED)
    assert stored.increment.rows == 2
    assert list(stored.changes()) == []
    ((table, rows),) = stored.tables()
    assert table == TABLE
    expected = TableRows(IDS, KEYS, VALUES, REMOVED)
    for name in ("ids", "keys", "values", "removed"):
        assert getattr(rows, name).tobytes() == getattr(expected, name).tobytes()


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ((IDS[::-1], KEYS, VALUES, REMOVED), "are not rows of 5"),
        ((IDS + 1, KEYS, VALUES, REMOVED), "are not rows of 5"),
        ((IDS - 2, KEYS, VALUES, REMOVED), "are not rows of 5"),
        ((IDS, KEYS[[0, 0]], VALUES, REMOVED), "is there twice"),
        ((IDS, KEYS, VALUES, REMOVED[[0, 1, 1]]), "is there twice"),
        ((IDS, KEYS, VALUES[:1], REMOVED), r"user/emb/values' is float32\[1, 3\], its manifest says"),
        ((IDS, KEYS, VALUES.astype(np.float64), REMOVED), "is float64"),
        ((IDS, None, VALUES, REMOVED), "keys' is not there"),
        ((IDS, KEYS, VALUES, REMOVED, IDS), "does not list"),
    ],
)
def test_damage_is_named(tmp_path: Path, tensors: tuple[np.ndarray | None, ...], match: str) -> None:
    stored = published(tmp_path, TABLE, *tensors)
    with pytest.raises(CorruptFile, match=match):
        list(stored.tables())


def test_a_manifest_that_lies_is_named(tmp_path: Path) -> None:
    stored = published(tmp_path, replace(TABLE, capacity=4), IDS, KEYS, VALUES, REMOVED)
    with pytest.raises(CorruptFile, match="are not rows of 4"):
        list(stored.tables())


FEW = st.integers(-3, 3)


@given(st.lists(st.tuples(st.sets(FEW), st.dictionaries(FEW, st.integers(0, 99)))), st.sets(FEW))
def test_changes_that_are_merged_do_what_they_do_one_after_the_other(
    changes: list[tuple[set[int], dict[int, int]]], before: set[int]
) -> None:
    def apply(table: dict[int, int], change: KeyedChange) -> dict[int, int]:
        kept = {key: value for key, value in table.items() if key not in change.removed.tolist()}
        return kept | dict(zip(change.rows.keys.tolist(), change.rows.values[:, 0].tolist(), strict=True))

    made = [
        KeyedChange(
            KeyedRows(
                "emb",
                np.array(sorted(rows), np.int64),
                np.array([[rows[key]] for key in sorted(rows)], np.int64).reshape(-1, 1),
            ),
            np.array(sorted(removed), np.int64),
        )
        for removed, rows in changes
    ]
    table = dict.fromkeys(before, -1)
    expected = table
    for change in made:
        expected = apply(expected, change)
    for change in merged(made).values():
        table = apply(table, change)
    assert table == expected
