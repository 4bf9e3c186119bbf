"""Tables compared by tasks: what threads find in one process, whatever the layout and what lies over it."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from exporter.delta.compare_rows import SideChecksums, StoredSide
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_hashes import BlockHasher
from exporter.errors import CheckpointChanged, CorruptFile, EngineFailed
from exporter.jobs.runner import Runner
from exporter.wire.dtypes import DType
from tests.support.commands import export_model
from tests.support.engine_runs import Noted
from tests.support.object_stores import Bucket
from tests.support.table_layouts import LAYOUT_ORDERS, LAYOUTS, ROWS, WIDTH, layer, stored, write


@pytest.mark.parametrize("layers", [(0, 0), (2, 0), (1, 2)], ids=["bundles", "deltas", "both"])
@pytest.mark.parametrize("layout", LAYOUT_ORDERS)
def test_tasks_find_what_threads_find(tmp_path: Path, layout: str, layers: tuple[int, int]) -> None:
    before = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    after = before.copy()
    after[[0, 1, 777, 1300, 1301, 4999]] += 1
    readers = stored(tmp_path / "a", layout, before), stored(tmp_path / "b", layout, after)
    dtype = ml_dtypes.bfloat16 if layout == "cast" else np.float32
    rows = readers[0].shape[0]
    old, new = (
        LayeredState({"t": reader}, tuple(layer(10 * side + n, rows, dtype) for n in range(count)))
        for side, (reader, count) in enumerate(zip(readers, layers, strict=True))
    )
    if layers == (1, 2):  # rows that both sides were given alike do not differ
        new = LayeredState(new.stored, (*new.layers, old.layers[0]))
    variable = ServedVariable("t", readers[0].dtype, readers[0].shape, ChangeKind.TABLE)
    schema, hasher = Schema.of([variable]), BlockHasher(7)
    expected = diff(old, new, schema, Comparison(tmp_path, hasher=hasher))
    engine = Noted(times=2)
    runner = Runner(engine, task_bytes=16 << 10)
    found = diff(old, new, schema, Comparison(tmp_path, hasher=hasher, runner=runner))
    assert len(engine.done) > 2
    mine, theirs = found.changes["t"], expected.changes["t"]
    assert isinstance(mine, Rows)
    assert isinstance(theirs, Rows)
    np.testing.assert_array_equal(mine.ids, theirs.ids)
    assert mine.values.tobytes() == theirs.values.tobytes()
    if not layers[1]:
        np.testing.assert_array_equal(found.hashes["t"], expected.hashes["t"])
    again = diff(new, new, schema, Comparison(tmp_path, hasher=hasher, runner=runner))
    assert again.changes == {}


def test_a_file_that_shrinks_between_the_comparison_and_the_checksum(tmp_path: Path) -> None:
    reader = stored(tmp_path / "a", "whole", np.zeros((ROWS, WIDTH), np.float32))
    paths = [run.path for run in reader.runs]
    os.truncate(paths[0], 100)
    with pytest.raises(CheckpointChanged, match="became shorter"):
        SideChecksums(StoredSide.of(reader, 0, ROWS, 0), paths).read(0, ROWS)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("layout", ["whole", "slices", "mod"])
def test_damage_is_found_on_both_sides(tmp_path: Path, layout: str, side: int) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    readers = [stored(tmp_path / name, layout, table) for name in "ab"]
    extent = readers[side].tensor.extents[-1]
    with readers[side].catalog.path_of(extent).open("r+b") as file:
        file.seek(extent.offset + extent.size - 2)
        file.write(b"\x99")
    old, new = (LayeredState({"t": reader}) for reader in readers)
    schema = Schema.of([ServedVariable("t", DType.FLOAT, table.shape, ChangeKind.TABLE)])
    with pytest.raises(CorruptFile, match="damaged at 't'"):
        diff(old, new, schema, Comparison(tmp_path, runner=Runner(task_bytes=16 << 10)))


def test_a_comparison_is_gone_on_with(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    old, new = (
        LayeredState({"t": stored(tmp_path / name, "whole", table + n)}) for n, name in enumerate("ab")
    )
    schema = Schema.of([ServedVariable("t", DType.FLOAT, table.shape, ChangeKind.TABLE)])
    hasher = BlockHasher(7)

    def found(engine: Noted) -> int:
        runner = Runner(engine, task_bytes=16 << 10, kept=str(tmp_path / "jobs"))
        rows = diff(old, new, schema, Comparison(tmp_path, hasher=hasher, runner=runner)).changes["t"]
        return len(rows.ids) if isinstance(rows, Rows) else 0

    with pytest.raises(EngineFailed):
        found(Noted(stop_after=3))
    second = Noted()
    assert found(second) == ROWS
    assert len(second.done) == -(-ROWS // 682) - 3  # 682 rows of 24 bytes are four blocks of 4 KiB
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.parametrize("task_bytes", [ROWS * WIDTH * 4 * 1024, ROWS * WIDTH * 4 * 1023])
def test_a_small_table_of_a_file_is_compared_here(tmp_path: Path, task_bytes: int) -> None:
    before = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    after = before.copy()
    after[7] += 1
    old, new = (
        LayeredState({"t": stored(tmp_path / name, "whole", table)})
        for name, table in (("a", before), ("b", after))
    )
    variable = ServedVariable("t", DType.FLOAT, (ROWS, WIDTH), ChangeKind.TABLE)
    engine = Noted()
    how = Comparison(tmp_path, runner=Runner(engine, task_bytes=task_bytes))
    found = diff(old, new, Schema((variable,)), how).changes["t"]
    assert isinstance(found, Rows)
    assert found.ids.tolist() == [7]
    assert len(engine.done) == (task_bytes < ROWS * WIDTH * 4 * 1024)


def test_a_side_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    table = np.zeros((ROWS, WIDTH), np.float32)
    old, new = (LayeredState({"t": stored(tmp_path / name, "whole", table)}) for name in "ab")
    schema = Schema.of([ServedVariable("t", DType.FLOAT, table.shape, ChangeKind.TABLE)])

    class Replacing(Noted):
        def run(self, works):  # type: ignore[no-untyped-def]  # as `Noted.run`
            for outcome in super().run(works):
                new.stored["t"].catalog.shards[0].touch()
                yield outcome

    with pytest.raises(CheckpointChanged):
        diff(old, new, schema, Comparison(tmp_path, runner=Runner(Replacing(), task_bytes=16 << 10)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_compares_objects_of_a_store(tmp_path: Path, bucket: Bucket, layout: str) -> None:
    table = np.arange(44, dtype=np.float32).reshape(22, 2)
    changed = table.copy()
    changed[7] += 3
    (tmp_path / "train").mkdir()
    write(tmp_path / "train/old-1", "whole", table)
    write(tmp_path / "train/new-2", layout, changed)
    bucket.upload(tmp_path / "train", "train")
    sides = bucket.url("train/old-1"), bucket.url("train/new-2")
    ran = export_model("diff", *sides, "--engine", "local", "--engine", "task-size=1KiB", "--json")
    assert ran.code == 0, ran.err
    rows = [(v["name"], v["changed_rows"], v["largest"]) for v in ran.document["variables"]]
    assert sorted(rows) == [("emb", 1, 3.0), ("emb/Adagrad", 1, 3.0)]
