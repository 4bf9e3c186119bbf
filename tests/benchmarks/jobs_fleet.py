"""An agent and hundreds of servers, as real processes; and hundreds of copies of one bucket."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.publish.delta_log import list_deltas, log_path, read_log
from exporter.storage.layout import HEAD_FILE
from exporter.transfer.pull import LocalCopy
from tests.benchmarks.fleet_of_servers import Fleet, fleet_of_servers
from tests.benchmarks.job import Timer
from tests.support.agents import Agent, process, wait
from tests.support.cpu_time import CpuTimes
from tests.support.directory_store import BUCKET, directory_store
from tests.support.http_proxy import Traffic
from tests.support.logs import Trainer
from tests.support.remote_models import incr, went_on
from tests.support.setting import FIRST, followed

_PAUSE_S = (0.7, 1.3)
"""Between publications, by chance: in step with nothing that the agent does each second, or each five."""
_AT_ONCE = 16
_URL = f"s3://{BUCKET}/model"


@dataclass
class World:
    """A trainer, what is published of it, the servers and their agent."""

    trainer: Trainer
    place: str
    model: Path
    fleet: Fleet
    agent: Agent
    chance: random.Random

    def publish(self, times: int) -> dict[int, float]:
        """Publish so many deltas; when each position was published."""
        published = {}
        for _ in range(times):
            time.sleep(self.chance.uniform(*_PAUSE_S))
            position = self.trainer.step + 1
            went_on(self.trainer, position)
            done = incr(self.trainer, self.place)
            assert (done.code, done.document["position"]) == (0, position), done.err
            published[position] = self._published_at(position)
        return published

    def _published_at(self, position: int) -> float:
        """When the delta was finished, and in a store when its head named it."""
        if self.place == _URL:
            return (self.model / HEAD_FILE).stat().st_mtime
        deltas = list_deltas(log_path(self.model, FIRST))
        return next(d.manifest.created.timestamp() for d in deltas if d.end == position)

    def await_all(self, first: int = 0) -> None:
        """Until the servers from `first` on are at the newest position."""
        wait(lambda: self.fleet.least(first) == self.trainer.step)

    def delays(self, published: Mapping[int, float], servers: Iterable[int]) -> list[list[float]]:
        """For each publication the seconds until each of the servers was there."""
        report = self.fleet.report()
        for arrivals in report:
            passed = [position for position, _ in arrivals]
            assert passed == sorted(set(passed)), "a position comes once, and never goes back"
        first = [report[number] for number in servers]
        return [
            [next(when for end, when in arrivals if end >= position) - at for arrivals in first]
            for position, at in published.items()
        ]

    def require_right(self) -> None:
        """The agent says of each server what that says itself: it answers from the newest publication."""
        wait(lambda: not json.loads(self.agent.get("/status.json")[1])["findings"], 30)
        (told,) = json.loads(self.agent.get("/status.json")[1])["models"]
        positions = {each["address"]: each["versions"][0]["position"] for each in told["replicas"]}
        assert positions == dict.fromkeys(self.fleet.addresses, self.trainer.step)

    def burdens(self) -> dict[str, int]:
        """The agent's memory in bytes, and its threads."""
        lines = Path(f"/proc/{self.agent.process.pid}/status").read_text().splitlines()
        found = dict(line.split(":\t", 1) for line in lines)
        return {"memory": int(found["VmRSS"].split()[0]) << 10, "threads": int(found["Threads"])}


@contextmanager
def _world(directory: Path, targets: int, one_way_s: float, *pull: object) -> Iterator[World]:
    """An agent with so many servers, all of which are at the newest position."""
    place, model = (_URL, directory.parent / "copy" / "model") if pull else (str(directory / "model"),) * 2
    trainer = followed(directory)
    went_on(trainer, FIRST + 1)
    assert incr(trainer, place).code == 0
    with ExitStack() as stack:
        fleet = stack.enter_context(fleet_of_servers(directory / "model", targets, one_way_s))
        told = [part for address in fleet.addresses for part in ("--target", address)]
        arguments = ("agent", "--model-base-path", model, *told, "--port", "0", "--json", *pull)
        agent = Agent(stack.enter_context(process(*arguments)))
        world = World(trainer, place, directory / "model", fleet, agent, random.Random(0))
        world.await_all()
        world.require_right()
        yield world


