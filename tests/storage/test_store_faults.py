"""A store on a bad day: commands succeed in the end, or end in an error by name, and nothing is half done."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from exporter.errors import PublishError
from exporter.publish.judge import Code
from exporter.storage import mirror, objects
from exporter.storage.objects import BrokenOff, ObjectWriter, Tag, again, require_conditions
from exporter.storage.url import Url
from exporter.storage.waiting import Calls, GivenUp, awaited, until, workers
from exporter.transfer.pull import pull
from serving.agent.journal import AgentEvent, Journal
from serving.agent.publications import FollowedModel
from serving.agent.puller import Puller, pulling
from tests.support.budget import THOROUGH
from tests.support.commands import export_model
from tests.support.faulty_store import Fault, Weather, faulty
from tests.support.http_proxy import Forwarding, serving
from tests.support.machines import Machine, files, pushed
from tests.support.object_stores import SECRET, Bucket

MOST_SECONDS = 60

HEALS = [Fault.DONE_AND_CLOSED, Fault.HALF, Fault.STATUS_429]
LASTS = [Fault.STATUS_403, Fault.HALF, Fault.SHORTER, Fault.REDIRECT]
if THOROUGH:
    HEALS += [Fault.STATUS_500, Fault.STATUS_503, Fault.DONE_AND_500, Fault.CLOSED]
    LASTS = [*Fault]

ALWAYS = {
    Fault.STATUS_500: "500 Internal Server Error",
    Fault.STATUS_501: "501 Not Implemented",
    Fault.STATUS_503: "503 Service Unavailable",
    Fault.STATUS_429: "429 Too Many Requests",
    Fault.STATUS_403: "the store refuses these credentials",
    Fault.DONE_AND_500: "500 Internal Server Error",
    Fault.DONE_AND_CLOSED: "no connection, or no answer to be read",
    Fault.CLOSED: "no connection, or no answer to be read",
    Fault.SLOW: "no answer in time",
    Fault.HALF: "its answers break off",
    Fault.WHOLE: "it sends whole objects where it is asked for a range",
    Fault.REDIRECT: "there is no bucket s3://",
}
"""What is said where it happens to every request."""


@pytest.fixture
def weather(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weather]:
    """The bucket's, which commands reach through a proxy."""
    monkeypatch.setattr(objects, "_RETRIES", 2)
    monkeypatch.setattr(objects, "_RETRY", timedelta(seconds=5))
    monkeypatch.setattr(objects, "_REQUEST", timedelta(seconds=1))
    with faulty(bucket.environment["AWS_ENDPOINT_URL"]) as (address, weather):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield weather


class Commands:
    """Every command that reads or writes a store, on a model that has gone on since it was pushed."""

    def __init__(self, machine: Machine, bucket: Bucket, here: Path) -> None:
        self.machine, self.url, self.here = machine, bucket.url("models/ranker"), here
        assert export_model("push", machine.model, self.url).code == 0
        assert export_model("pull", self.url, here / "exported").code == 0
        machine.go_on(40)
        bucket.upload(machine.train, "train")
        train = bucket.url("train")
        self.all = [
            ("inspect", train),
            ("--ckpt-dir", train, "--out", here / "exported", "--incr"),
            ("push", machine.model, self.url),
            ("pull", self.url, here / "pulled"),
        ]

    def assert_nothing_is_lost(self) -> None:
        """In good weather again, everything is as it would have been."""
        for command in self.all:
            ran = export_model(*command)
            assert ran.code == 0, ran.err
        assert files(self.here / "pulled") == files(self.machine.model)
        positions = {path.name for path in (self.here / "exported" / "deltas").glob("*/*-*")}
        assert positions == {path.name for path in (self.machine.model / "deltas").glob("*/*-*")}


