"""Whatever happens while a copy makes a base: the next pull ends right, and nothing wrong is ever visible."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from exporter.errors import DiskFull, ExportError, NotTrusted
from exporter.jobs.engines import process
from exporter.jobs.engines.process import Asked, ProcessEngine
from exporter.options import Jobs
from exporter.pipeline import merged_base
from exporter.pipeline.rebase import rebase
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.transfer.pull import LocalCopy, pull
from tests.support import worker_faults
from tests.support.commands import export_model
from tests.support.copy_lives import URL, altered, environment, take
from tests.support.http_proxy import Traffic
from tests.support.key_pairs import key_pair
from tests.support.kills import count_steps, points
from tests.support.kills import killed_at as killed_process
from tests.support.large_logs import large_log
from tests.support.machines import Machine, files, pushed
from tests.support.mergers import COMMAND
from tests.support.publishers import Killed, killed_at

ROOT = Path(__file__).parents[2]


@pytest.fixture
def jobs() -> Jobs:
    """The store's base is merged by tasks, and so is a copy's."""
    return Jobs(task_bytes=64)


def visible(model: Path) -> dict[str, bytes]:
    return {name: content for name, content in files(model).items() if not name.startswith(".")}


def put(model: Path, directory: Path) -> None:
    """Put a model into the store as it is: its files are large."""
    shutil.copytree(model, directory / "store/models/m")


def command(copy: Path) -> list[str]:
    return [sys.executable, "-c", COMMAND, "pull", URL, str(copy)]


@pytest.mark.landing
def test_a_process_that_pulls_is_killed_at_every_step(machine: Machine, copy: Path, tmp_path: Path) -> None:
    before, published = visible(copy), files(machine.model)
    steps = count_steps(take, Path(shutil.copytree(copy, tmp_path / "counted")), environment())
    outcomes: dict[int, object] = {}
    for point in points(steps, 0, outcomes):
        victim = Path(shutil.copytree(copy, tmp_path / f"killed-{point}"))
        killed_process(point, take, victim, environment())
        seen = visible(victim)
        assert seen in (before, published)
        outcomes[point] = len(seen), sorted(path.name.partition("-")[0] for path in victim.iterdir())
        assert pull(URL, victim).bytes_ == 0
        # An empty staging directory that is younger than ten seconds may be left: a later command removes it.
        left = {name: each for name, each in files(victim).items() if not name.startswith(".staging-")}
        assert left == published, "nothing else is left of what was killed"
        shutil.rmtree(victim)
    assert len({str(each) for each in outcomes.values()}) > 2


@pytest.mark.landing
def test_a_command_that_pulls_is_killed_at_any_moment(tmp_path: Path, traffic: Traffic) -> None:
    """A base of 16 MB, so that some moments are in the midst of its merge."""
    model, copy = large_log(tmp_path, 1 << 16, 4, 600), tmp_path / "copy"
    shutil.copytree(model, copy)
    before = visible(copy)
    base = rebase(model)
    assert base is not None
    put(model, tmp_path)
    published = files(model)
    started = time.monotonic()
    subprocess.run(command(Path(shutil.copytree(copy, tmp_path / "timed"))), check=True, cwd=ROOT)
    took, killed = time.monotonic() - started, 0
    for number in range(24):
        with subprocess.Popen(command(copy), cwd=ROOT, stdout=subprocess.DEVNULL) as running:
            with suppress(subprocess.TimeoutExpired):
                running.wait(took * (number + 1) / 25)
            running.kill()
        killed += running.returncode == -signal.SIGKILL
        assert visible(copy) in (before, published)
        if number % 3 == 2 or (copy / base.path.name).exists():
            pull(URL, copy)
            assert files(copy) == published
            shutil.rmtree(copy / base.path.name)
            (copy / ".pushed").unlink()
    assert killed
    pull(URL, copy)
    assert files(copy) == published


@pytest.mark.landing
def test_two_processes_pull_into_one_copy(machine: Machine, copy: Path, tmp_path: Path) -> None:
    for number in range(4):
        here = Path(shutil.copytree(copy, tmp_path / f"shared-{number}"))
        running = [
            subprocess.Popen(command(here), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        for each in running:
            _, talk = each.communicate(timeout=120)
            assert each.returncode == 0 or b"stayed locked" in talk, talk
        assert files(here) == files(machine.model)


def test_the_process_that_merges_is_killed(
    machine: Machine, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the base; the reason is kept for the doctor, until a base is made here again."""
    with monkeypatch.context() as patch:
        patch.setattr(process, "_MAIN", "import os; os.kill(os.getpid(), 9)")
        (spared,) = pull(URL, copy).spared
    assert "idle ended before all tasks were done" in spared.why_fetched
    assert visible(copy) == visible(machine.model)
    assert not [*copy.glob(".pull-*"), *copy.glob(".staging-*")]
    findings = export_model("doctor", copy, "--json").document["findings"]
    (finding,) = [each for each in findings if each["code"] == "fetched-whole"]
    assert finding["cause"] == spared.why_fetched and " of version 30 were fetched" in finding["message"]
    machine.go_on(40)
    assert rebase(machine.model) is not None
    pushed(machine.model, URL)
    assert pull(URL, copy).spared[-1].why_fetched == ""
    findings = export_model("doctor", copy, "--json").document["findings"]
    assert "fetched-whole" not in [each["code"] for each in findings]


