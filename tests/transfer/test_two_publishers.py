"""Publishers killed, or overtaken, at any request: a model in a store is whole, and has one history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage.layout import HEAD_FILE
from exporter.storage.objects import ObjectWriter
from exporter.transfer import carrier
from exporter.transfer.head import Head, Upload
from exporter.transfer.pull import pull
from tests.support.budget import THOROUGH, thorough
from tests.support.commands import export_model
from tests.support.logs import Serving, Trainer, assert_same_bits, served_now, values_at
from tests.support.object_stores import BASE, Bucket
from tests.support.publishers import (
    WRITES,
    Killed,
    counted_writes,
    killed_at,
    lose_patience,
    published_to,
    whole,
)
from tests.support.remote_models import incr, went_on

STRIDE = 1 if THOROUGH else 2
"""A command is killed before every second write in the ordinary tests, and overtaken before the others."""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_patience(monkeypatch)


@pytest.fixture
def trainer(tmp_path: Path, url: str) -> Trainer:
    return published_to(url, tmp_path)


@contextmanager
def before_write(
    monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], None]
) -> Iterator[list[str]]:
    """Something happens once, right before the write of this number; the writes that were begun."""
    is_within = False

    def before(calls: list[str]) -> bool:
        nonlocal is_within
        if is_within:
            return False
        if len(calls) == number:
            is_within = True
            calls.append("")
            try:
                happens()
            finally:
                is_within = False
        return True

    with counted_writes(monkeypatch, before) as calls:
        yield calls


def killed_before(monkeypatch: pytest.MonkeyPatch, number: int) -> AbstractContextManager[list[str]]:
    """The process dies right before the write of this number: it writes nothing more."""
    return killed_at(monkeypatch, ObjectWriter, WRITES, number)


def head(bucket: Bucket) -> Head:
    key = f"{BASE}/{HEAD_FILE}"
    return msgspec.json.decode(bucket.keys(key)[key], type=Head)


def prepare_nothing(url: str) -> None:
    """The log as it is."""


def prepare_rollback(url: str) -> None:
    assert export_model("rollback", url, "--to", 20).code == 0


COMMANDS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "merge": (prepare_nothing, ("merge",)),
    "rebase": (prepare_nothing, ("merge", "--rebase")),
    "rollback": (prepare_nothing, ("rollback", "--to", "20")),
    "resume": (prepare_rollback, ("resume",)),
    "lift": (prepare_rollback, ("resume", "--lift-only")),
}
every_command = pytest.mark.parametrize(
    "name",
    ["rollback", *(pytest.param(name, marks=thorough) for name in COMMANDS if name != "rollback")],
)


@pytest.mark.landing
def test_an_export_that_is_killed_anywhere(
    trainer: Trainer, url: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one, from another machine, publishes all the same; nobody ever sees a half."""
    number, last, at = 0, False, 30
    here = tmp_path / "here"
    while not last:
        went_on(trainer, 40 + 10 * number)
        with killed_before(monkeypatch, number) as calls:
            try:
                ran = incr(trainer, url)
            except Killed:
                pass
            else:
                assert ran.code == 0, ran.err
                last = True
        log = read_log(whole(url, here))
        assert log.at.position == at or any("manifest.json" in call for call in calls)
        ran = incr(trainer, url)
        assert ran.code == 0, ran.err
        log = read_log(whole(url, here))
        at = log.at.position
        assert_same_bits(values_at(log), served_now(trainer, Serving()))
        assert head(bucket).uploading is None
        number += 1
    assert number > 10
    assert not [name for name in bucket.keys(BASE) if ".json." in name], "what was given up is removed"


