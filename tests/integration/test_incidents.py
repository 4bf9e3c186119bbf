"""Incidents, provoked with real processes: everybody is told the same, and what is printed can be typed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from exporter.bundle import mapped_tables
from exporter.publish import commit
from exporter.publish.delta_log import read_log
from tests.support.agents import Published, wait
from tests.support.commands import export_model
from tests.support.damage import flip
from tests.support.incidents import HAS_PROMTOOL, World, firing, type_it, world

pytestmark = pytest.mark.landing
USERS = list(range(23))
GOLDEN = {
    "requests": [
        {
            "name": "all users",
            "inputs": {"user": USERS, "item": USERS[:1]},
            "expect": {"user_rows": {"min": -1000, "max": 1000, "drift": 3}},
        }
    ]
}
EXIT_CODES = {0, 3, 6, 7}
"""Of commands that look: they found something wrong, as they should."""


@dataclass(frozen=True)
class Incident:
    """What happens, and what everybody is told of it: `code` is the worst finding's, `level` its colour."""

    provoke: Callable[[World], None]
    code: str
    level: str
    headline: str
    ready: int = 200
    fresh: int = 200
    metric: tuple[str, float] | None = None
    alerts: frozenset[str] = frozenset()
    event: str = ""
    options: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    mend: Callable[[World], None] | None = None
    doctor: str = ""
    """The code that the doctor finds; as the page's if empty."""


def server_dies(world: World) -> None:
    world.servers[0].kill()


def server_hangs(world: World) -> None:
    os.kill(world.servers[0].process.pid, signal.SIGSTOP)


def server_goes_on(world: World) -> None:
    os.kill(world.servers[0].process.pid, signal.SIGCONT)


def is_held(world: World) -> None:
    before = world.published.position
    world.published.publish()
    assert export_model("rollback", world.published.model, "--to", before, "--reason", "a test").code == 0
    world.published.publish()


def change(world: World, made: Callable[[Any], Any]) -> None:
    world.published.change(made)
    world.published.publish()


def bias(world: World) -> None:
    change(world, lambda rows: rows + 900)


def nan(world: World) -> None:
    change(world, lambda rows: np.full_like(rows, np.nan))


def damage(world: World) -> None:
    """What is new is damaged before servers see it."""
    for server in world.servers:
        os.kill(server.process.pid, signal.SIGSTOP)
    end = world.published.publish()
    delta = next(one for one in read_log(world.published.model).deltas if one.end == end)
    flip(next(delta.path.glob("delta.data-*")))
    for server in world.servers:
        os.kill(server.process.pid, signal.SIGCONT)


def nothing_comes(world: World) -> None:
    time.sleep(2.0)


def overlay_fills(world: World) -> None:
    session = world.published.trainer.session
    assert session is not None
    session.variables.touched["net/users"].update(USERS[:19])
    world.published.publish()


def volume_goes(world: World) -> None:
    model = world.published.model
    model.rename(model.with_name("away"))


def volume_returns(world: World) -> None:
    model = world.published.model
    model.with_name("away").rename(model)


def clock_differs(seconds: float) -> Callable[[World], None]:
    """A publication whose time is another one, as of a machine whose clock is wrong."""

    def provoke(world: World) -> None:
        real = commit._complete

        def wrong(*arguments: Any) -> Any:
            *before, now, identity = arguments
            return real(*before, now + seconds, identity)

        with patch.object(commit, "_complete", wrong):
            world.published.publish()

    return provoke


