"""Reading embedding variables of full checkpoints: what is found, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from exporter.catalog import ExtraKind
from exporter.checkpoint.admission import EVERYONE
from exporter.checkpoint.embedding_variables import count_blocks, embedding_variables, read_keys
from exporter.checkpoint.tensor_bundle import memory_map, read_array, read_catalog
from exporter.errors import CorruptFile, UnsupportedFormat
from exporter.mapping.extras import classify_extras
from exporter.tables.geometry import TablePlan
from exporter.tables.lay_out import lay_out
from tests.support.bundles import write
from tests.support.commands import export_model
from tests.support.deeprec import Ev, write_full
from tests.support.logs import damage_tensor


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
    for what, expected in (("versions", keys // 3), ("freqs", keys // 5)):
        blocks = [*(count_blocks(catalog, variable, what) or ())]
        assert [first for first, _ in blocks] == [0, variable.parts[0].rows]
        assert np.array_equal(np.concatenate([block for _, block in blocks]), expected)
    assert variable.filtered_keys == 2


def test_a_reader_finds_the_rows_of_another_number_of_parts(tmp_path: Path) -> None:
    """DeepRec restored from 3 parts saves 2, or 1: the same keys in other parts."""
    ev = Ev.random(999, seed=3, negative=True)
    for step, parts in enumerate([3, 2, 1, 0]):
        prefix = write_full(tmp_path / f"model.ckpt-{step}", {"t": ev}, parts=parts)
        assert_holds(prefix, "t", ev, parts)


def test_slots_with_keys_of_their_own_are_known_as_slots(tmp_path: Path) -> None:
    ev, other = Ev.random(50, seed=1), Ev.random(70, seed=2)
    slots = {"a/t/Adagrad": other, "a/t/Adam_1": ev}
    catalog = read_catalog(write_full(tmp_path / "model.ckpt-7", {"a/t": ev, "u": ev}, slots=slots, parts=3))
    found = embedding_variables(catalog)
    owners = {name: variable.slot_of for name, variable in found.items()}
    assert owners == {"a/t": None, "a/t/Adagrad": "a/t", "a/t/Adam_1": "a/t", "u": None}
    assert (found["a/t/Adagrad"].rows, len(found["a/t/Adagrad"].parts)) == (70, 3)
    kinds = {extra.tensor.name: extra.kind for extra in classify_extras(catalog)}
    assert kinds["a/t/part_0/Adagrad-values"] is ExtraKind.SLOT
    assert kinds["a/t/part_0/Adagrad-partition_offset"] is ExtraKind.SLOT
    assert kinds["a/t/part_0-values"] is ExtraKind.OTHER
    assert kinds["a/t/part_0-versions"] is ExtraKind.BOOKKEEPING


def test_tables_of_stock_tensorflow_are_none(tmp_path: Path) -> None:
    """A mutable hash table's checkpoint has keys and values, and no versions."""
    prefix = write(tmp_path / "m-1", **{"t-keys": np.arange(3), "t-values": np.ones((3, 2)), "u-versions": 1})
    assert not embedding_variables(read_catalog(prefix))


def test_rows_that_are_not_numbers_are_rows(tmp_path: Path) -> None:
    ev = Ev(np.array([4, 8], np.int64), np.array([[np.nan, 1], [np.inf, -0.0]], np.float32))
    assert_holds(write_full(tmp_path / "model.ckpt-1", {"t": ev}), "t", ev, 1)


def damaged(directory: Path, changes: dict[str, np.ndarray | None]) -> Path:
    """A table of two parts, of which tensors are replaced, added, or with None left out."""
    ev = Ev(np.arange(20, dtype=np.int64), np.ones((20, 2), np.float32), np.arange(20), np.arange(20))
    catalog = read_catalog(write_full(directory / "good-1", {"t": ev}, parts=2))
    tensors: dict[str, np.ndarray | None] = {
        name: read_array(catalog, ref) for name, ref in catalog.tensors.items()
    }
    tensors |= changes
    return write(directory / "bad-1", **{name: value for name, value in tensors.items() if value is not None})


