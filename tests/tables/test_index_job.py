"""The index of tables as tasks: the same however the work is divided, and gone on with where it broke off."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.catalog import Catalog
from exporter.checkpoint.admission import EVERYONE, Admission
from exporter.checkpoint.embedding_variables import embedding_variables
from exporter.checkpoint.tensor_bundle import check_values, read_array, read_catalog
from exporter.errors import CorruptFile, TableFull, UsageError
from exporter.jobs.runner import LOCAL, Job, LocalEngine, Runner, plan_digest
from exporter.jobs.task import ZEROS, Input
from exporter.storage import mirror
from exporter.tables.geometry import EMPTY_KEY, TablePlan, keys_of
from exporter.tables.lay_out import TableLayout, join_pieces, lay_out
from exporter.tables.parts import INDEX_ROWS, INDEX_SEEDS, KEYS, PARTS, VALUES
from exporter.tables.place_keys import Partition, PlaceKeys
from tests.support.budget import times
from tests.support.deeprec import Ev, write_full
from tests.support.dynamic_values import built_index
from tests.support.logs import damage_tensor
from tests.support.object_stores import Bucket

Array = np.ndarray[Any, Any]
DIM = 3
DEFAULTS = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)


def tables() -> dict[str, Ev]:
    """A table of several ranges, small ones, an empty one, and one whose keys are stored as int32."""
    return {
        "large": Ev.random(9000, DIM, seed=1, negative=True),
        **{f"small{n}": Ev.random(40 * n, DIM, seed=n) for n in range(4)},
        "narrow": Ev.random(700, DIM, seed=5, keys=np.int32),
    }


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableLayout:
    monkeypatch.setattr("exporter.tables.place_keys.RANGE_KEYS", 500)
    return laid_out(write_full(tmp_path / "ckpt" / "model.ckpt-7", tables(), parts={"large": 3}, step=7))


def laid_out(prefix: Path) -> TableLayout:
    catalog = read_catalog(prefix)
    plans = [TablePlan.of(name, ev, DEFAULTS, 0.25) for name, ev in embedding_variables(catalog).items()]
    return lay_out(catalog, plans)


def values_of(catalog: Catalog, table: TablePlan) -> dict[str, Array]:
    """The variables of a table, every checksum compared."""
    found = {part: catalog.tensors[f"{table.name}/{part}"] for part in PARTS}
    for ref in found.values():
        for part in ref.slices or (None,):
            check_values(catalog, ref, part)
    return {part: read_array(catalog, ref) for part, ref in found.items()}


def assert_right(layout: TableLayout, catalog: Catalog) -> None:
    for table in layout.tables:
        geometry, found = table.geometry, values_of(catalog, table)
        parts = table.variable.parts
        keys, values = (
            np.concatenate([read_array(layout.source, getattr(part, what)) for part in parts])
            for what in ("keys", "values")
        )
        keys = keys.astype(np.int64)
        seeds, rows = built_index(geometry, keys)
        assert np.array_equal(found[INDEX_SEEDS], seeds)
        assert np.array_equal(found[INDEX_ROWS], rows)
        room = np.zeros(geometry.capacity - len(keys), np.int64)
        room[geometry.cursor_row - len(keys)], room[-1] = len(keys), EMPTY_KEY
        assert np.array_equal(found[KEYS], np.append(keys, room))
        absent = np.zeros((geometry.first_default - len(keys), DIM), np.float32)
        assert np.array_equal(found[VALUES], np.concatenate([values, absent, DEFAULTS]))


def test_a_table_has_no_more_rows_than_its_index_can_name(layout: TableLayout) -> None:
    variable = layout.tables[0].variable

    def planned(rows: int) -> TablePlan:
        others = variable.rows + 1000 + 1 + len(DEFAULTS)  # the least room, the cursor, the default rows
        return TablePlan.of("t", variable, DEFAULTS, 0.0, awaited=rows - others)

    assert planned(2**31 - 1).geometry.capacity == 2**31 - 1
    with pytest.raises(UsageError, match="2147483647 are possible"):
        planned(2**31)


def break_off(job: Job) -> None:
    with suppress(RuntimeError), job:
        raise RuntimeError("killed")


@pytest.mark.parametrize("task_bytes", [4000, 30_000, 1 << 26])
def test_however_the_work_is_divided(
    tmp_path: Path, layout: TableLayout, monkeypatch: pytest.MonkeyPatch, task_bytes: int
) -> None:
    monkeypatch.setattr("exporter.tables.lay_out._LEAST_RANGES", 2)
    done: list[Path] = []
    for way, workers in (("one", 1), ("two", 2)):
        scratch = tmp_path / way
        scratch.mkdir()
        catalog, job = layout.write(scratch, EVERYONE, Runner(LocalEngine(workers), task_bytes))
        assert_right(layout, catalog)
        assert not job.is_kept
        done += scratch.iterdir()
    assert len({path.read_bytes() for path in done}) == 1 and len({path.name for path in done}) == 1
    assert len(done) == 2, "what tasks wrote is removed"
    tasks, _ = layout.index_job(EVERYONE, task_bytes).size_of_work
    assert tasks == {4000: 39, 30_000: 8, 1 << 26: 6}[task_bytes]


def test_a_job_in_a_store(
    tmp_path: Path, layout: TableLayout, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it but the defaults passes through the command, the room for new rows never."""
    monkeypatch.setattr("exporter.tables.lay_out._LEAST_RANGES", 2)
    runner = Runner(task_bytes=30_000, kept=bucket.url("jobs"))
    (tmp_path / "one").mkdir()
    catalog, job = layout.write(tmp_path / "one", EVERYONE, runner)
    assert_right(layout, catalog)
    assert job.directory.place.startswith(bucket.url("jobs/"))
    break_off(job)
    assert sum(path.stat().st_blocks for path in (tmp_path / "one").iterdir()) == 0
    before = bucket.keys()
    assert sum("/receipts/" in key for key in before) == 8
    monkeypatch.setattr(Partition, "run", None)
    monkeypatch.setattr(PlaceKeys, "run", None)
    (tmp_path / "two").mkdir()
    again, same = layout.write(tmp_path / "two", EVERYONE, runner)
    assert_right(layout, again)
    assert bucket.keys() == before | {key: bucket.keys()[key] for key in before if key.endswith("/driver")}
    with same:
        pass
    assert not bucket.names()


