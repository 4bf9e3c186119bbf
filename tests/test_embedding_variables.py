"""Reading embedding variables of full checkpoints: what is found, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from exporter.checkpoint.embedding_variables import embedding_variables, read_counts, read_keys
from exporter.checkpoint.tensor_bundle import memory_map, read_catalog
from tests.support.deeprec import Ev, write_full


def assert_holds(prefix: Path, name: str, ev: Ev, parts: int) -> None:
    """The keys with their rows are those of `ev`, whatever their order."""
    catalog = read_catalog(prefix)
    variable = embedding_variables(catalog)[name]
    keys = read_keys(catalog, variable)
    values = np.concatenate([memory_map(catalog, part.values) for part in variable.parts])
    assert (variable.rows, variable.dim, len(variable.parts)) == (len(ev.keys), ev.dim, max(parts, 1))
    found, expected = np.argsort(keys), np.argsort(ev.keys)
    assert np.array_equal(keys[found], ev.keys[expected].astype(np.int64))
    assert values[found].tobytes() == ev.values[expected].tobytes()


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("old", [False, True])
def test_one_table_is_read_whole_and_in_parts(tmp_path: Path, parts: int, old: bool) -> None:
    ev = Ev.random(2345, seed=parts)
    prefix = write_full(tmp_path / "model.ckpt-7", {"emb/user": ev}, parts=parts, old=old)
    assert_holds(prefix, "emb/user", ev, parts)


@pytest.mark.parametrize("keys", [np.int32, np.int64])
@pytest.mark.parametrize("values", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_key_and_value_types(tmp_path: Path, keys: type, values: type) -> None:
    ev = Ev.random(500, 3, keys=keys, values=values)
    assert_holds(write_full(tmp_path / "model.ckpt-7", {"t": ev}, parts=2), "t", ev, 2)


def test_extreme_keys_negative_keys_and_no_keys(tmp_path: Path) -> None:
    keys = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, -2, 0, -1000, 999], np.int64)
    extreme, none = Ev(keys, np.arange(14, dtype=np.float32).reshape(7, 2)), Ev.random(0)
    prefix = write_full(tmp_path / "model.ckpt-7", {"a": extreme, "b": none}, parts={"a": 3})
    assert_holds(prefix, "a", extreme, 3)
    assert_holds(prefix, "b", none, 0)


def test_versions_and_frequencies_follow_the_keys(tmp_path: Path) -> None:
    ev = Ev.random(300)
    ev = Ev(ev.keys, ev.values, ev.keys // 3, ev.keys // 5, filtered=np.array([5, 4], np.int64))
    catalog = read_catalog(
        write_full(tmp_path / "model.ckpt-7", {"t": ev, "bare": ev.at(ev.keys > 0)}, parts=2)
    )
    variable = embedding_variables(catalog)["t"]
    keys = read_keys(catalog, variable)
    versions, freqs = read_counts(catalog, variable, "versions"), read_counts(catalog, variable, "freqs")
    assert versions is not None and freqs is not None
    assert np.array_equal(versions, keys // 3)
    assert np.array_equal(freqs, keys // 5)
    assert variable.filtered_keys == 2
