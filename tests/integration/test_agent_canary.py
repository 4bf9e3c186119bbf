"""A canary before three real servers: what is good goes on to all, what is bad is met by one alone."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CallFailed
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaOrigin
from serving.client import ModelClient
from tests.support.agents import DEADLINE_S, Agent, Published, Server, agent, process, wait
from tests.support.budget import thorough
from tests.support.commands import export_model

USERS = list(range(23))
GOLDEN = {
    "requests": [
        {
            "name": "all users",
            "inputs": {"user": USERS, "item": USERS[:1]},
            "expect": {
                "user_rows": {"min": -1000, "max": 1000, "drift": 3},
                "item_rows": {"drift": 1000},
                "dense": {"drift": 1000},
            },
        }
    ]
}


@pytest.fixture(scope="module")
def servers_and_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Published, list[Server]]]:
    published = Published(tmp_path_factory.mktemp("canary"), ("--add=stamp",))
    with ExitStack() as stack:
        servers = [Server(published.model, stack=stack).start() for _ in range(3)]
        yield published, sorted(servers, key=lambda server: server.address)


@pytest.fixture
def published(servers_and_model: tuple[Published, list[Server]]) -> Iterator[Published]:
    """As the others left it: what was rolled back is accepted."""
    published, _ = servers_and_model
    yield published
    assert export_model("resume", published.model, "--lift-only", "--lift-canary").code == 0


@pytest.fixture
def servers(servers_and_model: tuple[Published, list[Server]]) -> list[Server]:
    return servers_and_model[1]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(GOLDEN))
    return path


@contextmanager
def canary(published: Published, servers: list[Server], golden: Path, *more: str) -> Iterator[Agent]:
    # An agent waits so long for a replica to compare with, wherever the test before rolled one back.
    options = ("--canary", str(golden), "--canary-seconds", "10", *more)
    with agent(published.model, *(server.address for server in servers), more=options) as running:
        yield running


def publish(published: Published, made: Callable[[np.ndarray], np.ndarray] | None = None) -> int:
    """Train on, and publish; every row of the users is what `made` makes of it."""
    if made is not None:
        published.change(made)
    return published.publish()


def all_nan(rows: np.ndarray) -> np.ndarray:
    return np.full_like(rows, np.nan)


def normal(rows: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).normal(size=rows.shape)


class Clients:
    """Clients that ask every server all the time, and note at which positions they were answered."""

    def __init__(self, servers: list[Server]) -> None:
        self.seen: dict[str, set[int]] = {server.address: set() for server in servers}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for server in servers]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server: Server) -> None:
        with ModelClient(server.address, server.base.name) as client:
            while not self._stop.is_set():
                with suppress(CallFailed):
                    found = client.predict({"user": USERS, "item": [0]}).outputs
                    self.seen[server.address] |= set(found["model_position"].tolist())
                time.sleep(0.05)


def positions(servers: list[Server], published: Published) -> set[int]:
    version = int(read_log(published.model).base.path.name)
    return {server.position(version) for server in servers}


def told_at(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["at"])


def status(running: Agent) -> dict[str, Any]:
    (model,) = json.loads(running.get("/status.json")[1])["models"]
    return dict(model)


@pytest.mark.landing
def test_a_good_delta_goes_first_to_one_and_then_to_all(
    published: Published, servers: list[Server], golden: Path
) -> None:
    with canary(published, servers, golden) as running:
        for _ in range(4):
            newest = publish(published)
            wait(lambda: positions(servers, published) == {newest})  # noqa: B023
        log = read_log(published.model)
        assert log.approved == newest
        first = {event["replica"] for event in running.of("canary")}
        assert first == {servers[0].address}
        for at in (event["position"] for event in running.of("approved")[1:]):
            applied = [event for event in running.of("applied") if event["position"] == at]
            assert applied[0]["replica"] == servers[0].address
            approved = next(event for event in running.of("approved") if event["position"] == at)
            hold_moved = told_at(approved) - timedelta(
                seconds=0.25
            )  # at the earliest, and others see it at once
            assert all(told_at(event) >= hold_moved for event in applied[1:])
        wait(lambda: status(running)["canary"]["doing"] == f"all is approved, up to {newest}")
        assert f'canary_approved_position{{model="ranker"}} {float(newest)}' in running.get("/metrics")[1]
        assert f"approved up to {newest}" in running.get("/")[1]
        assert not running.of("rolled_back")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (all_nan, "of 69 values are NaN or infinite"),
        (lambda rows: rows + 2000, "is above 1000"),
        (lambda rows: rows * 50, "scores moved by"),
    ],
    ids=["nan", "range", "drift"],
)
def test_a_bad_delta_is_met_by_one_replica_and_rolled_back_by_itself(
    published: Published,
    servers: list[Server],
    golden: Path,
    change: Callable[[np.ndarray], np.ndarray],
    why: str,
) -> None:
    with canary(published, servers, golden) as running:
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        with Clients(servers) as clients:
            bad = publish(published, change)
            wait(lambda: read_log(published.model).hold.binds)
            back = published.position
            wait(lambda: positions(servers, published) == {back})
            wait(lambda: all(back in seen for seen in clients.seen.values()))
        met = {address for address, seen in clients.seen.items() if bad in seen}
        assert met <= {servers[0].address}, "the others never served it"
        assert all(seen <= {good, bad, back} for seen in clients.seen.values())
        (told,) = wait(lambda: running.of("rolled_back"))
        assert why in told["message"]
        found = status(running)
        reason = found["rollback"]["reason"]
        told_of = {"position": back, "back_to": good, "reason": reason, "is_canary": True}
        assert found["rollback"] == told_of
        assert why in found["rollback"]["reason"]
        assert 'rolled_back{model="ranker"} 1.0' in running.get("/metrics")[1]
        assert why in running.get("/")[1]
        assert why in export_model("history", published.model, "--json").document["events"][-1]["reason"]
        behind = publish(published)
        time.sleep(1.0)
        assert positions(servers, published) == {back}, f"{behind} waits for a person"
        assert len(running.of("rolled_back")) == 1
    publish(published, normal)
    with canary(published, servers, golden) as running:
        assert why in wait(lambda: status(running)["rollback"])["reason"], "a new agent knows it, too"
        assert export_model("resume", published.model, "--lift-only").code == 0
        wait(lambda: positions(servers, published) == {published.position})
        assert status(running)["rollback"] is None


@pytest.mark.landing
def test_an_agent_that_is_killed_while_it_judges_comes_to_the_same_end(
    published: Published, servers: list[Server], golden: Path
) -> None:
    """Also two agents at once do: one of them decides, and if it dies, the other."""
    with canary(published, servers, golden):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    version = int(read_log(published.model).base.path.name)
    bad = publish(published, all_nan)
    with ModelClient(servers[1].address, "ranker") as client:  # as the canary had, when it was killed
        client.predict({"up_to": [bad]}, signature="incremental_update", version=version)
    assert read_log(published.model).approved == good
    with canary(published, servers, golden) as one, canary(published, servers, golden) as other:
        wait(lambda: read_log(published.model).hold.binds)
        wait(lambda: positions(servers, published) == {published.position})
        rolled_back = wait(lambda: [agent_ for agent_ in (one, other) if agent_.of("rolled_back")])
        assert len(rolled_back) == 1
        assert read_log(published.model).newest.entry.back_to == good
        os.kill(rolled_back[0].process.pid, signal.SIGKILL)
        assert export_model("resume", published.model, "--lift-only").code == 0
        newest = publish(published, normal)
        wait(lambda: positions(servers, published) == {newest})


@pytest.mark.landing
def test_a_server_that_starts_behind_the_canary_stays_behind_it(
    published: Published, servers: list[Server], golden: Path
) -> None:
    """Its warm-up record obeys the hold; and a canary that does not come back is not waited for."""
    with canary(published, servers, golden, "--canary-seconds", "2") as running:
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        servers[0].kill()
        wait(lambda: [event for event in running.of("failed") if event["replica"] == servers[0].address])
        newest = publish(published)
        wait(lambda: positions(servers[1:], published) == {newest})
        assert running.of("canary")[-1]["replica"] == servers[1].address
        running.process.kill()
        running.process.wait(DEADLINE_S)
        held = publish(published)
        servers[0].start()
        assert positions(servers[:1], published) == {newest}
    with canary(published, servers, golden):
        wait(lambda: positions(servers, published) == {held})


@pytest.mark.landing
def test_a_person_decides_before_any_canary(
    published: Published, servers: list[Server], golden: Path
) -> None:
    with canary(published, servers, golden) as running:
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        publish(published)
        wait(lambda: positions(servers, published) == {published.position})
        done = export_model("rollback", published.model, "--to", good, "--reason", "a person's")
        assert done.code == 0, done.err
        back = published.position
        wait(lambda: positions(servers, published) == {back})
        publish(published, all_nan)
        time.sleep(1.0)
        assert positions(servers, published) == {back}
        assert status(running)["rollback"]["reason"] == "a person's"
        # The agent tells of the person's, if two of its looks saw it; a canary's would name another position.
        assert {event["position"] for event in running.of("rolled_back")} <= {good}
        publish(published, normal)
        assert export_model("resume", published.model).code == 0
        wait(lambda: positions(servers, published) == {published.position})


@pytest.mark.landing
def test_what_is_resumed_is_judged_anew(published: Published, servers: list[Server], golden: Path) -> None:
    """Each time a person asks for it, and no more often."""
    with canary(published, servers, golden) as running, Clients(servers) as clients:
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        bad = {publish(published, all_nan)}
        wait(lambda: len(running.of("rolled_back")) == 1)
        wait(lambda: positions(servers, published) == {published.position})
        for _ in range(2):  # the second time while the canary stands there, or has judged already
            assert export_model("resume", published.model).code == 0
        wait(lambda: len(running.of("rolled_back")) >= 2)
        assert export_model("resume", published.model, "--lift-canary").code == 1, "it is at work"
        bad |= {
            delta.end for delta in read_log(published.model).deltas if delta.entry.made is DeltaOrigin.RESUME
        }
        wait(lambda: positions(servers, published) == {published.position})
        assert {address for address, seen in clients.seen.items() if bad & seen} <= {servers[0].address}


def test_a_delta_that_no_replica_takes_is_quarantined_though_one_goes_first(
    published: Published, servers: list[Server], golden: Path
) -> None:
    with canary(published, servers, golden):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    newest = publish(published, normal)
    damaged = next(delta for delta in read_log(published.model).deltas if delta.end == newest)
    data = next(damaged.path.glob("delta.data-*"))
    content = data.read_bytes()
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with canary(published, servers, golden) as running:
        wait(lambda: status(running)["base_wanted"])
        assert {event["replica"] for event in running.of("refused")} == {one.address for one in servers}
        assert "no replica can go first" in status(running)["canary"]["doing"]
        assert status(running)["canary"]["waiting_s"] > 0
        assert not running.of("rolled_back")
    data.write_bytes(content)
    with canary(published, servers, golden):
        wait(lambda: positions(servers, published) == {newest})


@pytest.mark.landing
def test_what_was_wrong_before_is_not_rolled_back(
    published: Published, servers: list[Server], golden: Path
) -> None:
    with canary(published, servers, golden):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    impossible = json.loads(golden.read_text())
    impossible["requests"][0]["expect"]["user_rows"] = {"min": 10_000}
    golden.write_text(json.dumps(impossible))
    with canary(published, servers, golden) as running:
        newest = publish(published)
        wait(lambda: positions(servers, published) == {newest})
        assert "is below" in running.of("golden")[0]["message"]
        approved = next(event for event in running.of("approved") if event["position"] == newest)
        assert "passed 0 golden requests; 1 failed as before" in approved["message"]
        publish(published, all_nan)
        wait(lambda: running.of("rolled_back"))
        assert "NaN" in running.of("rolled_back")[0]["message"]
    publish(published, normal)


@pytest.mark.landing
def test_a_new_base_of_the_log_holds_what_is_approved(
    published: Published, servers: list[Server], golden: Path
) -> None:
    with canary(published, servers, golden):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    with Clients(servers) as clients:
        bad = publish(published, all_nan)
        assert export_model("merge", published.model, "--rebase").code == 0
        assert int(read_log(published.model).base.path.name) == good
        wait(lambda: positions(servers, published) == {good})
        with canary(published, servers, golden):
            wait(lambda: read_log(published.model).hold.binds)
            wait(lambda: positions(servers, published) == {published.position})
    assert {address for address, seen in clients.seen.items() if bad in seen} <= {servers[0].address}
    publish(published, normal)


@pytest.mark.landing
def test_a_new_base_that_answers_wrong_is_told_and_could_have_been_refused(
    published: Published, servers: list[Server], golden: Path
) -> None:
    """Servers load a new version by themselves: the canary tells at once, `--golden` keeps it from them."""
    base = [*published.arguments()[:-1], "--new-base=always", "--again"]
    with canary(published, servers, golden) as running:
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        wait(lambda: status(running)["canary"]["doing"].startswith("all is approved"))
        assert status(running)["canary"]["failing"] == ""
        published.change(all_nan)
        published.trainer.save()
        refused = export_model(*base, "--golden", golden)
        assert (refused.code, "values are NaN" in refused.err) == (6, True), refused.err
        assert export_model(*base).code == 0
        wait(lambda: status(running)["canary"]["failing"])
        (event,) = running.of("golden")
        assert "a new base, does not pass" in event["message"]
        assert "NaN" in event["message"]
        assert 'golden_failing{model="ranker"} 1.0' in running.get("/metrics")[1]
        assert "<h1>Golden requests fail at " in running.get("/")[1]
    with canary(published, servers, golden) as running:  # another one finds it, too
        wait(lambda: status(running)["canary"]["failing"])
        published.change(normal)
        published.trainer.save()
        assert export_model(*base, "--golden", golden).code == 0
        wait(lambda: positions(servers, published) == {read_log(published.model).at.position})
        wait(lambda: status(running)["canary"]["failing"] == "")
        newest = publish(published)
        wait(lambda: positions(servers, published) == {newest})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "requests"),
        (json.dumps({"requests": [{"instances": [{"user": 1}]}]}), "does not fit"),
        (json.dumps({"requests": [{**GOLDEN["requests"][0], "signature_name": "x"}]}), "no signature 'x'"),
    ],
)
def test_wrong_golden_requests_end_the_command_at_its_start(
    published: Published, golden: Path, content: str, message: str
) -> None:
    golden.write_text(content)
    options = ("--model-base-path", published.model, "--target", "h:1", "--canary", golden, "--port", 0)
    with process("agent", *options) as started:
        _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 2
    assert message in err


@pytest.mark.landing
def test_agents_that_see_one_replica_each_have_one_canary_together(
    published: Published, servers: list[Server], golden: Path
) -> None:
    """As beside each server in a pod: one decides for all, and another if its own server is gone."""
    with ExitStack() as stack:
        agents = [
            stack.enter_context(canary(published, [server], golden, "--canary-seconds", "2"))
            for server in servers
        ]
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
        deciding = [running for running in agents if running.of("approved")]
        assert len(deciding) == 1
        with Clients(servers) as clients:
            bad = publish(published, all_nan)
            wait(lambda: read_log(published.model).hold.binds)
            wait(lambda: positions(servers, published) == {published.position})
        assert sum(bad in seen for seen in clients.seen.values()) <= 1
        assert export_model("resume", published.model, "--lift-only").code == 0
        publish(published, normal)
        wait(lambda: positions(servers, published) == {published.position})
        gone = servers[agents.index(deciding[0])]
        gone.kill()
        newest = publish(published)
        wait(lambda: positions([s for s in servers if s is not gone], published) == {newest})
        gone.start()
        wait(lambda: positions(servers, published) == {newest})


def test_a_canary_that_hangs_gives_way(published: Published, servers: list[Server], golden: Path) -> None:
    """After seconds of silence, however long an update may take."""
    with canary(published, servers, golden, "--canary-seconds", "2"):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    with canary(published, servers, golden, "--canary-seconds", "100000", "--deadline", "30") as running:
        known = publish(published, normal)
        wait(lambda: positions(servers, published) == {known})
        os.kill(servers[0].process.pid, signal.SIGSTOP)
        try:
            newest = publish(published)
            wait(lambda: positions(servers[1:], published) == {newest})
        finally:
            os.kill(servers[0].process.pid, signal.SIGCONT)
        wait(lambda: positions(servers, published) == {newest})
        assert not running.of("rolled_back")
        (hanging,) = (event for event in running.of("canary") if "hangs" in event["message"])
        assert hanging["replica"] == servers[0].address


@pytest.mark.landing
def test_a_canary_that_is_gone_when_it_is_sent_gives_way_at_once(
    published: Published, servers: list[Server], golden: Path
) -> None:
    """Whoever waits for it waits for ever."""
    with canary(published, servers, golden):
        good = publish(published, normal)
        wait(lambda: positions(servers, published) == {good})
    with canary(published, servers, golden, "--canary-seconds", "100000") as running:
        servers[0].kill()
        newest = publish(published)
        wait(lambda: positions(servers[1:], published) == {newest})
        assert servers[0].address in {event["replica"] for event in running.of("failed")}
        servers[0].start()
        wait(lambda: positions(servers, published) == {newest})
        assert not running.of("rolled_back")


@pytest.mark.landing
@pytest.mark.parametrize(
    "killed", ["agent", pytest.param("first", marks=thorough), pytest.param("second", marks=thorough)]
)
def test_whoever_is_killed_no_two_replicas_serve_what_is_bad(
    published: Published, servers: list[Server], golden: Path, killed: str
) -> None:
    """At any moment from the publication of a bad delta to its rollback; each comes back at once."""
    dice = random.Random(killed)
    with ExitStack() as stack, Clients(servers) as clients:
        running = stack.enter_context(canary(published, servers, golden))
        for _ in range(2):
            good = publish(published, normal)
            wait(lambda: positions(servers, published) == {good})  # noqa: B023
            bad = publish(published, all_nan)
            time.sleep(dice.uniform(0, 0.8))
            if killed == "agent":
                running.process.kill()
                running = stack.enter_context(canary(published, servers, golden))
            else:
                server = servers[0 if killed == "first" else 1]
                server.kill()
                server.start()
            wait(lambda: read_log(published.model).hold.binds)
            wait(lambda: positions(servers, published) == {published.position})
            log = read_log(published.model)
            assert log.newest.entry.back_to == good
            met = {address for address, seen in clients.seen.items() if bad in seen}
            assert met <= {servers[0].address}
            assert export_model("resume", published.model, "--lift-only").code == 0
