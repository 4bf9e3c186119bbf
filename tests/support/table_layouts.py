"""One table, stored in every layout that there is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.delta.format import Change, Rows
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.wire.dtypes import DType
from tests.support.logs import boxes

LAYOUTS = ["whole", "2 slices", "3 slices", "columns", "2 parts", "3 parts"]


def write(prefix: Path, layout: str, table: np.ndarray[Any, Any]) -> Path:
    """A table and its slot in a layout."""
    with BundleWriter(prefix) as writer:
        for name, values in (("emb", table), ("emb/Adagrad", table + 1)):
            count, _, kind = layout.partition(" ")
            if layout == "whole":
                writer.add(name, values)
            elif layout == "columns":
                for column in range(2):
                    box = SliceSpec(values.shape, (0, column), (len(values), 1))
                    writer.add(name, values[:, column : column + 1], box)
            else:
                for number, box in enumerate(boxes(values.shape, int(count))):
                    rows = values[box.starts[0] : box.starts[0] + box.lengths[0]]
                    part = name.replace("emb", f"emb/part_{number}")
                    writer.add(*((name, rows, box) if kind == "slices" else (part, rows)))
        writer.add("bias", np.zeros(3, np.float32))
    return prefix


ROWS, WIDTH = 5000, 6
LAYOUT_ORDERS = ["whole", "slices", "columns", "mod", "to mod", "mod to mod", "cast"]


def stored(prefix: Path, layout: str, table: np.ndarray) -> RowReader:
    """A table, stored so that its served rows are those of `table` (of a part of it, for `to mod`)."""
    order, box, part = SliceOrder(), SliceSpec.whole(table.shape), 0
    with BundleWriter(prefix) as writer:
        match layout:
            case "whole" | "cast":
                writer.add("t", table)
            case "slices" | "to mod":
                cuts = [0, 1300, 1301, 4000, ROWS]
                for start, stop in pairwise(cuts):
                    spec = SliceSpec(table.shape, (start, 0), (stop - start, WIDTH))
                    writer.add("t", table[start:stop], spec)
            case "columns":
                for column in range(0, WIDTH, 2):
                    spec = SliceSpec(table.shape, (0, column), (ROWS, 2))
                    writer.add("t", table[:, column : column + 2], spec)
            case _:
                starts = np.cumsum([0, *(len(table[part::3]) for part in range(3))])
                for number in range(3):
                    rows = table[number::3]
                    spec = SliceSpec(table.shape, (int(starts[number]), 0), rows.shape)
                    writer.add("t", rows, spec)
    if layout in ("to mod", "mod to mod"):
        part, rows = 1, table[1::2]
        box = SliceSpec(table.shape, (len(table[::2]), 0), rows.shape)
    order = SliceOrder(3 if layout.startswith("mod") else 0, 2 if layout.endswith("to mod") else 0)
    catalog = read_catalog(prefix)
    dtype = DType.BFLOAT16 if layout == "cast" else DType.FLOAT
    return RowReader("t", catalog, catalog.tensors["t"], box, dtype, order, part)


def layer(seed: int, rows: int, dtype: type) -> dict[str, Change]:
    random = np.random.default_rng(seed)
    ids = np.sort(random.choice(rows, 40, replace=False)).astype(np.int64)
    return {"t": Rows(ids, random.normal(size=(40, WIDTH)).astype(dtype))}
