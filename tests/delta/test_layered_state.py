"""Rows of a state are the same however they are read: one by one in any order, or in a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import Rows
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_reader import RowReader
from exporter.errors import CorruptFile
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
    state = LayeredState({"t": reader}, tuple(changes))
    wanted = np.array([*ids, *range(100)] if dense else ids, np.int64)
    found = state.rows_at("t", wanted)
    assert np.array_equal(found, state.rows("t", 0, SIZE)[wanted])


def part_of(directory: Path, *, stored: tuple[int, ...], part: int | None) -> RowReader:
    """A reader of a table of two halves, of which some are stored, or of one half."""
    values = np.arange(20, dtype=np.float32).reshape(10, 2)
    boxes = [SliceSpec((10, 2), (start, 0), (5, 2)) for start in (0, 5)]
    with BundleWriter(directory / "model.ckpt-1") as writer:
        for number in stored:
            writer.add("t", values[5 * number : 5 * number + 5], boxes[number])
    catalog = read_catalog(directory / "model.ckpt-1")
    ref = catalog.tensors["t"]
    return RowReader(
        "t", catalog, ref, boxes[part] if len(stored) == 2 else SliceSpec.whole((10, 2)), ref.dtype
    )


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_is_made_of_what_lies_in_it_alone(tmp_path: Path, part: int) -> None:
    """What another server part needs may be damaged, or not be here yet."""
    reader = part_of(tmp_path, stored=(0, 1), part=part)
    assert [run.part and run.part.spec for run in reader.runs] == [reader.box]
    assert reader.has_own_runs


def test_rows_that_are_not_stored_are_no_rows(tmp_path: Path) -> None:
    reader = part_of(tmp_path, stored=(1,), part=None)
    assert reader.rows(5, 10).tolist() == np.arange(10, 20).reshape(5, 2).tolist()
    assert reader.rows(3, 3).shape == (0, 2)
    with pytest.raises(CorruptFile, match="parts of 't' are not stored"):
        reader.rows(3, 7)
    with pytest.raises(CorruptFile, match="parts of 't' are not stored"):
        reader.rows(0, 5)
