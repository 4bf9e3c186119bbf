"""Rollbacks and resumptions against two watches that publish as fast as they can.

    python -m tests.integration.brakes [DECISIONS [PLACE ...]]

plays all three places; pytest does not collect this, and the short form is `test_brakes`. A trainer goes on
all the time, a copy of the model is pulled all the time, and a server follows it: it takes what its hold
allows. Of a store all heads are recorded, in the order in which they replaced one another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from exporter.errors import ExportError
from exporter.publish.delta_log import read_log
from exporter.publish.model import Model
from exporter.storage.layout import HEAD_FILE
from exporter.transfer.head import Head
from exporter.transfer.pull import LocalCopy
from exporter.transfer.push import plan_push, push
from exporter.verify.log import verify_model
from tests.support.logs import Serving, assert_same_bits, served_now, values_at
from tests.support.object_stores import BASE, new_bucket, s3_server
from tests.support.recording_proxy import recording
from tests.support.setting import FIRST, followed

PLACES: Mapping[str, float | None] = {"directory": None, "store": 0.0, "distant store": 0.05}
"""Where the model lies, and how long each request waits; None: no store."""
_MOST_AHEAD = 60
"""Steps that the trainer may be ahead of what is published."""
LONGEST_S = 5.0
"""In which a decision takes effect: from the command's start until the server has it."""


@dataclass
class Times:
    """Seconds of each decision until its command ended, and until the server had it."""

    commands: list[float] = field(default_factory=list)
    effects: list[float] = field(default_factory=list)
    published: int = 0

    def __str__(self) -> str:
        def told(seconds: list[float]) -> str:
            ordered = sorted(seconds)
            middle, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            return f"p50 {middle:.2f} s, p99 {late:.2f} s, longest {ordered[-1]:.2f} s"

        return (
            f"{len(self.commands)} decisions; command {told(self.commands)}; "
            f"server {told(self.effects)}; {self.published} publications"
        )