def test_a_killed_pull_leaves_no_process_behind(
    machine: Machine, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its merger waits in a task when the pull is killed; the next pull does what is left."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("WORKER_FAULTS", str(faults))
    monkeypatch.setenv("PYTHONPATH", str(Path(next(iter(worker_faults.__path__)))))
    names = [path.name for path in (machine.model / "30/variables").glob("*.data-*")]
    (faults / f"after-{sorted(names)[1]}").write_text("wait")
    with subprocess.Popen(command(copy), cwd=ROOT) as running:
        await_(lambda: mergers_of(running.pid))
        (merger,) = mergers_of(running.pid)
        await_(lambda: [*copy.glob(".pull-*.jobs/*/receipts/*")])
        running.kill()
    await_(lambda: not Path(f"/proc/{merger}").exists())
    (faults / f"after-{sorted(names)[1]}").unlink()
    kept = {path.stat().st_ino for path in copy.glob(".pull-*.jobs/*/*.data-*")}
    assert kept
    assert pull(URL, copy).bytes_ == 0
    assert files(copy) == files(machine.model)
    assert kept <= {path.stat().st_ino for path in (copy / "30").rglob("*")}, "what was made is used"


def mergers_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid
            if is_child and b"engines.process" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def await_(happened: object) -> None:
    assert callable(happened)
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has idle priority")
def test_a_merger_gets_only_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MAIN", f"from {process.__name__} import main; main()")
    policies = []

    def works() -> Iterator[bytes]:
        def policy() -> int:
            (merger,) = mergers_of(os.getpid()) or [0]
            return merger and os.sched_getscheduler(merger)

        await_(lambda: policy() == os.SCHED_IDLE)
        policies.append(policy())
        (merger,), group = mergers_of(os.getpid()), Path("/proc/self/autogroup")
        if group.exists():
            await_(lambda: Path(f"/proc/{merger}/autogroup").read_text().endswith("nice 19\n"))
        return iter(())
        yield

    assert [*ProcessEngine(Asked("idle", 1)).run(works())] == []
    assert policies == [os.SCHED_IDLE] and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_what_a_thief_alters_of_unfinished_work_is_not_served(
    machine: Machine, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(monkeypatch, merged_base, ("_laid_again",), 0), suppress(Killed):
        pull(URL, copy)
    outputs = [*copy.glob(".pull-*.jobs/*/*.data-*")]
    assert outputs, "all tasks were done"
    for path in outputs:
        altered(path)
    (spared,) = pull(URL, copy).spared
    assert spared.why_fetched and files(copy) == files(machine.model) | {
        ".fetched": (copy / ".fetched").read_bytes()
    }


def test_a_base_of_another_publication_is_not_merged(machine: Machine, copy: Path) -> None:
    """Its manifest is no longer that which the new base names; the store does not have it any more."""
    shutil.rmtree(machine.model / "10")
    pushed(machine.model, URL, prune=True)
    manifest = copy / "10/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"exporter": "another"}))
    (spared,) = pull(URL, copy).spared
    assert spared.why_fetched == "10 is another publication here"
    assert {name for name in visible(copy) if name.startswith("30/")} <= visible(machine.model).keys()


def test_a_record_that_is_signed_is_not_altered(machine: Machine, tmp_path: Path, traffic: Traffic) -> None:
    """Neither in the store nor in the copy."""
    private, public = key_pair(tmp_path)
    trust, copy, record = (
        Trust.of([public], "m"),
        tmp_path / "copy",
        tmp_path / "store/models/m/40/manifest.json",
    )
    with in_force(machine.model, Signer.of(str(private), "m")):
        assert rebase(machine.model) is not None
        machine.go_on(40)
        pushed(machine.model, URL)
        pull(URL, copy, trust=trust)
        before = visible(copy)
        assert rebase(machine.model) is not None
        pushed(machine.model, URL)
    content = record.read_bytes()
    record.write_bytes(content.replace(b'"task_bytes":', b'"task_bytes":1'))
    assert record.read_bytes() != content
    with suppress(NotTrusted):
        assert pull(URL, copy, trust=trust).untrusted
    assert visible(copy) == before
    record.write_bytes(content)
    for name in (path for path in before if path.startswith("deltas/") or path == "30/manifest.json"):
        here = Path(shutil.copytree(copy, tmp_path / "here"))
        altered(here / name)
        with suppress(ExportError):
            pull(URL, here, trust=trust)
        ours = {path: each for path, each in visible(here).items() if path.startswith("40/")}
        theirs = {path: each for path, each in visible(machine.model).items() if path.startswith("40/")}
        assert ours in ({}, theirs)
        shutil.rmtree(here)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 12 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_what_was_made_before_the_disk_was_full_is_kept(
    tmp_path: Path, traffic: Traffic, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copy = large_log(tmp_path, 1 << 15, 2, 300), small_disk / "copy"
    shutil.copytree(model, copy)
    assert rebase(model, jobs=Jobs(task_bytes=1 << 18)) is not None
    put(model, tmp_path)
    with monkeypatch.context() as patch:  # while the base is made, somebody else takes the room
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1 << 40))  # type: ignore[attr-defined]
        with pytest.raises(DiskFull):
            pull(URL, copy)
    kept = {path.stat().st_ino: path for path in copy.glob(".pull-*.jobs/*/*.data-*")}
    assert kept and not [*copy.glob(".staging-*")]
    before = visible(copy)
    with pytest.raises(DiskFull, match="no space left"):
        pull(URL, copy)
    assert visible(copy) == before
    assert all(path.exists() for path in kept.values()), "the next try goes on with it"
    subprocess.run(["mount", "-o", "remount,size=24m", small_disk], check=True)
    assert pull(URL, copy).bytes_ == 0
    assert files(copy) == files(model)
    assert {*kept} <= {path.stat().st_ino for path in copy.rglob("*.data-*")}


def test_a_dry_run_tells_what_a_pull_does(machine: Machine, copy: Path, tmp_path: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in (copy, *copy.rglob("*"))}
    ran = export_model("pull", URL, copy, "--dry-run")
    assert ran.code == 0 and "would spare" in ran.out and "30: made here from 2 deltas: " in ran.out, ran.err
    planned = LocalCopy(URL, copy).plan()
    assert {path: path.lstat().st_mtime_ns for path in (copy, *copy.rglob("*"))} == before
    done = pull(URL, copy)
    assert (planned.fetched, planned.bytes_, planned.position) == (done.fetched, done.bytes_, done.position)
    assert sum(each.bytes_ for each in planned.spared) == sum(each.bytes_ for each in done.spared)
    nothing = export_model("pull", URL, copy, "--dry-run", "--json").document
    assert (nothing["status"], nothing["dry_run"], nothing["fetched"]) == ("nothing_to_do", True, [])
    new = export_model("pull", URL, tmp_path / "new", "--dry-run", "--json").document
    assert (new["status"], new["fetched"][-1]) == ("planned", "30")
    assert new["spared"][-1]["deltas"] == 2 and not (tmp_path / "new").exists()
    assert export_model("pull", URL, copy, "--dry-run", "--watch").code == 2
