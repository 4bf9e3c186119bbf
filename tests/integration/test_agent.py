"""`serve-model agent` beside real servers: some restart, hang, refuse or vanish."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tensorflow as tf

from exporter.errors import CallFailed
from exporter.publish.delta_log import read_log
from serving.client import ModelClient
from serving.incremental_status import read_incremental_status
from tests.integration.chaos_world import write_graph
from tests.support import bundles
from tests.support.commands import export_model
from tests.support.numpy_trainer import NumpyTrainer

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120.0
T = TypeVar("T")


@dataclass
class Published:
    """A trainer, and what is published of it by real commands with `options`."""

    directory: Path
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.model, self.graph = self.directory / "ranker", self.directory / "graph.meta"
        write_graph(self.graph)
        self.trainer = NumpyTrainer(self.directory / "train", 0)
        self.trainer.begin(restores=False, saver_first=False, is_live=False)
        self.publish()

    @property
    def position(self) -> int:
        return read_log(self.model).at.position

    def publish(self, *more: str) -> int:
        """Train on and publish; the newest position."""
        self.trainer.train()
        self.trainer.increment()
        tensors = ("user_rows", "item_rows", "dense")
        done = export_model(
            *("--ckpt-dir", self.trainer.directory, "--out", self.model, "--model", self.graph),
            *("--input", "user=user:0", "--input", "item=item:0"),
            *[part for name in tensors for part in ("--output", f"{name}={name}:0")],
            *("--rename", r"s/(.*)=net/\1", "--incr", *self.options, *more),
        )
        assert done.code == 0, done.err
        return self.position


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "serving.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=DEADLINE_S)


@dataclass
class Server:
    """A `serve-model run` that can be killed and started again on its port."""

    base: Path
    port: int = 0
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> Server:
        arguments = ("run", self.base, "--port", self.port, "--poll-seconds", "0.1", "--json")
        self.process = self.stack.enter_context(process(*arguments))
        self.port = json.loads(_document(self.process))["port"]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def position(self, version: int) -> int:
        with ModelClient(self.address, self.base.name) as client:
            found = read_incremental_status(client, version)
        assert found is not None
        return found.position


@dataclass
class Agent:
    """A `serve-model agent --json`, its events as they come, and its port."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self.port = wait(lambda: next((e["port"] for e in self.events if e["what"] == "started"), None))

    def of(self, what: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["what"] == what]

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))


@contextmanager
def agent(model: Path, *targets: str, more: tuple[str, ...] = ()) -> Iterator[Agent]:
    wanted = [part for target in targets for part in ("--target", target)]
    arguments = ("agent", "--model-base-path", model, *wanted, "--port", "0", "--json", *more)
    with process(*arguments, "--refresh-seconds", "0.5", "--deadline", "5") as started:
        yield Agent(started)


