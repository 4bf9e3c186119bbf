"""Which rows a log has changed beside a mapped base: numbers while they are few, then a bit for each row."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.delta.format import ChangeKind, ServedVariable
from exporter.errors import CorruptFile, OverlayFull
from exporter.pipeline.full import export
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.overlay_room import OverlaidRows, room_for
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage.layout import DELTA_NAME
from exporter.wire.dtypes import DType
from tests.support.logs import damage_tensor
from tests.support.mapped_models import ROWS, MappedModel


@given(st.integers(1, 400), st.lists(st.sets(st.integers(0, 399), max_size=30), max_size=12))
def test_rows_are_counted_once_however_they_are_kept(rows: int, changes: list[set[int]]) -> None:
    overlaid = OverlaidRows({"t": 5}, {"t": rows}, {"t": np.empty(0, np.int64)})
    changed: set[int] = set()
    for change in changes:
        ids = np.array(sorted(row for row in change if row < rows), np.int64)
        overlaid.add({"t": ids, "another": np.arange(3)})
        changed |= set(ids.tolist())
        (table,) = overlaid.tables
        assert (table.rows, table.capacity) == (len(changed), 5)
        kept = overlaid.found["t"]
        assert kept.nbytes <= -(-rows // 8)
        if kept.dtype == np.uint8:
            kept = np.flatnonzero(np.unpackbits(kept, bitorder="little"))
        assert kept.tolist() == sorted(changed)
    if len(changed) > 5:
        with pytest.raises(OverlayFull, match=f"table 't' is full: {len(changed)} rows"):
            overlaid.require_room()


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    from exporter.options import Updates

    model = MappedModel(tmp_path)
    export(model.request(updates=Updates()))
    return model


def change(model: MappedModel, step: int, ids: np.ndarray) -> DeltaLog:
    model.table[ids] += 1
    model.save(step, model.table)
    export_incremental(model.request())
    return read_log(model.out)


def kept(log: DeltaLog) -> dict[str, int]:
    """The bytes of what is kept of each table, in the log's directory."""
    (data,) = (log.path / ".state").glob("overlaid-*.data-*")
    return {data.name.split("-")[2]: data.stat().st_size}


def test_few_rows_are_kept_by_their_numbers(model: MappedModel) -> None:
    log = change(model, 8, np.array([3, 5]))
    assert kept(log) == {"8": 16}
    log = change(model, 9, np.array([5, 19_999]))
    assert kept(log) == {"9": 24}
    assert OverlaidRows.of(log).found["emb"].tolist() == [3, 5, 19_999]
    log = change(model, 10, np.arange(1_000))
    assert kept(log) == {"10": ROWS // 8}
    (table,) = OverlaidRows.of(log).tables
    assert table.rows == 1_001
    log = change(model, 11, np.arange(500, 1_500))
    (table,) = OverlaidRows.of(log).tables
    assert table.rows == 1_501


def test_a_lost_cache_is_made_of_row_numbers_alone(model: MappedModel) -> None:
    """Damage of a row is another's matter; damage of a number is found."""
    log = change(model, 8, np.array([3, 5]))
    log = change(model, 9, np.array([5, 7]))
    shutil.rmtree(log.path / ".state")
    damage_tensor(log.deltas[-1].path / DELTA_NAME, "emb/values")
    (table,) = OverlaidRows.of(read_log(model.out)).tables
    assert table.rows == 3
    damage_tensor(log.deltas[-1].path / DELTA_NAME, "emb/ids")
    with pytest.raises(CorruptFile, match="checksum"):
        OverlaidRows.of(read_log(model.out))


@pytest.mark.parametrize("damage", ["emb", None])
def test_a_damaged_cache_is_made_again(model: MappedModel, damage: str | None) -> None:
    log = change(model, 8, np.array([3, 5]))
    (index,) = (log.path / ".state").glob("overlaid-*.index")
    if damage is None:
        index.write_bytes(b"")
    else:
        damage_tensor(index.with_suffix(""), damage)
    (table,) = OverlaidRows.of(read_log(model.out)).tables
    assert table.rows == 2


@pytest.mark.parametrize(("rows", "share"), [(1000, 4), ((8 << 30) // 256, 4), ((8 << 30) // 256 + 8, 8)])
def test_a_large_table_has_room_for_a_smaller_share(rows: int, share: int) -> None:
    """A server asks for the memory of both places of all rows at once."""
    table = ServedVariable("table", DType.FLOAT, (rows, 64), ChangeKind.TABLE)
    assert room_for(table, None) == rows // share
    assert room_for(table, 10) == 10
