"""Real processes publish, are killed at every step, race, run out of space and meet closed doors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from exporter.errors import DiskFull, TargetNotWritable
from exporter.publish.commit import Staging, publish_version
from exporter.publish.versions import lease
from tests.support import small_disks
from tests.support.budget import thorough
from tests.support.forks import FORKS
from tests.support.kills import count_steps, ended, killed_at, points, run
from tests.support.publishing import draft, fill, hidden, names, publish, versions, whole_versions

# --- SIGKILL -----------------------------------------------------------------------------------------------


def publish_300(model: Path, keep: int | None) -> None:
    publish(model, 300, keep=keep)


def two_versions(model: Path) -> None:
    shutil.rmtree(model, ignore_errors=True)
    publish(model, 100)
    publish(model, 200)


@pytest.mark.parametrize("keep", [pytest.param(None, marks=thorough), 1])
def test_a_kill_at_any_step_leaves_whole_versions_and_a_next_run_that_works(
    tmp_path: Path, keep: int | None
) -> None:
    model = tmp_path / "model"
    two_versions(model)
    steps = count_steps(publish_300, model, keep)
    assert steps > 40, "the steps are seen"
    outcomes: dict[int, tuple[int | None, ...]] = {}
    for point in points(steps, 0, outcomes):
        two_versions(model)
        assert killed_at(point, publish_300, model, keep) == -signal.SIGKILL
        found = [manifest.position for manifest in whole_versions(model)]
        outcomes[point] = tuple(found)
        assert found[-1] in (200, 300), "what was served is served"
        done = publish(model, 300, keep=keep)
        assert done.version == (301 if 300 in found else 300)
        assert hidden(model) == [], f"killed at step {point}: the next run cleans up"
        assert len(list(whole_versions(model))) == (1 if keep else len(found) + 1)
    expected = {(100, 200), (100, 200, 300)} | ({(200, 300), (300,)} if keep else set())
    assert {*outcomes.values()} == expected, "kills hit before and after every change that readers see"


def test_a_kill_at_any_step_of_the_first_publication(tmp_path: Path) -> None:
    steps = count_steps(publish_300, tmp_path / "counted" / "model", None)
    outcomes: dict[int, tuple[int | None, ...]] = {}
    for point in points(steps, 2, outcomes):
        model = tmp_path / str(point) / "model"
        assert killed_at(point, publish_300, model, None) == -signal.SIGKILL
        outcomes[point] = tuple(manifest.position for manifest in whole_versions(model))
        publish(model, 300)
        assert hidden(model) == []
    assert {*outcomes.values()} == {(), (300,)}


# --- SIGINT ------------------------------------------------------------------------------------------------


def stage_for_ever(model: Path, ready: Connection) -> None:
    with Staging(model) as staging:
        fill(staging.path)
        ready.send(str(staging.path))
        time.sleep(60)


def test_an_interrupted_run_removes_what_it_staged(tmp_path: Path) -> None:
    receiver, sender = FORKS.Pipe(duplex=False)
    process = run(stage_for_ever, tmp_path, sender)
    assert Path(receiver.recv()).is_dir()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert ended(process) == 1
    assert names(tmp_path) == []


def test_a_live_exporters_staging_survives_its_neighbours(tmp_path: Path) -> None:
    receiver, sender = FORKS.Pipe(duplex=False)
    process = run(stage_for_ever, tmp_path, sender)
    staged = Path(receiver.recv())
    publish(tmp_path, 1)
    assert (staged / "saved_model.pb").exists()
    process.kill()
    assert ended(process) == -signal.SIGKILL
    assert staged.exists()
    publish(tmp_path, 2)
    assert hidden(tmp_path) == []


# --- several at once ---------------------------------------------------------------------------------------


def publish_together(model: Path, start: Barrier, rounds: int, keep: int | None) -> None:
    start.wait(60)
    for _ in range(rounds):
        publish(model, 100, keep=keep)


@pytest.mark.parametrize("exporters", [2, 8])
def test_exporters_at_once_publish_different_whole_versions(tmp_path: Path, exporters: int) -> None:
    start, rounds = FORKS.Barrier(exporters), 3
    processes = [run(publish_together, tmp_path, start, rounds, None) for _ in range(exporters)]
    assert [ended(process) for process in processes] == [0] * exporters
    positions = [manifest.position for manifest in whole_versions(tmp_path)]
    assert positions == list(range(100, 100 + exporters * rounds))
    assert hidden(tmp_path) == []


def test_exporters_at_once_agree_on_what_to_keep(tmp_path: Path) -> None:
    start = FORKS.Barrier(4)
    processes = [run(publish_together, tmp_path, start, 3, 2) for _ in range(4)]
    assert [ended(process) for process in processes] == [0] * 4
    assert [manifest.position for manifest in whole_versions(tmp_path)] == [110, 111]
    assert hidden(tmp_path) == []


def hold_lease(version: Path, ready: Connection) -> None:
    with lease(version):
        ready.send(True)
        time.sleep(60)


def test_a_version_that_another_process_reads_stays_until_that_process_ends(tmp_path: Path) -> None:
    receiver, sender = FORKS.Pipe(duplex=False)
    reader = run(hold_lease, publish(tmp_path, 1).path, sender)
    assert receiver.recv()
    assert publish(tmp_path, 2, keep=1).removed == ()
    reader.kill()
    ended(reader)
    assert publish(tmp_path, 3, keep=1).removed == (1, 2)


# --- disks and doors ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 64 KiB."""
    with small_disks.small_disk(tmp_path / "disk", "64k") as disk:
        yield disk.path


def test_a_full_disk_publishes_nothing_and_the_next_run_with_space_works(small_disk: Path) -> None:
    model = small_disk / "model"
    publish(model, 1)
    filler = small_disk / "filler"
    with pytest.raises(DiskFull), Staging(model) as staging:
        fill(staging.path)
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(1 << 20))
        publish_version(staging, draft(2))
    assert [manifest.position for manifest in whole_versions(model)] == [1]
    assert hidden(model) == []
    filler.unlink()
    assert publish(model, 2).version == 2


def test_a_read_only_file_system(small_disk: Path) -> None:
    model = small_disk / "model"
    publish(model, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(TargetNotWritable) as caught:
        publish(model, 2)
    assert "EROFS" in caught.value.cause
    assert versions(model) == [1]


def publish_as_nobody(model: Path, answer: Connection) -> None:
    if os.geteuid() == 0:  # permission bits do not bind root
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        publish(model, 2)
    except TargetNotWritable as error:
        answer.send(f"{error.message}: {error.cause}")
    else:
        answer.send("published")


@pytest.mark.parametrize("closed", ["model", "lock", "above"])
def test_no_permission(tmp_path: Path, closed: str) -> None:
    root = tmp_path / "root"
    model = root / "model"
    publish(model, 1)
    closed_path = {"model": model, "lock": model / ".lock", "above": root}[closed]
    for above in (tmp_path, *tmp_path.parents):  # pytest's own directories are private
        if above.is_relative_to(tempfile.gettempdir()) and above != Path(tempfile.gettempdir()):
            above.chmod(0o711)
    model.chmod(0o777)
    closed_path.chmod(0o444 if closed == "lock" else 0o555 if closed == "model" else 0)
    receiver, sender = FORKS.Pipe(duplex=False)
    assert ended(run(publish_as_nobody, model, sender)) == 0
    root.chmod(0o755)
    assert "EACCES" in receiver.recv()
    assert versions(model) == [1]
    assert hidden(model) == []
