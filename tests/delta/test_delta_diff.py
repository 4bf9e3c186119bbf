"""Comparing two states by rows: every bit counts, hashes only spare reading, large results go to disk."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta import compare_rows
from exporter.delta import layers as merging
from exporter.delta.compare_rows import differing_rows
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.layers import merge_changes
from exporter.delta.row_hashes import BlockHasher, HashIndex, block_rows, most_bytes, read_index, write_index
from exporter.delta.row_reader import RowReader
from exporter.delta.row_spill import RowSpill
from exporter.errors import CorruptFile
from exporter.wire.crc32c import masked_crc
from exporter.wire.dtypes import DType

SHAPE = (3000, 5)
TABLE = ServedVariable("t", DType.FLOAT, SHAPE, ChangeKind.TABLE)


def state(prefix: Path, **tensors: np.ndarray) -> LayeredState:
    with BundleWriter(prefix) as writer:
        writer.add("pad", np.zeros(3, np.uint8))  # so that nothing is aligned
        for name, value in tensors.items():
            writer.add(name, value)
    catalog = read_catalog(prefix)
    stored = {}
    for name in tensors:
        ref = catalog.tensors[name]
        box = SliceSpec(ref.shape, (0,) * len(ref.shape), ref.shape)
        stored[name] = RowReader(name, catalog, ref, box, ref.dtype)
    return LayeredState(stored)


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("known", [False, True], ids=["compared", "hashed"])
def test_every_row_that_differs_in_a_bit_is_found(
    tmp_path: Path, table: np.ndarray, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_rows, "CHUNK_BYTES", 8192)
    table[7, 0], table[8, 0], table[9, 0] = 0.0, np.nan, np.nan
    changed = table.copy()
    bits = changed.view(np.uint32)
    changed[7, 0] = -0.0
    bits[9, 0] ^= 1  # another NaN
    for row in (0, 203, 204, 205, 2999):
        bits[row, row % 5] ^= np.uint32(1 << row % 32)
    old, new = state(tmp_path / "a", t=table), state(tmp_path / "b", t=changed)
    schema, hasher = Schema.of([TABLE]), BlockHasher.fresh()
    index = None
    if known:
        hashes = diff(old, old, schema, Comparison(tmp_path, hasher=hasher)).hashes
        index = HashIndex("l", 1, hasher, hashes, "s")
    found = diff(old, new, schema, Comparison(tmp_path, index))
    rows = found.changes["t"]
    assert isinstance(rows, Rows)
    assert rows.ids.tolist() == [0, 7, 9, 203, 204, 205, 2999]
    assert rows.values.tobytes() == changed[rows.ids].tobytes()
    assert diff(new, new, schema, Comparison(tmp_path)).changes == {}


@pytest.mark.parametrize("row", [0, 1500, 2999])
def test_a_flipped_bit_gets_no_checksum_that_calls_it_right(
    tmp_path: Path, table: np.ndarray, row: int
) -> None:
    old, new = state(tmp_path / "a", t=table), state(tmp_path / "b", t=table)
    extent = new.stored["t"].tensor.extents[0]
    shard = new.stored["t"].catalog.path_of(extent)
    content = bytearray(shard.read_bytes())
    content[extent.offset + row * 20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptFile, match="is damaged at 't'"):
        diff(old, new, Schema.of([TABLE]), Comparison(tmp_path))


def test_hashes_of_equal_rows_are_equal_and_of_others_are_not(table: np.ndarray) -> None:
    hasher = BlockHasher.fresh()
    hashes = hasher.hash_rows(table)
    assert len(hashes) == -(-SHAPE[0] // block_rows(20))
    assert (hasher.hash_rows(table.copy()) == hashes).all()
    assert (BlockHasher.fresh().hash_rows(table) != hashes).all(), "keys are nobody's to foresee"
    negated = table.copy()
    negated[0, :2] *= -1  # two differences that a sum of products modulo 2**64 would let cancel out
    assert (hasher.hash_rows(negated) != hashes).tolist() == [True] + [False] * (len(hashes) - 1)


@pytest.mark.parametrize("width", [1, 3, 4, 5000])
def test_rows_of_any_width_are_hashed(width: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (50, width), np.uint8)
    hasher = BlockHasher.fresh()
    hashes = hasher.hash_rows(rows)
    for row in range(len(rows)):
        other = rows.copy()
        other[row, width // 2] ^= 0x80
        assert np.flatnonzero(hasher.hash_rows(other) != hashes).tolist() == [row // block_rows(width)]


@pytest.fixture
def index() -> HashIndex:
    return HashIndex("l", 7, BlockHasher(1), {"a/b[0]": np.arange(3, dtype=np.uint64)}, "s")


def test_a_cache_is_read_back(tmp_path: Path, index: HashIndex) -> None:
    write_index(tmp_path / ".state/hashes", index)
    found = read_index(tmp_path / ".state/hashes", lineage="l", position=7, state="s")
    assert found is not None
    assert found.hasher == index.hasher
    assert {name: hashes.tolist() for name, hashes in found.tables.items()} == {"a/b[0]": [0, 1, 2]}
    assert found.find("a/b[0]", 3, 5000) is not None
    assert found.find("a/b[0]", 4, 5000) is None, "of a table of another size"


@pytest.mark.parametrize(
    "damage", ["missing", "short", "empty", "other position", "other log", "other state"]
)
def test_a_cache_that_cannot_be_trusted_is_no_cache(tmp_path: Path, index: HashIndex, damage: str) -> None:
    path = tmp_path / "hashes"
    write_index(path, index)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    lineage, position = ("m" if damage == "other log" else "l"), (8 if damage == "other position" else 7)
    state = "t" if damage == "other state" else "s"
    assert read_index(path, lineage=lineage, position=position, state=state) is None


def test_a_cache_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    tables = {f"table {number}" * 20: number * 100_000 for number in range(20)}
    hashes = {name: np.zeros(-(-bytes_ // 2049), np.uint64) for name, bytes_ in tables.items()}
    path, limit = tmp_path / "hashes", most_bytes(tables)
    write_index(path, HashIndex("l", 7, BlockHasher(1), hashes, "s"))
    assert path.stat().st_size <= limit < 2 * path.stat().st_size + (20 << 12)
    assert read_index(path, lineage="l", position=7, state="s", limit=limit) is not None
    os.truncate(path, 1 << 40)
    assert read_index(path, lineage="l", position=7, state="s", limit=limit) is None


def test_a_cache_with_packed_members_is_no_cache(tmp_path: Path, index: HashIndex) -> None:
    path = tmp_path / "hashes"
    write_index(path, index)
    packed = io.BytesIO()
    with np.load(io.BytesIO(path.read_bytes()[16:])) as arrays:
        np.savez_compressed(packed, **arrays)
    body = packed.getvalue()
    path.write_bytes(path.read_bytes()[:8] + masked_crc(body).to_bytes(8, "little") + body)
    assert read_index(path, lineage="l", position=7, state="s") is None


@given(st.data())
def test_a_cache_with_a_flipped_bit_is_no_cache(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "hashes"
        write_index(path, HashIndex("l", 7, BlockHasher(1), {"a": np.arange(3, dtype=np.uint64)}, "s"))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) * 8 - 1))
        content[at // 8] ^= 1 << at % 8
        path.write_bytes(content)
        assert read_index(path, lineage="l", position=7, state="s") is None


def test_many_rows_go_to_disk_and_come_back(tmp_path: Path, table: np.ndarray) -> None:
    with RowSpill(TABLE, tmp_path, limit=1000) as spill:
        for start in range(0, 3000, 70):
            ids = np.arange(start, min(start + 70, 3000))
            spill.add(ids, table[ids])
        rows = spill.rows()
    assert rows is not None
    assert rows.ids.tolist() == list(range(3000))
    assert rows.values.tobytes() == table.tobytes()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_rows_of_every_word_size_are_compared(dtype: type) -> None:
    old: np.ndarray = np.arange(21).reshape(7, 3).astype(dtype)
    new = old.copy()
    new[2, 2], new[6, 0] = 99, 99
    assert differing_rows(old, new).tolist() == [2, 6]


layers = st.lists(st.dictionaries(st.integers(0, 20), st.integers(0, 99)), min_size=1, max_size=6)


@given(layers, st.booleans())
def test_a_merger_holds_the_newest_value_of_each_row(changes: list[dict[int, int]], small: bool) -> None:
    import tempfile

    variable = ServedVariable("t", DType.INT64, (21, 1), ChangeKind.TABLE)
    tables = [
        {"t": Rows(np.array(sorted(rows), np.int64), np.array([[rows[i]] for i in sorted(rows)], np.int64))}
        for rows in changes
        if rows
    ]
    expected: dict[int, int] = {}
    for rows in changes:
        expected |= rows
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "ROWS_AT_ONCE", 2 if small else 1 << 16)
        found = merge_changes(tables, Schema.of([variable]), Path(directory)).get("t")
    held = (
        {}
        if not isinstance(found, Rows)
        else dict(zip(found.ids.tolist(), found.values[:, 0].tolist(), strict=True))
    )
    assert held == expected
    assert list(held) == sorted(held)


def test_a_merger_of_tables_of_unlike_density_holds_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one table's rows lie close together, the others' are not read further than those."""
    variable = ServedVariable("t", DType.INT64, (1000, 1), ChangeKind.TABLE)
    dense, sparse = np.arange(0, 100), np.arange(0, 1000, 50)
    layers = [{"t": Rows(ids, ids.reshape(-1, 1))} for ids in (dense, sparse)]
    sizes: list[int] = []
    add = RowSpill.add

    def noting(spill: RowSpill, ids: np.ndarray, values: np.ndarray) -> None:
        sizes.append(len(ids))
        add(spill, ids, values)

    monkeypatch.setattr(RowSpill, "add", noting)
    monkeypatch.setattr(merging, "ROWS_AT_ONCE", 5)
    found = merge_changes(layers, Schema.of([variable]), tmp_path)["t"]
    assert isinstance(found, Rows)
    assert found.ids.tolist() == sorted({*dense.tolist(), *sparse.tolist()})
    assert max(sizes) <= 2 * 5
