"""Incidents of a model in a bucket, rehearsed: what everybody says, and that the printed commands end them.

One store, a trainer that publishes there, a copy that an agent with a canary fetches, two servers: processes
of their own on loopback. Between agent and store stands a proxy, which has bad days. An incident is over when
the page finds nothing any more. Until then what the page proposes first is typed, literally, into a shell.

    python -m tests.support.rehearsal [WORD ...]       the incidents whose names have one of the words
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from exporter.publish.hold import this_user
from exporter.storage.objects import ObjectWriter
from exporter.transfer.head import fetch_head
from exporter.transfer.items import end_of
from exporter.transfer.push import parse
from tests.support.agents import Agent, Published, Server, process, publishing
from tests.support.commands import export_model
from tests.support.faulty_store import Fault, Weather, faulty
from tests.support.incidents import HAS_PROMTOOL, World, firing, type_it
from tests.support.object_stores import BASE, Bucket, new_bucket, s3_server

USERS = list(range(23))
GOLDEN = {
    "requests": [
        {
            "name": "all users",
            "inputs": {"user": USERS, "item": USERS[:1]},
            "expect": {"user_rows": {"min": -1000, "max": 1000, "drift": 100}},
        }
    ]
}
_MOST_COMMANDS = 4
_LOOK_AGAIN_S = 45.0
_SETTLED_LOOKS = 8
Say = Callable[[str], None]


@dataclass
class Stored(Published):
    """A trainer whose increments go to a model in a store."""

    url: str = ""

    @property
    def place(self) -> str:
        return self.url

    @property
    def position(self) -> int:
        found = fetch_head(ObjectWriter(parse(self.url)))
        assert found is not None
        return end_of(found[0].path)

    def arguments(self) -> list[str]:
        return [*publishing(self.trainer.directory, self.url, self.graph), *self.options, "--incr"]


@dataclass
class StoredWorld(World):
    """A world whose model is in a bucket; servers see a copy, on a disk of its own where there can be one."""

    bucket: Bucket = field(kw_only=True)
    weather: Weather = field(kw_only=True)
    copy: Path = field(kw_only=True)
    agent_environment: Mapping[str, str] = field(kw_only=True)
    has_disk: bool = field(kw_only=True)
    own: ExitStack = field(default_factory=ExitStack)

    def doctor(self) -> Any:
        return export_model("doctor", self.published.place, "--json")

    def change(self, made: Callable[[Any], Any]) -> int:
        """Publish rows of users as `made` makes them."""
        self.published.change(made)
        return self.published.publish()

    @property
    def is_fresh(self) -> bool:
        """True if the page has nothing to say, and servers are where the store is."""
        document = json.loads(self.agent.get("/status.json")[1])
        (model,) = document["models"]
        trouble = [each for each in document["findings"] if each["level"] in ("bad", "warning")]
        return not document["findings"] and not trouble and model["published"] == self.published.position

    def second_agent(self, *more: str) -> Agent:
        """Another agent of the same copy, until the incident is over."""
        return self.own.enter_context(_agent(self, *more))


@contextmanager
def _agent(world: StoredWorld, *more: str) -> Iterator[Agent]:
    targets = [part for server in world.servers for part in ("--target", server.address)]
    often = ("--every", "refresh=0.5", "--deadline", "5", "--poll-seconds", "0.5", "--fresh-within", "5")
    place = ("--model-base-path", world.copy, "--pull", world.published.place)
    with ExitStack() as stack:
        with patch.dict(os.environ, world.agent_environment):
            started = stack.enter_context(
                process("agent", *place, *targets, "--port", "0", "--json", *often, *more)
            )
        yield Agent(started)


@contextmanager
def _disk(directory: Path, size: str = "48m") -> Iterator[bool]:
    """A small file system at a directory, if this user may mount one; False if not."""
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True, check=False
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", directory], check=False)


@contextmanager
def rehearsal(directory: Path) -> Iterator[StoredWorld]:
    """The world before anything was fetched: the copy is empty, and the newest values have drifted."""
    golden, notes = directory / "golden.json", directory / "events"
    golden.write_text(json.dumps(GOLDEN))
    with ExitStack() as stack:
        store = stack.enter_context(s3_server())
        bucket = new_bucket(store)
        through, weather = stack.enter_context(faulty(store))
        stack.enter_context(patch.dict(os.environ, bucket.environment))
        has_disk = stack.enter_context(_disk(directory / "disk"))
        copy = directory / "disk" / "ranker"
        copy.mkdir()
        published = Stored(directory, ("--add=stamp",), url=bucket.url(BASE))
        published.change(lambda rows: rows + 900)
        published.publish()
        more = ("--wait", "300")
        servers = [Server(copy, port, stack=stack, more=more, rest_port=None) for port in _free_ports(2)]
        starting = [threading.Thread(target=server.start, daemon=True) for server in servers]
        there = {**bucket.environment, "AWS_ENDPOINT_URL": through}
        world = StoredWorld(
            published,
            servers,
            None,  # type: ignore[arg-type]
            directory,
            bucket=bucket,
            weather=weather,
            copy=copy,
            agent_environment=there,
            has_disk=has_disk,
        )
        line = 'read -r line; printf "%s\\n" "$line"'
        tell = f"--on-event=sh -c '{line} >> {notes}'"
        for thread in starting:  # while there is nothing to load
            thread.start()
        world.agent = stack.enter_context(_agent(world, "--canary", str(golden), tell))
        for thread in starting:
            thread.join(300)
        yield world


@dataclass(frozen=True)
class Step:
    """An incident: what happens, the code that the page has for it, and what a person does beside typing.

    `by_hand` is done when the page has said so and its first command was typed: the network is back, a server
    is started. `ends` says that the page's command ends the incident without that.
    """

    provoke: Callable[[StoredWorld], None]
    code: str
    says: str = ""
    why: str = ""
    """What its details say, too."""
    by_hand: Callable[[StoredWorld], None] | None = None
    alerts: frozenset[str] = frozenset()
    fresh: int = 200
    event: str = ""
    doctor: str = ""
    """A code that `doctor URL` finds, too."""
    hint: str = ""
    """What the typed command shows: of a fault that no command ends, where to look."""
    needs_disk: bool = False


def first_start(world: StoredWorld) -> None:
    """The copy is empty, and what was published since the base has drifted."""


def repaired(world: StoredWorld) -> None:
    """The trainer is repaired, and has written an increment past what was taken back."""
    world.published.change(lambda rows: np.clip(rows, -1, 1))
    world.published.publish()


def bias(world: StoredWorld) -> None:
    world.change(lambda rows: rows + 900)


def a_person_rolls_back(world: StoredWorld) -> None:
    before = world.published.position
    world.published.publish()
    done = export_model("rollback", world.published.place, "--to", before, "--reason", "NaN in scores")
    assert done.code == 0, done.err
    world.published.publish()


def damage(world: StoredWorld) -> None:
    """What is new is damaged before the agent fetches it."""
    world.weather.be(Fault.STATUS_503)
    try:
        end = world.published.publish()
        key = next(key for key in world.bucket.names() if f"-{end:020}/delta.data" in key)
        content = bytearray(world.bucket.keys(key)[key])
        content[40] ^= 255
        world.bucket.put(key, bytes(content))
    finally:
        world.weather.be(None)


def disk_is_full(world: StoredWorld) -> None:
    with suppress(OSError), (world.copy.parent / "filled").open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    world.published.publish()


def disk_has_room(world: StoredWorld) -> None:
    (world.copy.parent / "filled").unlink()


def store_hangs(world: StoredWorld) -> None:
    world.weather.slow_seconds = 25.0
    world.weather.be(Fault.SLOW)


def store_refuses(world: StoredWorld) -> None:
    world.weather.said = b"<Error><Code>SignatureDoesNotMatch</Code></Error>"
    world.weather.be(Fault.STATUS_403)


def store_is_well(world: StoredWorld) -> None:
    world.weather.be(None)


def nothing_comes(world: StoredWorld) -> None:
    world.agent = world.second_agent("--every", "publication=3")


def something_comes(world: StoredWorld) -> None:
    world.published.publish()


def two_publish(world: StoredWorld) -> None:
    for name in ("ann", "bob", "ann", "bob"):
        with patch.dict(os.environ, {"LOGNAME": name}):
            world.published.publish()


def one_publishes(world: StoredWorld) -> None:
    for _ in range(16):
        world.published.publish()


def a_server_restarts(world: StoredWorld) -> None:
    for _ in range(3):
        world.servers[1].kill()
        _until(lambda: "down" in world.codes(), 60)
        world.servers[1].start()
        _until(lambda: "down" not in world.codes(), 120)
        world.published.publish()


def a_server_dies(world: StoredWorld) -> None:
    world.servers[0].kill()


def it_is_started(world: StoredWorld) -> None:
    world.servers[0].start()


def a_thief_empties_it(world: StoredWorld) -> None:
    for key in world.bucket.names():
        world.bucket.delete(key)


def the_copy_is_pushed(world: StoredWorld) -> None:
    """What the page's details say: the copy has all that was in the bucket."""
    (told,) = (one["details"] for one in world.findings if one["code"] == "store")
    for line in re.findall(r"export-model (?:push|resume) [^,;]*", told):
        done = type_it(line, world.directory, world.agent_environment)
        assert done.returncode == 0, done.stderr