def wait(happened: Callable[[], T], seconds: float = DEADLINE_S) -> T:
    """The first true answer; calls that fail are made again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if found := happened():
                return found
        except CallFailed:
            pass
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s")


def _document(started: subprocess.Popen[str]) -> str:
    """The first JSON document on stdout, which takes several lines."""
    assert started.stdout is not None
    lines = []
    for line in started.stdout:
        lines.append(line)
        if line.rstrip() == "}":
            return "".join(lines)
    assert started.stderr is not None
    raise AssertionError(started.stderr.read())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def servers(published: Published) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        servers = [Server(published.model, stack=stack) for _ in range(2)]
        yield [server.start() for server in servers]


def base_of(published: Published) -> int:
    return int(read_log(published.model).base.path.name)


def test_every_replica_follows_and_one_that_hangs_holds_back_nobody(
    published: Published, servers: list[Server]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = f"127.0.0.1:{silent.getsockname()[1]}"
        with agent(published.model, hung, *(server.address for server in servers)) as running:
            for _ in range(5):
                newest = published.publish()
                version = base_of(published)
                wait(lambda: all(server.position(version) == newest for server in servers))  # noqa: B023
            served = [event["position"] for event in running.of("applied") if event["replica"] != hung]
            assert max(served) == newest
            assert all(event["behind_seconds"] >= 0 for event in running.of("applied"))
            wait(lambda: [event for event in running.of("failed") if event["replica"] == hung])
            status, text = running.get("/readyz")
            assert status == 503
            assert f"ranker on {hung} does not answer" in text
            assert text.count("\n") == 1, "the others are fresh"


def test_metrics_status_and_page_tell_where_each_replica_stands(
    published: Published, servers: list[Server]
) -> None:
    with agent(published.model, servers[0].address) as running:
        newest = published.publish()
        wait(lambda: running.get("/readyz")[0] == 200 and servers[0].position(base_of(published)) == newest)
        version, replica = base_of(published), servers[0].address
        _, metrics = running.get("/metrics")
        labels = f'{{model="ranker",replica="{replica}",version="{version}"}}'
        assert f"export_model_agent_position{labels} {float(newest)}" in metrics
        assert f"export_model_agent_behind_deltas{labels} 0.0" in metrics
        assert "export_model_agent_commit_to_served_seconds_bucket" in metrics
        _, text = running.get("/status.json")
        (model,) = json.loads(text)["models"]
        assert model["position"] == newest
        assert model["replicas"][0]["versions"][0]["position"] == newest
        _, page = running.get("/")
        assert replica in page
        assert "Every replica is fresh" in page
        assert "<script" not in page
        assert running.get("/healthz") == (200, "ok\n")
        assert running.get("/nowhere")[0] == 404


def test_a_server_and_an_agent_that_are_killed_go_on_where_they_should(
    published: Published, servers: list[Server]
) -> None:
    version = base_of(published)
    with agent(published.model, *(server.address for server in servers)) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        servers[1].kill()
        newest = published.publish()
        wait(lambda: servers[0].position(version) == newest)
        servers[1].start()
        wait(lambda: servers[1].position(version) == newest)
        running.process.kill()
    newest = published.publish()
    with (
        agent(published.model, *(server.address for server in servers)) as one,
        agent(published.model, *(server.address for server in servers)) as other,
    ):
        wait(lambda: all(server.position(version) == newest for server in servers))
        newest = published.publish()
        wait(lambda: all(server.position(version) == newest for server in servers))
        for running in (one, other):  # what one applied is no trouble for the other
            wait(lambda: running.get("/readyz")[0] == 200)  # noqa: B023
            assert not running.of("refused")
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(DEADLINE_S) == 0


def test_a_hold_is_kept_and_a_new_base_is_followed(published: Published, servers: list[Server]) -> None:
    version, held = base_of(published), published.position
    server = servers[0]
    with agent(published.model, server.address) as running:
        wait(lambda: running.get("/readyz")[0] == 200)
        newest = published.publish()
        wait(lambda: server.position(version) == newest)
        done = export_model("rollback", published.model, "--to", held)
        assert done.code == 0, done.err
        back = published.position
        wait(lambda: server.position(version) == back)
        published.publish()
        time.sleep(1.0)
        assert server.position(version) == back
        _, text = running.get("/status.json")
        assert json.loads(text)["models"][0]["hold"] == back
        assert export_model("resume", published.model).code == 0
        wait(lambda: server.position(version) == published.position)
        newest = published.publish("--rebase")
        wait(lambda: server.position(base_of(published)) == newest)
        newest = published.publish()
        wait(lambda: server.position(base_of(published)) == newest)
        assert not running.of("refused")


def test_a_damaged_delta_is_quarantined_and_a_base_asked_for(
    published: Published, servers: list[Server]
) -> None:
    version = base_of(published)
    with agent(published.model, *(server.address for server in servers)) as running:
        newest = published.publish()
        wait(lambda: all(server.position(version) == newest for server in servers))
        for server in servers:
            server.kill()
        damaged = next(delta for delta in read_log(published.model).deltas if delta.end == newest)
        data = next(damaged.path.glob("delta.data-*"))
        good = data.read_bytes()
        data.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        for server in servers:
            server.start()
        wait(lambda: len({event["replica"] for event in running.of("refused")}) == 2)

        def quarantined() -> dict[str, Any] | None:
            models = json.loads(running.get("/status.json")[1])["models"]
            return next((model for model in models if model["quarantined"]), None)

        model = wait(quarantined)
        assert model["quarantined"][0]["delta"] == f"{damaged.start}-{damaged.end}"
        assert model["base_wanted"]
        assert "--updatable" in running.get("/")[1]
        data.write_bytes(good)


def test_a_replica_that_holds_something_else_is_to_be_started_anew(tmp_path: Path) -> None:
    """It loaded other values at the same position, as no checksum of a file can tell."""
    published = Published(tmp_path, ("--with-digest",))
    published.publish()
    copy = tmp_path / "other" / "ranker"
    shutil.copytree(published.model, copy)
    give_other_values(copy / str(base_of(published)))
    with ExitStack() as stack:
        good, bad = (Server(base, stack=stack).start() for base in (published.model, copy))
        with agent(published.model, good.address, bad.address, more=("--audit-seconds", "0.2")) as running:
            found = wait(lambda: running.of("differs"))
            assert {event["replica"] for event in found} == {bad.address}
            assert running.get("/livez")[0] == 503
            assert (
                f'replica_right{{model="ranker",replica="{bad.address}"}} 0.0' in running.get("/metrics")[1]
            )
            wait(
                lambda: (
                    f'replica_right{{model="ranker",replica="{good.address}"}} 1.0'
                    in running.get("/metrics")[1]
                )
            )
            shutil.rmtree(copy)
            shutil.copytree(published.model, copy)
            bad.kill()
            bad.start()
            wait(lambda: running.get("/livez")[0] == 200)


def give_other_values(version: Path) -> None:
    """Another variable is as good as any, in a bundle whose checksums are right."""
    prefix = version / "variables" / "variables"
    reader = tf.train.load_checkpoint(str(prefix))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    name = next(name for name, value in tensors.items() if value.shape == (23, 3))
    tensors[name] = tensors[name] + np.float32(1)
    shutil.rmtree(version / "variables")
    (version / "variables").mkdir()
    bundles.save(prefix, tensors)


def test_what_is_not_mounted_is_said_and_found_again(published: Published, servers: list[Server]) -> None:
    away = published.model.with_name("away")
    with agent(published.model, servers[0].address) as running:
        wait(lambda: running.get("/readyz")[0] in (200, 503))
        published.model.rename(away)
        try:
            wait(lambda: "is its volume mounted?" in running.get("/readyz")[1])
        finally:
            away.rename(published.model)
        wait(lambda: running.of("seen"))


def test_a_token_guards_all_but_the_probes(published: Published, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    options = ("--token-file", str(token))
    with agent(published.model, "127.0.0.1:9", more=options) as running:
        for path in ("/", "/metrics", "/status.json", "/nowhere"):
            assert running.get(path)[0] == 401
            assert running.get(path, Authorization="Bearer guess")[0] == 401
        assert running.get("/metrics", Authorization="Bearer s3cret")[0] == 200
        assert running.get("/healthz")[0] == 200
        wait(lambda: running.of("failed"))
        status, text = running.get("/readyz")
        assert status == 503
        assert "127.0.0.1" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model-base-path", "gs://b/m", "--target", "h:1"), "gs://"),
        (("--model-base-path", "a/m", "--model-base-path", "b/m", "--target", "h:1"), "twice"),
        (("--model-base-path", "m", "--target", "dns:///"), "is no address"),
        (("--model-base-path", "m", "--target", "h:1", "--token-file", "missing"), "cannot be read"),
    ],
)
def test_what_is_no_fleet_is_a_usage_error(options: tuple[str, ...], message: str) -> None:
    with process("agent", *options, "--port", "0") as started:
        _, err = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 2
    assert message in err
