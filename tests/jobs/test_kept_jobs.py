"""Directories of jobs: used by several commands at once, removed by the last, swept if nobody comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter, read_catalog
from exporter.errors import VerificationError
from exporter.jobs import runner
from exporter.jobs.runner import Job, Runner
from exporter.jobs.task import Receipt
from exporter.pipeline.doctor import left_overs
from exporter.publish.staging import Staging
from exporter.storage.layout import JOBS_DIRECTORY, RECEIPTS_DIRECTORY
from exporter.terminal.progress import Progress
from exporter.verify.version_files import verify_bytes
from tests.support.commands import export_model
from tests.support.forks import FORKS
from tests.support.object_stores import Bucket
from tests.support.stored_tables import TABLES, train

WEEK = runner.ABANDONED_SECONDS
PLAN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


class LocalModel:
    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self.environment: dict[str, str] = {}
        self._path = path

    def names(self) -> list[str]:
        """Every file, by its path below the model."""
        return [path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if path.is_file()]


class StoredModel:
    def __init__(self, bucket: Bucket) -> None:
        self.place = bucket.url("models/tables")
        self.environment = dict(bucket.environment)
        self._bucket = bucket

    def names(self) -> list[str]:
        return [name.removeprefix("models/tables/") for name in self._bucket.names()]


@pytest.fixture(params=["here", "store"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LocalModel | StoredModel:
    if request.param == "here":
        return LocalModel(tmp_path / "models/tables")
    return StoredModel(request.getfixturevalue("bucket"))


def export(trained: Path, place: str, environment: dict[str, str], stop_after: int) -> None:
    """A process's main: it stops itself once it has so many receipts (not at all if 0)."""
    os.environ |= environment
    receipts = Job.receipts

    def stopping(self: Job, progress: Progress | None = None) -> Iterator[Receipt]:
        for number, receipt in enumerate(receipts(self, progress), 1):
            if number == stop_after:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield receipt

    runner.Job.receipts = stopping  # type: ignore[method-assign, assignment]
    places = ["--ckpt-dir", trained / "model.ckpt-7", "--model", f"{trained / 'model.py'}:serving"]
    how = ["--cast", "bfloat16", "--engine", "local", "--workers", "1", "--engine", "task-size=64KiB"]
    ran = export_model(*places, *how, "--out", place)
    print(ran.out, ran.err)
    raise SystemExit(ran.code)