def test_a_checkpoint_in_a_store_makes_the_same_plan_in_every_process(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is wrong with it is told by its URL, though each has a mirror of its own."""
    write_full(tmp_path / "model.ckpt-7", {"t": Ev.random(50, DIM)}, step=7)
    damage_tensor(tmp_path / "model.ckpt-7", "t/part_0-partition_offset")
    bucket.upload(tmp_path)
    plans = []
    for _ in range(2):
        monkeypatch.setattr(mirror, "_CHECKPOINTS", {})
        layout = laid_out(mirror.local(Path(bucket.url())) / "model.ckpt-7")
        plans.append(plan_digest(layout.index_job(EVERYONE, 1000).plan))
    assert plans[0] == plans[1]
    with pytest.raises(CorruptFile) as caught:
        layout.write(tmp_path, EVERYONE)
    assert caught.value.message.startswith(f"{bucket.url('model.ckpt-7')}.data-00000-of-00001 is damaged")


@pytest.mark.parametrize("operation", [Partition, PlaceKeys])
def test_a_job_that_breaks_off_is_gone_on_with(
    tmp_path: Path, layout: TableLayout, monkeypatch: pytest.MonkeyPatch, operation: Any
) -> None:
    runner = Runner(LocalEngine(1), 30_000, str(tmp_path / "jobs"))
    done: list[str] = []
    lock = threading.Lock()
    for each in (Partition, PlaceKeys):

        def run(self: Any, directory: Any, real: Any = each.run) -> Any:
            with lock:
                done.append(self.name)
            if breaks and isinstance(self, operation) and self.name.endswith("2"):
                raise RuntimeError("killed")
            return real(self, directory)

        monkeypatch.setattr(each, "run", run)
    monkeypatch.setattr("exporter.tables.lay_out._LEAST_RANGES", 2)
    breaks = True
    (tmp_path / "one").mkdir()
    with pytest.raises(RuntimeError):
        layout.write(tmp_path / "one", EVERYONE, runner)
    breaks, before = False, len(done)
    catalog, job = layout.write(tmp_path / "one", EVERYONE, runner)
    assert_right(layout, catalog)
    assert len(done) == 8 + 1, "one was begun twice"
    assert before < 8
    shard = catalog.shards[-1]
    assert shard.parent == Path(job.directory.place)
    break_off(job)
    changed = shard.stat().st_mtime_ns
    again, job = layout.write(tmp_path / "one", EVERYONE, runner)
    assert again.shards[-1] == shard and shard.stat().st_mtime_ns == changed, (
        "plans that read it are the same"
    )


@pytest.mark.parametrize("where", ["here", "store"])
def test_two_commands_do_one_job_at_once(
    tmp_path: Path, layout: TableLayout, monkeypatch: pytest.MonkeyPatch, bucket: Bucket, where: str
) -> None:
    """Each may find a task done by the other, or write its output over the other's while that is read."""
    monkeypatch.setattr("exporter.tables.lay_out._LEAST_RANGES", 2)
    kept = str(tmp_path / "jobs") if where == "here" else bucket.url("jobs")
    for turn in range(times(1)):
        start = threading.Barrier(2)

        def write(number: int, turn: int = turn, start: threading.Barrier = start) -> tuple[Catalog, Job]:
            scratch = tmp_path / f"{turn}-{number}"
            scratch.mkdir()
            start.wait()
            return layout.write(scratch, EVERYONE, Runner(LocalEngine(2), 30_000, kept))

        with ThreadPoolExecutor(2) as pool:
            written = list(pool.map(write, (1, 2)))
        for catalog, _ in written:
            assert_right(layout, catalog)
        inputs = [
            [Input.of(path) for path in catalog.shards[1:] if path.name != ZEROS] for catalog, _ in written
        ]
        assert inputs[0][-1] == inputs[1][-1], "what both made has one tag"
        for _, job in written:
            job.__exit__(None, None, None)


def test_keys_that_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.tables.place_keys.RANGE_KEYS", 500)
    ev = Ev.random(4000, DIM)
    freqs, versions = np.arange(4000) % 5, np.arange(4000) % 30
    counted = Ev(ev.keys, ev.values, versions, freqs)
    prefix = write_full(tmp_path / "model.ckpt-40", {"t": counted}, parts=2, step=40)
    layout = laid_out(prefix)
    (table,) = layout.tables
    stored = [
        np.concatenate([read_array(layout.source, getattr(part, what)) for part in table.variable.parts])
        for what in ("keys", "freqs", "versions")
    ]
    served = (stored[1] >= 2) & (stored[2] >= 40 - 25)
    rows = np.where(served, np.arange(4000), ~np.arange(4000))
    seeds, index = built_index(table.geometry, stored[0], rows)
    for task_bytes in (3000, 1 << 26):
        scratch = tmp_path / str(task_bytes)
        scratch.mkdir()
        catalog, _ = layout.write(scratch, Admission(2, 25), Runner(task_bytes=task_bytes))
        found = values_of(catalog, table)
        assert np.array_equal(found[INDEX_SEEDS], seeds) and np.array_equal(found[INDEX_ROWS], index)


@pytest.mark.parametrize("task_bytes", [800, 1 << 26])
@pytest.mark.parametrize(
    ("places", "where"),
    [((5, 700), "twice in 't/part_0-keys'"), ((5, 1500), "in 't/part_0-keys' and in 't/part_1-keys'")],
)
def test_a_key_that_is_there_twice_is_named_with_its_places(
    tmp_path: Path, task_bytes: int, places: tuple[int, int], where: str
) -> None:
    keys = np.arange(2000, dtype=np.int64) * 1000
    keys[1000:] += 1  # the second part's
    keys[places[1]] = keys[places[0]]
    bundle = {f"t/part_{n}": Ev(keys[n * 1000 :][:1000], np.zeros((1000, 1), np.float32)) for n in range(2)}
    prefix = write_full(tmp_path / "model.ckpt-1", bundle, parts=0, old=True)
    with pytest.raises(CorruptFile, match=f"key 5000 is {where}"):
        laid_out(prefix).write(tmp_path, EVERYONE, Runner(task_bytes=task_bytes))


def test_keys_that_crowd(tmp_path: Path) -> None:
    keys = keys_of(np.arange(400, dtype=np.uint64))
    prefix = write_full(
        tmp_path / "model.ckpt-1", {"t": Ev(keys, np.zeros((400, 1), np.float32))}, old=True, parts=0
    )
    with pytest.raises(TableFull, match="400 of a table's keys") as refused:
        laid_out(prefix).write(tmp_path, EVERYONE, LOCAL)
    assert "made to collide" in refused.value.hint


@pytest.mark.parametrize("task_bytes", [800, 1 << 26])
@pytest.mark.parametrize("what", ["keys", "freqs"])
def test_a_flipped_bit_is_found_whatever_part_of_a_tensor_a_task_reads(
    tmp_path: Path, task_bytes: int, what: str
) -> None:
    ev = Ev.random(1000, 1)
    counted = Ev(ev.keys, ev.values, None, np.ones(1000, np.int64))
    prefix = write_full(tmp_path / "model.ckpt-1", {"t": counted}, old=True)
    damage_tensor(prefix, f"t/part_0-{what}")
    with pytest.raises(CorruptFile, match=f"damaged at 't/part_0-{what}': its checksum is"):
        laid_out(prefix).write(tmp_path, Admission(1), Runner(task_bytes=task_bytes))


def test_damage_of_what_a_task_wrote_gets_no_checksum_of_its_own(layout: TableLayout, tmp_path: Path) -> None:
    index = layout.index_job(EVERYONE, 30_000)
    with LOCAL.job(index.plan, str(tmp_path / "job")) as job:
        pieces = index.run(job)
        damaged = job.directory.as_local() / pieces[0].object
        content = bytearray(damaged.read_bytes())
        content[pieces[0].offset] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(CorruptFile, match="not what a task of the job wrote"):
            join_pieces(layout.catalog, layout.tables, pieces, job.directory, job.directory)