_HERE = f"type this as {this_user()}"
_WAITS = "replicas stay there until this is typed, once the cause is mended"
INCIDENTS: dict[str, Step] = {
    "first start, and what is newest has drifted": Step(
        first_start,
        "rolled-back",
        "Rolled back to the values of",
        _WAITS,
        by_hand=repaired,
        alerts=frozenset({"RolledBack"}),
        event="rolled_back",
    ),
    "a canary meets a bias": Step(
        bias,
        "rolled-back",
        "Rolled back to the values of",
        _WAITS,
        by_hand=repaired,
        alerts=frozenset({"RolledBack"}),
        event="rolled_back",
    ),
    "a person rolls back in the store": Step(
        a_person_rolls_back,
        "rolled-back",
        "Rolled back to the values of",
        _WAITS,
        alerts=frozenset({"RolledBack"}),
        event="rolled_back",
    ),
    "an object is damaged": Step(
        damage,
        "damaged",
        "is damaged in the store",
        alerts=frozenset({"PublicationDamaged"}),
        fresh=503,
        doctor="damaged",
    ),
    "the copy's disk is full": Step(
        disk_is_full,
        "disk-full",
        "No space left: ",
        "there other files take",
        by_hand=disk_has_room,
        alerts=frozenset({"CopyDiskFull"}),
        fresh=503,
        hint="filled",
        needs_disk=True,
    ),
    "the store hangs": Step(
        store_hangs,
        "store",
        "The store does not answer",
        _HERE,
        by_hand=store_is_well,
        alerts=frozenset({"StoreUnseen"}),
        fresh=503,
    ),
    "the store refuses": Step(
        store_refuses,
        "store",
        "The store cannot be read",
        _HERE,
        by_hand=store_is_well,
        alerts=frozenset({"StoreUnseen"}),
        fresh=503,
        hint="AWS_SECRET_ACCESS_KEY",
    ),
    "the publisher is silent": Step(
        nothing_comes,
        "publisher-silent",
        "Nothing was published for",
        by_hand=something_comes,
        alerts=frozenset({"PublisherSilent"}),
    ),
    "two machines publish": Step(
        two_publish,
        "two-publishers",
        "publish this model in turn",
        by_hand=one_publishes,
        hint="ann@",
        alerts=frozenset({"TwoPublishers"}),
    ),
    "a server is dead": Step(
        a_server_dies,
        "down",
        "1 of 2 replicas is down",
        by_hand=it_is_started,
        alerts=frozenset({"ReplicaDown"}),
        fresh=503,
    ),
    "somebody empties the bucket": Step(
        a_thief_empties_it,
        "store",
        "There is no model at",
        "put back what this copy has: export-model push ",
        by_hand=the_copy_is_pushed,
        alerts=frozenset({"StoreUnseen"}),
        fresh=503,
        hint="put it back, or publish a base as before: cd ",
    ),
    "a server restarts again and again": Step(
        a_server_restarts,
        "restarts",
        "again and again",
        "this goes by itself within ten minutes",
        alerts=frozenset({"ReplicaRestarts"}),
    ),
}
"""In this order, in one world: the first needs an empty copy, and a server that restarted is remembered for
ten minutes.
"""


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _until(happened: Callable[[], Any], seconds: float) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(StopIteration):
            if found := happened():
                return found
        time.sleep(0.1)
    return None


