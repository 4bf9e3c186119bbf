"""Mergers as tasks: the same values however they are divided, the same bytes on every engine, and resumed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path

import numpy as np
import pytest

from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.delta_files import read_delta
from exporter.delta.format import ChangeKind, Rows, ServedVariable
from exporter.delta.newest_rows import Merge, NewestRows
from exporter.delta.packing import SlicedRows
from exporter.errors import CorruptFile, VerificationError
from exporter.jobs import runner
from exporter.jobs.execute import decode, encode, execute
from exporter.jobs.runner import LocalEngine
from exporter.jobs.task import Input, Range
from exporter.options import EngineName, Jobs
from exporter.pipeline.log_maintenance import merge
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import read_log
from exporter.storage.layout import JOBS_DIRECTORY, VARIABLES_PREFIX
from exporter.wire.dtypes import DType
from tests.support.commands import export_model
from tests.support.engine_job import Counting
from tests.support.logs import Serving, Trainer, assert_same_bits, damage_tensor, publish_base, values_at
from tests.support.object_stores import Bucket
from tests.support.remote_models import incr, published_log, went_on
from tests.support.setting import followed

TINY = Jobs(task_bytes=1)
"""Every table is far larger than what sixteen tasks read: all are divided."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_log(tmp_path_factory.mktemp("origin"), 20, 30, 40, 50, 60)


@pytest.fixture
def model(origin: Path, tmp_path: Path) -> Path:
    return shutil.copytree(origin, tmp_path / "model")


