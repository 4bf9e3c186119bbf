"""Lives of a model in a bucket: a trainer, publishers, a copy with its servers and canary, and persons.

    python -m tests.integration.lives [SEEDS [STEPS]]     as in 7 or 1-40

plays so many lives; pytest does not collect this, and the short form is `test_lives`. A seed says who there
is: one run of a publisher at a time or watches in processes of their own, keys or none, a canary in the copy
or an operator, how soon what is superseded is removed. Persons roll back, resume, tag, merge and rebase, at
the store and at the copy, also in the middle of a pull; whoever writes to the store or the copy is killed.

All the time servers of the copy have the values that the trainer had at one of its steps, and none that the
lesser of both holds, or the canary, keeps back. When every hold is lifted, the copy and its servers end at
the trainer's newest values within a few pulls, after the merger that the agent's page asks for.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from exporter.errors import Exit, ExportError
from exporter.pipeline.log_maintenance import rollback
from exporter.publish.approval import approve
from exporter.publish.delta_log import read_log
from exporter.publish.model import Log, Model
from exporter.publish.signing import Signer, Trust
from exporter.publish.versions import in_force
from exporter.storage.layout import CANARY_LOCK_FILE
from exporter.storage.objects import ObjectReader, ObjectWriter
from exporter.transfer import carrier
from exporter.transfer import pull as pulling
from exporter.transfer.pull import LocalCopy, Pulled, pull
from exporter.transfer.push import plan_push, push
from exporter.verify.log import verify_model
from tests.support.commands import export_model
from tests.support.key_pairs import key_pair
from tests.support.logs import Serving, assert_same_bits, publish_base, served_now, values_at
from tests.support.machines import machine_in
from tests.support.object_stores import BASE, Bucket, new_bucket, s3_server
from tests.support.publishers import WRITES, Killed, counted_calls
from tests.support.replicas import Replica, bits_of, read_base

LEASE_S, BEAT_S = 2.0, 0.3
"""Those of these publishers: a life does not wait a minute for whoever was killed."""
SETTLED_WITHIN_S = 60.0
_WATCH = (
    f"import sys; from exporter.transfer import carrier; carrier.LEASE_SECONDS = {LEASE_S}; "
    f"carrier.BEAT_SECONDS = {BEAT_S}; from exporter.cli.app import main; main(sys.argv[1:])"
)


class Fault(AssertionError):
    """Something that must not happen, did."""


class Life:
    """One model, and everybody around it; `dice` decides what happens."""

    def __init__(self, directory: Path, bucket: Bucket, seed: int, stack: ExitStack) -> None:
        self.dice, self._directory, self._stack = random.Random(seed), directory, stack
        self._bucket = bucket
        self.url, self.copy = bucket.url(BASE), directory / "copy"
        self.watches = (0, 0, 1, 2)[seed % 4]
        self.has_canary, is_signed = seed % 3 != 1, seed % 5 in (1, 2)
        self.told: list[str] = []
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        patch.setattr(carrier, "LEASE_SECONDS", LEASE_S)
        patch.setattr(carrier, "BEAT_SECONDS", BEAT_S)
        if seed % 2:
            patch.setattr(pulling, "GRACE_SECONDS", 0.0)
        private, public = key_pair(directory) if is_signed else (None, None)
        self._signing = ("--sign-key", private) if private else ()
        self._signer = Signer.of(str(private), "ranker") if private else None
        trust = Trust.of([public], "ranker") if public else None
        with in_force(directory / "one" / "model", self._signer):
            machine = machine_in(directory / "one")
            push(plan_push(machine.model, self.url))
        self.trainer = machine.trainer
        log = read_log(machine.model)
        self.trained = {bits_of(values_at(log, position)): position for position in (10, 20, 30)}
        self._trust = trust
        self._new_copy()
        self._processes = [self._watch(number) for number in range(self.watches)]
        self.stored_limit: int | None = None
        """The step that a rollback in the store brought back; None without one."""
        self.own_limit: int | None = None
        """As `stored_limit`, of one in the copy."""
        self._pulled_limit: int | None = None
        self.approved = {10}
        self.waiting: tuple[str, ...] = ()
        self._pull()

    def _new_copy(self) -> None:
        self._following = LocalCopy(
            self.url, self.copy, prune=True, trust=self._trust, holds_new_logs=self.has_canary
        )
        self.servers = [Replica(self.copy)]
        if self.has_canary:  # as its agent does
            self.copy.mkdir()
            (self.copy / CANARY_LOCK_FILE).touch()

    # --- who there is ------------------------------------------------------------------------------------

    def _publishing(self) -> list[str]:
        words = ["--ckpt-dir", self.trainer.directory, "--out", self.url, "--incr", *self._signing]
        return [*map(str, words)]

    def _watch(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _WATCH, *self._publishing(), "--watch", "--interval", "0.1"]
        log = self._stack.enter_context((self._directory / f"watch-{number}.log").open("ab"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.kill)
        return process

    def _tend(self) -> None:
        """Start watches again that were killed; those that ended must have said why."""
        for number, process in enumerate(self._processes):
            if (code := process.poll()) is None:
                continue
            said = (self._directory / f"watch-{number}.log").read_text()
            if code not in (-signal.SIGKILL, Exit.POSITION) or "Traceback" in said:
                raise Fault(f"a watch ended with {code}: {said[-2000:]}")
            self._processes[number] = self._watch(number)

    def _run(self, *words: object) -> bool:
        """Run a command; True if it did what it was told."""
        ran = export_model(*words, "--json")
        self.told.append(f"{' '.join(map(str, words))} -> {ran.code}")
        if ran.code not in (0, Exit.USAGE, Exit.POSITION) or "Traceback" in ran.err:
            raise Fault(f"{words} ended with {ran.code}: {ran.err}")
        if ran.code:
            self.told[-1] += f" {ran.error['message'][:150]}"
        return ran.code == 0

    @contextmanager
    def _deadly(self, kind: type, names: tuple[str, ...]) -> Iterator[None]:
        """Whoever makes one of these calls is killed before one of the next ones, perhaps."""
        last = self.dice.randrange(1, 12)

        def before(calls: list[str]) -> bool:
            if len(calls) >= last:
                raise Killed
            return True

        with pytest.MonkeyPatch.context() as patch, counted_calls(patch, kind, names, before):
            try:
                yield
            except Killed:
                self.told.append(f"killed at call {last}")

    # --- what may happen ---------------------------------------------------------------------------------

    HAPPENINGS: ClassVar[dict[str, int]] = {
        "train": 8,
        "pull": 5,
        "store_rolls_back": 2,
        "store_resumes": 3,
        "store_merges": 2,
        "store_rebases": 1,
        "store_begins_a_log": 1,
        "store_tags": 1,
        "copy_rolls_back": 3,
        "copy_resumes": 3,
        "copy_merges": 1,
        "copy_rebases": 1,
        "copy_acts_during_a_pull": 3,
        "judge": 6,
        "kill_a_publisher": 2,
        "kill_a_person": 1,
        "kill_a_pull": 2,
        "start_a_server": 2,
    }

    def step(self) -> None:
        """Something happens, the copy is updated, perhaps, and its servers follow."""
        self._tend()
        what = self.dice.choices(list(self.HAPPENINGS), list(self.HAPPENINGS.values()))[0]
        self.told.append(what)
        getattr(self, what)()
        if self.dice.random() < 0.5:
            self._pull()
        self._follow()

    def train(self) -> None:
        self.trainer.train()
        if self.dice.random() < 0.5:  # the number that the next rollback would take
            self.trainer.step = max(self.trainer.parent_step, *self._positions(self.url)[-1:]) + 1
        self.trainer.increment()
        self.trained[bits_of(served_now(self.trainer, Serving()))] = self.trainer.step
        if not self.watches:
            self._run(*self._publishing())

    def pull(self) -> None:
        self._pull()

    def _positions(self, model: object) -> list[int]:
        ran = export_model("history", model, "--json")
        return sorted({event["position"] for event in ran.document["events"]}) if ran.code == 0 else []

    def store_rolls_back(self) -> None:
        if len(found := self._positions(self.url)[-5:-1]):
            self._decide_in_store("rollback", self.url, "--to", self.dice.choice(found))

    def store_resumes(self) -> None:
        self._decide_in_store("resume", self.url, *self.dice.choice([(), ("--lift-only",)]))

    def _decide_in_store(self, *words: object) -> None:
        if self._run(*words, *(self._signing if words[0] != "resume" or "--lift-only" not in words else ())):
            self.stored_limit = self._values_at(self.url) if words[0] == "rollback" else None

    def _values_at(self, model: object) -> int:
        """The step whose values a model ends at."""
        place = Path(str(model))
        if model == self.url:
            place = self._directory / "look"
            shutil.rmtree(place, ignore_errors=True)
            pull(self.url, place)
        return self._step_of(bits_of(values_at(read_log(place))))

    def _own_rollback(self) -> None:
        """Note what the copy was rolled back to, and by which delta."""
        self.own_limit, newest = self._values_at(self.copy), read_log(self.copy).newest.path
        self._rollback = f"{BASE}/{newest.relative_to(self.copy)}"

    def _names(self) -> set[str]:
        return {name.rpartition("/")[0] for name in self._bucket.names()}

    def _step_of(self, bits: str) -> int:
        if bits not in self.trained:
            raise Fault("these values are of no step of the trainer")
        return self.trained[bits]

    def store_merges(self) -> None:
        self._run("merge", self.url, *self._signing)

    def store_rebases(self) -> None:
        self._run("merge", self.url, "--rebase", *self._signing)

    def store_tags(self) -> None:
        if found := self._positions(self.url):
            self._run("tag", self.url, "prod", self.dice.choice(found))

    def store_begins_a_log(self) -> None:
        """A base of another log, by a publisher with a directory of its own."""
        if self.watches or self.stored_limit is not None:
            return
        publisher = self._directory / "publisher"
        shutil.rmtree(publisher, ignore_errors=True)
        pull(self.url, publisher)
        self.trainer.train()
        self.trainer.step = max(self.trainer.step, self._positions(self.url)[-1] + 1)
        self.trainer.parent, self.trainer.touched = None, {}
        self.trainer.save()
        self.trained[bits_of(served_now(self.trainer, Serving()))] = self.trainer.step
        self.approved.add(self.trainer.step)  # nothing can hold it back
        with in_force(publisher, self._signer):
            publish_base(self.trainer, Serving(), publisher)
            push(plan_push(publisher, self.url))

    def copy_rolls_back(self) -> None:
        if found := self._positions(self.copy)[-5:-1]:
            unsigned = ("--unsigned",) if self._signing else ()
            if self._run("rollback", self.copy, "--to", self.dice.choice(found), *unsigned):
                self._own_rollback()
                self.approved.add(self._values_at(self.copy))

    def copy_resumes(self) -> None:
        option = self.dice.choice([(), ("--lift-only",)])
        unsigned = ("--unsigned",) if self._signing and not option else ()
        if self._run("resume", self.copy, *option, *unsigned):
            self.own_limit = None

    def copy_merges(self) -> None:
        if not self._signing:  # who trusts keys takes nothing here that none has signed
            self._run("merge", self.copy)

    def copy_rebases(self) -> None:
        if not self._signing:
            self._run("merge", self.copy, "--rebase")

    def copy_acts_during_a_pull(self) -> None:
        """Somebody decides while publications arrive."""
        act, done = self.dice.choice([self.copy_rolls_back, self.copy_resumes, self.judge]), list[str]()
        announce = pulling._Pull._announce

        def interrupted(job: pulling._Pull, item: pulling.Item) -> None:
            announce(job, item)
            if not done:
                done.append(item.path)
                act()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pulling._Pull, "_announce", interrupted)
            self._pull()

    def judge(self) -> None:
        """The canary approves what is published, or rolls it back."""
        if not self.has_canary or (log := Model.read(self.copy).newest_log) is None:
            return
        if log.limit is None:
            self._begin_canary(log)
        elif log.is_canary and (log.held_by is None or not log.held_by.url):
            found = log.up_to(10**17 if log.bound is None else log.bound)
            way = found.reach(log.limit)
            if not way:
                return
            if self.dice.random() < 0.7:
                passed = {span.end for span in (*way, *found.reach(log.base))}
                if approve(log.path, self.copy, expected=log.limit, position=way[-1].end) is not None:
                    values = read_log(self.copy)
                    self.approved |= {self._step_of(bits_of(values_at(values, end))) for end in passed}
            else:
                with in_force(self.copy, None), suppress(ExportError):
                    rollback(self.copy, log.limit, reason="canary", if_canary=True)
                    self._own_rollback()

    def _begin_canary(self, log: Log) -> None:
        position = self.servers[0].position
        if (
            log.base <= position
            and approve(log.path, self.copy, expected=None, position=position) is not None
        ):
            self.approved |= {self._step_of(server.bits) for server in self.servers}

    def kill_a_publisher(self) -> None:
        if self.watches:
            self.dice.choice(self._processes).kill()
        else:
            with self._deadly(ObjectWriter, WRITES):
                self.train()

    def kill_a_person(self) -> None:
        with self._deadly(ObjectWriter, WRITES):
            self.dice.choice([self.store_rolls_back, self.store_merges, self.store_rebases])()
        if self.stored_limit is None:  # it may have taken effect, or not
            self._run("resume", self.url, "--lift-only")
            self.stored_limit = None

    def kill_a_pull(self) -> None:
        with self._deadly(ObjectReader, ("copy", "read")):
            self._pull()
        with self._deadly(pulling._Pull, ("_announce", "_publish", "_set_hold")):
            self._pull()

    def start_a_server(self) -> None:
        self.servers = [*self.servers[-2:], Replica(self.copy)]

    # --- what is promised --------------------------------------------------------------------------------

    def _pull(self) -> Pulled:
        limit, waited = self.stored_limit, self.waiting
        done = self._following.update()
        if waited:  # where no delta fits, a base comes that no canary has seen
            bases = (read_base(self.copy, path) for path in done.fetched if path.isdecimal())
            self.approved |= {self._step_of(bits_of(values)) for values in bases}
        if self.own_limit is not None and read_log(self.copy).hold.decided().own is None:
            assert self._rollback in self._names(), (
                "the copy's hold is gone, and the store has no such rollback"
            )
            self.own_limit = None  # the store has made the same rollback, and decides about it
        self._pulled_limit = None if done.incomplete else limit
        self.waiting = done.waiting
        self.told.append(f"pulled {[path.rpartition('/')[2].lstrip('0') for path in done.fetched]}")
        self._follow()
        return done

    def _follow(self) -> None:
        """Servers follow; what they pass on the way is the trainer's, and nothing that is kept back."""
        limits = [limit for limit in (self.own_limit, self._pulled_limit) if limit is not None]
        for server in self.servers:
            is_started = server.version is None
            server.passed.clear()
            server.follow()
            for number, bits in enumerate(server.passed):
                step = self._step_of(bits)
                if is_started and not number:
                    continue  # a base that is there is loaded, whatever was decided since
                if self.has_canary and step not in self.approved:
                    raise Fault(f"a server has step {step}, which no canary approved")
                if limits and not self.waiting and step > min(limits):
                    raise Fault(f"a server has step {step}, and is held at {limits}")

    def finish(self) -> None:
        """Everybody lifts what holds, and the trainer's last step reaches every server."""
        self.told.append("finish")
        self._until("the store to be resumed", lambda: self._run("resume", self.url, "--lift-only"))
        self.stored_limit = None
        self._until("the pull of that", lambda: not self._pull().incomplete)
        self._until(
            "the copy to be resumed",
            lambda: self._run("resume", self.copy, "--lift-canary", "--lift-only"),
        )
        self.own_limit, self.has_canary = None, False
        self._following = LocalCopy(self.url, self.copy, prune=True, trust=self._trust)
        self.trainer.train()
        ends = [*self._positions(self.url), *self._positions(self.copy)]
        self.trainer.step = max(self.trainer.step, max(ends) + 1)  # beyond what was taken back here
        self.trainer.increment()
        step = self.trainer.step
        self.trained[bits_of(served_now(self.trainer, Serving()))] = step

        def is_published() -> bool:
            if not self.watches:
                self._run(*self._publishing())
            return self._values_at(self.url) == step

        self._until("the last step to be published", is_published)
        for commands in (
            (),
            ("merge", self.url, *self._signing),
            ("merge", self.url, "--rebase", *self._signing),
        ):
            if commands:
                self._run(*commands)
            for _ in range(3):
                self._pull()
            if not self.waiting and self._is_there(step):
                break
        self.start_a_server()
        self._follow()
        if self.waiting or not self._is_there(step):
            stand = [(server.version, server.position) for server in self.servers]
            raise Fault(f"servers stand at {stand} and not at step {step}; waiting: {self.waiting}")
        assert_same_bits(values_at(read_log(self.copy)), served_now(self.trainer, Serving()))
        problems = verify_model(self.copy, bytes_=True).problems
        if problems:
            raise Fault(f"the copy: {problems}")

    def _is_there(self, step: int) -> bool:
        return all(self._step_of(server.bits) == step for server in self.servers)

    def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while not is_so():
            self._tend()
            if time.monotonic() > deadline:
                raise Fault(f"not within {SETTLED_WITHIN_S:g} s: {what}")
            time.sleep(0.05)


def play(directory: Path, address: str, seed: int, steps: int) -> Life:
    """A life of so many steps, and its end.

    Raises:
        Fault: something did not keep a promise; it has what happened before.
    """
    with ExitStack() as stack:
        life = Life(directory, new_bucket(address), seed, stack)
        try:
            for _ in range(steps):
                life.step()
            life.finish()
        except (AssertionError, ExportError) as error:
            told = "\n".join(life.told[-60:])
            raise Fault(f"seed {seed}, {steps} steps\n{told}\n{type(error).__name__}: {error}") from error
        return life


def main(seeds: str = "1-10", steps: str = "25") -> int:
    """Play these lives, and print each; 1 if one did not end as it should."""
    first, _, last = seeds.partition("-")
    failed = 0
    with s3_server() as address:
        for seed in range(int(first), int(last or first) + 1):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    life = play(Path(scratch), address, seed, int(steps))
                    end = f"{len(life.trained)} steps of the trainer"
                except Exception as error:  # noqa: BLE001  the campaign goes on with the next
                    failed += 1
                    end = f"FAULT {error}"
            load = os.getloadavg()[0]
            print(f"seed {seed}: {time.monotonic() - began:.1f} s, load {load:.0f}: {end}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