class Failed(AssertionError):
    """What an incident was to show, and did not."""


def rehearse(world: StoredWorld, name: str, step: Step, say: Say) -> None:
    """One incident from its cause to its end; Failed if something is not said, or no command helps."""
    say(f"\n== {name}")
    before, agent = len(world.events), world.agent
    began = time.monotonic()
    step.provoke(world)
    found = _until(lambda: next(one for one in world.findings if one["code"] == step.code), 120)
    _require(found is not None, f"no finding {step.code}, but {world.findings}")
    say(f"page     ({time.monotonic() - began:.0f} s) {found['text']}")
    say(f"         {found['details']}")
    _require(step.says.lower() in found["text"].lower(), found["text"])
    _require(step.why in found["details"], found["details"])
    _require(f"findings#{step.code}" in world.page, "no link to what it means")
    _require(bool(found["command"]), "no command")
    ready, fresh = world.agent.get("/readyz"), None
    _until(lambda: world.agent.get("/freshz")[0] == step.fresh, 60)
    fresh = world.agent.get("/freshz")
    say(f"/readyz  {ready[0]} {ready[1].splitlines()[0]}")
    say(f"/freshz  {fresh[0]} {fresh[1].splitlines()[0]}")
    _require(fresh[0] == step.fresh, f"/freshz says {fresh}")
    if HAS_PROMTOOL:
        fired = firing(world.agent.get("/metrics")[1], world.directory)
        say(f"alerts   {', '.join(sorted(fired))}")
        _require(step.alerts <= fired, f"{step.alerts - fired} do not fire")
    doctor = world.doctor()
    codes = [one["code"] for one in json.loads(doctor.out)["findings"]] if doctor.out else []
    say(f"doctor   exit {doctor.code} {', '.join(codes) or doctor.err.strip()[:120]}")
    _require(not step.doctor or step.doctor in codes, f"the doctor finds {codes}")
    if step.event:
        told = _until(lambda: [one for one in world.events[before:] if one["what"] == step.event], 60)
        _require(bool(told) and all(one["why"] and one["command"] for one in told), f"events: {told}")
    _follow_the_page(world, step, say)
    world.own.close()
    world.own, world.agent = ExitStack(), agent