def digest(directory: Path) -> str:
    """Of everything but the manifest, which tells the time."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json")
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def test_a_divided_merger_holds_what_a_small_one_holds(model: Path, tmp_path: Path) -> None:
    before = values_at(read_log(model))
    other = shutil.copytree(model, tmp_path / "other")
    plan = merge(model, jobs=TINY, dry_run=True)
    divided, whole = merge(model, jobs=TINY), merge(other)
    assert plan is not None
    assert divided is not None
    assert whole is not None
    assert divided.tasks == plan.tasks > 10
    assert whole.tasks == 1
    assert sorted(path.name for path in whole.path.glob("delta.*")) == [
        "delta.data-00000-of-00001",
        "delta.index",
    ]
    found, expected = (
        read_delta(merged.path / "delta", read_log(model).schema) for merged in (divided, whole)
    )
    assert found.header == expected.header
    assert found.changes.keys() == expected.changes.keys()
    for name, change in expected.changes.items():
        ours = found.changes[name]
        if not isinstance(change, Rows):
            np.testing.assert_array_equal(np.asarray(ours), change)
            continue
        assert isinstance(ours, Rows)
        assert isinstance(ours.values, SlicedRows)
        np.testing.assert_array_equal(ours.ids, change.ids)
        assert np.asarray(ours.values).tobytes() == np.asarray(change.values).tobytes()
    assert_same_bits(values_at(read_log(model)), before)
    assert export_model("verify", model, "--bytes").code == 0


def test_what_was_divided_is_merged_and_taken_back_again(model: Path) -> None:
    now, then = values_at(read_log(model)), values_at(read_log(model), 40)
    assert merge(model, 10, 40, TINY) is not None
    assert merge(model, 40, 60, TINY) is not None
    for delta in read_log(model).deltas:
        if (delta.start, delta.end) not in ((10, 40), (40, 60)):
            shutil.rmtree(delta.path)
    assert_same_bits(values_at(read_log(model)), now)
    ran = export_model("rollback", model, "--to", 40, "-q")
    assert ran.code == 0, ran.err
    assert_same_bits(values_at(read_log(model)), then)
    assert export_model("resume", model, "-q").code == 0
    assert merge(model, 10, 60) is not None
    assert merge(model, jobs=TINY) is not None
    assert_same_bits(values_at(read_log(model)), now)
    assert rebase(model, jobs=TINY) is not None
    assert_same_bits(values_at(read_log(model)), now)


@pytest.mark.parametrize("jobs", [Jobs(), TINY])
def test_a_base_by_tasks(model: Path, jobs: Jobs) -> None:
    before = values_at(read_log(model))
    done = rebase(model, jobs=jobs)
    assert done is not None
    assert (done.tasks > 10) is (jobs is TINY)
    log = read_log(model)
    assert not log.chain(log.base.at.position)
    assert log.newest is log.base, "nobody needs the deltas that led there"
    assert_same_bits(values_at(log), before)
    catalog = read_catalog(done.published.path / VARIABLES_PREFIX)
    for ref in catalog.tensors.values():
        read_array(catalog, ref)
    assert export_model("verify", model, "--bytes").code == 0


def test_a_new_base_names_the_checkpoint_that_its_values_are_of(tmp_path: Path) -> None:
    trainer, model = followed(tmp_path), tmp_path / "model"
    trainer.train()
    saved = trainer.save()
    assert incr(trainer, str(model)).code == 0
    assert rebase(model) is not None
    source = read_log(model).base.manifest.source
    assert (source.checkpoint, source.digest) == (saved.name, None)


def test_one_delta_is_no_merger(tmp_path: Path) -> None:
    trainer, model = followed(tmp_path), tmp_path / "model"
    assert (merge(model, jobs=TINY, dry_run=True), merge(model)) == (None, None)
    went_on(trainer, 20)
    assert incr(trainer, str(model)).code == 0
    assert (merge(model, jobs=TINY, dry_run=True), merge(model)) == (None, None)


class ByColumns(Trainer):
    """It stores each table as two ranges of columns."""

    def write(self, prefix: Path) -> None:
        with BundleWriter(prefix) as writer:
            writer.add("global_step", np.array(self.step, np.int64))
            for name, value in self.values.items():
                if not self.is_table(name):
                    writer.add(name, value)
                    continue
                for start, count in ((0, 1), (1, value.shape[1] - 1)):
                    box = SliceSpec(value.shape, (0, start), (len(value), count))
                    writer.add(name, value[:, start : start + count], box)


@pytest.mark.parametrize("jobs", [Jobs(), TINY])
def test_a_base_of_tables_that_lie_in_columns(tmp_path: Path, jobs: Jobs) -> None:
    """No task joins them: the command itself writes those tables."""
    trainer, model = ByColumns(tmp_path / "train"), tmp_path / "model"
    trainer.save()
    publish_base(trainer, Serving(), model)
    for step in (20, 30):
        went_on(trainer, step)
        assert incr(trainer, str(model)).code == 0
    before = values_at(read_log(model))
    assert rebase(model, jobs=jobs) is not None
    log = read_log(model)
    assert not log.chain(log.base.at.position)
    assert log.newest is log.base, "nobody needs the deltas that led there"
    assert_same_bits(values_at(log), before)
    assert export_model("verify", model, "--bytes").code == 0


class Stopping(Counting):
    """Ends after some outcomes, as a command that is interrupted; `works` are those that were asked for."""

    def __init__(self, after: int) -> None:
        super().__init__(LocalEngine(1))
        self.after = after

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        for number, outcome in enumerate(super().run(works), 1):
            yield outcome
            if number == self.after:
                raise KeyboardInterrupt


@pytest.mark.parametrize("rebased", [False, True])
def test_an_interrupted_merger_goes_on(
    model: Path, tmp_path: Path, rebased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(EngineName.LOCAL, task_bytes=1)
    straight = shutil.copytree(model, tmp_path / "straight")
    done = rebase(straight, jobs=jobs) if rebased else merge(straight, jobs=jobs)
    assert done is not None
    engines = [Stopping(5), Stopping(0)]
    monkeypatch.setattr("exporter.jobs.runner.choose_engine", lambda *_: engines[0])
    with pytest.raises(KeyboardInterrupt):
        rebase(model, jobs=jobs) if rebased else merge(model, jobs=jobs)
    assert (model / JOBS_DIRECTORY).exists()
    engines.pop(0)
    again = rebase(model, jobs=jobs) if rebased else merge(model, jobs=jobs)
    assert again is not None
    assert 0 < engines[0].works <= again.tasks - 5
    assert not (model / JOBS_DIRECTORY).exists()
    places = [each.published.path for each in (done, again)]
    assert len(set(map(digest, places))) == 1


def test_damage_is_named_and_nothing_is_published(model: Path, tmp_path: Path) -> None:
    log = read_log(model)
    before = sorted(log.path.iterdir())
    damage_tensor(log.deltas[2].path / "delta", f"{log.schema.variables[1].keys[-1]}")
    for jobs in (Jobs(), TINY):
        with pytest.raises(CorruptFile, match="damaged at"):
            merge(model, jobs=jobs)
        with pytest.raises(CorruptFile, match="damaged at"):
            rebase(model, jobs=jobs)
    assert sorted(log.path.iterdir()) == before


@pytest.mark.parametrize("ids", [(1, 1), (4, 1), (-1, 2), (2, 10)])
def test_row_numbers_that_no_checksum_calls_wrong(tmp_path: Path, ids: tuple[int, int]) -> None:
    """A writer that got them wrong has the right checksum of wrong numbers."""
    rows = np.zeros((2, 2), np.float32)
    (tmp_path / "layer").write_bytes(np.array(ids, np.int64).tobytes() + rows.tobytes())
    table = ServedVariable("t", DType.FLOAT, (10, 2), ChangeKind.TABLE)
    section = NewestRows(table, 0, 10, ((Range(0, 0, 16), Range(0, 16, 16)),))
    task = Merge(name="out", inputs=(Input.of(tmp_path / "layer"),), sections=(section,))
    with pytest.raises(CorruptFile, match="not strictly increasing in 0-9"):
        decode(execute(encode(task, str(tmp_path), keep=False))).settle()


def test_a_damaged_base_is_not_published_again(model: Path) -> None:
    damage_tensor(read_log(model).base.path / VARIABLES_PREFIX, "s/users")
    for jobs in (Jobs(), TINY):
        with pytest.raises(VerificationError, match="'s/users'"):
            rebase(model, jobs=jobs)


@pytest.mark.landing
def test_in_a_store_the_tasks_write(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, url = Trainer(tmp_path / "train"), bucket.url("models/m")
    trainer.save()
    publish_base(trainer, Serving(), tmp_path / "first")
    assert export_model("push", tmp_path / "first", url).code == 0
    for step in (20, 30, 40):
        went_on(trainer, step)
        assert incr(trainer, url).code == 0
    assert export_model("pull", url, tmp_path / "before").code == 0
    before = values_at(read_log(tmp_path / "before"))
    ran = export_model("merge", url, "--engine", "task-size=1B", "--engine", "local", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["tasks"] > 10
    based = export_model("merge", url, "--rebase", "--engine", "task-size=1B", "--json")
    assert based.code == 0, based.err
    assert based.document["tasks"] > 10
    assert not [key for key in bucket.names() if JOBS_DIRECTORY in key]
    assert export_model("pull", url, tmp_path / "after").code == 0
    assert_same_bits(values_at(read_log(tmp_path / "after")), before)
    assert (tmp_path / "after" / "40").is_dir()


def test_the_digest_of_a_plan_is_that_of_its_deltas(model: Path, tmp_path: Path) -> None:
    """What another merger left does not count for this one."""
    kept = Jobs(EngineName.LOCAL, task_bytes=1, directory=str(tmp_path / "jobs"))
    digests = []
    real = runner.plan_digest

    def noted(tasks: object) -> str:
        digests.append(real(tasks))  # type: ignore[arg-type]
        return digests[-1]

    runner.plan_digest = noted  # type: ignore[assignment]
    try:
        assert merge(model, 10, 30, kept) is not None
        assert merge(model, 30, 50, kept) is not None
    finally:
        runner.plan_digest = real
    assert len(set(digests)) == 2
