"""Pods that are ready: what all replicas share takes none of them away, in each layout of deploy/."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exporter.publish.delta_log import read_log
from exporter.transfer.pull import pull
from tests.support.agents import Agent, Published, Server, agent, wait
from tests.support.budget import thorough
from tests.support.commands import export_model
from tests.support.deployed import DEPLOY, agent_of, kserve_pod, pods_of
from tests.support.key_pairs import key_pair
from tests.support.object_stores import BASE, Bucket

OWN = re.compile("--(model-base-path|pull|trust|target|host|port|json)")
"""Options that name a pod's places and ports; the test has its own."""
OFTEN = ("--poll-seconds", "0.2", "--fresh-within", "0.1")


@dataclass
class Pod:
    """A server, and the agent that deploy/ puts beside it, with the options that it has there."""

    container: dict[str, Any]
    base: Path
    url: str
    trusted: str
    stack: ExitStack
    agents: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.stack.push(self.agents)
        self.server = Server(self.base, stack=self.stack).start()
        self.start_agent()

    def start_agent(self) -> None:
        given = [word for word in self.container["args"] if not OWN.match(word)]
        pulls = ["--pull", self.url, "--trust", self.trusted] if self.url else []
        assert bool(self.url) == any(word.startswith("--trust=") for word in self.container["args"])
        more = (*given, *pulls, *OFTEN)
        self.agent: Agent = self.agents.enter_context(agent(self.base, self.server.address, more=more))

    def restart_agent(self) -> None:
        self.agents.close()
        self.start_agent()

    @property
    def is_ready(self) -> bool:
        return self.agent.get(self.container["readinessProbe"]["httpGet"]["path"])[0] == 200


@dataclass
class Layout:
    """Pods, and how what is published gets to where they look for it; what is new is damaged on the way if so
    asked.
    """

    pods: list[Pod]
    deliver: Callable[[bool], None]

    def count(self) -> int:
        """How many pods are ready."""
        return sum(pod.is_ready for pod in self.pods)

    def all_ready(self) -> bool:
        return self.count() == len(self.pods)

    def told(self, what: str) -> bool:
        """True if every agent has written such an event."""
        return all(pod.agent.of(what) for pod in self.pods)


def on_a_volume(container: dict[str, Any], published: Published, stack: ExitStack) -> Layout:
    volume = published.directory / "volume" / "ranker"
    shutil.copytree(published.model, volume)

    def deliver(is_damaged: bool) -> None:
        for delta in read_log(published.model).deltas:
            there = volume / delta.path.relative_to(published.model)
            if not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                arriving = shutil.copytree(delta.path, volume / ".arriving")
                for data in arriving.glob("delta.data-*") if is_damaged else ():
                    data.write_bytes(damaged(data.read_bytes()))
                arriving.rename(there)

    return Layout([Pod(container, volume, "", "", stack) for _ in range(2)], deliver)


def in_a_bucket(container: dict[str, Any], published: Published, stack: ExitStack, bucket: Bucket) -> Layout:
    def deliver(is_damaged: bool) -> None:
        """As `push` does."""
        assert export_model("push", published.model, bucket.url("whole")).code == 0
        sent = {key.replace("whole", BASE): content for key, content in bucket.keys("whole").items()}
        new = sent.items() - bucket.keys(BASE).items()
        for key, content in sorted(new, key=lambda each: each[0].endswith("/head.json")):
            is_data = "/delta.data-" in key
            bucket.put(key, damaged(content) if is_damaged and is_data else content)

    deliver(False)
    copies = [published.directory / f"pod{number}" / "ranker" for number in range(2)]
    for copy in copies:
        pull(bucket.url(BASE), copy)
    _, trusted = key_pair(published.directory.parent)
    return Layout([Pod(container, copy, bucket.url(BASE), str(trusted), stack) for copy in copies], deliver)


def damaged(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.fixture(params=["kubernetes", "kubernetes-bucket", pytest.param("kserve", marks=thorough)])
def layout(request: pytest.FixtureRequest, published: Published) -> Iterator[Layout]:
    with ExitStack() as stack:
        if request.param == "kubernetes":
            (pod,) = pods_of(DEPLOY / "kubernetes/server.yaml")
            yield on_a_volume(agent_of(pod), published, stack)
        elif request.param == "kserve":
            yield on_a_volume(agent_of(kserve_pod()), published, stack)
        else:
            (pod,) = pods_of(DEPLOY / "kubernetes-bucket/server-with-copy.yaml")
            yield in_a_bucket(agent_of(pod), published, stack, request.getfixturevalue("bucket"))


@pytest.fixture
def published(tmp_path: Path) -> Published:
    private, _ = key_pair(tmp_path)
    return Published(tmp_path / "world", options=("--sign-key", str(private)))


def test_a_damaged_delta_and_a_directory_that_cannot_be_read_take_no_pod_away(
    layout: Layout, published: Published
) -> None:
    wait(layout.all_ready)
    good = published.publish()
    layout.deliver(False)
    version = int(read_log(published.model).base.path.name)
    wait(lambda: all(pod.server.position(version) == good for pod in layout.pods))

    published.publish()
    layout.deliver(True)
    trouble = "failed" if layout.pods[0].url else "refused"  # a copy takes nothing that is damaged
    wait(lambda: layout.told(trouble))
    assert layout.count() == 2
    if trouble == "refused":
        wait(lambda: all(pod.agent.get("/freshz")[0] == 503 for pod in layout.pods))
        assert layout.count() == 2

    for pod in layout.pods:
        pod.restart_agent()
    wait(layout.all_ready)
    for pod in layout.pods:
        pod.server.kill()
    wait(lambda: layout.count() == 0)
    for pod in layout.pods:
        pod.server.start()
    wait(layout.all_ready)

    for base in {pod.base for pod in layout.pods}:
        base.rename(base.with_name("away"))
        base.touch()
    wait(lambda: layout.told("unseen"))
    assert layout.count() == 2
    assert all("is not a directory" in pod.agent.get("/freshz")[1] for pod in layout.pods)
    for pod in layout.pods:
        pod.restart_agent()
    wait(layout.all_ready)


@pytest.mark.landing
def test_a_server_that_starts_is_ready_once_it_is_where_the_others_are(published: Published) -> None:
    """Without its warm-up it is available before that."""
    newest = published.publish()
    version = int(read_log(published.model).base.path.name)
    never = ("--pace", "step=1000000000")
    with ExitStack() as stack:
        server = Server(published.model, stack=stack, more=("--enable_model_warmup=false",)).start()
        with agent(published.model, server.address, more=never) as running:
            wait(lambda: f"is at {version}, and has not caught up" in running.get("/readyz")[1])
            assert running.get("/readyz")[0] == 503
        with agent(published.model, server.address) as running:
            wait(lambda: running.get("/readyz")[0] == 200)
            assert server.position(version) == newest
        with agent(published.model, server.address, more=never) as running:
            wait(lambda: running.get("/readyz")[0] == 200)
            newest = published.publish()
            wait(lambda: f'published_position{{model="ranker"}} {newest}.0' in running.get("/metrics")[1])
            assert running.get("/readyz")[0] == 200, "what is published later is no reason"