@pytest.mark.landing
@every_command
def test_a_command_that_is_killed_anywhere(
    name: str, trainer: Trainer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, from another machine, does it, or finds it done."""
    prepare, command = COMMANDS[name]
    arguments = (command[0], url, *command[1:], "--json")
    number, last, here = 0, False, tmp_path / "here"
    while not last:
        _touched_all(trainer, 40 + 10 * number)
        assert incr(trainer, url).code == 0
        prepare(url)
        with killed_before(monkeypatch, number):
            try:
                assert export_model(*arguments).code == 0
                last = True
            except Killed:
                pass
        whole(url, here, is_held_back=True)
        if command[0] == "resume":
            planned = export_model(*arguments, "--dry-run")
            assert planned.code == 0, "what is published and not shown yet lifts no hold"
        ran = export_model(*arguments)
        assert ran.code == 0, ran.err
        _is_done(name, trainer, read_log(whole(url, here)))
        if name == "rollback":
            assert export_model("resume", url).code == 0
        number += STRIDE
    assert number > 5


def _touched_all(trainer: Trainer, step: int) -> None:
    """A delta of every row, whatever was taken back before."""
    trainer.train()
    tables = {name: value for name, value in trainer.values.items() if trainer.is_table(name)}
    trainer.touched |= {name: set(range(len(value))) for name, value in tables.items()}
    trainer.touched |= {name: set() for name in trainer.values.keys() - tables.keys()}
    trainer.step = step
    trainer.increment()


def _is_done(name: str, trainer: Trainer, log: DeltaLog) -> None:
    is_back = name in ("rollback", "lift")
    wanted = values_at(log, 20) if is_back else served_now(trainer, Serving())
    assert_same_bits(values_at(log), wanted)
    assert log.hold.read() == (log.at.position if name == "rollback" else None)
    if name == "rebase":
        assert log.base.at == log.at
    if name == "merge":
        assert [delta.start for delta in log.chain(10)] == [10]


@pytest.mark.landing
def test_an_export_that_is_overtaken_anywhere(
    trainer: Trainer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was slow, and not dead: another machine takes its place, and it goes on writing what it has."""
    number, steps, here = 0, iter(range(40, 10_000, 10)), tmp_path / "here"

    def overtakes() -> None:
        went_on(trainer, next(steps))
        ran = incr(trainer, url)
        assert ran.code == 0, ran.err

    while True:
        went_on(trainer, next(steps))
        with before_write(monkeypatch, number, overtakes) as calls:
            ran = incr(trainer, url)
        assert ran.code == 0, ran.err  # it is there, or takes what is left from the newer position
        log = read_log(whole(url, here))
        assert_same_bits(values_at(log), served_now(trainer, Serving()))
        if "" not in calls:
            break
        number += 1
    assert number > 10


@pytest.mark.landing
@every_command
def test_a_command_that_is_overtaken_anywhere(
    name: str, trainer: Trainer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the same command: what both write lies at the same path."""
    prepare, command = COMMANDS[name]
    arguments = (command[0], url, *command[1:], "--json")
    number, here = STRIDE - 1, tmp_path / "here"

    def overtakes() -> None:
        assert export_model(*arguments).code == 0

    while True:
        _touched_all(trainer, 40 + 10 * number)
        assert incr(trainer, url).code == 0
        prepare(url)
        with before_write(monkeypatch, number, overtakes) as calls:
            ran = export_model(*arguments)
        assert ran.code in (0, 5), ran.err
        log = read_log(whole(url, here))
        _is_done(name, trainer, log)
        if name == "rollback":
            assert export_model("resume", url).code == 0
        if "" not in calls:
            break
        number += STRIDE
    assert number > 5


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_another_shows_while_the_store_is_listed_is_not_published_again(
    trainer: Trainer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """A manifest moves from the name where it waits; a list has that name, or neither of the two."""
    went_on(trainer, 40)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ObjectWriter, "copy_if_there", _die)
        incr(trainer, url)
    list_, fetch, shown = ObjectWriter.below, ObjectWriter.fetch, list[str]()

    def another_shows_it() -> None:
        if not shown:
            shown.append("")
            shown[0] = incr(trainer, url).document["status"]

    def listed(self: ObjectWriter, path: str, **more: Any) -> Iterator[Any]:
        found = list(list_(self, path, **more))
        if not is_listed and not shown:
            another_shows_it()
            found = [each for each in found if "manifest.json." not in each.key]
        yield from found

    def fetched(self: ObjectWriter, key: str, *rest: Any) -> Any:
        if "manifest.json." in key:
            another_shows_it()
        return fetch(self, key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectWriter, "below", listed)
        patch.setattr(ObjectWriter, "fetch", fetched)
        ran = incr(trainer, url)
    assert shown == ["nothing_to_do"]
    assert (ran.code, ran.document["status"]) == (0, "nothing_to_do"), ran.err
    model = whole(url, tmp_path / "here")
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def _die(*_: object) -> None:
    raise Killed


def test_other_contents_never_take_the_place_of_what_was_given_up(
    ranker: Path, ranker_graph: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both want to be version 20; the slow one still writes there when the other is published."""
    command = ("--ckpt-dir", ranker, "--model", ranker_graph, "--out", url, "--json", "--again")
    with before_write(monkeypatch, -1, lambda: None) as calls:
        assert export_model(*command, "--out", f"{url}-other").code == 0
    middle = [number for number, call in enumerate(calls) if call.startswith("upload")][1]
    done = []

    def overtakes() -> None:
        done.append(export_model(*command, "--cast", "bfloat16"))

    with before_write(monkeypatch, middle, overtakes):
        slow = export_model(*command)
    assert (done[0].code, done[0].document["version"]) == (0, 21), done[0].err
    assert (slow.code, slow.document["version"]) == (0, 22), slow.err
    whole_versions = tmp_path / "here"
    assert pull(url, whole_versions).fetched == ("21", "22")
    assert export_model("verify", url, "--bytes").code == 0


_KILLED = """
    import os, signal, sys
    from exporter.storage.objects import ObjectWriter
    from exporter.transfer import carrier
    carrier.LEASE_SECONDS, number = float(sys.argv[1]), int(sys.argv[2])
    count = 0
    for name in ("upload", "create", "replace", "put", "delete"):
        def counted(self, *rest, method=getattr(ObjectWriter, name), **named):
            global count
            if rest:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            return method(self, *rest, **named)
        setattr(ObjectWriter, name, counted)
    from exporter.cli.app import main
    main(sys.argv[3:])
"""


@pytest.mark.landing
@pytest.mark.parametrize("rounds", [7, pytest.param(40, marks=thorough)])
def test_two_processes_and_kills(trainer: Trainer, url: str, tmp_path: Path, rounds: int) -> None:
    """In every round two processes export at once, and one of them is killed at some request."""
    here, private = tmp_path / "here", tmp_path / "private"
    private.mkdir()
    environment = {**os.environ, "TMPDIR": str(private)}
    script = textwrap.dedent(_KILLED)
    arguments = ["--ckpt-dir", str(trainer.directory), "--out", url, "--incr", "--json"]
    killed = 0
    for number in range(rounds):
        went_on(trainer, 40 + 10 * number)
        running = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", script, "2", str(point), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for point in (2 * number % 16, 10_000)
        ]
        outcomes = [(process.communicate(timeout=300), process.returncode) for process in running]
        assert outcomes[1][1] == 0, outcomes[1]
        if outcomes[0][1] == -signal.SIGKILL:
            killed += 1
        else:  # the other one had published when it came so far
            assert outcomes[0][1] == 0, outcomes[0]
            told = sorted(json.loads(out)["status"] for (out, _), _ in outcomes)
            assert told == ["nothing_to_do", "published"]
        log = read_log(whole(url, here))
        assert_same_bits(values_at(log), served_now(trainer, Serving()))
    assert killed
    left = [path for path in private.rglob("*") if path.is_file()]
    subprocess.run([sys.executable, "-m", "exporter", "verify", url, "-q"], env=environment, check=True)
    assert not [path for path in left if path.exists() and path.name not in {".lock", ".turn"}], (
        "swept by the next process"
    )


def test_an_upload_that_goes_on_is_waited_for(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while; what says nothing any more is given up."""
    monkeypatch.setattr(carrier, "LEASE_SECONDS", 60.0)
    monkeypatch.setattr(carrier, "WAIT_SECONDS", 1.0)
    went_on(trainer, 40)
    ours, path = head(bucket), f"deltas/{10:020d}/{30:020d}-{40:020d}"
    busy = replace(ours, uploading=Upload(path, "0" * 64, "1" * 64), owner="another", beat=1)
    bucket.put(f"{BASE}/{HEAD_FILE}", busy.encoded())
    ran = incr(trainer, url)
    assert (ran.code, ran.error["error"]) == (5, "PositionMoved"), ran.err
    assert "is being published by another machine" in ran.error["message"]
    ran = export_model("history", url, "--json")
    assert (ran.code, ran.document["position"]) == (0, 30), "who only looks need not wait"
    ended = threading.Timer(0.5, lambda: bucket.put(f"{BASE}/{HEAD_FILE}", ours.encoded()))
    monkeypatch.setattr(carrier, "WAIT_SECONDS", 60.0)
    ended.start()
    ran = incr(trainer, url)
    assert (ran.code, ran.document["position"]) == (0, 40), ran.err
    ended.join()
    went_on(trainer, 50)
    bucket.put(f"{BASE}/{HEAD_FILE}", replace(head(bucket), uploading=busy.uploading).encoded())
    monkeypatch.setattr(carrier, "LEASE_SECONDS", 1.0)
    ran = incr(trainer, url)
    assert (ran.code, ran.document["position"]) == (0, 50), ran.err
    assert path in head(bucket).given_up


def test_a_slow_upload_says_that_it_goes_on(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "BEAT_SECONDS", 0.05)
    upload, beats = ObjectWriter.upload, list[int]()

    def slow(self: ObjectWriter, key: str, file: Path, *rest: Any) -> Any:
        beats.append(head(bucket).beat)
        while head(bucket).beat < beats[-1] + 2:
            time.sleep(0.05)
        return upload(self, key, file, *rest)

    monkeypatch.setattr(ObjectWriter, "upload", slow)
    went_on(trainer, 40)
    ran = incr(trainer, url)
    assert (ran.code, ran.document["position"]) == (0, 40), ran.err
    assert beats[-1] >= beats[0] + 2


def test_whoever_is_interrupted_gives_up_after_a_beat_that_came_late(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats are not waited for then; the next publisher does not wait for the lease."""

    def interrupted(self: ObjectWriter, key: str, file: Path, *rest: Any) -> Any:
        found = head(bucket)
        bucket.put(f"{BASE}/{HEAD_FILE}", replace(found, beat=found.beat + 1).encoded())
        raise KeyboardInterrupt

    monkeypatch.setattr(ObjectWriter, "upload", interrupted)
    went_on(trainer, 40)
    assert incr(trainer, url).code == 130
    assert head(bucket).uploading is None
    assert len(head(bucket).given_up) == 1


def test_an_upload_that_was_given_up_ends_early(
    trainer: Trainer, url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices with its next beat, and not only when all is uploaded."""
    monkeypatch.setattr(carrier, "BEAT_SECONDS", 0.05)
    upload, uploaded = ObjectWriter.upload, list[str]()

    def taken_over(self: ObjectWriter, key: str, file: Path, *rest: Any) -> Any:
        if not uploaded:
            found = head(bucket)
            assert found.uploading is not None
            given_up = {found.uploading.path: found.uploading.files}
            other = replace(found, uploading=None, given_up=given_up, owner="another")
            bucket.put(f"{BASE}/{HEAD_FILE}", other.encoded())
            time.sleep(1)
        uploaded.append(key)
        return upload(self, key, file, *rest)

    monkeypatch.setattr(ObjectWriter, "upload", taken_over)
    went_on(trainer, 40)
    ran = incr(trainer, url)
    assert (ran.code, ran.document["position"]) == (0, 41), ran.err  # 30-40 may still be written to
    assert len([key for key in uploaded if f"-{40:020d}/" in key]) == 1
