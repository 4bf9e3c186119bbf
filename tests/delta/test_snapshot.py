"""Rows of a state are the same however they are read: one by one in any order, or in a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.format import Rows
from exporter.delta.row_reader import RowReader
from exporter.delta.snapshot import Snapshot
from tests.support.bundles import write

SIZE = 5000


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RowReader:
    values = -np.arange(2 * SIZE, dtype=np.float32).reshape(SIZE, 2)
    catalog = read_catalog(write(tmp_path_factory.mktemp("state") / "model.ckpt-1", t=values))
    ref = catalog.tensors["t"]
    return RowReader("t", catalog, ref, SliceSpec.whole(ref.shape), ref.dtype)


@given(
    st.lists(st.integers(0, SIZE - 1) | st.integers(40, 60), max_size=40),
    st.lists(st.sets(st.integers(0, SIZE - 1) | st.integers(40, 60), max_size=20), max_size=4),
    st.booleans(),
)
def test_rows_at_any_places_are_those_in_a_row(
    reader: RowReader, ids: list[int], layers: list[set[int]], dense: bool
) -> None:
    changes = [
        {"t": Rows(np.array(sorted(rows), np.int64), np.full((len(rows), 2), number, np.float32))}
        for number, rows in enumerate(layers, 1)
    ]
    state = Snapshot({"t": reader}, tuple(changes))
    wanted = np.array([*ids, *range(100)] if dense else ids, np.int64)
    found = state.rows_at("t", wanted)
    assert np.array_equal(found, state.rows("t", 0, SIZE)[wanted])
