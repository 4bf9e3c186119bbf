"""What a comparison reads of a model in a store: the ranges that it needs, and no byte twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from exporter.catalog import Catalog, Extent, SliceRef, SliceSpec, TensorRef
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.delta import row_reader
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import ChangeKind, Rows, Schema, ServedVariable
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.errors import CheckpointChanged
from exporter.jobs.runner import Runner
from exporter.publish.delta_log import read_log
from exporter.storage import mirror, requests
from exporter.transfer.opened import opened
from exporter.transfer.push import plan_push, push
from exporter.verify.log import verify_model
from exporter.wire.crc32c import masked_crc
from exporter.wire.dtypes import DType
from tests.support import logs
from tests.support.commands import Ran, export_model
from tests.support.engine_runs import Noted
from tests.support.http_proxy import Traffic, counting
from tests.support.logs import Serving, Trainer, publish_base
from tests.support.object_stores import Bucket
from tests.support.setting import Setting

ROWS, WIDTH, PARTS = 16_384, 32, 8
BLOCK = 64 << 10
TABLE_BYTES = ROWS * WIDTH * 4
ENGINE = ("--engine", "local", "--engine", "task-size=256KiB")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched at least, so that small tables show what is read of large ones."""
    monkeypatch.setattr(requests, "GAP_BYTES", BLOCK)
    monkeypatch.setattr(row_reader, "GAP_BYTES", BLOCK)


