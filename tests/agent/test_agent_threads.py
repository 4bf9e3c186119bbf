"""The agent's threads: what goes wrong in one of them ends none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from exporter.errors import UsageError
from exporter.publish.model import Model
from exporter.storage import arrivals
from exporter.terminal.server_access import WITHOUT_TLS
from serving.agent.fleet import Targets
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.probe import Prober
from serving.agent.publications import FollowedModel, Publications
from serving.agent.replica import Replica, Settings
from serving.agent_command import AuditFlags, PaceFlags, TimeFlags, _settings

ASK_AT_ONCE = """
import threading, time
from google.protobuf import descriptor_pool
from exporter.wire.protos import message_class

NAMES = ["serving.GetModelStatusRequest", "serving.PredictRequest", "TensorProto"] * 4
begin, pools, real = threading.Barrier(len(NAMES)), [], descriptor_pool.DescriptorPool

def slow_pool():
    time.sleep(0.2)  # so that all are there before the first is done
    return real()

def ask(name):
    begin.wait()
    pools.append(message_class(name).DESCRIPTOR.file.pool)

descriptor_pool.DescriptorPool = slow_pool
threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(pools) == len(NAMES), f"{len(NAMES) - len(pools)} threads died"
assert len({id(pool) for pool in pools}) == 1, "messages of two pools do not mix"
"""


def test_threads_that_ask_for_their_first_messages_at_once_get_them_of_one_pool() -> None:
    done = subprocess.run([sys.executable, "-c", ASK_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def wait_for(journal: Journal, what: EventKind) -> AgentEvent:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for event in journal.last():
            if event.what is what:
                return event
        time.sleep(0.01)
    raise AssertionError(f"no {what}: {journal.last()}")


def test_a_replica_is_looked_after_again_whatever_went_wrong(tmp_path: Path) -> None:
    journal, broken = Journal(), [True]

    def allowed(model: str, address: str, published: Model) -> Model:
        if broken:
            broken.pop()
            raise RuntimeError("a fault of our own")
        return published

    publications = Publications(FollowedModel("m", tmp_path), journal, 0.05)
    replica = Replica("127.0.0.1:9", publications, journal, Settings(), allowed)
    replica.start()
    try:
        until = time.monotonic() + 60
        while replica.observed.failures < 2 and time.monotonic() < until:
            time.sleep(0.01)
        said = [event.message for event in journal.last() if event.what is EventKind.FAILED]
        assert any("a fault of our own" in message for message in said)
        assert any("UNAVAILABLE" in message for message in said), "it was called again"
    finally:
        replica.end()
        assert replica.join(60)


def test_a_directory_whose_changes_are_not_told_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_inotify", lambda: (None, -1))
    model = tmp_path / "ranker"
    model.mkdir()
    journal, stop = Journal(), threading.Event()
    publications = Publications(FollowedModel("ranker", model), journal, 0.05)
    thread = threading.Thread(target=publications.follow, args=(stop,))
    thread.start()
    try:
        assert "so the agent polls" in wait_for(journal, EventKind.FAILED).message
        before = publications.current
        model.rename(tmp_path / "away")
        until = time.monotonic() + 60
        while publications.current == before and time.monotonic() < until:
            time.sleep(0.01)
        assert "is its volume mounted?" in publications.current.problem
        assert len([event for event in journal.last() if event.what is EventKind.FAILED]) == 1, (
            "it is said once"
        )
    finally:
        stop.set()
        thread.join(60)


def test_a_name_that_is_none_is_a_problem_and_no_more() -> None:
    found = Targets([f"dns:///{'x' * 70}:8500", "127.0.0.1:8500"]).resolve()
    assert found.addresses == ("127.0.0.1:8500",)
    assert len(found.problems) == 1


def test_a_prober_whose_probes_cannot_be_sent_keeps_nothing_waiting(tmp_path: Path) -> None:
    stop = threading.Event()
    prober = Prober("127.0.0.1:9", "m", tmp_path, 0.01, lambda: 1 // 0)
    thread = threading.Thread(target=prober.run, args=(WITHOUT_TLS, stop))
    thread.start()
    try:
        until = time.monotonic() + 60
        while prober.is_measuring and time.monotonic() < until:
            time.sleep(0.01)
        assert not prober.is_measuring
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize(
    "name", ["", ":8500", "a:0", "a:x", "a:70000", "dns:///b:x", "unix:/tmp/socket", "a b"]
)
def test_targets_that_stand_for_many_are_names(name: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        Targets([f"dns:///{name}"])


def test_reading_ahead_can_be_left_out() -> None:
    for given, expected in ((TimeFlags(), True), (TimeFlags(no_read_ahead=True), False)):
        assert _settings(given, PaceFlags(), AuditFlags(), WITHOUT_TLS, ["ranker"]).reads_ahead is expected
