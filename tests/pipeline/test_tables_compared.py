"""Tables by keys of two states, compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.increments.changed_tables import TrainedTable
from exporter.pipeline.comparison import compare_tables
from exporter.training import IncrementWriter

KEYS = np.array([7, -1, 3])


def table(directory: Path, dim: int) -> TrainedTable:
    rows = np.ones((len(KEYS), dim), np.float32)
    catalog = read_catalog(IncrementWriter(directory).save(10, {}, {"users": (KEYS, rows)}))
    variable = embedding_variables(catalog)["users"]
    return TrainedTable.read(catalog, variable, variable.value_dtype)


@pytest.mark.parametrize(("dim", "compared"), [(4, 1), (3, 0), (1, 0)])
def test_tables_with_rows_of_another_width_are_not_compared(tmp_path: Path, dim: int, compared: int) -> None:
    ours, theirs = table(tmp_path / "a", 4), table(tmp_path / "b", dim)
    found = [*compare_tables({"users": ours}, {"users": theirs})]
    assert [each.is_empty for each in found] == [True] * compared