def _follow_the_page(world: StoredWorld, step: Step, say: Say) -> None:
    """Type what the page proposes first, again and again, until it has nothing to say."""
    by_hand = step.by_hand
    if by_hand in (repaired, store_is_well) and step.code != "store":
        by_hand(world)
        say(f"by hand  {by_hand.__doc__ or by_hand.__name__}")
        by_hand = None
    for _ in range(_MOST_COMMANDS):
        findings = [one for one in world.findings if one["level"] in ("bad", "warning")]
        if not findings or findings[0]["code"] == "restarts":
            break
        if step.code != findings[0]["code"] == "publisher-silent":  # on a slow machine incidents take long
            world.published.publish()
            _until(lambda: "publisher-silent" not in world.codes(), _LOOK_AGAIN_S)
            continue
        line = findings[0]["command"]
        with _clears_soon(world, step):
            done = type_it(line, world.directory, world.agent_environment)
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        say(f"$ {line}\n         exit {done.returncode} {' '.join(last)[:150]}")
        _require("Traceback" not in done.stderr, done.stderr)
        is_told = by_hand is None or step.hint in done.stdout + done.stderr
        _require(is_told, f"it does not name {step.hint}: {done.stderr}")
        if by_hand is not None:
            by_hand(world)
            say(f"by hand  {by_hand.__name__.replace('_', ' ')}")
            by_hand = None
        else:
            _require(done.returncode == 0, f"{line}: {done.stdout}{done.stderr}")
        if _until(partial(_moved_on, world, step, line), _LOOK_AGAIN_S) and not _others(world, step):
            break
    left = _until(lambda: not _others(world, step) and "all", _LOOK_AGAIN_S)
    _require(bool(left), f"it is not over: {world.findings}")
    if step.code != "publisher-silent":
        world.published.publish()
        _require(bool(_until(lambda: world.is_fresh or step.code == "restarts", 90)), f"{world.findings}")
    say("over     every replica is fresh again")


@contextmanager
def _clears_soon(world: StoredWorld, step: Step) -> Iterator[None]:
    """A store that hangs answers again while the command waits for it."""
    timer = threading.Timer(3.0, world.weather.be, (None,))
    if step.provoke is store_hangs:
        timer.start()
    yield
    timer.cancel()


def _moved_on(world: StoredWorld, step: Step, typed: str) -> bool:
    """True if nothing is left to do, or the page has proposed something else for a while."""
    for _ in range(_SETTLED_LOOKS):
        if not (left := _others(world, step)):
            return True
        if left[0]["command"] == typed:
            return False
        time.sleep(1.0)
    return True


def _others(world: StoredWorld, step: Step) -> list[dict[str, Any]]:
    """The findings that somebody has to act on; a server that restarted is one for ten minutes."""
    return [
        one
        for one in world.findings
        if one["level"] in ("bad", "warning") and not one["code"] == step.code == "restarts"
    ]


def _make_good(world: StoredWorld) -> None:
    """Undo what an incident left, as far as the others need it."""
    world.weather.be(None)
    (world.copy.parent / "filled").unlink(missing_ok=True)
    export_model("resume", world.published.place)


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise Failed(what)


def failures(directory: Path, say: Say, *words: str) -> dict[str, str]:
    """Rehearse the incidents, the first always and of the others those with one of the words; what failed."""
    failed: dict[str, str] = {}
    with rehearsal(directory) as world:
        for number, (name, step) in enumerate(INCIDENTS.items()):
            if number and words and not any(word in name for word in words):
                continue
            if step.needs_disk and not world.has_disk:
                say(f"\n== {name}: left out, because this user may not mount a disk")
                continue
            try:
                rehearse(world, name, step, say)
            except Failed as error:
                failed[name] = str(error)
                say(f"FAILED   {error}")
                _make_good(world)
    return failed


def main(*words: str) -> int:
    """Rehearse, and print; 1 if an incident failed."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as directory:
        failed = failures(Path(directory), lambda line: print(line, flush=True), *words)
    print(f"\n{len(failed)} failed{''.join(f': {name}' for name in failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