def is_stopped(process: ForkServerProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def await_(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.landing
@pytest.mark.parametrize("first_has", [2, TABLES], ids=["some receipts", "all receipts"])
def test_of_two_commands_with_one_job_both_succeed_and_the_last_removes_it(
    trained: Path, model: LocalModel | StoredModel, first_has: int
) -> None:
    first = FORKS.Process(target=export, args=(trained, model.place, model.environment, first_has))
    first.start()
    await_(lambda: is_stopped(first))
    assert any(RECEIPTS_DIRECTORY in name for name in model.names())
    second = FORKS.Process(target=export, args=(trained, model.place, model.environment, 0))
    second.start()
    second.join(60)
    assert second.exitcode == 0
    assert first.pid is not None
    os.kill(first.pid, signal.SIGCONT)
    first.join(60)
    assert first.exitcode == 0
    names = model.names()
    assert sum(name.endswith("manifest.json") for name in names) == 1
    assert not [name for name in names if name.startswith(JOBS_DIRECTORY)]


def old_job(kept: Path, age: float) -> Path:
    """A directory that a killed command left so many seconds ago."""
    directory = kept / PLAN
    (directory / RECEIPTS_DIRECTORY).mkdir(parents=True)
    (directory / "variables.data-00000-of-00001").write_bytes(b"1")
    for path in (directory / RECEIPTS_DIRECTORY, directory):
        os.utime(path, (time.time() - age, time.time() - age))
    return directory


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("age", [WEEK / 2, 2 * WEEK])
def test_a_job_that_nobody_goes_on_with_is_swept(tmp_path: Path, age: float, is_used: bool) -> None:
    job = old_job(tmp_path / JOBS_DIRECTORY, age)
    other = tmp_path / JOBS_DIRECTORY / "of a user"
    other.mkdir()
    os.utime(other, (0, 0))
    if is_used:
        used = runner.use(str(job))
        for path in (job, job / RECEIPTS_DIRECTORY):
            os.utime(path, (0, 0))  # a task that takes a month
    is_told = any("left-over" in finding.text for finding in left_overs(tmp_path))
    with Staging(tmp_path):
        pass
    assert job.exists() == (is_used or age < WEEK)
    assert is_told != job.exists()
    assert other.exists()
    if is_used:
        used.leave()
        with Staging(tmp_path):
            pass
        assert not job.exists()


def test_who_begins_while_it_is_removed_has_a_directory_of_its_own(tmp_path: Path) -> None:
    first = runner.use(str(tmp_path / PLAN))
    (tmp_path / PLAN / "old").touch()
    second = runner.use(str(tmp_path / PLAN))
    first.remove()
    assert (tmp_path / PLAN / "old").exists()
    second.remove()
    assert not (tmp_path / PLAN).exists()
    third = runner.use(str(tmp_path / PLAN))
    assert not (tmp_path / PLAN / "old").exists()
    third.remove()


def test_the_directory_of_all_jobs_goes_with_the_last_one(tmp_path: Path) -> None:
    """But for one that a user named."""
    for kept in (tmp_path / JOBS_DIRECTORY, tmp_path / "a user's"):
        jobs = [runner.use(str(kept / plan)) for plan in (PLAN, PLAN[::-1])]
        for job in jobs:
            assert kept.exists()
            job.remove()
            runner.remove_abandoned(str(kept))
        assert kept.exists() == (kept.name != JOBS_DIRECTORY)


def test_jobs_in_a_store_are_swept_by_age(bucket: Bucket, trained: Path) -> None:
    """The store says when an object was written last; the clock is what the test moves."""
    model, plans = "models/tables", [PLAN, PLAN[::-1]]
    for plan in plans:
        bucket.put(f"{model}/{JOBS_DIRECTORY}/{plan}/{RECEIPTS_DIRECTORY}/a.json", b"{}")
        bucket.put(f"jobs/{plan}/a", b"1")
    bucket.put("jobs/of-a-user/a", b"1")
    runner.remove_abandoned(bucket.url("jobs"))
    assert len(bucket.names()) == 5
    in_ten_days = time.time() + 10 * 86400
    runner.remove_abandoned(bucket.url("jobs"), in_ten_days)
    assert "jobs/of-a-user/a" in bucket.names()
    assert len(bucket.names()) == 3


def test_an_export_to_a_store_sweeps_its_jobs(
    bucket: Bucket, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(f"models/tables/{JOBS_DIRECTORY}/{PLAN}/a", b"1")
    monkeypatch.setattr(runner, "ABANDONED_SECONDS", -5.0)
    places = ["--ckpt-dir", trained / "model.ckpt-7", "--model", f"{trained / 'model.py'}:serving"]
    ran = export_model(*places, "--out", bucket.url("models/tables"))
    assert ran.code == 0, ran.err
    assert not [name for name in bucket.names() if JOBS_DIRECTORY in name]


def test_a_verification_believes_no_receipt_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its own, once checksums were wrong: the file may be repaired, with the times that it had."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        with BundleWriter(tmp_path / name) as writer:
            writer.add("t", np.random.default_rng(ord(name)).normal(size=(100, 4)))
    kept = Runner(kept=str(tmp_path / "jobs"))
    for name in "aba":
        verify_bytes(read_catalog(tmp_path / name), runner=kept)
    (shard,) = read_catalog(tmp_path / "a").shards
    content, times = shard.read_bytes(), shard.stat()
    for damage in (b"\x99", b""):
        shard.write_bytes(damage + content[len(damage) :])
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        if damage:
            with pytest.raises(VerificationError, match="'t' has checksum"):
                verify_bytes(read_catalog(tmp_path / "a"), runner=kept)
        else:
            verify_bytes(read_catalog(tmp_path / "a"), runner=kept)
    assert not list((tmp_path / "jobs").iterdir())
