"""A watch that is watched: its metrics, the file that a liveness probe reads, and options that are wrong."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.cli.watched import PREFIX, Watched, described, endpoint_of
from exporter.errors import CheckpointNotFound, CorruptFile
from exporter.terminal.progress import no_progress
from tests.support.commands import export_model
from tests.support.deployed import DEPLOY, pods_of
from tests.support.incidents import HAS_PROMTOOL, firing
from tests.support.logs import Serving, Trainer
from tests.support.remote_models import went_on
from tests.support.setting import followed

Metrics = dict[tuple[str, str], float]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer, whose first checkpoint is published as a base."""
    return followed(tmp_path, serving=Serving(parts=2, cast=True), parts=3, name="ranker")


@contextmanager
def watch(directory: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The address of a watch's port, and its process, while it runs."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "exporter", "--ckpt-dir", "train", "--out", "ranker", "--incr"),
            *("--watch", "--interval", "0.05", "--metrics-port", "0", *options),
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"metrics on (http://127\.0\.0\.1:[0-9]+)/metrics", line):
                yield found[1], process.pid
                break
        else:
            raise AssertionError("it ended")
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stderr.close()


def metrics(address: str) -> Metrics:
    """Values by name and the error or kind that they are of."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    return {(one.name, one.labels.get("kind", "")): one.value for each in families for one in each.samples}


def eventually(address: str, name: str, kind: str = "", least: float = 1) -> Metrics:
    """The metrics, once one of them is there and large enough."""
    until = time.monotonic() + 60
    while True:
        found = metrics(address)
        if found.get((f"{PREFIX}_{name}", kind), -1.0) >= least:
            return found
        assert time.monotonic() < until, sorted(found.items())
        time.sleep(0.05)


def test_a_watch_tells_what_it_published_and_what_it_cannot(trainer: Trainer, tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    with watch(tmp_path, "--heartbeat", str(beat)) as (address, process):
        before = metrics(address)
        latest = before[f"{PREFIX}_last_publication_timestamp_seconds", ""]
        assert latest == pytest.approx(time.time(), abs=300)
        assert before["process_open_fds", ""] > 3
        went_on(trainer, 20)
        found = eventually(address, "publications_total", "delta")
        assert found[f"{PREFIX}_published_step", ""] == 20
        assert found[f"{PREFIX}_rows_total", ""] > 0
        assert found[f"{PREFIX}_bytes_total", ""] > found[f"{PREFIX}_rows_total", ""]
        assert (f"{PREFIX}_failing", "TruncatedFile") not in found

        os.kill(process, signal.SIGSTOP)  # so that it does not see the increment before it is damaged
        went_on(trainer, 30)
        index = next((tmp_path / "train/increments").glob(f"*{30:020d}*")) / "delta.index"
        whole = index.read_bytes()
        index.write_bytes(b"damaged")
        os.kill(process, signal.SIGCONT)
        found = eventually(address, "failures_total", "TruncatedFile", least=2)
        assert found[f"{PREFIX}_failing", "TruncatedFile"] == 1
        behind = found[f"{PREFIX}_lag_seconds", ""]
        assert eventually(address, "lag_seconds", least=behind + 0.2), "for as long as it fails"
        old = beat.stat().st_mtime_ns
        until = time.monotonic() + 60
        while beat.stat().st_mtime_ns == old:
            assert time.monotonic() < until, "it fails, and is alive"
            time.sleep(0.05)

        index.write_bytes(whole)
        found = eventually(address, "publications_total", "delta", least=2)
        assert found[f"{PREFIX}_published_step", ""] == 30
        with urllib.request.urlopen(f"{address}/healthz", timeout=60) as answer:
            assert answer.read() == b"ok\n"
        known = {name for name, _ in metrics(address) if name.startswith(PREFIX)}
    assert {name for name in known if not name.endswith("_created")} | {
        f"{PREFIX}_failing",  # of which nothing is known while nothing fails
        f"{PREFIX}_held_back_since_timestamp_seconds",  # and these are of a delta with a budget
        *(f"{PREFIX}_{name}" for name in ("change_bytes", "change_sent_ratio", "budget_bytes")),
        f"{PREFIX}_budget_excess_bytes",
    } == {one.name for one in described()}


def test_a_disk_that_is_full_is_told_and_outlived(trainer: Trainer, tmp_path: Path) -> None:
    """Of the exporter's side: no file may be longer than some bytes."""
    with watch(tmp_path) as (address, process):
        _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (64, hard))
        went_on(trainer, 20)
        found = eventually(address, "failures_total", "DiskFull")
        assert found[f"{PREFIX}_failing", "DiskFull"] == 1
        if HAS_PROMTOOL:
            with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
                fires = firing(answer.read().decode(), tmp_path, "export-model-exporter")
            assert "ExporterFails" in fires and "ExporterBehind" not in fires
        resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
        found = eventually(address, "publications_total", "delta")
        assert (f"{PREFIX}_failing", "DiskFull") not in metrics(address)