ODD = np.arange(1, 20, 2)
LIES = np.concatenate([np.zeros(3, np.int32), np.full(998, 10, np.int32)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"t/part_1-keys": np.full(10, 1)}, "'t/part_1-partition_offset' places key 1 in bucket 3"),
        (
            {"t/part_1-keys": np.full(10, 1), "t/part_1-partition_offset": None},
            "twice in 't/part_1-keys'",
        ),
        (
            {"t/part_1-keys": np.arange(10), "t/part_1-partition_offset": None},
            "in 't/part_0-keys' and in",
        ),
        ({"t/part_1-partition_offset": LIES}, "places key 1 in bucket 2, it belongs in 1"),
        ({"t/part_1-partition_offset": LIES - 10}, "does not divide the 10 keys"),
        ({"t/part_1-partition_offset": LIES[::-1].copy()}, "does not divide the 10 keys"),
        ({"t/part_1-partition_offset": LIES[:9]}, r"is int32\[9\], expected int32 of 1001 offsets"),
        ({"t/part_1-partition_filter_offset": LIES.astype(np.int64)}, "expected int32 of 1001 offsets"),
        ({"t/part_1-keys": ODD[:9]}, r"float32\[10, 2\], expected a row of numbers for each of 9 keys"),
        ({"t/part_1-keys": ODD.reshape(5, 2)}, "expected int64 or int32 keys, one dimension"),
        ({"t/part_1-keys": ODD.astype(np.float64)}, "expected int64 or int32 keys, one dimension"),
        ({"t/part_1-keys": ODD.astype(np.int32)}, "expected int32 keys"),
        ({"t/part_1-values": np.ones((10, 3), np.float32)}, r"differ: .*float32\[2\], .*float32\[3\]"),
        ({"t/part_1-values": np.ones(10, np.float32)}, "expected a row of numbers"),
        ({"t/part_1-values": np.ones((10, 2), np.int32)}, "expected a row of numbers"),
        ({"t/part_1-values": None}, "'t/part_1-versions' has no 't/part_1-values' beside it"),
        ({"t/part_1-keys": None}, "'t/part_1-versions' has no 't/part_1-keys' beside it"),
        ({"t/part_1-versions": np.arange(9)}, "expected int64, one for each of 10 keys, or none"),
        ({"t/part_1-freqs": np.ones(10, np.float32)}, "expected int64, one for each of 10 keys, or none"),
        ({"t/part_1-keys_filtered": np.ones((2, 2), np.int64)}, "expected int64 keys, one dimension"),
        ({"t/part_1-freqs_filtered": np.ones(2, np.int64)}, "int64, one for each of 0 keys"),
        ({"t/part_0-versions": None}, "'t' has 1 parts, and not part 0"),
        (
            {"t-keys": ODD, "t-values": np.ones((10, 2), np.float32), "t-versions": ODD},
            "'t' is stored as a whole and in parts",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, changes: dict[str, np.ndarray | None], words: str) -> None:
    catalog = read_catalog(damaged(tmp_path, changes))
    with pytest.raises(CorruptFile, match=words):
        read_keys(catalog, embedding_variables(catalog)["t"])
    (tmp_path / "staged").mkdir()
    with pytest.raises(CorruptFile, match=words):  # a base reads keys in blocks, and never all of them
        plan = TablePlan.of("t", embedding_variables(catalog)["t"], np.zeros((1, 2), np.float32), 0.25)
        lay_out(catalog, [plan]).write(tmp_path / "staged", EVERYONE)


@pytest.mark.parametrize("block", [1, 3, 7, 20])
def test_keys_are_checked_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("exporter.checkpoint.embedding_variables._BLOCK", block)
    ev = Ev.random(500, negative=True)
    assert_holds(write_full(tmp_path / "model.ckpt-7", {"t": ev}, parts=3), "t", ev, 3)
    test_damage_is_named(tmp_path, {"t/part_1-partition_offset": LIES}, "places key 1 in bucket 2")


def test_a_flipped_bit_among_the_keys_is_found(tmp_path: Path) -> None:
    prefix = write_full(tmp_path / "model.ckpt-1", {"t": Ev.random(100)})
    damage_tensor(prefix, "t/part_0-keys")
    catalog = read_catalog(prefix)
    with pytest.raises(CorruptFile, match="its checksum is"):
        read_keys(catalog, embedding_variables(catalog)["t"])


@pytest.mark.parametrize("name", ["model.ckpt-1-a_t-ssd_record.index", "model.ckpt-1-a_t-emb_files"])
def test_rows_outside_the_bundle_are_refused(tmp_path: Path, name: str) -> None:
    prefix = write_full(tmp_path / "model.ckpt-1", {"a/t": Ev.random(9)})
    (tmp_path / "model.ckpt-11-a_t-ssd_record.index").touch()  # of another checkpoint
    assert embedding_variables(read_catalog(prefix))
    (tmp_path / name).touch()
    with pytest.raises(UnsupportedFormat, match="rows of an embedding variable outside"):
        embedding_variables(read_catalog(prefix))


@pytest.mark.parametrize("old", [False, True])
def test_inspect_shows_tables(tmp_path: Path, old: bool) -> None:
    ev = Ev.random(5000, 8, seed=4)
    ev = Ev(ev.keys, ev.values, filtered=np.arange(3))
    prefix = write_full(tmp_path / "model.ckpt-7", {"emb": ev}, slots={"emb/Adagrad": ev}, parts=2, old=old)
    found = export_model("inspect", prefix, "--json")
    assert found.code == 0, found.err
    (table,) = found.document["embeddings"]
    histogram = table.pop("keys_by_remainder")
    assert histogram == np.bincount(ev.keys % 1000, minlength=1000).tolist()
    assert table == {
        "name": "emb",
        "key_dtype": "int64",
        "dtype": "float32",
        "dimension": 8,
        "keys": 5000,
        "bytes": 160_000,
        "filtered_keys": 0 if old else 3,
        "parts": 2,
        "slots": ["Adagrad"],
    }
    lines = export_model("inspect", prefix).out
    filtered = "" if old else ", 3 more filtered"
    assert f"emb: 5000 keys{filtered}, float32[8], 156.2 KiB, 2 parts, slots Adagrad" in lines
    assert f"{min(histogram)} to {max(histogram)}, median" in lines


def test_inspect_tells_why_tables_cannot_be_shown(tmp_path: Path) -> None:
    prefix = damaged(tmp_path, {"t/part_1-values": None})
    found = export_model("inspect", prefix)
    assert found.code == 0
    assert "its embedding variables cannot be read" in found.err
    assert "has no 't/part_1-values'" in found.err
