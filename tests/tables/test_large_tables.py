"""Tables of millions of keys: each is found, others are not, and building takes no more memory for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.admission import EVERYONE
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.tensor_bundle import check_values, memory_map, read_array, read_catalog
from exporter.tables.change_index import ArrayState, change_index, find_rows
from exporter.tables.geometry import TablePlan
from exporter.tables.integer_sets import among
from exporter.tables.lay_out import lay_out
from exporter.tables.parts import PARTS
from tests.support.budget import thorough
from tests.support.deeprec import Ev, write_large


def build(checkpoint: Path, directory: Path) -> tuple[TablePlan, ArrayState]:
    """The table of a checkpoint as it is served, every checksum compared."""
    catalog = read_catalog(checkpoint)
    plan = TablePlan.of("t", embedding_variables(catalog)["t"], np.zeros((1, 1), np.float32), 0.25)
    directory.mkdir()
    written, _ = lay_out(catalog, [plan]).write(directory, EVERYONE)
    seeds, rows, keys, values = (written.tensors[f"t/{part}"] for part in PARTS)
    for ref in (seeds, rows):
        check_values(written, ref)
    for ref in (keys, values):
        for part in ref.slices:
            check_values(written, ref, part)
    held = read_array(written, keys)
    return plan, ArrayState(np.array(memory_map(written, seeds)), np.array(memory_map(written, rows)), held)


@thorough
@pytest.mark.parametrize("count", [0, 1, 300_000, 10_000_000])
def test_every_key_is_found_and_no_other(tmp_path: Path, count: int) -> None:
    keys = Ev.random(count, 1, negative=True).keys
    prefix = write_large(tmp_path / "model.ckpt-1", "t", keys, 1, parts=3, step=1)
    plan, state = build(prefix, tmp_path / "staged")
    stored = state.row_keys[:count]
    assert np.array_equal(np.sort(stored), np.sort(keys))
    ordered, step = np.sort(stored), 1 << 20
    for first in range(0, count, step):
        asked = stored[first : first + step]
        found = find_rows(plan.geometry, state, asked)
        assert np.array_equal(found, np.arange(first, first + len(asked)))
        beside = asked + 1
        found = find_rows(plan.geometry, state, beside[~among(beside, ordered)])
        assert (found == -1).all()
    new = np.arange(1, 100_001, dtype=np.int64)[: plan.geometry.usable_rows - count] * 2**40 + 1
    new = new[~among(new, ordered)]
    change = change_index(plan.geometry, state, new, stored[: len(new) // 2])
    for part, target in (
        (change.seeds, state.index_seeds),
        (change.rows, state.index_rows),
        (change.keys, state.row_keys),
    ):
        target[part.ids] = part.values
    assert np.array_equal(find_rows(plan.geometry, state, new), change.added)
    kept = stored[len(new) // 2 : len(new) // 2 + 100_000]
    assert (find_rows(plan.geometry, state, kept[~among(kept, np.sort(new))]) >= 0).all()


PEAK = r"""
import re, sys
from pathlib import Path

from tests.tables.test_large_tables import build_alone

build_alone(*map(Path, sys.argv[1:]))
# Not ru_maxrss, which begins with what the process had that started this one.
print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def build_alone(checkpoint: Path, directory: Path) -> None:
    """What the exporter does, and no more."""
    catalog = read_catalog(checkpoint)
    plan = TablePlan.of("t", embedding_variables(catalog)["t"], np.zeros((1, 1), np.float32), 0.25)
    directory.mkdir()
    lay_out(catalog, [plan]).write(directory, EVERYONE)


@thorough
def test_ten_times_as_many_keys_take_hardly_more_memory(tmp_path: Path) -> None:
    peaks = []
    for count in (1_000_000, 10_000_000):
        directory = tmp_path / str(count)
        keys = Ev.random(count, 1).keys
        prefix = write_large(directory / "model.ckpt-1", "t", keys, 1, parts=3, step=1)
        run = [sys.executable, "-c", PEAK, prefix, directory / "staged"]
        done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600)
        peaks.append(int(done.stdout) << 10)
    assert peaks[1] - peaks[0] < 9_000_000 * 8, "its keys alone would take as much"