def follow(
    timer: Timer, directory: str, targets: str, publications: str, idle_s: str, one_way_s: str
) -> dict[str, Any]:
    """From a publication in a directory to the servers; what the agent takes; then with a dead and a slow
    tenth.

    Fails if a server lacks what was published at the end, goes back, or is told a position twice.
    """
    count, times, way = int(targets), int(publications), float(one_way_s)
    with timer, _world(Path(directory), count, way) as world:
        few, tenth = max(1, times // 3), max(2, count // 10)
        well = range(tenth, count)
        found: dict[str, Any] = _measured(world, times, float(idle_s))
        world.fleet.tell("stop", 0, tenth // 2)
        world.fleet.tell("hang", tenth // 2, tenth)
        time.sleep(2.0)
        published = world.publish(few)
        world.await_all(tenth)
        found["dead"] = world.delays(published, well)
        world.fleet.tell("start", 0, tenth // 2)
        world.fleet.tell("late", 0, tenth, 1.0)
        world.await_all()
        published = world.publish(few)
        world.await_all()
        found["slow"] = world.delays(published, well)
        found["slow ones"] = world.delays(published, range(tenth))
        world.fleet.tell("on time")
        world.require_right()
        return found


def alone(
    timer: Timer, directory: str, targets: str, publications: str, idle_s: str, one_way_s: str
) -> dict[str, Any]:
    """From a publication in a directory to the servers, and what the agent takes."""
    with timer, _world(Path(directory), int(targets), float(one_way_s)) as world:
        return _measured(world, int(publications), float(idle_s))


def pulled(
    timer: Timer,
    directory: str,
    targets: str,
    publications: str,
    idle_s: str,
    one_way_s: str,
    store_s: str,
) -> dict[str, Any]:
    """From a publication in a store to the servers of an agent that fetches it; and the agent's requests."""
    place = Path(directory) / "store"
    with timer, ExitStack() as stack:
        publisher, _ = stack.enter_context(directory_store(place, float(store_s)))
        environment, traffic = stack.enter_context(directory_store(place, float(store_s)))
        os.environ.update(environment)
        with _world(place, int(targets), float(one_way_s), "--pull", _URL) as world:
            os.environ.update(publisher)
            return _measured(world, int(publications), float(idle_s), traffic)


def _measured(world: World, times: int, idle_s: float, traffic: Traffic | None = None) -> dict[str, Any]:
    traffic, everyone = traffic or Traffic(), range(len(world.fleet.ports))
    pids = {"agent": world.agent.process.pid}
    traffic.requests.clear()
    before = CpuTimes.of(pids)
    time.sleep(idle_s)
    idle, asked = before.since()["agent"], len(traffic.requests) / idle_s
    traffic.requests.clear()
    before, began = CpuTimes.of(pids), time.monotonic()
    published = world.publish(times)
    world.await_all()
    busy, took = before.since()["agent"], time.monotonic() - began
    world.require_right()
    return {
        "delays": world.delays(published, everyone),
        "idle": idle,
        "a publication": max(0.0, (busy - idle) * took / times),
        "requests while idle": asked,
        "requests of a publication": max(0.0, (len(traffic.requests) - asked * took) / times),
        **world.burdens(),
    }


def copies(timer: Timer, directory: str, copies: str, watch_s: str) -> dict[str, Any]:
    """What so many copies of one bucket ask for: at first, for a delta, and while nothing is new.

    Each is requests by kinds that stores charge for. `every 1 s` and `every 10 s`: what one copy asks
    for in a second if it looks so often. Fails if a copy lacks a byte.
    """
    place, beside, count = Path(directory) / "store", Path(directory), int(copies)
    with timer, ExitStack() as stack:
        environment, traffic = stack.enter_context(directory_store(place))
        pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        os.environ.update(environment)
        trainer = followed(place)
        went_on(trainer, FIRST + 1)
        assert incr(trainer, _URL).code == 0
        models = [beside / "copies" / str(number) / "model" for number in range(count)]
        here = [LocalCopy(_URL, model, prune=True) for model in models]
        found: dict[str, Any] = {}
        for what in ("first", "delta"):
            if what == "delta":
                went_on(trainer, trainer.step + 1)
                assert incr(trainer, _URL).code == 0
            traffic.requests.clear()
            assert {done.position for done in pool.map(LocalCopy.update, here)} == {trainer.step}
            found[what] = _charged(traffic, count)
        served = _files(place / "model")
        assert all(found.items() >= served.items() for found in pool.map(_files, models))
        watches = {every: stack.enter_context(directory_store(place)) for every in (1, 10)}
        watching = []
        for every, (environment, traffic) in watches.items():
            os.environ.update(environment)
            copy = LocalCopy(_URL, beside / "watching" / str(every) / "model", prune=True)
            copy.update()
            traffic.requests.clear()
            watching.append(pool.submit(_watch, copy, every, float(watch_s)))
        for each in watching:
            each.result()
        for every, (_, traffic) in watches.items():
            found[f"every {every} s"] = _charged(traffic, float(watch_s))
        return found


def _watch(copy: LocalCopy, every_s: float, watch_s: float) -> None:
    for _ in range(round(watch_s / every_s)):
        time.sleep(every_s)
        assert copy.update().fetched == ()


def _charged(traffic: Traffic, among: float) -> dict[str, float]:
    """Requests by what stores charge for: listings as writes, reads; and the bytes that came."""
    listings = sum("list-type" in path for _, path, _ in traffic.requests)
    writes = sum(method in ("PUT", "POST") for method, _, _ in traffic.requests)
    reads = sum(method in ("GET", "HEAD") for method, _, _ in traffic.requests) - listings
    kinds = {"listings": listings, "writes": writes, "reads": reads}
    bytes_ = sum(size for _, _, size in traffic.requests)
    return {name: value / among for name, value in {**kinds, "bytes": bytes_}.items()}


def _files(model: Path) -> dict[str, bytes]:
    """What is published, by path."""
    log = read_log(model)
    roots = [log.base.path, *(delta.path for delta in log.deltas)]
    files = (file for root in roots for file in root.rglob("*") if file.is_file())
    return {file.relative_to(model).as_posix(): file.read_bytes() for file in files}