@pytest.fixture
def commands(machine: Machine, bucket: Bucket, tmp_path: Path) -> Commands:
    return Commands(machine, bucket, tmp_path)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: nothing is known of the store."""
    for known in ("_MIRRORS", "_CHECKPOINTS"):
        monkeypatch.setattr(mirror, known, {})


@pytest.mark.landing
@pytest.mark.parametrize("fault", HEALS, ids=lambda fault: fault.name)
def test_what_heals(
    commands: Commands, weather: Weather, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands.all:
        forget(monkeypatch)
        weather.be(fault, times=1)
        ran = export_model(*command)
        assert ran.code == 0, (command[0], ran.err)
    weather.be(None)
    commands.assert_nothing_is_lost()


@pytest.mark.landing
@pytest.mark.parametrize("fault", LASTS, ids=lambda fault: fault.name)
def test_what_does_not(
    commands: Commands, weather: Weather, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands.all:
        forget(monkeypatch)
        weather.be(fault)
        started = time.monotonic()
        ran = export_model(*command, "--json")
        assert time.monotonic() - started < MOST_SECONDS
        assert ran.code in (1, 3, 6), (ran.code, ran.err)
        said = ran.error["message"] + ran.error["cause"]
        assert ALWAYS.get(fault, "") in said
        assert SECRET not in ran.out + ran.err
    assert not [headers for headers in weather.followed if "authorization" in map(str.lower, headers)]
    forget(monkeypatch)
    weather.be(None)
    commands.assert_nothing_is_lost()
    written = [path for path in commands.here.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_writes_alone(commands: Commands, weather: Weather, bucket: Bucket) -> None:
    """Whoever may read but not write: told so, and the model in the store is as it was."""
    before = bucket.keys("models")
    weather.only = "PUT"
    weather.said = f"<Error><Code>ExpiredToken</Code><Message>{SECRET}</Message></Error>".encode()
    for fault, cause, hint in (
        (
            Fault.STATUS_403,
            "refuses these credentials (ExpiredToken)",
            "needs to list, read, write and delete",
        ),
        (Fault.STATUS_501, "501 Not Implemented", "use a store that honours If-None-Match"),
    ):
        weather.be(fault)
        ran = export_model("push", commands.machine.model, commands.url, "--json")
        assert (ran.code, ran.error["error"]) == (1, "PublishError"), ran.err
        assert (cause in ran.error["cause"], hint in ran.error["hint"]) == (True, True), ran.err
        assert SECRET not in ran.err
    assert bucket.keys("models") == before
    weather.be(None)
    commands.assert_nothing_is_lost()


def test_a_store_that_removes_one_object_at_a_time(bucket: Bucket, weather: Weather) -> None:
    for key in "abc":
        bucket.put(f"m/{key}", b"")
    weather.only = "POST"  # which removes many
    weather.be(Fault.STATUS_501)
    store = ObjectWriter(cast("Url", Url.parse(bucket.url("m"))))
    require_conditions(store, "m")
    store.delete("m/a")
    assert not weather.seen
    store.delete("m/b", "m/c", "m/gone")
    assert (bucket.keys(), len(weather.seen)) == ({}, 1)
    bucket.put("m/d", b"")
    weather.only = ""
    weather.be(Fault.STATUS_403)
    with pytest.raises(PublishError, match=r"m/d: the store cannot be written"):
        store.delete("m/d", "m/d")


def test_a_store_that_removes_nothing_is_refused_for_that(bucket: Bucket, weather: Weather) -> None:
    store = ObjectWriter(cast("Url", Url.parse(bucket.url("m"))))
    weather.only = "DELETE"
    for fault, cause in ((Fault.STATUS_501, "501"), (Fault.STATUS_403, "refuses these credentials")):
        weather.be(fault)
        with pytest.raises(PublishError, match=r"\.probe-\w+: the store cannot be written") as refused:
            require_conditions(store, "m")
        assert cause in refused.value.cause


def test_a_store_whose_answers_get_lost_honours_conditions_all_the_same(bucket: Bucket) -> None:
    class Losing(ObjectWriter):
        def create(self, key: str, content: bytes) -> Tag | None:
            super().create(key, content)
            return None

        def replace(self, key: str, content: bytes, tag: Tag) -> Tag | None:
            super().replace(key, content, tag)
            return None

    require_conditions(Losing(Url("s3", bucket.name, "m")), "m")
    assert not bucket.names()


def test_how_often_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def breaks_off() -> None:
        asked.append(1)
        raise BrokenOff

    monkeypatch.setattr(objects, "_PAUSES", (0.0, 0.0))
    with pytest.raises(BrokenOff):
        again(breaks_off)
    assert len(asked) == 3
    monkeypatch.setattr(objects, "_AGAIN_SECONDS", 0.0)
    with pytest.raises(BrokenOff):
        again(breaks_off)
    assert len(asked) == 4


def test_a_command_ends_when_it_is_told_to_while_the_store_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about a minute until a request is given up: an orchestrator kills what does not end before."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "tests")
        _ends_when_it_is_told_to(silent.accept, "pull", "s3://models/ranker", tmp_path, "--watch")


def _ends_when_it_is_told_to(waits: Callable[[], object], *command: object) -> None:
    program = [sys.executable, "-m", "exporter", *map(str, command)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        try:
            waits()
            process.terminate()
            assert process.wait(40) == (0 if "--watch" in command else 130)
        finally:
            process.kill()


@contextmanager
def _silent_about(
    bucket: Bucket, names: str, monkeypatch: pytest.MonkeyPatch, methods: str = "GET"
) -> Iterator[threading.Event]:
    """The bucket's store does not answer to requests for some objects; set once there is one."""
    asked, over = threading.Event(), threading.Event()

    class Silent(Forwarding):
        target = bucket.environment["AWS_ENDPOINT_URL"]

        def forward(self) -> None:
            if self.command in methods and re.search(names, self.path):
                asked.set()
                over.wait()
                self.close_connection = True
            else:
                self.answer(self.ask())

    with serving(Silent) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        try:
            yield asked
        finally:
            over.set()
            monkeypatch.setenv("AWS_ENDPOINT_URL", Silent.target)