def test_who_waits_for_a_trainer_is_not_behind_it(tmp_path: Path) -> None:
    seen = Watched(tmp_path)
    seen.looked(CheckpointNotFound("none yet"))
    time.sleep(0.05)
    seen.looked(CheckpointNotFound("none yet"))
    assert lag(seen) < 0.05 + 0.04
    seen.looked(CorruptFile("damaged"))
    time.sleep(0.05)
    seen.looked(CorruptFile("damaged"))
    assert lag(seen) > 0.05


def lag(seen: Watched) -> float:
    (value,) = (
        sample.value
        for family in seen.collect()
        for sample in family.samples
        if sample.name == f"{PREFIX}_lag_seconds"
    )
    return float(value)


def test_the_heartbeat_goes_on_while_work_makes_progress(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    seen = Watched(tmp_path, beat)
    with seen.progress(no_progress)("copying", 10) as bar:
        assert beat.is_file()
        os.utime(beat, (0, 0))
        bar.advance(1)
        assert beat.stat().st_mtime == 0, "once a second is enough"
        seen.looked(None)
        assert beat.stat().st_mtime > 0


def test_the_probe_of_deploy_tells_a_watch_that_hangs_from_one_that_works(tmp_path: Path) -> None:
    (pod,) = pods_of(DEPLOY / "kubernetes/exporter.yaml")
    (container,) = pod["containers"]
    *shell, script = container["livenessProbe"]["exec"]["command"]
    (beat,) = (word.partition("=")[2] for word in container["args"] if word.startswith("--heartbeat="))
    script = script.replace(beat, str(tmp_path / "beat"))
    assert subprocess.run([*shell, script], timeout=60).returncode != 0, "there is none yet"
    Watched(tmp_path, tmp_path / "beat").looked(CorruptFile("damaged"))
    assert subprocess.run([*shell, script], timeout=60).returncode == 0
    os.utime(tmp_path / "beat", (time.time() - 960,) * 2)
    assert subprocess.run([*shell, script], timeout=60).returncode != 0


def test_a_disk_that_is_full_ends_no_watch(tmp_path: Path) -> None:
    Watched(tmp_path, Path("/dev/full")).looked(None)


@pytest.mark.parametrize("text", ["x", "70000", "127.0.0.1:", "٣"])
def test_what_is_no_port_is_refused(text: str, tmp_path: Path) -> None:
    ran = export_model(
        "--ckpt-dir", tmp_path, "--out", tmp_path / "m", "--incr", "--watch", "--metrics-port", text
    )
    assert (ran.code, "is not a port" in ran.err) == (2, True), ran.err


def test_the_address_of_metrics_is_this_machine_unless_one_is_given() -> None:
    assert endpoint_of("8601") == ("127.0.0.1", 8601)
    assert endpoint_of("0.0.0.0:8601") == ("0.0.0.0", 8601)
    assert endpoint_of("[::]:8601") == ("::", 8601)


def test_a_heartbeat_that_cannot_be_written_is_refused_before_anything_is_published(
    trainer: Trainer, tmp_path: Path
) -> None:
    options = ["--ckpt-dir", tmp_path / "train", "--out", tmp_path / "ranker", "--incr", "--watch"]
    ran = export_model(*options, "--heartbeat", tmp_path / "none/beat", "--until", "0")
    assert (ran.code, "cannot be written" in ran.err) == (2, True), ran.err
    ran = export_model(*options[:-1], "--heartbeat", tmp_path / "beat")
    assert (ran.code, "--watch" in ran.err) == (2, True), "it is of a watch alone"
