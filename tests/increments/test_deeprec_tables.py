"""Rows of embedding variables in DeepRec's increments: what is found, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.delta.table_changes import KeyedRows
from exporter.errors import CorruptFile
from exporter.increments.deeprec import DeepRecIncrement, abandoned_increment, read_increment
from tests.support.bundles import write
from tests.support.deeprec import Ev, write_full, write_increment


def increment_of(directory: Path) -> DeepRecIncrement:
    found = read_increment(read_catalog(directory / "model.ckpt-10"))
    assert found is not None
    return found


def as_dict(rows: KeyedRows) -> dict[int, bytes]:
    return {key: value.tobytes() for key, value in zip(rows.keys.tolist(), rows.values, strict=True)}


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_touched_rows_of_all_parts(tmp_path: Path, parts: int, dtype: type) -> None:
    ev, touched = Ev.random(500, keys=dtype), Ev.random(77, seed=5, keys=dtype)
    write_full(
        tmp_path / "model.ckpt-10", {"a/emb": ev, "untouched": ev}, parts=parts, slots={"a/emb/Adam": ev}
    )
    write_increment(tmp_path, 12, {"a/emb": touched, "a/emb/Adam": touched}, parts=parts)
    (rows,) = increment_of(tmp_path).keyed(["a/emb", "untouched", "unknown"])
    expected = {key: value.tobytes() for key, value in touched.as_dict().items()}
    assert (rows.name, as_dict(rows)) == ("a/emb", expected)
    assert not list(increment_of(tmp_path).changes()), "rows by keys are no rows by number"


def test_frequencies_count_if_they_are_recorded(tmp_path: Path) -> None:
    ev = Ev.random(50)
    counted = Ev(ev.keys, ev.values, None, ev.keys // 7)
    write_full(tmp_path / "model.ckpt-10", {"a": ev, "b": counted})
    write_increment(tmp_path, 12, {"a": ev, "b": counted})
    a, b = increment_of(tmp_path).keyed(["a", "b"])
    assert a.freqs is None
    assert b.freqs is not None
    assert np.array_equal(b.freqs, b.keys // 7)


def test_rows_that_are_as_before_are_found(tmp_path: Path) -> None:
    before = KeyedRows("t", np.array([5, 3, 9]), np.array([[1.0], [np.nan], [0.0]]))
    after = KeyedRows("t", np.array([3, 4, 5, 9]), np.array([[np.nan], [1.0], [1.5], [-0.0]]))
    assert after.same_as(before).tolist() == [True, False, False, False]
    assert after.same_as(before.at(np.array([], np.int64))).tolist() == [False] * 4


@pytest.mark.parametrize("step", [9, 10])
def test_an_increment_older_than_the_full_checkpoint_is_ignored(tmp_path: Path, step: int) -> None:
    write_full(tmp_path / "model.ckpt-10", {"t": Ev.random(5)})
    write_increment(tmp_path, step, {"t": Ev.random(5)})
    assert read_increment(read_catalog(tmp_path / "model.ckpt-10")) is None


def test_an_increment_of_another_full_checkpoint_is_left_out(tmp_path: Path) -> None:
    increment = write_increment(tmp_path, 40, {"t": Ev.random(5)})
    full = write_full(tmp_path / "model.ckpt-30", {"t": Ev.random(5)})
    for path in full.parent.glob("model.ckpt-30.*"):
        os.utime(path, (100, 100))
    for seconds, is_of_it in ((99, False), (100, True), (101, True)):
        os.utime(increment.with_name(f"{increment.name}.index"), (seconds, seconds))
        assert (read_increment(read_catalog(full)) is not None) == is_of_it
        assert (abandoned_increment(read_catalog(full)) == "") == is_of_it


def test_a_later_increment_of_one_training_covers_an_earlier_one(tmp_path: Path) -> None:
    ev = Ev.random(200)
    write_full(tmp_path / "model.ckpt-10", {"t": ev}, parts=2)
    write_increment(tmp_path, 11, {"t": ev.at(np.arange(50))}, parts=2)
    first = increment_of(tmp_path)
    write_increment(tmp_path, 12, {"t": ev.at(np.arange(90))}, parts=2)
    later = increment_of(tmp_path)
    assert later.covers(first.id)
    assert not first.covers(later.id)
    before = later.published_before(first.id, ["t"])
    (rows,) = later.keyed(["t"])
    assert np.count_nonzero(rows.same_as(before["t"])) == 50
    write_increment(tmp_path, 13, {"t": ev.at(np.arange(40, 90))}, parts=2)
    assert not increment_of(tmp_path).covers(later.id), "the trainer went back: keys are missing"


OFFSETS = np.concatenate([np.zeros(5, np.int32), np.full(996, 4, np.int32)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"t-sparse_incr_values": None}, "'t-sparse_incr_keys' has no values beside it"),
        ({"t-sparse_incr_keys": None}, "'t-sparse_incr_values' has no keys beside it"),
        ({"t-sparse_incr_values": np.ones((4, 3), np.float32)}, "expected keys and a float32 row of 2"),
        ({"t-sparse_incr_values": np.ones((3, 2), np.float32)}, "expected keys and a float32 row of 2"),
        ({"t-sparse_incr_values": np.ones((4, 2), np.float64)}, "expected keys and a float32 row of 2"),
        ({"t-sparse_incr_keys": np.ones((4, 1), np.int64)}, "expected keys and a float32 row of 2"),
        ({"t-sparse_incr_keys": np.ones(4, np.float32)}, "expected keys and a float32 row of 2"),
        ({"t-sparse_incr_keys": np.arange(4)}, "places key 0 in bucket 4"),
        ({"t-incr_partition_offset": OFFSETS[:7]}, "expected int32 of 1001 offsets"),
        ({"t-incr_partition_offset": OFFSETS - 1}, "does not divide the 4 keys"),
        ({"t-sparse_incr_keys": np.full(4, 4)}, "key 4 of 't' is there twice"),
        ({"t-sparse_incr_freqs": np.ones(3, np.int64)}, "expected int64, one for each of 4 keys"),
    ],
)
def test_damage_is_named(tmp_path: Path, changes: dict[str, np.ndarray | None], words: str) -> None:
    ones = np.ones((4, 2), np.float32)
    write_full(tmp_path / "model.ckpt-10", {"t": Ev(np.arange(4), ones, None, np.ones(4, np.int64))}, parts=0)
    prefix = write_increment(tmp_path, 12, {"t": Ev(4 + 1000 * np.arange(4), ones)})
    catalog = read_catalog(prefix)
    tensors: dict[str, np.ndarray | None] = {
        name: read_array(catalog, ref) for name, ref in catalog.tensors.items()
    }
    assert np.array_equal(tensors["t-incr_partition_offset"], OFFSETS)
    write(prefix, **{name: value for name, value in (tensors | changes).items() if value is not None})
    with pytest.raises(CorruptFile, match=words):
        list(increment_of(tmp_path).keyed(["t"]))
