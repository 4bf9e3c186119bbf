"""Two publishers race on a model in a bucket, killed at any moment, while a third machine pulls."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from exporter.publish.delta_log import read_log
from exporter.storage.layout import MANIFEST_FILE
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from exporter.verify.log import verify_model
from tests.support.budget import times
from tests.support.forks import FORKS
from tests.support.logs import Serving, assert_same_bits, served_now, values_at
from tests.support.object_stores import SECRET, Bucket
from tests.support.setting import Setting, followed

ROUNDS = times(4)
LEASE_SECONDS = 2.0


def publish(environment: Mapping[str, str], train: Path, url: str, outcome: Path) -> None:
    """A machine's exporter: one command, in a process of its own, and what it said."""
    os.environ.update(environment)
    from exporter.transfer import carrier
    from tests.support.commands import export_model

    carrier.LEASE_SECONDS, carrier.BEAT_SECONDS = LEASE_SECONDS, LEASE_SECONDS / 8
    ran = export_model("--ckpt-dir", train, "--out", url, "--incr", "--json")
    new = outcome.with_suffix(".new")
    new.write_text(json.dumps({"code": ran.code, "out": ran.out, "err": ran.err}))
    new.rename(outcome)


class Publisher:
    """A process that publishes, and may be killed."""

    def __init__(self, bucket: Bucket, train: Path, url: str, outcome: Path) -> None:
        self._outcome = outcome
        self.process: ForkServerProcess = FORKS.Process(
            target=publish, args=(dict(bucket.environment), train, url, outcome)
        )
        self.process.start()

    def kill(self, after: float) -> None:
        time.sleep(after)
        self.process.kill()

    def status(self) -> str | None:
        """What it did, None if it was killed before it could say so."""
        self.process.join(300)
        if not self._outcome.exists():
            assert self.process.exitcode == -9, "only a kill silences it"
            return None
        said = json.loads(self._outcome.read_text())
        assert SECRET not in said["out"] + said["err"]
        assert said["code"] in (0, 5), said["err"]
        return "moved" if said["code"] else str(json.loads(said["out"])["status"])


class Onlooker:
    """Looks at a directory all the time: what is there is whole, and comes in order."""

    def __init__(self, model: Path) -> None:
        self._model, self._ended = model, threading.Event()
        self.seen: list[int] = []
        """Positions. Where an upload was given up nothing else is published: the next is a greater one."""
        self.steps: list[int] = []
        self.wrong: list[str] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        known: set[Path] = set()
        while not self._ended.wait(0.005):
            found = [*self._model.glob("[0-9]*"), *self._model.glob("deltas/*/0*-0*")]
            for path in sorted(set(found) - known, key=lambda each: each.name[-20:].zfill(20)):
                manifest = json.loads((path / MANIFEST_FILE).read_text())
                for file in manifest["files"]:
                    with suppress(OSError):
                        if (path / file["path"]).stat().st_size == file["bytes"]:
                            continue
                    self.wrong.append(f"{path} without {file['path']}")
                position = int(path.name[-20:])
                if position not in self.seen:  # else it was merged: other deltas have led there before
                    if self.seen and position < self.seen[-1]:
                        self.wrong.append(f"{path} after {self.seen[-1]}")
                    self.seen.append(position)
                    self.steps.append(manifest["step"])
                known.add(path)


@contextmanager
def pulling(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.landing
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("store", "rounds"), [("bucket", ROUNDS), ("container", times(1))])
def test_a_race_with_kills_and_a_puller(
    store: str, rounds: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket: Bucket = request.getfixturevalue(store)
    chance = random.Random(13)
    url, here, there = bucket.url("models/ranker"), tmp_path / "here", tmp_path / "there"
    setting = Setting(tmp_path / "one")
    trainer = followed(setting.directory, (20,), published=20)
    push(plan_push(setting.model, url))
    pull(url, here)
    onlooker, longest, killed, steps = Onlooker(here), 1.0, 0, [10, 20]
    command = [sys.executable, "-m", "exporter", "pull", url, str(here), "--watch", "--interval", "0.05"]
    with pulling([*command, "--quiet"]) as puller, onlooker.looking():
        for number in range(rounds):
            trainer.train()
            trainer.step = steps[-1] + 10
            trainer.increment()
            steps.append(trainer.step)
            started = time.monotonic()
            racing = [
                Publisher(bucket, trainer.directory, url, tmp_path / f"{number}-{name}") for name in "ab"
            ]
            for each in racing:
                if chance.random() < 0.6:
                    each.kill(chance.uniform(0, longest / 2))
            outcomes = [each.status() for each in racing]
            killed += outcomes.count(None)
            if None not in outcomes:
                longest = time.monotonic() - started
            last = Publisher(bucket, trainer.directory, url, tmp_path / f"{number}-last").status()
            outcomes.append(last)
            assert outcomes.count("published") + (None in outcomes) >= 1, outcomes
            assert outcomes.count("published") <= 1, outcomes
            assert last in ("published", "nothing_to_do"), outcomes
            assert pull(url, there).incomplete == ()
            assert not verify_model(there, bytes_=True).problems
            assert_same_bits(values_at(read_log(there)), served_now(trainer, Serving()))
        deadline = time.monotonic() + 60
        while onlooker.steps[-1:] != steps[-1:] and time.monotonic() < deadline:
            time.sleep(0.05)
        puller.terminate()
        assert puller.wait(60) == 0
    assert killed or rounds == 1
    assert onlooker.wrong == []
    assert onlooker.steps == steps