INCIDENTS = {
    "a server is dead": Incident(
        server_dies,
        "down",
        "bad",
        "1 of 2 replicas is down",
        ready=503,
        fresh=503,
        metric=("replica_up", 0),
        alerts=frozenset({"ReplicaDown"}),
    ),
    "a server is paused": Incident(
        server_hangs,
        "down",
        "bad",
        "1 of 2 replicas is down",
        ready=503,
        fresh=503,
        metric=("replica_up", 0),
        alerts=frozenset({"ReplicaDown"}),
        options=("--deadline", "1"),
        mend=server_goes_on,
    ),
    "a person holds the model": Incident(
        is_held,
        "rolled-back",
        "bad",
        "Rolled back to the values of",
        metric=("rolled_back", 1),
        alerts=frozenset({"RolledBack", "PublicationsWait"}),
        event="rolled_back",
    ),
    "a canary meets a bias": Incident(
        bias,
        "rolled-back",
        "bad",
        "Rolled back to the values of",
        metric=("rolled_back", 1),
        alerts=frozenset({"RolledBack"}),
        event="rolled_back",
        options=("--canary", "GOLDEN"),
    ),
    "a canary meets NaN": Incident(
        nan,
        "rolled-back",
        "bad",
        "Rolled back to the values of",
        metric=("rolled_back", 1),
        alerts=frozenset({"RolledBack"}),
        event="rolled_back",
        options=("--canary", "GOLDEN"),
    ),
    "a delta is damaged": Incident(
        damage,
        "damaged",
        "bad",
        "is damaged, and every replica refuses it",
        fresh=503,
        metric=("quarantined_deltas", 1),
        alerts=frozenset({"BaseWanted", "ReplicaNotUpdatable"}),
        event="damaged",
        options=("--fresh-within", "1"),
    ),
    "the publisher is silent": Incident(
        nothing_comes,
        "publisher-silent",
        "warning",
        "Nothing was published for",
        metric=("publisher_silent", 1),
        alerts=frozenset({"PublisherSilent"}),
        event="silent",
        options=("--every", "publication=1"),
    ),
    "the publisher's clock is ahead": Incident(
        clock_differs(1200),
        "clock",
        "warning",
        "The publisher's clock is 20 min ahead of this machine's",
        metric=("publisher_clock_ahead_seconds", 1200),
        alerts=frozenset({"ClockSkew"}),
    ),
    "the publisher's clock is behind": Incident(
        clock_differs(-1200),
        "clock",
        "warning",
        "The publisher's clock is 20 min behind this machine's",
        metric=("publisher_clock_ahead_seconds", -1200),
        alerts=frozenset({"ClockSkew"}),
    ),
    "an overlay is nearly full": Incident(
        overlay_fills,
        "overlay",
        "warning",
        "The overlay of mapped tables is",
        metric=("overlay_ratio", 0.95),
        alerts=frozenset({"OverlayFills"}),
        publish=("--map-tables", "--overlay-rows", "20"),
    ),
    "the volume is gone": Incident(
        volume_goes,
        "unseen",
        "bad",
        "What is published cannot be seen",
        fresh=503,
        metric=("published_visible", 0),
        alerts=frozenset({"ModelDirectoryUnseen"}),
        mend=volume_returns,
    ),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_everybody_is_told_the_same(name: str, tmp_path: Path) -> None:
    incident = INCIDENTS[name]
    golden = tmp_path / "golden.json"
    golden.write_text(json.dumps(GOLDEN))
    options = [str(golden) if option == "GOLDEN" else option for option in incident.options]
    with patch.object(mapped_tables, "LEAST_BYTES", 1):
        published = Published(tmp_path, ("--add=stamp", *incident.publish))
    with world(published, tmp_path, *options, already=incident.code) as there:
        if incident.provoke is not nothing_comes:
            there.published.publish()
            wait(lambda: not there.findings)
        incident.provoke(there)
        try:
            is_told(there, incident, tmp_path)
        finally:
            if incident.mend is not None:
                incident.mend(there)


def is_told(there: World, incident: Incident, directory: Path) -> None:
    wait(lambda: incident.code in there.codes())
    worst = wait(lambda: next(iter(there.findings), None))
    assert (worst["code"], worst["level"]) == (incident.code, incident.level)
    assert re.search(rf"<h1>[^<]*{re.escape(incident.headline)}", there.page.replace("&#39;", "'"))
    assert f'<header class="{incident.level}">' in there.page
    wait(lambda: there.agent.get("/readyz")[0] == incident.ready)
    wait(lambda: there.agent.get("/freshz")[0] == incident.fresh)
    assert there.agent.get("/healthz")[0] == 200
    if incident.metric is not None:
        name, value = incident.metric
        wait(lambda: any(found == pytest.approx(value, rel=0.1) for found in there.metric(name)))
    if HAS_PROMTOOL:
        assert incident.alerts <= firing(there.agent.get("/metrics")[1], directory)
    if incident.event:
        told = wait(lambda: [event for event in there.events if event["what"] == incident.event])
        assert told[0]["model"] == "ranker"
    doctor = there.doctor()
    found = json.loads(doctor.out)["findings"] if doctor.out else []
    codes = {finding["code"] for finding in found}
    of_agent = [one for one in found if (one["check"], one["code"]) == ("agent", incident.code)]
    assert all(bool(one["cause"]) == bool(worst["details"]) for one in of_agent), "its details, too"
    assert (incident.doctor or incident.code) in codes or incident.code == "unseen", doctor.err
    assert doctor.code == (
        0 if incident.level == "warning" else doctor.code
    ) and doctor.code in EXIT_CODES | {5}
    for finding in there.findings:
        assert finding["command"], finding
        if not finding["command"].startswith("timedatectl"):
            done = type_it(finding["command"], directory)
            assert done.returncode in EXIT_CODES | {5, 1}, f"{finding['command']}: {done.stderr}"
            assert "Traceback" not in done.stderr
            assert "hint:  see " not in done.stderr, "it is no wrong use"


def test_an_agent_that_is_dead_is_told_by_the_doctor_and_by_an_alert(tmp_path: Path) -> None:
    published = Published(tmp_path)
    with world(published, tmp_path) as there:
        assert there.doctor().code == 0
        there.agent.process.kill()
        there.agent.process.wait(60)
        doctor = there.doctor()
        assert doctor.code == 7
        found = [each for each in json.loads(doctor.out)["findings"] if each["level"] == "wrong"]
        (finding,) = found
        assert finding["code"] == "agent-down"
        assert type_it(finding["command"], tmp_path).returncode != 0, "it says so, too"
        version = int(read_log(published.model).base.path.name)
        assert all(server.position(version) == published.position for server in there.servers), "as they were"