@contextmanager
def repeated(work: Callable[[], None], pause: float, failures: list[BaseException]) -> Iterator[None]:
    """Do it again and again in a thread, until the block ends; its failures."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(pause):
            try:
                work()
            except BaseException as error:  # noqa: BLE001  the campaign reports it
                failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


class Server:
    """A server that follows a directory: where it stands, and how far its hold lets it."""

    def __init__(self, model: Path) -> None:
        self._model, self._seen = model, Model()
        self.position, self.published = FIRST, FIRST
        self.limit: int | None = None

    def follow(self) -> None:
        self._seen = Model.look(self._model, self._seen)
        log = self._seen.newest_log
        if log is None:
            return
        self.limit, self.published = log.limit, log.last
        way = log.reach(self.position)
        if way:
            self.position = way[-1].end
        if self.position < log.base and (log.limit is None or log.base <= log.limit):
            self.position = log.base


class Brakes:
    """One place, two watches, and persons who roll back and resume."""

    def __init__(self, directory: Path, place: str, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.times, self._record, self._failures = Times(), directory / "heads", list[BaseException]()
        self.trainer = followed(directory / "one", (20, 30), published=30)
        local, wait = directory / "one" / "model", PLACES[place]
        self.target, self.here = str(local), local
        environment = dict(os.environ)
        if wait is not None:
            address = stack.enter_context(s3_server())
            bucket = new_bucket(address)
            self.target, self.here = bucket.url(BASE), directory / "here"
            environment |= bucket.environment
            environment["AWS_ENDPOINT_URL"] = stack.enter_context(
                recording(address, wait, HEAD_FILE, self._record)
            )
            os.environ.update(environment)
            push(plan_push(local, self.target))
            copy = LocalCopy(self.target, self.here, prune=True)
            stack.enter_context(repeated(lambda: _pull(copy), 0.05, self._failures))
        self.server = Server(self.here)
        self._await(lambda: read_log(self.here).at.position >= 30)
        stack.enter_context(repeated(self.server.follow, 0.02, self._failures))
        self.training = stack.enter_context(ExitStack())
        self.training.enter_context(repeated(self._train, 0.1, self._failures))
        self._watches = [self._watch(number, environment) for number in range(2)]

    def _train(self) -> None:
        """Train, as long as the watches keep up: what waits is all read at each look."""
        if self.trainer.step > self.server.published + _MOST_AHEAD:
            return
        self.trainer.train()
        self.trainer.increment()

    def _watch(self, number: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = ["-m", "exporter", "--ckpt-dir", str(self.trainer.directory), "--out", self.target]
        command += ["--incr", "--watch", "--interval", "0.05", "--json"]
        said = self._stack.enter_context((self._directory / f"watch-{number}.out").open("wb"))
        errors = self._stack.enter_context((self._directory / f"watch-{number}.err").open("wb"))
        process = subprocess.Popen(
            [sys.executable, *command], stdout=said, stderr=errors, env=dict(environment)
        )
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.terminate)
        return process

    @property
    def heads(self) -> list[Head]:
        """The heads that the store accepted so far, in the order of their answers."""
        lines = self._record.read_bytes().splitlines() if self._record.exists() else []
        return [msgspec.json.decode(line, type=Head) for line in lines]

    def play(self, decisions: int) -> None:
        """So many rollbacks, each with its resumption; then the trainer ends, and all of it is served."""
        self._await(lambda: self.server.position > 40)
        for _ in range(decisions // 2):
            self._roll_back()
            time.sleep(0.3)
            self._resume()
            before = self.server.position
            self._await(lambda: self.server.position > before)  # noqa: B023  it is over when the loop goes on
        self.finish()

    def _roll_back(self) -> None:
        began = time.monotonic()
        found = self._run("rollback", "--to", "@previous", "--reason", "a brake is tried")
        position = found["position"]
        self.times.commands.append(time.monotonic() - began)
        self._await(lambda: self.server.position == position)
        self._note_effect(began)
        for _ in range(10):
            time.sleep(0.02)
            assert self.server.position == position, "a publication passed the hold"

    def _resume(self) -> None:
        began = time.monotonic()
        self._run("resume")
        self.times.commands.append(time.monotonic() - began)
        self._await(lambda: self.server.limit is None)
        self._note_effect(began)

    def _note_effect(self, began: float) -> None:
        self.times.effects.append(time.monotonic() - began)

    def _run(self, *words: str) -> dict[str, object]:
        command = [sys.executable, "-m", "exporter", words[0], self.target, *words[1:], "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def _await(self, is_so: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(ExportError):
                if is_so():
                    return
            assert time.monotonic() < deadline, self._standstill()
            for watch in getattr(self, "_watches", ()):
                assert watch.poll() is None, "a watch has ended"
            time.sleep(0.01)

    def _standstill(self) -> str:
        said = [path.read_text().splitlines()[-1:] for path in self._directory.glob("watch-*.err")]
        where = f"the server stands at {self.server.position}, held at {self.server.limit}"
        return f"{where}; heads: {self.heads[-6:]}; watches said {said}; failures: {self._failures}"

    def finish(self) -> None:
        """The trainer stops: what it had last is served, all of it is whole, and the heads are in order."""
        self.training.close()
        step = self.trainer.step
        self._await(lambda: read_log(self.here).at.step == step)
        log = read_log(self.here)
        assert_same_bits(values_at(log), served_now(self.trainer, Serving()))
        self._await(lambda: self.server.position == read_log(self.here).at.position)
        assert not verify_model(self.here, bytes_=True).problems
        assert not self._failures, self._failures
        heads = self.heads
        self.times.published = len({head.path for head in heads}) or len(log.deltas)
        require_in_order(heads)


def _pull(copy: LocalCopy) -> None:
    with suppress(ExportError):  # removed while it was listed: the next look has it
        copy.update()


def require_in_order(heads: list[Head]) -> None:
    """While a person decided, nobody else published or changed a hold; each head replaced the one before."""
    ordered = sorted(heads, key=lambda head: head.beat)
    for before, after in pairwise(ordered):
        assert after.beat == before.beat + 1, "two heads replaced one"
        if before.deciding is None or after.is_same_model(before):
            continue
        assert after.owner == before.deciding.owner, f"{after.path} passed the decision {before.deciding}"


def brakes(directory: Path, place: str, decisions: int) -> Times:
    """Play so many decisions at one of `PLACES`."""
    kept = dict(os.environ)
    try:
        with ExitStack() as stack:
            world = Brakes(directory, place, stack)
            world.play(decisions)
            return world.times
    finally:
        os.environ.clear()
        os.environ.update(kept)


def main(decisions: str = "100", *places: str) -> int:
    """Play all places, or these, and print; 1 if a decision took effect too late, as on a loaded machine."""
    is_late = False
    for name in places or PLACES:
        with tempfile.TemporaryDirectory() as scratch:
            found = brakes(Path(scratch), name, int(decisions))
        load = ", ".join(f"{each:.0f}" for each in os.getloadavg())
        print(f"{name}: {found}; load {load} on {os.cpu_count()} cores", flush=True)
        is_late = is_late or max(found.effects) >= LONGEST_S
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