@pytest.fixture
def traffic(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    with counting(bucket.environment["AWS_ENDPOINT_URL"]) as (address, found):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield found


@pytest.fixture
def trainer(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Its base at 10 is in the store."""
    monkeypatch.setitem(logs.TABLES, "users", (ROWS, WIDTH))
    setting = Setting(tmp_path)
    found = Trainer(setting.train)
    found.save()
    publish_base(found, Serving(), setting.model)
    push(plan_push(setting.model, bucket.url("m")))
    return found


def go_on(trainer: Trainer, bucket: Bucket, ids: list[int], *options: str) -> Ran:
    """Change some rows, save all, of which no increment tells what changed, and export that."""
    trainer.step += 10
    trainer.values["net/users"] = values = trainer.values["net/users"].copy()
    values[ids] += 1
    trainer.run, trainer.parent = f"{trainer.step:032x}", None
    trainer.save()
    ran = export_model(
        "--ckpt-dir", trainer.directory, "--out", bucket.url("m"), "--incr", "--json", *options
    )
    assert (ran.code, ran.document["status"]) == (0, "published"), ran.err
    return ran


def of_base(traffic: Traffic) -> int:
    """Bytes of the base's values that came since this was asked last."""
    _, size = traffic.of(lambda path: "/10/variables/variables.data" in path)
    traffic.requests.clear()
    return size


def test_a_delta_reads_the_blocks_of_the_base_whose_hashes_differ(
    trainer: Trainer, bucket: Bucket, traffic: Traffic
) -> None:
    go_on(trainer, bucket, [5])
    assert of_base(traffic) > TABLE_BYTES  # hashes were not known yet
    go_on(trainer, bucket, [7, 16_000])
    assert 0 < of_base(traffic) <= 3 * BLOCK
    go_on(trainer, bucket, [7, 16_000])
    assert 0 < of_base(traffic) <= 3 * BLOCK
    ran = export_model("verify", bucket.url("m"), "--bytes")
    assert ran.code == 0, ran.err
    ran = export_model("diff", bucket.url("m"), trainer.directory, "--exit-code")
    assert ran.code == 0, ran.out + ran.err


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def test_deltas_that_are_verified_do_not_stay(
    tmp_path: Path, trainer: Trainer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        go_on(trainer, bucket, list(range(ROWS)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = bytes_on_disk(tmp_path)
    with opened(Path(bucket.url("m")), read_only=True) as model:
        assert verify_model(model.path).problems == ()
        assert bytes_on_disk(tmp_path) - before < TABLE_BYTES // 2
        assert read_log(model.path).state().rows("s/users", 0, 5).any()


def test_positions_of_a_log_are_compared_where_their_deltas_differ(
    trainer: Trainer, bucket: Bucket, traffic: Traffic
) -> None:
    go_on(trainer, bucket, [5, 6])
    go_on(trainer, bucket, [6, 16_000])
    of_base(traffic)
    cases = [(10, 30, 3, 2.0), (20, 30, 2, 1.0), (30, 10, 3, 2.0)]
    for (a, b, rows, largest), options in zip(cases, [(), ENGINE, ENGINE], strict=True):
        ran = export_model("diff", *(bucket.url(f"m@{at}") for at in (a, b)), "--json", *options)
        assert ran.code == 0, ran.err
        found = [(v["name"], v["changed_rows"], round(v["largest"], 3)) for v in ran.document["variables"]]
        assert found == ([("s/users", rows, largest)] if rows else [])
        assert of_base(traffic) <= 2 * 2 * BLOCK


def stored(prefix: Path, layout: str, table: np.ndarray) -> None:
    prefix.parent.mkdir(exist_ok=True)
    with BundleWriter(prefix) as writer:
        if layout == "whole":
            writer.add("t", table)
            return
        for start in range(0, ROWS, ROWS // PARTS):
            rows = table[start : start + ROWS // PARTS]
            writer.add("t", rows, SliceSpec(table.shape, (start, 0), rows.shape))


@pytest.mark.parametrize("layout", ["whole", "slices"])
def test_tasks_read_each_byte_once(tmp_path: Path, bucket: Bucket, traffic: Traffic, layout: str) -> None:
    """Checksums of what a table is made of come from the tasks, however it is stored."""
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for number in range(2):
        stored(tmp_path / f"train/model.ckpt-{number}", layout, table)
        table[9, 1] += 1
    bucket.upload(tmp_path / "train", "train")
    sides = [bucket.url(f"train/model.ckpt-{number}") for number in range(2)]
    ran = export_model("diff", *sides, "--json", *ENGINE)
    assert ran.code == 0, ran.err
    assert [v["changed_rows"] for v in ran.document["variables"]] == [1]
    _, size = traffic.of(lambda path: "data-" in path)
    assert 2 * TABLE_BYTES <= size < 2 * TABLE_BYTES + 4 * BLOCK  # of the row that differs, once more


def test_a_task_opens_the_shards_of_its_rows_alone(tmp_path: Path) -> None:
    """Each partition in a shard of its own, as parameter servers leave them, and served cast."""
    table = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    sides = []
    for number, name in enumerate("ab"):
        table[70] += number
        catalog = sharded(tmp_path / name, table)
        box = SliceSpec.whole(table.shape)
        sides.append(RowReader("t", catalog, catalog.tensors["t"], box, DType.BFLOAT16, SliceOrder()))
    old, new = (LayeredState({"t": side}) for side in sides)
    schema = Schema.of([ServedVariable("t", DType.BFLOAT16, table.shape, ChangeKind.TABLE)])
    engine = Noted()
    found = diff(old, new, schema, Comparison(tmp_path, runner=Runner(engine, task_bytes=64 << 10)))
    assert isinstance(found.changes["t"], Rows)
    assert found.changes["t"].ids.tolist() == [70]
    assert len(engine.done) == 16
    for work in engine.done:
        task = msgspec.json.decode(work)["task"]
        assert len(task["inputs"]) == 2
        assert len(task["old"]["tensor"]["slices"]) == 1
        assert task["bytes_"] == 2 * TABLE_BYTES // 16


def sharded(directory: Path, table: np.ndarray) -> Catalog:
    directory.mkdir()
    slices, paths = [], []
    for number, rows in enumerate(np.split(table, PARTS)):
        paths.append(directory / f"shard-{number}")
        paths[-1].write_bytes(rows.tobytes())
        spec = SliceSpec(table.shape, (number * len(rows), 0), rows.shape)
        slices.append(SliceRef(spec, Extent(number, 0, rows.nbytes, masked_crc(rows.tobytes()))))
    tensors = {"t": TensorRef("t", DType.FLOAT, table.shape, None, tuple(slices))}
    return Catalog("", directory / "t", tensors, tuple(paths), (table.nbytes // PARTS,) * PARTS)


def test_rows_of_an_object_that_is_replaced(tmp_path: Path, bucket: Bucket) -> None:
    """What is read after that is an error, and no zeros."""
    table = np.ones((ROWS, WIDTH), np.float32)
    stored(tmp_path / "train/model.ckpt-1", "whole", table)
    bucket.upload(tmp_path / "train", "train")
    catalog = open_checkpoint(mirror.local(Path(bucket.url("train/model.ckpt-1"))))
    ref = catalog.tensors["t"]
    reader = RowReader("t", catalog, ref, SliceSpec.whole(table.shape), DType.FLOAT)
    assert reader.rows_at(np.array([3])).all()
    stored(tmp_path / "train/model.ckpt-1", "whole", table + 1)
    bucket.upload(tmp_path / "train", "train")
    with pytest.raises(CheckpointChanged):
        reader.rows_at(np.array([ROWS - 1]))
    mirror.refresh(catalog.shards[0])
    for rows in (lambda: reader.rows_at(np.array([ROWS // 2])), lambda: reader.rows(0, 5)):
        with pytest.raises(CheckpointChanged):
            rows()