@pytest.mark.parametrize("names", ["manifest.json$", "/deltas/.*(?<!manifest.json)$"])
def test_a_command_ends_while_its_workers_wait_for_the_store(
    machine: Machine,
    bucket: Bucket,
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = bucket.url("models/ranker")
    assert export_model("push", machine.model, url).code == 0
    with _silent_about(bucket, names, monkeypatch) as asked:
        _ends_when_it_is_told_to(lambda: asked.wait(30), "pull", url, tmp_path / "copy", "--watch")


WRITES = [".probe-", "head.json$", "manifest.json.", "delta.data", "20/manifest.json$"]


@pytest.mark.parametrize("names", WRITES if THOROUGH else WRITES[1::2])
def test_a_command_ends_while_the_store_does_not_answer_to_writing(
    machine: Machine,
    bucket: Bucket,
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what it has left there is in nobody's way."""
    url = bucket.url("models/ranker")
    with _silent_about(bucket, names, monkeypatch, "PUT POST DELETE") as asked:
        _ends_when_it_is_told_to(lambda: asked.wait(30), "push", machine.model, url)
    pushed(machine.model, url)
    pull(url, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(machine.model)


def test_an_agent_that_ends_leaves_nobody_who_fetches(
    machine: Machine,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process would wait for whoever fetches, until a copy that lags far behind has caught up."""
    url, copy = bucket.url("models/ranker"), tmp_path / "copy"
    assert export_model("push", machine.model, url).code == 0
    events: list[AgentEvent] = []
    journal = Journal()
    journal.read_by(events.append)
    puller = Puller(FollowedModel("ranker", copy), url, journal, 0.1)
    before = {*threading.enumerate()}
    with _silent_about(bucket, "/deltas/.*(?<!manifest.json)$", monkeypatch) as asked:
        with pulling([puller]):
            assert asked.wait(30)
        left = {thread.name for thread in {*threading.enumerate()} - before}
    assert not [name for name in left if name.startswith(("pull", "ahead"))]
    assert not events, "that it ends is no failure"
    assert pull(url, copy).position == 30


def test_a_call_without_an_answer_is_trouble_before_it_fails(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, machine: Machine, tmp_path: Path
) -> None:
    """It may take minutes, and an operator waits."""
    url = bucket.url("models/ranker")
    pushed(machine.model, url)
    events = Journal()
    puller = Puller(FollowedModel("m", tmp_path / "copy", is_copy=True), url, events, 0.1)
    monkeypatch.setattr("exporter.storage.waiting.SLOW_SECONDS", 0.5)
    with _silent_about(bucket, "/deltas/.*(?<!manifest.json)$", monkeypatch) as asked, pulling([puller]):
        assert asked.wait(30)
        until_ = time.monotonic() + 30
        while (found := puller.fetched.trouble) is None:
            assert time.monotonic() < until_
            time.sleep(0.05)
    assert (found.code, found.text) == (Code.STORE, "the store does not answer")
    assert "/deltas/" in found.why
    assert puller.fetched.trouble is None, "nothing is asked for any more"


def test_a_store_that_answers_slowly_is_slow_until_it_answers_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two of its answers, too: nobody is told that all is well, again and again."""
    monkeypatch.setattr("exporter.storage.waiting.SLOW_SECONDS", 0.05)
    calls = Calls()
    for name in ("first", "second"):
        with calls.entered(name):
            time.sleep(0.1)
        assert (found := calls.slow()) is not None
        assert found[0] == "first"
        assert found[1] >= 0.1
    with calls.entered("third"):
        pass
    assert calls.slow() is None


def test_nothing_is_asked_for_once_it_is_given_up() -> None:
    end, asked = threading.Event(), list[int]()
    with until(end):
        awaited(lambda: asked.append(1))
        end.set()
        with pytest.raises(GivenUp):
            awaited(lambda: asked.append(2))
    assert asked == [1]


def test_tasks_that_nobody_waits_for_end() -> None:
    """At their next request; a failure alone waits for what is under way."""
    silent, asked = threading.Event(), list[int]()

    def ask(number: int) -> bool:
        asked.append(number)
        return silent.wait()

    def task(number: int) -> None:
        again(partial(ask, number))

    try:
        with pytest.raises(KeyboardInterrupt), workers(2, "outer") as pool:
            pool.submit(_together, task)
            while len(asked) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert len(asked) == 2
    finally:
        silent.set()
    slow = threading.Event()
    threading.Timer(0.3, slow.set).start()
    with pytest.raises(ValueError, match="one"), workers(2, "failing") as pool:
        done = pool.submit(again, slow.wait)
        while not done.running():
            time.sleep(0.01)
        raise ValueError("one")
    assert done.result()


def _together(task: Callable[[int], None]) -> None:
    with workers(2, "inner") as pool:
        for each in [pool.submit(task, number) for number in range(100)]:
            each.result()
